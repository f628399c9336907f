"""Wrong configuration is one clear error before any process starts or any process group exists.

Each case goes through the public door, `Trainer(...)` and `trainer.fit(...)`, with a process count that Lightning would
launch itself. Starting a process is made an error, so a check that comes too late fails its test.
"""

from __future__ import annotations

import re
import subprocess
from typing import Any

import lightning.pytorch as L
import megatron.core  # noqa: F401  (it runs git when it is imported; below no process may start)
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from lt_parallel.plugins.precision import MegatronPrecision
from lt_parallel.settings import Settings
from lt_parallel.strategies import MegatronParallelStrategy
from lt_parallel.topology import ParallelSizes

TINY = {"vocab_size": 100, "seq_length": 32, "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}


class PlainModule(L.LightningModule):
    """A module with no chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def _no_process_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError(f"a process would start: {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def make_trainer(strategy: MegatronParallelStrategy, devices: int, **options: Any) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=1, **quiet, **options)


def fit_error(
    devices: int,
    strategy: dict[str, Any],
    model: dict[str, Any] | L.LightningModule | None = None,
    **options: Any,
) -> str:
    """What `fit` says; anything but a ValueError fails the test."""
    with pytest.raises(ValueError) as caught:
        trainer = make_trainer(MegatronParallelStrategy(**strategy), devices, **options)
        module = model if isinstance(model, L.LightningModule) else GPTModule(**{**TINY, **(model or {})})
        trainer.fit(module, DataLoader(torch.zeros(8, 2), batch_size=2))
    assert not torch.distributed.is_initialized()
    return str(caught.value)


def resolved(devices: int, strategy: dict[str, Any], model: dict[str, Any] | None = None, **options: Any) -> Settings:
    """The merged settings of a run that is right."""
    trainer = make_trainer(MegatronParallelStrategy(**strategy), devices, **options)
    module = GPTModule(**{**TINY, **(model or {})})
    trainer.strategy.connect(module)
    return trainer.strategy.resolve_settings(trainer)


TP2, TP4, CP2, PP2 = (
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 4},
    {"context_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
)
SP4 = {**TP4, "sequence_parallel": True}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}

#: name: (devices, strategy, model, what the message must say: the values, the rule, a way out)
BAD: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[str]]] = {
    "tp doesn't divide the world": (
        3,
        TP2,
        {},
        ["world_size=3", "must be divisible by", "tensor_model_parallel_size=2", "nearest valid: world_size=2 or 4"],
    ),
    "tp x pp doesn't divide the world": (6, {**TP2, **PP2}, {}, ["world_size=6", "(= 4)", "world_size=4 or 8"]),
    "size zero": (2, {"tensor_model_parallel_size": 0}, {}, ["tensor_model_parallel_size", "at least 1", "0"]),
    "virtual stages without a pipeline": (
        2,
        {"virtual_pipeline_model_parallel_size": 2},
        {},
        [
            "virtual_pipeline_model_parallel_size=2",
            "pipeline_model_parallel_size > 1",
            "pipeline_model_parallel_size=2",
        ],
    ),
    "heads": (
        4,
        TP4,
        {"hidden_size": 96, "num_attention_heads": 6},
        ["num_attention_heads=6", "divisible by", "tensor_model_parallel_size=4", "4 or 8"],
    ),
    "kv groups and tp": (
        4,
        TP4,
        {"num_query_groups": 2},
        ["num_query_groups=2", "divisible by", "tensor_model_parallel_size=4", "4"],
    ),
    "kv groups and heads": (
        2,
        TP2,
        {"num_query_groups": 3},
        ["num_attention_heads=4", "divisible by", "num_query_groups=3", "3 or 6"],
    ),
    "width and heads": (2, TP2, {"hidden_size": 66}, ["hidden_size=66", "num_attention_heads=4", "64 or 68"]),
    "feed-forward width": (
        4,
        TP4,
        {"ffn_hidden_size": 130},
        ["ffn_hidden_size=130", "divisible by", "tensor_model_parallel_size=4", "128 or 132"],
    ),
    "layers and pp": (
        2,
        PP2,
        {"num_layers": 5},
        ["num_layers=5", "pipeline_model_parallel_size=2", "4 or 6", "pipeline_model_parallel_layout"],
    ),
    "layers and virtual stages": (2, VPP2, {"num_layers": 6}, ["num_layers=6", "(= 4)", "4 or 8"]),
    "sequence length and sp": (
        4,
        SP4,
        {"seq_length": 30},
        ["seq_length=30", "divisible by", "tensor_model_parallel_size", "sequence_parallel=True", "28 or 32"],
    ),
    "padded vocabulary": (
        2,
        TP2,
        {"vocab_size": 101, "make_vocab_size_divisible_by": 1},
        ["101", "tensor_model_parallel_size=2", "divisible_by"],
    ),
    "sp without tp": (
        2,
        {"sequence_parallel": True},
        {},
        ["sequence_parallel=True", "tensor_model_parallel_size > 1", "tensor_model_parallel_size=1", "=2"],
    ),
    "sharding strategy": (
        2,
        {"data_parallel_sharding_strategy": "optm"},
        {},
        ["data_parallel_sharding_strategy='optm'", "no_shard", "optim"],
    ),
    "fully sharded over a pipeline": (
        2,
        {**PP2, "data_parallel_sharding_strategy": "optim_grads"},
        {},
        ["'optim_grads'", "pipeline_model_parallel_size=2", "use 'optim'"],
    ),
    "both batch counts": (
        2,
        {"num_microbatches": 2, "global_batch_size": 8},
        {},
        ["num_microbatches=2", "global_batch_size=8", "give one of them"],
    ),
    "no micro batches": (2, {"num_microbatches": 0}, {}, ["num_microbatches=0", "positive integer"]),
    "global batch and dp": (
        4,
        {"global_batch_size": 10},
        {},
        ["global_batch_size=10", "divisible by", "data-parallel size 4", "8 or 12"],
    ),
    "micro batches and virtual stages": (
        2,
        {**VPP2, "num_microbatches": 3},
        {},
        ["num_microbatches=3", "pipeline_model_parallel_size=2", "virtual stages", "2 or 4"],
    ),
    "layers per virtual stage": (
        2,
        {**PP2, "num_layers_per_virtual_pipeline_stage": 3},
        {},
        ["num_layers=4", "num_layers_per_virtual_pipeline_stage=3", "(= 6)"],
    ),
    "two ways of virtual stages": (
        2,
        {**VPP2, "num_layers_per_virtual_pipeline_stage": 1},
        {},
        ["num_layers_per_virtual_pipeline_stage=1", "virtual_pipeline_model_parallel_size=2", "give one of them"],
    ),
    "sequence and cp": (2, CP2, {"seq_length": 30}, ["seq_length=30", "2 x context_parallel_size=2", "28 or 32"]),
    "cp_comm_type": (2, {**CP2, "cp_comm_type": "ring"}, {}, ["cp_comm_type='ring'", "p2p, all_gather, a2a, a2a+p2p"]),
    "cp_comm_type per layer": (
        2,
        {**CP2, "cp_comm_type": ["p2p", "a2a"]},
        {},
        ["['p2p', 'a2a'] has 2 entries", "num_layers=4"],
    ),
    "a2a and heads": (
        8,
        {"context_parallel_size": 8, "cp_comm_type": "a2a"},
        {},
        ["cp_comm_type='a2a'", "num_attention_heads=4 / tensor_model_parallel_size=1 = 4", "divisible by 8", "'p2p'"],
    ),
    "a2a and kv groups": (
        4,
        {"context_parallel_size": 4, "cp_comm_type": "a2a"},
        {"num_query_groups": 2},
        ["num_query_groups=2 / tensor_model_parallel_size=1 = 2", "divisible by 4"],
    ),
    "a2a+p2p without sizes": (
        4,
        {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"},
        {},
        ["cp_comm_type='a2a+p2p'", "hierarchical_context_parallel_sizes=None", "[2, 2]"],
    ),
    "hierarchical sizes without a2a+p2p": (
        4,
        {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
        {},
        ["cp_comm_type='p2p'", "hierarchical_context_parallel_sizes=[2, 2]"],
    ),
    "hierarchical product": (
        4,
        {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 4]},
        {},
        ["[2, 4] must be two sizes whose product is context_parallel_size=4", "[2, 2]"],
    ),
    "dropout and cp": (
        2,
        CP2,
        {"attention_dropout": 0.1},
        ["attention_dropout=0.1 with context_parallel_size=2", "switch it off"],
    ),
    "layout: symbol": (2, {**PP2, "pipeline_model_parallel_layout": "Ett|txL"}, {}, ["Ett|txL", "'x'", "valid:"]),
    "layout: open group": (2, {**PP2, "pipeline_model_parallel_layout": "E(tt|ttL"}, {}, ["'(' without ')'"]),
    "layout: closed group": (2, {**PP2, "pipeline_model_parallel_layout": "Ett)|ttL"}, {}, ["')'", "'('"]),
    "layout: layer count": (
        2,
        {**PP2, "pipeline_model_parallel_layout": "Ett|tL"},
        {},
        ["num_layers=4", "3", "Stages:"],
    ),
    "layout: no embedding": (2, {**PP2, "pipeline_model_parallel_layout": "tt|ttL"}, {}, ["E", "Stages:"]),
    "layout: no loss": (2, {**PP2, "pipeline_model_parallel_layout": "Ett|tt"}, {}, ["L", "Stages:"]),
    "layout: stages": (
        2,
        {**PP2, "pipeline_model_parallel_layout": "Et|tt|tL"},
        {},
        ["3 stages", "pipeline_model_parallel_size=2"],
    ),
    "override: unknown": (
        2,
        {"config_overrides": {"moe_router_topkk": 2}},
        {},
        ["config_overrides", "'moe_router_topkk'", "did you mean moe_router_topk"],
    ),
    "override: owned by the strategy": (
        2,
        {"config_overrides": {"sequence_parallel": True}},
        {},
        ["config_overrides", "sequence_parallel=True", "MegatronParallelStrategy", "set it there"],
    ),
    "override: owned by the module": (
        2,
        {"config_overrides": {"hidden_size": 128}},
        {},
        ["config_overrides", "hidden_size=128", "GPTModule", "(to 64)"],
    ),
    "override: owned by the precision": (
        2,
        {"config_overrides": {"grad_reduce_in_fp32": True}},
        {},
        ["config_overrides", "grad_reduce_in_fp32=True", "precision='32-true'"],
    ),
    "override: of another type": (
        2,
        {"config_overrides": {"attention_softmax_in_fp32": "maybe"}},
        {},
        ["attention_softmax_in_fp32='maybe'", "must be bool, not str"],
    ),
    "override: no such member": (
        2,
        {"config_overrides": {"attention_backend": "flush"}},
        {},
        ["attention_backend='flush'", "flash or fused or unfused or local or auto"],
    ),
    "override: no names": (2, {"config_overrides": [1]}, {}, ["config_overrides=[1]", "must be a dictionary"]),
    "fp8 without TransformerEngine": (
        2,
        {"config_overrides": {"fp8": "e4m3"}},
        {},
        ["fp8='e4m3'", "layer_backend='transformer_engine'", "remove fp8"],
    ),
    "timeout: text": (2, {"timeout_minutes": "5"}, {}, ["timeout_minutes='5'", "positive number"]),
    "timeout: endless": (2, {"timeout_minutes": float("inf")}, {}, ["timeout_minutes=inf", "positive number"]),
    "layer backend": (
        2,
        {"layer_backend": "tensorrt"},
        {},
        ["layer_backend", "'tensorrt'", "torch", "transformer_engine"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_configuration_is_one_error_before_anything_starts(case: str) -> None:
    devices, strategy, model, words = BAD[case]
    message = fit_error(devices, strategy, model)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


def test_a_misspelt_argument_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="tensor_model_parallel"):
        MegatronParallelStrategy(tensor_model_parallel=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="num_layer"):
        GPTModule(100, num_layer=2)  # type: ignore[call-arg]


def test_sizes_that_do_not_fit_fail_when_the_trainer_is_made() -> None:
    with pytest.raises(ValueError, match="world_size=3"):
        make_trainer(MegatronParallelStrategy(tensor_model_parallel_size=2), 3)


# ---------------------------------------------------------------- what Lightning offers and Megatron Core can't do


class ManualModule(GPTModule):
    """Wants to call backward itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False


class ClippingModule(GPTModule):
    """Wants to clip by itself."""

    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        """Never called by Megatron Core's step."""


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (GPTModule, {"accumulate_grad_batches": 2}, ["accumulate_grad_batches=2", "num_microbatches=2"]),
        (ManualModule, {}, ["ManualModule.automatic_optimization=False", "num_microbatches"]),
        (
            GPTModule,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            ["gradient_clip_algorithm='value'", "norm"],
        ),
        (ClippingModule, {}, ["ClippingModule overrides configure_gradient_clipping", "gradient_clip_val"]),
    ],
)
def test_lightning_options_without_a_counterpart(module: Any, options: dict[str, Any], words: list[str]) -> None:
    message = fit_error(2, {}, module(**TINY), **options)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("strategy", [TP2, PP2, {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}])
