"""Megatron-FSDP: the single process's numbers, this rank's share of the bytes, and safe parameters between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lt_parallel.callbacks.memory import HeldBytes, MemoryMonitor
from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy
from tests.ranks.parity_runs import (
    LLAMA,
    MICRO_BATCH,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    SHAPES,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
    train_with_trainer,
)
from tests.ranks.test_parity import assert_close, single_process
from tests.ranks.test_plain_modules import Classifier, data
from tests.support.ranks import RankError, run_ranks

GRADS, PARAMS = "optim_grads", "optim_grads_params"


def fully(strategy: str, **others: Any) -> dict[str, Any]:
    return {"data_parallel_sharding_strategy": strategy, **others}


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt2 dp2 grads": ("gpt2", 2, fully(GRADS)),
    "gpt2 dp2 params": ("gpt2", 2, fully(PARAMS)),
    "llama dp2 tp2 sp params": ("llama", 4, fully(PARAMS, tensor_model_parallel_size=2, sequence_parallel=True)),
}
RARER: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama dp4 params": ("llama", 4, fully(PARAMS)),
    "gpt2 dp4 grads": ("gpt2", 4, fully(GRADS)),
    "gpt2 dp2 tp2 grads": ("gpt2", 4, fully(GRADS, tensor_model_parallel_size=2)),
    "gpt2 dp2 tp2 sp params": ("gpt2", 4, fully(PARAMS, tensor_model_parallel_size=2, sequence_parallel=True)),
    "llama dp2 cp2 params": ("llama", 4, fully(PARAMS, context_parallel_size=2)),
    "llama cp2 grads": ("llama", 2, fully(GRADS, context_parallel_size=2, cp_comm_type="a2a")),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in RARER)])
def test_equals_single_process(layout: str) -> None:
    shape, world_size, strategy = {**LAYOUTS, **RARER}[layout]
    every_rank = run_ranks(train_with_trainer, world_size, shape, world_size, strategy)
    assert_close(every_rank[0], single_process(shape), layout)
    assert all(numbers == every_rank[0] for numbers in every_rank)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [GRADS, PARAMS])
def test_bf16_mixed_equals_optim(strategy: str) -> None:
    expected, found = (run_ranks(bf16_losses, 2, each) for each in (fully("optim"), fully(strategy)))
    assert found[0] == pytest.approx(expected[0], abs=2e-3)


def bf16_losses(strategy: dict[str, Any]) -> list[float]:
    return train_with_trainer("llama", 2, strategy, precision="bf16-mixed")["loss"]


class BetweenSteps(L.Callback):
    """Reads every parameter wherever a user's callback may."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def _read(self, pl_module: L.LightningModule) -> None:
        self.sums.append(sum(float(local(each).double().abs().sum()) for each in pl_module.parameters()))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._read(pl_module)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._read(pl_module)


def local(parameter: Tensor) -> Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


def held(strategy: dict[str, Any], precision: str) -> tuple[HeldBytes, list[int], list[float]]:
    L.seed_everything(SEED, verbose=False)
    monitor, reader = MemoryMonitor(every_n_steps=1), BetweenSteps()
    options = {
        "devices": 2,
        "max_steps": 2,
        "val_check_interval": 2,
        "precision": precision,
        "callbacks": [monitor, reader],
    }
    trainer = build_trainer(StepNumbers(), strategy, **options)
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA, **OPTIMIZER)
    trainer.fit(module, DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True), DataLoader(Sequences(3), 1))
    rows = monitor.report
    return (rows[0].held if rows else None), [each.numel() for each in module.parameters()], reader.sums  # type: ignore[return-value]


@pytest.mark.parametrize(("strategy", "precision"), [(GRADS, "32-true"), (PARAMS, "32-true"), (PARAMS, "bf16-mixed")])
def test_each_rank_holds_its_share(strategy: str, precision: str) -> None:
    (bytes_held, sizes, first), (_, _, second) = run_ranks(held, 2, fully(strategy), precision)
    total = sum(sizes)
    share, low = total / 2, precision == "bf16-mixed"
    weight = 2 if low else 4
    # Adam's two moments, and the fp32 main parameters beside bf16 ones; buffers are padded by a few rows.
    expected = {
        "parameters": weight * (share if strategy == PARAMS else total),
        "gradients": 4 * share,
        "optimizer_state": (12 if low else 8) * share,
    }
    for name, size in expected.items():
        assert size <= getattr(bytes_held, name) <= 1.03 * size, name
    # At the start, after both steps and after the validation's batch: readable, and changed by the steps alone.
    assert len(first) == len(second) == 4 and len(set(first[:3])) == 3
    if strategy == PARAMS:
        assert first[2] == first[3] and min(first[0], second[0]) > 0.2 * (first[0] + second[0])


def stopped(strategy: dict[str, Any], directory: str) -> None:
    checkpoint = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer, module = trainer_and_module(2, strategy, max_steps=4, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(module, loader())


def trainer_and_module(
    world_size: int, strategy: dict[str, Any], numbers: StepNumbers | None = None, **options: Any
) -> tuple[L.Trainer, GPTModule]:
    L.seed_everything(SEED, verbose=False)
    defaults = {"devices": world_size, "val_check_interval": 1.0}
    trainer = build_trainer(numbers or StepNumbers(), strategy, **{**defaults, **options})
    return trainer, GPTModule(VOCAB_SIZE, SEQ_LENGTH, **SHAPES["gpt2"], **OPTIMIZER)


def loader() -> DataLoader[Any]:
    return DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True)


def resumed(world_size: int, strategy: dict[str, Any], path: str) -> list[float]:
    numbers = StepNumbers()
    trainer, module = trainer_and_module(world_size, strategy, numbers)
    trainer.fit(module, loader(), ckpt_path=path)
    return numbers.losses


