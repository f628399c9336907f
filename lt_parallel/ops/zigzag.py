"""The balanced order in which context parallelism cuts a sequence.

With a causal mask late queries attend to more keys than early ones. So a sequence is cut into 2 x cp equal chunks and
rank r holds chunks r and 2 cp - 1 - r: every rank has the same work. (Megatron Core's `get_batch_on_this_cp_rank` cuts
batches in this way, and its rotary embeddings follow it.) On a rank both chunks lie one after the other, positions
ascending, so a causal mask among a rank's own tokens is the ordinary one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The two chunks that a rank holds.

    Args:
        rank: In the context-parallel group.
        size: Of the group.
    """
    return rank, 2 * size - 1 - rank


def cut(whole: Tensor, rank: int, size: int, dim: int) -> Tensor:
    """A rank's part of a sequence.

    Args:
        whole: The sequence is along `dim`, its length a multiple of 2 x size.
        rank: In the context-parallel group.
        size: Of the group.
        dim: Which one to cut.
    """
    chunks = whole.chunk(2 * size, dim)
    early, late = chunks_of(rank, size)
    return torch.cat((chunks[early], chunks[late]), dim)


def join(parts: list[Tensor], dim: int) -> Tensor:
    """The sequence again, from every rank's part.

    Args:
        parts: In rank order.
        dim: Of the sequence.
    """
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


def place_of(position: int, length: int, size: int) -> tuple[int, int]:
    """Which rank holds a position of the sequence, and where in its part.

    Args:
        position: In the whole sequence.
        length: Of the whole sequence, a multiple of 2 x size.
        size: Of the context-parallel group.
    """
    chunk_length = length // (2 * size)
    chunk, offset = divmod(position, chunk_length)
    early = chunk < size
    return (chunk if early else 2 * size - 1 - chunk), offset if early else chunk_length + offset
