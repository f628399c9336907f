"""`ExpertDispatch`: however tokens travel to their experts, the numbers are those of one process.

"flex" runs as Megatron Core has it, on a stand-in for DeepEP (`deepep_over_gloo.py`). Which expert a token visits is
forced by a bias on the choice of experts where a case is about experts or ranks that get no tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lt_parallel import ExpertDispatch, option_rules
from lt_parallel.expert_rules import flex_dispatch_is_in_bf16
from lt_parallel.models import GPTModule
from tests.ranks import deepep_over_gloo
from tests.ranks.parity_runs import (
    LLAMA,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.support.ranks import run_ranks

DISPATCHERS = ("allgather", "alltoall", "flex")
EXPERTS, LAYERS, STEPS, GLOBAL_BATCH = 4, 2, 3, 8
MODEL = {**LLAMA, **OPTIMIZER, "num_query_groups": 4, "num_layers": LAYERS}
MOE = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 96}
#: With it a bias chooses the experts, and the weights of the chosen ones stay the router's.
BIASED = {**MOE, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
BIASED |= {"moe_router_load_balancing_type": "none", "moe_router_bias_update_rate": 0.0}

#: name: (fields of the experts, bias of the choice, sequences of a micro batch)
CASES: dict[str, tuple[dict[str, Any], list[float] | None, int]] = {
    "free": ({**MOE, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.02}, None, 2),
    "an idle expert": (BIASED, [-9.0, 0.0, 0.0, 0.0], 2),
    "an idle rank": (BIASED, [9.0, 9.0, 0.0, 0.0], 2),
    "one busy expert": ({**BIASED, "moe_router_topk": 1}, [0.0, 0.0, 9.0, 0.0], 2),
    "dropped": ({**MOE, "moe_expert_capacity_factor": 0.75}, None, 1),
    "dropped, an idle rank": ({**BIASED, "moe_expert_capacity_factor": 0.75}, [9.0, 9.0, 0.0, 0.0], 1),
    "dropped by position": (
        {**MOE, "moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"},
        None,
        1,
    ),
    "dropped and padded": (
        {**MOE, "moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": True},
        None,
        1,
    ),
    "weights in fp64": ({**MOE, "moe_router_dtype": "fp64"}, None, 2),
    "one after the other": ({**BIASED, "moe_grouped_gemm": False}, [9.0, 0.0, 0.0, -9.0], 2),
}
#: name: (ranks, strategy)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep4": (4, {"expert_model_parallel_size": 4}),
    "tp2 ep2": (
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "etp2 ep2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    ),
    "pp2 ep2": (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
}


class ChosenExperts(L.Callback):
    """Sets the bias of every layer's choice, and counts the tokens that come to this rank's experts in training."""

    def __init__(self, bias: list[float] | None) -> None:
        self._bias = bias
        self.tokens: dict[int, int] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, module in pl_module.named_modules():
            if self._bias is not None and name.endswith(".mlp.router"):
                module.expert_bias.copy_(torch.tensor(self._bias))
            if name.endswith(".mlp"):
                module.experts.register_forward_pre_hook(self._count(module.local_expert_indices, module))

    def _count(self, indices: list[int], layer: Any) -> Any:
        def count(experts: Any, arguments: Any) -> None:
            if layer.training:
                for index, number in zip(indices, arguments[1], strict=True):
                    self.tokens[index] = self.tokens.get(index, 0) + int(number)

        return count


def train(
    case: str, dispatcher: str | None, strategy: dict[str, Any], ranks: int, precision: str = "32-true"
) -> dict[str, Any]:
    """Loss, gradient norm and validation loss of a few steps, and how many tokens each expert of this rank got."""
    moe, bias, micro_batch = CASES[case]
    if precision != "32-true":
        moe = {**moe, "moe_router_dtype": "fp32"}
    L.seed_everything(SEED, verbose=False)
    numbers, chosen = StepNumbers(), ChosenExperts(bias)
    dispatch = [] if dispatcher is None else [ExpertDispatch(dispatcher)]  # type: ignore[arg-type]
    trainer = build_trainer(
        numbers,
        {"global_batch_size": GLOBAL_BATCH, **strategy},
        devices=ranks,
        max_steps=STEPS,
        val_check_interval=STEPS,
        limit_val_batches=1,
        precision=precision,
        callbacks=[chosen, *dispatch],
    )
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, moe=moe, **MODEL)
    trainer.fit(
        module,
        DataLoader(Sequences(), batch_size=micro_batch, shuffle=True),
        DataLoader(Sequences(16), batch_size=micro_batch),
    )
    reported = numbers.numbers()
    return {name: reported[name] for name in ("loss", "grad_norm", "val_loss")} | {"tokens": chosen.tokens}


Run = tuple[str, str | None]


def train_all(runs: list[Run], ranks: int, strategy: dict[str, Any]) -> dict[Run, dict[str, Any]]:
    """Each case by each dispatcher, in fp32, which the kernels behind "flex" don't take and the stand-in does."""
    option_rules.RULES = tuple(rule for rule in option_rules.RULES if rule is not flex_dispatch_is_in_bf16)
    found = {}
    for case, dispatcher in runs:
        if dispatcher == "flex":
            deepep_over_gloo.install(bf16_only=False)
        found[case, dispatcher] = train(case, dispatcher, strategy, ranks)
        assert (deepep_over_gloo.calls["dispatch"] > 0) is (dispatcher == "flex")
        deepep_over_gloo.calls.clear()
    return found


