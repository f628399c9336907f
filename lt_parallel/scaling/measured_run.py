"""What a run measures of itself for `lt-parallel scaling`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, override

import lightning.pytorch as L
import torch
from lightning.pytorch import callbacks
from torch.profiler import ProfilerActivity, profile

from lt_parallel.callbacks.memory import MemoryMonitor
from lt_parallel.callbacks.throughput import ThroughputMonitor
from lt_parallel.files import write_atomically
from lt_parallel.lightning_cli import MegatronCLI
from lt_parallel.strategies.megatron import megatron_strategy

PROFILED_STEPS = 2
#: Callbacks that change nothing about a step, but need a logger, write, or end a run early.
_LEFT_OUT = (
    callbacks.Checkpoint,
    callbacks.DeviceStatsMonitor,
    callbacks.EarlyStopping,
    callbacks.LearningRateMonitor,
    callbacks.ModelSummary,
    callbacks.ProgressBar,
    callbacks.ThroughputMonitor,
    callbacks.Timer,
    MemoryMonitor,
    ThroughputMonitor,
)


class MeasuringCLI(MegatronCLI):
    """Makes the Trainer of a recipe without the callbacks that a measurement has no use for."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        given = self.config_init.fit.trainer.callbacks or []
        given = given if isinstance(given, list) else [given]
        kept = [each for each in given if not isinstance(each, _LEFT_OUT)]
        return super().instantiate_trainer(callbacks=kept, **kwargs)


class MeasuredRun(L.Callback):
    """Keeps what `ThroughputMonitor` measured over the second K steps, then profiles `PROFILED_STEPS` more.

    The profile tells what timers around whole layers can't: how long collectives inside them take. Only tensor
    parallelism puts some there, so without it nothing is profiled.

    Args:
        steps: K.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._profile: Any = None
        self._profile_began = 0.0
        self._metrics: dict[str, float] = {}
        #: Share of a step that this rank spends in collectives, waiting for the others included.
        self.collective_share = 0.0

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2 * self._steps and megatron_strategy(trainer).sizes.tensor_model_parallel_size > 1:
            self._profile_began = time.perf_counter()
            cuda = megatron_strategy(trainer).root_device.type == "cuda"
            self._profile = profile(
                activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True
            )
            self._profile.start()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2 * self._steps:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._metrics = {name: value for name, value in metrics.items() if name.startswith("train/")}
        if self._profile is not None and trainer.global_step == 2 * self._steps + PROFILED_STEPS:
            if megatron_strategy(trainer).root_device.type == "cuda":
                torch.cuda.synchronize()
            self._profile.stop()
            elapsed_s = time.perf_counter() - self._profile_began
            self.collective_share = min(1.0, collective_seconds(self._profile.events()) / elapsed_s)
            self._profile = None

    def write(self, trainer: L.Trainer, output: Path) -> None:
        """Writes the measurements on rank 0; collective over all ranks.

        Raises:
            ValueError: The run ended before anything was measured.
        """
        strategy = megatron_strategy(trainer)
        if not self._metrics:
            raise ValueError(
                f"the training ended after {trainer.global_step} steps; it must take {2 * self._steps}, to warm up and "
                "to measure: what ended it?"
            )
        share = torch.tensor(self.collective_share, device=strategy.root_device)
        torch.distributed.all_reduce(share)
        cores = 0.0
        if strategy.root_device.type == "cpu":
            cores = strategy.num_processes / len(os.sched_getaffinity(0))
        if trainer.is_global_zero:
            measured = {
                "metrics": self._metrics,
                "collective_share": float(share) / strategy.world_size,
                "processes_per_core": cores,
            }
            write_atomically(output, json.dumps(measured))


def collective_seconds(events: Iterable[Any]) -> float:
    """Time in which a collective ran, overlapping ones counted once; point-to-point operations aren't collectives.

    Args:
        events: Of a profile; gloo's and NCCL's operations have names of their own.
    """
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in events if _is_collective(event.name.lower())
    )
    total_us, reached = 0.0, float("-inf")
    for start, end in spans:
        total_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total_us / 1e6


def _is_collective(name: str) -> bool:
    if name.startswith("gloo:"):
        return name.split(":", 1)[1] not in ("send", "recv")
    return name.startswith("nccldevkernel") and "sendrecv" not in name
