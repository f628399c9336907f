"""FLOPs from a configuration: against masks counted one by one, published formulas and totals, and bad input.

That real models execute exactly these numbers is tested in `tests/ranks/test_flops.py`.
"""

import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from lt_parallel.metrics.flops import ForwardFlops, ModelFlops, causal_pairs, model_flops

SEQUENCE, VOCABULARY = 12, 56
DENSE = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
MOE = DENSE | {"num_moe_experts": 6, "moe_ffn_hidden_size": 40, "moe_shared_expert_intermediate_size": 24}
MLA = DENSE | {
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 9,
}
SHAPES = {"dense": DENSE, "moe": MOE, "mla": MLA, "mtp": MOE | {"mtp_num_layers": 2}}


def count(
    values: dict[str, Any],
    *,
    seq_length: int = SEQUENCE,
    vocab_size: int = VOCABULARY,
    document_lengths: list[int] | None = None,
    **more: Any,
) -> ModelFlops:
    config = SimpleNamespace(**values | more)
    return model_flops(config, seq_length=seq_length, vocab_size=vocab_size, document_lengths=document_lengths)


# ------------------------------------------------------------- which pairs


def visible_pairs(documents: list[int], left: int | None) -> int:
    """Ones in the mask over all tokens, written out."""
    document_of = [index for index, length in enumerate(documents) for _ in range(length)]
    return sum(
        document_of[query] == document_of[key] and key <= query and (left is None or key >= query - left)
        for query in range(len(document_of))
        for key in range(len(document_of))
    )


@given(length=st.integers(1, 20), left=st.none() | st.integers(0, 25))
def test_causal_pairs(length: int, left: int | None) -> None:
    assert causal_pairs(length, left) == visible_pairs([length], left)


@given(
    documents=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    left=st.integers(-1, 12),
    skip=st.none() | st.integers(1, 4) | st.lists(st.integers(0, 1), min_size=5, max_size=5),
)
@settings(deadline=None)
def test_core_attention_counts_the_mask(documents: list[int], padding: int, left: int, skip: Any) -> None:
    """Windows by layer as Megatron Core decides it (`is_layer_window_attention`), also in the MTP layers."""
    from megatron.core.transformer.utils import is_layer_window_attention

    window, total = (left, 0), sum(documents)
    shape = DENSE | {"num_layers": 5, "mtp_num_layers": 2, "kv_channels": 6, "num_query_groups": 2}
    flops = count(
        shape,
        seq_length=total + padding,
        document_lengths=documents,
        window_size=window,
        window_attn_skip_freq=skip,
    )

    def pairs(layer_number: int) -> int:
        windowed = is_layer_window_attention(window, skip, layer_number)
        return visible_pairs(documents, left if windowed and left != -1 else None)

    per_pair = 2 * 2 * 4 * 6  # two products, a multiplication and an addition, heads, channels
    assert flops.main.attention_core == per_pair * sum(pairs(number) for number in range(1, 6))
    assert flops.mtp.attention_core == per_pair * (pairs(1) + pairs(2))
    all_pairs = sum(length * length for length in documents)
    assert flops.main.attention_core_full == per_pair * 5 * all_pairs
    repeated = count(
        shape,
        seq_length=total,
        document_lengths=documents,
        window_size=window,
        window_attn_skip_freq=skip,
        mtp_use_repeated_layer=True,
    )
    assert repeated.mtp.attention_core == per_pair * 2 * pairs(1)


@given(length=st.integers(1, 40), beyond=st.integers(-1, 10), right=st.integers(-1, 3))
def test_a_window_as_long_as_the_sequence_is_none(length: int, beyond: int, right: int) -> None:
    windowed = count(DENSE, seq_length=length, window_size=(length + beyond, right))
    assert windowed == count(DENSE, seq_length=length)
    assert count(DENSE, seq_length=length, window_size=(-1, right)) == windowed


@given(documents=st.lists(st.integers(1, 30), min_size=2, max_size=6), shape=st.sampled_from(sorted(SHAPES)))
def test_documents(documents: list[int], shape: str) -> None:
    """Packing only changes core attention; it adds up over documents, whatever their order."""
    total = sum(documents)
    packed = count(SHAPES[shape], seq_length=total, document_lengths=documents)
    assert packed == count(SHAPES[shape], seq_length=total, document_lengths=documents[::-1])
    alone = [count(SHAPES[shape], seq_length=length) for length in documents]
    assert packed.forward == sum(flops.forward for flops in alone)
    assert packed.training_full_attention == sum(flops.training_full_attention for flops in alone)
    whole = count(SHAPES[shape], seq_length=total)
    assert packed.forward < whole.forward
    linear = [flops.forward - flops.main.attention_core - flops.mtp.attention_core for flops in (packed, whole)]
    assert linear[0] == linear[1]


