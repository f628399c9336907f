"""Planning the points of a scaling measurement, and taking a measured step apart."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from lt_parallel.recipe_files import recipe_path
from lt_parallel.scaling.measured_run import collective_seconds
from lt_parallel.scaling.runs import PlannedPoint, breakdown, plan_points, run_points, scaling_point

RECIPE = ["--config", str(recipe_path("gpt_tiny")), "--trainer.accelerator=cpu"]  # global batch 16, micro batch 2


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored afterwards: recipes seed everything


def changes(point: PlannedPoint) -> dict[str, str]:
    """What a point adds to the recipe."""
    added = [argument.removeprefix("--trainer.") for argument in point.arguments[len(RECIPE) :]]
    return dict(argument.split("=") for argument in added)


def test_strong_scaling_keeps_the_global_batch() -> None:
    points = plan_points(RECIPE, [4, 1, 2, 2], "dp", "strong")
    assert [point.devices for point in points] == [1, 2, 4]
    for point in points:
        assert changes(point) == {
            "num_nodes": "1",
            "devices": str(point.devices),
            "strategy.global_batch_size": "16",
            "strategy.num_microbatches": "null",
        }


def test_weak_scaling_multiplies_it() -> None:
    batches = [changes(point)["strategy.global_batch_size"] for point in plan_points(RECIPE, [1, 2, 4], "tp", "weak")]
    assert batches == ["16", "32", "64"]


def test_global_batch_of_a_recipe_that_counts_micro_batches() -> None:
    recipe = [*RECIPE, "--trainer.strategy.global_batch_size=null", "--trainer.strategy.num_microbatches=6"]
    points = plan_points(recipe, [1, 2], "dp", "strong")
    assert [point.arguments[-2] for point in points] == ["--trainer.strategy.global_batch_size=12"] * 2


def test_one_device_drops_what_needs_several() -> None:
    recipe = [*RECIPE, "--trainer.strategy.sequence_parallel=true"]
    one, two = plan_points(recipe, [1, 2], "tp", "strong")
    assert "--trainer.strategy.sequence_parallel=false" in one.arguments
    assert "--trainer.strategy.tensor_model_parallel_size=2" in two.arguments
    assert "--trainer.strategy.sequence_parallel=false" not in two.arguments
    recipe = [*RECIPE, "--trainer.strategy.pipeline_model_parallel_layout=Et|tttL"]
    one, two = plan_points(recipe, [1, 2], "pp", "strong")
    assert "--trainer.strategy.pipeline_model_parallel_layout=null" in one.arguments
    assert "--trainer.strategy.pipeline_model_parallel_layout=null" not in two.arguments
    recipe = [*RECIPE, "--trainer.strategy.num_layers_per_virtual_pipeline_stage=1"]
    one, two = plan_points(recipe, [1, 2], "pp", "strong")
    assert "--trainer.strategy.num_layers_per_virtual_pipeline_stage=null" in one.arguments
    assert "--trainer.strategy.num_layers_per_virtual_pipeline_stage=null" not in two.arguments


@pytest.mark.parametrize(
    ("extra", "devices", "vary", "message"),
    [
        ([], [2, 4], "dp", "1 must be among them"),
        ([], [1, 3], "dp", r"--devices 3: global_batch_size=16 must be divisible"),
        ([], [1, 16], "dp", r"--devices 16: global_batch_size=16 must be divisible by micro batch 2 x"),
        (["--trainer.strategy.tensor_model_parallel_size=2"], [1, 2], "dp", "tensor_model_parallel_size=2, which 1"),
        (["--trainer.strategy.pipeline_model_parallel_size=2"], [1, 2], "tp", "pipeline_model_parallel_size=2, which"),
        (["--trainer.strategy.expert_model_parallel_size=2"], [1, 2], "dp", r"expert_model_parallel_size=1$"),
        (["--trainer.strategy=ddp"], [1, 2], "dp", "measures MegatronParallelStrategy; the .* is ddp"),
        (["--data=lightning.pytorch.demos.boring_classes.BoringDataModule"], [1], "dp", "Boring.* no micro_batch_size"),
        (["--trainer.accelerator=gpu"], [1, 2], "dp", r"--devices 2: this machine has \d+ CUDA devices"),
    ],
)
def test_points_that_cannot_be_run(extra: list[str], devices: list[int], vary: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_points([*RECIPE, *extra], devices, vary, "strong")


def measured(**metrics: float) -> dict[str, Any]:
    values = {
        "step_s": 1.0,
        "compute_s": 0.5,
        "slowest_compute_s": 0.5,
        "gradient_sync_s": 0.0,
        "forward_backward_s": 0.5,
        "data_wait_s": 0.1,
        "optimizer_s": 0.2,
        "tokens_per_sec": 100.0,
        **metrics,
    }
    return {
        "metrics": {f"train/{name}": value for name, value in values.items()},
        "collective_share": 0.0,
        "processes_per_core": 0.5,
    }


def test_parts_without_a_pipeline() -> None:
    run = measured(gradient_sync_s=0.1, forward_backward_s=0.6) | {"collective_share": 0.25}
    step = breakdown(run)
    assert step.parts() == pytest.approx(
        {
            "compute_s": 0.35,  # 0.15 s of the collectives are inside the layers
            "communication_s": 0.25,
            "bubble_s": 0.0,
            "imbalance_s": 0.0,
            "data_wait_s": 0.1,
            "optimizer_s": 0.2,
            "rest_s": 0.1,
        }
    )
    assert step.tokens_per_step == 100


def test_parts_of_a_pipeline() -> None:
    """2 stages, 4 micro batches: the formula's bubble is a fifth of the schedule, a quarter of its compute."""
    run = measured(
        pipeline_bubble_formula=0.2,
        compute_s=0.4,
        slowest_compute_s=0.48,
        forward_backward_s=0.65,
        gradient_sync_s=0.02,
    )
    step = breakdown(run)
    assert step.bubble_s == pytest.approx(0.1)
    assert step.imbalance_s == pytest.approx(0.08 * 1.25)
    assert step.communication_s == pytest.approx(0.02 + 0.65 - 0.02 - 0.4 - 0.1 - 0.1)
    assert sum(step.parts().values()) == pytest.approx(1.0)


