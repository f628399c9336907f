"""`lt-parallel scaling` as a user types it: three trainings with one deliberate fault each get the right verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lt_parallel.recipe_files import recipe_path
from tests.ranks.test_logging import wandb_records

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def scaling(
    folder: Path, *arguments: str, timeout_s: float = 240, environment: dict[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lt_parallel.cli", "scaling", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def slow_recipe(folder: Path) -> Path:
    """A recipe whose data take 20 ms per sample, far more than the rest of a step."""
    recipe = yaml.safe_load(recipe_path("gpt_tiny").read_text())
    recipe["data"]["class_path"] = "tests.support.slow_text.SlowTextDataModule"
    recipe["data"]["init_args"]["sample_s"] = 0.02
    path = folder / "slow.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


SMALL = ("--model.hidden_size=64", "--model.num_layers=2", "--model.seq_length=32", "--data.seq_length=32")
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    # All layers on the second of two stages.
    "unequal stages": ("pp", ("--trainer.strategy.pipeline_model_parallel_layout=E|ttttL",)),
    "data wait": ("dp", SMALL),
    "small batch": (
        "dp",
        (
            *SMALL[:2],
            "--model.seq_length=8",
            "--data.seq_length=8",
            "--data.micro_batch_size=1",
            "--trainer.strategy.global_batch_size=2",
        ),
    ),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.slow] * (name != "data wait")) for name in FAULTS]
)
def test_the_fault_is_named(fault: str, tmp_path: Path) -> None:
    vary, options = FAULTS[fault]
    recipe = slow_recipe(tmp_path) if fault == "data wait" else recipe_path("gpt_tiny")
    measure = ("--config", str(recipe), "--devices", "1", "2", "--vary", vary, "--steps", "4", "--repeats", "1")
    ended = scaling(tmp_path, *measure, "--trainer.accelerator=cpu", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"devices: {fault} takes" in ended.stdout
    folder = tmp_path / "runs/scaling"
    report: dict[str, Any] = json.loads((folder / "scaling.json").read_text())
    one, two = report["rows"]
    assert (one["devices"], two["devices"], two["cause"]) == (1, 2, fault)
    assert one["breakdown"]["tokens_per_step"] == two["breakdown"]["tokens_per_step"]  # fixed work
    for row in (one, two):
        step = row["breakdown"]
        assert row["rate"] == pytest.approx(step["tokens_per_step"] / step["step_s"], rel=1e-3)
    assert (folder / "scaling.png").stat().st_size > 10_000
    assert "<svg" in (folder / "scaling.html").read_text()


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
    ids=lambda ending: ending.name,
)
def test_no_training_outlives_the_command(ending: signal.Signals, tmp_path: Path) -> None:
    measure = ["--config", str(recipe_path("gpt_tiny")), "--devices", "1", "2", "--steps", "10000", "--repeats", "1"]
    command = subprocess.Popen(
        [sys.executable, "-m", "lt_parallel.cli", "scaling", *measure, "--trainer.accelerator=cpu", *SMALL],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def trainings() -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if in_folder(each, tmp_path) and each.pid != command.pid]

    try:
        wait_until(lambda: len(trainings()) == 2, 60)
        command.send_signal(ending)
        command.wait(20)
        wait_until(lambda: not trainings(), 10)
    finally:
        for process in (command, *trainings()):
            process.kill()


def in_folder(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


def test_textbook_numbers_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("devices,tokens_per_sec\n1,100000\n2,190000\n4,360000\n8,650000\n")
    ended = scaling(tmp_path, "--from", "rates.csv", "--output", "out")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "out/scaling.json").read_text())["rows"]
    assert [row["speedup"] for row in rows] == [1.0, 1.9, 3.6, 6.5]
    assert [round(row["efficiency"], 6) for row in rows] == [1.0, 0.95, 0.9, 0.8125]
    for shown in ("100.00%", "95.00%", "90.00%", "81.25%"):
        assert shown in ended.stdout


def test_table_and_chart_go_to_wandb(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("devices,tokens_per_sec\n1,100000\n2,190000\n")
    environment = {**ENVIRONMENT, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    ended = scaling(tmp_path, "--from", "rates.csv", "--wandb", "mine", environment=environment)
    assert ended.returncode == 0, ended.stderr
    (run,) = tmp_path.glob("runs/scaling/wandb/offline-run-*")
    values: dict[str, Any] = {}
    for record in wandb_records(next(run.glob("*.wandb"))):
        values |= {"/".join([item.key, *item.nested_key]).strip("/"): item.value_json for item in record.history.item}
    assert json.loads(values["scaling/_type"]) == "table-file" and json.loads(values["scaling/nrows"]) == 2
    (table,) = run.glob("files/media/table/scaling*.json")
    assert json.loads(table.read_text())["data"][1][:2] == ["2", "190,000"]
    (chart,) = run.glob("files/media/images/scaling_chart*.png")
    assert chart.read_bytes() == (tmp_path / "runs/scaling/scaling.png").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --config RECIPE.yaml --devices 1 2 ..., or --from FILE.csv"),
        (("--config", "a.yaml", "--from", "a.csv"), "give either --config"),
        (("--config", str(recipe_path("gpt_tiny"))), "--config needs --devices"),
        (("--devices", "0"), "'0' must be an integer of at least 1"),
        (("--from", "two.csv", "--timeout-minutes", "nan"), "'nan' must be a positive number of minutes"),
        (("--config", "a.yaml", "--config", "b.yaml", "--devices", "1"), "File does not exist"),
        (("--from", "two.csv"), "no row for 1 device (found 2)"),
        (("--from", "none.csv"), "can't read 'none.csv'"),
        (("--from", "two.csv", "--bogus=1"), "unknown argument: --bogus=1"),
        (("--from", "two.csv", "--devices", "1"), "unknown argument: --devices (nothing is run with --from)"),
        (("--from", "two.csv", "--output", "two.csv/out"), "can't write to 'two.csv/out'"),
        (("--config", str(recipe_path("gpt_tiny")), "--devices", "1", "2", "--trainer.bogus=1"), "--trainer.bogus=1"),
        (("--config", str(recipe_path("gpt_tiny")), "--devices", "2"), "1 must be among them"),
    ],
)
def test_one_clear_error(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("devices,tokens_per_sec\n2,100\n")
    ended = scaling(tmp_path, *arguments, timeout_s=60)
    assert ended.returncode != 0
    assert message in ended.stderr and "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) <= 3
