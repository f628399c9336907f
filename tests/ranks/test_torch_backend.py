"""Tensor and sequence parallel models on the torch backend give the single process's loss and gradients."""

from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp

from lt_parallel.plugins.layer_backend.attention import TorchDotProductAttention
from lt_parallel.plugins.layer_backend.norms import SequenceParallelLayerNorm, SequenceParallelRMSNorm
from tests.ranks import tiny_gpt
from tests.ranks.tiny_gpt import (
    PADDED_VOCABULARY,
    SEQUENCE,
    Layout,
    Shard,
    assemble,
    build_chunks,
    initialize_parallel,
    make_config,
    shards_of,
)
from tests.support.ranks import run_ranks

BATCH = 2


def loss_and_gradients(shape: str, layout: Layout) -> tuple[torch.Tensor, list[Shard]]:
    """Per-token losses and all gradients after Megatron's own reduction."""
    initialize_parallel(layout)
    (chunk,) = build_chunks(shape, layout)
    model = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
    model.zero_grad_buffer()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, PADDED_VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    losses.mean().backward()
    finalize_model_grads([model])
    return losses.detach(), shards_of([chunk], "main_grad")


@pytest.fixture(scope="module")
def reference() -> Any:
    known: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}

    def get(shape: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if shape not in known:
            ((losses, shards),) = run_ranks(loss_and_gradients, 1, shape, Layout())
            known[shape] = losses, assemble([shards])
        return known[shape]

    return get


RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
GROUPED = {"moe_grouped_gemm": True}
GROUPED_RECOMPUTE = {**GROUPED, "recompute_granularity": "selective", "recompute_modules": ["moe_act"]}


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ("gpt2", Layout(2, tp=2)),
        ("gpt2", Layout(2, tp=2, sequence_parallel=True)),
        ("llama", Layout(2, tp=2)),
        ("llama", Layout(2, tp=2, sequence_parallel=True)),
        ("llama", Layout(4, tp=4, sequence_parallel=True)),
        ("llama", Layout(8, tp=8, sequence_parallel=True)),  # more ranks than key/value groups
        ("llama", Layout(2, tp=2, sequence_parallel=True, config=RECOMPUTE)),
        ("qk_norm", Layout(2, tp=2, sequence_parallel=True)),
        ("moe", Layout(2, tp=2, sequence_parallel=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"tp{value.tp}{'+sp' * value.sequence_parallel}",
)
def test_tensor_parallel_equals_single_process(reference: Any, shape: str, layout: Layout) -> None:
    assert_equals_reference(reference, shape, layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(config=GROUPED),
        Layout(config=GROUPED_RECOMPUTE),
        Layout(2, tp=2, etp=2, sequence_parallel=True, config=GROUPED),
        Layout(2, tp=2, ep=2, sequence_parallel=True, config=GROUPED),
    ],
    ids=["one", "one, moe_act recomputed", "etp2", "ep2"],
)
def test_grouped_experts_equal_megatrons_sequential_ones(reference: Any, layout: Layout) -> None:
    assert_equals_reference(reference, "moe", layout)


def assert_equals_reference(reference: Any, shape: str, layout: Layout) -> None:
    wanted_losses, wanted = reference(shape)
    results = run_ranks(loss_and_gradients, layout.world_size, shape, layout)
    for losses, _ in results:
        torch.testing.assert_close(losses, wanted_losses, rtol=2e-6, atol=0)
    got = assemble([shards for _, shards in results])
    assert got.keys() == wanted.keys()
    for name in wanted:
        error = (got[name] - wanted[name]).norm() / wanted[name].norm()
        assert error < 5e-6, f"{name}: relative error {error:.1e}"


def megatrons_own_loss_and_gradients(shape: str) -> tuple[torch.Tensor, list[Shard]]:
    """The same on Megatron's own local layers: unfused attention, PyTorch's norms."""
    tiny_gpt.gpt_block_spec = lambda config, backend, vp_stage: get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    return loss_and_gradients(shape, Layout())


@pytest.mark.parametrize("shape", ["gpt2", "llama", "moe"])
def test_model_equals_megatrons_own_layers(reference: Any, shape: str) -> None:
    losses, wanted = reference(shape)
    ((other_losses, shards),) = run_ranks(megatrons_own_loss_and_gradients, 1, shape)
    torch.testing.assert_close(losses, other_losses, rtol=2e-6, atol=0)
    for name, values in assemble([shards]).items():
        error = (values - wanted[name]).norm() / wanted[name].norm()
        assert error < 5e-6, f"{name}: relative error {error:.1e}"


def classes_of_norms_and_attention(shape: str) -> set[str]:
    layout = Layout()
    initialize_parallel(layout)
    (chunk,) = build_chunks(shape, layout)
    return {
        f"{name.split('.')[-1]}: {type(module).__name__}"
        for name, module in chunk.named_modules()
        if ("norm" in name.split(".")[-1] or name.endswith("core_attention"))
        and not isinstance(module, IdentityOp)  # the norm before a cross attention, which a GPT hasn't
    }


@pytest.mark.parametrize("shape", ["gpt2", "qk_norm", "mtp"])
def test_every_norm_and_attention_is_the_backends(shape: str) -> None:
    """The final norm and the query and key norms too, which come from other places of Megatron's specifications."""
    (classes,) = run_ranks(classes_of_norms_and_attention, 1, shape)
    norm = (SequenceParallelLayerNorm if shape == "gpt2" else SequenceParallelRMSNorm).__name__
    names = {"input_layernorm", "pre_mlp_layernorm", "final_layernorm"}
    names |= {"qk_norm": {"q_layernorm", "k_layernorm"}, "mtp": {"enorm", "hnorm"}}.get(shape, set())
    assert classes == {f"{name}: {norm}" for name in names} | {f"core_attention: {TorchDotProductAttention.__name__}"}


def run_dropout() -> tuple[torch.Tensor, torch.Tensor, bool]:
    layout = Layout(2, tp=2)
    initialize_parallel(layout)
    config = make_config("gpt2", layout, attention_dropout=0.5)
    attention = TorchDotProductAttention(config, 1, AttnMaskType.causal, "self")
    query = torch.zeros(SEQUENCE, BATCH, 2, 16)
    before = torch.get_rng_state()
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    first = attention(query, query, torch.ones_like(query), None)
    second = attention(query, query, torch.ones_like(query), None)
    tensor_parallel.get_cuda_rng_tracker().set_states(states)
    again = attention(query, query, torch.ones_like(query), None)
    assert not torch.equal(first, second)
    return first, again, torch.equal(before, torch.get_rng_state())


def test_dropout_has_a_stream_per_tensor_parallel_rank() -> None:
    """Ranks hold different heads, so they must not drop the same places; the common stream must not move."""
    (first_0, again_0, kept_0), (first_1, again_1, kept_1) = run_ranks(run_dropout, 2)
    assert kept_0
    assert kept_1
    assert torch.equal(first_0, again_0)
    assert torch.equal(first_1, again_1)
    assert not torch.equal(first_0, first_1)