def test_idle_time_is_not_counted_twice() -> None:
    run = measured(pipeline_bubble_formula=0.5, compute_s=0.4, slowest_compute_s=0.48, forward_backward_s=0.5)
    step = breakdown(run)
    assert (step.bubble_s, step.imbalance_s, step.communication_s) == pytest.approx((0.1, 0.0, 0.0))


def test_the_parts_are_those_of_the_middle_run() -> None:
    runs = [measured(tokens_per_sec=rate, step_s=100 / rate) for rate in (90.0, 110.0, 100.0)]
    point = scaling_point(2, runs)
    assert point.tokens_per_sec == (90.0, 110.0, 100.0)
    assert point.breakdown is not None and point.breakdown.step_s == 1.0


def test_overlapping_collectives_count_once_and_pairs_not_at_all() -> None:
    def event(name: str, start: float, end: float) -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("gloo:all_reduce", 0, 1e6),
        event("gloo:broadcast", 5e5, 15e5),
        event("gloo:send", 2e6, 4e6),
        event("aten::mm", 2e6, 4e6),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5e6, 6e6),
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 6e6, 7e6),
    ]
    assert collective_seconds(events) == pytest.approx(2.5)
    assert collective_seconds([]) == 0.0


def failing(arguments: list[str], timeout_s: float, folder: Path) -> str:
    point = PlannedPoint(1, tuple(arguments))
    with pytest.raises(ChildProcessError) as caught:
        run_points([point], steps=1, repeats=1, folder=folder, timeout_s=timeout_s, show=lambda *_: None)
    return str(caught.value)


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    message = failing([*RECIPE, "--data.paths=[nowhere.txt]"], 120, tmp_path)
    assert "the run on 1 device ended with status" in message and "nowhere.txt" in message
    assert str(tmp_path / "devices1_run1.log") in message


def test_a_run_that_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    began = time.monotonic()
    message = failing([*RECIPE, "--trainer.devices=2"], 6, tmp_path)
    assert "took longer than 0.1 minutes" in message and time.monotonic() - began < 30
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]


def test_worker_explains_itself() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "lt_parallel.scaling.worker", "--help"], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0 and "--steps" in shown.stdout


UNWANTED = ("RichProgressBar", "LearningRateMonitor", "EarlyStopping", "ModelCheckpoint", "DeviceStatsMonitor")


def test_what_a_recipe_has_besides_training_does_not_disturb_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks that need a logger or end runs, limits of the Trainer, and being inside another job."""
    monkeypatch.setenv("SLURM_NTASKS", "5")
    callbacks: list[Any] = [{"class_path": f"lightning.pytorch.callbacks.{name}"} for name in UNWANTED]
    callbacks[2]["init_args"] = {"monitor": "val_loss"}
    callbacks += [{"class_path": "lt_parallel.ThroughputMonitor"}]
    limits = {"fast_dev_run": True, "min_epochs": 2, "max_time": "00:00:00:01", "num_nodes": 2}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks, **limits}}))
    small = ("--model.hidden_size=32", "--model.seq_length=16", "--data.seq_length=16", "--trainer.accelerator=cpu")
    points = plan_points([*RECIPE, f"--config={tmp_path}/more.yaml", *small], [1], "dp", "strong")
    (point,) = run_points(points, steps=1, repeats=1, folder=tmp_path, timeout_s=100, show=lambda *_: None)
    assert point.devices == 1 and point.tokens_per_sec[0] > 0
