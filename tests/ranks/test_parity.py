"""The same numbers at every layout: ten steps against one process, and one process against bare Megatron Core."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.ranks.parity_runs import STEPS, train_with_core_loop, train_with_trainer
from tests.support.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp4": (4, {}),
    "dp2+optim": (2, {"data_parallel_sharding_strategy": "optim"}),
    "dp4+optim": (4, {"data_parallel_sharding_strategy": "optim"}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp4+sp": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "pp2 vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2 pp2 sp dp2": (
        8,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "tp2 pp2 sp dp2 optim": (
        8,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "data_parallel_sharding_strategy": "optim",
        },
    ),
    "pp2 vpp2 dp2 optim": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim",
        },
    ),
    "cp2 p2p": (2, {"context_parallel_size": 2}),
    "cp4 p2p": (4, {"context_parallel_size": 4}),
    "cp2 all_gather": (2, {"context_parallel_size": 2, "cp_comm_type": "allgather"}),
    "cp4 a2a": (4, {"context_parallel_size": 4, "cp_comm_type": "a2a"}),
    "cp4 a2a+p2p": (
        4,
        {
            "context_parallel_size": 4,
            "cp_comm_type": "a2a+p2p",
            "hierarchical_context_parallel_sizes": [2, 2],
        },
    ),
    "cp2 one way per layer": (
        2,
        {"context_parallel_size": 2, "cp_comm_type": ["p2p", "all_gather", "a2a", "p2p"]},
    ),
    "cp2 tp2 sp dp2 optim": (
        8,
        {
            "context_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "data_parallel_sharding_strategy": "optim",
        },
    ),
    "cp2 pp2": (4, {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "cp2 pp2 vpp2": (
        4,
        {
            "context_parallel_size": 2,
            "cp_comm_type": "all_gather",
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
    ),
    "layout Et|ttt|L over pp3": (
        3,
        {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et|ttt|L"},
    ),
    "layout Et|tt|t|L over pp2": (
        2,
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt|t|L"},
    ),
    "layout E|tt|tt|L over pp4": (
        4,
        {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "E|t*2|t*2|L"},
    ),
    "layout of names E|tt|tt|L over pp2": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": [["embedding"], ["decoder", "decoder"], ["decoder", "decoder"], ["loss"]],
        },
    ),
    "pp2 one layer per virtual stage": (
        2,
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    ),
}
#: Pairs of what they combine are in the matrix of `test_parity_matrix.py` as well.
RARE = (
    "dp4",
    "dp4+optim",
    "tp4+sp",
    "tp2 pp2 sp dp2",
    "tp2 pp2 sp dp2 optim",
    "cp4 p2p",
    "cp4 a2a+p2p",
    "cp2 tp2 sp dp2 optim",
    "cp2 pp2 vpp2",
    "layout of names E|tt|tt|L over pp2",
    "pp2 one layer per virtual stage",
)

LOSS_TOLERANCE = 5e-6  # absolute, nats
GRAD_NORM_TOLERANCE = 5e-5  # relative


@cache
def single_process(shape: str) -> dict[str, list[float]]:
    return run_ranks(train_with_trainer, 1, shape, 1, {})[0]


def assert_close(found: dict[str, list[float]], expected: dict[str, list[float]], where: str) -> None:
    assert found.keys() >= expected.keys()
    for name in expected:
        relative = name == "grad_norm"
        tolerance = GRAD_NORM_TOLERANCE if relative else LOSS_TOLERANCE
        assert len(found[name]) == len(expected[name]), (where, name)
        for step, (value, reference) in enumerate(zip(found[name], expected[name], strict=True)):
            limit = tolerance * (abs(reference) if relative else 1.0)
            assert abs(value - reference) <= limit, f"{where}: {name} of step {step}: {value!r}, not {reference!r}"


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_single_process_equals_bare_megatron_core(shape: str) -> None:
    expected = run_ranks(train_with_core_loop, 1, shape)[0]
    found = single_process(shape)
    assert len(found["loss"]) == STEPS
    assert found["loss"][-1] < found["loss"][0] - 0.05, "the loss must move, or equal losses prove nothing"
    assert_close(found, expected, "Trainer on one process")


def _cases() -> list[Any]:
    """Every layout with both shapes; what is quick has one shape where both go the same way."""
    return [
        pytest.param(layout, shape, marks=[pytest.mark.slow] if slow else [])
        for layout in LAYOUTS
        for shape in ("gpt2", "llama")
        for slow in [
            layout in RARE
            or (layout.startswith("cp") and shape == "gpt2" and layout != "cp2 p2p")
            or (layout.startswith("layout E|") and shape == "llama")
        ]
    ]


@pytest.mark.parametrize(("layout", "shape"), _cases())
def test_layout_equals_single_process(layout: str, shape: str) -> None:
    assert_equals_single_process(shape, *LAYOUTS[layout], f"{shape} at {layout}")


def assert_equals_single_process(shape: str, world_size: int, strategy: dict[str, Any], where: str) -> None:
    limit_s = 120.0 if world_size < 8 else 270.0  # on two cores many small collectives of eight processes take long
    every_rank = run_ranks(train_with_trainer, world_size, shape, world_size, strategy, timeout_s=limit_s)
    assert_close(every_rank[0], single_process(shape), where)
    for rank, numbers in enumerate(every_rank):
        assert numbers == every_rank[0], f"rank {rank} saw other numbers than rank 0"
