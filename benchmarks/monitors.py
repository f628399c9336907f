"""What `ThroughputMonitor` and `MemoryMonitor` cost, as a share of a step.

One training; block of steps by block of steps the monitors are attached and detached, so both meet the same machine.
A block is as long as the Trainer's default logging interval, so an attached block has all that they do. What they
do doesn't depend on how much a step computes. So the model computes next to nothing, in as many micro batches as a step
of 100 ms may have: there the milliseconds that the monitors add aren't lost in the machine's unrest. CPU time of the
process is the figure to trust where other work shares the cores. The goal is under 1% of a 100 ms step: 1 ms.

Run `python -m benchmarks.monitors` from the repository's root.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import lt_parallel  # noqa: F401  (before megatron.core)
from benchmarks.overhead import OPTIMIZER, SCHEDULE, SEED, VOCAB_SIZE, NothingModule, Sequences
from benchmarks.report import Report
from lt_parallel.callbacks.memory import MemoryMonitor
from lt_parallel.callbacks.throughput import ThroughputMonitor
from lt_parallel.strategies import MegatronParallelStrategy

BLOCK = 50  # steps; the Trainer's default for log_every_n_steps


class Switched(L.Callback):
    """Passes Lightning's hooks on to the monitors in every second block only, and times the blocks."""

    def __init__(self) -> None:
        self._monitors = [ThroughputMonitor(), MemoryMonitor(every_n_steps=BLOCK)]
        self._timers: Any = None
        self._began = (0.0, 0.0)
        self.cpu_s: dict[bool, list[float]] = {True: [], False: []}
        self.wall_s: dict[bool, list[float]] = {True: [], False: []}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for monitor in self._monitors:
            monitor.setup(trainer, pl_module, stage)
        self._timers = trainer.strategy.timers

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for monitor in self._monitors:
            monitor.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step % BLOCK == 0:
            self._switch(trainer, trainer.global_step // BLOCK % 2 == 1)
            self._began = (time.process_time(), time.perf_counter())

    def _switch(self, trainer: Any, on: bool) -> None:
        strategy = trainer.strategy
        self._on = on
        timers = self._timers if on else None
        strategy.timers = strategy.model_config.timers = strategy.megatron_optimizer.timers = timers

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self._on:
            for monitor in self._monitors:
                monitor.on_train_batch_end(trainer, *args)
        block, rest = divmod(trainer.global_step, BLOCK)
        if rest == 0 and block > 2:  # the first block of each kind warms up
            self.cpu_s[self._on].append(time.process_time() - self._began[0])
            self.wall_s[self._on].append(time.perf_counter() - self._began[1])


def measure(blocks: int) -> Switched:
    L.seed_everything(SEED, verbose=False)
    switched = Switched()
    module = NothingModule(
        VOCAB_SIZE,
        8,
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        lr_warmup_iters=10,
        lr_decay_iters=100_000,
        **OPTIMIZER,
        **SCHEDULE,
    )
    steps = (2 * blocks + 2) * BLOCK
    with tempfile.TemporaryDirectory(prefix="lt_parallel_monitors_") as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            gradient_clip_val=1.0,
            logger=CSVLogger(folder, name="", version=""),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[switched],
            strategy=MegatronParallelStrategy(num_microbatches=4),
        )
        trainer.fit(module, DataLoader(Sequences(8 * steps, 8), batch_size=2))
    return switched


def main() -> None:
    """Measures and writes `results/monitors.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100, help="blocks of each kind (default: 100)")
    blocks = parser.parse_args().blocks
    switched = measure(blocks)
    report = Report(
        "Cost of the monitors",
        ["what", "step without", "with, minus without", "quartiles", "share of 100 ms", "goal"],
        "python -m benchmarks.monitors",
    )
    for kind, times in (("CPU", switched.cpu_s), ("wall", switched.wall_s)):
        off, on = ([1000 * seconds / BLOCK for seconds in times[each]] for each in (False, True))
        low, extra, high = statistics.quantiles([a - b for a, b in zip(on, off, strict=True)], n=4)
        report.add(
            f"both monitors, {kind}",
            f"{statistics.median(off):.1f} ms",
            f"{extra:.3f} ms",
            f"{low:.3f} to {high:.3f} ms",
            f"{extra:.2f}%",
            "< 1%",
        )
    report.note(f"{blocks} pairs of blocks of {BLOCK} steps, 1 process, 4 micro batches, a model of one parameter.")
    report.show()
    print(f"Written to {report.write('monitors')}")


if __name__ == "__main__":
    main()
