"""The torch layer backend on one GPU: which kernels run, whether they are right, and how fast a step is.

For a machine that is there for minutes and has no network. From the repository's root:

    pip install --no-deps --no-index megatron_core-0.19.2-*.whl   # besides torch, lightning and torchmetrics
    python -m benchmarks.gpu.step --out gpu.json --tests          # under 10 minutes; writes gpu.md too

Parts, each in processes of its own, so that one that fails or runs out of memory leaves the others:

* `kernels`: attention of the shape in bf16, forward and backward, by each attention_backend: which operators ran, and
  their error against fp32; the same for the blocks that context parallelism is made of, in bf16 and fp32
* `parity`: a tiny model's losses and gradient norms on the device, in fp32 and bf16-mixed, against fp32 on the CPU; its
  first weights are the same, bit for bit, wherever they are drawn
* `rates`: tokens/s and MFU of Trainer + MegatronParallelStrategy beside a plain Megatron Core loop of the same model,
  in turns in one process, bf16-mixed
* `hugging_face`: the same shape as transformers' Llama with SDPA, fp32 weights under bf16 autocast; left out, and said
  so, where transformers isn't installed
* `tests`, with --tests: `pytest -m gpu`

MFU is `lt_parallel.metrics.flops`' training FLOPs (causal attention) over the device's dense peak; hardware MFU counts
recompute too, full-attention MFU the whole square as publications do. Results are written after every part.

`--device cpu --shape tiny` runs the same code without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import logging
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lt_parallel.files import write_atomically
from lt_parallel.metrics.peaks import device_peak

SEED, CLIP = 7, 1.0
PACKAGES = ("torch", "lightning", "megatron-core", "transformers")
PARTS = ("kernels", "parity", "rates", "hugging_face")
REFERENCE = "parity_reference"
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Shape:
    """A Llama and its step."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    warmup: int
    block: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.seq_length * self.micro_batch_size * self.num_microbatches

    def model(self) -> dict[str, Any]:
        """GPTModule's arguments besides vocabulary and length; embeddings are tied, as in Llama 3.2 1B."""
        fields = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
        return {
            **{name: getattr(self, name) for name in fields},
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "rotary_base": 500_000,
        }


TINY = Shape(2, 64, 4, 2, 128, 256, 64, 2, 2, warmup=1, block=2, blocks=2)
SHAPES = {"llama_1b": Shape(16, 2048, 32, 8, 8192, 128_256, 4096, 2, 4, warmup=3, block=3, blocks=4), "tiny": TINY}


# ---------------------------------------------------------------- kernels


def rounded(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")


def relative_error(found: Any, expected: Any) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def attention_inputs(shape: Shape, device: str, dtype: Any) -> list[Any]:
    """Query, key, value and the output's gradient, `[b, n, s, d]`."""
    import torch

    generator = torch.Generator(device).manual_seed(SEED)
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    channels = shape.hidden_size // heads
    return [
        torch.randn(1, count, shape.seq_length, channels, generator=generator, device=device).to(dtype)
        for count in (heads, groups, groups, heads)
    ]


def exact_attention(inputs: Sequence[Any], scale: float) -> list[Any]:
    """Output and gradients of query, key and value in fp32 by PyTorch's unfused kernel."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = (part.detach().float().requires_grad_() for part in inputs[:3])
    with sdpa_kernel(SDPBackend.MATH):
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        output.backward(inputs[3].float())
    return [output.detach(), query.grad, key.grad, value.grad]


def attention_operators(profile: Any) -> list[str]:
    """Which of PyTorch's attention operators ran; on CUDA their kernels too."""
    import torch

    operators, kernels = set(), set()
    for event in profile.events():
        if event.name.startswith("aten::_scaled_dot_product_"):
            operators.add(event.name.removeprefix("aten::"))
        elif event.device_type == torch.autograd.DeviceType.CUDA and re.search("flash|cudnn|fmha", event.name.lower()):
            kernels.add(re.split(r"[(<]", event.name.removeprefix("void "))[0][:80])
    return sorted(operators) + sorted(kernels)


def profiler(device: str) -> Any:
    import torch

    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if device == "cuda" else [])])


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def layer_attention(shape: Shape, device: str, backend: str) -> dict[str, Any]:
    """The layer's own attention in bf16 by one of Megatron's attention_backends."""
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend, AttnMaskType

    from lt_parallel.plugins.layer_backend.attention import TorchDotProductAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        attention_backend=AttnBackend[backend],
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    attention = TorchDotProductAttention(config, 1, AttnMaskType.causal, "self")
    inputs = attention_inputs(shape, device, torch.bfloat16)
    leaves = [part.permute(2, 0, 1, 3).contiguous().requires_grad_() for part in inputs[:3]]  # [s, b, n, d]
    upstream = inputs[3].permute(2, 0, 1, 3).flatten(2)

    def both_ways() -> Any:
        for leaf in leaves:
            leaf.grad = None
        output = attention(*leaves, None)
        output.backward(upstream)
        return output

    both_ways()
    with profiler(device) as profile:
        output = both_ways()
        synchronize(device)
    times = []
    for _ in range(5):
        synchronize(device)
        began_s = time.perf_counter()
        both_ways()
        synchronize(device)
        times.append(time.perf_counter() - began_s)
    found = [output.unflatten(2, (shape.num_attention_heads, -1)), *(leaf.grad for leaf in leaves)]
    expected = exact_attention(inputs, attention.softmax_scale)
    error = max(relative_error(a.permute(1, 2, 0, 3), b) for a, b in zip(found, expected, strict=True))
    operators = attention_operators(profile)
    fused = bool(operators) and not any("math" in name for name in operators)
    return {
        "name": f"attention_backend={backend}, bf16",
        "operators": operators,
        "ms": rounded(1000 * min(times)),
        "error": rounded(error),
        "limit": 2e-2,
        "passed": fused and error < 2e-2,
    }


