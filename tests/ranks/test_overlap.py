"""`CommunicationOverlap`: the same numbers, and communication that really begins while the model computes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lt_parallel.callbacks.overlap import CommunicationOverlap
from lt_parallel.metrics.timers import StepTimers
from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import (
    LLAMA,
    MICRO_BATCH,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
    train_with_trainer,
)
from tests.support.ranks import run_ranks

OPTIM = {"data_parallel_sharding_strategy": "optim"}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2 reduce": (2, {}, {"grad_reduce": True, "bucket_size": 5000}),
    "dp2 optim reduce": (2, OPTIM, {"grad_reduce": True, "bucket_size": 5000}),
    "dp2 optim both": (2, OPTIM, {"grad_reduce": True, "param_gather": True, "bucket_size": 5000}),
    "dp2 optim auto": (2, OPTIM, {"preset": "auto"}),
    "cp2 tp2 sp optim both": (
        4,
        {**OPTIM, "context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"preset": "auto", "bucket_size": 5000},
    ),
    "pp2 vpp2 dp2 optim auto": (4, {**OPTIM, **INTERLEAVED}, {"preset": "auto"}),
    "pp2 dp2 optim both": (
        4,
        {**OPTIM, "pipeline_model_parallel_size": 2},
        {"grad_reduce": True, "param_gather": True},
    ),
}


def train(
    world_size: int, strategy: dict[str, Any], overlap: dict[str, Any] | None, **options: Any
) -> dict[str, list[float]]:
    """With validation in the middle, where gather hooks must be away."""
    callbacks = [] if overlap is None else [CommunicationOverlap(**overlap)]
    options = {"val_check_interval": 4, "max_steps": 8, **options}
    return train_with_trainer("llama", world_size, strategy, callbacks=callbacks, **options)


SLOW = ("dp2 optim reduce", "cp2 tp2 sp optim both", "pp2 dp2 optim both")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_numbers_equal_those_without(case: str) -> None:
    world_size, strategy, overlap = CASES[case]
    (plain, *_) = run_ranks(train, world_size, world_size, strategy, None)
    for rank in run_ranks(train, world_size, world_size, strategy, overlap):
        assert len(rank["loss"]) == 8 and len(rank["val_loss"]) == 2
        for name, values in rank.items():
            assert values == pytest.approx(plain[name], rel=1e-6), name


# ---------------------------------------------------------------- when it happens


class Log(TorchDispatchMode):
    """Notes collectives, and the starts and ends of the schedule's spans, in the order in which they come."""

    REDUCTIONS = ("c10d::allreduce_", "c10d::_reduce_scatter_base_", "c10d::allreduce_coalesced_")
    GATHER = "c10d::_allgather_base_"  # one by one on gloo, see the CPU runtime

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        tensors = args[0] if args and isinstance(args[0], list) else args[:1]
        if name in self.REDUCTIONS and tensors[0].numel() > 100:  # not the token count or the norm
            self.events.append("reduce")
        elif name == self.GATHER:
            self.events.append("gather")
        return func(*args, **(kwargs or {}))


class LoggedTimers(StepTimers):
    """Megatron Core says when forward, backward and gradient sync begin and end."""

    def __init__(self, log: Log) -> None:
        super().__init__(torch.device("cpu"))
        self._log = log

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        log = self._log

        class Span:
            def start(self, barrier: bool = False) -> None:
                log.events.append(f"{name} begins")

            def stop(self, barrier: bool = False) -> None:
                log.events.append(f"{name} ends")

        return Span()


class Instrument(L.Callback):
    """Logs the events of the third step."""

    def __init__(self) -> None:
        self.record = Log()
        self.steps: list[list[str]] = []

    def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.strategy.timers = LoggedTimers(self.record)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.record.events.clear()
        self.record.__enter__()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.record.__exit__(None, None, None)
        self.steps.append(list(self.record.events))


def events(strategy: dict[str, Any], overlap: dict[str, Any]) -> list[str]:
    L.seed_everything(SEED, verbose=False)
    instrument = Instrument()
    trainer = build_trainer(
        StepNumbers(),
        strategy,
        devices=2,
        max_steps=3,
        limit_val_batches=0,
        callbacks=[CommunicationOverlap(**overlap), instrument],
    )
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA, **OPTIMIZER)
    trainer.fit(module, DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True))
    return instrument.steps[2]


def during(log: list[str], event: str, span: str) -> list[int]:
    """How often an event comes within each of the spans of a name."""
    counts: list[int] = []
    inside = False
    for entry in log:
        if entry == f"{span} begins":
            inside = True
            counts.append(0)
        elif entry == f"{span} ends":
            inside = False
        elif entry == event and inside:
            counts[-1] += 1
    return counts


def test_reductions_begin_before_the_last_backward_pass_ends() -> None:
    for log in run_ranks(events, 2, {}, {"grad_reduce": True, "bucket_size": 5000}):
        *earlier, last = during(log, "reduce", "backward-compute")
        assert last > 1 and not any(earlier)  # buckets of the last micro batch; none is reduced twice
    for log in run_ranks(events, 2, {}, {}):
        assert not any(during(log, "reduce", "backward-compute"))
        assert during(log, "reduce", "all-grads-sync") == [1]


def test_gathers_come_in_the_forward_pass_that_needs_them() -> None:
    both = {"grad_reduce": True, "param_gather": True, "bucket_size": 5000}
    for log in run_ranks(events, 2, OPTIM, both):
        first, *later = during(log, "gather", "forward-compute")
        assert first > 1 and not any(later)
        assert during(log, "gather", "optimizer") == [0]
    for log in run_ranks(events, 2, OPTIM, {"grad_reduce": True}):
        assert not any(during(log, "gather", "forward-compute"))
        assert during(log, "gather", "optimizer")[0] > 0


def resumed(folder: str, overlap: dict[str, Any] | None) -> dict[str, list[float]]:
    """Saves after 3 of 6 steps and goes on from there."""
    L.seed_everything(SEED, verbose=False)
    numbers = StepNumbers()
    callbacks = [] if overlap is None else [CommunicationOverlap(**overlap)]
    trainer = build_trainer(numbers, OPTIM, devices=2, max_steps=3, limit_val_batches=0, callbacks=callbacks)
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA, **OPTIMIZER)
    loader = DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True)
    trainer.fit(module, loader)
    trainer.save_checkpoint(f"{folder}/three.ckpt")
    again = StepNumbers()
    callbacks = [] if overlap is None else [CommunicationOverlap(**overlap)]
    trainer = build_trainer(again, OPTIM, devices=2, max_steps=6, limit_val_batches=0, callbacks=callbacks)
    trainer.fit(GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA, **OPTIMIZER), loader, ckpt_path=f"{folder}/three.ckpt")
    return {"loss": again.losses, "grad_norm": again.grad_norms}


def test_a_checkpoint_holds_the_gathered_parameters(tmp_path: Any) -> None:
    plain = run_ranks(resumed, 2, str(tmp_path / "plain"), None)[0]
    overlapped = run_ranks(resumed, 2, str(tmp_path / "both"), {"preset": "auto"})[0]
    assert len(plain["loss"]) == 3
    for name, values in plain.items():
        assert overlapped[name] == pytest.approx(values, rel=1e-6)
