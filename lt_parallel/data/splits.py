"""Holding documents out for validation and test.

Documents are ordered by a hash of their bytes and taken until the wanted share of tokens is reached: the choice doesn't
depend on file names, order or machine, and copies of one document are taken together or not at all. Documents larger
than the share can't be taken; if that leaves the split less than half full (one single file is the common case), the
rest is cut off the end of the largest document (of each of its copies).
"""

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "val", "test")
_FULL_ENOUGH = 0.9
_TOO_EMPTY = 0.5

Segments = NDArray[np.int64]


def split_documents(
    offsets: NDArray[np.int64], hashes: NDArray[np.uint64], val_fraction: float, test_fraction: float
) -> dict[str, Segments]:
    """Divide the tokens of a corpus.

    Args:
        offsets: int64 [documents + 1], starts of the documents.
        hashes: uint64 [documents].
        val_fraction: Share of the tokens to hold out for validation, in [0, 1).
        test_fraction: The same for test.

    Returns:
        For train, val and test the token ranges [start, stop) in ascending order: int64 [ranges, 2].
    """
    start, stop = np.array(offsets[:-1]), np.array(offsets[1:])
    values, group_of_document = np.unique(hashes, return_inverse=True)
    group_tokens = np.zeros(len(values), dtype=np.int64)
    np.add.at(group_tokens, group_of_document, stop - start)
    group_owner = np.zeros(len(values), dtype=np.int8)
    cuts: dict[int, Segments] = {}
    for split, fraction in ((1, val_fraction), (2, test_fraction)):
        budget = int(fraction * int(offsets[-1]))
        missing = _take_groups(split, budget, group_tokens, group_owner)
        if missing > _TOO_EMPTY * budget:
            largest = int(np.argmax(np.where(group_owner == 0, group_tokens, 0)))
            copies = np.flatnonzero(group_of_document == largest)
            each = missing // len(copies)
            cuts[split] = np.stack([stop[copies] - each, stop[copies]], axis=1)[: len(copies) if each else 0]
            stop[copies] -= each
            group_tokens[largest] -= each * len(copies)
    owner = group_owner[group_of_document]
    ranges = {}
    for split, name in enumerate(SPLITS):
        own = np.stack([start[owner == split], stop[owner == split]], axis=1)
        ranges[name] = _merge(np.concatenate([own, cuts[split]]) if split in cuts else own)
    return ranges


def _take_groups(split: int, budget: int, tokens: NDArray[np.int64], owner: NDArray[np.int8]) -> int:
    """Give free groups of equal documents to a split, in hash order, while they fit; returns the tokens missing."""
    missing = budget
    for group, size in enumerate(tokens):
        if missing <= (1 - _FULL_ENOUGH) * budget:
            break
        if owner[group] == 0 and size <= missing:
            owner[group] = split
            missing -= int(size)
    return missing


def _merge(ranges: Segments) -> Segments:
    """Sort ranges and join the ones that touch, so that reading crosses as few borders as possible."""
    if len(ranges) == 0:
        return ranges.reshape(0, 2)
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    begins = np.flatnonzero(np.r_[True, ranges[1:, 0] != ranges[:-1, 1]])
    ends = np.r_[begins[1:] - 1, len(ranges) - 1]
    return np.stack([ranges[begins, 0], ranges[ends, 1]], axis=1)