def block_attention(shape: Shape, device: str, dtype_name: str) -> dict[str, Any]:
    """What context parallelism does on a rank: the late half of the queries meets both halves of the keys in turn."""
    import torch

    from lt_parallel.ops.block_attention import Block, accumulate, attend_block, block_gradients

    dtype = getattr(torch, dtype_name)
    inputs = attention_inputs(shape, device, dtype)
    half, scale = shape.seq_length // 2, inputs[0].size(-1) ** -0.5
    late, early = slice(half, None), slice(0, half)
    query = inputs[0][:, :, late].contiguous()
    upstream = inputs[3].clone()
    upstream[:, :, early] = 0  # only the late queries count
    blocks = [[part[:, :, rows].contiguous() for part in inputs[1:3]] for rows in (early, late)]
    with profiler(device) as profile:
        whole: Block | None = None
        for block, causal in zip(blocks, (False, True), strict=True):
            whole = accumulate(whole, attend_block(query, *block, causal=causal, scale=scale))
        assert whole is not None
        whole = Block(whole.output.to(dtype), whole.lse)
        gradient = upstream[:, :, late].contiguous()
        parts = [
            block_gradients(gradient, query, *block, whole, causal=causal, scale=scale)
            for block, causal in zip(blocks, (False, True), strict=True)
        ]
        synchronize(device)
    expected = exact_attention([*inputs[:3], upstream], scale)
    found = [
        (whole.output, expected[0][:, :, late]),
        (parts[0][0].float() + parts[1][0].float(), expected[1][:, :, late]),
        *((torch.cat([parts[0][i], parts[1][i]], 2), expected[i + 1]) for i in (1, 2)),
    ]
    error = max(relative_error(*pair) for pair in found)
    limit = 2e-2 if dtype is torch.bfloat16 else 1e-4
    return {
        "name": f"blocks of context parallelism, {dtype_name}",
        "operators": attention_operators(profile),
        "ms": None,
        "error": rounded(error),
        "limit": limit,
        "passed": error < limit,
    }


def kernels(shape: Shape, device: str) -> dict[str, Any]:
    """One row for each attention; a kernel that refuses is a row that failed."""
    cases: list[tuple[Callable[[Shape, str, str], dict[str, Any]], str]] = [
        *((layer_attention, backend) for backend in ("auto", "flash", "fused")),
        *((block_attention, dtype) for dtype in ("bfloat16", "float32")),
    ]
    rows = []
    for case, argument in cases:
        try:
            rows.append(case(shape, device, argument))
        except RuntimeError as error:
            rows.append({"name": f"{case.__name__} {argument}", "passed": False, "failure": first_line(error)})
    return {"rows": rows}


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


# ---------------------------------------------------------------- training


