"""Grouped experts beside a loop over them and beside Megatron Core's sequential ones: time and memory of a layer.

Three ways through the same SwiGLU experts, forward and backward:

* sequential: Megatron Core's `SequentialMLP`, one module per expert
* loop: `grouped_experts()` with `grouped_linear` kept from PyTorch's grouped matrix product, so that it multiplies
  expert by expert and puts the results together; activation and router's weights are applied to all tokens at once
* grouped: `grouped_experts()` as it is

All begin with the same weights and tokens. Before anything is timed, outputs and gradients of the other two must equal
the sequential ones. Then they take turns, each round in another order, so that other work on the machine meets all of
them; a ratio is the median of the rounds' ratios.

Memory is what a step holds at its highest besides weights and inputs: activations and all gradients. On the CPU it is
added up from the allocations that PyTorch's profiler sees; what oneDNN and MKL keep for themselves isn't among them. On
CUDA it is the allocator's own peak.

On the CPU, grouped is slower than sequential where there are few and large experts. That is not its arithmetic but the
kernel's pages: glibc gives freed blocks of megabytes back and takes them anew in the next step, and grouped's blocks
are the largest, the activations of all tokens and the gradient of all experts. With `MALLOC_MMAP_THRESHOLD_=8589934592
MALLOC_TRIM_THRESHOLD_=17179869184` before the command blocks are kept, and the same rows took 0.95 to 1.01 of
sequential's time, all rows 0.30 to 1.01 (2026-12-07, the machine of `results/experts.md`, load 2 to 3).

Run `python -m benchmarks.experts` from the repository's root; on a GPU, with larger shapes, `--device cuda`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lt_parallel  # noqa: F401  (before megatron.core)
from benchmarks.report import RESULTS, Report
from lt_parallel import runtime
from lt_parallel.ops import grouped_linear as operator

SEED = 7
SEQUENTIAL, LOOP, GROUPED = "sequential", "loop", "grouped"
BALANCES = ("even", "skewed", "half empty")
DTYPES = (torch.float32, torch.bfloat16)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of relative errors; bf16 keeps 8 bits
SLOWER = 1.05  # from here on a ratio is called slower
RATIOS = ((LOOP, SEQUENTIAL), (GROUPED, SEQUENTIAL), (GROUPED, LOOP))
COLUMNS = (
    "tokens x hidden x ffn, experts",
    "tokens per expert",
    "dtype",
    *(f"{way}, ms" for way in (SEQUENTIAL, LOOP, GROUPED)),
    *(f"{way} / {to}" for way, to in RATIOS),
    *(f"{way}, MiB" for way in (SEQUENTIAL, LOOP, GROUPED)),
)


@dataclass(frozen=True)
class Shape:
    """The experts of one rank, and how many tokens come to them in all."""

    tokens: int
    hidden: int
    ffn: int
    experts: int

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.tokens} x {self.hidden} x {self.ffn}, {self.experts}"


SHAPES: Mapping[str, Sequence[Shape]] = {
    "cpu": (
        Shape(512, 128, 128, 64),
        Shape(2048, 256, 128, 64),
        Shape(2048, 512, 256, 16),
        Shape(4096, 256, 512, 4),
        Shape(1024, 1024, 2048, 8),
    ),
    # Experts as wide as Qwen3-235B-A22B's, DeepSeek-V3's and Mixtral 8x7B's.
    "cuda": (
        Shape(16384, 4096, 1536, 16),
        Shape(16384, 4096, 1536, 64),
        Shape(16384, 7168, 2048, 32),
        Shape(16384, 4096, 14336, 8),
    ),
}
QUICK = (Shape(24, 16, 16, 4), Shape(16, 16, 32, 2))


def counts(shape: Shape, balance: str) -> list[int]:
    """Tokens of each expert.

    Args:
        shape: Says how many in all.
        balance: One of `BALANCES`: as even as can be; in proportion to 1, 1/2, 1/3 ... (Zipf); every second expert
            without tokens, the others even.
    """
    number = range(shape.experts)
    weights = {
        "even": [1.0 for _ in number],
        "skewed": [1 / (expert + 1) for expert in number],
        "half empty": [1.0 - expert % 2 for expert in number],
    }[balance]
    ends = [round(shape.tokens * part / sum(weights)) for part in itertools.accumulate(weights)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


@dataclass
class Inputs:
    """What the dispatcher hands to the experts, and what comes back in the backward pass."""

    x: Tensor  # [tokens, hidden]
    counts: Tensor  # [experts], on the CPU, where both of Megatron Core's modules want it
    probabilities: Tensor  # [tokens], fp32
    upstream: Tensor  # [tokens, hidden]

    def clear(self) -> None:
        self.x.grad = self.probabilities.grad = None


@dataclass
class Way:
    """One way through the experts."""

    module: Any
    one_call: bool = True

    def step(self, inputs: Inputs) -> Tensor:
        """Forward and backward; returns the output."""
        with contextlib.nullcontext() if self.one_call else expert_by_expert():
            output, _ = self.module(inputs.x, inputs.counts, inputs.probabilities)
            output.backward(inputs.upstream)
        result: Tensor = output.detach()
        return result

    def clear(self, inputs: Inputs) -> None:
        inputs.clear()
        self.module.zero_grad(set_to_none=True)

    def results(self, inputs: Inputs) -> dict[str, Tensor]:
        """The output and every gradient of a step; a matrix's as `[experts, outputs, inputs]`."""
        self.clear(inputs)
        found = {"output": self.step(inputs), "gradient of x": inputs.x.grad}
        found["gradient of probabilities"] = inputs.probabilities.grad
        for layer in ("linear_fc1", "linear_fc2"):
            found[f"gradient of {layer}"] = torch.stack([each.grad for each in matrices(self.module, layer)]).squeeze(0)
        self.clear(inputs)
        return found


