"""What `ThroughputMonitor` says, against clocks and counts of the tests' own."""

from __future__ import annotations

import csv
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lt_parallel.callbacks.throughput import ThroughputMonitor
from lt_parallel.models import GPTModule
from lt_parallel.plugins.checkpoint_io import MegatronCheckpointIO
from lt_parallel.strategies import MegatronParallelStrategy
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
)
from tests.support.ranks import RankError, run_ranks

STEPS, EVERY = 7, 2
TOKENS_PER_STEP = GLOBAL_BATCH * SEQ_LENGTH
PEAK = 1e12
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


class Clock(L.Callback):
    """Wall time from the end of the first step to the end of training, by this callback's own clock."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            self.elapsed_s = -time.perf_counter()

    def on_train_end(self, *args: Any) -> None:
        self.elapsed_s += time.perf_counter()


class Slow(GPTModule):
    """Sleeps where it's told to; seconds per call."""

    stage_s = validation_s = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        groups = self.megatron.groups.pp
        if groups.rank() == groups.size() - 1:
            time.sleep(self.stage_s)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        time.sleep(self.validation_s)
        return super().validation_step(batch, batch_idx, dataloader_idx)


class SlowSequences(Sequences):
    """Sleeps for each sample."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.sample_s = sample_s

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.sample_s)
        return super().__getitem__(index)


class SlowIO(MegatronCheckpointIO):
    """Takes a while to write."""

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        time.sleep(0.3)
        super().save_checkpoint(*args, **options)


def train(
    folder: str,
    world_size: int,
    strategy: dict[str, Any],
    *,
    stage_s: float = 0.0,
    validation_s: float = 0.0,
    sample_s: float = 0.0,
    steps: int = STEPS,
    ckpt_path: str | None = None,
    **monitor: Any,
) -> dict[str, Any]:
    """A run that validates after 4 steps and saves after 6; what was logged, and the clock's time."""
    L.seed_everything(SEED, verbose=False)
    clock = Clock()
    callbacks = [
        clock,  # first, so that what the monitor's own work takes is between its two readings too
        ThroughputMonitor(**{"peak_flops": PEAK, **monitor}),
        ModelCheckpoint(folder, every_n_train_steps=6, filename="{step}"),
    ]
    trainer = build_trainer(
        StepNumbers(),
        strategy,
        devices=world_size,
        max_steps=steps,
        val_check_interval=4,
        log_every_n_steps=EVERY,
        logger=CSVLogger(folder, name="", version=""),
        enable_checkpointing=True,
        callbacks=callbacks,
        plugins=[SlowIO()],
    )
    module = Slow(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER)
    module.stage_s, module.validation_s = stage_s, validation_s
    loader = DataLoader(SlowSequences(sample_s), batch_size=MICRO_BATCH, shuffle=True)
    trainer.fit(module, loader, DataLoader(Sequences(45), batch_size=MICRO_BATCH), ckpt_path=ckpt_path)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("train/")}
    return {"last": logged, "elapsed_s": clock.elapsed_s}


