"""The torch backend's attention and norms against independent dense computations, and the choice of a backend."""

import importlib.util
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from lt_parallel.plugins.layer_backend import resolve_layer_backend
from lt_parallel.plugins.layer_backend.attention import TorchDotProductAttention, _expand_groups_if_needed, band_mask
from lt_parallel.plugins.layer_backend.norms import (
    SequenceParallelLayerNorm,
    SequenceParallelNorm,
    SequenceParallelRMSNorm,
)

BATCH, CHANNELS = 2, 8


def make_config(**fields: Any) -> TransformerConfig:
    defaults: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "transformer_impl": "local",
    }
    return TransformerConfig(**defaults | fields)


def make_attention(config: TransformerConfig | None = None, **arguments: Any) -> TorchDotProductAttention:
    defaults: dict[str, Any] = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return TorchDotProductAttention(config or make_config(), **defaults | arguments)


def make_inputs(
    q_len: int, k_len: int, heads: int, groups: int, v_channels: int = CHANNELS, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_len * 100 + heads * 10 + groups)
    shapes = [(q_len, heads, CHANNELS), (k_len, groups, CHANNELS), (k_len, groups, v_channels)]
    return [
        torch.randn(s, BATCH, h, c, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s, h, c in shapes
    ]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Softmax(Q K^T) V written out in float64, head by head; `hidden` is [b, s_q, s_k], True where a key is hidden."""
    per_group = query.size(2) // key.size(2)
    heads = []
    for head in range(query.size(2)):
        group = head // per_group
        q, k, v = (x.double() for x in (query[:, :, head], key[:, :, group], value[:, :, group]))
        scores = torch.einsum("ibc,jbc->bij", q, k) * scale
        probabilities = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        heads.append(torch.einsum("bij,jbc->ibc", probabilities, v))
    return torch.cat(heads, dim=-1)


def hidden_by_rule(q_len: int, k_len: int, hides: Any) -> Tensor:
    """[b, s_q, s_k] from a rule on (query position, key position), positions counted from the end of the keys."""
    rows = [[hides(i + k_len - q_len, j) for j in range(k_len)] for i in range(q_len)]
    return torch.tensor(rows).expand(BATCH, q_len, k_len)


def check_against_dense(
    attention: Any, inputs: list[Tensor], hidden: Tensor, scale: float, tol: float = 1e-12, **kw: Any
) -> None:
    """Output and the gradients of all inputs, for a random upstream gradient."""
    mask = kw.pop("attention_mask", None)
    output = attention(*inputs, mask, **kw)
    expected = dense_attention(*inputs, hidden, scale)
    assert output.shape == expected.shape
    assert output.is_contiguous()
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad(output, inputs, upstream.to(output.dtype))
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for name, a, b in zip(["output", "query", "key", "value"], (output, *got), (expected, *wanted), strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=0.1)  # one key alone: no gradient
        assert error <= tol, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_causal_attention(heads: int, groups: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(17, 17, heads, groups, dtype=dtype)
    hidden = hidden_by_rule(17, 17, lambda i, j: j > i)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1.5e-2}[dtype]
    check_against_dense(make_attention(), inputs, hidden, CHANNELS**-0.5, tolerance)


@given(left=st.integers(0, 9), heads=st.sampled_from([(2, 2), (4, 2)]), length=st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_sliding_window(left: int, heads: tuple[int, int], length: int) -> None:
    attention = make_attention(make_config(window_size=(left, 0)))
    hidden = hidden_by_rule(length, length, lambda i, j: j > i or j < i - left)
    check_against_dense(attention, make_inputs(length, length, *heads), hidden, CHANNELS**-0.5)


def test_sliding_window_skips_the_layers_that_megatron_says() -> None:
    config = make_config(num_layers=4, window_size=(3, 0), window_attn_skip_freq=2)
    assert [make_attention(config, layer_number=n).window for n in (1, 2, 3, 4)] == [(3, 0), None, (3, 0), None]


def test_band_mask_is_aligned_to_the_bottom_right() -> None:
    assert band_mask(2, 4, 1, 0, torch.device("cpu")).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert band_mask(2, 4, -1, 1, torch.device("cpu")).int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]


def test_mask_made_in_inference_serves_training() -> None:
    attention, inputs = make_attention(make_config(window_size=(5, 0))), make_inputs(11, 11, 2, 2)
    with torch.inference_mode():
        attention(*inputs, None)
    attention(*inputs, None).sum().backward()
    assert all(tensor.grad is not None for tensor in inputs)


def test_explicit_mask_adds_to_the_causal_one() -> None:
    length = 6
    padding = torch.zeros(BATCH, 1, 1, length, dtype=torch.bool)
    padding[1, ..., 2] = True  # a padded position inside, so that no query loses all its keys
    hidden = hidden_by_rule(length, length, lambda i, j: j > i) | padding[:, 0]
    inputs = make_inputs(length, length, 4, 2)
    check_against_dense(make_attention(), inputs, hidden, CHANNELS**-0.5, attention_mask=padding)


@pytest.mark.parametrize("mask_type", [AttnMaskType.padding, AttnMaskType.arbitrary])
def test_mask_types_that_need_a_mask(mask_type: AttnMaskType) -> None:
    attention, inputs = make_attention(attn_mask_type=mask_type), make_inputs(5, 7, 2, 2)
    mask = torch.rand(BATCH, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[..., 0] = False
    check_against_dense(attention, inputs, mask[:, 0], CHANNELS**-0.5, attention_mask=mask)
    with pytest.raises(ValueError, match=f"attn_mask_type={mask_type.name} needs an attention_mask"):
        attention(*inputs, None)


def test_queries_at_the_end_of_the_keys() -> None:
    attention, inputs = make_attention(), make_inputs(3, 8, 4, 2)
    kind = {"attn_mask_type": AttnMaskType.causal_bottom_right}
    check_against_dense(attention, inputs, hidden_by_rule(3, 8, lambda i, j: j > i), CHANNELS**-0.5, **kind)
    with pytest.raises(ValueError, match="given 3 and 8"):
        attention(*inputs, None)


def test_one_query_sees_all_keys_without_a_mask() -> None:
    nothing = hidden_by_rule(1, 8, lambda i, j: False)
    kind = {"attn_mask_type": AttnMaskType.no_mask}
    check_against_dense(make_attention(), make_inputs(1, 8, 4, 2), nothing, CHANNELS**-0.5, **kind)


def test_value_channels_may_differ_and_the_scale_may_be_given() -> None:
    attention = make_attention(k_channels=CHANNELS, v_channels=5, softmax_scale=0.7)
    hidden = hidden_by_rule(9, 9, lambda i, j: j > i)
    check_against_dense(attention, make_inputs(9, 9, 4, 4, v_channels=5), hidden, 0.7)


def test_scale_follows_the_key_channels() -> None:
    assert make_attention(k_channels=64).softmax_scale == 0.125
    assert make_attention().softmax_scale == pytest.approx(CHANNELS**-0.5, rel=1e-15)


def test_strided_views_of_a_fused_projection_are_taken_as_they_are() -> None:
    """Megatron hands over slices of one [s, b, groups, (q, k, v)] tensor."""
    fused = torch.randn(6, BATCH, 4, 3 * CHANNELS, dtype=torch.float64)
    query, key, value = (x.requires_grad_() for x in fused.split(CHANNELS, dim=-1))
    assert not query.is_contiguous()
    hidden = hidden_by_rule(6, 6, lambda i, j: j > i)
    check_against_dense(make_attention(), [query, key, value], hidden, CHANNELS**-0.5)


def test_dropout_drops_in_training_only() -> None:
    attention = make_attention(make_config(sequence_parallel=False), attention_dropout=0.5)
    attention._rng_state = lambda dropout: torch.random.fork_rng()  # type: ignore[method-assign]  # tracker: rank tests
    query, key, _ = make_inputs(64, 64, 4, 4, dtype=torch.float32)
    ones = torch.ones_like(key)
    torch.manual_seed(0)
    dropped = attention(query, key, ones, None)
    # Each output is a weighted mean of ones under dropout: its mean is 1, but no longer each value.
    assert dropped.std() > 0.05
    assert abs(dropped.mean() - 1.0) < 0.1
    torch.testing.assert_close(attention.eval()(query, key, ones, None), torch.ones(64, BATCH, 32))


@pytest.mark.parametrize("masked", [False, True])
def test_fused_kernel_runs_for_grouped_heads(masked: bool) -> None:
    """Not the unfused one, which holds all scores in memory."""
    attention = make_attention(make_config(window_size=(8, 0)) if masked else None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(*make_inputs(32, 32, 4, 2, dtype=torch.float32), None)
    kernels = {event.name for event in profile.events() if "scaled_dot_product" in event.name}
    assert kernels == {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"}


@pytest.mark.parametrize(
    ("dtype", "window", "heads"),
    [
        (torch.bfloat16, None, 2),
        (torch.bfloat16, (8, 0), 4),
        (torch.float32, None, 4),
    ],
)
def test_cuda_tensors_stay_there_and_are_grouped_only_where_a_fused_kernel_takes_it(
    dtype: torch.dtype, window: tuple[int, int] | None, heads: int
) -> None:
    """On fake CUDA tensors: shapes and devices only; which kernel a GPU chooses is the next test's."""
    with FakeTensorMode():
        query = torch.empty(16, BATCH, 4, CHANNELS, device="cuda", dtype=dtype)
        key = torch.empty(16, BATCH, 2, CHANNELS, device="cuda", dtype=dtype)
        attention = make_attention(make_config(window_size=window))
        _, mask = attention._mask(query, key, None, AttnMaskType.causal)
        expanded, _ = _expand_groups_if_needed(query, key, key, mask)
        assert expanded.size(2) == heads
        output = attention(query, key, key, None)
    band_mask.cache_clear()  # it holds a fake mask
    assert (output.shape, output.device.type, output.dtype) == ((16, BATCH, 4 * CHANNELS), "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, (64, 0)])
def test_gpu_runs_a_fused_kernel(groups: int, dtype: torch.dtype, window: tuple[int, int] | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    attention = make_attention(make_config(window_size=window), k_channels=64)
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(256, BATCH, heads, 64, device="cuda", dtype=dtype, generator=generator)
        for heads in (8, groups, groups)
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output = attention(query, key, value, None)
    kernels = {event.name for event in profile.events() if event.name.startswith("aten::_scaled_dot_product")}
    fused = {f"aten::_scaled_dot_product_{name}_attention" for name in ("cudnn", "flash", "efficient")}
    assert kernels
    assert kernels <= fused
    left = 256 if window is None else window[0]
    hidden = hidden_by_rule(256, 256, lambda i, j: j > i or j < i - left)
    expected = dense_attention(query.cpu(), key.cpu(), value.cpu(), hidden, 0.125)
    error = (output.cpu().double() - expected).norm() / expected.norm()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-3)


def test_attention_backend_of_the_config_is_honoured() -> None:
    backends = [backend for backend in AttnBackend if backend is not AttnBackend.local]
    kernels = {backend: make_attention(make_config(attention_backend=backend)).kernel for backend in backends}
    assert kernels == {
        AttnBackend.auto: None,
        AttnBackend.flash: SDPBackend.FLASH_ATTENTION,
        AttnBackend.fused: SDPBackend.CUDNN_ATTENTION,
        AttnBackend.unfused: SDPBackend.MATH,
    }
    hidden = hidden_by_rule(5, 5, lambda i, j: j > i)
    for backend in kernels:
        attention = make_attention(make_config(attention_backend=backend))
        check_against_dense(attention, make_inputs(5, 5, 4, 2), hidden, CHANNELS**-0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context_parallel_size": 2, "attention_dropout": 0.1}, "attention_dropout=0.1 with context_parallel_size=2"),
        ({"context_parallel_size": 2, "window_size": (3, 0)}, r"window_size=\(3, 0\) with context_parallel_size=2"),
        ({"softmax_type": "off-by-one"}, "softmax_type='vanilla' only, not 'off-by-one'"),
        ({"attention_backend": AttnBackend.local}, "attention_backend=local"),
        ({"log_max_attention_logit": True}, "log_max_attention_logit=True"),
    ],
)
def test_options_that_it_cannot_honour_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_attention(make_config(**fields))


@pytest.mark.parametrize("argument", ["attention_bias", "packed_seq_params"])
def test_arguments_that_it_cannot_honour_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=f"doesn't support {argument}"):
        make_attention()(*make_inputs(4, 4, 4, 4), None, **{argument: torch.zeros(1)})


