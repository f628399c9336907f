"""What `Trainer` + `MegatronParallelStrategy` cost over what they replace.

Two questions, each answered by two loops that alternate, block of steps by block of steps, in the same processes:

* `ratio_*`: a GPT's step, over the step of a plain Megatron Core loop on the same model and data. The losses must be
  bitwise equal. CPU time (of all ranks and their threads) is the figure to trust where ranks share cores.
* `nothing_*`: CPU milliseconds per step of a model that computes next to nothing, with everything `GPTModule` reports
  (train_loss, grad_norm, lr, consumed_samples), minus those of Lightning's bare loop. A plain Megatron Core loop of the
  same model, and one of plain PyTorch, show which part of the difference is Megatron Core itself.

Run `python -m benchmarks.overhead` from the repository's root.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lt_parallel  # noqa: F401  (before megatron.core)
from benchmarks.core_loop import CoreLoop
from benchmarks.report import Report
from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy

SEED, VOCAB_SIZE = 7, 256
CASES = {
    "ratio_1_process": {},
    "ratio_tp2_pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "nothing_1_process": {},
}
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
SCHEDULE = {"min_lr": 1e-4, "lr_decay_style": "cosine"}
WARMUP_ITERS, DECAY_ITERS, CLIP = 10, 5000, 1.0


class Sequences(Dataset[dict[str, Tensor]]):
    """Windows of one random stream; reading one costs microseconds."""

    def __init__(self, length: int, seq_length: int) -> None:
        self._length, self._seq_length = length, seq_length
        self._stream = torch.randint(VOCAB_SIZE, (length + seq_length + 1,), generator=torch.Generator().manual_seed(1))
        self._mask, self._positions = torch.ones(seq_length), torch.arange(seq_length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._stream[index : index + self._seq_length + 1]
        return {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": self._mask,
            "position_ids": self._positions,
        }


# ---------------------------------------------------------------- a model that does nothing


class NothingModule(GPTModule):
    """`GPTModule`'s optimizer, schedule and reports around a chunk of one parameter."""

    def build_chunk(
        self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None, groups: Any
    ) -> nn.Module:
        from megatron.core.transformer.enums import ModelType
        from megatron.core.transformer.module import MegatronModule

        class Nothing(MegatronModule):
            """The loss of each token is the one parameter."""

            model_type = ModelType.encoder_or_decoder

            def __init__(self) -> None:
                super().__init__(config=config)
                self.weight = nn.Parameter(torch.ones(1, 1))

            def set_input_tensor(self, input_tensor: Any) -> None:
                """There is one stage only."""

            def forward(self, tokens: Tensor, *args: Any, **targets: Tensor) -> Tensor:
                return self.weight.expand(tokens.shape)

        return Nothing()

    def initialize_chunks(self, seed: int) -> None:
        """The parameter begins at one."""


class BareNothing(L.LightningModule):
    """The same computation as a user of plain Lightning writes it, without any logging."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        mask = batch["loss_mask"]
        return (self.weight.expand(batch["tokens"].shape) * mask).sum() / mask.sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LoggingNothing(BareNothing):
    """The same, with as many values logged each step as `GPTModule` reports; the yardstick for a machine's speed."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log_dict({"train_loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "consumed_samples": 1.0}, batch_size=1)
        return super().training_step(batch, batch_idx)


