"""Perplexity and token accuracy of a language model as torchmetrics, right however the model is cut.

Each rank adds what it sees, and `compute` sums over all ranks of the job. Tensor-parallel ranks see the same tokens and
so count them equally often, which a ratio doesn't feel; ranks of earlier pipeline stages see none and add nothing;
data and context parallel ranks see different tokens. Shapes: b micro batch, s sequence, v padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class _TokenMean(Metric):
    """A sum over tokens and their number, each over all ranks."""

    is_differentiable = False
    full_state_update = False
    total: Tensor
    num_tokens: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("total", "num_tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, values: Tensor, mask: Tensor) -> None:
        weights = mask.to(torch.float64)
        self.total += (values.to(torch.float64) * weights).sum()
        self.num_tokens += weights.sum()

    @property
    def _mean(self) -> Tensor:
        return (self.total / self.num_tokens).float()


class Perplexity(_TokenMean):
    """exp(mean loss per token), of the tokens that the mask lets count; NaN without any.

    Unlike `torchmetrics.text.Perplexity` it takes losses, so logits that are cut over ranks needn't be gathered.
    """

    higher_is_better = False

    def update(self, losses: Tensor, mask: Tensor) -> None:
        """Adds tokens.

        Args:
            losses: Cross entropy per token in nats, `[b, s]`.
            mask: 1 where a token counts, else 0, `[b, s]`.
        """
        self._add(losses, mask)

    def compute(self) -> Tensor:
        """Over all ranks; scalar. Collective."""
        return self._mean.exp()


class TokenAccuracy(_TokenMean):
    """Share of the tokens for which the likeliest one is right; NaN without any."""

    higher_is_better = True

    def update(self, predictions: Tensor, labels: Tensor, mask: Tensor) -> None:
        """Adds tokens.

        Args:
            predictions: Token ids, `[b, s]`, e.g. of `vocab_parallel_argmax`.
            labels: The right ids, `[b, s]`.
            mask: 1 where a token counts, else 0, `[b, s]`.
        """
        self._add(predictions == labels, mask)

    def compute(self) -> Tensor:
        """Over all ranks; scalar. Collective."""
        return self._mean


def vocab_parallel_argmax(logits: Tensor, tp_group: Any) -> Tensor:
    """The likeliest token where each tensor-parallel rank holds a part of the vocabulary; of equals the first.

    Two all-reduces of `[b, s]`, instead of gathering `[b, s, v]`.

    Args:
        logits: This rank's columns, `[b, s, v / tp]`.
        tp_group: The tensor-parallel ranks.

    Returns:
        Token ids `[b, s]`, equal on all ranks of the group.
    """
    highest, ids = logits.float().max(dim=-1)
    ids += tp_group.rank() * logits.shape[-1]
    if tp_group.size() == 1:
        return ids
    best = highest.clone()
    torch.distributed.all_reduce(best, op=torch.distributed.ReduceOp.MAX, group=tp_group)
    ids = ids.masked_fill(highest < best, torch.iinfo(ids.dtype).max)
    torch.distributed.all_reduce(ids, op=torch.distributed.ReduceOp.MIN, group=tp_group)
    return ids
