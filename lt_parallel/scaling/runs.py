"""Runs each point of a scaling measurement: short trainings of one recipe on several numbers of devices.

The points are interleaved and repeated, in alternating order, so that what else goes on on the machine meets all of
them. Each run is a process of its own (`lt_parallel.scaling.worker`), as a training is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, override

from jsonargparse import Namespace

from lt_parallel.lightning_cli import MegatronCLI
from lt_parallel.metrics.scaling import ScalingPoint, StepBreakdown
from lt_parallel.strategies import MegatronParallelStrategy
from lt_parallel.strategies.batch_plan import BatchPlan
from lt_parallel.topology import ParallelSizes

#: What a job of several processes is told; each run is one of its own, whatever the command was started by.
_OF_A_JOB = ("SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_", "GROUP_", "NODE_RANK", "WORLD_SIZE", "MASTER_")
VARIED = {"dp": None, "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
#: Options without a meaning on one rank, by what they belong to.
_ONLY_WITH = {
    "tensor_model_parallel_size": {"sequence_parallel": "false"},
    "pipeline_model_parallel_size": {
        "virtual_pipeline_model_parallel_size": "null",
        "num_layers_per_virtual_pipeline_stage": "null",
        "pipeline_model_parallel_layout": "null",
    },
}
_LAST_LINES = 8


@dataclass(frozen=True)
class PlannedPoint:
    """One number of devices and the arguments that make the recipe run on it."""

    devices: int
    arguments: tuple[str, ...]

    @property
    def title(self) -> str:
        """How many devices, in words."""
        return f"{self.devices} device{'s' * (self.devices > 1)}"


class ParsedRecipe(MegatronCLI):
    """The arguments of a fit, parsed and checked; nothing is made of them."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__("fit", [*arguments, "--seed_everything=false"], run=False, save_config=False)

    @override
    def instantiate_classes(self) -> None:
        pass

    @override
    def after_instantiate_classes(self) -> None:
        pass

    @property
    def strategy(self) -> dict[str, Any]:
        """The strategy's arguments.

        Raises:
            ValueError: It's another strategy.
        """
        given = self.config.fit.trainer.strategy
        name = given if isinstance(given, str) else given.class_path
        if name.rsplit(".", 1)[-1] != MegatronParallelStrategy.__name__:
            raise ValueError(f"scaling measures MegatronParallelStrategy; the recipe's trainer.strategy is {name}")
        return dict(given.init_args)

    @property
    def micro_batch_size(self) -> int:
        """Samples per micro batch of one data-parallel rank.

        Raises:
            ValueError: The data module has no such argument.
        """
        data = self.config.fit.data
        size = data.get("init_args", Namespace()).get("micro_batch_size")
        if size is None:
            raise ValueError(f"{data.class_path} has no micro_batch_size, so the work of a step isn't known")
        return int(size)

    @property
    def device_type(self) -> str:
        """Where the recipe runs on this machine."""
        accelerator = self.config.fit.trainer.accelerator
        if accelerator in ("cpu", "cuda"):
            return str(accelerator)
        import torch

        return "cuda" if torch.cuda.is_available() or accelerator == "gpu" else "cpu"


def plan_points(arguments: Sequence[str], devices: Sequence[int], vary: str, mode: str) -> list[PlannedPoint]:
    """Checks all points before any of them runs.

    Args:
        arguments: Of `lt-parallel fit`: the recipe and overrides.
        devices: Numbers of devices; 1 among them.
        vary: "dp", "tp" or "pp": what the devices are used for.
        mode: "strong": the recipe's global batch at every point; "weak": times the number of devices.

    Raises:
        ValueError: A point can't be run, with the reason and what to change.
    """
    if 1 not in devices:
        raise ValueError(f"--devices {' '.join(map(str, devices))}: 1 must be among them; speedup is relative to it")
    recipe = ParsedRecipe(arguments)
    _require_devices(max(devices), recipe.device_type)
    given = recipe.strategy
    size_name = VARIED[vary]
    for name in _SIZES:
        if name != size_name and (given.get(name) or 1) > 1:
            raise ValueError(
                f"the recipe sets {name}={given[name]}, which 1 device can't hold; measure with "
                f"--trainer.strategy.{name}=1" + (", or vary that size" if name in VARIED.values() else "")
            )
    batch = given.get("global_batch_size") or (given.get("num_microbatches") or 1) * recipe.micro_batch_size
    points = []
    for count in sorted(set(devices)):
        own = {} if size_name is None else {size_name: str(count)}
        if count == 1 and size_name is not None:
            own |= {name: off for name, off in _ONLY_WITH[size_name].items() if given.get(name)}
        global_batch = batch * count if mode == "weak" else batch
        _require_whole_steps(count, global_batch, recipe.micro_batch_size, own)
        own |= {"global_batch_size": str(global_batch), "num_microbatches": "null"}
        overrides = [f"--trainer.strategy.{name}={value}" for name, value in own.items()]
        points.append(
            PlannedPoint(count, (*arguments, "--trainer.num_nodes=1", f"--trainer.devices={count}", *overrides))
        )
    return points


