"""One script, one Trainer, several runs: fit, validate, fit on; and a module that outlives its Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import (
    MICRO_BATCH,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    SHAPES,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.support.ranks import RankError, run_ranks


def prepared(world_size: int, strategy: dict[str, Any], **options: Any) -> tuple[L.Trainer, GPTModule, StepNumbers]:
    L.seed_everything(SEED, verbose=False)
    numbers = StepNumbers()
    trainer = build_trainer(numbers, strategy, devices=world_size, **options)
    return trainer, GPTModule(VOCAB_SIZE, SEQ_LENGTH, **SHAPES["llama"], **OPTIMIZER), numbers


def train_loader() -> DataLoader[Any]:
    return DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True)


def val_loader() -> DataLoader[Any]:
    return DataLoader(Sequences(45), batch_size=MICRO_BATCH)


def fit_validate_fit(world_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    trainer, module, numbers = prepared(world_size, strategy, max_steps=4, limit_val_batches=0)
    trainer.fit(module, train_loader())
    trainer.limit_val_batches = 3
    first = trainer.validate(module, val_loader(), verbose=False)[0]["val_loss"]
    again = trainer.validate(module, val_loader(), verbose=False)[0]["val_loss"]
    # A second Trainer goes on with the same module: fresh optimizer, the weights as they are.
    second = build_trainer(numbers, strategy, devices=world_size, max_steps=3, limit_val_batches=0)
    second.fit(module, train_loader())
    return {"val": [first, again], "loss": numbers.losses, "grad_norm": numbers.grad_norms}


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        (2, {"data_parallel_sharding_strategy": "optim"}),
    ],
)
def test_runs_follow_each_other(world_size: int, strategy: dict[str, Any]) -> None:
    expected = run_ranks(fit_validate_fit, 1, 1, {})[0]
    for found in run_ranks(fit_validate_fit, world_size, world_size, strategy):
        assert found["val"] == pytest.approx(expected["val"], abs=5e-6)
        assert found["val"][0] == found["val"][1]
        assert found["loss"] == pytest.approx(expected["loss"], abs=5e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-5)
        assert len(found["loss"]) == 7


def other_layout_with_the_same_module() -> None:
    trainer, module, numbers = prepared(2, {"tensor_model_parallel_size": 2}, max_steps=1, limit_val_batches=0)
    trainer.fit(module, train_loader())
    build_trainer(numbers, {}, devices=2, max_steps=1).fit(module, train_loader())


def test_a_built_module_cannot_change_its_layout() -> None:
    with pytest.raises(RankError, match=r"built with .*tensor_model_parallel_size=2.*make a new module"):
        run_ranks(other_layout_with_the_same_module, 2)
