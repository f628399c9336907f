"""What `CommunicationOverlap` sets, chooses and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from lt_parallel.callbacks.overlap import CommunicationOverlap
from tests.unit.test_strategy_settings import CP2, PP2, TP2, VPP2, fit_error, resolved

OPTIM = {"data_parallel_sharding_strategy": "optim"}


def fields(devices: int, strategy: dict[str, Any], **overlap: Any) -> dict[str, Any]:
    settings = resolved(devices, strategy, callbacks=[CommunicationOverlap(**overlap)])
    names = ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size")
    found = {name: settings.get("ddp", name) for name in names}
    found |= {name: settings.get("model", name) for name in ("overlap_p2p_comm", "batch_p2p_comm", "tp_comm_overlap")}
    assert settings.get("optimizer", "overlap_param_gather") == found["overlap_param_gather"]
    return {name: value for name, value in found.items() if value is not None}


P2P_OFF, P2P_ON = (
    {"overlap_p2p_comm": False, "batch_p2p_comm": True},
    {"overlap_p2p_comm": True, "batch_p2p_comm": False},
)


def test_nothing_is_overlapped_by_itself_but_interleaved_p2p() -> None:
    assert fields(2, {}) == P2P_OFF
    assert fields(2, VPP2) == P2P_ON


def test_arguments_become_fields() -> None:
    given = {"grad_reduce": True, "param_gather": True, "bucket_size": 100, "align_param_gather": True}
    assert fields(2, OPTIM, **given) == P2P_OFF | {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 100,
        "align_param_gather": True,
    }


def chosen(devices: int, strategy: dict[str, Any], **overlap: Any) -> dict[str, bool]:
    callback = CommunicationOverlap(preset="auto", **overlap)
    resolved(devices, strategy, callbacks=[callback])
    assert all(why for _, why in callback.choices.values())
    return {name: value for name, (value, _) in callback.choices.items() if value}


def test_auto_follows_the_layout() -> None:
    assert chosen(2, TP2) == {}
    assert chosen(2, {}) == {"grad_reduce": True}
    assert chosen(2, CP2) == {"grad_reduce": True}
    assert chosen(2, OPTIM) == {"grad_reduce": True, "param_gather": True}
    assert chosen(4, {**OPTIM, **VPP2}) == dict.fromkeys(
        ("grad_reduce", "param_gather", "p2p", "align_param_gather"), True
    )
    assert chosen(2, OPTIM, param_gather=False, align_param_gather=False) == {"grad_reduce": True}


@pytest.mark.parametrize(
    ("devices", "strategy", "overlap", "parts"),
    [
        (2, {}, {"param_gather": True, "grad_reduce": True}, ["param_gather=True", "'optim'", "not sharded"]),
        (2, OPTIM, {"param_gather": True}, ["grad_reduce=True (it is False)"]),
        (2, OPTIM, {"align_param_gather": True, "grad_reduce": True}, ["align_param_gather=True", "param_gather=True"]),
        (2, {}, {"bucket_size": 10}, ["bucket_size=10", "grad_reduce=True"]),
        (2, PP2, {"p2p": True}, ["p2p=True", "virtual_pipeline_model_parallel_size"]),
        (2, VPP2, {"p2p": False}, ["p2p=False", "pipeline_model_parallel_size=2", "wrong gradients"]),
        (2, {**TP2, "sequence_parallel": True}, {"tp_comm": True}, ["tp_comm=True", "layer_backend='torch'"]),
        (2, {"config_overrides": {"overlap_grad_reduce": True}}, {"grad_reduce": False}, ["CommunicationOverlap"]),
    ],
)
def test_what_cannot_be_overlapped(
    devices: int, strategy: dict[str, Any], overlap: dict[str, Any], parts: list[str]
) -> None:
    message = fit_error(devices, strategy, callbacks=[CommunicationOverlap(**overlap)])
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("arguments", [{"preset": "all"}, {"grad_reduce": "yes"}, {"bucket_size": 0}])
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=name):
        CommunicationOverlap(**arguments)