def test_a_plain_module_cannot_be_cut(strategy: dict[str, int]) -> None:
    (name,) = strategy
    message = fit_error(2, strategy, PlainModule())
    assert "PlainModule is a plain LightningModule" in message and f"{name}=2; set them to 1" in message


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_every_entry_point_checks(name: str) -> None:
    trainer = make_trainer(MegatronParallelStrategy(**TP2), 2)
    with pytest.raises(ValueError, match="ffn_hidden_size=131"):
        getattr(trainer, name)(GPTModule(**TINY, ffn_hidden_size=131), DataLoader(torch.zeros(8, 2)))


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ("given", "name", "dtype"),
    [
        (None, "32-true", torch.float32),
        (32, "32-true", torch.float32),
        ("32-true", "32-true", torch.float32),
        ("bf16-mixed", "bf16-mixed", torch.bfloat16),
        ("bf16-true", "bf16-true", torch.bfloat16),
        ("bf16", "bf16-mixed", torch.bfloat16),
    ],
)
def test_trainer_precision_alone_is_enough(given: Any, name: str, dtype: torch.dtype) -> None:
    trainer = make_trainer(MegatronParallelStrategy(), 1, precision=given)
    plugin = trainer.strategy.precision_plugin
    assert isinstance(plugin, MegatronPrecision)
    assert (plugin.precision, plugin.params_dtype, trainer.precision) == (name, dtype, name)


