"""Measured bytes are the formulas' under each layout; names, rows and steps in the log; activations are found."""

from __future__ import annotations

import csv
import os
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_parallel.callbacks.memory import MemoryMonitor
from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy
from tests.ranks.parity_runs import (
    GPT2,
    MICRO_BATCH,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.support.ranks import run_ranks

STEPS, EVERY = 5, 2
HIDDEN, FFN, VOCABULARY, LAYERS = GPT2["hidden_size"], 4 * GPT2["hidden_size"], 128, GPT2["num_layers"]
HELD = ("memory/parameters_gib", "memory/gradients_gib", "memory/optimizer_state_gib")
RESIDENT = ("memory/resident_gib", "memory/peak_resident_gib")


def train(folder: str, world_size: int, strategy: dict[str, Any], precision: str) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    monitor, numbers = MemoryMonitor(every_n_steps=EVERY), StepNumbers()
    trainer = build_trainer(
        numbers,
        strategy,
        devices=world_size,
        max_steps=STEPS,
        precision=precision,
        log_every_n_steps=1,
        logger=CSVLogger(f"{folder}/rank{os.environ['RANK']}", name="", version=""),
        callbacks=[monitor],
    )
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER)
    trainer.fit(module, DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True))
    wrapped: Any = trainer.strategy
    (chunk,) = wrapped.wrapped_chunks
    (inner,) = wrapped.megatron_optimizer.core.chained_optimizers
    return {
        "report": monitor.report,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "logged": set(trainer.logged_metrics),
        "param_buffers": sum(b.param_data.nbytes for b in chunk.buffers if b.param_data is not None),
        "grad_buffers": sum(b.grad_data.nbytes for b in chunk.buffers),
        "stepped": len(inner.optimizer.state),
    }


