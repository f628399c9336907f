"""Every pair of parallel options that fits into 8 processes, against the single process.

The pairs are covered by few cases (`tests/support/pairwise.py`); the quick tests of layouts are in `test_parity.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from lt_parallel.strategies.fully_sharded import FSDP_STRATEGIES
from tests.ranks.parity_runs import DENSE_SHAPES
from tests.ranks.test_parity import assert_equals_single_process
from tests.support.pairwise import Case, feasible_cases, pairs_of, pairwise

MOST_PROCESSES = 8

FACTORS: dict[str, tuple[Any, ...]] = {
    "shape": tuple(DENSE_SHAPES),
    "tp": (1, 2, 4),
    "sp": (False, True),
    "pp": (1, 2, 4),
    "vpp": (None, 2),
    "cp": (1, 2, 4),
    "cp_comm_type": (None, "p2p", "all_gather", "a2a", "a2a+p2p"),
    "dp": (1, 2, 4),
    "sharding": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
}


def world_size(case: Case) -> int:
    return int(case["tp"] * case["pp"] * case["cp"] * case["dp"])


def feasible(case: Case) -> bool:
    shape, kind = DENSE_SHAPES[case["shape"]], case["cp_comm_type"]
    groups = shape.get("num_query_groups", shape["num_attention_heads"])
    exchanged = {"a2a": case["cp"], "a2a+p2p": 2}.get(kind, 1)  # ranks that hand each other heads
    return (
        1 < world_size(case) <= MOST_PROCESSES
        and (case["tp"] > 1 or not case["sp"])
        and (case["pp"] > 1 or case["vpp"] is None)
        and (case["pp"] == 1 or case["sharding"] not in FSDP_STRATEGIES)
        and (case["cp"] > 1) == (kind is not None)
        and (kind != "a2a+p2p" or case["cp"] == 4)
        and groups // case["tp"] % exchanged == 0
    )


def strategy_of(case: Case) -> dict[str, Any]:
    """Arguments of `MegatronParallelStrategy`."""
    strategy: dict[str, Any] = {
        "tensor_model_parallel_size": case["tp"],
        "sequence_parallel": case["sp"],
        "pipeline_model_parallel_size": case["pp"],
        "virtual_pipeline_model_parallel_size": case["vpp"],
        "context_parallel_size": case["cp"],
        "data_parallel_sharding_strategy": case["sharding"],
    }
    if case["cp_comm_type"] is not None:
        strategy["cp_comm_type"] = case["cp_comm_type"]
    if case["cp_comm_type"] == "a2a+p2p":
        strategy["hierarchical_context_parallel_sizes"] = [2, 2]
    if case["pp"] * (case["vpp"] or 1) == 8:  # more stages than layers
        heads = "m" * DENSE_SHAPES[case["shape"]].get("mtp_num_layers", 0)
        strategy["pipeline_model_parallel_layout"] = f"Et|t|t||t||{heads}|L"
    return strategy


@cache
def cases() -> list[Case]:
    return pairwise(FACTORS, feasible, world_size)


def _name(case: Case) -> str:
    """Its values that aren't the usual ones, such as "llama tp2 sp pp2 optim"."""
    sizes = [f"{name}{case[name]}" for name in ("tp", "pp", "vpp", "cp", "dp") if (case[name] or 1) > 1]
    kinds = [case["cp_comm_type"], case["sharding"] if case["sharding"] != "no_shard" else None]
    return " ".join(filter(None, [case["shape"], *sizes, "sp" if case["sp"] else None, *kinds]))


def test_the_cases_cover_every_pair_that_fits() -> None:
    covered = {pair for case in cases() for pair in pairs_of(case)}
    wanted = {pair for case in feasible_cases(FACTORS, feasible) for pair in pairs_of(case)}
    assert covered == wanted
    # What can't be: written out, so that a mistake in `feasible` shows.
    every = {pair for case in feasible_cases(FACTORS, lambda case: True) for pair in pairs_of(case)}
    impossible = {" ".join(f"{name}={value}" for name, value in pair) for pair in every - wanted}
    assert impossible == {
        "tp=1 sp=True",
        "tp=4 pp=4",
        "tp=4 cp=4",
        "tp=4 dp=4",
        "tp=4 cp_comm_type=a2a",
        "tp=4 cp_comm_type=a2a+p2p",
        "pp=1 vpp=2",
        "pp=4 cp=4",
        "pp=4 dp=4",
        "pp=4 cp_comm_type=a2a+p2p",
        *(f"{name} sharding={kind}" for name in ("pp=2", "pp=4", "vpp=2") for kind in FSDP_STRATEGIES),
        "cp=1 cp_comm_type=p2p",
        "cp=1 cp_comm_type=all_gather",
        "cp=1 cp_comm_type=a2a",
        "cp=1 cp_comm_type=a2a+p2p",
        "cp=2 cp_comm_type=None",
        "cp=2 cp_comm_type=a2a+p2p",
        "cp=4 cp_comm_type=None",
        "cp=4 dp=4",
        "cp_comm_type=a2a+p2p dp=4",
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=_name(case)) for case in cases()])
def test_case_equals_single_process(case: Case) -> None:
    assert_equals_single_process(case["shape"], world_size(case), strategy_of(case), str(case))
