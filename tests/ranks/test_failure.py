"""One rank fails and the whole job ends soon, every rank with an error and with the message of the one that failed.

Each rank of these tests runs its training in a forked child, which may end any way it likes, and reports how it ended.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy
from tests.ranks.parity_runs import GPT2, MICRO_BATCH, OPTIMIZER, SEQ_LENGTH, VOCAB_SIZE, Sequences
from tests.ranks.test_plain_modules import Classifier, data
from tests.support.processes import die_with_parent
from tests.support.ranks import RankError, run_ranks

MESSAGE = "sample 17 is rotten"
LIMIT_S = 60.0  # what the package promises


@dataclass
class Ending:
    """How one rank's process ended."""

    status: int  # negative: the signal that ended it
    output: str
    seconds: float  # from the failure's moment, as the failing rank wrote it down, to the end of this process


def in_child(marker: str, fn: Callable[..., None], *args: Any) -> Ending:
    """Runs `fn(*args)` in a fork of this process; `marker` is the file that the failing rank makes when it fails."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            _be_child(output.fileno(), fn, args)
        status = _wait(pid, Path(marker))
        Path(f"{marker}.ended.{os.environ['RANK']}").touch()
        output.seek(0)
        seconds = time.time() - Path(marker).stat().st_mtime if Path(marker).exists() else float("nan")
        return Ending(status, output.read(), seconds)


def _be_child(output: int, fn: Callable[..., None], args: Any) -> None:
    status = 1
    try:
        die_with_parent()
        os.dup2(output, 1)
        os.dup2(output, 2)
        fn(*args)
        status = 0
    except BaseException:  # noqa: BLE001  (a script's last words, whatever ended it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int, marker: Path) -> int:
    """The child's exit status; a child that outlives the failure by too much is killed."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if marker.exists() and time.time() - marker.stat().st_mtime > LIMIT_S:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


class Failing(GPTModule):
    """Fails on one rank in the second step, in the way that is asked for."""

    def fail(self, rank: int, how: str, marker: str) -> Failing:
        self.failing_rank, self.how, self.marker = rank, how, marker
        return self

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Fails before the chunk runs, so that its neighbours wait for what it would have sent."""
        if batch_idx == 1 and self.trainer.global_rank == self.failing_rank:
            Path(self.marker).touch()
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError(MESSAGE)
        return super().training_step(batch, batch_idx)


def train(world_size: int, strategy: dict[str, Any], failing_rank: int, how: str, marker: str) -> None:
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=MegatronParallelStrategy(**strategy),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Failing(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER).fail(failing_rank, how, marker)
    try:
        trainer.fit(module, DataLoader(Sequences(64), batch_size=MICRO_BATCH))
    except BaseException:
        print("root cause:", trainer.strategy.root_cause(), file=sys.stderr, flush=True)
        deadline = time.monotonic() + LIMIT_S
        while how == "stays" and trainer.global_rank == failing_rank and time.monotonic() < deadline:
            time.sleep(0.1)  # its connections stay open, so nobody else notices by himself
            if Path(f"{marker}.ended.0").exists():
                break
        raise


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2, "num_microbatches": 2}


@pytest.mark.parametrize(
    ("world_size", "strategy", "failing_rank", "how"),
    [
        pytest.param(2, TP2, 1, "raises", id="tp2"),
        pytest.param(2, TP2, 1, "stays", id="tp2, the failing rank stays"),
        pytest.param(2, PP2, 1, "raises", id="pp2, last stage"),
        pytest.param(2, {"num_microbatches": 2}, 0, "raises", id="dp2, rank 0"),
        pytest.param(4, {**TP2, **PP2}, 3, "raises", id="tp2 pp2"),
        pytest.param(4, {**TP2, **PP2}, 3, "killed", id="tp2 pp2, killed"),
    ],
)
def test_a_failing_rank_ends_the_job(
    world_size: int, strategy: dict[str, Any], failing_rank: int, how: str, tmp_path: Path
) -> None:
    marker = str(tmp_path / "failed")
    args = (world_size, strategy, failing_rank, how, marker)
    endings = run_ranks(in_child, world_size, marker, train, *args, timeout_s=150)
    for rank, ending in enumerate(endings):
        where = f"rank {rank}, {ending.seconds:.1f} s after the failure:\n{ending.output}"
        if rank == failing_rank and how == "killed":
            assert ending.status == -signal.SIGKILL, where
            continue
        assert ending.status == 1, where
        assert ending.seconds < LIMIT_S, where
        if how != "killed":
            assert f"rank {failing_rank} failed with ArithmeticError: {MESSAGE}" in ending.output, where
    if how == "stays":
        assert "rank 0 ends: rank 1 failed with" in endings[0].output, "ended by the watch, not by its own exception"


# ---------------------------------------------------------------- what only shows when the data are there


def fit_plain(
    world_size: int, train_samples: int, val_samples: int, strategy: dict[str, Any], optimizers: int = 1
) -> dict[str, float]:
    L.seed_everything(1, verbose=False)
    module = Classifier()
    if optimizers != 1:
        module.configure_optimizers = lambda: [torch.optim.SGD(module.parameters(), 0.1)] * optimizers or None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=MegatronParallelStrategy(**strategy),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module, DataLoader(data(train_samples, 1), batch_size=4), DataLoader(data(val_samples, 2), batch_size=4)
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("train_samples", "val_samples", "strategy", "words"),
    [
        (16, 1, {}, "the evaluation data hold 1 samples, fewer than the data-parallel size 2"),
        (
            15,
            4,
            {"num_microbatches": 2},
            "the training data hold 15 samples, fewer than one global batch of 16 "
            r"\(micro batch 4 x num_microbatches=2 x data-parallel size 2\); lower one of them or add data",
        ),
        (
            16,
            4,
            {"global_batch_size": 12},
            r"global_batch_size=12 must be divisible by micro batch 4 x data-parallel size 2 \(= 8\); "
            "nearest valid: 8 or 16",
        ),
    ],
)
def test_data_that_do_not_fit_are_named(
    train_samples: int, val_samples: int, strategy: dict[str, Any], words: str
) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(fit_plain, 2, 2, train_samples, val_samples, strategy, timeout_s=60)


def test_the_smallest_data_that_fit_train() -> None:
    metrics = run_ranks(fit_plain, 2, 2, 16, 2, {"num_microbatches": 2})
    assert metrics[0] == pytest.approx(metrics[1])
    assert "val_accuracy" in metrics[0]


@pytest.mark.parametrize(("optimizers", "words"), [(2, "returned several optimizers"), (0, "exactly one")])
def test_other_than_one_optimizer_is_refused(optimizers: int, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(fit_plain, 1, 1, 16, 4, {}, optimizers)
