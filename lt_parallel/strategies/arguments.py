"""The strategy's arguments as data: what they say by themselves, before a Trainer or a model is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from lt_parallel.strategies.fully_sharded import FSDP_STRATEGIES
from lt_parallel.topology import ParallelSizes, require_positive_int

if TYPE_CHECKING:
    from lt_parallel.settings import Settings

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
LayerBackendName = Literal["auto", "torch", "transformer_engine"]
CpCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
OWNER = "MegatronParallelStrategy"
_MOST_MINUTES = 366 * 24 * 60


@dataclass(frozen=True, kw_only=True)
class StrategyArguments:
    """Arguments of `MegatronParallelStrategy`, see there.

    Raises:
        ValueError: One is wrong by itself, or two can't stand together.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | list[str] | None = None
    context_parallel_size: int = 1
    cp_comm_type: str | list[str] = "p2p"
    hierarchical_context_parallel_sizes: list[int] | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    data_parallel_sharding_strategy: ShardingStrategy = "no_shard"
    num_microbatches: int | None = None
    global_batch_size: int | None = None
    layer_backend: LayerBackendName = "auto"
    config_overrides: dict[str, Any] = field(default_factory=dict)
    timeout: timedelta = timedelta(minutes=30)

    def __post_init__(self) -> None:
        _require_one_of("data_parallel_sharding_strategy", self.data_parallel_sharding_strategy, ShardingStrategy)
        _require_one_of("layer_backend", self.layer_backend, LayerBackendName)
        ways = ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout")
        others = [name for name in ways if getattr(self, name) is not None]
        if self.num_layers_per_virtual_pipeline_stage is not None and others:
            raise ValueError(
                f"num_layers_per_virtual_pipeline_stage={self.num_layers_per_virtual_pipeline_stage} and "
                f"{others[0]}={getattr(self, others[0])!r} both say how layers are cut; give one of them"
            )
        for kind in self._cp_comm_types():
            _require_one_of("cp_comm_type", kind, CpCommType)
        for size in self.hierarchical_context_parallel_sizes or ():
            require_positive_int("hierarchical_context_parallel_sizes", size)
        for name in ("num_microbatches", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if self.num_microbatches is not None and self.global_batch_size is not None:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} and global_batch_size={self.global_batch_size} are both "
                "given, but one follows from the other; give one of them"
            )
        overrides: Any = self.config_overrides
        if not isinstance(overrides, Mapping) or not all(isinstance(name, str) for name in overrides):
            raise ValueError(
                f"config_overrides={overrides!r} must be a dictionary from field names to values, e.g. "
                '{"qk_layernorm": True}'
            )

    def _cp_comm_types(self) -> list[str]:
        """One or one per layer, in Megatron Core's spelling."""
        given = self.cp_comm_type if isinstance(self.cp_comm_type, list) else [self.cp_comm_type]
        return ["all_gather" if kind == "allgather" else kind for kind in given]

    def parallel_sizes(self, world_size: int) -> ParallelSizes:
        """The sizes of a run on `world_size` ranks, as far as the arguments alone say them.

        Raises:
            ValueError: They don't fit each other or the world size.
        """
        return ParallelSizes(
            world_size=world_size,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
        )

    def contribute(self, settings: Settings) -> None:
        """Adds the fields of Megatron Core's configs that follow from the arguments and the final sizes."""
        sizes = settings.sizes
        kinds = self._cp_comm_types()
        settings.contribute(
            OWNER,
            "model",
            tensor_model_parallel_size=sizes.tensor_model_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
            context_parallel_size=sizes.context_parallel_size,
            cp_comm_type=kinds if isinstance(self.cp_comm_type, list) else kinds[0],
            hierarchical_context_parallel_sizes=self.hierarchical_context_parallel_sizes,
            expert_model_parallel_size=sizes.expert_model_parallel_size,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
            calculate_per_token_loss=True,
            deallocate_pipeline_outputs=True,
        )
        self._contribute_sharding(settings)

    def _contribute_sharding(self, settings: Settings) -> None:
        """`optim` is Megatron Core's distributed optimizer; what also shards gradients is Megatron-FSDP."""
        strategy = self.data_parallel_sharding_strategy
        sharded = strategy != "no_shard"
        settings.contribute(OWNER, "ddp", use_distributed_optimizer=sharded)
        settings.contribute(OWNER, "optimizer", use_distributed_optimizer=sharded)
        if strategy not in FSDP_STRATEGIES:
            return
        owner = f"{OWNER}(data_parallel_sharding_strategy={strategy!r})"
        settings.contribute(
            owner,
            "ddp",
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True,
            gradient_reduce_div_fusion=False,
            **_precision_of_sharding(settings),
        )
        if strategy == "optim_grads_params":
            # Between steps the module shows its cut parameters; one gathered ahead would have to be dropped for that.
            settings.contribute(owner, "ddp", overlap_param_gather=True, fsdp_all_gather_in_start_param_sync=False)


def _precision_of_sharding(settings: Settings) -> dict[str, Any]:
    """Megatron-FSDP's dtypes for the run's precision: no second copy of fp32 parameters, gradient sums as with DDP."""
    fp32 = settings.get("model", "params_dtype") == torch.float32
    gradients = torch.float32 if fp32 or settings.get("ddp", "grad_reduce_in_fp32") else None
    return {
        "megatron_fsdp_main_params_dtype": None if fp32 else torch.float32,
        "megatron_fsdp_main_grads_dtype": gradients,
        "megatron_fsdp_grad_comm_dtype": gradients,
    }


def timeout_from(minutes: Any) -> timedelta:
    """`timeout_minutes` as a duration.

    Raises:
        ValueError: It isn't a positive number that a duration can hold.
    """
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    if not number or not 0 < minutes <= _MOST_MINUTES:
        raise ValueError(
            f"timeout_minutes={minutes!r} must be a positive number of at most {_MOST_MINUTES} (a year); usual: 30"
        )
    return timedelta(minutes=minutes)


def _require_one_of(name: str, value: object, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(get_args(allowed))}")