def random_tokens(shape: Shape, steps: int) -> Any:
    """Samples `{tokens, labels, loss_mask, position_ids}` for so many steps: windows of one random stream."""
    import torch

    length = shape.seq_length
    count = steps * shape.micro_batch_size * shape.num_microbatches
    generator = torch.Generator().manual_seed(SEED)
    stream = torch.randint(shape.vocab_size, (count + length + 1,), generator=generator)
    mask, positions = torch.ones(length), torch.arange(length)
    return [
        {
            "tokens": stream[start : start + length],
            "labels": stream[start + 1 : start + length + 1],
            "loss_mask": mask,
            "position_ids": positions,
        }
        for start in range(count)
    ]


def make_module(shape: Shape) -> Any:
    from lt_parallel.models import GPTModule

    return GPTModule(
        shape.vocab_size, shape.seq_length, **shape.model(), lr=3e-4, lr_warmup_iters=2, lr_decay_iters=1000
    )


def fit(shape: Shape, device: str, precision: str, steps: int, callbacks: list[Any]) -> Any:
    """Trains on one device; returns the module."""
    import lightning.pytorch as L
    from torch.utils.data import DataLoader

    from lt_parallel.strategies import MegatronParallelStrategy

    L.seed_everything(SEED, verbose=False)
    module = make_module(shape)
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_steps=steps,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,  # windows in their order, as the plain loop reads them
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        strategy=MegatronParallelStrategy(num_microbatches=shape.num_microbatches, layer_backend="torch"),
    )
    trainer.fit(module, DataLoader(random_tokens(shape, steps), batch_size=shape.micro_batch_size))
    return module