@pytest.mark.parametrize("given", ["16-true", "64-true"])
def test_an_unsupported_precision_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=f"not '{given}'"):
        make_trainer(MegatronParallelStrategy(), 1, precision=given)


def test_our_refusal_of_a_precision_names_those_that_work() -> None:
    with pytest.raises(ValueError, match="supports precision 32-true, bf16-mixed, bf16-true, not '64-true'"):
        make_trainer(MegatronParallelStrategy(), 1, precision="64-true")
    with pytest.raises(ValueError, match="precision='fp8' is not one of 32-true, bf16-mixed, bf16-true"):
        MegatronPrecision("fp8")  # type: ignore[arg-type]


def test_a_precision_plugin_is_used_as_it_is() -> None:
    plugin = MegatronPrecision("bf16-true")
    trainer = make_trainer(MegatronParallelStrategy(), 1, plugins=[plugin])
    assert trainer.strategy.precision_plugin is plugin
    assert trainer.precision == "bf16-true"


@pytest.mark.parametrize("plugin", [MegatronPrecision("bf16-true"), MixedPrecision("bf16-mixed", "cpu")])
def test_precision_and_a_precision_plugin_conflict(plugin: Any) -> None:
    with pytest.raises(ValueError, match="precision"):
        make_trainer(MegatronParallelStrategy(), 1, precision="bf16-true", plugins=[plugin])


