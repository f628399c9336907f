"""The record in each logger beside the module's own hyper-parameters, and one step axis over a resumed run."""

from __future__ import annotations

import csv
import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lt_parallel.callbacks.experiment_record import KEY, ExperimentRecord
from lt_parallel.callbacks.memory import MemoryMonitor
from lt_parallel.loggers import log_image, log_table
from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import (
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
from tests.ranks.test_logging import wandb_records
from tests.support.ranks import run_ranks

RUN_ID = "one-run"
#: What loggers add of their own: axes, wall time, and TensorBoard's placeholder for hyper-parameters.
AXES = {"step", "trainer/global_step", "_step", "_runtime", "_timestamp", "hp_metric"}
OBJECTS = ("sizes/", "picture/", "memory/ranks")
STEP_VALUES = {"train_loss", "val_loss", "grad_norm", "lr", "consumed_samples", "memory/parameters_gib"}


def module() -> GPTModule:
    return GPTModule(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER)


def loader(length: int = 203) -> DataLoader[Any]:
    return DataLoader(Sequences(length), batch_size=MICRO_BATCH)


def train(folder: str, part: str, max_steps: int, resume: bool) -> int:
    """Every rank logs to a folder of its own, if it logs."""
    L.seed_everything(SEED, verbose=False)
    own = Path(folder) / part / f"rank{os.environ['RANK']}"
    own.parent.mkdir(parents=True, exist_ok=True)
    if os.environ["RANK"] == "0":
        own.mkdir()
    loggers = [
        WandbLogger(save_dir=own, id=RUN_ID, offline=True, mode="offline"),
        CSVLogger(own, name="csv", version=""),
        TensorBoardLogger(own, name="board", version=""),
    ]
    trainer = build_trainer(
        StepNumbers(),
        {"data_parallel_sharding_strategy": "optim", "config_overrides": {"softmax_scale": 0.2}},
        devices=2,
        max_steps=max_steps,
        val_check_interval=3,
        log_every_n_steps=1,
        logger=loggers,
        enable_checkpointing=True,
        callbacks=[
            ExperimentRecord(),
            MemoryMonitor(every_n_steps=3),
            ModelCheckpoint(folder, filename="last", enable_version_counter=False),
        ],
    )
    try:
        trainer.fit(module(), loader(), loader(45), ckpt_path=f"{folder}/last.ckpt" if resume else None)
        log_table(trainer.loggers, "sizes", ["rank", "bytes"], [[0, 1.5]], step=trainer.global_step - 1)
        log_image(trainer.loggers, "picture", f"{folder}/picture.png", step=trainer.global_step - 1)
    finally:
        import wandb

        wandb.finish()
        wandb.teardown()
    return int(trainer.global_step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("record")
    Image.new("RGB", (3, 2), (255, 0, 0)).save(folder / "picture.png")
    assert run_ranks(train, 2, str(folder), "first", 6, False) == [6, 6]
    assert run_ranks(train, 2, str(folder), "second", 12, True) == [12, 12]
    return folder


def wandb_file(own: Path) -> Path:
    (path,) = own.glob(f"wandb/offline-run-*/run-{RUN_ID}.wandb")
    return path


def wandb_steps(own: Path) -> dict[str, list[int]]:
    """By name, the steps at which it has a number."""
    steps: dict[str, list[int]] = {}
    for record in wandb_records(wandb_file(own)):
        if record.WhichOneof("record_type") != "history":
            continue
        row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for name, value in row.items():
            if isinstance(json.loads(value), int | float) and not name.startswith(OBJECTS):
                steps.setdefault(name, []).append(json.loads(row["trainer/global_step"]))
    return steps


def wandb_config(own: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for record in wandb_records(wandb_file(own)):
        kind = record.WhichOneof("record_type")
        update = record.run.config if kind == "run" else record.config if kind == "config" else None
        for item in [] if update is None else update.update:
            config["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return config


def csv_steps(own: Path) -> dict[str, list[int]]:
    steps: dict[str, list[int]] = {}
    with open(own / "csv" / "metrics.csv") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    steps.setdefault(name, []).append(int(row["step"]))
    return steps


def events(own: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(own / "board"))
    accumulator.Reload()
    return accumulator


def board_steps(own: Path) -> dict[str, list[int]]:
    found = events(own)
    return {name: [event.step for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


@pytest.mark.parametrize("read", [wandb_steps, csv_steps, board_steps])
def test_the_step_axis_goes_on_after_a_resume(read: Any, folder: Path) -> None:
    first, second = read(folder / "first" / "rank0"), read(folder / "second" / "rank0")
    assert first["train_loss"] == [*range(6)]
    assert second["train_loss"] == [*range(6, 12)]
    assert (first["memory/parameters_gib"], second["memory/parameters_gib"]) == ([2, 5], [8, 11])
    assert len(first["val_loss"]) == len(second["val_loss"]) == 2
    assert max(first["val_loss"]) < 7 <= min(second["val_loss"])


@pytest.mark.parametrize("part", ["first", "second"])
def test_loggers_hold_the_same_names_at_the_same_steps(part: str, folder: Path) -> None:
    own = folder / part / "rank0"
    wandb, in_csv, board = (
        {name: steps for name, steps in read(own).items() if name not in AXES}
        for read in (wandb_steps, csv_steps, board_steps)
    )
    assert wandb == in_csv == board
    assert wandb.keys() >= STEP_VALUES


@pytest.mark.parametrize("part", ["first", "second"])
def test_only_rank_0_writes(part: str, folder: Path) -> None:
    assert [path.name for path in (folder / part).iterdir()] == ["rank0"]
    assert len(list((folder / part).glob("**/offline-run-*"))) == 1


# ---------------------------------------------------------------- the record


def yaml_of(*path: str) -> Any:
    def read(own: Path) -> dict[str, Any]:
        loaded: dict[str, Any] = yaml.safe_load(own.joinpath(*path).read_text())
        return loaded

    return read


@pytest.mark.parametrize("part", ["first", "second"])
@pytest.mark.parametrize(
    "read", [wandb_config, yaml_of("csv", "hparams.yaml"), yaml_of("board", "hparams.yaml")], ids=["wandb", "csv", "tb"]
)
def test_each_logger_holds_record_and_hyperparameters(read: Any, part: str, folder: Path) -> None:
    config = read(folder / part / "rank0")
    assert config["num_layers"] == GPT2["num_layers"] and config["lr"] == OPTIMIZER["lr"], "the module's own"
    record = config[KEY]
    assert record["parallel"] == {
        "world_size": 2,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "data_parallel_size": 2,
        "expert_data_parallel_size": 2,
        "sequence_parallel": False,
        "pipeline_layout": "EttttL",
        "data_parallel_sharding_strategy": "optim",
        "layer_backend": "torch",
        "num_nodes": 1,
    }
    assert record["batch"] == {"micro_batch_size": 2, "num_microbatches": 4, "global_batch_size": 16}
    assert record["settings"]["model"]["params_dtype"] == "torch.float32"
    assert record["settings"]["model"]["softmax_scale"] == 0.2
    assert record["settings"]["ddp"]["use_distributed_optimizer"] is True
    assert record["owners"]["model"]["softmax_scale"] == "config_overrides"
    assert record["owners"]["model"]["params_dtype"] == "precision='32-true'"
    for target, fields in record["settings"].items():
        assert fields.keys() == record["owners"][target].keys()
    assert record["run"]["function"] == "fit"
    assert record["run"]["precision"] == "32-true"
    assert record["run"]["devices"][0].startswith("2 x cpu")
    assert record["software"]["megatron-core"]
    assert record["code"].keys() == {"revision", "modified"}


def test_tensorboard_shows_the_record_as_text(folder: Path) -> None:
    found = events(folder / "first" / "rank0")
    (text,) = found.Tensors(f"{KEY}/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert yaml.safe_load(shown.removeprefix("```yaml\n").removesuffix("```"))[KEY]["parallel"]["world_size"] == 2


def test_table_and_image_are_there(folder: Path) -> None:
    own = folder / "first" / "rank0"
    (table,) = own.glob("wandb/offline-run-*/files/media/table/sizes_*.table.json")
    assert json.loads(table.read_text()) == {"columns": ["rank", "bytes"], "data": [[0, 1.5]]}
    (picture,) = own.glob("wandb/offline-run-*/files/media/images/picture_*.png")
    assert Image.open(picture).size == (3, 2)
    found = events(own)
    assert [event.step for event in found.Images("picture")] == [5]
    assert [event.step for event in found.Tensors("sizes/text_summary")] == [5]


# ---------------------------------------------------------------- validate


def validate(folder: str, picture: str) -> None:
    trainer = build_trainer(
        StepNumbers(),
        {"tensor_model_parallel_size": 2, "num_microbatches": 3},
        devices=2,
        precision="bf16-mixed",
        logger=CSVLogger(f"{folder}/rank{os.environ['RANK']}", name="", version=""),
        callbacks=[ExperimentRecord()],
    )
    trainer.validate(module(), loader(45), verbose=False)
    log_image(trainer.loggers, "picture", picture)


def test_validate_is_recorded_too(tmp_path: Path) -> None:
    run_ranks(validate, 2, str(tmp_path), "/nonexistent.png")
    (path,) = tmp_path.glob("**/hparams.yaml")
    assert path.parent.name == "rank0"
    record = yaml.load(path.read_text(), yaml.FullLoader)[KEY]
    assert record["run"]["function"] == "validate"
    assert record["run"]["precision"] == "bf16-mixed"
    assert record["batch"] == {"micro_batch_size": 2, "num_microbatches": 3, "global_batch_size": 6}
    assert record["settings"]["model"]["params_dtype"] == "torch.bfloat16"


class Uploading(CSVLogger):
    """As WandbLogger(log_model=True), which can't be had offline."""

    _log_model = True


def train_with_uploads(folder: str) -> list[str]:
    options: dict[str, Any] = {"devices": 1, "max_steps": 1, "callbacks": [ExperimentRecord()]}
    trainer = build_trainer(StepNumbers(), {}, logger=Uploading(folder, name="", version=""), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module(), loader())
    return [str(each.message) for each in caught]


def test_checkpoints_that_a_logger_leaves_out_are_spoken_of(tmp_path: Path) -> None:
    (messages,) = run_ranks(train_with_uploads, 1, str(tmp_path))
    assert sum("Uploading(log_model=...) uploads single files" in message for message in messages) == 1
