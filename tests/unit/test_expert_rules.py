"""Mixtures of experts and multi-latent attention: what their arguments refuse, and what they refuse together."""

from __future__ import annotations

from typing import Any

import pytest

from lt_parallel.models import GPTModule, MixtureOfExperts, MultiLatentAttention
from tests.unit.test_strategy_settings import (
    TP2,
    _no_process_may_start,  # noqa: F401  (a fixture)
    fit_error,
    resolved,
)

MODEL = {"add_bias_linear": False, "position_embedding_type": "rope"}
MOE = {**MODEL, "moe": {"num_moe_experts": 4}}
MLA = {**MODEL, "mla": {"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}}
SP2 = {**TP2, "sequence_parallel": True}


def moe(**arguments: Any) -> dict[str, Any]:
    return {**MODEL, "moe": {"num_moe_experts": 4, **arguments}}


def mla(**arguments: Any) -> dict[str, Any]:
    return {**MODEL, "mla": {**MLA["mla"], **arguments}}  # type: ignore[dict-item]


#: name: (devices, strategy, model, what the message must say: the values, the rule, a way out)
BAD: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[str]]] = {
    "ep of a dense model": (
        2,
        {"expert_model_parallel_size": 2},
        {},
        ["expert_model_parallel_size=2", "moe=", "use 1"],
    ),
    "ep of fewer experts": (
        8,
        {"expert_model_parallel_size": 8},
        MOE,
        ["num_moe_experts=4", "divisible by expert_model_parallel_size=8"],
    ),
    "tp without sp": (2, TP2, MOE, ["num_moe_experts=4", "tensor_model_parallel_size=2", "sequence_parallel=True"]),
    "width of an expert": (
        2,
        {**SP2, "expert_tensor_parallel_size": 2},
        moe(moe_ffn_hidden_size=33),
        ["moe_ffn_hidden_size=33", "divisible by expert_tensor_parallel_size=2"],
    ),
    "width of the shared expert": (
        2,
        SP2,
        moe(moe_shared_expert_intermediate_size=33),
        ["moe_shared_expert_intermediate_size=33", "divisible by tensor_model_parallel_size=2"],
    ),
    "ep and etp of too few ranks": (
        2,
        {**SP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        MOE,
        ["expert_model_parallel_size=2", "expert_tensor_parallel_size=2"],
    ),
    "layers with experts": (
        1,
        {},
        moe(moe_layer_freq=[0, 1, 1]),
        ["moe_layer_freq=[0, 1, 1] has 3 entries", "num_layers=4"],
    ),
    "biases": (1, {}, {**moe(), "add_bias_linear": True}, ["experts have no biases", "add_bias_linear=False"]),
    "latent attention without sp": (
        2,
        TP2,
        MLA,
        ["tensor_model_parallel_size=2 needs sequence_parallel=True", "or tensor_model_parallel_size=1"],
    ),
    "latent attention cut unevenly": (
        2,
        SP2,
        mla(q_lora_rank=33),
        ["q_lora_rank=33", "divisible by tensor_model_parallel_size=2"],
    ),
    "latent keys cut unevenly": (
        2,
        SP2,
        mla(kv_lora_rank=33),
        ["kv_lora_rank + qk_pos_emb_head_dim=41", "divisible by tensor_model_parallel_size=2"],
    ),
    "latent attention with norms of what isn't there": (
        1,
        {},
        {**MLA, "qk_layernorm": True},
        ["qk_layernorm=True", "q_lora_rank=None", "TransformerEngine only"],
    ),
    "latent attention and groups": (
        1,
        {},
        {**MLA, "num_query_groups": 2},
        ["each head its own keys", "num_query_groups=2"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_combination_is_one_error(case: str) -> None:
    devices, strategy, model, words = BAD[case]
    message = fit_error(devices, strategy, model)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_moe_experts": 0}, "num_moe_experts must be an integer of at least 1, got 0"),
        ({"moe_router_topk": 5}, "moe_router_topk=5 must be at most num_moe_experts=4"),
        ({"moe_router_topk": 0}, "moe_router_topk must be an integer of at least 1, got 0"),
        ({"moe_ffn_hidden_size": -1}, "moe_ffn_hidden_size must be an integer of at least 1, got -1"),
        ({"moe_router_score_function": "tanh"}, "moe_router_score_function='tanh' is not one of softmax, sigmoid"),
        ({"moe_router_dtype": "bf16"}, "moe_router_dtype='bf16' is not one of fp32, fp64"),
        ({"moe_token_drop_policy": "random"}, "moe_token_drop_policy='random' is not one of probs, position"),
        ({"moe_z_loss_coeff": 0}, "moe_z_loss_coeff=0 must be a positive number"),
        ({"moe_z_loss_coeff": "1"}, "moe_z_loss_coeff='1' must be a positive number"),
        ({"moe_router_bias_update_rate": -1}, "moe_router_bias_update_rate=-1 must be a number that isn't negative"),
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor=0.0 must be a positive number"),
        ({"moe_pad_expert_input_to_capacity": True}, "needs moe_expert_capacity_factor.*got None; usual: 1.25"),
        (
            {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 2.5},
            "at most num_moe_experts / moe_router_topk = 2 .*got 2.5",
        ),
        ({"moe_layer_freq": 0}, "moe_layer_freq must be an integer of at least 1, got 0"),
        ({"moe_layer_freq": [0, 0, 0, 0]}, "moe_layer_freq=.0, 0, 0, 0. must have 1 .experts. or 0 .dense."),
        ({"moe_layer_freq": [0, 2]}, "must have 1 .experts. or 0 .dense."),
        (
            {"moe_router_load_balancing_type": "switch"},
            "moe_router_load_balancing_type='switch' is not one of none, aux_loss, seq_aux_loss, global_aux_loss",
        ),
        (
            {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
            "moe_router_load_balancing_type='none' has no loss, so moe_aux_loss_coeff=0.1 means nothing",
        ),
        (
            {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": 0.1},
            "must be one each, or lists of the same length",
        ),
        (
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": -0.1},
            "moe_aux_loss_coeff=-0.1 must be a number that isn't negative",
        ),
        (
            {"moe_router_load_balancing_type": "sinkhorn", "moe_expert_capacity_factor": 1.0},
            "moe_expert_capacity_factor=1.0 can't be combined with moe_router_load_balancing_type='sinkhorn'",
        ),
        ({"moe_router_enable_expert_bias": True}, "needs moe_router_score_function='sigmoid', not 'softmax'"),
        ({"moe_router_num_groups": 2}, "moe_router_num_groups=2 and moe_router_group_topk=None belong together"),
        (
            {"moe_router_num_groups": 3, "moe_router_group_topk": 1},
            "moe_router_num_groups=3 must divide num_moe_experts=4",
        ),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 1},
            "leave at least as many experts .here 1.",
        ),
    ],
)
def test_arguments_of_experts_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureOfExperts(**{"num_moe_experts": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank must be an integer of at least 1, got 0"),
        ({"q_lora_rank": -1}, "q_lora_rank must be an integer of at least 1, got -1"),
        ({"qk_pos_emb_head_dim": 7}, "qk_pos_emb_head_dim=7 must be even"),
        ({"rope_type": "ntk"}, "rope_type='ntk' is not one of rope, yarn"),
    ],
)
def test_arguments_of_latent_attention_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiLatentAttention(**arguments)


def test_latent_attention_needs_rotary_positions() -> None:
    with pytest.raises(ValueError, match="mla needs position_embedding_type='rope', not 'learned_absolute'"):
        GPTModule(64, 16, mla=MultiLatentAttention())


def test_what_was_given_is_kept_as_plain_values_and_taken_back() -> None:
    given = GPTModule(64, 16, **MODEL, moe=MixtureOfExperts(num_moe_experts=8), mla=MultiLatentAttention(v_head_dim=4))
    assert type(given.hparams["moe"]) is type(given.hparams["mla"]) is dict
    again = GPTModule(**given.hparams)
    assert (again.moe, again.mla) == (given.moe, given.mla)


def test_experts_are_as_wide_as_the_dense_layers_unless_said() -> None:
    assert resolved(1, {}, {**moe(), "ffn_hidden_size": 48}).get("model", "moe_ffn_hidden_size") == 48
    assert resolved(1, {}, moe(moe_ffn_hidden_size=24)).get("model", "moe_ffn_hidden_size") == 24
