"""What is wrong with a batch of tokens, said before the model runs.

Megatron Core doesn't say it: a vocabulary that is cut over tensor-parallel ranks gives an id outside it a vector of
zeros, and a label outside it a loss that means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def check_batch(
    batch: Mapping[str, Tensor], *, vocab_size: int, max_positions: int | None, sequence_multiple: int
) -> None:
    """Checks ids, positions and length of a micro batch, if it is on the CPU; elsewhere looking would cost a wait.

    Args:
        batch: `tokens`, `labels`, `position_ids` and `loss_mask`, each `[b, s]`.
        vocab_size: Ids are below this.
        max_positions: Positions are below this, None if there is no limit.
        sequence_multiple: Divides s.

    Raises:
        ValueError: One is outside. Labels that `loss_mask` leaves out may be anything.
    """
    tokens, labels = batch["tokens"], batch["labels"]
    if tokens.shape[1] % sequence_multiple:
        raise ValueError(
            f"the batch's tokens {tuple(tokens.shape)} have a sequence length of {tokens.shape[1]}, which must be "
            f"divisible by {sequence_multiple} (tensor_model_parallel_size with sequence_parallel=True, times "
            "2 x context_parallel_size if that is more than 1); pad or cut it"
        )
    if tokens.device.type != "cpu" or tokens.numel() == 0:
        return
    _require_below(tokens, "tokens", vocab_size, f"vocab_size={vocab_size}", "vocab_size")
    if max_positions is not None:
        limit = f"max_position_embeddings={max_positions}"
        _require_below(batch["position_ids"], "position_ids", max_positions, limit, "max_position_embeddings")
    lowest, highest = _range(labels)
    if lowest < 0 or highest >= vocab_size:
        counted = labels[batch["loss_mask"] != 0]
        if counted.numel():
            _require_below(counted, "labels", vocab_size, f"vocab_size={vocab_size}", "vocab_size")


def _range(values: Tensor) -> tuple[int, int]:
    lowest, highest = torch.aminmax(values)
    return int(lowest), int(highest)


def _require_below(values: Tensor, name: str, limit: int, limit_text: str, argument: str) -> None:
    lowest, highest = _range(values)
    if lowest >= 0 and highest < limit:
        return
    fix = "mask it out in loss_mask" if lowest < 0 and name == "labels" else "use the tokenizer that the model is for"
    if lowest >= 0:
        fix += f", or set {argument} to at least {highest + 1}"
    raise ValueError(f"the batch's {name} go from {lowest} to {highest}, but must lie in [0, {limit_text}); {fix}")
