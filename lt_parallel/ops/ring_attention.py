"""Attention over a sequence that is cut over ranks: keys and values travel around a ring (cp_comm_type "p2p").

Liu et al. 2023, arXiv:2310.01889, with the balanced order of `lt_parallel.ops.zigzag`. With cp ranks each rank meets
cp blocks of keys and values: its own, then its predecessor's, and so on; the next block is received while this one is
attended to. Under a causal mask a rank sees of its own block what comes earlier, of an earlier rank's block the early
half only (by all queries), of a later rank's the whole (by the late half of the queries): the same work each time.

In the backward pass keys, values and their gradients travel, the gradients one step further, so that they end at home.

Bytes sent by each rank: forward (cp - 1) x (its keys and values); backward the same plus cp x (their gradients, fp32).

Shapes: b batch, s this rank's part of the sequence, n query heads, g key/value heads, d channels of query and key, e of
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_parallel.ops.block_attention import Block, accumulate, attend_block, block_gradients

__all__ = ["ring_attention"]


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: Any, *, causal: bool, scale: float) -> Tensor:
    """Softmax attention of this rank's queries to the keys of all ranks. Collective; differentiable.

    Args:
        query: ``[b, n, s, d]``; with `causal` in zigzag order.
        key: ``[b, g, s, d]``.
        value: ``[b, g, s, e]``.
        group: The context-parallel ranks.
        causal: Whether a query sees only keys up to its own position.
        scale: Factor on the scores.

    Returns:
        ``[b, n, s, e]`` in the query's dtype.
    """
    result: Tensor = _RingAttention.apply(query, key, value, group, causal, scale)
    return result


class _Ring:
    """Passes tensors on to the next rank of a ring and receives those of the previous one.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Any) -> None:
        rank, size = group.rank(), group.size()
        self._group = group
        self._next = dist.get_global_rank(group, (rank + 1) % size)
        self._previous = dist.get_global_rank(group, (rank - 1) % size)
        self._pending: list[Any] = []
        self._received: list[Tensor] = []

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Begins to send these and to receive as many of the same shapes."""
        if self._group.size() == 1:
            self._received = list(tensors)
            return
        self._received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor.contiguous(), self._next, self._group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, self._previous, self._group) for tensor in self._received]
        self._pending = dist.batch_isend_irecv(operations)

    def finish(self) -> list[Tensor]:
        """Waits for what `start` began; returns what arrived."""
        for work in self._pending:
            work.wait()
        return self._received


class _View:
    """Which of its queries a rank lets attend to which keys of another rank's block."""

    def __init__(self, rank: int, source: int, causal: bool) -> None:
        self.causal = causal and source == rank
        self._late_queries = causal and source > rank
        self._early_keys = causal and source < rank

    def queries(self, tensor: Tensor) -> Tensor:
        """The rows along dimension 2 that take part."""
        return tensor[:, :, tensor.size(2) // 2 :] if self._late_queries else tensor

    def keys(self, tensor: Tensor) -> Tensor:
        """As `queries`, of keys or values."""
        return tensor[:, :, : tensor.size(2) // 2] if self._early_keys else tensor


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, causal: bool, scale: float) -> Tensor:
        rank, size = group.rank(), group.size()
        ring = _Ring(group)
        whole: Block | None = None
        block = [key.contiguous(), value.contiguous()]
        for step in range(size):
            if step < size - 1:
                ring.start(block)
            view = _View(rank, (rank - step) % size, causal)
            seen = [view.keys(tensor) for tensor in block]
            part = attend_block(view.queries(query), *seen, causal=view.causal, scale=scale)
            whole = _accumulate_rows(whole, part, view)
            del part, seen  # else they would be there beside the next step's
            if step < size - 1:
                block = ring.finish()
        assert whole is not None
        output = whole.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, whole.lse)
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        rank, size = ctx.group.rank(), ctx.group.size()
        block_ring, gradient_ring = _Ring(ctx.group), _Ring(ctx.group)
        grad_output = grad_output.contiguous()
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        block = [key.contiguous(), value.contiguous()]
        for step in range(size):
            if step < size - 1:
                block_ring.start(block)
            view = _View(rank, (rank - step) % size, ctx.causal)
            whole = Block(view.queries(output).contiguous(), view.queries(lse).contiguous())
            part = block_gradients(
                view.queries(grad_output).contiguous(),
                view.queries(query),
                view.keys(block[0]),
                view.keys(block[1]),
                whole,
                causal=view.causal,
                scale=ctx.scale,
            )
            view.queries(grad_query).add_(part[0])
            # Gradients of the block at hand come one step behind it, with the previous ranks' shares in them.
            arrived = gradient_ring.finish() if step else [torch.zeros_like(t, dtype=lse.dtype) for t in block]
            for total, share in zip(arrived, part[1:], strict=True):
                view.keys(total).add_(share)
            del part, share, whole  # else they would be there beside the next step's
            gradient_ring.start(arrived)
            if step < size - 1:
                block = block_ring.finish()
        grad_key, grad_value = gradient_ring.finish()
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _accumulate_rows(whole: Block | None, part: Block, view: _View) -> Block:
    """Adds a block that perhaps only some queries attended to."""
    if whole is None:
        return accumulate(None, part)
    accumulate(Block(view.queries(whole.output), view.queries(whole.lse)), part)  # the other queries' rows stay
    return whole
