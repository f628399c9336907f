"""`ActivationRecompute` and the overlap of experts' communication: what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from lt_parallel import ActivationRecompute, CommunicationOverlap, ExpertDispatch
from tests.unit.test_strategy_settings import (
    PP2,
    _no_process_may_start,  # noqa: F401  (a fixture)
    fit_error,
    resolved,
)

MODEL = {"add_bias_linear": False, "position_embedding_type": "rope"}
MOE = {**MODEL, "moe": {"num_moe_experts": 4}}
EP2 = {"expert_model_parallel_size": 2, "num_microbatches": 2}


def overlapped(dispatcher: Any = "alltoall", *more: Any) -> list[Any]:
    return [ExpertDispatch(dispatcher), CommunicationOverlap(moe_expert_parallel_comm=True), *more]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"granularity": "some"}, "granularity='some' is not one of selective, full"),
        ({"granularity": "full"}, "granularity='full' needs method='uniform' or 'block' and num_layers.*num_layers=1"),
        ({"granularity": "full", "method": "uniform"}, "has method='uniform' and num_layers=None"),
        ({"granularity": "full", "method": "all", "num_layers": 1}, "has method='all' and num_layers=1"),
        ({"granularity": "full", "method": "block", "num_layers": 0}, "num_layers must be an integer of at least 1"),
        (
            {"granularity": "full", "method": "block", "num_layers": 1, "modules": ["mlp"]},
            "modules=.'mlp'. belongs to granularity='selective'",
        ),
        ({"num_layers": 1}, "method=None and num_layers=1 belong to granularity='full'"),
        ({"method": "block"}, "method='block' and num_layers=None belong to granularity='full'"),
        (
            {"modules": []},
            "must be some of core_attn, mlp, moe, moe_act, shared_experts, layernorm, mla_up_proj, routed",
        ),
        ({"modules": ["mlp", "mlp"]}, "each once"),
        ({"modules": ["core_atn"]}, "a2a_overlap_mlp, each once; 'core_atn' is none of them"),
        ({"modules": ["moe", "moe_act"]}, "'moe' recomputes 'moe_act' too; name one of them"),
        ({"modules": ["routed_experts", "a2a_overlap_mlp"]}, "'a2a_overlap_mlp' recomputes 'routed_experts' too"),
        ({"modules": ["core_attn", "a2a_overlap_attn"]}, "'a2a_overlap_attn' recomputes 'core_attn' too"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationRecompute(**arguments)


def test_what_goes_to_megatron_core_and_what_to_our_layers() -> None:
    both = ActivationRecompute(modules=["core_attn", "routed_experts"])
    settings = resolved(1, {}, MOE, callbacks=[both])
    assert settings.get("model", "recompute_granularity") == "selective"
    assert settings.get("model", "recompute_modules") == ["core_attn"]
    assert settings.get("layers", "recompute_modules") == ("routed_experts",)
    settings = resolved(1, {}, MOE, callbacks=[ActivationRecompute(modules="routed_experts")])
    assert settings.get("model", "recompute_granularity") is None
    settings = resolved(1, {}, callbacks=[ActivationRecompute("full", method="uniform", num_layers=2)])
    found = {name: settings.get("model", f"recompute_{name}") for name in ("granularity", "method", "num_layers")}
    assert found == {"granularity": "full", "method": "uniform", "num_layers": 2}
    assert resolved(1, {}, callbacks=[ActivationRecompute()]).get("model", "recompute_modules") == ["core_attn"]


#: name: (devices, strategy, model, options, what the message must say)
BAD: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "experts of a dense model": (
        1,
        {},
        MODEL,
        {"callbacks": [ActivationRecompute(modules=["routed_experts"])]},
        ["modules=['routed_experts']", "needs GPTModule(moe=...)"],
    ),
    "moe of a dense model": (
        1,
        {},
        MODEL,
        {"callbacks": [ActivationRecompute(modules=["moe"])]},
        ["GPTModule(moe=...)"],
    ),
    "shared experts that aren't there": (
        1,
        {},
        MOE,
        {"callbacks": [ActivationRecompute(modules=["shared_experts"])]},
        ["moe_shared_expert_intermediate_size"],
    ),
    "latent attention that isn't there": (
        1,
        {},
        MOE,
        {"callbacks": [ActivationRecompute(modules=["mla_up_proj"])]},
        ["needs GPTModule(mla=...)"],
    ),
    "moe_act of sequential experts": (
        1,
        {},
        {**MODEL, "moe": {"num_moe_experts": 4, "moe_grouped_gemm": False}},
        {"callbacks": [ActivationRecompute(modules=["moe_act"])]},
        ["moe_grouped_gemm=True", "modules=['routed_experts']"],
    ),
    "mlp with biases": (
        1,
        {},
        {},
        {"callbacks": [ActivationRecompute(modules=["mlp"])]},
        ["add_bias_linear=True", "never ends", "granularity='full'"],
    ),
    "inside an overlap that isn't there": (
        1,
        {},
        MOE,
        {"callbacks": [ActivationRecompute(modules=["a2a_overlap_attn"])]},
        ["modules=['a2a_overlap_attn']", "needs CommunicationOverlap(moe_expert_parallel_comm=True)"],
    ),
    "overlap without ep": (
        2,
        {},
        MOE,
        {"callbacks": overlapped(), "precision": "bf16-mixed"},
        ["needs expert_model_parallel_size > 1", "has expert_model_parallel_size=1"],
    ),
    "overlap with allgather": (
        2,
        EP2,
        MOE,
        {"callbacks": overlapped("allgather"), "precision": "bf16-mixed"},
        ["needs ExpertDispatch('alltoall') or ('flex')", "has ExpertDispatch('allgather')"],
    ),
    "overlap in fp32": (
        2,
        EP2,
        MOE,
        {"callbacks": overlapped()},
        ["Trainer(precision='bf16-mixed')", "params_dtype=torch.float32"],
    ),
    "overlap in a pipeline without virtual stages": (
        4,
        {**EP2, **PP2},
        MOE,
        {"callbacks": overlapped(), "precision": "bf16-mixed"},
        ["virtual_pipeline_model_parallel_size > 1", "pipeline_model_parallel_size=2 without"],
    ),
    "overlap and full recompute": (
        2,
        EP2,
        MOE,
        {
            "callbacks": overlapped("alltoall", ActivationRecompute("full", method="block", num_layers=1)),
            "precision": "bf16-mixed",
        },
        ["needs granularity='selective'", "has ActivationRecompute(granularity='full')"],
    ),
    "overlap and moe recompute": (
        2,
        EP2,
        MOE,
        {"callbacks": overlapped("alltoall", ActivationRecompute(modules=["moe"])), "precision": "bf16-mixed"},
        ["needs modules=['a2a_overlap_mlp']", "has ActivationRecompute(modules=['moe'])"],
    ),
    "overlap and overlapped shared experts": (
        2,
        {**EP2, "config_overrides": {"moe_shared_expert_overlap": True}},
        MOE,
        {"callbacks": overlapped(), "precision": "bf16-mixed"},
        ["needs moe_shared_expert_overlap=False"],
    ),
    "overlap and two heads": (
        2,
        EP2,
        {**MOE, "mtp_num_layers": 2},
        {"callbacks": overlapped(), "precision": "bf16-mixed"},
        ["needs at most 1 head", "has mtp_num_layers=2"],
    ),
    "overlap and a dense last layer": (
        2,
        EP2,
        {**MODEL, "moe": {"num_moe_experts": 4, "moe_layer_freq": [1, 1, 1, 0]}},
        {"callbacks": overlapped(), "precision": "bf16-mixed"},
        ["experts in the last layer", "moe_layer_freq=[1, 1, 1, 0]"],
    ),
    "overlap and every other layer": (
        2,
        EP2,
        {**MODEL, "moe": {"num_moe_experts": 4, "moe_layer_freq": 2}},
        {"callbacks": overlapped(), "precision": "bf16-mixed"},
        ["experts in the last layer", "moe_layer_freq=2"],
    ),
    "delayed weight gradients on torch's layers": (
        2,
        EP2,
        MOE,
        {
            "callbacks": [
                ExpertDispatch("alltoall"),
                CommunicationOverlap(moe_expert_parallel_comm=True, delay_wgrad_compute=True),
            ],
            "precision": "bf16-mixed",
        },
        ["delay_wgrad_compute=True", "layer_backend='transformer_engine'", "layer_backend='torch'"],
    ),
    "delayed weight gradients without the overlap": (
        1,
        {},
        MOE,
        {"callbacks": [CommunicationOverlap(delay_wgrad_compute=True)]},
        ["needs moe_expert_parallel_comm=True", "has moe_expert_parallel_comm=False"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_combination_is_one_error(case: str) -> None:
    devices, strategy, model, options, words = BAD[case]
    message = fit_error(devices, strategy, model, **options)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


def test_overlap_is_off_unless_asked_for() -> None:
    assert not resolved(2, EP2, MOE, callbacks=[CommunicationOverlap("auto")]).get(
        "model", "overlap_moe_expert_parallel_comm"
    )
