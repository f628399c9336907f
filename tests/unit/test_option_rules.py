"""Rules that tie options together: the ways round them, and the cases that the other tests leave out."""

from __future__ import annotations

from typing import Any

import pytest

from lt_parallel.callbacks.overlap import CommunicationOverlap
from tests.unit.test_strategy_settings import (
    CP2,
    PP2,
    TP2,
    VPP2,
    Contributing,
    _no_process_may_start,  # noqa: F401  (a fixture)
    fit_error,
    resolved,
)

CP4 = {"context_parallel_size": 4}
LAYOUT = {**PP2, "pipeline_model_parallel_layout": "Et|t|t|tL"}  # interleaved, without a virtual size
HCP = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [4, 2]}

#: name: (devices, strategy, model, what the message must say: the values, the rule, a way out)
BAD: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[str]]] = {
    "sp of a part of the sequence": (
        8,
        {**CP2, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        {"seq_length": 36},
        [
            "seq_length=36 / context_parallel_size=2",
            "18",
            "tensor_model_parallel_size (sequence_parallel=True)",
            "16 or",
        ],
    ),
    "a2a in one layer": (
        8,
        {"context_parallel_size": 8, "cp_comm_type": ["p2p", "p2p", "a2a", "p2p"]},
        {},
        ["cp_comm_type='a2a'", "num_attention_heads=4 / tensor_model_parallel_size=1 = 4", "divisible by 8"],
    ),
    "a2a among neighbours": (
        8,
        {"context_parallel_size": 8, **HCP},
        {"num_query_groups": 2},
        ["cp_comm_type='a2a+p2p'", "4 context-parallel ranks", "num_query_groups=2", "divisible by 4", "'p2p'"],
    ),
    "a2a of the heads that tp leaves": (
        8,
        {**CP4, **TP2, "cp_comm_type": "a2a"},
        {},
        ["num_attention_heads=4 / tensor_model_parallel_size=2 = 2", "divisible by 4"],
    ),
    "three levels": (
        4,
        {**CP4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2, 1]},
        {},
        ["[2, 2, 1] must be two sizes", "context_parallel_size=4", "[2, 2]"],
    ),
    "a level of nothing": (
        4,
        {**CP4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [0, 4]},
        {},
        ["hierarchical_context_parallel_sizes must be an integer of at least 1, got 0"],
    ),
    "cp_comm_type in a list": (
        2,
        {**CP2, "cp_comm_type": ["p2p", "ring", "p2p", "p2p"]},
        {},
        ["cp_comm_type='ring'", "p2p, all_gather, a2a, a2a+p2p"],
    ),
    "a window and cp": (
        2,
        {**CP2, "config_overrides": {"window_size": (4, 0)}},
        {},
        ["window_size=(4, 0) with context_parallel_size=2", "set context_parallel_size=1"],
    ),
    "layers per virtual stage and a layout": (
        2,
        {**LAYOUT, "num_layers_per_virtual_pipeline_stage": 1},
        {},
        ["num_layers_per_virtual_pipeline_stage=1", "pipeline_model_parallel_layout='Et|t|t|tL'", "give one of them"],
    ),
    "a layout and a virtual size": (
        2,
        {**LAYOUT, "virtual_pipeline_model_parallel_size": 3},
        {},
        ["4 stages", "virtual_pipeline_model_parallel_size=3 (= 6)", "[0] Et"],
    ),
    "batched messages by an override": (
        2,
        {**VPP2, "config_overrides": {"batch_p2p_comm": True}},
        {},
        ["batch_p2p_comm=True is already set by MegatronParallelStrategy (to False)"],
    ),
    "no overlap by an override": (
        2,
        {**LAYOUT, "config_overrides": {"overlap_p2p_comm": False}},
        {},
        ["overlap_p2p_comm=False is already set by MegatronParallelStrategy (to True)"],
    ),
    "parameter gather by an override": (
        2,
        {"config_overrides": {"overlap_param_gather": True}},
        {},
        ["param_gather=True", "grad_reduce=True (it is False)", "data_parallel_sharding_strategy='optim'"],
    ),
    "tensor parallel overlap by an override": (
        2,
        {**TP2, "config_overrides": {"tp_comm_overlap": True}},
        {},
        ["tp_comm=True", "layer_backend='torch'", "sequence_parallel=False", "set tp_comm=False"],
    ),
    "label smoothing": (
        2,
        {"config_overrides": {"label_smoothing": 0.1}},
        {},
        ["'label_smoothing' is no field of Megatron Core's configs"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_combination_is_one_error(case: str) -> None:
    devices, strategy, model, words = BAD[case]
    message = fit_error(devices, strategy, model)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize("strategy", [VPP2, LAYOUT])
def test_interleaved_pairs_never_get_batched_messages_whoever_asks(strategy: dict[str, Any]) -> None:
    callbacks = [
        CommunicationOverlap(p2p=False),
        Contributing("Other()", overlap_p2p_comm=False, batch_p2p_comm=True),
    ]
    for callback in callbacks:
        message = fit_error(2, strategy, callbacks=[callback])
        assert "pipeline_model_parallel_size=2 and 2 virtual stages" in message and "wrong gradients" in message
    assert resolved(4, {**strategy, "num_microbatches": 2}).get("model", "overlap_p2p_comm") is True
    four = {**strategy, "pipeline_model_parallel_size": 4, "num_microbatches": 4}
    four = {name: value for name, value in four.items() if name != "pipeline_model_parallel_layout"}
    four["virtual_pipeline_model_parallel_size"] = 2
    settings = resolved(4, four, {"num_layers": 8}, callbacks=[CommunicationOverlap(p2p=False)])
    assert settings.get("model", "batch_p2p_comm") is True  # with more ranks each has two neighbours


def test_the_spelling_allgather_is_megatron_s() -> None:
    assert resolved(2, {**CP2, "cp_comm_type": "allgather"}).get("model", "cp_comm_type") == "all_gather"
    kinds = ["allgather", "p2p", "a2a", "p2p"]
    assert resolved(2, {**CP2, "cp_comm_type": kinds}).get("model", "cp_comm_type") == ["all_gather", *kinds[1:]]
