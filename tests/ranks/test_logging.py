"""What loggers get and what callbacks see: the same numbers on every rank, under the promised names."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import (
    GLOBAL_BATCH,
    GPT2,
    MICRO_BATCH,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
    expected_lr,
)
from tests.support.ranks import run_ranks

STEPS = 4
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EACH_STEP = {"train_loss", "grad_norm", "lr", "consumed_samples"}
ONCE = {"params_total", "params_this_rank"}


class Seen(StepNumbers):
    """Everything that callbacks are shown after each step and each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_validation_end(trainer, *args)
        self.validations.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(world_size: int, strategy: dict[str, Any], callbacks: list[L.Callback], **options: Any) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    seen = Seen()
    defaults = {"max_steps": STEPS, "val_check_interval": 2, "log_every_n_steps": 1}
    trainer = build_trainer(seen, strategy, devices=world_size, callbacks=callbacks, **{**defaults, **options})
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER)
    data = (
        DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True),
        DataLoader(Sequences(45), batch_size=MICRO_BATCH),
    )
    trainer.fit(module, *data)
    return {
        "steps": seen.steps,
        "validations": seen.validations,
        "grad_norms": seen.grad_norms,
        "global_step": trainer.global_step,
        "own_parameters": sum(parameter.numel() for parameter in module.parameters()),
    }


# ---------------------------------------------------------------- wandb and CSV


def train_with_loggers(folder: str) -> dict[str, Any]:
    loggers = [WandbLogger("run", folder, offline=True, mode="offline"), CSVLogger(folder, name="csv", version="0")]
    try:
        return train(2, TP2, [], logger=loggers)
    finally:
        import wandb

        wandb.finish()
        wandb.teardown()


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("logs")
    return folder, run_ranks(train_with_loggers, 2, str(folder))


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of an offline run, from the file alone: a LevelDB log of protobuf messages after a header of 7 bytes.

    A block is 32 KiB; a piece in it has checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if kind == 0:
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def csv_rows(folder: Path) -> list[dict[str, Any]]:
    with open(folder / "csv" / "0" / "metrics.csv") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("read", [wandb_rows, csv_rows])
def test_a_logger_holds_what_the_trainer_reported(read: Any, logged: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (first, second) = logged
    rows = read(folder)
    steps = [row for row in rows if "train_loss" in row]
    assert len(steps) == len(first["steps"]) == STEPS
    for index, (row, reported) in enumerate(zip(steps, first["steps"], strict=True)):
        assert row.keys() >= EACH_STEP
        assert row["train_loss"] == pytest.approx(reported["train_loss"], rel=1e-6)
        assert row["grad_norm"] == pytest.approx(first["grad_norms"][index], rel=1e-6)
        assert row["lr"] == pytest.approx(expected_lr(index), rel=1e-6)
        assert row["consumed_samples"] == GLOBAL_BATCH * (index + 1)
    validations = [row for row in rows if "val_loss" in row]
    assert [row["val_loss"] for row in validations] == pytest.approx(
        [reported["val_loss"] for reported in first["validations"]], rel=1e-6
    )
    assert len(validations) == 2
    (counts,) = [row for row in rows if row.keys() & ONCE]
    assert counts["params_this_rank"] == first["own_parameters"]
    assert counts["params_total"] == parameters_by_hand()
    assert first["own_parameters"] == second["own_parameters"] < counts["params_total"]
    known = EACH_STEP | ONCE | {"val_loss", "epoch", "step", "trainer/global_step"}
    assert {name for row in rows for name in row if not name.startswith("_")} <= known


def parameters_by_hand() -> int:
    """GPT-2's shape: tied embedding with its padding, positions, 4 layers, final norm."""
    hidden, ffn = GPT2["hidden_size"], 4 * GPT2["hidden_size"]
    attention = (hidden + 1) * 3 * hidden + (hidden + 1) * hidden
    mlp = (hidden + 1) * ffn + (ffn + 1) * hidden
    return 128 * hidden + SEQ_LENGTH * hidden + GPT2["num_layers"] * (attention + mlp + 4 * hidden) + 2 * hidden


# ---------------------------------------------------------------- every rank sees the same


def train_and_watch(world_size: int, strategy: dict[str, Any], folder: str) -> dict[str, Any]:
    # Both take a whole epoch for their turn where val_check_interval is 1, unless they are told otherwise.
    checkpoint = ModelCheckpoint(
        folder, filename="{step}-{val_loss:.4f}", monitor="val_loss", save_on_train_epoch_end=False
    )
    # Nothing improves by 10 nats: the second validation without progress ends the run.
    stopping = EarlyStopping("val_loss", min_delta=10.0, patience=2, check_on_train_epoch_end=False)
    result = train(
        world_size,
        strategy,
        [checkpoint, stopping],
        max_steps=10,
        val_check_interval=1,
        enable_checkpointing=True,
    )
    return {
        **result,
        "best": checkpoint.best_model_path,
        "score": float(checkpoint.best_model_score),
        "wait": stopping.wait_count,
    }


@cache
def watched(name: str, folder: str) -> list[dict[str, Any]]:
    strategy = {"pp2": PP2, "tp2 pp2": {**TP2, **PP2}}[name]
    world_size = 2 if name == "pp2" else 4
    return run_ranks(train_and_watch, world_size, world_size, strategy, folder)


@pytest.mark.parametrize("name", ["pp2", "tp2 pp2"])
def test_callbacks_decide_alike_on_every_rank(name: str, tmp_path: Path) -> None:
    first, *others = watched(name, str(tmp_path))
    assert first["global_step"] == 3, "stopped at the third validation"
    assert len(first["validations"]) == 3 and first["wait"] == 2
    losses = [numbers["val_loss"] for numbers in first["validations"]]
    best = min(range(3), key=losses.__getitem__)
    assert first["score"] == pytest.approx(losses[best])
    assert Path(first["best"]).name == f"step={best + 1}-val_loss={losses[best]:.4f}.ckpt"
    assert [path.name for path in tmp_path.iterdir()] == [Path(first["best"]).name]
    for rank, other in enumerate(others, 1):
        for key in ("steps", "validations", "grad_norms", "global_step", "best", "score", "wait"):
            assert other[key] == first[key], (rank, key)