@cache
def references() -> dict[str, dict[str, Any]]:
    """By case one process, with Megatron Core's own choice of dispatcher."""
    found = run_ranks(train_all, 1, [(case, None) for case in CASES], 1, {})[0]
    return {case: result for (case, _), result in found.items()}


def trained(layout: str, *cases: str) -> dict[Run, list[dict[str, Any]]]:
    """By case and dispatcher what each rank says; all in the same processes, which start once."""
    ranks, strategy = LAYOUTS[layout]
    runs = [
        (case, dispatcher)
        for case in cases
        for dispatcher in DISPATCHERS
        if not (dispatcher == "flex" and CASES[case][0].get("moe_pad_expert_input_to_capacity"))
    ]
    everywhere = run_ranks(train_all, ranks, runs, ranks, strategy, timeout_s=240)
    return {run: [of_rank[run] for of_rank in everywhere] for run in runs}


def tokens(of_ranks: list[dict[str, Any]], layout: str) -> list[int]:
    """Tokens of each expert, which ranks that cut an expert's matrices all have."""
    etp = 2 if layout == "etp2 ep2" else 1
    total = [sum(rank["tokens"].get(expert, 0) for rank in of_ranks) for expert in range(EXPERTS)]
    assert all(number % etp == 0 for number in total)
    return [number // etp for number in total]


def assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(actual["loss"]) == STEPS and len(actual["val_loss"]) == 1
    assert actual["loss"] == pytest.approx(expected["loss"], abs=5e-6)
    assert actual["val_loss"] == pytest.approx(expected["val_loss"], abs=5e-6)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-5)


def assert_equals_one_process(layout: str, *cases: str) -> None:
    found = trained(layout, *cases)
    for (case, dispatcher), of_ranks in found.items():
        print(f"{layout}: {case} by {dispatcher}")  # shown with a failure
        expected = references()[case]
        for rank in of_ranks:
            assert_close(rank, expected)
        assert tokens(of_ranks, layout) == tokens([expected], "one"), dispatcher


ROUTED = STEPS * GLOBAL_BATCH * SEQ_LENGTH * LAYERS  # tokens of all layers and steps


