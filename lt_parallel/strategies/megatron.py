"""`MegatronParallelStrategy`: Lightning's hooks, each handed on to the file that does the work.

Order of a run, which the hooks below follow:

1. `launch` and `setup_environment`: merge strategy, precision, callbacks and module into one `Settings` and apply the
   rules (`resolve.py`), then make the process groups (`process_groups.py`).
2. `configure_model` of the module: build and initialise this rank's chunks (`model_chunks.py`).
3. `setup`: wrap the chunks for data parallelism (`data_parallel.py`), build the optimizer (`optimizer.py`).
4. `training_step`: one global step of several micro batches, by Megatron Core's schedules (`global_step.py`).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar, override

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lt_parallel import quiet, runtime
from lt_parallel.metrics.timers import SAVE_CHECKPOINT, StepTimers, timed
from lt_parallel.plugins.checkpoint_io import MegatronCheckpointIO
from lt_parallel.plugins.precision import MegatronPrecision
from lt_parallel.strategies.arguments import LayerBackendName, ShardingStrategy, StrategyArguments, timeout_from
from lt_parallel.strategies.failure import Failure, FailureWatch
from lt_parallel.strategies.fully_sharded import cut_again, fully_shard, hold_whole, is_fully_sharded
from lt_parallel.strategies.launch_inputs import check_inputs
from lt_parallel.strategies.layout_table import show_layout
from lt_parallel.strategies.micro_batches import (
    MicroBatchLoader,
    num_samples,
    require_every_rank,
    with_global_order,
)
from lt_parallel.strategies.model_chunks import ChunkedModule, build_chunks, is_chunked
from lt_parallel.strategies.resolve import ResolvedRun, config_classes, resolve_run
from lt_parallel.strategies.step_checks import FiniteLoss
from lt_parallel.strategies.step_log import report_step

if TYPE_CHECKING:
    import lightning.pytorch as L

    from lt_parallel.pipeline_layout import PipelineLayout
    from lt_parallel.plugins.layer_backend import LayerBackend
    from lt_parallel.settings import Settings
    from lt_parallel.strategies.global_step import GlobalStep
    from lt_parallel.strategies.optimizer import MegatronOptimizer
    from lt_parallel.strategies.sharded_state import ShardedState
    from lt_parallel.topology import ParallelSizes

TBroadcast = TypeVar("TBroadcast")


class _CheckedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which every run goes through: it is checked before other processes start, and muted."""

    def __init__(self, strategy: MegatronParallelStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        strategy = self._strategy
        on_cpu = strategy.root_device.type != "cuda"
        runtime.select("cpu" if on_cpu else "cuda")  # the checks import Megatron Core
        with quiet.muted_run(on_cpu=on_cpu):
            if trainer is not None and strategy.lightning_module is not None:
                strategy.resolve_settings(trainer)
                assert trainer.state.fn is not None and isinstance(strategy.checkpoint_io, MegatronCheckpointIO)
                check_inputs(function, args, kwargs, trainer.state.fn.value, strategy.checkpoint_io)
            return super().launch(function, *args, trainer=trainer, **kwargs)


class MegatronParallelStrategy(ParallelStrategy):
    """Trains a LightningModule with Megatron Core's data, tensor, sequence and pipeline parallelism.

    Data-parallel size is what remains: number of devices / (tensor x pipeline x context parallel size).

    Args:
        tensor_model_parallel_size: Ranks that each weight matrix is cut over.
        sequence_parallel: Also cut activations between the tensor-parallel regions, along the sequence. Needs
            tensor_model_parallel_size > 1.
        pipeline_model_parallel_size: Ranks that the layers are cut over.
        virtual_pipeline_model_parallel_size: Model chunks per pipeline rank (interleaved schedule).
        num_layers_per_virtual_pipeline_stage: The same by the number of decoder layers in each chunk.
        pipeline_model_parallel_layout: Which layers each stage holds, e.g. "Ett|tt|tt|ttL": E embedding, t decoder
            layer, m MTP layer, L loss; "x*n" repeats, "(..)*n" repeats a group. "auto": the layout
            whose slowest stage is fastest by the model's FLOPs. None: equal parts.
        context_parallel_size: Ranks that each sequence is cut over.
        cp_comm_type: How attention crosses those ranks: "p2p" (keys and values around a ring), "all_gather" (of keys
            and values), "a2a" (heads for sequence), "a2a+p2p" (a2a among neighbours, a ring over them); or a list with
            one for each layer.
        hierarchical_context_parallel_sizes: For "a2a+p2p": ranks that exchange heads, and ranks of the ring.
        expert_model_parallel_size: Ranks that the experts of an MoE layer are spread over.
        expert_tensor_parallel_size: Tensor parallelism inside experts; None: tensor_model_parallel_size.
        data_parallel_sharding_strategy: What is cut over the data-parallel ranks: "no_shard" nothing; "optim" the
            optimizer's states and main parameters (Megatron's distributed optimizer); "optim_grads" the gradients as
            well; "optim_grads_params" also the parameters (both by Megatron-FSDP, without pipeline parallelism).
        num_microbatches: Micro batches per global step and data-parallel rank. None: 1, or derived from
            global_batch_size.
        global_batch_size: Samples per global step; num_microbatches = global_batch_size / (DataLoader batch_size x
            data-parallel size). Give this or num_microbatches.
        layer_backend: "auto", "torch" or "transformer_engine": who implements the transformer layers. "auto" takes
            TransformerEngine where it is installed and the device is CUDA.
        config_overrides: Fields of Megatron Core's configs that have no argument anywhere else, by name.
        timeout_minutes: A collective that takes longer ends the run.

    Raises:
        ValueError: An argument or a combination is wrong; when the Trainer is made or when it starts, before any
            process group exists.
    """

    def __init__(
        self,
        tensor_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        num_layers_per_virtual_pipeline_stage: int | None = None,
        pipeline_model_parallel_layout: str | list[str] | None = None,
        context_parallel_size: int = 1,
        cp_comm_type: str | list[str] = "p2p",
        hierarchical_context_parallel_sizes: list[int] | None = None,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        data_parallel_sharding_strategy: ShardingStrategy = "no_shard",
        num_microbatches: int | None = None,
        global_batch_size: int | None = None,
        layer_backend: LayerBackendName = "auto",
        config_overrides: dict[str, Any] | None = None,
        timeout_minutes: float = 30.0,
    ) -> None:
        super().__init__()
        self.arguments = StrategyArguments(
            tensor_model_parallel_size=tensor_model_parallel_size,
            sequence_parallel=sequence_parallel,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            num_layers_per_virtual_pipeline_stage=num_layers_per_virtual_pipeline_stage,
            pipeline_model_parallel_layout=pipeline_model_parallel_layout,
            context_parallel_size=context_parallel_size,
            cp_comm_type=cp_comm_type,
            hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
            expert_model_parallel_size=expert_model_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
            data_parallel_sharding_strategy=data_parallel_sharding_strategy,
            num_microbatches=num_microbatches,
            global_batch_size=global_batch_size,
            layer_backend=layer_backend,
            config_overrides={} if config_overrides is None else config_overrides,
            timeout=timeout_from(timeout_minutes),
        )
        self.num_nodes = 1
        #: Megatron Core's `ProcessGroupCollection`, from `setup_environment` on.
        self.groups: Any = None
        #: Samples of all global steps so far, over all ranks; saved in checkpoints.
        self.consumed_samples = 0
        #: Learning rate of the last step (of the first parameter group).
        self.last_lr: float | None = None
        #: A callback that measures the parts of a step sets this in its `setup`, and takes it away in its `teardown`.
        self.timers: StepTimers | None = None
        self._resolved: ResolvedRun | None = None
        self._failure_watch: FailureWatch | None = None
        self._drawn_seed: int | None = None
        self._finite_loss = FiniteLoss()
        self._config: Any = None
        self._wrapped: list[Any] = []
        self._global_step: GlobalStep | None = None

    # ---------------------------------------------------------------- configuration

    def resolve_settings(self, trainer: L.Trainer) -> Settings:
        """Merges everything that configures this run and applies all rules. Needs no process group.

        Args:
            trainer: Its callbacks, precision and module contribute.

        Raises:
            ValueError: The first rule that is broken.
        """
        self._resolved = resolve_run(
            self.arguments, trainer, self._module, self.num_nodes * self.num_processes, self.root_device.type
        )
        return self._resolved.settings

    @property
    def _run(self) -> ResolvedRun:
        assert self._resolved is not None, "known when the Trainer starts"
        return self._resolved

    @property
    def settings(self) -> Settings:
        """Megatron Core's config fields with their owners; known once the Trainer starts."""
        return self._run.settings

    @property
    def sizes(self) -> ParallelSizes:
        """The parallel sizes of this run; known once the Trainer starts."""
        return self._run.settings.sizes

    @property
    def layout(self) -> PipelineLayout | None:
        """Which layers each pipeline stage holds; None for a plain module."""
        return self._run.layout

    @property
    def backend(self) -> LayerBackend | None:
        """Who implements the transformer layers; None for a plain module."""
        return self._run.backend

    @property
    def _module(self) -> L.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else MegatronPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = MegatronPrecision.from_lightning(precision_plugin) if precision_plugin else None

    @property
    def _precision(self) -> MegatronPrecision:
        plugin = self.precision_plugin
        assert isinstance(plugin, MegatronPrecision)
        return plugin

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = MegatronCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if not isinstance(io, MegatronCheckpointIO):
            raise TypeError(
                f"{type(io).__name__} can't write the shards of a model that is cut over ranks; use "
                "MegatronCheckpointIO or a subclass"
            )
        self._checkpoint_io = io

    # ---------------------------------------------------------------- processes and groups

    @property
    def is_distributed(self) -> bool:
        """Lightning injects a data-parallel sampler and syncs logs only where this is true."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the samples this rank reads; equal on all ranks that cut one model between them."""
        return int(self.sizes.coordinates(self.global_rank).dp)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.sizes.data_parallel_size, "rank": self.data_parallel_rank}

    @override
    def _configure_launcher(self) -> None:
        # Sizes that don't fit fail when the Trainer is made.
        self.arguments.parallel_sizes(self.num_nodes * self.num_processes)
        self._launcher = _CheckedLauncher(self)

    def set_world_ranks(self) -> None:
        """Lightning calls this as soon as the devices are known."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # how Lightning itself sets it

    @override
    def setup_environment(self) -> None:
        from lt_parallel.strategies import process_groups

        runtime.select("cuda" if self.root_device.type == "cuda" else "cpu")
        self.set_world_ranks()
        self.resolve_settings(self._module.trainer)
        super().setup_environment()
        assert self.cluster_environment is not None
        timeout = self.arguments.timeout
        process_groups.init_default_group(self.cluster_environment, self.sizes.world_size, self.root_device, timeout)
        self._failure_watch = FailureWatch.for_default_group()
        self.groups = process_groups.init_model_parallel(
            self.sizes,
            self.arguments.hierarchical_context_parallel_sizes,
            self._run.embedding_pp_ranks,
            timeout=timeout,
        )
        process_groups.seed_model_parallel(self.seed, self.groups.pp.rank())

    @property
    def seed(self) -> int:
        """The seed of `seed_everything`, else one that rank 0 drew; the same on every rank."""
        given = os.environ.get("PL_GLOBAL_SEED")
        if given is not None:
            return int(given)
        if self._drawn_seed is None:
            self._drawn_seed = self.broadcast(torch.initial_seed() % 2**31)
        return self._drawn_seed

    # ---------------------------------------------------------------- model and optimizer

    @property
    def model_config(self) -> Any:
        """Megatron Core's config of the model, one object that chunks, wrappers and schedules share."""
        if self._config is None:
            module = self._module
            if is_chunked(module):
                chunks = module.model_chunks
                self._config = chunks[0].config if chunks else module.config_class()(**self.settings.fields("model"))
            else:
                from lt_parallel.strategies.plain_module import plain_config

                self._config = plain_config(self.settings)
        return self._config

    @override
    def connect(self, model: L.LightningModule) -> None:
        if model is not self.lightning_module:
            self._config = None
        super().connect(model)

    def build_chunks(self, module: ChunkedModule) -> nn.ModuleList:
        """Builds this rank's chunks, not yet initialised, for a module's `configure_model`."""
        return nn.ModuleList(build_chunks(module, self.model_config, self.sizes, self.groups))

    @override
    def setup(self, trainer: L.Trainer) -> None:
        from lt_parallel.strategies.global_step import GlobalStep

        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if not self._stays_cut():
            self.model_to_device()
            self._drop_wrappers()
        self._prepare_chunks(fitting)
        self.model_config.timers = self.timers
        self._global_step = GlobalStep(self._module, self._wrapped, self.model_config, self.groups, self.root_device)
        self._reset_optimizers_and_schedulers()
        if fitting:
            self.setup_optimizers(trainer)
            self.megatron_optimizer.timers = self.timers
            show_layout(trainer, self.layout, self._wrapped, self.groups.pp, self.root_device)
        self.setup_precision_plugin()

    def _drop_wrappers(self) -> None:
        """An earlier run's wrappers are held by cycles, and hooks on the parameters live as long as they do."""
        if self._wrapped:
            self._wrapped, self._global_step = [], None
            self._reset_optimizers_and_schedulers()
            gc.collect()

    def _stays_cut(self) -> bool:
        """Whether Megatron-FSDP has cut this very module: that can't be undone, and it serves every kind of run."""
        chunk, parameter = next(iter(self._wrapped), None), next(self._module.parameters(), None)
        return is_fully_sharded(chunk) and any(each is parameter for each in chunk.parameters())

    def _prepare_chunks(self, fitting: bool) -> None:
        """Takes this rank's chunks in the run's dtype; wraps those that are to be trained, or cut in any case."""
        from lt_parallel.strategies.data_parallel import connect_schedule, copy_from_first_rank, wrap_chunks

        module = self._module
        cut = self.settings.get("ddp", "use_megatron_fsdp", False)
        if not self._wrapped:
            self._wrapped = self._chunks_in_precision()
            ddp_config = config_classes(module)["ddp"](**self.settings.fields("ddp"))
            if (fitting or cut) and not is_chunked(module):  # its weights come from each rank's own generator
                copy_from_first_rank(module, self.groups)
            if cut:
                self._wrapped = [fully_shard(module, self._wrapped[0], self.model_config, ddp_config, self.groups)]
            elif fitting:
                self._wrapped = list(wrap_chunks(self._wrapped, self.model_config, ddp_config, self.groups))
        if fitting:
            connect_schedule(self.model_config, self._wrapped)
        if cut:
            (hold_whole if module.trainer.predicting else cut_again)(self._wrapped[0])

    def _chunks_in_precision(self) -> list[nn.Module]:
        module = self._module
        if is_chunked(module):
            assert module.model_chunks is not None, "configure_model builds the chunks"
            return self._precision.convert_chunks(list(module.model_chunks), self.model_config)
        from lt_parallel.strategies.plain_module import PlainModuleChunk

        return [PlainModuleChunk(self.model_config, self._module).to(self._precision.params_dtype)]

    @override
    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        from lt_parallel.strategies.optimizer import MegatronOptimizer, wrap_torch_optimizer

        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning's advice is manual optimization, which can't be had here.
            raise ValueError(
                f"{type(self._module).__name__}.configure_optimizers returned several optimizers; "
                "MegatronParallelStrategy steps exactly one per global step: use its parameter groups for different "
                "rates"
            ) from error
        optimizer = self.optimizers[0]
        if not isinstance(optimizer, MegatronOptimizer):
            optimizer = wrap_torch_optimizer(optimizer, self.optimizer_config(), self._wrapped, self.groups)
        self.optimizers = [optimizer]
        self.model_config.grad_scale_func = optimizer.core.scale_loss

    def optimizer_config(self, **fields: Any) -> Any:
        """Megatron Core's OptimizerConfig of this run.

        Args:
            fields: The module's own, e.g. `lr`; they must not be owned by strategy, precision or a callback.

        Raises:
            ValueError: A field is owned already.
        """
        owned = self.settings.fields("optimizer")
        for name in fields.keys() & owned.keys():
            raise ValueError(f"{name} is set by {self.settings.owner('optimizer', name)}; set it there")
        clip = self._module.trainer.gradient_clip_val
        # Megatron Core measures the norm only when it clips; at an infinite threshold it measures and never clips.
        fields["clip_grad"] = float(clip) if clip else float("inf")
        return config_classes(self._module)["optimizer"](**fields, **owned)

    def build_optimizer(self, **fields: Any) -> MegatronOptimizer:
        """Megatron Core's optimizer over this rank's chunks, for a module's `configure_optimizers`.

        Args:
            fields: OptimizerConfig fields, e.g. `lr`, `weight_decay`, `adam_beta2`.
        """
        from lt_parallel.strategies.optimizer import build_optimizer

        return build_optimizer(self.optimizer_config(**fields), self._wrapped, self.groups)

    @property
    def megatron_optimizer(self) -> MegatronOptimizer:
        """The optimizer of this run, while fitting."""
        optimizer: Any = self.optimizers[0]
        return optimizer

    @property
    def wrapped_chunks(self) -> tuple[nn.Module, ...]:
        """This rank's chunks as they run, while fitting in Megatron Core's DDP; none before `setup`."""
        return tuple(self._wrapped)

    # ---------------------------------------------------------------- data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        trainer, replicas = self._module.trainer, self.sizes.data_parallel_size
        if trainer.predicting:
            return dataloader
        ordered = with_global_order(dataloader, replicas, self.data_parallel_rank)
        if not trainer.training and not is_chunked(self._module):
            require_every_rank(ordered, replicas)
        return MicroBatchLoader(
            ordered,
            num_microbatches=self._run.batch_plan.num_microbatches_of(dataloader),
            num_replicas=replicas,
            complete_only=trainer.training,
            epoch_steps=trainer.limit_train_batches if trainer.training else 1.0,
            seed=self.seed + self.data_parallel_rank,
            timers=self.timers if trainer.training else None,
        )

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Micro batch by micro batch, so that the module's transfer hooks see what its loader yields."""
        if isinstance(batch, list) and not self._module.trainer.predicting:
            return [self._to_device(micro_batch, device, dataloader_idx) for micro_batch in batch]
        return self._to_device(batch, device, dataloader_idx)

    def _to_device(self, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        moved = super().batch_to_device(batch, device, dataloader_idx)
        # Chunks convert at their own door; a plain module has none.
        return moved if is_chunked(self._module) else self._precision.convert_input(moved)

    # ---------------------------------------------------------------- steps

    @property
    def global_step(self) -> GlobalStep:
        """What runs the steps, from `setup` on."""
        assert self._global_step is not None, "known when the Trainer starts"
        return self._global_step

    @override
    def training_step(self, batch: list[Any], batch_idx: int) -> dict[str, Tensor]:
        self.megatron_optimizer.clear_gradients()
        loss = self.global_step.train(batch, batch_idx)
        self.consumed_samples += num_samples(batch[0]) * len(batch) * self.sizes.data_parallel_size
        return {"loss": loss}

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the hooks around backward; the schedule did backward itself."""
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        return self.precision_plugin.post_backward(closure_loss, self._module)

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.last_lr = float(optimizer.param_groups[0]["lr"])
        result = super().optimizer_step(optimizer, *args, **kwargs)
        for chunk in self._wrapped:
            if is_fully_sharded(chunk) and chunk.gathers_in_forward:
                cut_again(chunk)  # Megatron Core's step leaves parameters that nobody may read
        self._finite_loss.check(result, optimizer.grad_norm, self._module.trainer.global_step)
        self._report_step(self.last_lr)
        return result

    def _report_step(self, lr: float) -> None:
        """Shows what the loss function measured, and for chunks what a step is about (plain modules log that)."""
        measured: dict[str, Tensor | float] = dict(self.global_step.measured)
        values = dict(measured)
        if is_chunked(self._module):
            grad_norm = self.megatron_optimizer.grad_norm
            values.update({} if grad_norm is None else {"grad_norm": grad_norm})
            values.update(lr=lr, consumed_samples=float(self.consumed_samples))
        if values:
            report_step(self._module.trainer, values, in_bar=list(measured)[:1])

    @override
    def validation_step(self, batch: list[Any], *args: Any) -> Any:
        return self.global_step.evaluate("validation_step", batch, *args)

    @override
    def test_step(self, batch: list[Any], *args: Any) -> Any:
        return self.global_step.evaluate("test_step", batch, *args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        from lt_parallel.strategies.data_parallel import whole_parameters

        with whole_parameters(self._wrapped):
            own = self._module.predict_step
            return own(*args, **kwargs) if self.layout else self._wrapped[0]("predict_step", *args, **kwargs)

    # ---------------------------------------------------------------- collectives

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the data-parallel ranks; model-parallel ranks hold equal values, which must count once.

        Args:
            tensor: Anything but a tensor is returned as it is.
            group: Another group.
            reduce_op: "mean", "avg", "sum", "max", "min", "product" or a `torch.distributed.ReduceOp`.
        """
        if not isinstance(tensor, Tensor) or not torch.distributed.is_initialized():
            return tensor
        if group is None:
            group = self.groups.dp_cp if self.groups is not None else torch.distributed.group.WORLD
        name = reduce_op.upper() if isinstance(reduce_op, str) else reduce_op
        mean = name in ("MEAN", "AVG")
        operation = torch.distributed.ReduceOp.SUM if mean else name
        if isinstance(operation, str):
            operation = getattr(torch.distributed.ReduceOp, operation)
        result = tensor.clone()
        torch.distributed.all_reduce(result, op=operation, group=group)
        return result / torch.distributed.get_world_size(group) if mean else result

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of the ranks decided so; over every rank, as decisions may differ between stages."""
        votes = torch.tensor(int(decision), device=self.root_device)
        total = int(self.reduce(votes, torch.distributed.group.WORLD, "sum"))
        return total == self.world_size if all else total > 0

    @override
    def barrier(self, name: str | None = None) -> None:
        if not torch.distributed.is_initialized():
            return
        if self.root_device.type == "cuda":
            torch.distributed.barrier(device_ids=[self.root_device.index])
        else:
            torch.distributed.barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not torch.distributed.is_initialized():
            return obj
        parcel = [obj]
        torch.distributed.broadcast_object_list(parcel, src, device=self.root_device)
        return parcel[0]

    # ---------------------------------------------------------------- checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # shards are read into chunks and optimizer states that exist

    @property
    def _sharded_state(self) -> ShardedState:
        from lt_parallel.strategies.fully_sharded_state import FullyShardedState
        from lt_parallel.strategies.sharded_state import ShardedState

        kind = FullyShardedState if is_fully_sharded(self._wrapped[0]) else ShardedState
        return kind(self._wrapped, self.groups, self.sizes, self.global_rank)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What of this rank's chunks a checkpoint holds."""
        return self._sharded_state.model()

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """What of this rank's optimizer states a checkpoint holds."""
        return self._sharded_state.optimizer(self.megatron_optimizer.core)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        from lt_parallel.strategies.data_parallel import whole_parameters

        checkpoint["consumed_samples"] = self.consumed_samples
        checkpoint["parallel_sizes"] = asdict(self.sizes)
        checkpoint["data_parallel_sharding_strategy"] = self.arguments.data_parallel_sharding_strategy
        checkpoint["sharded_format"] = self._sharded_state.format
        checkpoint["rng_state"] = self._sharded_state.rng()
        with whole_parameters(self._wrapped), timed(self.timers, SAVE_CHECKPOINT, host=True):
            self.checkpoint_io.save_checkpoint(checkpoint, self.broadcast(str(filepath)), storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        from lt_parallel.strategies.sharded_state import require_same_format, require_same_model, require_same_sharding

        io, state = self.checkpoint_io, self._sharded_state
        assert isinstance(io, MegatronCheckpointIO)
        checkpoint = io.load_checkpoint(checkpoint_path)
        sharding = self.arguments.data_parallel_sharding_strategy
        require_same_format(checkpoint, state.format, sharding)
        resuming = self._module.trainer.state.fn == TrainerFn.FITTING and "lr_schedulers" in checkpoint
        if resuming:
            require_same_sharding(checkpoint, self.sizes, sharding)
        template = state.template(
            self.megatron_optimizer.core if resuming else None,
            with_rng=checkpoint["parallel_sizes"] == asdict(self.sizes),
        )
        strict = self._module.strict_loading
        own = state.model_shapes(template["state_dict"])
        require_same_model(io.tensor_shapes(checkpoint_path, state.format), own, strict=strict)
        checkpoint.update(io.load_sharded(checkpoint_path, template, state.format, strict=strict))
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._sharded_state.load_model(checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        state = self._sharded_state
        state.load_optimizer(self.megatron_optimizer.core, checkpoint["optimizer_states"][0])
        self.consumed_samples = checkpoint["consumed_samples"]
        if "rng_state" in checkpoint:
            state.load_rng(checkpoint["rng_state"])

    # ---------------------------------------------------------------- the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks, which may be waiting for this one."""
        if self._failure_watch is not None:
            self._failure_watch.report(exception)

    def root_cause(self) -> Failure | None:
        """Which rank failed first and why, if one did."""
        return self._failure_watch.root_cause() if self._failure_watch is not None else None

    @override
    def teardown(self) -> None:
        """Ends what runs in the background.

        Groups and wrapped chunks stay: a script may evaluate or save after `fit`.
        """
        if self._failure_watch is not None:
            self._failure_watch.stop()
        self.precision_plugin.teardown()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def megatron_strategy(trainer: L.Trainer) -> MegatronParallelStrategy:
    """The Trainer's strategy, where it has been checked to be this one."""
    strategy = trainer.strategy
    assert isinstance(strategy, MegatronParallelStrategy), "checked before the run starts"
    return strategy
