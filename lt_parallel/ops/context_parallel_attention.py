"""Attention over a sequence that is cut over context-parallel ranks, by any of Megatron's `cp_comm_type`s.

| type       | what travels                           | good where                                                    |
|------------|----------------------------------------|---------------------------------------------------------------|
| p2p        | keys and values, around a ring         | sequences are long: transfers hide behind compute             |
| all_gather | keys and values, at once               | they are few (grouped-query attention), or the ring is slow   |
| a2a        | all of them, and the output, by heads  | heads are many and links fast                                 |
| a2a+p2p    | a2a among neighbours, a ring over those | neighbours share a node, and there are more ranks than heads |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lt_parallel.ops.all_gather_attention import all_gather_attention
from lt_parallel.ops.ring_attention import ring_attention
from lt_parallel.ops.sequence_exchange import heads_to_sequence, sequence_to_heads


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    comm_type: str,
    group: Any,
    hierarchical_groups: Sequence[Any] | None,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Softmax attention of this rank's queries to the keys of all ranks. Collective; differentiable.

    Args:
        query: ``[b, n, s, d]``, this rank's part of the sequence in zigzag order.
        key: ``[b, g, s, d]``, n a multiple of g.
        value: ``[b, g, s, e]``.
        comm_type: One of the table's. The a2a ones need n and g to be multiples of the number of ranks that
            exchange heads.
        group: The context-parallel ranks.
        hierarchical_groups: For "a2a+p2p": the neighbours that exchange heads, and the ring over them.
        causal: Whether a query sees only keys up to its own position.
        scale: Factor on the scores.

    Returns:
        ``[b, n, s, e]``.
    """
    if comm_type == "p2p":
        return ring_attention(query, key, value, group, causal=causal, scale=scale)
    if comm_type == "all_gather":
        return all_gather_attention(query, key, value, group, causal=causal, scale=scale)
    if comm_type == "a2a":
        heads = [sequence_to_heads(part, group) for part in (query, key, value)]
        grouped = heads[0].size(1) != heads[1].size(1)
        output = F.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=causal, scale=scale, enable_gqa=grouped
        )
        return heads_to_sequence(output, group)
    assert comm_type == "a2a+p2p" and hierarchical_groups is not None, comm_type
    neighbours, ring = hierarchical_groups
    heads = [sequence_to_heads(part, neighbours) for part in (query, key, value)]
    output = ring_attention(heads[0], heads[1], heads[2], ring, causal=causal, scale=scale)
    return heads_to_sequence(output, neighbours)
