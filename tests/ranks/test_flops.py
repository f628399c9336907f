"""The FLOPs counted from a configuration are those that real Megatron Core models execute, to the last one.

PyTorch's counter sees every matrix multiplication of a forward and a backward pass. With attention written out as
two multiplications it counts all pairs of query and key, so what it must equal is the figure for full attention.
"""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.utils.flop_counter import FlopCounterMode

from lt_parallel.metrics.flops import model_flops
from lt_parallel.plugins.layer_backend import resolve_layer_backend
from lt_parallel.plugins.layer_backend.specs import gpt_block_spec, gpt_mtp_block_spec
from tests.ranks.tiny_gpt import Layout, initialize_parallel
from tests.support.ranks import run_ranks

BATCH, SEQUENCE, VOCABULARY = 2, 12, 56

_GPT2 = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
_LLAMA = _GPT2 | {
    "num_query_groups": 2,
    "kv_channels": 10,  # 4 x 10 channels, and a hidden size of 32
    "ffn_hidden_size": 88,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
_MOE = _LLAMA | {
    "num_moe_experts": 6,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 40,
    "moe_shared_expert_intermediate_size": 24,
    "moe_layer_freq": [0, 1, 1],
    "moe_aux_loss_coeff": 0.01,
    "moe_grouped_gemm": False,
}
_LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "kv_channels": None,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 9,
    "rope_type": "rope",
}
_MLA = _LLAMA | _LATENT
_DEEPSEEK = _MOE | _LATENT | {"mtp_num_layers": 1, "moe_aux_loss_coeff": 0.0}  # its log has one length per process

_FULL = {"recompute_granularity": "full"}


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "odd_kv_channels": _GPT2 | {"num_query_groups": 2, "kv_channels": 7, "learned_positions": True},
    "llama": _LLAMA,
    "output_gate": _LLAMA | {"attention_output_gate": True, "qk_layernorm": True},
    "window": _LLAMA | {"window_size": (3, 0), "window_attn_skip_freq": 3},
    "moe": _MOE,
    "moe_every_second": _MOE | {"moe_layer_freq": 2, "moe_router_topk": 3, "moe_shared_expert_gate": True},
    "mla": _MLA,
    "mla_without_query_rank": _MLA | {"q_lora_rank": None},
    "mtp": _LLAMA | {"mtp_num_layers": 2},
    "mtp_repeated": _LLAMA | {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    "mtp_detached": _LLAMA | {"mtp_num_layers": 2, "mtp_detach_heads": True},
    "mtp_detached_tied": _GPT2 | {"mtp_num_layers": 1, "mtp_detach_heads": True},
    "deepseek": _DEEPSEEK,
    "recompute_uniform": _DEEPSEEK | _FULL | {"recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute_uniform_by_two": _MOE | _FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
    "recompute_block": _DEEPSEEK | _FULL | {"recompute_method": "block", "recompute_num_layers": 2},
    "recompute_core": _DEEPSEEK | _selective("core_attn", "layernorm"),
    "recompute_default": _LLAMA | {"recompute_granularity": "selective"},
    "recompute_mla_up": _DEEPSEEK | _selective("mla_up_proj"),
    "recompute_mla_up_without_query_rank": _MLA | {"q_lora_rank": None} | _selective("mla_up_proj"),
    "recompute_mlp": _DEEPSEEK | _selective("mlp"),
    "recompute_moe": _DEEPSEEK | _selective("moe"),
    "recompute_shared": _DEEPSEEK | _selective("shared_experts"),
    "recompute_moe_and_shared": _DEEPSEEK | _selective("moe", "shared_experts"),
    "recompute_mixture": _DEEPSEEK | _selective("core_attn", "mla_up_proj", "mlp", "moe"),
}


def make_config(fields: dict[str, Any]) -> TransformerConfig:
    cls = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    backend = resolve_layer_backend("torch", "cpu")
    fixed = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "attention_backend": AttnBackend.unfused}
    given = {name: copy.copy(value) for name, value in fields.items() if name != "learned_positions"}
    return cls(**given | fixed | backend.config_fields)


def measure(shape: str) -> tuple[int, int]:
    """Counted FLOPs of a batch: of the forward pass, and of forward and backward."""
    fields = SHAPES[shape]
    config = make_config(fields)
    backend = resolve_layer_backend("torch", "cpu")
    gpt2 = fields.get("add_bias_linear", True)
    model = GPTModel(
        config,
        gpt_block_spec(config, backend),
        VOCABULARY,
        SEQUENCE,
        share_embeddings_and_output_weights=gpt2,
        position_embedding_type="learned_absolute" if gpt2 else "rope",
        mtp_block_spec=gpt_mtp_block_spec(config, backend),
    )
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    with FlopCounterMode(display=False) as counter:
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        forward = counter.get_total_flops()
        losses.mean().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, f"{shape}: no gradients of {missing}"
    return forward, counter.get_total_flops()