def matrices(module: Any, layer: str) -> list[Any]:
    """A layer's parameters: one for all experts, or one of each."""
    owners = getattr(module, "local_experts", [module])
    return [getattr(owner, layer).weight for owner in owners]


@contextlib.contextmanager
def expert_by_expert() -> Iterator[None]:
    """Keeps `grouped_linear` from PyTorch's grouped matrix product."""
    kept, operator._GROUPED_MM = operator._GROUPED_MM, None
    try:
        yield
    finally:
        operator._GROUPED_MM = kept


@contextlib.contextmanager
def one_process(device: str) -> Iterator[Any]:
    """Megatron Core's groups of a single process; none of them communicates."""
    runtime.select(device)  # type: ignore[arg-type]
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(shape: Shape, dtype: torch.dtype, groups: Any, generator: torch.Generator) -> dict[str, Way]:
    """The three ways, with equal weights; two share a module."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.transformer_config import TransformerConfig

    from lt_parallel.plugins.layer_backend.experts import grouped_experts

    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=1,
        num_moe_experts=shape.experts,
        moe_ffn_hidden_size=shape.ffn,
        moe_grouped_gemm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,  # as GPTModule sets it
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    grouped = grouped_experts()(shape.experts, config, pg_collection=groups)
    sequential = LocalSpecProvider().grouped_mlp_modules(False)(shape.experts, config, pg_collection=groups)
    with torch.no_grad():
        for layer in ("linear_fc1", "linear_fc2"):
            (weight,) = matrices(grouped, layer)
            weight.normal_(std=weight.size(-1) ** -0.5, generator=generator)
            for each, drawn in zip(matrices(sequential, layer), weight, strict=True):
                each.copy_(drawn)
    return {SEQUENTIAL: Way(sequential), LOOP: Way(grouped, one_call=False), GROUPED: Way(grouped)}


def draw(shape: Shape, balance: str, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Random tokens and gradients."""
    size, device = (shape.tokens, shape.hidden), generator.device
    x, upstream = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(2))
    probabilities = torch.rand(shape.tokens, generator=generator, device=device)
    numbers = torch.tensor(counts(shape, balance))
    return Inputs(x.requires_grad_(), numbers, probabilities.requires_grad_(), upstream)