@pytest.mark.parametrize(
    ("name", "dtype", "fp32_reduce"),
    [
        ("32-true", torch.float32, False),
        ("bf16-mixed", torch.bfloat16, True),
        ("bf16-true", torch.bfloat16, False),
    ],
)
def test_precision_reaches_all_three_configs(name: str, dtype: torch.dtype, fp32_reduce: bool) -> None:
    settings = resolved(1, {}, precision=name)
    half = dtype is torch.bfloat16
    assert settings.get("model", "params_dtype") is settings.get("model", "pipeline_dtype") is dtype
    assert settings.get("model", "bf16") is settings.get("optimizer", "bf16") is half
    assert settings.get("ddp", "grad_reduce_in_fp32") is fp32_reduce
    assert settings.owner("model", "params_dtype") == f"precision={name!r}"


# ---------------------------------------------------------------- callbacks that contribute


class Contributing(L.Callback):
    """Sets one field, as the package's own callbacks do."""

    def __init__(self, owner: str, **fields: Any) -> None:
        self.owner, self.fields = owner, fields

    def contribute(self, settings: Settings) -> None:
        """Adds the fields."""
        settings.contribute(self.owner, "model", **self.fields)


def test_two_callbacks_that_disagree_are_both_named() -> None:
    callbacks = [
        Contributing("Recompute(granularity='full')", recompute_granularity="full"),
        Contributing("Offload(modules=[...])", recompute_granularity="selective"),
    ]
    message = fit_error(2, {}, callbacks=callbacks)
    for part in ("Recompute(granularity='full') sets recompute_granularity='full'", "Offload(modules=[...]) sets"):
        assert part in message
    assert "remove one of the two" in message