def training_numbers(device: str, precision: str) -> dict[str, list[float]]:
    """Losses and gradient norms of five steps of the tiny model."""
    import lightning.pytorch as L

    numbers: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    class Numbers(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            numbers["loss"].append(float(trainer.callback_metrics["train_loss"]))
            numbers["grad_norm"].append(float(trainer.callback_metrics["grad_norm"]))

    fit(TINY, device, precision, 5, [Numbers()])
    return numbers


def parity_reference(shape: Shape, device: str) -> dict[str, Any]:
    return training_numbers("cpu", "32-true")


def parity(shape: Shape, device: str) -> dict[str, Any]:
    return {precision: training_numbers(device, precision) for precision in ("32-true", "bf16-mixed")}


#: Relative, by precision and number: fp32 sums in another order; bf16 has 8 bits.
PARITY_LIMITS = {"32-true": {"loss": 1e-4, "grad_norm": 5e-3}, "bf16-mixed": {"loss": 1e-2, "grad_norm": 5e-2}}


def compare(found: dict[str, Any], reference: dict[str, list[float]]) -> dict[str, Any]:
    """Largest relative error of each number, against its limit."""
    rows = []
    for precision, limits in PARITY_LIMITS.items():
        for name, limit in limits.items():
            pairs = list(zip(found[precision][name], reference[name], strict=True))
            error = max(abs(mine - other) / abs(other) for mine, other in pairs)
            passed = error < limit and all(math.isfinite(mine) for mine, _ in pairs)
            rows.append({"name": f"{precision} {name}", "error": rounded(error), "limit": limit, "passed": passed})
    moved = reference["loss"][-1] != reference["loss"][0]
    rows.append({"name": "losses move", "error": None, "limit": None, "passed": moved})
    return {"rows": rows, "found": found, "reference": reference}


# ---------------------------------------------------------------- rates


class Clock:
    """Seconds of blocks of steps."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._began_s = 0.0
        self.blocks_s: list[float] = []

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        self.start()
        yield
        self.stop()

    def start(self) -> None:
        synchronize(self._device)
        self._began_s = time.perf_counter()

    def stop(self) -> None:
        synchronize(self._device)
        self.blocks_s.append(time.perf_counter() - self._began_s)

    def step_s(self, block: int) -> float:
        return statistics.median(self.blocks_s) / block


def peak_memory_gib(device: str) -> float | None:
    import torch

    return rounded(torch.cuda.max_memory_allocated() / 2**30) if device == "cuda" else None


def rates(shape: Shape, device: str) -> dict[str, Any]:
    """Trainer and plain loop in turns, block by block; then one step under the profiler."""
    import lightning.pytorch as L
    from torch.utils.data import DataLoader

    from benchmarks.overhead import core_loop

    steps = shape.warmup + shape.block * shape.blocks + 1
    clocks = {"trainer": Clock(device), "megatron": Clock(device)}
    result: dict[str, Any] = {}
    losses: list[Any] = []

    class Turns(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            done = batch_idx - shape.warmup
            if done == 0:
                result["memory_gib"] = peak_memory_gib(device)
                result["params"] = module.parameter_counts()["params_total"]
                loader = DataLoader(random_tokens(shape, steps), batch_size=shape.micro_batch_size)
                self.core = core_loop(module, trainer, loader, shape.num_microbatches)
                for _ in range(shape.warmup):
                    self.core.step()
                clocks["trainer"].start()
            elif done > 0 and done % shape.block == 0:
                clocks["trainer"].stop()
                with clocks["megatron"].block():
                    for _ in range(shape.block):
                        self.core.step()
                if done == shape.block * shape.blocks:
                    self.profile = profiler(device)
                    self.profile.__enter__()
                else:
                    clocks["trainer"].start()

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            losses.append(trainer.callback_metrics["train_loss"].detach())

        def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
            self.profile.__exit__(None, None, None)
            result["operators"] = attention_operators(self.profile)
            result["flops"] = sequence_flops(module.model_flops())
            pairs = [(float(mine), float(core)) for mine, core in zip(losses, self.core.losses, strict=False)]
            result["loss_error"] = rounded(max(abs(mine - core) / abs(core) for mine, core in pairs))
            result["compared"] = len(pairs)

    fit(shape, device, "bf16-mixed", steps, [Turns()])
    for name, clock in clocks.items():
        result[name] = {"step_s": clock.step_s(shape.block), "blocks_s": clock.blocks_s}
    return result


def sequence_flops(flops: Any) -> dict[str, float]:
    """FLOPs per token by the package's three definitions."""
    return {
        "model": flops.training / flops.seq_length,
        "hardware": flops.training_hardware / flops.seq_length,
        "full_attention": flops.training_full_attention / flops.seq_length,
    }


def hugging_face(shape: Shape, device: str) -> dict[str, Any]:
    """The Llama of transformers: SDPA, fp32 weights, bf16 autocast, fused AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        max_position_embeddings=shape.seq_length,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    samples = random_tokens(shape, 1)
    size = shape.micro_batch_size
    batches = [
        torch.stack([sample["tokens"] for sample in samples[start : start + size]]).to(device)
        for start in range(0, len(samples), size)
    ]

    def step() -> Any:
        total = torch.zeros((), device=device)
        for tokens in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    first = float(step())
    for _ in range(shape.warmup):
        step()
    clock = Clock(device)
    for _ in range(shape.blocks):
        with clock.block():
            for _ in range(shape.block):
                step()
    with profiler(device) as profile:
        step()
        synchronize(device)
    return {
        "step_s": clock.step_s(shape.block),
        "first_loss": first,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "operators": attention_operators(profile),
        "memory_gib": peak_memory_gib(device),
    }


# ---------------------------------------------------------------- putting it together


def run_part(name: str, shape: Shape, device: str, output: Path) -> None:
    """In a process of its own."""
    import torch

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if device == "cpu":
        torch.set_num_threads(1)
    import lt_parallel  # noqa: F401  (before megatron.core)

    functions: dict[str, Callable[[Shape, str], dict[str, Any]]] = {
        "kernels": kernels,
        REFERENCE: parity_reference,
        "parity": parity,
        "rates": rates,
        "hugging_face": hugging_face,
    }
    result = functions[name](shape, device)
    gc.collect()
    write_atomically(output, json.dumps(result))


class Run:
    """Starts the parts, keeps within the time and writes what is known after each.

    Args:
        device: "cuda" or "cpu".
        shape_name: A key of `SHAPES`.
        out: The JSON file; the table goes beside it.
        limit_s: For everything.
    """

    def __init__(self, device: str, shape_name: str, out: Path | None, limit_s: float) -> None:
        self._device, self._shape_name, self._out = device, shape_name, out
        self._deadline_s = time.monotonic() + limit_s
        self.results: dict[str, Any] = {
            "shape": {"name": shape_name, **asdict(SHAPES[shape_name])},
            "machine": machine(device),
            "parts": {},
        }

    def part(self, name: str) -> None:
        """Runs one and notes its result, or why there is none."""
        if name == "hugging_face" and importlib.util.find_spec("transformers") is None:
            self._note(name, {"skipped": "transformers isn't installed here"})
            return
        result = self._started(name)
        if name == "parity" and "failure" not in result:
            reference = self._started(REFERENCE)
            result = reference if "failure" in reference else compare(result, reference)
        self._note(name, result)

    def _started(self, name: str) -> dict[str, Any]:
        left_s = self._deadline_s - time.monotonic()
        if left_s < 5:
            return {"failure": "no time was left for it"}
        device = "cpu" if name == REFERENCE else self._device
        environment = {**os.environ, "LT_PARALLEL_DEVICE": device, "PYTHONWARNINGS": "ignore"}
        if device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory(prefix="lt_parallel_gpu_") as folder:
            output = Path(folder) / "part.json"
            options = (f"--device={device}", f"--shape={self._shape_name}", f"--part={name}", f"--out={output}")
            command = [sys.executable, "-m", "benchmarks.gpu.step", *options]
            try:
                done = subprocess.run(
                    command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=left_s, check=False
                )
            except subprocess.TimeoutExpired:
                return {"failure": f"took longer than the {left_s:.0f} s that were left"}
            if done.returncode or not output.exists():
                print(done.stderr[-6000:], file=sys.stderr)
                last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                return {"failure": f"ended with status {done.returncode}: {last[:300]}"}
            result: dict[str, Any] = json.loads(output.read_text())
            return result

    def tests(self) -> None:
        """`pytest -m gpu`, in the files that have such tests."""
        files = [str(path) for path in sorted((_ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
        # Not all of pytest's plugins that the configuration asks for need be there.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            *files,
        ]
        environment = {**os.environ, "LT_PARALLEL_DEVICE": self._device}
        left_s = max(self._deadline_s - time.monotonic(), 5.0)
        try:
            done = subprocess.run(
                command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            self._note("tests", {"failure": f"took longer than the {left_s:.0f} s that were left"})
            return
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
        passed = done.returncode == 0
        if not passed:
            print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
        self._note("tests", {"summary": lines[-1]} if passed else {"failure": lines[-1]})

    def _note(self, name: str, result: dict[str, Any]) -> None:
        self.results["parts"][name] = result
        if self._out is not None:
            write_atomically(self._out, json.dumps(self.results, indent=2) + "\n")
            write_atomically(self._out.with_suffix(".md"), page(self.results))

    @property
    def failures(self) -> list[str]:
        """What failed, by name."""
        found = []
        for name, result in self.results["parts"].items():
            if "failure" in result:
                found.append(f"{name}: {result['failure']}")
            for row in result.get("rows", ()):
                if not row["passed"]:
                    found.append(f"{name}: {row['name']}: {row.get('failure', row.get('error'))}")
            if result.get("loss_error", 0) > LOSS_LIMIT:
                found.append(f"{name}: the loops' losses differ by {result['loss_error']}")
        return found


#: Relative; on a GPU sums aren't made in the same order twice.
LOSS_LIMIT = 1e-2


def machine(device: str) -> dict[str, Any]:
    """Where the numbers come from."""
    import torch

    known = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "python": platform.python_version(),
        "versions": known,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if device == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def peak_of(results: dict[str, Any]) -> float | None:
    """Dense bf16 peak in FLOP/s; None where it isn't known."""
    peak = device_peak(results["machine"]["device"])
    return None if peak is None else peak.flops_per_sec("bf16")


def rate_rows(results: dict[str, Any]) -> list[list[str]]:
    """A row for each loop."""
    parts, shape = results["parts"], results["shape"]
    tokens = shape["seq_length"] * shape["micro_batch_size"] * shape["num_microbatches"]
    ours, other = parts.get("rates", {}), parts.get("hugging_face", {})
    loops = [
        ("Trainer + MegatronParallelStrategy", ours.get("trainer"), ours.get("memory_gib")),
        ("plain Megatron Core loop", ours.get("megatron"), None),
        ("Hugging Face Llama, SDPA, autocast", other if "step_s" in other else None, other.get("memory_gib")),
    ]
    peak, rows = peak_of(results), []
    for name, loop, memory_gib in loops:
        if loop is None:
            why = other.get("skipped") or other.get("failure") if name.startswith("Hugging") else ours.get("failure")
            rows.append([name, why or "not run", *[""] * 5])
            continue
        per_second = tokens / loop["step_s"]
        flops = ours.get("flops", {})
        shares = [
            f"{100 * per_second * flops[kind] / peak:.1f}%" if peak and flops else "unknown"
            for kind in ("model", "hardware", "full_attention")
        ]
        memory = "" if memory_gib is None else f"{memory_gib:.1f} GiB"
        rows.append([name, f"{1000 * loop['step_s']:.0f} ms", f"{per_second:,.0f}", *shares, memory])
    return rows


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def check_rows(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    for part in ("kernels", "parity"):
        found = results["parts"].get(part, {})
        if "failure" in found:
            rows.append([part, "FAILED", found["failure"], "", "", ""])
        for row in found.get("rows", ()):
            error = "" if row.get("error") is None else f"{row['error']:g}"
            limit = "" if row.get("limit") is None else f"< {row['limit']:g}"
            milliseconds = "" if row.get("ms") is None else f"{row['ms']:g}"
            what = row.get("failure") or ", ".join(row.get("operators", ()))
            rows.append([row["name"], "passed" if row["passed"] else "FAILED", what, error, limit, milliseconds])
    return rows


def page(results: dict[str, Any]) -> str:
    """What a reader wants to see, in Markdown."""
    machine_, shape, parts = results["machine"], results["shape"], results["parts"]
    text = f"# One GPU step: {shape['name']}\n\n"
    text += table(
        ["loop", "step", "tokens/s", "MFU", "hardware MFU", "full-attention MFU", "peak memory"], rate_rows(results)
    )
    ours = parts.get("rates", {})
    if "trainer" in ours:
        ratio = ours["trainer"]["step_s"] / ours["megatron"]["step_s"]
        text += (
            f"\nTrainer / plain loop: {ratio:.4f}; losses of {ours['compared']} steps differ by at most "
            f"{ours['loss_error']:g}. Attention in the model: {', '.join(ours['operators'])}.\n"
        )
    text += "\n" + table(["check", "result", "what ran", "relative error", "limit", "ms"], check_rows(results))
    if "tests" in parts:
        text += f"\n`pytest -m gpu`: {parts['tests'].get('summary') or 'FAILED: ' + parts['tests']['failure']}\n"
    known = ", ".join(f"{name} {number}" for name, number in machine_["versions"].items())
    cuda = f", CUDA {machine_['cuda']}, cuDNN {machine_['cudnn']}" if "cuda" in machine_ else ""
    text += (
        f"\n* Machine: {machine_['device']}\n* Date: {machine_['date']}\n"
        f"* Versions: Python {machine_['python']}, {known}{cuda}\n"
        f"* Shape: {', '.join(f'{name} {value}' for name, value in shape.items() if name != 'name')}\n"
    )
    return text


def missing() -> str | None:
    """What keeps this from running, in one line; None if nothing does."""
    for name in ("torch", "lightning", "megatron.core"):
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of its parent
            found = False
        if not found:
            return f"{name} isn't installed for {sys.executable}"
    return None


def main() -> int:
    """Runs the parts; the status is 1 where something failed, 2 where nothing could run."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama_1b")
    parser.add_argument("--out", type=Path, help="JSON file for the results; a table goes beside it, as .md")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--tests", action="store_true", help="run the tests marked gpu at the end")
    parser.add_argument("--limit-s", type=float, default=540, help="seconds for everything (default: 540)")
    parser.add_argument("--part", choices=(*PARTS, REFERENCE), help=argparse.SUPPRESS)  # started by this script
    options = parser.parse_args()
    problem = missing()
    if problem is None and options.out is not None and not options.out.absolute().parent.is_dir():
        problem = f"--out: there is no folder {options.out.absolute().parent}"
    if problem is None and options.device == "cuda" and not has_cuda():
        problem = "no CUDA device is found here; --device cpu --shape tiny runs the same code without one"
    if problem is not None:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
        return 2
    if options.part:
        run_part(options.part, SHAPES[options.shape], options.device, options.out)
        return 0
    run = Run(options.device, options.shape, options.out, options.limit_s)
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        run.part(name)
    if options.tests:
        print("tests ...", file=sys.stderr, flush=True)
        run.tests()
    print(page(run.results))
    for failure in run.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if run.failures else 0


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
