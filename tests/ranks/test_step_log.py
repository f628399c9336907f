"""A step's own values appear where and when `self.log` shows a user's."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
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

STEP_VALUES = {"train_loss", "grad_norm", "lr", "consumed_samples"}


class AlsoLogs(GPTModule):
    """Logs something of its own by Lightning's means."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("own", float(batch_idx), prog_bar=True)
        return super().training_step(batch, batch_idx)


class Bar(ProgressBar):
    """Keeps what a progress bar would show after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def disable(self) -> None:
        """Nothing is drawn anyway."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.shown.append(self.get_metrics(trainer, module))


class Kinds(L.Callback):
    """What kind of object callbacks get under each name."""

    def __init__(self) -> None:
        self.tensors: set[str] = set()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.tensors = {name for name, value in trainer.callback_metrics.items() if isinstance(value, torch.Tensor)}


def train(folder: str) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    numbers, bar, kinds = StepNumbers(), Bar(), Kinds()
    trainer = build_trainer(
        numbers,
        {"num_microbatches": 2},
        devices=1,
        max_steps=5,
        log_every_n_steps=2,
        logger=CSVLogger(folder, name="", version=""),
        enable_progress_bar=True,
        callbacks=[bar, kinds],
    )
    module = AlsoLogs(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER)
    trainer.fit(module, DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True))
    return {
        "losses": numbers.losses,
        "bar": [(shown["train_loss"], shown["own"]) for shown in bar.shown],
        "tensors": kinds.tensors,
        "logged": set(trainer.logged_metrics),
    }


def test_step_values_go_where_self_log_goes(tmp_path: Path) -> None:
    (seen,) = run_ranks(train, 1, str(tmp_path))
    with open(tmp_path / "metrics.csv") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    ours = [row for row in rows if "train_loss" in row]
    theirs = [row for row in rows if "own" in row]
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [1, 3]
    assert [row["epoch"] for row in ours] == [row["epoch"] for row in theirs]
    assert [row["train_loss"] for row in ours] == [seen["losses"][1], seen["losses"][3]]
    assert all(row.keys() >= STEP_VALUES for row in ours)
    assert seen["bar"] == [(loss, float(step)) for step, loss in enumerate(seen["losses"])]
    assert seen["tensors"] == seen["logged"] == STEP_VALUES | {"own"}