# Norms


def dense_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm with a bias, RMSNorm without, written out in float64."""
    x = x.double()
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    return x if bias is None else x + bias.double()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_a_dense_computation(normalization: str, zero_centered: bool, dtype: torch.dtype) -> None:
    fields = {"normalization": normalization, "layernorm_zero_centered_gamma": zero_centered, "params_dtype": dtype}
    norm = SequenceParallelNorm(make_config(**fields), 32, eps=1e-3)
    torch.manual_seed(0)
    with torch.no_grad():
        for param in norm.parameters():
            param.add_(0.1 * torch.randn(32))
    x = torch.randn(7, 3, 32).to(dtype).requires_grad_()
    parameters = dict(norm.named_parameters())
    assert set(parameters) == ({"weight", "bias"} if normalization == "LayerNorm" else {"weight"})
    weight = parameters["weight"] + (1 if zero_centered else 0) * torch.ones(32, dtype=torch.float64)
    expected, output = dense_norm(x, weight, parameters.get("bias"), 1e-3), norm(x)
    assert output.dtype == dtype
    upstream = torch.randn(7, 3, 32, dtype=torch.float64)
    inputs = (x, *norm.parameters())
    got = (output, *torch.autograd.grad(output, inputs, upstream.to(dtype)))
    wanted = (expected, *torch.autograd.grad(expected, inputs, upstream))
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b.double()).norm() / b.double().norm() < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centred_weight_is_not_rounded_away(normalization: str) -> None:
    """1 + 2^-10 rounds to 1 in bf16, so a norm that forms that sum would ignore this weight."""
    fields = {"normalization": normalization, "layernorm_zero_centered_gamma": True, "params_dtype": torch.bfloat16}
    norm = SequenceParallelNorm(make_config(**fields), 64)
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = norm(x)
    nn.init.constant_(norm.weight, 2.0**-10)
    assert (norm(x) != before).float().mean() > 0.05


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("normalization", "kind", "parent"),
    [("LayerNorm", SequenceParallelLayerNorm, nn.LayerNorm), ("RMSNorm", SequenceParallelRMSNorm, nn.RMSNorm)],
)
def test_norm_is_a_torch_norm_with_marks(normalization: str, kind: type, parent: type, sequence_parallel: bool) -> None:
    config = make_config(normalization=normalization, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    norm = SequenceParallelNorm(config=config, hidden_size=16, eps=1e-6)
    assert type(norm) is kind
    assert isinstance(norm, parent)
    assert all(param.sequence_parallel is sequence_parallel for param in norm.to(torch.bfloat16).parameters())
    x = torch.randn(3, 16)
    torch.testing.assert_close(norm.float()(x), parent(16, eps=1e-6)(x), rtol=0, atol=0)


def test_norm_takes_an_fp32_residual_stream() -> None:
    norm = SequenceParallelNorm(make_config(params_dtype=torch.bfloat16), 32)
    x = torch.randn(5, 32)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), F.layer_norm(x, (32,)).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("option", ["persist_layer_norm", "memory_efficient_layer_norm"])
def test_norm_refuses_options_of_other_kernels(option: str) -> None:
    with pytest.raises(ValueError, match=f"set {option}=False"):
        SequenceParallelNorm(make_config(**{option: True}), 8)


def test_norm_refuses_an_unknown_kind() -> None:
    config = make_config()
    config.normalization = "BatchNorm"
    with pytest.raises(ValueError, match="normalization='BatchNorm'"):
        SequenceParallelNorm(config, 8)


# Choice


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_torch_is_chosen_on_cpu(name: str) -> None:
    backend = resolve_layer_backend(name, "cpu")
    assert backend.name == "torch"
    assert backend.config_fields == {"transformer_impl": "local"}
    assert backend.provider.core_attention() is TorchDotProductAttention
    assert backend.provider.layer_norm(rms_norm=True) is SequenceParallelNorm


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="layer_backend='te' is not known; choose one of auto, torch, transf"):
        resolve_layer_backend("te", "cpu")


def test_transformer_engine_on_cpu() -> None:
    with pytest.raises(ValueError, match="runs on CUDA devices only"):
        resolve_layer_backend("transformer_engine", "cpu")


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="it is installed here")
def test_transformer_engine_missing_on_cuda() -> None:
    assert resolve_layer_backend("auto", "cuda").name == "torch"
    with pytest.raises(ImportError, match=r"pip install 'lt-parallel\[te\]'"):
        resolve_layer_backend("transformer_engine", "cuda")


def test_broken_transformer_engine_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by Python, but not importable: neither `auto` nor the name may fall back to torch."""
    from megatron.core.extensions import transformer_engine

    find_spec = importlib.util.find_spec
    found = lambda name, *rest: object() if name == "transformer_engine" else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(transformer_engine, "HAVE_TE", False)
    for name in ("auto", "transformer_engine"):
        with pytest.raises(ImportError, match="Megatron Core can't import it"):
            resolve_layer_backend(name, "cuda")


def test_choosing_module_imports_no_heavy_package() -> None:
    code = (
        "import sys, lt_parallel.plugins.layer_backend; "
        "print([m for m in ('torch', 'megatron.core', 'lightning') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
