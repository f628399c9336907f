"""The pipeline's bubble: steps of the real schedules over 4 stages, against the formula.

Each stage sleeps 200 ms for each micro batch, a third of it in the forward pass and two thirds in the backward pass, as
matrix products divide; with v chunks per stage each chunk sleeps a v-th of that. Nothing else takes time, and sleeping
takes no core, so four stages can be measured on two cores: what a step takes beyond the formula is what the schedule,
its transfers and the Trainer add. Everything from the Trainer to gloo is real; only the layers aren't.

Formula ("Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", sections 2.2.1 and 2.2.2):
m micro batches take m x 200 ms without a bubble, which adds (p - 1) / m of that with 1F1B and (p - 1) / (v m) when
interleaved.

What is above the formula is Python and gloo, 2 to 4 ms for each micro batch, and it grows with what else the machine
does, in spite of the ranks' priority. Over four runs, beside loads of 10 to 36 on two cores, 4 micro batches took 1.017
to 1.025 times the formula with 1F1B and 1.038 to 1.048 times interleaved.

A step is the time between the starts of two steps on the first stage, the last that has work: optimizer, reports and
data of the step are in it.

Run `python -m benchmarks.bubble` from the repository's root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_parallel  # noqa: F401  (before megatron.core)
from benchmarks.overhead import SEED, VOCAB_SIZE, Sequences, quiet_trainer
from benchmarks.report import Report
from lt_parallel.callbacks.overlap import CommunicationOverlap
from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy

STAGES, DELAY_S, FORWARD_SHARE = 4, 0.2, 1 / 3


@dataclass(frozen=True)
class Case:
    """A row.

    Attributes:
        virtual: Chunks per stage.
        micro_batches: Of a step.
        goal: The most that a step may take, as a multiple of the formula; None where transfers take time themselves.
        seq_length: Tokens of a micro batch; with `hidden_size` what a transfer holds, in fp32.
        hidden_size: As there.
        overlapped: Whether interleaved stages compute while they send and receive.
    """

    virtual: int
    micro_batches: int
    goal: float | None
    seq_length: int = 8
    hidden_size: int = 64
    overlapped: bool = True

    @property
    def name(self) -> str:
        """Of the schedule."""
        if self.virtual == 1:
            return "1F1B"
        size = f", {self.seq_length * self.hidden_size * 4 / 2**20:g} MiB" if self.goal is None else ""
        return f"interleaved, {self.virtual} chunks{size}{'' if self.overlapped else ', batched p2p'}"


CASES = (
    *(Case(1, micro_batches, 1.02) for micro_batches in (4, 8, 16)),
    *(Case(2, micro_batches, 1.05) for micro_batches in (4, 8, 16)),
    *(Case(2, 8, None, 512, 4096, overlapped) for overlapped in (True, False)),
)
WARMUP = 2


def formula_s(virtual: int, micro_batches: int, stages: int = STAGES, delay_s: float = DELAY_S) -> float:
    """Seconds of a step: the ideal and the bubble."""
    ideal_s = micro_batches * delay_s
    return ideal_s * (1 + (stages - 1) / (virtual * micro_batches))


def sleep_until(deadline_s: float) -> None:
    while (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delay_s: float) -> Tensor:
        began_s = time.perf_counter()
        ctx.backward_s = delay_s * (1 - FORWARD_SHARE)
        result = x.clone()
        sleep_until(began_s + delay_s * FORWARD_SHARE)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sleep_until(time.perf_counter() + ctx.backward_s)
        return gradient, None


class SleepingModule(GPTModule):
    """`GPTModule`'s optimizer, schedule and reports around chunks that sleep."""

    def build_chunk(
        self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None, groups: Any
    ) -> nn.Module:
        from megatron.core.transformer.enums import ModelType
        from megatron.core.transformer.module import MegatronModule

        delay_s = DELAY_S / (config.virtual_pipeline_model_parallel_size or 1)

        class Sleeping(MegatronModule):
            """Hidden states pass unchanged; on the last stage their mean is the loss of each token."""

            model_type = ModelType.encoder_or_decoder
            share_embeddings_and_output_weights = False

            def __init__(self) -> None:
                super().__init__(config=config)
                self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
                self.weight = nn.Parameter(torch.ones(1, 1))
                self.received: Tensor | None = None

            def set_input_tensor(self, input_tensor: Any) -> None:
                self.received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

            def forward(self, tokens: Tensor) -> Tensor:
                batch, length = tokens.shape
                hidden = torch.ones(length, batch, config.hidden_size) if pre_process else self.received
                assert hidden is not None
                hidden = Sleep.apply(hidden * self.weight, delay_s)
                return hidden.mean(-1).t() if post_process else hidden

        return Sleeping()

    def forward(self, batch: Any, labels: bool = True) -> Tensor:
        assert self.active_chunk is not None
        output: Tensor = self.active_chunk(batch["tokens"])
        return output

    def initialize_chunks(self, seed: int) -> None:
        """Parameters begin at one."""