def test_a_callback_that_disagrees_with_the_strategy_is_named() -> None:
    message = fit_error(2, TP2, callbacks=[Contributing("Recompute()", tensor_model_parallel_size=1)])
    assert "Recompute() sets tensor_model_parallel_size=1" in message
    assert "MegatronParallelStrategy sets tensor_model_parallel_size=2" in message


def test_contributions_and_overrides_reach_the_settings() -> None:
    callbacks = [
        Contributing("One()", recompute_modules=["core_attn"]),
        Contributing("Two()", recompute_modules=["core_attn"]),
    ]
    strategy = {**TP2, "config_overrides": {"softmax_scale": 0.5, "bucket_size": 1000, "log_num_zeros_in_grad": True}}
    settings = resolved(2, strategy, callbacks=callbacks)
    assert settings.get("model", "recompute_modules") == ["core_attn"]
    assert settings.get("model", "softmax_scale") == 0.5
    assert settings.get("ddp", "bucket_size") == 1000
    assert settings.get("optimizer", "log_num_zeros_in_grad") is True
    assert settings.owner("ddp", "bucket_size") == "config_overrides"
    assert settings.get("model", "bucket_size") is None


def test_an_override_names_an_enum_member_and_may_be_a_whole_number() -> None:
    overrides = {"attention_backend": "unfused", "softmax_scale": 1}
    settings = resolved(2, {**TP2, "config_overrides": overrides})
    assert settings.get("model", "attention_backend") is AttnBackend.unfused
    assert settings.get("model", "softmax_scale") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"swiglu": "no"}, "swiglu='no' must be True or False"),
        ({"layernorm_epsilon": -1.0}, "layernorm_epsilon=-1.0 must be a number that isn't negative"),
        ({"lr": "fast"}, "lr='fast' must be a number"),
        ({"top_k": 1.5}, "top_k=1.5 must be an integer"),
        ({"kv_channels": 15, "position_embedding_type": "rope"}, "15 channels per head x rotary_percent=1.0 = 15"),
        ({"rotary_percent": 0.01, "position_embedding_type": "rope"}, "which must be even and at least 2"),
        ({"rotary_base": 0, "position_embedding_type": "rope"}, "rotary_base=0 must be positive"),
    ],
)
def test_a_model_argument_that_cannot_work_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        GPTModule(**{**TINY, **arguments})