def run(world_size: int, folder: str, strategy: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    return run_ranks(partial(train, **options), world_size, folder, world_size, strategy)


def rows(folder: Path) -> list[dict[str, float]]:
    """What was logged at the end of each interval."""
    with (folder / "metrics.csv").open(newline="") as file:
        read = [row for row in csv.DictReader(file) if row["train/step_s"]]
    return [{name: float(value) for name, value in row.items() if value} for row in read]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_per_second_times_seconds_are_the_tokens_trained(layout: str, tmp_path: Path) -> None:
    world_size, strategy = LAYOUTS[layout]
    ranks = run(world_size, str(tmp_path), strategy, validation_s=0.02)
    assert all(rank["last"] == ranks[0]["last"] for rank in ranks)
    logged = rows(tmp_path)
    assert [row["step"] for row in logged] == [1, 3, 5, 6]  # the first step isn't measured
    steps = [1, 2, 2, 1]
    assert [row["train/consumed_tokens"] for row in logged] == [TOKENS_PER_STEP * done for done in (2, 4, 6, 7)]
    seconds = [TOKENS_PER_STEP * count / row["train/tokens_per_sec"] for count, row in zip(steps, logged, strict=True)]
    apart = sum(row["train/validation_s"] + row["train/checkpoint_s"] for row in logged)
    assert sum(seconds) + apart == pytest.approx(ranks[0]["elapsed_s"], rel=0.02, abs=0.03)
    for row in logged:
        assert row["train/device/tokens_per_sec"] * world_size == pytest.approx(row["train/tokens_per_sec"])
        assert row["train/samples_per_sec"] * SEQ_LENGTH == pytest.approx(row["train/tokens_per_sec"])
        parts = ("data_wait_s", "forward_backward_s", "optimizer_s", "rest_s")
        assert sum(row[f"train/{part}"] for part in parts) == pytest.approx(row["train/step_s"])
        assert row["train/optimizer_s"] > 0 and row["train/rest_s"] > 0
        assert 0 < row["train/compute_s"] <= row["train/forward_backward_s"]
        assert row["train/compute_s"] <= row["train/slowest_compute_s"] * (1 + 1e-6)


def test_flops_and_utilisation(tmp_path: Path) -> None:
    run(2, str(tmp_path), {})
    layers, hidden, heads_out, vocabulary = 4, 64, 64, 128
    projections = layers * (4 * hidden * heads_out + 2 * hidden * 4 * hidden) + hidden * vocabulary
    keys_seen = (SEQ_LENGTH + 1) / 2
    forward = 2 * projections + layers * 2 * 2 * heads_out * keys_seen
    forward_full = 2 * projections + layers * 2 * 2 * heads_out * SEQ_LENGTH
    for row in rows(tmp_path):
        per_device = row["train/device/tokens_per_sec"]
        assert row["train/device/flops_per_sec"] == pytest.approx(3 * forward * per_device)
        assert row["train/device/hardware_flops_per_sec"] == pytest.approx(3 * forward * per_device)
        assert row["train/device/mfu"] == pytest.approx(3 * forward * per_device / PEAK)
        assert row["train/device/mfu_full_attention"] == pytest.approx(3 * forward_full * per_device / PEAK)
        assert row["train/device/peak_flops_per_sec"] == PEAK


@pytest.mark.parametrize(("given", "peak"), [("H100 SXM", 66.9e12), (None, None)])
def test_peak_by_the_name_of_a_device(given: str | None, peak: float | None, tmp_path: Path) -> None:
    """fp32 on the ordinary cores; a CPU has no peak of its own."""
    run(1, str(tmp_path), {}, peak_flops=given, steps=2)
    (row,) = rows(tmp_path)
    assert row.get("train/device/peak_flops_per_sec") == (peak and pytest.approx(peak))
    assert ("train/device/mfu" in row) == (peak is not None) and row["train/device/flops_per_sec"] > 0


def test_waiting_is_found_where_it_is(tmp_path: Path) -> None:
    """A slow loader, slow validation and a slow disk, each with a known time."""
    run(2, str(tmp_path), {}, sample_s=0.01, validation_s=0.1)
    logged = rows(tmp_path)
    per_step = GLOBAL_BATCH // 2 * 0.01
    assert all(per_step < row["train/data_wait_s"] < 2 * per_step for row in logged)
    assert all(row["train/rest_s"] < 0.25 for row in logged)  # slow validation and saving would show here
    # Step 4's validation (3 steps of 4 micro batches per rank) falls into the interval after it.
    assert [row["train/validation_s"] > 1.2 for row in logged] == [False, False, True, False]
    assert [row["train/checkpoint_s"] > 0.3 for row in logged] == [False, False, False, True]


def test_bubble_of_a_slow_stage(tmp_path: Path) -> None:
    """The last stage sleeps; meanwhile the first one, half of the ranks, has nothing to compute."""
    run(2, str(tmp_path), {"pipeline_model_parallel_size": 2}, stage_s=0.05)
    for row in rows(tmp_path):
        assert row["train/pipeline_bubble_formula"] == pytest.approx(1 / 9)  # 2 stages, 8 micro batches
        assert 0.3 < row["train/pipeline_bubble"] < 0.6
        extra_s = 8 * 0.05  # of the last stage; the mean over both has half of it
        slowest_s, mean_s = row["train/slowest_compute_s"], row["train/compute_s"]
        assert slowest_s > extra_s and slowest_s - mean_s == pytest.approx(extra_s / 2, rel=0.3)


def test_consumed_tokens_go_on_after_a_resume(tmp_path: Path) -> None:
    run(2, str(tmp_path / "first"), {})
    checkpoint = str(tmp_path / "first/step=6.ckpt")
    run(2, str(tmp_path / "second"), {}, steps=10, ckpt_path=checkpoint)
    last = rows(tmp_path / "second")[-1]
    assert last["step"] == 9 and last["train/consumed_tokens"] == 10 * TOKENS_PER_STEP
    assert last["train/eta_s"] == 0


def test_speedup_over_a_baseline(tmp_path: Path) -> None:
    run(1, str(tmp_path / "one"), {})
    run(2, str(tmp_path / "two"), {}, baseline=str(tmp_path / "one/metrics.csv"))
    rates = sorted(row["train/tokens_per_sec"] for row in rows(tmp_path / "one"))
    median = (rates[1] + rates[2]) / 2
    for row in rows(tmp_path / "two"):
        assert row["train/speedup"] == pytest.approx(row["train/tokens_per_sec"] / median)
        assert row["train/efficiency"] == pytest.approx(row["train/speedup"] / 2)


class Fault(L.Callback):
    """Raises once, after a step in the middle of an interval or in a validation."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._raise("step", trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._raise("validation", trainer)

    def _raise(self, where: str, trainer: L.Trainer) -> None:
        if self.where == where and trainer.global_step == 4:
            self.where = ""
            raise ArithmeticError("wrong")


def train_again(where: str) -> dict[str, Any]:
    """A fit that a fault ends, an evaluation, a second fit, and a fit of another Trainer with the same callback."""
    monitor = ThroughputMonitor()
    options: dict[str, Any] = {"devices": 1, "max_steps": STEPS, "val_check_interval": 4, "log_every_n_steps": 3}
    trainer = build_trainer(StepNumbers(), {}, callbacks=[monitor, Fault(where)], **options)
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER)
    loaders = (DataLoader(Sequences(), batch_size=MICRO_BATCH), DataLoader(Sequences(5), batch_size=MICRO_BATCH))
    with pytest.raises(ArithmeticError):
        trainer.fit(module, *loaders)
    result = {"timers after the fault": trainer.strategy.timers}
    trainer.validate(module, loaders[1], verbose=False)
    trainer.fit(module, *loaders)
    values = trainer.callback_metrics
    result["parts"] = float(values["train/compute_s"]) > 0, float(values["train/data_wait_s"]) > 0
    result["second fit"] = float(values["train/consumed_tokens"])
    other = build_trainer(StepNumbers(), {}, callbacks=[monitor], **options)
    other.fit(GPTModule(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER), *loaders)
    result["other trainer"] = float(other.callback_metrics["train/consumed_tokens"])
    return result


@pytest.mark.parametrize("where", ["step", "validation"])
def test_a_fault_leaves_nothing_behind_and_the_count_goes_on(where: str) -> None:
    (result,) = run_ranks(train_again, 1, where)
    assert result["timers after the fault"] is None
    assert result["parts"] == (True, True)
    assert result["second fit"] == result["other trainer"] == STEPS * TOKENS_PER_STEP


class Derived(ThroughputMonitor):
    """Lightning lets it stand beside its base class."""


def train_with_two() -> None:
    trainer = build_trainer(StepNumbers(), {}, devices=1, callbacks=[ThroughputMonitor(), Derived()])
    trainer.fit(GPTModule(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER), DataLoader(Sequences(), batch_size=MICRO_BATCH))


def test_two_monitors_are_refused() -> None:
    with pytest.raises(RankError, match="one ThroughputMonitor; it has several"):
        run_ranks(train_with_two, 1)


class Plain(L.LightningModule):
    """No tokens, no Megatron model; what it calls `model_flops` is its own affair."""

    model_flops = 1e9

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SEQ_LENGTH, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch["loss_mask"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_plain(folder: str, strategy: str) -> dict[str, float]:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        log_every_n_steps=EVERY,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=MegatronParallelStrategy() if strategy == "megatron" else strategy,
        callbacks=[ThroughputMonitor(baseline=10.0)],
    )
    trainer.fit(Plain(), DataLoader(Sequences(), batch_size=MICRO_BATCH))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_plain_module_has_samples_and_no_guessed_numbers(tmp_path: Path) -> None:
    (values,) = run_ranks(train_plain, 1, str(tmp_path), "megatron")
    assert values["train/samples_per_sec"] == pytest.approx(MICRO_BATCH * values["train/device/batches_per_sec"])
    unknown = ("tokens", "flops", "mfu", "speedup", "efficiency")
    assert not [name for name in values if any(part in name for part in unknown)]


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"runs of MegatronParallelStrategy.*SingleDeviceStrategy.*use lightning"):
        train_plain(str(tmp_path), "auto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peak_flops": 0.0}, "peak_flops=0.0 must be positive"),
        ({"peak_flops": float("inf")}, "peak_flops=inf must be positive"),
        ({"peak_flops": True}, "peak_flops=True must be a number of FLOP/s, or the name of a device"),
        ({"peak_flops": [1.0]}, r"peak_flops=\[1.0\] must be a number"),
        ({"baseline": True}, "baseline=True must be a number of tokens/s, or a file"),
        ({"baseline": [1.0]}, r"baseline=\[1.0\] must be a number of tokens/s"),
        ({"peak_flops": "H1000"}, r"H1000.*H100 SXM"),
        ({"baseline": 0.0}, "must be positive"),
        ({"baseline": -5}, "must be positive"),
        ({"baseline": "nowhere.csv"}, "no file 'nowhere.csv'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThroughputMonitor(**arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    numbers: Any = (numpy.float32(1000.0), numpy.int64(10**12))
    ThroughputMonitor(*numbers)
