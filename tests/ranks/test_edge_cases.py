"""Batches, data orders, modules and checkpoints that are legal but unusual, or wrong and look legal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, override

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from lt_parallel.models import GPTModule
from lt_parallel.strategies.optimizer import MegatronOptimizer
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
from tests.ranks.test_parity import assert_close
from tests.ranks.test_plain_modules import Classifier, data
from tests.support.ranks import RankError, run_ranks

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
OPTIM: dict[str, Any] = {"data_parallel_sharding_strategy": "optim"}


def trainer_and_numbers(world_size: int, strategy: dict[str, Any], **options: Any) -> tuple[L.Trainer, StepNumbers]:
    L.seed_everything(SEED, verbose=False)
    numbers = StepNumbers()
    return build_trainer(numbers, strategy, **{"devices": world_size, "val_check_interval": None, **options}), numbers


def gpt(**model: Any) -> GPTModule:
    return GPTModule(VOCAB_SIZE, SEQ_LENGTH, **{**GPT2, **OPTIMIZER, **model})


# ---------------------------------------------------------------- numbers


class Edited(Sequences):
    """Sequences with one field of one sample changed, or a mask of zeros on every second sample."""

    def __init__(self, field: str = "", value: Any = None, all_masked: bool = False) -> None:
        super().__init__(64)
        self.field, self.value, self.all_masked = field, value, all_masked

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if self.all_masked and index % 2:
            sample["loss_mask"] = torch.zeros(SEQ_LENGTH)
        if self.field and index == 0:
            sample[self.field] = sample[self.field].clone()
            sample[self.field][0] = self.value
        return sample


def edge_numbers(world_size: int, strategy: dict[str, Any], case: str) -> dict[str, list[float]]:
    # Without shuffling data-parallel rank 1 of 2 gets only samples that are masked out.
    options = {"gradient_clip_val": 1e-3} if case == "tiny clip" else {}
    trainer, numbers = trainer_and_numbers(world_size, strategy, max_steps=4, **options)
    model = {"num_query_groups": 2, "kv_channels": 24, "qk_layernorm": True} if case == "odd heads" else {}
    dataset = Edited(all_masked=case == "masked rank")
    trainer.fit(gpt(**model), DataLoader(dataset, batch_size=MICRO_BATCH, shuffle=case != "masked rank"))
    return {"loss": numbers.losses, "grad_norm": numbers.grad_norms}


@pytest.mark.parametrize(
    ("case", "world_size", "strategy"),
    [
        ("odd heads", 4, {**TP2, **PP2, "sequence_parallel": True}),
        ("tiny clip", 4, {**TP2, **PP2}),
        ("tiny clip", 4, {**TP2, **OPTIM}),
        ("masked rank", 2, OPTIM),
        ("masked rank", 4, PP2),
        ("tied embeddings alone on their stages", 4, {**TP2, **PP2, "pipeline_model_parallel_layout": "E|tt|tt|L"}),
    ],
)
def test_edge_numbers_equal_one_process(case: str, world_size: int, strategy: dict[str, Any]) -> None:
    expected = run_ranks(edge_numbers, 1, 1, {}, case)[0]
    assert expected["loss"][-1] != expected["loss"][0]
    assert_close(run_ranks(edge_numbers, world_size, world_size, strategy, case)[0], expected, case)


# ---------------------------------------------------------------- batches that mean nothing


def fit_edited(world_size: int, strategy: dict[str, Any], field: str, value: Any) -> list[float]:
    trainer, numbers = trainer_and_numbers(world_size, strategy, max_steps=2)
    trainer.fit(gpt(), DataLoader(Edited(field, value), batch_size=MICRO_BATCH))
    return numbers.losses


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tokens", VOCAB_SIZE, r"tokens go from \d+ to 100, but must lie in \[0, vocab_size=100\).* at least 101"),
        ("tokens", 500, r"tokens go from \d+ to 500"),
        ("labels", 500, r"labels go from \d+ to 500.* vocab_size to at least 501"),
        ("labels", -100, r"labels go from -100 to \d+.*mask it out in loss_mask"),
        ("position_ids", SEQ_LENGTH, r"position_ids go from \d+ to 32.*max_position_embeddings=32"),
        ("loss_mask", 0.5, r"num_tokens=[\d.]+ must be a whole number.*loss_mask"),
    ],
)
def test_a_batch_that_means_nothing_is_refused(field: str, value: float, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(fit_edited, 2, 2, TP2, field, value, timeout_s=60)


# ---------------------------------------------------------------- plain modules


class Unusual(Classifier):
    """The classifier with a batch norm, a frozen layer, or an optimizer that doesn't hold every parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "batch norm":
            self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
        if kind == "frozen":
            self.net[0].requires_grad_(False)

    @override
    def configure_optimizers(self) -> Any:
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        return torch.optim.AdamW(self.net[3].parameters() if self.kind == "partial" else self.parameters(), lr=0.01)

    @override
    def on_train_end(self) -> None:
        if self.kind == "added later":
            self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def fit_unusual(world_size: int, strategy: dict[str, Any], kind: str) -> dict[str, Any]:
    trainer, _ = trainer_and_numbers(world_size, {"num_microbatches": 1, **strategy}, max_steps=4)
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, StepNumbers)]
    module = Unusual(kind)
    trainer.fit(module, DataLoader(data(64, 1), batch_size=16 // world_size, shuffle=True))
    assert isinstance(trainer.optimizers[0], MegatronOptimizer)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_batch_norm_statistics_are_one_models() -> None:
    first, second = run_ranks(fit_unusual, 2, 2, {}, "batch norm")
    assert first["net.1.running_mean"].abs().max() > 0
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("strategy", [{}, OPTIM])
def test_frozen_parameters_stay_and_the_others_train(strategy: dict[str, Any]) -> None:
    expected = run_ranks(fit_unusual, 1, 1, {}, "frozen")[0]
    L.seed_everything(SEED, verbose=False)
    at_start = Unusual("frozen").state_dict()
    for found in run_ranks(fit_unusual, 2, 2, strategy, "frozen"):
        assert torch.equal(found["net.0.weight"], at_start["net.0.weight"])
        assert not torch.equal(found["net.3.weight"], at_start["net.3.weight"])
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("partial", r"disagrees on net\.0\.weight, net\.0\.bias, .*use 'no_shard'"),
        ("lbfgs", "LBFGS evaluates the loss several times per step"),
        ("added later", "parameters can't be added to an optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_stepped_is_named(kind: str, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(fit_unusual, 1, 1, OPTIM if kind == "partial" else {}, kind, timeout_s=60)


# ---------------------------------------------------------------- the order of the data


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same sequences, without a length."""

    @override
    def __iter__(self) -> Any:
        return iter([Sequences(96)[index] for index in range(96)])


class FirstTokens(L.Callback):
    """Keeps which samples each step began with."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    @override
    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0]["tokens"][:, :2].flatten().tolist())


def stop_and_resume(stream: bool, limit: int | None, stop_at: int, directory: str) -> tuple[list[Any], list[Any]]:
    """Samples of an uninterrupted run after `stop_at`, and of the resumed one. Six steps are a whole epoch."""

    def run(path: str | None = None, **options: Any) -> list[Any]:
        tokens = FirstTokens()
        options["callbacks"] = [tokens, *options.get("callbacks", [])]
        trainer, _ = trainer_and_numbers(1, {"num_microbatches": 8}, limit_train_batches=limit, **options)
        loader = DataLoader(Stream() if stream else Sequences(96), batch_size=MICRO_BATCH, shuffle=not stream or None)
        trainer.fit(gpt(num_layers=1), loader, ckpt_path=path)
        return tokens.seen

    whole = run(max_steps=10)
    checkpoint = ModelCheckpoint(directory, filename="here", every_n_train_steps=stop_at)
    run(max_steps=stop_at, enable_checkpointing=True, callbacks=[checkpoint])
    return whole[stop_at:], run(os.path.join(directory, "here.ckpt"), max_steps=10)


@pytest.mark.parametrize(
    ("stream", "limit", "stop_at"),
    [
        pytest.param(True, None, 4, id="a stream, inside an epoch"),
        pytest.param(True, 5, 3, id="a limited stream, inside an epoch"),
        pytest.param(True, 5, 5, id="a limited stream, at an epoch's end"),
        pytest.param(False, 3, 3, id="limited epochs, at an epoch's end"),
    ],
)
def test_a_resumed_run_reads_what_comes_next(stream: bool, limit: int | None, stop_at: int, tmp_path: Path) -> None:
    ((expected, found),) = run_ranks(stop_and_resume, 1, stream, limit, stop_at, str(tmp_path))
    assert found == expected


def with_a_rest(world_size: int, strategy: dict[str, Any]) -> tuple[int, list[float]]:
    trainer, numbers = trainer_and_numbers(world_size, {"num_microbatches": 2, **strategy}, max_steps=-1, max_epochs=1)
    sampler = WeightedRandomSampler([1.0] * 15, 15)  # the 8th micro batch has one sample
    trainer.fit(gpt(), DataLoader(Sequences(15), batch_size=MICRO_BATCH, sampler=sampler))
    return trainer.global_step, numbers.losses


def test_a_smaller_last_micro_batch_is_not_trained_on() -> None:
    """A pipeline couldn't pass it on: its stages expect one shape."""
    assert [steps for steps, _ in run_ranks(with_a_rest, 2, 2, PP2, timeout_s=60)] == [3, 3]


# ---------------------------------------------------------------- checkpoints


def save(world_size: int, strategy: dict[str, Any], path: str) -> None:
    trainer, _ = trainer_and_numbers(world_size, strategy, max_steps=1)
    trainer.fit(gpt(), DataLoader(Sequences(32), batch_size=MICRO_BATCH))
    trainer.save_checkpoint(path)


def resume(world_size: int, strategy: dict[str, Any], path: str, model: dict[str, Any]) -> list[float]:
    trainer, numbers = trainer_and_numbers(world_size, strategy, max_steps=2)
    trainer.fit(gpt(**model), DataLoader(Sequences(32), batch_size=MICRO_BATCH), ckpt_path=path)
    return numbers.losses


def test_a_checkpoint_that_does_not_fit_says_why(tmp_path: Path) -> None:
    path = str(tmp_path / "here.ckpt")
    run_ranks(save, 1, 1, {}, path)
    model_words: list[tuple[dict[str, Any], str]] = [
        ({"hidden_size": 128}, r"another model.*bias is \(64,\) in the checkpoint and \(128,\) here"),
        ({"untie_embeddings_and_output_weights": True}, r"output_layer.weight \(128, 64\) isn't in the checkpoint"),
        ({"normalization": "RMSNorm"}, r"the checkpoint's decoder.final_layernorm.bias \(64,\) isn't in the model"),
    ]
    for model, words in model_words:
        with pytest.raises(RankError, match=words):
            run_ranks(resume, 2, 2, PP2, path, model, timeout_s=60)
    with pytest.raises(RankError, match="sharding_strategy='no_shard', not 'optim'; resume with the same"):
        run_ranks(resume, 2, 2, OPTIM, path, {}, timeout_s=60)


def test_a_sharded_optimizer_resumes_at_another_data_parallel_size_only(tmp_path: Path) -> None:
    path = str(tmp_path / "here.ckpt")
    run_ranks(save, 2, 2, OPTIM, path)
    expected = run_ranks(resume, 2, 2, OPTIM, path, {})[0]
    assert run_ranks(resume, 1, 1, OPTIM, path, {})[0] == pytest.approx(expected, abs=5e-6)
    with pytest.raises(RankError, match="tensor_model_parallel_size=1, not 2"):
        run_ranks(resume, 2, 2, {**TP2, **OPTIM}, path, {}, timeout_s=60)


def test_saving_never_replaces_a_folder_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RankError, match="holds other things than a checkpoint"):
        run_ranks(save, 2, 2, {}, str(tmp_path), timeout_s=60)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_checkpoint_before_an_interrupted_save_is_pointed_to(tmp_path: Path) -> None:
    (tmp_path / ".here.ckpt.replaced").mkdir()
    with pytest.raises(RankError, match=r"no such checkpoint; the one before it is .*\.here\.ckpt\.replaced"):
        run_ranks(resume, 1, 1, {}, str(tmp_path / "here.ckpt"), {}, timeout_s=60)
