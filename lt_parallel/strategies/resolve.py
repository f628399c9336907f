"""From arguments, Trainer and module to one checked `Settings`. No process group is needed for any of it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lt_parallel.option_rules import check_rules
from lt_parallel.pipeline_balance import LayerCosts, balance_layout
from lt_parallel.pipeline_layout import PipelineLayout, virtual_size_from_layers
from lt_parallel.plugins.dispatch_libraries import require_dispatch_library
from lt_parallel.settings import Contributor, Settings, Target
from lt_parallel.strategies.arguments import OWNER, StrategyArguments
from lt_parallel.strategies.batch_plan import BatchPlan
from lt_parallel.strategies.model_chunks import is_chunked

if TYPE_CHECKING:
    import lightning.pytorch as L

    from lt_parallel.plugins.layer_backend import LayerBackend
    from lt_parallel.topology import ParallelSizes


@dataclass(frozen=True)
class ResolvedRun:
    """Everything that is decided before a run starts.

    Attributes:
        settings: Megatron Core's config fields and the final parallel sizes.
        batch_plan: Micro batches per step.
        layout: Which layers each stage holds; None for a plain module.
        backend: Who implements the layers; None for a plain module.
    """

    settings: Settings
    batch_plan: BatchPlan
    layout: PipelineLayout | None
    backend: LayerBackend | None

    @property
    def embedding_pp_ranks(self) -> list[int] | None:
        """Pipeline ranks with a copy of the word embedding, where MTP heads need one; None: Megatron Core's choice."""
        if self.layout is None or not self.layout.mtp_num_layers:
            return None
        return self.layout.embedding_pp_ranks(tied=self.settings.tied_embeddings)


def resolve_run(
    arguments: StrategyArguments, trainer: L.Trainer, module: L.LightningModule, world_size: int, device_type: str
) -> ResolvedRun:
    """Merges all that configures a run and applies every rule.

    Args:
        arguments: The strategy's.
        trainer: Its precision plugin and callbacks contribute.
        module: Contributes its model, if it is made of chunks.
        world_size: Ranks of the run.
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: The first rule that is broken.
        ImportError: None is, but a library that the run needs is missing.
    """
    _check_trainer(trainer, module)
    settings = Settings(arguments.parallel_sizes(world_size))
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector in Trainer.__init__
    _collect(settings, trainer.precision_plugin, module)
    layout = _resolve_layout(arguments, settings, module)
    arguments.contribute(settings)
    fused = device_type == "cuda" and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    settings.contribute(OWNER, "model", gradient_accumulation_fusion=fused)
    backend = None
    if is_chunked(module):
        backend = _resolve_backend(arguments, settings, device_type)
    else:
        _check_plain(settings.sizes, module)
    _collect(settings, *callbacks)  # after the strategy, whose sizes and sharding their presets follow
    # Two interleaved ranks exchange two tensors each way; batched p2p mixes them up without an error.
    interleaved = settings.sizes.virtual_pipeline_model_parallel_size is not None
    settings.suggest(OWNER, "model", overlap_p2p_comm=interleaved, batch_p2p_comm=not interleaved)
    if arguments.config_overrides:
        settings.override(arguments.config_overrides, config_classes(module))
    if backend is not None:
        _check_low_precision(settings, backend)
        _check_context_parallel(settings, backend)
    check_rules(settings)
    require_dispatch_library(settings)  # after the rules: to build one takes longer than to change an option
    batch_plan = BatchPlan(settings.sizes, arguments.num_microbatches, arguments.global_batch_size)
    return ResolvedRun(settings, batch_plan, layout, backend)


def _collect(settings: Settings, *contributors: Any) -> None:
    for contributor in contributors:
        if isinstance(contributor, Contributor):
            contributor.contribute(settings)


