"""Saving and resuming at the same layout: the numbers go on as if nothing had happened, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import MICRO_BATCH, OPTIMIZER, SEED, SEQ_LENGTH, SHAPES, VOCAB_SIZE, Sequences, StepNumbers
from tests.ranks.parity_runs import build_trainer as parity_trainer
from tests.support.ranks import RankError, run_ranks

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "dp2 optim": (2, {"data_parallel_sharding_strategy": "optim"}),
    "tp2 pp2 sp": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "pp2 vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2 optim_grads_params": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
}


def build(world_size: int, strategy: dict[str, Any], **options: Any) -> tuple[L.Trainer, GPTModule, StepNumbers]:
    L.seed_everything(SEED, verbose=False)
    numbers = StepNumbers()
    defaults = {"devices": world_size, "limit_val_batches": 2, "check_val_every_n_epoch": None}
    trainer = parity_trainer(numbers, strategy, **{**defaults, **options})
    return trainer, GPTModule(VOCAB_SIZE, SEQ_LENGTH, **SHAPES["gpt2"], **OPTIMIZER, **DROPOUT), numbers


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    # 5 steps an epoch: the runs below stop and resume in the middle of the second one.
    train = DataLoader(Sequences(85), batch_size=MICRO_BATCH, shuffle=True)
    return train, DataLoader(Sequences(16), batch_size=MICRO_BATCH)


def weights(module: GPTModule) -> list[torch.Tensor]:
    values = [parameter.detach() for parameter in module.parameters()]
    return [(value.to_local() if isinstance(value, DTensor) else value).clone() for value in values]


def uninterrupted(world_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    trainer, module, numbers = build(world_size, strategy)
    trainer.fit(module, *loaders())
    return {"numbers": numbers.numbers(), "weights": weights(module), "samples": trainer.strategy.consumed_samples}


def stopped_at_7(world_size: int, strategy: dict[str, Any], directory: str) -> None:
    checkpoint = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    trainer, module, _ = build(world_size, strategy, max_steps=7, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(module, *loaders())


def resumed(world_size: int, strategy: dict[str, Any], path: str) -> dict[str, Any]:
    trainer, module, numbers = build(world_size, strategy)
    trainer.fit(module, *loaders(), ckpt_path=path)
    return {"numbers": numbers.numbers(), "weights": weights(module), "samples": trainer.strategy.consumed_samples}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_is_bitwise(layout: str, tmp_path: Path) -> None:
    world_size, strategy = LAYOUTS[layout]
    whole = run_ranks(uninterrupted, world_size, world_size, strategy)
    run_ranks(stopped_at_7, world_size, world_size, strategy, str(tmp_path))
    (path,) = tmp_path.iterdir()
    assert path.name == "step=7.ckpt" and path.is_dir()
    parts = run_ranks(resumed, world_size, world_size, strategy, str(path))
    for rank, (expected, found) in enumerate(zip(whole, parts, strict=True)):
        for name in ("loss", "grad_norm"):
            assert found["numbers"][name] == expected["numbers"][name][7:], (rank, name)
        assert found["numbers"]["val_loss"] == expected["numbers"]["val_loss"]
        assert found["samples"] == expected["samples"] == 160
        assert all(map(torch.equal, found["weights"], expected["weights"])), rank


def validated(world_size: int, strategy: dict[str, Any], path: str) -> float:
    trainer, module, _ = build(world_size, strategy)
    return trainer.validate(module, loaders()[1], ckpt_path=path, verbose=False)[0]["val_loss"]


def saved_and_validated(world_size: int, strategy: dict[str, Any], path: str) -> float:
    trainer, module, numbers = build(world_size, strategy, max_steps=3, val_check_interval=3)
    trainer.fit(module, *loaders())
    trainer.save_checkpoint(path, weights_only=True)
    return numbers.val_losses[-1]


def test_weights_only_checkpoint_serves_another_layout(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.ckpt")
    expected = run_ranks(saved_and_validated, 2, 2, {"tensor_model_parallel_size": 2}, path)[0]
    found = run_ranks(validated, 2, 2, {"pipeline_model_parallel_size": 2}, path)
    assert found == pytest.approx([expected, expected], abs=5e-6)


def test_saving_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "same.ckpt")
    run_ranks(saved_and_validated, 1, 1, {}, path)
    second = run_ranks(saved_and_validated, 2, 2, {"tensor_model_parallel_size": 2}, path)[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["same.ckpt"]
    assert run_ranks(validated, 1, 1, {}, path)[0] == pytest.approx(second, abs=5e-6)


def children_after_saving(path: str) -> int:
    saved_and_validated(1, {}, path)
    return len(psutil.Process().children(recursive=True))


def test_saving_starts_no_process(tmp_path: Path) -> None:
    assert run_ranks(children_after_saving, 1, str(tmp_path / "alone.ckpt")) == [0]


@pytest.mark.parametrize("kind", ["missing", "file", "empty directory"])
def test_what_is_no_checkpoint_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "here.ckpt"
    path.write_text("no") if kind == "file" else path.mkdir() if kind == "empty directory" else None
    words = {
        "missing": "no such checkpoint",
        "file": "a file, not a directory",
        "empty directory": "without trainer.pt",
    }
    with pytest.raises(RankError, match=words[kind]):
        run_ranks(validated, 1, 1, {}, str(path))
