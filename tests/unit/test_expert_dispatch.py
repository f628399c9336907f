"""What `ExpertDispatch` sets, and what it refuses: alone, beside the rest of a run, and without its library."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import fused_a2a
from torch.utils.data import DataLoader

from lt_parallel import ExpertDispatch
from lt_parallel.models import GPTModule
from lt_parallel.option_rules import check_rules
from lt_parallel.plugins import dispatch_libraries
from lt_parallel.settings import Settings
from lt_parallel.strategies import MegatronParallelStrategy
from lt_parallel.topology import ParallelSizes
from tests.unit.test_strategy_settings import (
    TINY,
    _no_process_may_start,  # noqa: F401  (a fixture)
    fit_error,
    make_trainer,
    resolved,
)

MOE = {"add_bias_linear": False, "moe": {"num_moe_experts": 4, "moe_router_dtype": "fp32"}}
EP2 = {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BF16 = {"precision": "bf16-mixed"}
FIELDS = (
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "moe_flex_dispatcher_num_sms",
    "moe_permute_fusion",
)


def with_experts(**fields: Any) -> dict[str, Any]:
    return {**MOE, "moe": {**MOE["moe"], **fields}}  # type: ignore[dict-item]


def dispatch(settings: Settings) -> tuple[Any, ...]:
    return tuple(settings.get("model", name) for name in FIELDS)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron Core has found all of them."""
    for name in ("HAVE_DEEP_EP", "HAVE_HYBRIDEP", "HAVE_TE_EP"):
        monkeypatch.setattr(fused_a2a, name, True)


def test_arguments_become_fields(libraries: None) -> None:
    assert dispatch(resolved(2, EP2, MOE)) == (None,) * 4
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    of_megatron = tuple(defaults[name] for name in FIELDS)
    assert dispatch(resolved(2, EP2, MOE, callbacks=[ExpertDispatch()])) == of_megatron
    alltoall = resolved(2, EP2, MOE, callbacks=[ExpertDispatch("alltoall")])
    assert dispatch(alltoall) == ("alltoall", "deepep", None, False)
    flex = [ExpertDispatch("flex", "hybridep", num_sms=16)]
    assert dispatch(resolved(2, EP2, MOE, callbacks=flex, **BF16)) == ("flex", "hybridep", 16, False)
    capacity = {"config_overrides": {"moe_expert_rank_capacity_factor": 2.0}}
    nccl = [ExpertDispatch("flex", "ncclep", num_sms=3)]
    assert dispatch(resolved(2, {**EP2, **capacity}, MOE, callbacks=nccl)) == ("flex", "ncclep", 3, False)


def test_every_field_is_megatron_s(libraries: None) -> None:
    settings = resolved(2, EP2, MOE, callbacks=[ExpertDispatch("flex")], **BF16)
    ours = {name for _, name, contribution in settings if contribution.owner == "ExpertDispatch"}
    assert set(FIELDS) < ours <= {field.name for field in dataclasses.fields(TransformerConfig)}


@pytest.mark.parametrize("strategy", [TP2, {**TP2, **EP2}, EP2])
def test_flex_needs_one_of_two_sizes(strategy: dict[str, Any], libraries: None) -> None:
    assert resolved(4, strategy, MOE, callbacks=[ExpertDispatch("flex")], **BF16).sizes.world_size == 4


def test_a_model_without_experts_may_still_name_a_dispatcher() -> None:
    """Megatron Core refuses variable lengths with "allgather", its default, in a dense model too."""
    overrides = {"moe_token_dispatcher_type": "alltoall", "variable_seq_lengths": True}
    assert resolved(1, {"config_overrides": overrides}).get("model", "variable_seq_lengths") is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dispatcher": "all2all"}, ["dispatcher='all2all' is not one of allgather, alltoall, flex"]),
        ({"dispatcher": "flex", "backend": "deep_ep"}, ["backend='deep_ep' is not one of deepep, hybridep, ncclep"]),
        ({"dispatcher": "alltoall", "backend": "ncclep"}, ["backend='ncclep'", "'alltoall'", "dispatcher='flex'"]),
        ({"backend": "hybridep"}, ["backend='hybridep'", "dispatcher='allgather'", "leave backend out"]),
        ({"num_sms": 20}, ["num_sms=20", "dispatcher='allgather'", "dispatcher='flex'", "leave num_sms out"]),
        ({"dispatcher": "flex", "num_sms": 21}, ["num_sms=21 must be even", "'deepep'", "22"]),
        ({"dispatcher": "flex", "num_sms": 0}, ["num_sms must be an integer of at least 1, got 0"]),
        ({"dispatcher": "flex", "backend": "hybridep", "permute_fusion": True}, ["permute_fusion=True", "'hybridep'"]),
        ({"permute_fusion": "yes"}, ["permute_fusion='yes' must be True or False"]),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        ExpertDispatch(**arguments)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


