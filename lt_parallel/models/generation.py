"""Continuing sequences with a model that is cut over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lt_parallel.ops.zigzag import place_of

if TYPE_CHECKING:
    from lt_parallel.strategies.megatron import MegatronParallelStrategy


class LanguageModel(Protocol):
    """What is needed of a module: logits of its active chunk, and the sizes that bound its tokens."""

    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    training: bool

    @property
    def megatron(self) -> MegatronParallelStrategy:
        """The strategy that runs its chunks."""

    @property
    def sequence_multiple(self) -> int:
        """What a sequence's length must be a multiple of."""

    @property
    def device(self) -> torch.device:
        """Where its tokens go."""

    def __call__(self, batch: Any, labels: bool = True) -> Tensor:
        """Output of the active chunk; logits on the last one without labels."""

    def train(self, mode: bool = True) -> Any:
        """Switches dropout on or off."""

    def eval(self) -> Any:
        """Switches dropout off."""


@torch.no_grad()
def generate(
    module: LanguageModel, tokens: Tensor, max_new_tokens: int, *, temperature: float, top_k: int, seed: int | None
) -> Tensor:
    """See `GPTModule.generate`. Each new token costs one forward of the whole sequence."""
    _check(module, tokens, max_new_tokens, temperature, top_k)
    strategy = module.megatron
    generator = torch.Generator().manual_seed(strategy.seed if seed is None else seed)
    was_training = module.training
    module.eval()
    tokens = tokens.to(module.device)
    for _ in range(max_new_tokens):
        logits = _last_logits(module, tokens)
        tokens = torch.cat([tokens, _choose(logits, temperature, top_k, generator).to(tokens.device)], dim=1)
    module.train(was_training)
    return tokens


def _check(module: LanguageModel, tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must have shape [b, s] with s > 0, not {tuple(tokens.shape)}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= module.vocab_size:
        raise ValueError(
            f"token ids must lie in [0, vocab_size={module.vocab_size}); found {int(tokens.min())} to "
            f"{int(tokens.max())}"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
    length = tokens.shape[1] + max_new_tokens
    if length > module.max_position_embeddings:
        raise ValueError(
            f"{tokens.shape[1]} prompt tokens + max_new_tokens={max_new_tokens} = {length} exceed "
            f"max_position_embeddings={module.max_position_embeddings}"
        )
    if temperature < 0 or top_k < 0:
        raise ValueError(f"temperature={temperature} and top_k={top_k} must not be negative")


def _last_logits(module: LanguageModel, tokens: Tensor) -> Tensor:
    """Logits `[b, vocabulary]` after the last token, in float32 on the CPU, equal on all ranks of the model."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    strategy = module.megatron
    groups = strategy.groups
    length = tokens.shape[1]
    # The sequence is cut evenly; what is added comes after the last token and can't be seen by it.
    padded = nn.functional.pad(tokens, (0, -length % module.sequence_multiple))
    owner, place = place_of(length - 1, padded.shape[1], groups.cp.size()) if groups.cp.size() > 1 else (0, length - 1)
    positions = torch.arange(padded.shape[1], device=tokens.device).clamp(max=module.max_position_embeddings - 1)
    positions = positions.expand_as(padded)
    found: list[Tensor] = []

    def keep(output: Tensor, batch: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
        found[:] = [output[:, place]]
        zero = torch.zeros((), device=output.device)
        return zero, zero, {}

    strategy.global_step.forward_chunks(
        {"tokens": padded, "position_ids": positions}, lambda batch: module(batch, labels=False), keep
    )
    shape = (tokens.shape[0], module.padded_vocab_size)
    if found:
        last_token = found[0].contiguous()
        if groups.cp.size() > 1:
            torch.distributed.broadcast(
                last_token, src=torch.distributed.get_global_rank(groups.cp, owner), group=groups.cp
            )
        logits = gather_from_tensor_model_parallel_region(last_token, group=groups.tp).float()
    else:
        logits = torch.empty(shape, device=tokens.device)
    if groups.pp.size() > 1:
        last = torch.distributed.get_global_rank(groups.pp, groups.pp.size() - 1)
        torch.distributed.broadcast(logits, src=last, group=groups.pp)
    return logits[:, : module.vocab_size].cpu()


def _choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """Next token ids `[b, 1]`; the same on every rank, as the generator and the logits are."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
