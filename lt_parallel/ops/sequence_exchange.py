"""Exchanging a cut sequence for cut heads and back, by all-to-all (Jacobs et al. 2023, arXiv:2309.14509).

Before attention each rank has all heads of its part of the sequence; after the exchange it has some heads of the whole
sequence, and attention needs no other rank. Bytes sent by each rank: (cp - 1) / cp of its tensor, each way.

With the order of `lt_parallel.ops.zigzag` the parts of neighbouring ranks join to whole early chunks and whole late
chunks. So a group of all context-parallel ranks gets the sequence in its natural order, and a group of neighbours gets
what one rank of a ring over such groups holds: the two levels of cp_comm_type "a2a+p2p".

Shapes: b batch, n heads, s a rank's part of the sequence, d channels, c ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_parallel.ops.zigzag import cut, join

__all__ = ["heads_to_sequence", "sequence_to_heads"]


def sequence_to_heads(part: Tensor, group: Any) -> Tensor:
    """``[b, n, s, d]`` to ``[b, n / c, c * s, d]``. Collective; differentiable.

    Args:
        part: This rank's part of the sequence, all heads; n is a multiple of c.
        group: The ranks that exchange.
    """
    result: Tensor = _SequenceToHeads.apply(part, group)
    return result


def heads_to_sequence(heads: Tensor, group: Any) -> Tensor:
    """The inverse of `sequence_to_heads`: ``[b, n / c, c * s, d]`` to ``[b, n, s, d]``. Collective; differentiable."""
    result: Tensor = _HeadsToSequence.apply(heads, group)
    return result


def _all_to_all(outgoing: Tensor, group: Any) -> Tensor:
    """Sends slice i along the first dimension to rank i; returns what each rank sent."""
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return incoming


def _to_heads(part: Tensor, group: Any) -> Tensor:
    size = group.size()
    outgoing = torch.stack(part.chunk(size, 1))
    return join(list(_all_to_all(outgoing, group).unbind()), 2)


def _to_sequence(heads: Tensor, group: Any) -> Tensor:
    size = group.size()
    outgoing = torch.stack([cut(heads, rank, size, 2) for rank in range(size)])
    return torch.cat(_all_to_all(outgoing, group).unbind(), 1)


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_heads(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _to_sequence(gradient, ctx.group), None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_sequence(heads, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _to_heads(gradient, ctx.group), None