#: name: (strategy, model, the callback's arguments or None, options of the Trainer, what the message must say)
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None, dict[str, Any], list[str]]] = {
    "no experts": (
        {},
        {},
        {"dispatcher": "alltoall"},
        {},
        ["ExpertDispatch(dispatcher='alltoall')", "GPTModule(moe=...)", "leave it out"],
    ),
    "fusion without TransformerEngine": (
        EP2,
        MOE,
        {"permute_fusion": True},
        {},
        ["permute_fusion=True", "layer_backend='transformer_engine'", "layer_backend='torch'", "permute_fusion=False"],
    ),
    "variable lengths": (
        {**EP2, "config_overrides": {"variable_seq_lengths": True}},
        MOE,
        {},
        {},
        ["variable_seq_lengths=True", "ExpertDispatch('allgather')", "use ExpertDispatch('alltoall')"],
    ),
    "shared experts beside the default": (
        {**EP2, "config_overrides": {"moe_shared_expert_overlap": True}},
        with_experts(moe_shared_expert_intermediate_size=64),
        None,
        {},
        ["moe_shared_expert_overlap=True", "the default", "use ExpertDispatch('alltoall')"],
    ),
    "one rank": (
        {},
        MOE,
        {"dispatcher": "flex"},
        BF16,
        ["backend='deepep'", "expert_tensor_parallel_size=1 x expert_model_parallel_size=1 is 1", "=2", "'alltoall'"],
    ),
    "one rank and NCCL": (
        {**TP2, "expert_tensor_parallel_size": 1},
        MOE,
        {"dispatcher": "flex", "backend": "ncclep"},
        BF16,
        ["backend='ncclep'", "expert_tensor_parallel_size=1 x expert_model_parallel_size=1 is 1"],
    ),
    "padding": (
        EP2,
        with_experts(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
        {"dispatcher": "flex"},
        BF16,
        ["backend='deepep'", "moe_pad_expert_input_to_capacity=True", "'hybridep'", "ExpertDispatch('alltoall')"],
    ),
    "NCCL's buffer": (
        TP2,
        MOE,
        {"dispatcher": "flex", "backend": "ncclep"},
        BF16,
        ["'moe_expert_rank_capacity_factor'", "expert_model_parallel_size = 2 is always enough"],
    ),
    "rounded weights": (
        EP2,
        with_experts(moe_router_dtype=None),
        {"dispatcher": "flex"},
        BF16,
        ["backend='deepep'", "moe_router_dtype=None", "bf16", "moe_router_dtype='fp32'"],
    ),
    "fp32": (
        EP2,
        MOE,
        {"dispatcher": "flex"},
        {},
        ["backend='deepep'", "bf16 only", "params_dtype=torch.float32", "precision='bf16-mixed'"],
    ),
    "fp32 and HybridEP": (EP2, MOE, {"dispatcher": "flex", "backend": "hybridep"}, {}, ["'hybridep'", "bf16 only"]),
    "two owners": (
        {**EP2, "config_overrides": {"moe_token_dispatcher_type": "allgather"}},
        MOE,
        {"dispatcher": "alltoall"},
        {},
        ["moe_token_dispatcher_type='allgather' is already set by ExpertDispatch (to 'alltoall')"],
    ),
    "an earlier name": (
        {**EP2, "config_overrides": {"moe_enable_deepep": True}},
        MOE,
        {"dispatcher": "alltoall"},
        {},
        ["moe_enable_deepep=True is already set by ExpertDispatch", "set it there instead"],
    ),
    "an earlier number": (
        {**EP2, "config_overrides": {"moe_deepep_num_sms": 24}},
        MOE,
        {"dispatcher": "flex", "num_sms": 20},
        {},
        ["moe_deepep_num_sms=24 is already set by ExpertDispatch"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_combination_is_one_error_before_the_library_is_missed(case: str) -> None:
    strategy, model, arguments, options, words = BAD[case]
    callbacks = [] if arguments is None else [ExpertDispatch(**arguments)]
    message = fit_error(2, strategy, model, callbacks=callbacks, **options)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


def test_hybridep_may_have_one_rank(libraries: None) -> None:
    """Megatron Core asserts more than one for the two others."""
    assert resolved(1, {}, MOE, callbacks=[ExpertDispatch("flex", "hybridep")], **BF16).sizes.world_size == 1


def test_fusion_with_transformer_engine() -> None:
    settings = Settings(ParallelSizes(world_size=2, expert_model_parallel_size=2))
    settings.contribute("MegatronParallelStrategy", "model", transformer_impl="transformer_engine")
    settings.contribute("GPTModule(moe=...)", "model", num_moe_experts=4)
    ExpertDispatch("alltoall", permute_fusion=True).contribute(settings)
    check_rules(settings)


# ---------------------------------------------------------------- libraries


def library_error(backend: str) -> str:
    overrides = {"config_overrides": {"moe_expert_rank_capacity_factor": 2.0}} if backend == "ncclep" else {}
    trainer = make_trainer(
        MegatronParallelStrategy(**EP2, **overrides), 2, callbacks=[ExpertDispatch("flex", backend)], **BF16
    )
    with pytest.raises(ImportError) as caught:
        trainer.fit(GPTModule(**{**TINY, **MOE}), DataLoader(torch.zeros(8, 2), batch_size=2))
    assert not torch.distributed.is_initialized()
    assert str(caught.value).endswith(
        "or use ExpertDispatch('alltoall'), which needs no library and gives the same numbers"
    )
    return str(caught.value)


def test_flex_by_an_override_needs_it_too() -> None:
    trainer = make_trainer(
        MegatronParallelStrategy(**EP2, config_overrides={"moe_token_dispatcher_type": "flex"}), 2, **BF16
    )
    with pytest.raises(ImportError, match="needs DeepEP"):
        trainer.fit(GPTModule(**{**TINY, **MOE}), DataLoader(torch.zeros(8, 2), batch_size=2))


def asked_on_cuda(monkeypatch: pytest.MonkeyPatch, deep_ep: bool) -> None:
    monkeypatch.setattr(dispatch_libraries, "device_type", lambda: "cuda")
    find = importlib.util.find_spec
    found = SimpleNamespace(name="deep_ep") if deep_ep else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "deep_ep" else find(name))


@pytest.mark.parametrize("backend", ["deepep", "hybridep", "ncclep"])
def test_on_a_cpu_there_is_nothing_to_install(backend: str) -> None:
    message = library_error(backend)
    assert f"ExpertDispatch('flex', backend={backend!r}) needs" in message and "this run is on the CPU" in message
    assert "git clone" not in message and "build" not in message


@pytest.mark.parametrize(("backend", "library"), [("deepep", "DeepEP,"), ("hybridep", "DeepEP's HybridEP,")])
def test_what_to_install(backend: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_on_cuda(monkeypatch, deep_ep=False)
    message = library_error(backend)
    assert f"needs {library} which isn't installed" in message
    assert "git clone --branch hybrid-ep https://github.com/deepseek-ai/DeepEP && pip install " in message
    assert "PyPI's deep-ep can't be built" in message and "install deep-ep" not in message


@pytest.mark.parametrize(("backend", "name"), [("deepep", "EventOverlap"), ("hybridep", "HybridEPBuffer")])
def test_the_second_version_is_no_use(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_on_cuda(monkeypatch, deep_ep=True)
    message = library_error(backend)
    assert "deep_ep is installed" in message and name in message and "second version" in message
    assert "Uninstall it and build it" in message and "--branch hybrid-ep" in message


def test_what_nccl_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_on_cuda(monkeypatch, deep_ep=True)
    message = library_error("ncclep")
    assert "NVTE_BUILD_WITH_NCCL_EP=1" in message and "deep_ep" not in message


def test_megatron_s_findings_have_these_names() -> None:
    for finding, _, _ in dispatch_libraries._BACKENDS.values():
        assert getattr(fused_a2a, finding) is False
    assert isinstance(ExpertDispatch(), L.Callback)