def test_each_case_is_what_its_name_says() -> None:
    counts = {case: tokens([references()[case]], "one") for case in CASES}
    assert min(counts["free"]) > 0 and len(set(counts["free"])) > 1 and sum(counts["free"]) == 2 * ROUTED
    assert counts["an idle expert"][0] == 0 and min(counts["an idle expert"][1:]) > 0
    assert counts["an idle rank"] == [ROUTED, ROUTED, 0, 0]
    assert counts["one busy expert"] == [0, 0, ROUTED, 0]
    busiest, *others, idle = counts["one after the other"]
    assert busiest == ROUTED and min(others) > 0 and idle == 0
    capacity = int(0.75 * 2 * ROUTED / EXPERTS)
    for case in ("dropped", "dropped by position"):
        assert max(counts[case]) <= capacity and sum(counts[case]) < sum(counts["free"])
    assert counts["dropped, an idle rank"] == [capacity, capacity, 0, 0]
    assert counts["dropped and padded"] == [capacity] * EXPERTS
    assert references()["dropped"]["loss"] != pytest.approx(references()["dropped by position"]["loss"], abs=1e-4)


def test_two_ranks_equal_one_process() -> None:
    assert_equals_one_process("ep2", "free", "an idle rank", "dropped, an idle rank")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["ep2", "ep4", "pp2 ep2"])
def test_every_case_equals_one_process(layout: str, case: str) -> None:
    """Dropping too: where a micro batch is one sequence, what is dropped doesn't depend on which rank has it."""
    assert_equals_one_process(layout, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "dropped" not in case])
@pytest.mark.parametrize("layout", ["tp2 ep2", "etp2 ep2"])
def test_tensor_parallel_ranks_equal_one_process(layout: str, case: str) -> None:
    assert_equals_one_process(layout, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "dropped" in case])
@pytest.mark.parametrize("layout", ["tp2 ep2", "etp2 ep2"])
def test_tensor_parallel_ranks_drop_alike(layout: str, case: str) -> None:
    """Each drops by its own part of a sequence, so one process drops others; but every dispatcher carries the same."""
    found = trained(layout, case)
    (first, *_), *others = found.values()
    for of_ranks in others:
        for rank in of_ranks:
            assert_close(rank, first)
    counts = [tokens(of_ranks, layout) for of_ranks in found.values()]
    assert all(each == counts[0] for each in counts)
    if "idle" not in case and "padded" not in case:
        assert counts[0] != tokens([references()[case]], "one")


def train_in_bf16(ranks: int) -> dict[str, dict[str, Any]]:
    """As a user would, no rule left out."""
    deepep_over_gloo.install()
    strategy = {"expert_model_parallel_size": ranks}
    found = {kind: train("free", kind, strategy, ranks, "bf16-mixed") for kind in ("alltoall", "flex")}
    assert deepep_over_gloo.calls["dispatch by handle"] > 0 and deepep_over_gloo.Buffer.num_sms == 20
    return found


def test_in_bf16_flex_differs_by_rounding() -> None:
    """Megatron Core adds the results of a token's experts in another order."""
    for rank in run_ranks(train_in_bf16, 2, 2):
        alltoall, flex = rank["alltoall"], rank["flex"]
        assert flex["loss"] == pytest.approx(alltoall["loss"], abs=5e-3)
        assert flex["grad_norm"] == pytest.approx(alltoall["grad_norm"], rel=2e-2)
        assert flex["tokens"].keys() == alltoall["tokens"].keys()


def library_error(ranks: int) -> str:
    with pytest.raises(ImportError) as caught:
        train("free", "flex", {"expert_model_parallel_size": ranks}, ranks, "bf16-mixed")
    assert not torch.distributed.is_initialized()
    return str(caught.value)


def test_without_the_library_flex_is_an_error_before_process_groups() -> None:
    (message,) = set(run_ranks(library_error, 2, 2))
    assert "needs DeepEP" in message and "this run is on the CPU" in message and "ExpertDispatch('alltoall')" in message
