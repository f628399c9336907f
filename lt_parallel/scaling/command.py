"""`lt-parallel scaling`: how throughput grows with the number of devices, measured or read, and what limits it."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lt_parallel.metrics.scaling import MODES, ScalingPoint, ScalingReport, analyse, read_points
from lt_parallel.outcome import CommandError

_DEFAULT_OUTPUT = "runs/scaling"

DESCRIPTION = """\
Trains a recipe for a few steps on several numbers of devices and says how throughput grows with them:
speedup = throughput / throughput on 1 device, efficiency = speedup / devices, and what the time is lost to.
Or reads such measurements from a file (--from)."""

EXAMPLES = """\
examples:
  lt-parallel scaling --config recipes/gpt_tiny.yaml --devices 1 2 --vary dp
  lt-parallel scaling --config recipes/gpt_tiny.yaml --devices 1 2 4 --vary pp --mode weak --data.micro_batch_size=4
  lt-parallel scaling --from measured.csv

Any argument of `lt-parallel fit` may follow and changes the recipe."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--config", metavar="FILE.yaml", action="append", help="the recipe to measure; several are merged, as in fit"
    )
    parser.add_argument(
        "--devices",
        type=_count,
        nargs="+",
        metavar="N",
        help="numbers of devices (on the CPU: processes), 1 among them",
    )
    parser.add_argument(
        "--vary",
        choices=("dp", "tp", "pp"),
        default="dp",
        help="what the devices are used for: data (default), tensor or pipeline parallelism",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="strong",
        help="strong: a step is the same work on any number of devices (default); weak: it grows with them",
    )
    parser.add_argument("--steps", type=_count, default=20, metavar="K", help="steps measured per run (default: 20)")
    parser.add_argument("--repeats", type=_count, default=3, metavar="R", help="runs of each point (default: 3)")
    parser.add_argument(
        "--timeout-minutes", type=_minutes, default=30.0, metavar="M", help="limit of one run (default: 30)"
    )
    parser.add_argument(
        "--from",
        dest="from_file",
        metavar="FILE.csv",
        help="read measurements instead: columns devices,tokens_per_sec or devices,seconds; repeats are further rows",
    )
    parser.add_argument(
        "--output",
        default=_DEFAULT_OUTPUT,
        metavar="DIR",
        help=f"where scaling.json, scaling.png and scaling.html go (default: {_DEFAULT_OUTPUT})",
    )
    parser.add_argument(
        "--wandb", metavar="PROJECT", help="also show table and chart in a run of this Weights & Biases project"
    )


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return value


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of minutes")
    return value


def run(args: argparse.Namespace, fit_arguments: Sequence[str] = ()) -> int:
    """Runs the command; returns its exit status.

    Args:
        args: Parsed, see `add_arguments`.
        fit_arguments: What else the command line had: arguments of `lt-parallel fit`.

    Raises:
        CommandError: Neither a recipe nor a file is named, or both.
        ValueError: The measurements can't be made or used, or the output can't be written.
    """
    if bool(args.from_file) == bool(args.config):
        raise CommandError("give either --config RECIPE.yaml --devices 1 2 ..., or --from FILE.csv")
    output = _writable_folder(args.output)
    if args.wandb and importlib.util.find_spec("wandb") is None:
        raise CommandError('--wandb: wandb isn\'t installed; run pip install "lt-parallel[wandb]"')
    if args.from_file:
        if fit_arguments or args.devices:
            raise CommandError(
                f"unknown argument: {' '.join(fit_arguments) or '--devices'} (nothing is run with --from)"
            )
        points, label = read_points(args.from_file), Path(args.from_file).name
    else:
        recipe = " + ".join(Path(config).stem for config in args.config)
        points, label = _measure(args, fit_arguments, output), f"{recipe}, {args.vary}"
    report = analyse(points, mode=args.mode, label=label)
    _show(report, output)
    if args.wandb:
        _show_in_wandb(report, output, args.wandb)
    return 0


def _writable_folder(name: str) -> Path:
    """The output folder, made now: not after an hour of measuring."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"can't write to {name!r}: {error.strerror or error}; give another folder") from error
    return folder


def _measure(args: argparse.Namespace, fit_arguments: Sequence[str], output: Path) -> list[ScalingPoint]:
    if not args.devices:
        raise CommandError("--config needs --devices, e.g. --devices 1 2 4")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from lt_parallel.scaling.runs import plan_points, run_points

    recipe = [*(f"--config={config}" for config in args.config), *fit_arguments]
    points = plan_points(recipe, args.devices, args.vary, args.mode)
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns) as progress:
        task = progress.add_task("measuring", total=args.repeats * len(points))

        def show(done: int, total: int, current: str) -> None:
            progress.update(task, completed=done, total=total, description=current)

        return run_points(
            points,
            steps=args.steps,
            repeats=args.repeats,
            folder=output / "runs",
            timeout_s=60 * args.timeout_minutes,
            show=show,
        )


def _show(report: ScalingReport, output: Path) -> None:
    from lt_parallel.scaling.report import print_report, write_report

    print_report(report)
    files = write_report(report, output)
    print(f"Written to {output}/: {', '.join(file.name for file in files)}")


def _show_in_wandb(report: ScalingReport, output: Path, project: str) -> None:
    """Table and chart as objects of a run of their own."""
    from lightning.pytorch.loggers import WandbLogger

    from lt_parallel.loggers import log_image, log_table
    from lt_parallel.scaling.wording import column_names, report_title, row_cells

    logger = WandbLogger(project=project, name=report_title(report), job_type="scaling", save_dir=output)
    logger.log_hyperparams({"scaling": {"mode": report.mode, "label": report.label}})
    log_table([logger], "scaling", column_names(report), [row_cells(report, row) for row in report.rows])
    log_image([logger], "scaling_chart", output / "scaling.png")
    logger.experiment.finish()