def config_classes(module: object) -> dict[Target, Any]:
    """Megatron Core's config class of each target, for this module. Imports Megatron Core."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    model = module.config_class() if is_chunked(module) else TransformerConfig
    return {"model": model, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}


def _resolve_layout(arguments: StrategyArguments, settings: Settings, module: object) -> PipelineLayout | None:
    """Cuts the layers into stages; a layout may say the number of virtual stages by itself."""
    num_layers = settings.get("model", "num_layers")
    if num_layers is None:
        return None
    sizes = settings.sizes
    pp, virtual_size = sizes.pipeline_model_parallel_size, sizes.virtual_pipeline_model_parallel_size
    if arguments.num_layers_per_virtual_pipeline_stage is not None:
        per_stage = arguments.num_layers_per_virtual_pipeline_stage
        virtual_size = virtual_size_from_layers(
            num_layers, pipeline_model_parallel_size=pp, num_layers_per_virtual_pipeline_stage=per_stage
        )
    split: dict[str, Any] = {
        "num_layers": num_layers,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": virtual_size,
        "mtp_num_layers": settings.get("model", "mtp_num_layers"),
    }
    given = arguments.pipeline_model_parallel_layout
    if given == "auto":
        given = balance_layout(_layer_costs(module, settings), pp, virtual_size or 1)
    layout = PipelineLayout.even(**split) if given is None else PipelineLayout.parse(given, **split)
    virtual_size = layout.virtual_pipeline_model_parallel_size
    settings.sizes = replace(sizes, virtual_pipeline_model_parallel_size=virtual_size)
    owner = f"{OWNER}(pipeline_model_parallel_layout=...)"
    settings.contribute(owner, "model", pipeline_model_parallel_layout=layout.to_megatron())
    return layout


def _layer_costs(module: object, settings: Settings) -> LayerCosts:
    costs = getattr(module, "layer_costs", None)
    if costs is None:
        raise ValueError(
            f"pipeline_model_parallel_layout='auto' needs the costs of the layers, and {type(module).__name__} has no "
            "layer_costs(settings); write it, or give a layout"
        )
    found: LayerCosts = costs(settings)
    return found


def _resolve_backend(arguments: StrategyArguments, settings: Settings, device_type: str) -> LayerBackend:
    from lt_parallel.plugins.layer_backend import resolve_layer_backend

    backend = resolve_layer_backend(arguments.layer_backend, device_type)
    settings.contribute(f"{OWNER}(layer_backend=...)", "model", **backend.config_fields)
    return backend


def _check_low_precision(settings: Settings, backend: LayerBackend) -> None:
    """TransformerEngine alone computes in fewer than 16 bits; the torch layers would leave the option unread."""
    for name in ("fp8", "fp4"):
        value = settings.get("model", name)
        if value and backend.name == "torch":
            raise ValueError(
                f"{name}={value!r} needs layer_backend='transformer_engine' on a CUDA device, but this run has "
                f"layer_backend='torch'; remove {name}"
            )


def _check_context_parallel(settings: Settings, backend: LayerBackend) -> None:
    if backend.name == "torch":
        from lt_parallel.plugins.layer_backend.attention import refuse_across_ranks

        given = settings.get("model", "attention_dropout", 0.0), settings.get("model", "window_size")
        refuse_across_ranks(settings.sizes.context_parallel_size, *given)


def _check_trainer(trainer: L.Trainer, module: L.LightningModule) -> None:
    """What Lightning can do by itself but Megatron Core's schedule does in its place."""
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) can't be combined with {OWNER}: a "
            f"step holds its micro batches already; use {OWNER}(num_microbatches={trainer.accumulate_grad_batches}) "
            "instead"
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization=False (manual optimization) can't be combined with "
            f"{OWNER}: Megatron Core's schedule runs backward itself; use num_microbatches for accumulation and remove "
            "manual optimization"
        )
    if trainer.gradient_clip_algorithm == "value":
        raise ValueError(
            "Trainer(gradient_clip_algorithm='value') is not supported: Megatron Core clips by the norm over all "
            "model-parallel ranks; use gradient_clip_algorithm='norm'"
        )
    if is_overridden("configure_gradient_clipping", module):
        raise ValueError(
            f"{type(module).__name__} overrides configure_gradient_clipping, which Megatron Core's step never calls; "
            "use Trainer(gradient_clip_val=...)"
        )


def _check_plain(sizes: ParallelSizes, module: object) -> None:
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    )
    cut = ", ".join(f"{name}={getattr(sizes, name)}" for name in names if getattr(sizes, name) > 1)
    if cut:
        raise ValueError(
            f"{type(module).__name__} is a plain LightningModule, which can't be cut, but {cut}; set them to 1 (data "
            "parallelism and its sharding work), or use a module made of model chunks such as GPTModule"
        )