class Stamps(L.Callback):
    """CPU seconds of this process between two steps of a fit."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.cpu_s = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._first:
            self.cpu_s = -time.process_time()
        elif batch_idx == self._last:
            self.cpu_s += time.process_time()


# ---------------------------------------------------------------- alternating


def quiet_trainer(folder: str, steps: int, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=CSVLogger(folder, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )


class Alternating(L.Callback):
    """Stops the Trainer's clock after every block of its steps and lets the other loops run a block each.

    Args:
        others: By name, builds a loop once the Trainer has set everything up. A loop takes a number of steps, runs that
            many and returns its own CPU seconds, or None to be measured from outside.
        warmup: Steps before the first block.
        block: Steps per block.
    """

    def __init__(self, others: dict[str, Callable[[L.Trainer], Any]], warmup: int, block: int) -> None:
        self._builders, self._warmup, self._block = others, warmup, block
        self._others: dict[str, Callable[[int], float | None]] = {}
        self.cpu_s: dict[str, list[float]] = {name: [] for name in ("trainer", *others)}
        self.wall_s: dict[str, list[float]] = {name: [] for name in ("trainer", *others)}
        self.losses: list[float] = []
        self._started = (0.0, 0.0)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        done = batch_idx - self._warmup
        if done < 0 or done % self._block:
            return
        if done == 0:
            self._others = {name: build(trainer) for name, build in self._builders.items()}
            for run in self._others.values():
                run(self._warmup)
        else:
            self._stop("trainer")
            for name, run in self._others.items():
                self._start()
                own = run(self._block)
                self._stop(name, own)
        self._start()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def _start(self) -> None:
        gc.collect()
        torch.distributed.barrier()
        self._started = (time.process_time(), time.perf_counter())

    def _stop(self, name: str, own_cpu_s: float | None = None) -> None:
        cpu_s, wall_s = time.process_time() - self._started[0], time.perf_counter() - self._started[1]
        self.cpu_s[name].append(cpu_s if own_cpu_s is None else own_cpu_s)
        self.wall_s[name].append(wall_s)


def core_loop(module: GPTModule, trainer: L.Trainer, loader: DataLoader[Any], num_microbatches: int) -> CoreLoop:
    """A plain Megatron Core loop beside a running Trainer: the same groups, first weights and rates."""
    strategy = trainer.strategy
    assert isinstance(strategy, MegatronParallelStrategy)
    from megatron.core.transformer import TransformerConfig

    config, device = TransformerConfig(**strategy.settings.fields("model")), strategy.root_device
    groups, chunks = strategy.groups, module.model_chunks
    chunk = module.build_chunk(
        config,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        vp_stage=None,
        groups=groups,
    )
    module.model_chunks = nn.ModuleList([chunk])
    module.initialize_chunks(SEED)
    module.model_chunks = chunks
    precision: Any = strategy.precision_plugin
    (chunk,) = precision.convert_chunks([chunk.to(device)], config)
    hp: Any = module.hparams
    rates = {"weight_decay": hp.weight_decay, "lr": hp.lr, "min_lr": hp.min_lr}
    adam = {name: hp[name] for name in ("adam_beta1", "adam_beta2", "adam_eps")}
    return CoreLoop(
        chunk,
        config,
        groups,
        optimizer_fields={
            "optimizer": "adam",
            "clip_grad": CLIP,
            **rates,
            **adam,
            **strategy.settings.fields("optimizer"),
        },
        ddp_fields=strategy.settings.fields("ddp"),
        schedule_fields={
            "init_lr": 0.0,
            "max_lr": hp.lr,
            "min_lr": hp.min_lr,
            "lr_warmup_steps": hp.lr_warmup_iters,
            "lr_decay_steps": hp.lr_decay_iters,
            "lr_decay_style": hp.lr_decay_style,
            "start_wd": hp.weight_decay,
            "end_wd": hp.weight_decay,
            "wd_incr_steps": 0,
            "wd_incr_style": "constant",
        },
        device=device,
        loader=loader,
        num_microbatches=num_microbatches,
    )


def core_runner(loop: CoreLoop) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for _ in range(steps):
            loop.step()

    return run


def bare_lightning_runner(
    module_class: type[BareNothing], loader: DataLoader[Any], folder: str
) -> Callable[[int], float]:
    """Fits of Lightning alone; what a fit spends before and after its steps isn't counted."""
    lead_in = 5

    def run(steps: int) -> float:
        stamps = Stamps(lead_in, lead_in + steps)
        trainer = quiet_trainer(folder, lead_in + steps + 1, [stamps], devices=1)
        trainer.fit(module_class(), loader)
        return stamps.cpu_s

    return run


def torch_runner(loader: DataLoader[Any]) -> Callable[[int], None]:
    """What `BareNothing` computes, in a loop of plain PyTorch."""
    module = BareNothing()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    batches = iter(loader)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            module.training_step(next(batches), 0).backward()
            optimizer.step()
            scheduler.step()

    return run


# ---------------------------------------------------------------- cases, each in its own processes


def measure(case: str, blocks: int, block: int, output: Path) -> None:
    """Runs one case in this process (one rank of it) and writes what was measured, on rank 0."""
    nothing = case.startswith("nothing")
    seq_length, micro_batch, num_microbatches = (8, 1, 1) if nothing else (128, 2, 4)
    shape = {"num_layers": 4, "hidden_size": 32 if nothing else 192, "num_attention_heads": 4}
    warmup = 3 if not nothing else 20
    steps = warmup + blocks * block + 1
    L.seed_everything(SEED, verbose=False)
    data = Sequences(micro_batch * num_microbatches * (steps + block + warmup), seq_length)
    loader = DataLoader(data, batch_size=micro_batch, shuffle=True)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED)).tolist()  # as the strategy's
    ordered = DataLoader(data, batch_size=micro_batch, sampler=order)
    module = (NothingModule if nothing else GPTModule)(
        VOCAB_SIZE,
        seq_length,
        **shape,
        **OPTIMIZER,
        **SCHEDULE,
        lr_warmup_iters=WARMUP_ITERS,
        lr_decay_iters=DECAY_ITERS,
    )
    loops: list[CoreLoop] = []

    def plain(trainer: L.Trainer) -> Callable[[int], None]:
        loops.append(core_loop(module, trainer, ordered, num_microbatches))
        return core_runner(loops[0])

    with tempfile.TemporaryDirectory(prefix="lt_parallel_overhead_") as folder:
        others: dict[str, Callable[[L.Trainer], Any]] = {"megatron": plain}
        if nothing:
            others["lightning"] = lambda trainer: bare_lightning_runner(BareNothing, loader, folder)
            others["logging"] = lambda trainer: bare_lightning_runner(LoggingNothing, loader, folder)
            others["torch"] = lambda trainer: torch_runner(ordered)
        clock = Alternating(others, warmup, block)
        trainer = quiet_trainer(
            folder,
            steps,
            [clock],
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            gradient_clip_val=CLIP,
            strategy=MegatronParallelStrategy(**CASES[case], num_microbatches=num_microbatches),
        )
        trainer.fit(module, loader)
    losses = [float(loss) for loss in loops[0].losses]
    if losses:  # the last pipeline stage
        require_equal(clock.losses, losses)
    measured = {"cpu_s": clock.cpu_s, "wall_s": clock.wall_s, "compared": len(losses), "losses": losses}
    every: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(every, measured)
    if trainer.is_global_zero:
        output.write_text(json.dumps({"ranks": every, "block": block}))


