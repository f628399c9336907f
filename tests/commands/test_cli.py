"""What a user types: `lt-parallel fit` and its relatives, in processes of their own, with one rank and with two.

The commands that don't depend on each other run two at a time before the first test looks at them.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.processes import descendants

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).parent / "lt-parallel"
TIMEOUT_S = 270
MODULES = """
from lt_parallel.models import GPTModule


class FailsOnRank1(GPTModule):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1:
            raise RuntimeError("rank 1 can't go on")
        return super().training_step(batch, batch_idx)
"""
TWO_RANKS = ("--trainer.devices=2", "--trainer.strategy.tensor_model_parallel_size=2")


@dataclass
class Done:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def error_lines(self) -> list[str]:
        """What the user reads from the error on."""
        start = self.stderr.find("error: ")
        return self.stderr[start:].strip().splitlines() if start >= 0 else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user")
    text = "\n".join(f"def f{i}(x):\n    return x + {i * 7919 % 1000}\n" for i in range(2000))
    for name in "abcd":
        (path / f"{name}.txt").write_text(text + name)
    (path / "usermodules.py").write_text(MODULES)
    return path


def _run(folder: Path, *arguments: str) -> Done:
    start = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}
    environment["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{folder}"
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    done = subprocess.run(
        [str(COMMAND), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def _interrupt(folder: Path, rows: int, metrics: Path, *arguments: str) -> Done:
    """As `_run`, with Ctrl-C for all its processes, as a terminal sends it, once it has logged a few rows."""
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(folder / "cache")}
    environment.pop("PL_GLOBAL_SEED", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [str(COMMAND), *arguments]
    run = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)
    try:
        while run.poll() is None and time.monotonic() - start < TIMEOUT_S:
            if metrics.exists() and len(metrics.read_text().splitlines()) > rows:
                break
            time.sleep(0.1)
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGINT)
        stdout, stderr = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    return Done(run.returncode, stdout, stderr, time.monotonic() - start)


def _tiny(command: str, *overrides: str, paths: str = "[a.txt,b.txt,c.txt,d.txt]") -> tuple[str, ...]:
    return (
        command,
        f"--config={REPOSITORY / 'recipes' / 'gpt_tiny.yaml'}",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=2",
        "--trainer.limit_val_batches=1",
        "--trainer.val_check_interval=2",
        "--model.hidden_size=32",
        "--model.seq_length=32",
        "--data.seq_length=32",
        f"--data.paths={paths}",
        *overrides,
    )


COMMANDS = {
    "one rank": _tiny("fit", "--trainer.logger=false", "--trainer.strategy.global_batch_size=4"),
    "two ranks": _tiny("fit", *TWO_RANKS, "--model.num_layers=2", "--trainer.logger.name=two"),
    "misspelt": _tiny("fit", "--trainer.strategy.tensor_modl_parallel_size=2"),
    "sizes": _tiny("fit", "--trainer.devices=3", "--trainer.strategy.tensor_model_parallel_size=2"),
    "heads": _tiny("fit", "--trainer.devices=3", "--trainer.strategy.tensor_model_parallel_size=3"),
    "both counts": _tiny("fit", "--trainer.strategy.num_microbatches=4"),
    "no text": _tiny("fit", *TWO_RANKS, paths="[missing.txt]"),
    "fails on rank 1": _tiny("fit", *TWO_RANKS, "--model=usermodules.FailsOnRank1"),
}


@pytest.fixture(scope="module")
def commands(folder: Path) -> Iterator[dict[str, Future[Done]]]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(_run, folder, *arguments) for name, arguments in COMMANDS.items()}


@pytest.mark.timeout(600)
def test_fit_on_one_rank_without_a_logger(commands: dict[str, Future[Done]], folder: Path) -> None:
    done = commands["one rank"].result()
    assert done.status == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"Finished fit: 2 steps, train_loss \d\.\d+, val_loss \d\.\d+ -> runs/gpt_tiny", last), last
    saved = yaml.safe_load((folder / "runs" / "gpt_tiny" / "config.yaml").read_text())
    assert saved["trainer"]["strategy"]["init_args"]["global_batch_size"] == 4
    assert "Warning" not in done.stderr, done.stderr


@pytest.mark.timeout(600)
def test_fit_on_two_ranks_then_validate_and_predict_on_one(commands: dict[str, Future[Done]], folder: Path) -> None:
    done = commands["two ranks"].result()
    assert done.status == 0, done.stderr
    run = folder / "runs" / "two" / "version_0"
    assert done.stdout.splitlines()[-1].endswith(f"-> {run.relative_to(folder)}")
    assert done.stdout.count("Finished") == 1
    assert "Warning" not in done.stderr, done.stderr
    config = run / "config.yaml"
    saved = yaml.safe_load(config.read_text())
    assert saved["trainer"]["strategy"]["init_args"]["tensor_model_parallel_size"] == 2
    assert saved["model"]["init_args"]["num_layers"] == 2
    val_loss = re.search(r"val_loss (\S+)", done.stdout)
    assert val_loss is not None

    (checkpoint,) = (run / "checkpoints").iterdir()
    again = (f"--config={config}", f"--ckpt_path={checkpoint}", "--trainer.logger=false", "--trainer.devices=1")
    one_rank = (*again, "--trainer.strategy.tensor_model_parallel_size=1")
    with ThreadPoolExecutor(max_workers=2) as pool:
        validation = pool.submit(_run, folder, "validate", *one_rank)
        prediction = pool.submit(_run, folder, "predict", *one_rank, "--model.max_new_tokens=4")
    validated, predicted = validation.result(), prediction.result()
    assert validated.status == 0, validated.stderr
    assert f"Finished validate: val_loss {val_loss[1]} ->" in validated.stdout
    assert predicted.status == 0, predicted.stderr
    assert "--- 'import ' continues:" in predicted.stdout
    assert "Finished predict: 3 continuations" in predicted.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("misspelt", ["'tensor_modl_parallel_size'", "did you mean --trainer.strategy.tensor_model_parallel_size"]),
        ("sizes", ["world_size=3", "tensor_model_parallel_size=2"]),
        ("heads", ["num_attention_heads=4", "tensor_model_parallel_size=3"]),
        ("both counts", ["num_microbatches=4", "global_batch_size=16"]),
        ("no text", ["'missing.txt' doesn't exist"]),
        ("fails on rank 1", ["rank 1 failed with RuntimeError: rank 1 can't go on"]),
    ],
)
def test_an_error_is_short_names_the_value_and_ends_every_rank(
    commands: dict[str, Future[Done]], name: str, words: list[str]
) -> None:
    done = commands[name].result()
    assert done.status not in (0, None), done.stdout
    lines = done.error_lines
    assert lines, done.stderr
    assert len(lines) <= 15
    for word in words:
        assert word in lines[0]
    assert done.stderr.count("error: ") == 1, done.stderr
    for unwanted in ("Traceback", "usage:", "Finished"):
        assert unwanted not in done.stderr + done.stdout


@pytest.mark.timeout(600)
def test_ctrl_c_ends_every_rank_and_says_how_far_the_run_came(folder: Path) -> None:
    run = folder / "runs" / "long" / "version_0"
    arguments = _tiny("fit", *TWO_RANKS, "--trainer.max_steps=100000", "--trainer.logger.name=long")
    done = _interrupt(
        folder, 3, run / "metrics.csv", *arguments, "--trainer.limit_val_batches=0", "--trainer.val_check_interval=1.0"
    )
    assert done.status == 130, done.stderr
    last = done.stderr.splitlines()[-1]
    steps = re.fullmatch(
        r"Interrupted fit: (\d+) steps, train_loss \d\.\d+, no checkpoint written -> runs/long/version_0", last
    )
    assert steps is not None, done.stderr
    assert int(steps[1]) >= 1
    assert done.stderr.count("Interrupted") == 1
    for unwanted in ("Traceback", "error", "Warning"):
        assert unwanted not in done.stderr, done.stderr
    assert [command for command in descendants().values() if "--trainer.logger.name=long" in command] == []


def test_an_unknown_sub_command_is_named(folder: Path) -> None:
    done = _run(folder, "fti")
    assert done.status == 2
    assert done.error_lines == ["error: 'fti' is no sub-command; did you mean fit?"]


def test_no_rank_outlives_its_command(commands: dict[str, Future[Done]]) -> None:
    for future in commands.values():
        future.result()
    left = [command for command in descendants().values() if "lt-parallel" in command]
    assert left == []