@pytest.mark.parametrize(
    ("devices", "strategy", "model", "dp", "virtual"),
    [
        (8, SP4, {}, 2, None),
        (4, {**VPP2, "num_microbatches": 4}, {}, 2, 2),
        (2, {**PP2, "pipeline_model_parallel_layout": "Et|tt|t|L"}, {}, 1, 2),
        (2, {**PP2, "pipeline_model_parallel_layout": "Ettt|ttL"}, {"num_layers": 5}, 1, None),
        (4, {**TP4, "global_batch_size": 7}, {}, 1, None),
    ],
)
def test_a_right_configuration_passes(
    devices: int, strategy: dict[str, Any], model: dict[str, Any], dp: int, virtual: int | None
) -> None:
    sizes = resolved(devices, strategy, model).sizes
    assert sizes.data_parallel_size == dp
    assert sizes.virtual_pipeline_model_parallel_size == virtual


@pytest.mark.parametrize("virtual", [None, 2])
def test_interleaved_stages_never_use_batched_messages(virtual: int | None) -> None:
    strategy = {**PP2, "virtual_pipeline_model_parallel_size": virtual, "num_microbatches": 2}
    settings = resolved(2, strategy)
    assert settings.get("model", "batch_p2p_comm") is (virtual is None)
    assert settings.get("model", "overlap_p2p_comm") is (virtual is not None)


# ---------------------------------------------------------------- Settings by itself


def test_a_field_has_one_owner_and_equal_values_are_no_conflict() -> None:
    settings = Settings(ParallelSizes(world_size=1))
    settings.contribute("A()", "model", hidden_size=8)
    settings.contribute("B()", "model", hidden_size=8)
    settings.contribute("B()", "model", hidden_size=16)  # an owner may change its own mind
    with pytest.raises(ValueError, match=re.escape("B() sets hidden_size=16 but C() sets hidden_size=32")):
        settings.contribute("C()", "model", hidden_size=32)
    settings.contribute("C()", "ddp", hidden_size=32)  # another config's field of the same name
    assert settings.fields("model") == {"hidden_size": 16}
    assert [(target, name, each.owner) for target, name, each in settings] == [
        ("model", "hidden_size", "B()"),
        ("ddp", "hidden_size", "C()"),
    ]
    assert settings.get("optimizer", "hidden_size") is settings.owner("optimizer", "hidden_size") is None
    assert settings.get("optimizer", "hidden_size", 5) == 5


def test_an_override_reaches_every_config_that_has_the_field() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    classes: Any = {
        "model": TransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }
    settings = Settings(ParallelSizes(world_size=1))
    settings.override({"timers": None, "bucket_size": 7}, classes)
    assert settings.fields("model") == settings.fields("optimizer") == {"timers": None}
    assert settings.fields("ddp") == {"bucket_size": 7}
    settings.contribute("Precision", "optimizer", bf16=True)
    # bf16 is the model's field too, where nobody owns it: refused all the same, and nothing is half applied.
    with pytest.raises(ValueError, match=re.escape("bf16=False is already set by Precision (to True)")):
        settings.override({"bf16": False}, classes)
    assert settings.get("model", "bf16") is None
    with pytest.raises(ValueError, match=r"'qwertzuiop' is no field of Megatron Core's configs$"):
        settings.override({"qwertzuiop": 1}, classes)