def _require_devices(wanted: int, device_type: str) -> None:
    if device_type == "cuda":
        import torch

        if wanted > torch.cuda.device_count():
            raise ValueError(f"--devices {wanted}: this machine has {torch.cuda.device_count()} CUDA devices")


def _require_whole_steps(devices: int, global_batch_size: int, micro_batch_size: int, sizes: dict[str, str]) -> None:
    parallel = {name: int(value) for name, value in sizes.items() if name in _SIZES}
    try:
        plan = BatchPlan(ParallelSizes(world_size=devices, **parallel), None, global_batch_size)
        plan.num_microbatches_of(SimpleNamespace(batch_size=micro_batch_size))
    except ValueError as error:
        raise ValueError(f"--devices {devices}: {error}") from error


def run_points(
    points: Sequence[PlannedPoint], *, steps: int, repeats: int, folder: Path, timeout_s: float, show: Any
) -> list[ScalingPoint]:
    """Runs every point `repeats` times.

    Args:
        points: From `plan_points`.
        steps: Steps measured per run, after as many to warm up.
        repeats: Runs per point.
        folder: For the runs' files and output.
        timeout_s: Limit of one run.
        show: Called with (number of runs done, number of all, what comes next).

    Raises:
        ChildProcessError: A run failed; with the last lines it wrote.
    """
    results: dict[int, list[dict[str, Any]]] = {point.devices: [] for point in points}
    done = 0
    for repeat in range(repeats):
        for point in reversed(points) if repeat % 2 == 0 else points:  # the likeliest to fail comes first
            show(done, repeats * len(points), point.title)
            output = folder / f"devices{point.devices}_run{repeat + 1}.json"
            results[point.devices].append(_run(point, steps, output, timeout_s))
            done += 1
    show(done, done, "done")
    return [scaling_point(devices, runs) for devices, runs in results.items()]


def _run(point: PlannedPoint, steps: int, output: Path, timeout_s: float) -> dict[str, Any]:
    """One run; its output goes to a file beside its result."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    log = output.with_suffix(".log")
    worker = [sys.executable, "-m", "lt_parallel.scaling.worker", f"--output={output}", f"--steps={steps}", "--"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*worker, *point.arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,  # so that all ranks of a run can be ended together
        )
        try:
            status: int | None = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                _end_session(process.pid)
                process.wait()
    if status != 0 or not output.is_file():
        reason = f"ended with status {status}" if status is not None else f"took longer than {timeout_s / 60:g} minutes"
        last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:])
        raise ChildProcessError(f"the run on {point.title} {reason} (all of it: {log}):\n{last}")
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def _end_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def scaling_point(devices: int, runs: Sequence[dict[str, Any]]) -> ScalingPoint:
    """The measurements of one number of devices; the parts of a step are those of the run in the middle.

    Args:
        devices: How many.
        runs: What each run's worker wrote.
    """
    rates = [run["metrics"]["train/tokens_per_sec"] for run in runs]
    middle = sorted(runs, key=lambda run: run["metrics"]["train/tokens_per_sec"])[(len(runs) - 1) // 2]
    return ScalingPoint(devices, tokens_per_sec=tuple(rates), breakdown=breakdown(middle))


def breakdown(run: dict[str, Any]) -> StepBreakdown:
    """A step in parts that exclude each other, from what `ThroughputMonitor` and the profile measured.

    Within the schedule, what isn't compute or gradient sync is idle time. Of it the bubble is what the formula gives
    for the measured compute, the imbalance what the slowest stage computes more than the mean; the remainder is waiting
    for the neighbours' tensors. Collectives inside the layers (all of a profiled step's, less the gradient sync) are
    communication, not compute.
    """
    metrics = {name.removeprefix("train/"): value for name, value in run["metrics"].items()}
    step_s, compute_s, sync_s = metrics["step_s"], metrics["compute_s"], metrics["gradient_sync_s"]
    in_layers_s = min(compute_s, max(0.0, run["collective_share"] * step_s - sync_s))
    idle_s = max(0.0, metrics["forward_backward_s"] - sync_s - compute_s)
    formula = metrics.get("pipeline_bubble_formula")
    if formula is None:
        bubble_s = imbalance_s = neighbours_s = 0.0
    else:
        stretch = 1 / (1 - formula)  # schedule time over compute time, without any other loss
        bubble_s = min(idle_s, compute_s * (stretch - 1))
        imbalance_s = min(idle_s - bubble_s, (metrics["slowest_compute_s"] - compute_s) * stretch)
        neighbours_s = idle_s - bubble_s - imbalance_s
    parts = {
        "compute_s": compute_s - in_layers_s,
        "communication_s": sync_s + in_layers_s + neighbours_s,
        "bubble_s": bubble_s,
        "imbalance_s": imbalance_s,
        "data_wait_s": metrics["data_wait_s"],
        "optimizer_s": metrics["optimizer_s"],
    }
    rest_s = max(0.0, step_s - sum(parts.values()))
    tokens_per_step = metrics["tokens_per_sec"] * step_s
    return StepBreakdown(
        step_s=step_s,
        tokens_per_step=round(tokens_per_step),
        processes_per_core=run["processes_per_core"],
        rest_s=rest_s,
        **parts,
    )
