"""Moving experts while training goes on: the same losses, an ordinary checkpoint. And counting their tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lt_parallel import ActivationRecompute, ExpertDispatch, ExpertLoadMonitor, ExpertRebalance, GPTModule
from tests.ranks.parity_runs import (
    MICRO_BATCH,
    MOE_SHAPES,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    STEPS,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.ranks.test_parity import assert_close
from tests.support.ranks import run_ranks

EP2 = {"expert_model_parallel_size": 2}
OPTIM = {"data_parallel_sharding_strategy": "optim"}
MIXTRAL = {**MOE_SHAPES["mixtral"], "moe": {**MOE_SHAPES["mixtral"]["moe"], "num_moe_experts": 8}}
SEQUENTIAL = {**MIXTRAL, "moe": {**MIXTRAL["moe"], "moe_grouped_gemm": False}}
GROUPS = {"num_moe_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
DEEPSEEK = {**MOE_SHAPES["deepseek_v3"], "moe": {**MOE_SHAPES["deepseek_v3"]["moe"], **GROUPS}}

#: model, ranks, strategy, Trainer's other arguments
LAYOUTS: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]] = {
    "ep2": (MIXTRAL, 2, EP2, {}),
    "groups, expert bias, ep2 dp4 optim": (DEEPSEEK, 4, {**EP2, **OPTIM}, {}),
    "sequential experts, ep4": (SEQUENTIAL, 4, {"expert_model_parallel_size": 4}, {}),
    "sequential experts, ep2 dp4 optim": (SEQUENTIAL, 4, {**EP2, **OPTIM}, {}),
    "ep2 pp2": (MIXTRAL, 4, {**EP2, "pipeline_model_parallel_size": 2}, {}),
    "ep2 tp2 sp with expert tp2": (
        MIXTRAL,
        4,
        {**EP2, "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2},
        {},
    ),
}
QUICK = ("ep2", "groups, expert bias, ep2 dp4 optim")


class Moves(L.Callback):
    """What was moved, by step, and the last count of tokens."""

    def __init__(self) -> None:
        self.layers: list[float] = []
        self.imbalances: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        found = trainer.callback_metrics
        if "moe/rebalanced_layers" in found and trainer.global_step % 2 == 0:
            self.layers.append(float(found["moe/rebalanced_layers"]))
            self.imbalances.append(
                (float(found["moe/rank_imbalance_before"]), float(found["moe/rank_imbalance_after"]))
            )


def build(layout: str, rebalance: bool, **options: Any) -> tuple[L.Trainer, GPTModule, StepNumbers, Moves]:
    model, world_size, strategy, others = LAYOUTS[layout]
    L.seed_everything(SEED, verbose=False)
    numbers, moves = StepNumbers(), Moves()
    callbacks = [*([ExpertRebalance(every_n_steps=2, threshold=1.0)] if rebalance else []), moves]
    trainer = build_trainer(
        numbers,
        strategy,
        **{"devices": world_size, "limit_val_batches": 2, **others, **options, "callbacks": callbacks},
    )
    return trainer, GPTModule(VOCAB_SIZE, SEQ_LENGTH, **model, **OPTIMIZER), numbers, moves


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(Sequences(), MICRO_BATCH, shuffle=True), DataLoader(Sequences(45), MICRO_BATCH)


def trained(layout: str, rebalance: bool) -> tuple[dict[str, list[float]], list[float], list[tuple[float, float]]]:
    trainer, module, numbers, moves = build(layout, rebalance)
    trainer.fit(module, *loaders())
    return numbers.numbers(), moves.layers, moves.imbalances


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in LAYOUTS]
)
def test_losses_go_on_as_without_it(layout: str) -> None:
    expected, none_moved, _ = run_ranks(trained, LAYOUTS[layout][1], layout, False)[0]
    found, moved, imbalances = run_ranks(trained, LAYOUTS[layout][1], layout, True)[0]
    assert not none_moved
    assert len(moved) == STEPS // 2 and sum(moved[:-1]) >= 4, "experts must have moved, and trained on since"
    assert all(after <= before for before, after in imbalances)
    assert min(after / before for before, after in imbalances) < 0.99
    assert_close(found, expected, layout)


class SaveFourth(L.Callback):
    """After the callbacks before it, as ModelCheckpoint."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def saved(layout: str, rebalance: bool, path: str) -> None:
    trainer, module, _, _ = build(layout, rebalance, max_steps=4)
    trainer.callbacks.append(SaveFourth(path))  # type: ignore[attr-defined]
    trainer.fit(module, loaders()[0])


def resumed(layout: str, path: str) -> dict[str, list[float]]:
    trainer, module, numbers, _ = build(layout, rebalance=False, max_steps=6, val_check_interval=6)
    trainer.fit(module, *loaders(), ckpt_path=path)
    return numbers.numbers()


LAYOUTS["ep4"] = (MIXTRAL, 4, {"expert_model_parallel_size": 4}, {})
LAYOUTS["one process"] = (MIXTRAL, 1, {}, {})
LAYOUTS["ep2, six steps"] = (MIXTRAL, 2, EP2, {"max_steps": 6, "val_check_interval": 6})


def evaluated(layout: str, path: str) -> float:
    trainer, module, _, _ = build(layout, rebalance=False)
    return float(trainer.validate(module, loaders()[1], ckpt_path=path, verbose=False)[0]["val_loss"])


