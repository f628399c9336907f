"""Perplexity and token accuracy at several layouts, against torchmetrics' own on whole logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from lt_parallel.metrics.language_model import vocab_parallel_argmax
from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import (
    LLAMA,
    MICRO_BATCH,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.support.ranks import init_gloo, run_ranks

SAMPLES = 45  # not a multiple of anything: short last micro batches and uneven shares
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp2": (2, {}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2 vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


class Reference(L.Callback):
    """torchmetrics' own metrics, on logits computed one more time after validation; single process only."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        perplexity = Perplexity(ignore_index=-100)
        accuracy = MulticlassAccuracy(VOCAB_SIZE, average="micro", ignore_index=-100)
        for batch in DataLoader(Sequences(SAMPLES), batch_size=MICRO_BATCH):
            logits = module(batch, labels=False)[..., :VOCAB_SIZE].float()
            labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
            perplexity.update(logits, labels)
            accuracy.update(logits.flatten(0, 1), labels.flatten())
        self.values = {"val_perplexity": float(perplexity.compute()), "val_token_accuracy": float(accuracy.compute())}


def validate(strategy: dict[str, Any], world_size: int, metrics: list[str], reference: bool = False) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    callback = Reference()
    trainer = build_trainer(
        StepNumbers(),
        strategy,
        devices=world_size,
        limit_val_batches=1.0,
        callbacks=[callback] if reference else [],
    )
    # Weights far from zero, so that the likeliest token isn't the same one everywhere.
    module: Any = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA, init_method_std=0.3, validation_metrics=metrics)
    trainer.validate(module, DataLoader(Sequences(SAMPLES), batch_size=MICRO_BATCH), verbose=False)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"values": values, "reference": callback.values}


BOTH = ["perplexity", "token_accuracy"]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return run_ranks(partial(validate, reference=True), 1, {}, 1, BOTH)[0]


def test_single_process_equals_torchmetrics(single: dict[str, Any]) -> None:
    values, expected = single["values"], single["reference"]
    assert 0.0 < expected["val_token_accuracy"] < 0.5  # else the comparison says nothing
    assert values["val_token_accuracy"] == pytest.approx(expected["val_token_accuracy"], abs=1e-7)
    assert values["val_perplexity"] == pytest.approx(expected["val_perplexity"], rel=1e-5)
    assert values["val_perplexity"] == pytest.approx(torch.tensor(values["val_loss"]).exp().item(), rel=1e-5)


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_every_layout_and_every_rank_gives_the_same(layout: str, single: dict[str, Any]) -> None:
    world_size, strategy = LAYOUTS[layout]
    ranks = run_ranks(validate, world_size, strategy, world_size, BOTH)
    for rank in ranks:
        assert rank["values"] == ranks[0]["values"]
    for name, value in single["values"].items():
        assert ranks[0]["values"][name] == pytest.approx(value, rel=1e-5)


def test_perplexity_alone_needs_no_logits() -> None:
    (alone,) = run_ranks(validate, 1, {}, 1, ["perplexity"])
    (without,) = run_ranks(validate, 1, {}, 1, [])
    assert set(alone["values"]) == {"val_loss", "val_perplexity"} and set(without["values"]) == {"val_loss"}
    assert alone["values"]["val_perplexity"] == pytest.approx(torch.tensor(without["values"]["val_loss"]).exp().item())


def argmax_of_parts() -> bool:
    init_gloo()
    group = torch.distributed.group.WORLD
    assert group is not None
    # Few values, so that many columns are equally high, on one rank and on several.
    whole = torch.randint(0, 4, (3, 50, 24), generator=torch.Generator().manual_seed(1)).float()
    part = whole.chunk(group.size(), dim=-1)[group.rank()]
    first_highest = (whole == whole.amax(-1, keepdim=True)).int().argmax(-1)
    return bool((vocab_parallel_argmax(part, group) == first_highest).all())


@pytest.mark.parametrize("world_size", [1, 3])
def test_argmax_over_parts_takes_the_first_of_equals(world_size: int) -> None:
    assert all(run_ranks(argmax_of_parts, world_size))


def test_unknown_metric() -> None:
    with pytest.raises(ValueError, match="validation_metrics='f1' is not one of perplexity, token_accuracy"):
        GPTModule(VOCAB_SIZE, validation_metrics=["f1"])  # type: ignore[list-item]


class Stream(IterableDataset[Any]):
    """No length."""

    def __iter__(self) -> Iterator[Any]:
        return map(Sequences(SAMPLES).__getitem__, range(SAMPLES))


class FaultOnce(L.Callback):
    """Ends the first evaluation after a batch."""

    done = False

    def on_test_batch_end(self, *args: Any) -> None:
        if not self.done:
            self.done = True
            raise ArithmeticError("wrong")


def evaluate(strategy: dict[str, Any], world_size: int) -> dict[str, dict[str, float]]:
    """Two loaders, one without a length, and a test after one that a fault cut off."""
    L.seed_everything(SEED, verbose=False)
    fault: Any = FaultOnce()
    trainer = build_trainer(fault, strategy, devices=world_size, limit_val_batches=1.0)
    module: Any = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA, init_method_std=0.3, validation_metrics=BOTH)
    loaders = [DataLoader(Sequences(length), batch_size=MICRO_BATCH) for length in (SAMPLES, 9)]
    found = {}
    trainer.validate(module, loaders, verbose=False)
    found["two"] = dict(trainer.callback_metrics)
    trainer.validate(module, DataLoader(Stream(), batch_size=MICRO_BATCH), verbose=False)
    found["stream"] = dict(trainer.callback_metrics)
    with pytest.raises(ArithmeticError):
        trainer.test(module, loaders, verbose=False)
    trainer.test(module, loaders, verbose=False)
    found["test"] = dict(trainer.callback_metrics)
    return {kind: {name: float(value) for name, value in values.items()} for kind, values in found.items()}


@pytest.mark.parametrize(("world_size", "stages"), [(1, 1), (2, 2)])
def test_each_loader_has_its_own(world_size: int, stages: int, single: dict[str, Any]) -> None:
    ranks = run_ranks(evaluate, world_size, {"pipeline_model_parallel_size": stages}, world_size)
    assert all(rank == ranks[0] for rank in ranks)
    found, expected = ranks[0], single["values"]
    for kind, phase in (("two", "val"), ("test", "test")):
        values = found[kind]
        assert len(values) == 6
        for loader in (0, 1):
            loss, perplexity = (values[f"{phase}_{name}/dataloader_idx_{loader}"] for name in ("loss", "perplexity"))
            assert perplexity == pytest.approx(math.exp(loss), rel=1e-5)
        for name in ("perplexity", "token_accuracy"):
            assert values[f"{phase}_{name}/dataloader_idx_0"] == pytest.approx(expected[f"val_{name}"], rel=1e-5)
    for name, value in expected.items():
        assert found["stream"][name] == pytest.approx(value, rel=1e-5)
