"""Mixtures of experts: ten steps at every layout against one process, their routers' losses included."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from lt_parallel import ExpertDispatch, option_rules
from lt_parallel.expert_rules import flex_dispatch_is_in_bf16
from tests.ranks import deepep_over_gloo
from tests.ranks.parity_runs import MOE_SHAPES, train_with_trainer
from tests.ranks.test_parity import assert_close, assert_equals_single_process, single_process
from tests.support.ranks import run_ranks

EP2 = {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ONE_ETP = {"expert_tensor_parallel_size": 1}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, EP2),
    "ep4": (4, {"expert_model_parallel_size": 4}),
    "ep2 of dp4": (4, EP2),
    "ep2 tp2 sp": (4, {**EP2, **TP2}),
    "ep2 over tp2 sp": (2, {**EP2, **TP2, **ONE_ETP}),
    "ep2 tp2 sp with expert tp2": (4, {**EP2, **TP2, "expert_tensor_parallel_size": 2}),
    "ep2 pp2": (4, {**EP2, "pipeline_model_parallel_size": 2}),
    "ep2 pp2 vpp2": (4, {**EP2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "ep2 over cp2": (2, {**EP2, "context_parallel_size": 2}),
    "ep2 cp2 all_gather": (4, {**EP2, "context_parallel_size": 2, "cp_comm_type": "all_gather"}),
    "ep2 cp2 a2a": (2, {**EP2, "context_parallel_size": 2, "cp_comm_type": "a2a"}),
    "ep2 dp4 optim": (4, {**EP2, "data_parallel_sharding_strategy": "optim"}),
    "ep2 dp4 optim_grads": (4, {**EP2, "data_parallel_sharding_strategy": "optim_grads"}),
    "ep2 dp4 optim_grads_params": (4, {**EP2, "data_parallel_sharding_strategy": "optim_grads_params"}),
    "tp2 sp": (2, TP2),
    "dp2": (2, {}),
    "ep2 tp2 sp pp2 optim": (
        8,
        {**EP2, **TP2, "pipeline_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"},
    ),
}
#: What the quick tests run: each way of sharing experts with one of the models.
QUICK = {
    ("ep2", "mixtral"),
    ("ep2 over tp2 sp", "deepseek_v3"),
    ("ep2 tp2 sp with expert tp2", "mixtral"),
    ("ep2 pp2", "deepseek_v3"),
    ("ep2 over cp2", "qwen3_moe"),
    ("ep2 dp4 optim", "qwen3_moe"),
}


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        pytest.param(layout, shape, marks=[pytest.mark.slow] * ((layout, shape) not in QUICK))
        for layout in LAYOUTS
        for shape in MOE_SHAPES
    ],
)
def test_layout_equals_single_process(layout: str, shape: str) -> None:
    assert_equals_single_process(shape, *LAYOUTS[layout], f"{shape} at {layout}")


def test_the_losses_of_routers_are_logged_by_layer() -> None:
    numbers = single_process("mixtral")
    for name in ("seq_load_balancing_loss", "z_loss"):
        layers = [numbers[f"moe/{name}_layer_{layer}"] for layer in range(4)]
        assert len(set(map(tuple, layers))) == 4, "each layer has its own"
        assert numbers[name] == pytest.approx([sum(values) / 4 for values in zip(*layers, strict=True)], rel=1e-6)
        assert all(value > 0 for value in numbers[name])
    deepseek = single_process("deepseek_v3")
    named = {name for name in deepseek if name.startswith("moe/")}
    # The first layer is dense; the head of multi-token prediction is layer 4.
    assert named == {f"moe/seq_load_balancing_loss_layer_{layer}" for layer in (1, 2, 3, 4)}


def dispatched(shape: str, world_size: int, dispatcher: Any, strategy: dict[str, Any]) -> dict[str, list[float]]:
    """As `train_with_trainer`; "flex" on a stand-in for DeepEP, in fp32, which the real one doesn't take."""
    if dispatcher == "flex":
        option_rules.RULES = tuple(rule for rule in option_rules.RULES if rule is not flex_dispatch_is_in_bf16)
        deepep_over_gloo.install(bf16_only=False)
    numbers = train_with_trainer(shape, world_size, strategy, callbacks=[ExpertDispatch(dispatcher)])
    assert (deepep_over_gloo.calls["dispatch"] > 0) is (dispatcher == "flex")
    return numbers


DISPATCHED = [
    ("ep2", "mixtral", "alltoall"),
    ("ep2", "mixtral", "flex"),
    ("ep2", "qwen3_moe", "alltoall"),
    ("ep2", "qwen3_moe", "flex"),
    ("ep2", "deepseek_v3", "alltoall"),
    ("ep2", "deepseek_v3", "flex"),
    ("ep2 dp4 optim", "deepseek_v3", "flex"),
    ("ep2 over tp2 sp", "deepseek_v3", "alltoall"),
    ("ep2 cp2 all_gather", "mixtral", "alltoall"),
]


@pytest.mark.parametrize(
    ("layout", "shape", "dispatcher"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case != ("ep2", "deepseek_v3", "flex"))) for case in DISPATCHED],
)
def test_other_dispatchers_equal_single_process(layout: str, shape: str, dispatcher: str) -> None:
    world_size, strategy = LAYOUTS[layout]
    for rank in run_ranks(dispatched, world_size, shape, world_size, dispatcher, strategy):
        assert_close(rank, single_process(shape), f"{shape} at {layout} by {dispatcher}")


#: Losses of the routers that depend on how work is cut are compared where it is cut alike.
AUX = {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [1e-2, 1e-2]}


@cache
def one_micro_batch() -> dict[str, list[float]]:
    model = {"moe": {**MOE_SHAPES["mixtral"]["moe"], **AUX}}
    return run_ranks(train_with_trainer, 1, "mixtral", 1, {"num_microbatches": 1}, model)[0]


@pytest.mark.parametrize("layout", ["tp2 sp", pytest.param("ep2 cp2 a2a", marks=pytest.mark.slow)])
def test_losses_over_a_micro_batch(layout: str) -> None:
    world_size, strategy = LAYOUTS[layout]
    model = {"moe": {**MOE_SHAPES["mixtral"]["moe"], **AUX}}
    strategy = {**strategy, "num_microbatches": 1}
    for rank in run_ranks(train_with_trainer, world_size, "mixtral", world_size, strategy, model):
        assert_close(rank, one_micro_batch(), layout)