def measure_all() -> dict[str, tuple[int, int]]:
    initialize_parallel(Layout())
    return {shape: measure(shape) for shape in SHAPES}


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[int, int]]:
    (result,) = run_ranks(measure_all, 1)
    return result


@pytest.mark.parametrize("shape", SHAPES)
def test_real_models_execute_what_is_counted(shape: str, measured: dict[str, tuple[int, int]]) -> None:
    flops = model_flops(make_config(SHAPES[shape]), seq_length=SEQUENCE, vocab_size=VOCABULARY)
    forward, forward_and_backward = measured[shape]
    assert forward == BATCH * flops.forward_full_attention
    assert forward_and_backward == BATCH * flops.training_hardware_full_attention
    recomputes = "recompute_granularity" in SHAPES[shape]
    assert (flops.training_hardware_full_attention > flops.training_full_attention) == recomputes


def test_recompute_is_no_part_of_model_flops() -> None:
    plain, *others = (
        model_flops(make_config(SHAPES[shape]), seq_length=SEQUENCE, vocab_size=VOCABULARY)
        for shape in ("deepseek", "recompute_uniform", "recompute_block", "recompute_mixture")
    )
    assert plain.training_hardware == plain.training
    for other in others:
        assert (other.training, other.training_full_attention) == (plain.training, plain.training_full_attention)


# What `megatron.training` prints as throughput comes from its own function.

_DOCUMENTS = [5, 1, 6]


def _arguments(shape: str) -> SimpleNamespace:
    """The command-line arguments that Megatron's function reads, for a shape."""
    config = make_config(SHAPES[shape])
    return SimpleNamespace(
        **vars(config)
        | {
            "seq_length": SEQUENCE,
            "padded_vocab_size": VOCABULARY,
            "swiglu": config.gated_linear_unit,
            "num_experts": config.num_moe_experts,
            "group_query_attention": config.num_query_groups != config.num_attention_heads,
            "hybrid_layer_pattern": None,
        }
        | ({"moe_latent_size": 18} if shape == "moe" else {})
    )


_COMPARED = ("gpt2", "odd_kv_channels", "output_gate", "moe", "moe_every_second", "mla", "mtp", "deepseek")


def megatron_training_counts() -> dict[str, tuple[float, float]]:
    from megatron.training.training import num_floating_point_operations

    counts = {}
    for shape in _COMPARED:
        whole = num_floating_point_operations(_arguments(shape), 1)
        squares = sum(length**2 for length in _DOCUMENTS)
        packed = num_floating_point_operations(
            _arguments(shape), 1, seqlen_squared_sum_in_batch=squares, total_real_tokens_in_batch=SEQUENCE
        )
        counts[shape] = whole, packed
    return counts


@pytest.fixture(scope="module")
def megatron_training() -> dict[str, tuple[float, float]]:
    (result,) = run_ranks(megatron_training_counts, 1)
    return result


@pytest.mark.parametrize("documents", [None, _DOCUMENTS])
@pytest.mark.parametrize("shape", _COMPARED)
def test_megatron_training_counts_the_same_but_for_known_terms(
    shape: str, documents: list[int] | None, megatron_training: dict[str, tuple[float, float]]
) -> None:
    args = _arguments(shape)
    flops = model_flops(args, seq_length=SEQUENCE, vocab_size=VOCABULARY, document_lengths=documents)
    both = flops.main + flops.mtp
    num_layers = args.num_layers + (args.mtp_num_layers or 0)
    expected = flops.training
    # It takes half of s^2 pairs for a causal mask, where a query sees its own key too: s (s + 1) / 2.
    expected += 3 * (both.attention_core_full / 2 - both.attention_core)
    # It leaves out the router and the gate of the shared experts.
    expected -= 3 * both.router
    if getattr(args, "moe_shared_expert_gate", False):
        gated_layers = 2  # the first and the third of three
        expected -= 3 * gated_layers * 2 * SEQUENCE * args.hidden_size
    # It counts some norms as if they were multiplications by a vector: three of each multi-token prediction layer ...
    expected += 3 * (args.mtp_num_layers or 0) * 2 * SEQUENCE * 3 * args.hidden_size
    # ... and the two of multi-latent attention's compressed vectors.
    if args.multi_latent_attention:
        expected += 3 * num_layers * 2 * SEQUENCE * (args.q_lora_rank + args.kv_lora_rank)
    assert megatron_training[shape][documents is not None] == expected
