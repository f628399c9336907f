"""Attention over a sequence that is cut over ranks: every rank gathers all keys and values (cp_comm_type "all_gather").

One all-gather before the attention instead of a ring beside it: simple, and good where keys and values are few
(grouped-query attention). Whole keys and values of one layer are in memory at a time; the backward pass gathers them
again. Under a causal mask each of a rank's two query chunks (`lt_parallel.ops.zigzag`) attends to the keys before it
and to its own.

Bytes received by each rank: forward (cp - 1) x (its keys and values); backward the same, and as much for the gradients'
reduce-scatter (in fp32).

Shapes: b batch, s this rank's part of the sequence, n query heads, g key/value heads, d channels of query and key, e of
value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_parallel.ops.block_attention import Block, accumulate, attend_block, block_gradients
from lt_parallel.ops.zigzag import chunks_of, cut, join

__all__ = ["all_gather_attention"]


def all_gather_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Any, *, causal: bool, scale: float
) -> Tensor:
    """Softmax attention of this rank's queries to the keys of all ranks. Collective; differentiable.

    Args:
        query: ``[b, n, s, d]``, in zigzag order.
        key: ``[b, g, s, d]``.
        value: ``[b, g, s, e]``.
        group: The context-parallel ranks.
        causal: Whether a query sees only keys up to its own position.
        scale: Factor on the scores.

    Returns:
        ``[b, n, s, e]`` in the query's dtype.
    """
    result: Tensor = _AllGatherAttention.apply(query, key, value, group, causal, scale)
    return result


def _gathered(tensor: Tensor, group: Any) -> Tensor:
    """The whole sequence ``[b, g, cp * s, d]``."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return join(parts, 2)


def _returned(whole: Tensor, group: Any) -> Tensor:
    """This rank's part of the sum over ranks of gradients of the whole sequence."""
    size = group.size()
    parts = [cut(whole, rank, size, 2) for rank in range(size)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


class _Piece:
    """Some of a rank's queries, and a block of keys that they attend to."""

    def __init__(self, rows: slice, keys: slice, causal: bool) -> None:
        self.rows, self.keys, self.causal = rows, keys, causal


def _pieces(rank: int, size: int, length: int, causal: bool) -> list[list[_Piece]]:
    """For each of a rank's query chunks the blocks of keys that it attends to."""
    if not causal:
        return [[_Piece(slice(0, length), slice(0, size * length), causal=False)]]
    chunk = length // 2
    pieces = []
    for place, number in enumerate(chunks_of(rank, size)):
        rows = slice(place * chunk, (place + 1) * chunk)
        before = slice(0, number * chunk)
        own = slice(number * chunk, (number + 1) * chunk)
        earlier = [_Piece(rows, before, causal=False)] if number else []
        pieces.append([*earlier, _Piece(rows, own, causal=True)])
    return pieces


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, causal: bool, scale: float) -> Tensor:
        keys, values = _gathered(key, group), _gathered(value, group)
        outputs, lses = [], []
        for blocks in _pieces(group.rank(), group.size(), query.size(2), causal):
            whole: Block | None = None
            for piece in blocks:
                seen = (keys[:, :, piece.keys], values[:, :, piece.keys])
                block = attend_block(query[:, :, piece.rows], *seen, causal=piece.causal, scale=scale)
                whole = accumulate(whole, block)
            assert whole is not None
            outputs.append(whole.output)
            lses.append(whole.lse)
        output = torch.cat(outputs, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, torch.cat(lses, 2))
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        group = ctx.group
        keys, values = _gathered(key, group), _gathered(value, group)
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        grad_keys, grad_values = (torch.zeros_like(whole, dtype=lse.dtype) for whole in (keys, values))
        for blocks in _pieces(group.rank(), group.size(), query.size(2), ctx.causal):
            for piece in blocks:
                rows = (slice(None), slice(None), piece.rows)
                part = block_gradients(
                    grad_output[rows].contiguous(),
                    query[rows],
                    keys[:, :, piece.keys],
                    values[:, :, piece.keys],
                    Block(output[rows].contiguous(), lse[rows].contiguous()),
                    causal=piece.causal,
                    scale=ctx.scale,
                )
                grad_query[rows] += part[0]
                grad_keys[:, :, piece.keys] += part[1]
                grad_values[:, :, piece.keys] += part[2]
        grad_key, grad_value = (_returned(whole, group) for whole in (grad_keys, grad_values))
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None
