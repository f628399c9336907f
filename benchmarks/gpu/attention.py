"""Which attention kernels run in a shape, and whether they are right."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.shapes import SEED, Shape, rounded


def relative_error(found: Any, expected: Any) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def attention_inputs(shape: Shape, device: str, dtype: Any) -> list[Any]:
    """Query, key, value and the output's gradient, `[b, n, s, d]`."""
    generator = torch.Generator(device).manual_seed(SEED)
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    channels = shape.hidden_size // heads
    return [
        torch.randn(1, count, shape.seq_length, channels, generator=generator, device=device).to(dtype)
        for count in (heads, groups, groups, heads)
    ]


def exact_attention(inputs: Sequence[Any], scale: float) -> list[Any]:
    """Output and gradients of query, key and value in fp32 by PyTorch's unfused kernel."""
    query, key, value = (part.detach().float().requires_grad_() for part in inputs[:3])
    with sdpa_kernel(SDPBackend.MATH):
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        output.backward(inputs[3].float())
    return [output.detach(), query.grad, key.grad, value.grad]


def attention_operators(profile: Any) -> list[str]:
    """Which of PyTorch's attention operators ran; on CUDA their kernels too."""
    operators, kernels = set(), set()
    for event in profile.events():
        if event.name.startswith("aten::_scaled_dot_product_"):
            operators.add(event.name.removeprefix("aten::"))
        elif event.device_type == torch.autograd.DeviceType.CUDA and re.search("flash|cudnn|fmha", event.name.lower()):
            kernels.add(re.split(r"[(<]", event.name.removeprefix("void "))[0][:80])
    return sorted(operators) + sorted(kernels)


def profiler(device: str) -> Any:
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if device == "cuda" else [])])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def layer_attention(shape: Shape, device: str, backend: str) -> dict[str, Any]:
    """The layer's own attention in bf16 by one of Megatron's attention_backends."""
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