class Starts(L.Callback):
    """When each step began. Where allowed, this process's threads go before all others: they are awake for moments."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.first_in_line = False

    def on_train_start(self, *args: Any) -> None:
        with contextlib.suppress(PermissionError):
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))
            self.first_in_line = True

    def on_train_batch_start(self, *args: Any) -> None:
        self.at_s.append(time.perf_counter())


def measure(case: Case, steps: int) -> dict[str, Any]:
    """One rank of one row: seconds of each step, and whether the ranks went before other processes."""
    L.seed_everything(SEED, verbose=False)
    starts = Starts()
    module = SleepingModule(
        VOCAB_SIZE,
        case.seq_length,
        num_layers=2 * STAGES,
        hidden_size=case.hidden_size,
        num_attention_heads=4,
        lr=1e-3,
    )
    every = WARMUP + steps + 1  # the last one only ends the one before
    with tempfile.TemporaryDirectory(prefix="lt_parallel_bubble_") as folder:
        trainer = quiet_trainer(
            folder,
            every,
            [starts, *([] if case.overlapped else [CommunicationOverlap(p2p=False)])],
            devices=STAGES,
            gradient_clip_val=1.0,
            strategy=MegatronParallelStrategy(
                pipeline_model_parallel_size=STAGES,
                virtual_pipeline_model_parallel_size=case.virtual if case.virtual > 1 else None,
                num_microbatches=case.micro_batches,
            ),
        )
        trainer.fit(module, DataLoader(Sequences(every * case.micro_batches, case.seq_length), batch_size=1))
    times = [after - before for before, after in zip(starts.at_s, starts.at_s[1:], strict=False)]
    return {"steps_s": times[WARMUP:], "first_in_line": starts.first_in_line}


def measure_every(steps: int, output: Path) -> None:
    """All rows on one rank; the first stage writes them."""
    rows = [measure(case, steps) for case in CASES]
    if int(os.environ["RANK"]) == 0:
        output.write_text(json.dumps(rows))


def run(steps: int) -> list[dict[str, Any]]:
    """Starts the processes; returns a row for each case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LT_PARALLEL_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={STAGES}")
        options = (f"--steps={steps}", f"--output={output}")
        command = [sys.executable, *launcher, "-m", "benchmarks.bubble", *options]
        subprocess.run(command, check=True, env=environment, timeout=1200)
        rows: list[dict[str, Any]] = json.loads(output.read_text())
        return rows


def main() -> None:
    """Measures and writes `results/bubble.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="steps measured for each row (default: 9)")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--output", help=argparse.SUPPRESS)  # of one rank, started by this script
    options = parser.parse_args()
    if options.output:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        measure_every(options.steps, Path(options.output))
        return
    report = Report(
        "The pipeline's bubble",
        [
            "schedule",
            "micro batches",
            "ideal",
            "formula",
            "step",
            "quartiles",
            "step / formula",
            "smallest / formula",
            "goal",
        ],
        "python -m benchmarks.bubble",
    )
    rows = run(options.steps)
    for case, row in zip(CASES, rows, strict=True):
        expected_s = formula_s(case.virtual, case.micro_batches)
        low, middle, high = statistics.quantiles(row["steps_s"], n=4)
        report.add(
            case.name,
            str(case.micro_batches),
            f"{case.micro_batches * DELAY_S:.3f} s",
            f"{expected_s:.3f} s",
            f"{middle:.3f} s",
            f"{low:.3f} to {high:.3f} s",
            f"{middle / expected_s:.4f}",
            f"{min(row['steps_s']) / expected_s:.4f}",
            "" if case.goal is None else f"<= {case.goal:.2f}",
        )
    report.note(
        f"{STAGES} stages, {1000 * DELAY_S:.0f} ms per stage and micro batch, a third of it in the forward pass. A "
        f"transfer holds 2 KiB where nothing else is said. Steps are medians of {options.steps} after {WARMUP}."
    )
    report.note(
        "Interleaved stages overlap p2p, as they do by default. The last two rows show what that is worth where a "
        "transfer takes time; copying the tensors takes some by itself."
    )
    ahead = "first in line for a core (SCHED_FIFO)" if rows[0]["first_in_line"] else "at the usual priority"
    report.note(f"The ranks ran {ahead}, beside whatever else the machine did.")
    report.show()
    if not options.no_write:
        print(f"Written to {report.write('bubble')}")


if __name__ == "__main__":
    main()