def test_a_checkpoint_after_a_move_is_an_ordinary_one(tmp_path: Path) -> None:
    path = str(tmp_path / "moved")
    run_ranks(saved, 2, "ep2", True, path)
    expected, _, _ = run_ranks(trained, 2, "ep2, six steps", False)[0]
    found = run_ranks(resumed, 4, "ep4", path)[0]
    assert len(found["loss"]) == 2
    last = {name: values[-1:] if name == "val_loss" else values[4:] for name, values in expected.items()}
    assert_close(found, last, "resumed on four ranks")
    losses = [run_ranks(evaluated, LAYOUTS[layout][1], layout, path)[0] for layout in ("one process", "ep2")]
    assert losses[0] == pytest.approx(losses[1], abs=5e-6)


# ---------------------------------------------------------------- counting


class Routed(L.Callback):
    """Counts by itself, in the forward pass, from what the routers chose; to compare with."""

    def __init__(self) -> None:
        self.tokens: dict[int, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        for chunk in module.model_chunks:
            for router in chunk.modules():
                if isinstance(router, TopKRouter):
                    router.register_forward_hook(self._count)

    def _count(self, router: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and router.training:
            for expert in torch.nonzero(output[1])[:, 1].tolist():
                counted = self.tokens.setdefault(router.layer_number - 1, torch.zeros(4, dtype=torch.int64))
                counted[expert] += 1


def counted(
    world_size: int, strategy: dict[str, Any], moe: dict[str, Any], modules: tuple[str, ...] = (), dispatcher: str = ""
) -> tuple[list[list[int]], list[list[int]], list[int], dict[int, list[int]], dict[str, float]]:
    L.seed_everything(SEED, verbose=False)
    monitor, routed = ExpertLoadMonitor(every_n_steps=3), Routed()
    callbacks: list[Any] = [monitor, routed]
    if modules:
        callbacks.append(ActivationRecompute(modules=modules))
    if dispatcher:
        callbacks.append(ExpertDispatch(dispatcher))  # type: ignore[arg-type]
    trainer = build_trainer(
        StepNumbers(), strategy, devices=world_size, max_steps=3, limit_val_batches=0, callbacks=callbacks
    )
    model = {**MOE_SHAPES["mixtral"], "moe": {**MOE_SHAPES["mixtral"]["moe"], **moe}}
    trainer.fit(GPTModule(VOCAB_SIZE, SEQ_LENGTH, **model, **OPTIMIZER), loaders()[0])
    assert monitor.tokens_per_expert is not None and monitor.tokens_per_rank is not None and monitor.dropped is not None
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("moe/")}
    own = {layer: tokens.tolist() for layer, tokens in routed.tokens.items()}
    return monitor.tokens_per_expert.tolist(), monitor.tokens_per_rank.tolist(), monitor.dropped.tolist(), own, logged


ASSIGNMENTS = 3 * 16 * SEQ_LENGTH * 2  # steps, global batch, experts of a token


@cache
def one_process() -> tuple[Any, ...]:
    return run_ranks(counted, 1, 1, {}, {})[0]


def test_tokens_are_counted_once() -> None:
    tokens, per_rank, dropped, own, logged = one_process()
    assert [sum(layer) for layer in tokens] == [ASSIGNMENTS] * 4
    assert {layer: tokens[layer] for layer in range(4)} == own
    assert per_rank == [[ASSIGNMENTS]] * 4 and dropped == [0] * 4
    busiest = [4 * max(layer) / ASSIGNMENTS for layer in tokens]
    assert logged["moe/expert_imbalance"] == pytest.approx(sum(busiest) / 4)
    assert logged["moe/expert_imbalance_layer_2"] == pytest.approx(busiest[2])


@pytest.mark.parametrize(
    ("world_size", "strategy", "modules"),
    [
        (4, {**EP2, "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}, ()),
        pytest.param(4, {**EP2, "context_parallel_size": 2}, ("moe",), marks=pytest.mark.slow),
    ],
)
def test_every_layout_counts_the_same(world_size: int, strategy: dict[str, Any], modules: tuple[str, ...]) -> None:
    strategy = {**strategy, "expert_tensor_parallel_size": 1}
    for tokens, per_rank, dropped, _, _ in run_ranks(counted, world_size, world_size, strategy, {}, modules):
        assert tokens == one_process()[0] and dropped == [0] * 4
        assert per_rank == [[a + b, c + d] for a, b, c, d in tokens]


@pytest.mark.parametrize("padded", [False, True])
def test_dropped_tokens(padded: bool) -> None:
    moe = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": padded}
    tokens, _, dropped, own, logged = run_ranks(counted, 1, 1, {}, moe, (), "alltoall")[0]
    assert all(sum(layer) + lost == ASSIGNMENTS for layer, lost in zip(tokens, dropped, strict=True))
    assert all(lost > 0 for lost in dropped)
    assert logged["moe/dropped_share"] == pytest.approx(sum(dropped) / 4 / ASSIGNMENTS)
    if padded:  # the map says what is sent, which is every expert's capacity
        assert all(sum(layer) == ASSIGNMENTS for layer in own.values())
    else:
        assert {layer: tokens[layer] for layer in range(4)} == own


def pictured(folder: str) -> list[int]:
    logger = TensorBoardLogger(folder)
    callbacks = [ExpertLoadMonitor(every_n_steps=1, heat_map_every_n=2)]
    trainer = build_trainer(
        StepNumbers(), {}, devices=1, max_steps=4, limit_val_batches=0, callbacks=callbacks, logger=logger
    )
    trainer.fit(GPTModule(VOCAB_SIZE, SEQ_LENGTH, **MIXTRAL, **OPTIMIZER), loaders()[0])
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0})
    events.Reload()
    return [event.step for event in events.Images("moe/tokens_per_expert")]


def test_heat_maps_are_logged_now_and_then(tmp_path: Path) -> None:
    assert run_ranks(pictured, 1, str(tmp_path)) == [[0, 2]]
