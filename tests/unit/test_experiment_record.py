"""Values made plain, secrets hidden, git asked; and runs that the record has less to say about."""

import enum
import functools
import json
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy
import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lt_parallel import outcome
from lt_parallel.callbacks import experiment_record
from lt_parallel.callbacks.experiment_record import (
    KEY,
    ExperimentRecord,
    command_line,
    device_names,
    git_state,
    plain,
    software_versions,
)
from lt_parallel.lightning_cli import MegatronCLI
from lt_parallel.loggers import log_image, log_table
from lt_parallel.recipe_files import recipe_path


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        (float("inf"), "inf"),
        ("text", "text"),
        (Color.RED, "RED"),
        (Level.LOW, "LOW"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cuda", 1), "cuda:1"),
        (Path("a/b"), "a/b"),
        (torch.nn.functional.silu, "torch.nn.functional.silu"),
        (functools.partial(torch.nn.functional.silu, inplace=True), "partial(torch.nn.functional.silu)"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
        (timedelta(minutes=1), "datetime.timedelta"),
        (numpy.float32(0.5), 0.5),
        (numpy.float64("nan"), "nan"),
        (torch.tensor(3), 3),
        (numpy.ones(2), "numpy.ndarray"),
        ({"a": (1, Color.RED), 2: {"b": {3, 1}}}, {"a": [1, "RED"], "2": {"b": ["1", "3"]}}),
    ],
)
def test_values_become_plain(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == yaml.safe_load(yaml.safe_dump(plain(value)))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["lt-parallel", "fit", "--model.lr=1e-3", "a b"], "lt-parallel fit --model.lr=1e-3 'a b'"),
        (["--logger.api_key=abc"], "'--logger.api_key=***'"),
        (["--logger.init_args.api_key", "abc", "x"], "--logger.init_args.api_key '***' x"),
        (["--password", "--other"], "--password --other"),
        (["--hf_token=abc", "--token", "abc"], "'--hf_token=***' --token '***'"),
        (['{"api_key": "abc abc", "lr": 1}'], """'{"api_key": ***, "lr": 1}'"""),
        (["--logger={secret: abc, lr: 1}", "--secret=abc abc"], "'--logger={secret: ***, lr: 1}' '--secret=***'"),
        (["https://me:abc@host/x"], "'https://***@host/x'"),
        (["--model.max_new_tokens=5", "--data.tokenizer=b"], "--model.max_new_tokens=5 --data.tokenizer=b"),
        (["--data.eos_token=b", "--pad_token", "b"], "--data.eos_token=b --pad_token b"),
        (["--secret_key=abc", "--private-key", "abc"], "'--secret_key=***' --private-key '***'"),
        (["--hub_token", "abc", "--github_token=abc"], "--hub_token '***' '--github_token=***'"),
        (["--wandb_key=abc", "--pwd=abc", "--passphrase=abc"], "'--wandb_key=***' '--pwd=***' '--passphrase=***'"),
        (["-H", "Authorization: Bearer abc"], "-H 'Authorization: *** ***'"),
        (["hf_abcabcabcabcabcabcabc", "sk-abcabcabcabcabcabcabc"], "'***' '***'"),
    ],
)
def test_command_line_hides_secrets(arguments: list[str], shown: str) -> None:
    assert command_line(arguments) == shown
    assert "abc" not in command_line(arguments)


# ---------------------------------------------------------------- git


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"revision": None, "modified": None}
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == unknown, "no repository"
    git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) == unknown, "no revision yet"
    file = tmp_path / "file"
    file.write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message=one")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert len(revision) == 40
    (tmp_path / "untracked").touch()
    assert git_state(tmp_path) == {"revision": revision, "modified": False}
    monkeypatch.chdir(tmp_path)
    file.write_text("2")
    assert git_state() == {"revision": revision, "modified": True}, "the working directory by default"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == unknown, "no git"