def largest_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float) -> float:
    """Of all results, each relative to its own norm.

    Raises:
        RuntimeError: One is over the limit.
    """
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    over = [f"{name} differs by {error:.1e}" for name, error in errors.items() if not error <= limit]  # NaN is over
    if over:
        raise RuntimeError(f"{', '.join(over)}; limit {limit:.0e}")
    return max(errors.values())


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference, norm = float((found.double() - expected.double()).norm()), float(expected.double().norm())
    return difference / norm if norm else difference


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(way: Way, inputs: Inputs, device: str) -> int:
    """The most that a step holds besides what there is before it."""
    way.clear(inputs)
    gc.collect()
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way.step(inputs)
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        way.step(inputs)
    with tempfile.TemporaryDirectory(prefix="lt_parallel_experts_") as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = [each for each in json.loads(path.read_text())["traceEvents"] if each["name"] == "[memory]"]
    changes = [each["args"]["Bytes"] for each in sorted(events, key=lambda each: each["ts"])]
    return max(itertools.accumulate(changes))


def rounds_s(ways: Mapping[str, Way], inputs: Inputs, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each way's steps; gradients are dropped between them, not in them."""
    names, times = list(ways), {name: [] for name in ways}
    for each in range(-1, rounds):  # the first one warms up
        for name in names[each % len(names) :] + names[: each % len(names)]:
            ways[name].clear(inputs)
            synchronize(device)
            began_s = time.perf_counter()
            ways[name].step(inputs)
            synchronize(device)
            if each >= 0:
                times[name].append(time.perf_counter() - began_s)
            ways[name].clear(inputs)
    return times


@dataclass
class Row:
    """A row of the table: seconds and bytes by way."""

    shape: Shape
    balance: str
    dtype: torch.dtype
    times_s: dict[str, list[float]]
    peaks: dict[str, int]
    error: float

    @property
    def name(self) -> str:
        """In remarks."""
        return f"{self.shape.name} ({self.balance}, {short(self.dtype)})"

    def ratio(self, way: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(self.times_s[way], self.times_s[to], strict=True))

    def cells(self) -> list[str]:
        """In the order of the columns."""
        return [
            self.shape.name,
            self.balance,
            short(self.dtype),
            *(f"{1000 * statistics.median(self.times_s[way]):.2f}" for way in (SEQUENTIAL, LOOP, GROUPED)),
            *(f"{self.ratio(way, to):.2f}" for way, to in RATIOS),
            *(f"{self.peaks[way] / 2**20:.4g}" for way in (SEQUENTIAL, LOOP, GROUPED)),
        ]


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def measure(shape: Shape, dtype: torch.dtype, balance: str, rounds: int, device: str, groups: Any) -> Row:
    """Checks, then measures.

    Raises:
        RuntimeError: Results differ, or PyTorch refuses.
    """
    generator = torch.Generator(device).manual_seed(SEED)
    ways, inputs = build(shape, dtype, groups, generator), draw(shape, balance, dtype, generator)
    expected = ways[SEQUENTIAL].results(inputs)
    others = [ways[name].results(inputs) for name in (LOOP, GROUPED)]
    error = max(largest_error(found, expected, LIMITS[dtype]) for found in others)
    del expected, others
    times_s = rounds_s(ways, inputs, rounds, device)
    return Row(shape, balance, dtype, times_s, {name: peak_bytes(ways[name], inputs, device) for name in ways}, error)


def run(shapes: Sequence[Shape], rounds: int, device: str) -> tuple[list[Row], list[str]]:
    """All rows, and a line for each that there isn't."""
    rows, failures = [], []
    with one_process(device) as groups:
        for shape, dtype, balance in itertools.product(shapes, DTYPES, BALANCES):
            try:
                rows.append(measure(shape, dtype, balance, rounds, device, groups))
            except RuntimeError as error:  # the other rows are worth having; the status tells
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                failures.append(f"{shape.name} ({balance}, {short(dtype)}): {reason[:200]}")
            gc.collect()
    return rows, failures


def slower(rows: Sequence[Row], than: str) -> str:
    """Where grouped experts are slower than another way."""
    found = [f"{row.name}: {row.ratio(GROUPED, than):.2f}" for row in rows if row.ratio(GROUPED, than) >= SLOWER]
    where = f"in {len(found)} of {len(rows)} rows: {'; '.join(found)}" if found else "nowhere"
    return f"It is slower by {SLOWER - 1:.0%} or more {where}."


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What all rows say together."""
    for to in (SEQUENTIAL, LOOP):
        ratios = sorted(row.ratio(GROUPED, to) for row in rows)
        peaks = sorted(row.peaks[GROUPED] / row.peaks[to] for row in rows)
        yield (
            f"Grouped takes {ratios[0]:.2f} to {ratios[-1]:.2f} of the time of {to} (median "
            f"{statistics.median(ratios):.2f}) and {peaks[0]:.2f} to {peaks[-1]:.2f} of its memory. {slower(rows, to)}"
        )
    errors = {
        short(dtype): max(row.error for row in rows if row.dtype is dtype)
        for dtype in DTYPES
        if any(row.dtype is dtype for row in rows)
    }
    yield (
        "Outputs and gradients of loop and grouped were compared with those of sequential before each row; largest "
        "relative error: " + ", ".join(f"{error:.1e} in {dtype}" for dtype, error in errors.items()) + "."
    )


def remarks(rows: Sequence[Row], failures: Sequence[str], rounds: int, device: str) -> Iterator[str]:
    """What stands below the table."""
    yield (
        f"Forward and backward of one layer's SwiGLU experts; medians of {rounds} rounds. Memory is a step's highest, "
        "besides weights and inputs. Skewed: in proportion to 1, 1/2, 1/3 ...; half empty: every second expert has no "
        "tokens, the others are even."
    )
    if rows:
        yield from summary(rows)
    yield from (f"FAILED {failure}" for failure in failures)
    if device == "cuda":
        yield f"Device: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}."
    else:
        yield (
            "Device: the CPU, one thread. PyTorch's grouped matrix product is a loop itself there, in C++ (so in torch "
            "2.14.1): the matrix products are the same ones in all three ways, and what differs is Python, copies and "
            "memory. Why grouped can be slower than sequential with few and large experts, and what helps, is at the "
            "beginning of `benchmarks/experts.py`."
        )


def main() -> int:
    """Measures and writes; the status is 1 where a row failed, 2 where nothing could run."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.experts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each way (default: 15)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two rounds; written only with --out")
    parser.add_argument("--out", type=Path, help="a .md file (default: results/experts.md, on a GPU experts_cuda.md)")
    options = parser.parse_args()
    out = options.out
    if out is None and not options.quick:
        out = RESULTS / ("experts_cuda.md" if options.device == "cuda" else "experts.md")
    problem = problem_of(out, options)
    if problem is not None:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library says on stderr when it starts and stops
    if options.device == "cpu":
        torch.set_num_threads(1)
    shapes, rounds = (QUICK, 2) if options.quick else (SHAPES[options.device], options.rounds)
    settings = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("MALLOC_")]
    command = " ".join([*settings, "python -m", parser.prog, *sys.argv[1:]])
    report = Report("Experts: grouped, looped, sequential", COLUMNS, command)
    rows, failures = run(shapes, rounds, options.device)
    for row in rows:
        report.add(*row.cells())
    for remark in remarks(rows, failures, rounds, options.device):
        report.note(remark)
    report.show()
    if out is not None:
        print(f"Written to {report.write(str(out.absolute().with_suffix('')))}")  # `write` adds the suffix again
    return 1 if failures else 0


def problem_of(out: Path | None, options: argparse.Namespace) -> str | None:
    """What keeps this from running, in one line; None if nothing does."""
    if out is not None and (out.suffix != ".md" or not out.absolute().parent.is_dir()):
        return f"--out={out} must end in .md, in a folder that there is"
    if options.rounds < 1:
        return f"--rounds={options.rounds} must be at least 1"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device is found here"
    if operator._GROUPED_MM is None:
        return f"torch {torch.__version__} has no grouped matrix product"
    return None


if __name__ == "__main__":
    sys.exit(main())