def require_equal(trainer: Sequence[float], megatron: Sequence[float]) -> None:
    """Bitwise equality of the losses of both loops, as far as both have gone."""
    for step, (left, right) in enumerate(zip(trainer, megatron, strict=False)):
        if left != right:
            raise AssertionError(f"the loops' losses differ from step {step} on: Trainer {left!r}, plain {right!r}")


def run_case(case: str, blocks: int, block: int) -> dict[str, Any]:
    """Starts the case's processes and returns what they measured."""
    sizes = CASES[case].values()
    world_size = 1
    for size in sizes:
        world_size *= size
    launcher = [sys.executable]
    if world_size > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LT_PARALLEL_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        options = (f"--case={case}", f"--blocks={blocks}", f"--block={block}", f"--output={output}")
        subprocess.run(
            [*launcher, "-m", "benchmarks.overhead", *options],
            check=True,
            env=environment,
            timeout=1800,
        )
        return json.loads(output.read_text())


# ---------------------------------------------------------------- figures


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def summed_cpu(result: dict[str, Any], loop: str) -> list[float]:
    """CPU seconds of each block, over all ranks."""
    return [sum(times) for times in zip(*(rank["cpu_s"][loop] for rank in result["ranks"]), strict=True)]


def add_ratio(report: Report, case: str, result: dict[str, Any]) -> None:
    compared = max(rank["compared"] for rank in result["ranks"])
    wall = {loop: result["ranks"][0]["wall_s"][loop] for loop in ("trainer", "megatron")}
    cpu = {loop: summed_cpu(result, loop) for loop in ("trainer", "megatron")}
    step_ms = 1000 * statistics.median(wall["megatron"]) / result["block"]
    for kind, times in (("CPU", cpu), ("wall", wall)):
        low, middle, high = quartiles([a / b for a, b in zip(times["trainer"], times["megatron"], strict=True)])
        report.add(
            f"{case.removeprefix('ratio_').replace('_', ' ')}, {kind}",
            f"{step_ms:.0f} ms",
            f"{middle:.4f}",
            f"{low:.4f} to {high:.4f}",
            "<= 1.02",
        )
    report.note(f"{case}: {len(wall['trainer'])} blocks of {result['block']} steps; {compared} losses bitwise equal.")


def add_nothing(report: Report, case: str, result: dict[str, Any]) -> None:
    per_step = {
        loop: [1000 * seconds / result["block"] for seconds in summed_cpu(result, loop)]
        for loop in ("trainer", "megatron", "lightning", "torch", "logging")
    }
    trainer, megatron, lightning, plain, logging_ = per_step.values()
    blocks = list(zip(trainer, megatron, lightning, plain, strict=True))
    rows = (
        ("Trainer + strategy, above bare Lightning", [t - b for t, _, b, _ in blocks], "<= 1 ms"),
        ("of it, Megatron Core above plain PyTorch", [m - p for _, m, _, p in blocks], ""),
        ("of it, the strategy and its reports", [(t - b) - (m - p) for t, m, b, p in blocks], ""),
        (
            "self.log of four values, above bare Lightning",
            [a - b for a, b in zip(logging_, lightning, strict=True)],
            "",
        ),
        ("bare Lightning", lightning, ""),
        ("plain Megatron Core", megatron, ""),
        ("plain PyTorch", plain, ""),
    )
    for name, values, goal in rows:
        low, middle, high = quartiles(values)
        report.add(f"nothing: {name}", "", f"{middle:.3f} ms", f"{low:.3f} to {high:.3f} ms", goal)
    report.note(f"{case}: {len(blocks)} blocks of {result['block']} steps; CPU milliseconds per step.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="cases to run")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--blocks", type=int, help="blocks per loop")
    parser.add_argument("--block", type=int, help="steps per block")
    for internal in ("--case", "--output"):  # one rank of a case, started by this script
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        measure(options.case, options.blocks, options.block, Path(options.output))
        return
    report = Report(
        "Overhead of Trainer + MegatronParallelStrategy",
        ["what", "step", "median", "quartiles", "goal"],
        "python -m benchmarks.overhead",
    )
    for case in options.only:
        nothing = case.startswith("nothing")
        blocks, block = options.blocks or (15 if nothing else 16), options.block or (100 if nothing else 5)
        result = run_case(case, blocks, block)
        (add_nothing if nothing else add_ratio)(report, case, result)
    report.show()
    if not options.no_write:
        report.write("overhead")


if __name__ == "__main__":
    main()
