"""One measured run: `python -m lt_parallel.scaling.worker --output FILE --steps K -- ARGUMENTS`.

ARGUMENTS are those of `lt-parallel fit`. The run trains K steps to warm up, K steps that `ThroughputMonitor` measures
as one interval, and a few that are profiled. Rank 0 writes what was measured as JSON. Lightning's launcher runs this
module on every rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from lt_parallel import quiet
from lt_parallel.outcome import run_command, when_parent_is_gone


def main() -> int:
    """Runs one point; returns the exit status."""
    quiet.install()
    _end_with_command()
    return run_command(_measure)


def _end_with_command() -> None:
    """Ends all ranks when the command that started the first of them is gone, however it ended."""
    if os.getsid(0) == os.getpid():  # else it's another rank, or started by hand
        when_parent_is_gone(lambda: os.killpg(os.getpgrp(), signal.SIGKILL))


def _measure() -> int:
    parser = argparse.ArgumentParser(prog="python -m lt_parallel.scaling.worker")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("arguments", nargs="*")
    own = parser.parse_args()

    from lightning.pytorch.callbacks import Checkpoint

    from lt_parallel.callbacks.throughput import ThroughputMonitor
    from lt_parallel.scaling.measured_run import PROFILED_STEPS, MeasuredRun, MeasuringCLI

    # What isn't training is switched off; the user's arguments come first, so these win.
    arguments = [
        *own.arguments,
        f"--trainer.max_steps={2 * own.steps + PROFILED_STEPS}",
        "--trainer.max_epochs=-1",
        "--trainer.min_steps=null",
        "--trainer.min_epochs=null",
        "--trainer.max_time=null",
        "--trainer.fast_dev_run=false",
        "--trainer.limit_val_batches=0",
        "--trainer.num_sanity_val_steps=0",
        f"--trainer.log_every_n_steps={own.steps}",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.logger=false",
        f"--trainer.default_root_dir={own.output.parent}",
    ]
    cli = MeasuringCLI("fit", arguments, run=False, save_config=False)
    trainer: Any = cli.trainer
    measured = MeasuredRun(own.steps)
    # Lightning adds a checkpoint of its own where the recipe has none.
    kept = [each for each in trainer.callbacks if not isinstance(each, Checkpoint)]
    trainer.callbacks = [*kept, ThroughputMonitor(), measured]
    trainer.fit(cli.model, datamodule=cli.datamodule)
    measured.write(trainer, own.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
