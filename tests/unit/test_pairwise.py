"""The choice of combinations: complete, small, the same every time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.pairwise import feasible_cases, pairs_of, pairwise

FACTORS = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))


@given(FACTORS.filter(lambda factors: len(factors) > 1), st.integers(2, 7))
def test_every_feasible_pair_is_covered_and_no_other(factors: dict[str, list[int]], limit: int) -> None:
    def feasible(case: dict[str, Any]) -> bool:
        return sum(case.values()) <= limit

    def cost(case: dict[str, Any]) -> float:
        return float(sum(case.values()))

    chosen = pairwise(factors, feasible, cost)
    assert all(map(feasible, chosen))
    assert {pair for case in chosen for pair in pairs_of(case)} == {
        pair for case in feasible_cases(factors, feasible) for pair in pairs_of(case)
    }
    assert chosen == pairwise(factors, feasible, cost)
    for index, case in enumerate(chosen):  # each was needed when it was taken
        assert set(pairs_of(case)) - {pair for earlier in chosen[:index] for pair in pairs_of(earlier)}


def test_it_is_far_smaller_than_all_combinations() -> None:
    factors = dict.fromkeys("abcdefgh", (0, 1, 2))
    chosen = pairwise(factors, lambda case: True, lambda case: 0.0)
    assert 9 <= len(chosen) <= 20  # of 6561; two factors alone have 9 pairs


def test_of_equal_cases_the_cheapest_is_taken() -> None:
    (case,) = pairwise({"a": [2], "b": [1]}, lambda case: True, lambda case: case["a"])
    assert case == {"a": 2, "b": 1}
    first, *_ = pairwise({"a": [2, 1], "b": [3, 0]}, lambda case: True, lambda case: case["a"] + case["b"])
    assert first == {"a": 1, "b": 0}