RUNS: dict[str, tuple[int, dict[str, Any], str]] = {
    "1 process": (1, {}, "32-true"),
    "1 process bf16-mixed": (1, {}, "bf16-mixed"),
    "1 process bf16-true": (1, {}, "bf16-true"),
    "dp2": (2, {}, "32-true"),
    "dp2 optim": (2, {"data_parallel_sharding_strategy": "optim"}, "32-true"),
    "dp2 optim bf16-mixed": (2, {"data_parallel_sharding_strategy": "optim"}, "bf16-mixed"),
    "tp2": (2, {"tensor_model_parallel_size": 2}, "32-true"),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, "32-true"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@cache
def results(name: str, folder: Path) -> list[dict[str, Any]]:
    world_size, strategy, precision = RUNS[name]
    return run_ranks(train, world_size, str(folder / name), world_size, strategy, precision)


def layer_parameters(tp: int) -> tuple[int, int]:
    """Numbers and tensors of one layer on one of `tp` ranks."""
    attention = (HIDDEN + 1) * 3 * HIDDEN // tp + HIDDEN * HIDDEN // tp + HIDDEN
    mlp = (HIDDEN + 1) * FFN // tp + FFN * HIDDEN // tp + HIDDEN
    return attention + mlp + 4 * HIDDEN, 12


def parameters_by_hand(name: str, rank: int) -> tuple[int, int]:
    """Numbers and tensors of this rank's weights: tied embedding, positions, layers, final norm."""
    tp = 2 if name == "tp2" else 1
    (layer, tensors), layers = layer_parameters(tp), LAYERS // 2 if name == "pp2" else LAYERS
    embedding, positions, norm = VOCABULARY * HIDDEN // tp, SEQ_LENGTH * HIDDEN, 2 * HIDDEN
    numbers, count = layers * layer + embedding, layers * tensors + 1  # on each stage: the last one has a copy of it
    if name != "pp2" or rank == 0:
        numbers, count = numbers + positions, count + 1
    if name != "pp2" or rank == 1:
        numbers, count = numbers + norm, count + 2
    return numbers, count


@pytest.mark.parametrize("name", [name for name in RUNS if "optim" not in name])
def test_bytes_are_the_formula_s(name: str, folder: Path) -> None:
    first, *others = results(name, folder)
    assert [row.rank for row in first["report"]] == [*range(RUNS[name][0])]
    assert all(other["report"] == [] for other in others)
    bf16 = "bf16" in name
    for row in first["report"]:
        numbers, count = parameters_by_hand(name, row.rank)
        assert row.held.parameters == (2 if bf16 else 4) * numbers
        # True bf16 reduces in bf16 and steps with an fp32 copy; fp32 buffers are what the optimizer reads.
        assert row.held.gradients == (2 + 4 if name.endswith("bf16-true") else 4) * numbers
        step_counts, moments, main = 4 * count, 8 * numbers, 4 * numbers if bf16 else 0
        assert row.held.optimizer_state == step_counts + moments + main
        assert row.peak > row.held.total


@pytest.mark.parametrize("name", ["dp2 optim", "dp2 optim bf16-mixed"])
def test_optim_halves_the_optimizer_state(name: str, folder: Path) -> None:
    ranks = results(name, folder)
    numbers, _ = parameters_by_hand(name, 0)
    bf16 = "bf16" in name
    padding = ranks[0]["grad_buffers"] - 4 * numbers
    assert 0 <= padding < 4 * 128 * 60, "at most one alignment per tensor"
    for rank, row in zip(ranks, ranks[0]["report"], strict=True):
        assert row.held.parameters == rank["param_buffers"] == (2 if bf16 else 4) * (numbers + padding // 4)
        assert row.held.gradients == rank["grad_buffers"]
    states = [
        row.held.optimizer_state - 4 * rank["stepped"] for rank, row in zip(ranks, ranks[0]["report"], strict=True)
    ]
    each = 12 if bf16 else 8
    assert sum(states) == each * numbers, "nothing twice, and none for the padding"
    assert abs(states[0] - states[1]) <= each * padding // 4


def test_places(folder: Path) -> None:
    assert [row.place for row in results("dp2", folder)[0]["report"]] == ["dp0 pp0 tp0", "dp1 pp0 tp0"]
    assert [row.place for row in results("pp2", folder)[0]["report"]] == ["dp0 pp0 tp0", "dp0 pp1 tp0"]
    assert [row.place for row in results("tp2", folder)[0]["report"]] == ["dp0 pp0 tp0", "dp0 pp0 tp1"]


def test_every_rank_sees_the_highest(folder: Path) -> None:
    first, second = results("pp2", folder)
    report = first["report"]
    for name in (*HELD, *RESIDENT):
        assert first["metrics"][name] == second["metrics"][name]
        assert {name} <= first["logged"] & second["logged"]
    for name, rows in zip(
        HELD,
        zip(*[(r.held.parameters, r.held.gradients, r.held.optimizer_state) for r in report], strict=True),
        strict=True,
    ):
        assert rows[0] != rows[1], "the stages differ"
        assert first["metrics"][name] == pytest.approx(max(rows) / 2**30, rel=1e-6)
    assert first["metrics"]["memory/peak_resident_gib"] == pytest.approx(max(r.peak for r in report) / 2**30, rel=1e-6)


def test_rank_0_writes_a_row_every_n_steps_and_one_at_the_end(folder: Path) -> None:
    results("pp2", folder)
    assert [path.name for path in (folder / "pp2").iterdir()] == ["rank0"]
    with open(folder / "pp2" / "rank0" / "metrics.csv") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    ours = [row for row in rows if HELD[0] in row]
    assert [row["step"] for row in ours] == [1, 3, 4]
    assert all(row.keys() >= {*HELD, *RESIDENT, "epoch"} for row in ours)
    steps = [row["step"] for row in rows if "train_loss" in row]
    assert steps == [*range(STEPS)], "the same axis as the step's own values"
    known = {*HELD, *RESIDENT, "memory/activations_gib"}
    assert {name for row in ours for name in row if name.startswith("memory/")} <= known


# ---------------------------------------------------------------- activations


class KeepsMuch(L.LightningModule):
    """Its backward pass needs `size` fp32 numbers that the forward pass has made."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.scale = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        made = (self.scale + torch.ones(self.size)).sigmoid()  # backward reads the result
        return made.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def activations_of(size: int) -> list[int | None]:
    monitor = MemoryMonitor(every_n_steps=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        strategy=MegatronParallelStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor],
    )
    trainer.fit(KeepsMuch(size), DataLoader(torch.zeros(8, 1), batch_size=1))
    return [row.activations for row in monitor.report]


def test_activations_are_found_by_difference() -> None:
    kept = 4 * 50_000_000
    ((found,),) = run_ranks(activations_of, 1, kept // 4)
    assert found is not None
    assert kept <= found <= 3.5 * kept, "what is kept, and at most two temporaries of its size beside it"