def test_padding_passes_the_matrices_but_attends_to_nothing() -> None:
    padded = count(DENSE, seq_length=20, document_lengths=[5, 7])
    packed = count(DENSE, seq_length=12, document_lengths=[5, 7])
    assert padded.main.attention_core == packed.main.attention_core
    for name in ("attention_projections", "mlp", "output_layer"):
        assert getattr(padded.main, name) * 12 == getattr(packed.main, name) * 20, name


# --------------------------------------------------------- totals and views


@given(shape=st.sampled_from(sorted(SHAPES)), length=st.integers(1, 64), vocabulary=st.integers(1, 99))
def test_totals(shape: str, length: int, vocabulary: int) -> None:
    flops = count(SHAPES[shape], seq_length=length, vocab_size=vocabulary, recompute_granularity="selective")
    assert flops.training == 3 * flops.forward == 3 * sum(flops.breakdown().values())
    assert flops.training_full_attention == 3 * sum(flops.breakdown(full_attention=True).values())
    core = flops.main.attention_core + flops.mtp.attention_core
    full = flops.main.attention_core_full + flops.mtp.attention_core_full
    assert full * (length + 1) == core * 2 * length  # s^2 pairs against s (s + 1) / 2
    assert flops.training_full_attention - flops.training == 3 * (full - core)
    assert flops.training_hardware - flops.training == core
    assert flops.training_hardware_full_attention - flops.training_full_attention == full
    assert flops.per_token == pytest.approx(
        [
            value / length
            for value in (flops.forward, flops.training, flops.training_full_attention, flops.training_hardware)
        ]
    )
    assert flops.with_vocab_size(77) == count(
        SHAPES[shape], seq_length=length, vocab_size=77, recompute_granularity="selective"
    )


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    name=st.sampled_from(["num_layers", "hidden_size", "ffn_hidden_size", "moe_router_topk", "mtp_num_layers"]),
    factor=st.integers(2, 3),
)
def test_more_is_never_cheaper(shape: str, name: str, factor: int) -> None:
    values = SHAPES[shape] | {"ffn_hidden_size": 40, "moe_router_topk": 2, "kv_channels": 8}
    larger = values | {name: values.get(name, 0) * factor}
    assert count(larger).training >= count(values).training
    assert count(values, seq_length=SEQUENCE * factor).training > count(values).training * factor


def test_components() -> None:
    """Each figure of one model, written out."""
    flops = count(
        MOE | {"moe_layer_freq": [0, 1, 1], "moe_shared_expert_gate": True, "moe_latent_size": 10},
        num_query_groups=2,
        gated_linear_unit=True,
        ffn_hidden_size=100,
        mtp_num_layers=1,
    )
    token, attention = 2 * SEQUENCE, 32 * (32 + 2 * 16 + 32)
    layer = {
        "router": token * 32 * 6,
        "experts": token * (2 * 3 * 10 * 40 + 2 * 32 * 10),
        "shared_experts": token * (3 * 32 * 24 + 32),
    }
    assert flops.breakdown() == {
        "attention_projections": 3 * token * attention,
        "attention_core": 3 * 2 * 2 * 32 * (12 * 13 // 2),
        "mlp": token * 3 * 32 * 100,
        **{name: 2 * value for name, value in layer.items()},
        "output_layer": token * 32 * 56,
        "mtp": token * (attention + 2 * 32 * 32 + 32 * 56) + 2 * 2 * 32 * (12 * 13 // 2) + sum(layer.values()),
    }
    assert flops.mtp.mtp_projection == token * 2 * 32 * 32
    assert "mtp" not in count(MOE).breakdown()
    assert flops.recomputed == ForwardFlops()


def test_parallel_sizes_change_nothing() -> None:
    split = TransformerConfig(**DENSE, tensor_model_parallel_size=2, context_parallel_size=2)
    assert model_flops(split, seq_length=SEQUENCE, vocab_size=VOCABULARY) == count(DENSE)


# ------------------------------------------------------- published figures

GPT3 = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96}


@pytest.mark.parametrize(("layers", "hidden", "sequence"), [(24, 2304, 2048), (96, 12288, 2048), (128, 25600, 2048)])
def test_formula_of_the_megatron_paper(layers: int, hidden: int, sequence: int) -> None:
    """F = 96 B s l h^2 (1 + s / 6h + V / 16 l h) with full recompute (arXiv:2104.04473, section 5.1 and appendix)."""
    vocabulary = 51200
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 1}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    flops = count(shape | recompute, seq_length=sequence, vocab_size=vocabulary)
    expected = 96 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    assert flops.training_hardware_full_attention == pytest.approx(expected, rel=1e-14)