def test_git_that_takes_too_long_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(experiment_record, "_GIT_TIMEOUT_S", 0.2)
    assert git_state() == {"revision": None, "modified": None}


# ---------------------------------------------------------------- versions and devices


def test_versions_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = software_versions()
    assert versions["torch"] == torch.__version__ or versions["torch"] in torch.__version__
    assert {"python", "lightning", "megatron-core", "lt-parallel", "transformer-engine", "cuda"} <= versions.keys()
    (cpus,) = device_names([torch.device("cpu")] * 2)
    assert cpus.startswith("2 x cpu (")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index // 2}")
    assert device_names([torch.device("cuda", i) for i in range(3)]) == ["2 x GPU 0", "1 x GPU 1"]


# ---------------------------------------------------------------- runs


def run(trainer_method: str, **options: Any) -> L.Trainer:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=1, limit_val_batches=1, limit_test_batches=1, **quiet, **options
    )
    options = {} if trainer_method == "fit" else {"verbose": False}
    getattr(trainer, trainer_method)(BoringModel(), **options)
    return trainer


@pytest.mark.parametrize("method", ["fit", "validate", "test"])
def test_another_strategy_leaves_out_what_only_ours_knows(method: str, tmp_path: Path) -> None:
    run(method, logger=CSVLogger(tmp_path, name="", version=""), callbacks=[ExperimentRecord()])
    record = yaml.safe_load((tmp_path / "hparams.yaml").read_text())[KEY]
    assert record.keys() == {"run", "software", "code"}
    assert record["run"]["function"] == method
    assert record["run"]["precision"] == "32-true"
    assert "pytest" in record["run"]["command"]
    assert record["code"]["revision"] == git_state()["revision"]


def test_no_logger_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_record, "experiment_record", lambda *args: pytest.fail("nobody reads it"))
    run("fit", logger=False, callbacks=[ExperimentRecord()])


def test_the_command_line_tool_adds_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    cli = MegatronCLI("fit", ["--config", str(recipe_path("gpt_tiny")), "--trainer.accelerator=cpu"], run=False)
    assert sum(isinstance(callback, ExperimentRecord) for callback in cli.trainer.callbacks) == 1


# ---------------------------------------------------------------- tables and images


def test_tables_and_images_go_where_they_can(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    Image.new("RGB", (3, 2), (255, 0, 0)).save(picture)
    board, table = TensorBoardLogger(tmp_path, name="board", version=""), CSVLogger(tmp_path, name="csv", version="")
    log_table([board, table], "sizes", ["rank", "bytes"], [[0, 1.5], [1, 2.5]], step=3)
    log_image([board, table], "picture", picture, step=3)
    board.save()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    (image,) = events.Images("picture")
    assert (image.step, image.width, image.height) == (3, 3, 2)
    (text,) = events.Tensors("sizes/text_summary")
    assert text.step == 3
    assert text.tensor_proto.string_val[0].decode().splitlines()[0::2] == ["| rank | bytes |", "| 0 | 1.5 |"]
    assert not (tmp_path / "csv").exists()


# ---------------------------------------------------------------- a missing extra


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "WandbLogger: Requirement 'wandb>=0.12.10' not met. HINT: Try running `pip install -U 'wandb>=0.12.10'`",
            'WandbLogger: wandb is missing or too old; run pip install "lt-parallel[wandb]"',
        ),
        ("No module named 'wandb'", 'wandb is missing or too old; run pip install "lt-parallel[wandb]"'),
        (
            "No module named 'transformer_engine.pytorch'",
            'transformer_engine is missing or too old; run pip install "lt-parallel[te]"',
        ),
        ("No module named 'other'", "No module named 'other'"),
        ("micro_batch_size=3", "micro_batch_size=3"),
    ],
)
def test_a_missing_extra_is_named(message: str, shown: str) -> None:
    assert outcome.with_extra(message) == shown
    assert outcome.explain(ValueError(message)) == shown