# ---------------------------------------------------------------- GPTModule's own arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_position_embeddings": 16}, ["max_position_embeddings=16", "seq_length=32"]),
        ({"lr_warmup_iters": 10, "lr_decay_iters": 10}, ["lr_warmup_iters=10", "less than lr_decay_iters=10"]),
        ({"lr": 1e-4, "min_lr": 1e-3}, ["min_lr=0.001", "lr=0.0001"]),
        ({"min_lr": -1.0}, ["min_lr=-1.0", "between 0"]),
        ({"vocab_size": 0}, ["vocab_size", "at least 1", "0"]),
        ({"seq_length": 0}, ["seq_length", "at least 1", "0"]),
        ({"num_layers": 0}, ["num_layers", "at least 1", "0"]),
        ({"hidden_size": -64}, ["hidden_size", "at least 1", "-64"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "at least 1"]),
        ({"num_query_groups": 0}, ["num_query_groups", "at least 1"]),
        ({"ffn_hidden_size": 0}, ["ffn_hidden_size", "at least 1"]),
        ({"normalization": "BatchNorm"}, ["normalization='BatchNorm'", "LayerNorm", "RMSNorm"]),
        ({"position_embedding_type": "alibi"}, ["position_embedding_type='alibi'", "learned_absolute", "rope"]),
        ({"lr_decay_style": "cosin"}, ["lr_decay_style='cosin'", "cosine", "linear"]),
        ({"hidden_dropout": 1.5}, ["hidden_dropout=1.5", "0", "1"]),
        ({"attention_dropout": -0.1}, ["attention_dropout=-0.1", "0", "1"]),
        ({"rotary_percent": 0.0}, ["rotary_percent=0.0"]),
        ({"temperature": -1.0}, ["temperature=-1.0", "negative"]),
        ({"max_new_tokens": 0}, ["max_new_tokens", "at least 1"]),
    ],
)
def test_gpt_module_refuses_arguments_by_name(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        GPTModule(**{**TINY, **arguments})
    message = str(caught.value)
    assert all(word in message for word in words), message


def test_gpt_module_defaults_its_widths() -> None:
    assert resolved(1, {}).get("model", "ffn_hidden_size") == 4 * 64
    # 8/3 of the width, rounded up to 64: Llama's rule, 4096 -> 10944 rounded to 64 is 10944 itself.
    swiglu = resolved(1, {}, {"hidden_size": 4096, "num_attention_heads": 32, "swiglu": True})
    assert swiglu.get("model", "ffn_hidden_size") == 10944
    assert swiglu.get("model", "gated_linear_unit") is True
    module = GPTModule(**{**TINY, "vocab_size": 257})
    trainer = make_trainer(MegatronParallelStrategy(), 1)
    trainer.strategy.connect(module)
    trainer.strategy.resolve_settings(trainer)
    assert module.padded_vocab_size == 384


def layout_of(devices: int, strategy: dict[str, Any], model: dict[str, Any] | None = None) -> list[str]:
    """What each stage holds, in pipeline order."""
    trainer = make_trainer(MegatronParallelStrategy(**strategy), devices)
    trainer.strategy.connect(GPTModule(**{**TINY, **(model or {})}))
    settings = trainer.strategy.resolve_settings(trainer)
    layout = trainer.strategy.layout
    chunks = settings.sizes.virtual_pipeline_model_parallel_size or 1
    return [layout.stage(rank, chunk) for chunk in range(chunks) for rank in range(devices)]


def test_layers_per_virtual_stage_give_the_virtual_size() -> None:
    one = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
    assert layout_of(2, one) == layout_of(2, VPP2) == ["Et", "t", "t", "tL"]
    assert layout_of(2, {**PP2, "num_layers_per_virtual_pipeline_stage": 2}) == layout_of(2, PP2)


def test_auto_gives_a_heavy_output_layer_fewer_decoder_layers() -> None:
    auto = {**PP2, "pipeline_model_parallel_layout": "auto"}
    assert layout_of(2, auto, {"num_layers": 8, "vocab_size": 100}) == ["Etttt", "ttttL"]
    # The output layer, 64 x 4096, costs 5.1 layers of 12 x 64 x 64 and their attention: 7 and 6.1, not 6 and 7.1.
    assert layout_of(2, auto, {"num_layers": 8, "vocab_size": 4096}) == ["Ettttttt", "tL"]
    assert layout_of(2, {**auto, **VPP2}, {"num_layers": 4, "vocab_size": 128}) == ["Et", "t", "t", "tL"]