def test_days_of_gpt3_in_the_megatron_paper() -> None:
    """300 billion tokens on 1024 GPUs at 140 teraFLOP/s with recompute: 34 days (arXiv:2104.04473, section 5.1)."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    flops = count(GPT3 | recompute, seq_length=2048, vocab_size=51200)
    seconds = flops.training_hardware_full_attention / 2048 * 300e9 / (1024 * 140e12)
    assert seconds / 86400 == pytest.approx(34, abs=0.8)


def test_gpt3_in_its_own_paper() -> None:
    """3.14e23 FLOPs for 300 billion tokens, from 6 per parameter and token (arXiv:2005.14165, table D.1)."""
    flops = count(GPT3, seq_length=2048, vocab_size=50257)
    assert flops.per_token.training * 300e9 == pytest.approx(3.14e23, rel=0.02)
    matrices = 96 * 12 * 12288**2 + 12288 * 50257
    attention = 3 * flops.main.attention_core / 2048
    assert flops.per_token.training == 6 * matrices + attention


def test_llama_405b() -> None:
    """3.8e25 FLOPs for 15.6 trillion tokens (arXiv:2407.21783, sections 1 and 3.2; sizes of table 3)."""
    shape = {"num_layers": 126, "hidden_size": 16384, "ffn_hidden_size": 53248, "num_attention_heads": 128}
    flops = count(shape | {"num_query_groups": 8, "gated_linear_unit": True}, seq_length=8192, vocab_size=128256)
    assert flops.per_token.training * 15.6e12 == pytest.approx(3.8e25, rel=0.05)
    assert (flops.forward - flops.main.attention_core) / 8192 / 2 == pytest.approx(405e9, rel=0.01)


def test_deepseek_v3() -> None:
    """37 billion activated parameters, each one multiply-add per token (arXiv:2412.19437, sections 1 and 4.2)."""
    flops = count(
        {
            "num_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "multi_latent_attention": True,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_head_dim": 128,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
            "gated_linear_unit": True,
            "ffn_hidden_size": 18432,
            "num_moe_experts": 256,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 2048,
            "moe_shared_expert_intermediate_size": 2048,
            "moe_layer_freq": [0] * 3 + [1] * 58,
            "mtp_num_layers": 1,
        },
        seq_length=4096,
        vocab_size=129280,
    )
    main = flops.main
    assert (main.total - main.attention_core) / 4096 / 2 == pytest.approx(37e9, rel=0.015)


# ---------------------------------------------------------------- recompute

FULL = {"recompute_granularity": "full", "recompute_method": "block"}
SPLITS: list[dict[str, Any]] = [
    {"pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
    {
        "pipeline_model_parallel_size": 4,
        "num_layers_in_first_pipeline_stage": 1,
        "num_layers_in_last_pipeline_stage": 3,
    },
    {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 4},
    {
        "pipeline_model_parallel_size": 7,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 7,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|ttttt|tt|tttL"},
]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split.values())))
@pytest.mark.parametrize("length", [1, 2, 9])
def test_block_recompute_takes_the_first_layers_of_each_chunk(split: dict[str, Any], length: int) -> None:
    """With an expert layer wherever it matters which layers are taken. Megatron Core itself says how it splits."""
    config = TransformerConfig(
        num_layers=12,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=40,
        num_moe_experts=6,
        moe_ffn_hidden_size=56,
        moe_layer_freq=[1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0],
        add_bias_linear=False,
        pipeline_dtype="float32",
        recompute_num_layers=length,
        **FULL,
        **split,
    )
    expected, start = {True: 0, False: 0}, 0
    chunks = split.get("virtual_pipeline_model_parallel_size", 1)
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        chunks = 2
    for chunk in range(chunks):
        for rank in range(config.pipeline_model_parallel_size):
            if layout is not None:
                size = sum(kind.name == "decoder" for kind in layout.layout[rank][chunk])
            else:
                size = get_num_layers_to_build(config, vp_stage=chunk if chunks > 1 else None, pp_rank=rank)
            for index in range(start, start + min(size, length)):
                expected[bool(config.moe_layer_freq[index])] += 1
            start += size
    assert start == 12
    flops = model_flops(config, seq_length=SEQUENCE, vocab_size=VOCABULARY)
    assert flops.recomputed.mlp == 2 * SEQUENCE * 2 * 32 * 40 * expected[False]
    assert flops.recomputed.router == 2 * SEQUENCE * 32 * 6 * expected[True]
    assert flops.recomputed.attention_core * 12 == flops.main.attention_core * sum(expected.values())
    assert flops.recomputed.output_layer == 0


def test_a_layout_must_have_been_parsed() -> None:
    values = DENSE | FULL | {"recompute_num_layers": 1, "pipeline_model_parallel_size": 2}
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_layout='Ett\|tL' must be as TransformerConfig"):
        count(values, pipeline_model_parallel_layout="Ett|tL")
    parsed = PipelineParallelLayerLayout("Ett|tL", 2)
    assert count(values, pipeline_model_parallel_layout=parsed).recomputed.mlp * 3 == count(DENSE).main.mlp * 2


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("experimental_attention_variant", "dsa"),
        ("experimental_attention_variant", "gated_delta_net"),
        ("is_hybrid_model", True),
        ("hybrid_layer_pattern", "M*M-"),
        ("mtp_hybrid_override_pattern", "M*"),
        ("heterogeneous_block_specs", True),
        ("moe_token_dropping", True),
        ("moe_expert_capacity_factor", 1.25),
        ("moe_expert_rank_capacity_factor", 1.0),
        ("cache_mla_latents", True),
    ],
)
def test_what_is_unknown_has_no_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"no FLOPs are known for {name}={value!r}".replace("*", r"\*")):
        count(MOE, **{name: value})
    if isinstance(value, float):
        assert count(MOE, **{name: -1.0}) == count(MOE)  # Megatron's other way to say none


def test_new_fields_of_megatron_core_are_looked_at() -> None:
    """A new field may change the model. Look at each, refuse or count what does, and then change these numbers."""
    assert len(fields(TransformerConfig)) == 306
    assert len(fields(MLATransformerConfig)) == 322


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": None}, "num_layers must be an integer of at least 1, got None"),
        ({"num_layers": 0}, "num_layers must be an integer of at least 1, got 0"),
        ({"hidden_size": 32.0}, "hidden_size must be an integer of at least 1, got 32.0"),
        ({"mtp_num_layers": -1}, "mtp_num_layers must be an integer of at least 1, got -1"),
        ({"multi_latent_attention": True}, "qk_pos_emb_head_dim must be an integer of at least 1, got None"),
        ({"num_moe_experts": 0}, "num_moe_experts must be an integer of at least 1, got 0"),
        ({"num_moe_experts": 2, "moe_router_topk": 3}, "moe_router_topk=3 must be at most num_moe_experts=2"),
        ({"num_moe_experts": 2, "moe_layer_freq": [1, 0]}, r"moe_layer_freq=\[1, 0\] must have num_layers=3 entries"),
        ({"num_moe_experts": 2, "moe_layer_freq": [1, 0, 2]}, r"moe_layer_freq=\[1, 0, 2\] .* each 0 or 1"),
        ({"num_moe_experts": 2, "moe_layer_freq": 0}, "moe_layer_freq must be an integer of at least 1, got 0"),
        ({"window_size": (3,)}, r"window_size=\(3,\) must be two integers"),
        ({"window_size": (-2, 0)}, r"window_size=\(-2, 0\) must be two integers"),
        ({"window_size": (3, 0), "window_attn_skip_freq": [1, 0]}, "has none for layer 3"),
        ({"window_size": (3, 0), "window_attn_skip_freq": 0}, "window_attn_skip_freq must be an integer"),
        ({"recompute_granularity": "some"}, "recompute_granularity='some' must be None, 'full' or 'selective'"),
        ({"recompute_granularity": "full", "recompute_num_layers": 1}, "recompute_method=None must be 'uniform'"),
        ({**FULL}, "recompute_num_layers must be an integer of at least 1, got None"),
        ({**FULL, "recompute_num_layers": 1, "pipeline_model_parallel_size": 2}, "num_layers=3 can't be split"),
        (
            {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2, "mtp_num_layers": 1},
            "recompute_num_layers=2 must be 1 with mtp_num_layers=1",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "routed_experts"]},
            r"recompute_modules=\['mlp', 'routed_experts'\]: what \['routed_experts'\] repeats isn't known",
        ),
    ],
)
def test_wrong_configurations(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count(DENSE | values)


def test_wrong_lengths() -> None:
    with pytest.raises(ValueError, match="seq_length must be an integer of at least 1, got 0"):
        count(DENSE, seq_length=0)
    with pytest.raises(ValueError, match="vocab_size must be an integer of at least 1, got -5"):
        count(DENSE, vocab_size=-5)
    with pytest.raises(ValueError, match="vocab_size must be an integer of at least 1, got 0"):
        count(DENSE).with_vocab_size(0)
    with pytest.raises(ValueError, match=r"document_lengths\[1\] must be an integer of at least 1, got 0"):
        count(DENSE, document_lengths=[3, 0])
    with pytest.raises(ValueError, match=r"document_lengths=\[7, 6\] add up to 13, more than seq_length=12"):
        count(DENSE, document_lengths=[7, 6])
    with pytest.raises(ValueError, match=r"=\[2, 2, 2, 2, 2, 2, 2, 2\] and 12 more add up to 40, more than"):
        count(DENSE, document_lengths=[2] * 20)


def test_the_module_needs_neither_torch_nor_megatron() -> None:
    code = "import sys, lt_parallel.metrics.flops; print({'torch', 'megatron', 'lightning'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "set()"
