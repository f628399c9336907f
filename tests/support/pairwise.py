"""Few combinations of many options in which every pair of their values occurs that can occur at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def feasible_cases(factors: Mapping[str, Sequence[Any]], feasible: Callable[[Case], bool]) -> list[Case]:
    """All combinations that can be."""
    every = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in every if feasible(case)]


def pairs_of(case: Case) -> Iterator[Pair]:
    """Its values, two at a time."""
    return itertools.combinations(case.items(), 2)


def pairwise(
    factors: Mapping[str, Sequence[Any]], feasible: Callable[[Case], bool], cost: Callable[[Case], float]
) -> list[Case]:
    """Greedy and deterministic: always the case with most pairs that are still missing, of equal ones the cheapest.

    Args:
        factors: Values of each option, by name.
        feasible: Whether a combination can be; a pair that is in none which can is not asked for.
        cost: Of a case.

    Returns:
        The cases, those with most new pairs first.
    """
    candidates = sorted(feasible_cases(factors, feasible), key=cost)
    pairs = [frozenset(pairs_of(case)) for case in candidates]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(candidates)), key=lambda index: len(pairs[index] & missing))
        chosen.append(candidates[best])
        missing -= pairs[best]
    return chosen