def test_resumes_at_another_data_parallel_size_and_with_the_other_strategy(tmp_path: Path) -> None:
    run_ranks(stopped, 2, fully(PARAMS), str(tmp_path))
    (path,) = tmp_path.iterdir()
    expected = single_process("gpt2")["loss"][4:]
    for world_size, strategy in ((4, fully(PARAMS)), (1, fully(GRADS))):
        assert run_ranks(resumed, world_size, world_size, strategy, str(path))[0] == pytest.approx(expected, abs=5e-6)
    with pytest.raises(RankError, match="whose files 'optim' can't read; use 'optim_grads' or 'optim_grads_params'"):
        run_ranks(resumed, 2, 2, fully("optim"), str(path))
    tensor_parallel = fully(PARAMS, tensor_model_parallel_size=2)
    with pytest.raises(RankError, match="saved with tensor_model_parallel_size=1, not 2"):
        run_ranks(resumed, 2, 2, tensor_parallel, str(path))


class Generates(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.tokens = pl_module.generate(torch.tensor([[1, 2, 3]]), 4, temperature=0.0).tolist()  # type: ignore[operator]


def every_run_of_a_gpt(world_size: int, strategy: dict[str, Any]) -> list[Any]:
    L.seed_everything(SEED, verbose=False)
    generates = Generates()
    options = {"max_steps": 2, "val_check_interval": 2, "num_sanity_val_steps": 2, "callbacks": [generates]}
    trainer = build_trainer(StepNumbers(), strategy, devices=world_size, **options)
    lengths = {"max_new_tokens": 4, "max_position_embeddings": 2 * SEQ_LENGTH}
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA, **OPTIMIZER, **lengths, mtp_num_layers=1)
    evaluation = DataLoader(Sequences(3), 1)
    trainer.fit(module, loader(), evaluation)
    losses = [float(trainer.callback_metrics[name]) for name in ("train_loss", "val_loss")]
    losses.append(trainer.test(module, evaluation, verbose=False)[0]["test_loss"])
    predicted = trainer.predict(module, evaluation)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, loader(), evaluation)
    losses += [float(trainer.callback_metrics[name]) for name in ("train_loss", "val_loss")]
    return [losses, generates.tokens, [each.tolist() for each in predicted or ()]]


@pytest.mark.parametrize("strategy", [pytest.param(GRADS, marks=pytest.mark.slow), PARAMS])
def test_a_gpt_in_every_kind_of_run(strategy: str) -> None:
    ((losses, tokens, predicted),) = run_ranks(every_run_of_a_gpt, 1, 1, {})
    first, second = run_ranks(every_run_of_a_gpt, 2, 2, fully(strategy))
    assert first[0] == second[0] == pytest.approx(losses, abs=5e-6)
    assert first[1] == second[1] == tokens
    assert [first[2][0], second[2][0], first[2][1]] == predicted  # sample by sample, in turns


class Plain(Classifier):
    """Evaluates whatever Lightning can evaluate, and holds a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return super().training_step((batch[0] * self.scale, batch[1]), batch_idx)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0] * self.scale), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0] * self.scale)


def every_kind_of_run(world_size: int, strategy: str) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=MegatronParallelStrategy(**fully(strategy), num_microbatches=4 // world_size),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, evaluation = Plain(), DataLoader(data(13, 2), batch_size=2)  # unequal numbers of batches on the ranks
    trainer.fit(module, DataLoader(data(32, 1), batch_size=2, shuffle=True), evaluation)
    result = {"val": float(trainer.callback_metrics["val_loss"])}
    result["test"] = trainer.test(module, evaluation, verbose=False)[0]["test_loss"]
    result["predicted"] = len(trainer.predict(module, evaluation) or ())
    result["again"] = trainer.test(module, evaluation, verbose=False)[0]["test_loss"]
    return result


@pytest.mark.parametrize("strategy", [pytest.param(GRADS, marks=pytest.mark.slow), PARAMS])
def test_a_plain_module_in_every_kind_of_run(strategy: str) -> None:
    (expected,) = run_ranks(every_kind_of_run, 1, 1, "no_shard")
    first, second = run_ranks(every_kind_of_run, 2, 2, strategy)
    for name in ("val", "test", "again"):
        assert first[name] == second[name] == pytest.approx(expected[name], abs=5e-6), name
    assert first["predicted"] + second["predicted"] >= expected["predicted"]


class WithoutLayers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Tied(WithoutLayers):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.layers[1].weight = self.layers[0].weight


def fit_plain(kind: str) -> None:
    module = {"WithoutLayers": WithoutLayers, "Tied": Tied}[kind]()
    trainer, _ = trainer_and_module(1, fully(PARAMS))
    trainer.fit(module, DataLoader(data(32, 1), batch_size=2))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("WithoutLayers", "WithoutLayers has no layers in a ModuleList or Sequential; give WithoutLayers a method"),
        ("Tied", "layers.0.weight and layers.1.weight are one parameter of Tied"),
    ],
)
def test_refused_where_units_are_unknown(kind: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(fit_plain, 1, kind)


def fit_in_two_trainers() -> None:
    trainer, module = trainer_and_module(1, fully(PARAMS), max_steps=1)
    trainer.fit(module, loader())
    other, _ = trainer_and_module(1, fully(GRADS), max_steps=1)
    other.fit(module, loader())


def test_a_module_that_is_cut_needs_its_trainer() -> None:
    with pytest.raises(RankError, match="this GPTModule have been cut over the ranks in another Trainer's run"):
        run_ranks(fit_in_two_trainers, 1)
