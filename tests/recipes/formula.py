"""Parameters of a recipe's model by its dimensions: what the stages that are built must add up to."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tests.recipes.contents import arguments

BYTES = 257  # vocabulary of TextDataModule without a tokenizer
MATRICES = 3  # of a gated MLP


class Counts(NamedTuple):
    """Numbers of parameters.

    Attributes:
        main: Of the model without multi-token prediction heads.
        heads: Of these, without the embedding and the output layer, which are the model's.
        routed: Of `main`, in experts that tokens are sent to.
    """

    main: int
    heads: int
    routed: int


def dimensions(recipe: str) -> dict[str, Any]:
    """The model's arguments, with what follows from others filled in."""
    given = arguments(recipe, "model")
    hidden, heads = given["hidden_size"], given["num_attention_heads"]
    given.setdefault("ffn_hidden_size", 64 * math.ceil(8 * hidden / 3 / 64) if given.get("swiglu") else 4 * hidden)
    given.setdefault("num_query_groups", heads)
    given.setdefault("kv_channels", hidden // heads)
    return {**given, "vocab_size": arguments(recipe, "data").get("vocab_size", BYTES)}


def counts(recipe: str) -> Counts:
    """By formula; the output layer has no bias."""
    of = dimensions(recipe)
    hidden, layers = of["hidden_size"], of["num_layers"]
    norm = hidden if of.get("normalization") == "RMSNorm" else 2 * hidden
    vocabulary = of["vocab_size"] * hidden * (2 if of.get("untie_embeddings_and_output_weights") else 1)
    positions = 0 if of.get("position_embedding_type") == "rope" else of["seq_length"] * hidden
    with_experts = _layers_with_experts(of)
    routed, beside = _experts(of) if "moe" in of else (0, 0)
    dense = _attention(of) + 2 * norm
    main = layers * dense + with_experts * (routed + beside) + (layers - with_experts) * _mlp(of)
    head = 3 * norm + 2 * hidden * hidden + dense + (routed + beside if "moe" in of else _mlp(of))
    return Counts(main + norm + vocabulary + positions, (of.get("mtp_num_layers") or 0) * head, with_experts * routed)


def _layers_with_experts(of: dict[str, Any]) -> int:
    if "moe" not in of:
        return 0
    frequency = of["moe"].get("moe_layer_freq", 1)
    return sum(frequency) if isinstance(frequency, list) else math.ceil(of["num_layers"] / frequency)


def _attention(of: dict[str, Any]) -> int:
    hidden, heads = of["hidden_size"], of["num_attention_heads"]
    if "mla" in of:
        return _latent_attention(hidden, heads, **of["mla"])
    queries, keys = heads * of["kv_channels"], of["num_query_groups"] * of["kv_channels"]
    biases = queries + 2 * keys + hidden if of.get("add_bias_linear", True) else 0
    norms = 2 * of["kv_channels"] if of.get("qk_layernorm") else 0
    return hidden * (queries + 2 * keys) + queries * hidden + biases + norms


def _latent_attention(
    hidden: int,
    heads: int,
    kv_lora_rank: int,
    q_lora_rank: int,
    qk_head_dim: int,
    qk_pos_emb_head_dim: int,
    v_head_dim: int,
) -> int:
    """DeepSeek-V2, arXiv:2405.04434, appendix C, with a norm on each small vector."""
    queries = hidden * q_lora_rank + q_lora_rank * heads * (qk_head_dim + qk_pos_emb_head_dim)
    keys = hidden * (kv_lora_rank + qk_pos_emb_head_dim) + kv_lora_rank * heads * (qk_head_dim + v_head_dim)
    return queries + keys + heads * v_head_dim * hidden + q_lora_rank + kv_lora_rank


def _mlp(of: dict[str, Any]) -> int:
    hidden, ffn = of["hidden_size"], of["ffn_hidden_size"]
    fc1 = 2 * ffn if of.get("swiglu") else ffn
    return hidden * fc1 + ffn * hidden + (fc1 + hidden if of.get("add_bias_linear", True) else 0)


def _experts(of: dict[str, Any]) -> tuple[int, int]:
    """(all experts of a layer that tokens are sent to, its router and the experts that every token visits)."""
    hidden, moe = of["hidden_size"], of["moe"]
    experts = moe["num_moe_experts"]
    routed = experts * MATRICES * hidden * moe.get("moe_ffn_hidden_size", of["ffn_hidden_size"])
    shared = MATRICES * hidden * moe.get("moe_shared_expert_intermediate_size", 0)
    return routed, hidden * experts + shared
