"""`MegatronParallelStrategy`: Lightning's hooks, each handed on to the file that does the work.

Order of a run, which the hooks below follow:

1. `launch` and `setup_environment`: merge strategy, precision, callbacks and module into one `Settings`, apply the
   rules, then make the process groups.
2. `configure_model` of the module: build and initialise this rank's chunks.
3. `setup`: wrap the chunks for data parallelism, build the optimizer.
4. `training_step`: one global step of several micro batches, by Megatron Core's schedules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from typing_extensions import override

from lt_parallel import runtime
from lt_parallel.pipeline_layout import PipelineLayout
from lt_parallel.plugins.checkpoint_io import MegatronCheckpointIO
from lt_parallel.plugins.precision import MegatronPrecision
from lt_parallel.settings import Contributor, Settings
from lt_parallel.strategies.failure import FailureWatch
from lt_parallel.strategies.log_capture import logs_weighted_by, one_log_per_step
from lt_parallel.strategies.micro_batches import MicroBatchLoader, num_samples, require_every_rank, with_global_order
from lt_parallel.strategies.model_chunks import ChunkedModule, build_chunks, is_chunked
from lt_parallel.strategies.step_metrics import StepMetrics, StepMetricsReducer
from lt_parallel.topology import ParallelSizes

if TYPE_CHECKING:
    import lightning.pytorch as L
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    from lt_parallel.plugins.layer_backend import LayerBackend
    from lt_parallel.strategies.optimizer import MegatronOptimizer
    from lt_parallel.strategies.schedule import StepSchedule

TBroadcast = TypeVar("TBroadcast")
ShardingStrategy = Literal["no_shard", "optim"]
_OWNER = "MegatronParallelStrategy"


class _CheckedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher; the configuration is checked before the other processes start."""

    def __init__(self, strategy: MegatronParallelStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None and self._strategy.lightning_module is not None:
            self._strategy.resolve_settings(trainer)
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
        pipeline_model_parallel_layout: Which layers each stage holds, e.g. "Ett|tt|tt|ttL": E embedding, t decoder
            layer, m MTP layer, L loss; "x*n" repeats, "(..)*n" repeats a group. None: equal parts.
        context_parallel_size: Ranks that each sequence is cut over.
        expert_model_parallel_size: Ranks that the experts of an MoE layer are spread over.
        expert_tensor_parallel_size: Tensor parallelism inside experts; None: tensor_model_parallel_size.
        data_parallel_sharding_strategy: "no_shard" keeps everything on every data-parallel rank; "optim" shards the
            optimizer's states and main parameters (Megatron's distributed optimizer).
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
        pipeline_model_parallel_layout: str | list[str] | None = None,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        data_parallel_sharding_strategy: ShardingStrategy = "no_shard",
        num_microbatches: int | None = None,
        global_batch_size: int | None = None,
        layer_backend: Literal["auto", "torch", "transformer_engine"] = "auto",
        config_overrides: dict[str, Any] | None = None,
        timeout_minutes: float = 30.0,
    ) -> None:
        super().__init__()
        self.tensor_model_parallel_size = tensor_model_parallel_size
        self.sequence_parallel = sequence_parallel
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        self.virtual_pipeline_model_parallel_size = virtual_pipeline_model_parallel_size
        self.pipeline_model_parallel_layout = pipeline_model_parallel_layout
        self.context_parallel_size = context_parallel_size
        self.expert_model_parallel_size = expert_model_parallel_size
        self.expert_tensor_parallel_size = expert_tensor_parallel_size
        self.data_parallel_sharding_strategy = data_parallel_sharding_strategy
        self.layer_backend = layer_backend
        self.config_overrides = dict(config_overrides or {})
        self.timeout = timedelta(minutes=timeout_minutes)
        self._num_microbatches, self._global_batch_size = num_microbatches, global_batch_size
        self._check_arguments()

        self.num_nodes = 1
        #: Set when the Trainer starts.
        self.settings: Settings | None = None
        self.backend: LayerBackend | None = None
        self.layout: PipelineLayout | None = None
        self.groups: Any = None
        self.consumed_samples = 0
        self._failure_watch: FailureWatch | None = None
        self._config: Any = None
        self._wrapped: list[Any] = []
        self._schedule: StepSchedule | None = None
        self._reducer: StepMetricsReducer | None = None

    # ---------------------------------------------------------------- arguments and settings

    def _check_arguments(self) -> None:
        known = ("no_shard", "optim")
        if self.data_parallel_sharding_strategy not in known:
            raise ValueError(
                f"data_parallel_sharding_strategy={self.data_parallel_sharding_strategy!r} is not one of "
                f"{', '.join(known)}"
            )
        if self._num_microbatches is not None and self._global_batch_size is not None:
            raise ValueError(
                f"num_microbatches={self._num_microbatches} and global_batch_size={self._global_batch_size} are both "
                "given, but one follows from the other; give one of them"
            )
        for name, value in (
            ("num_microbatches", self._num_microbatches),
            ("global_batch_size", self._global_batch_size),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be a positive integer")

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

    def resolve_settings(self, trainer: L.Trainer) -> Settings:
        """Merges everything that configures this run and applies all rules. Needs no process group.

        Args:
            trainer: Its callbacks, precision and module contribute.

        Raises:
            ValueError: The first rule that is broken.
        """
        module = self.lightning_module
        assert module is not None
        self._check_trainer(trainer, module)
        settings = Settings(self.parallel_sizes(self.num_nodes * self.num_processes))
        for contributor in (self._precision, module, *trainer.callbacks):
            if isinstance(contributor, Contributor):
                contributor.contribute(settings)
        self._resolve_layout(settings)
        self.contribute(settings)
        if is_chunked(module):
            from lt_parallel.plugins.layer_backend import resolve_layer_backend

            self.backend = resolve_layer_backend(self.layer_backend, self.root_device.type)
            settings.contribute(f"{_OWNER}(layer_backend=...)", "model", **self.backend.config_fields)
        else:
            self._check_plain(settings.sizes, module)
        if self.config_overrides:
            settings.override(self.config_overrides, self._config_classes(module))
        settings.validate()
        self._check_batch_sizes(settings.sizes)
        self.settings = settings
        return settings

    def contribute(self, settings: Settings) -> None:
        """Adds the strategy's own fields."""
        sizes = settings.sizes
        interleaved = sizes.virtual_pipeline_model_parallel_size is not None
        sharded = self.data_parallel_sharding_strategy == "optim"
        on_cuda = self.root_device.type == "cuda"
        settings.contribute(
            _OWNER,
            "model",
            tensor_model_parallel_size=sizes.tensor_model_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
            context_parallel_size=sizes.context_parallel_size,
            expert_model_parallel_size=sizes.expert_model_parallel_size,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
            calculate_per_token_loss=True,
            # Two interleaved ranks exchange two tensors each way; batched p2p mixes them up without an error.
            overlap_p2p_comm=interleaved,
            batch_p2p_comm=not interleaved,
            deallocate_pipeline_outputs=True,
            gradient_accumulation_fusion=on_cuda and _has_fused_weight_gradient(),
        )
        settings.contribute(_OWNER, "ddp", use_distributed_optimizer=sharded)
        settings.contribute(_OWNER, "optimizer", use_distributed_optimizer=sharded)

    def _check_trainer(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) can't be combined with "
                f"{_OWNER}: a step holds its micro batches already; use "
                f"{_OWNER}(num_microbatches={trainer.accumulate_grad_batches}) instead"
            )
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__}.automatic_optimization=False can't be combined with {_OWNER}: Megatron "
                "Core's schedule runs backward itself; use num_microbatches for accumulation and remove manual "
                "optimization"
            )
        if trainer.gradient_clip_algorithm == "value":
            raise ValueError(
                "Trainer(gradient_clip_algorithm='value') is not supported: Megatron Core clips by the norm over all "
                "model-parallel ranks; use gradient_clip_algorithm='norm'"
            )
        if is_overridden("configure_gradient_clipping", module):
            raise ValueError(
                f"{type(module).__name__} overrides configure_gradient_clipping, which Megatron Core's step never "
                "calls; use Trainer(gradient_clip_val=...)"
            )

    def _check_plain(self, sizes: ParallelSizes, module: L.LightningModule) -> None:
        cut = {
            name: value
            for name, value in (
                ("tensor_model_parallel_size", sizes.tensor_model_parallel_size),
                ("pipeline_model_parallel_size", sizes.pipeline_model_parallel_size),
                ("context_parallel_size", sizes.context_parallel_size),
                ("expert_model_parallel_size", sizes.expert_model_parallel_size),
            )
            if value > 1
        }
        if cut:
            shown = ", ".join(f"{name}={value}" for name, value in cut.items())
            raise ValueError(
                f"{type(module).__name__} is a plain LightningModule, which can't be cut, but {shown}; set them to 1 "
                "(data parallelism and its sharding work), or use a module made of model chunks such as GPTModule"
            )

    def _check_batch_sizes(self, sizes: ParallelSizes) -> None:
        dp, virtual_size = sizes.data_parallel_size, sizes.virtual_pipeline_model_parallel_size
        if self._global_batch_size is not None and self._global_batch_size % dp:
            lower, upper = self._global_batch_size // dp * dp, (self._global_batch_size // dp + 1) * dp
            raise ValueError(
                f"global_batch_size={self._global_batch_size} must be divisible by the data-parallel size {dp}; "
                f"nearest valid: {f'{lower} or ' if lower else ''}{upper}"
            )
        if self._num_microbatches is not None:
            self._check_rounds(self._num_microbatches, sizes.pipeline_model_parallel_size, virtual_size)

    @staticmethod
    def _check_rounds(num_microbatches: int, pp: int, virtual_size: int | None) -> None:
        if virtual_size is not None and num_microbatches % pp:
            raise ValueError(
                f"num_microbatches={num_microbatches} must be divisible by pipeline_model_parallel_size={pp} with "
                f"{virtual_size} virtual stages; nearest valid: {max(num_microbatches // pp, 1) * pp} or "
                f"{(num_microbatches // pp + 1) * pp}"
            )

    def _resolve_layout(self, settings: Settings) -> None:
        """Cuts the layers into stages; a layout may say the number of virtual stages by itself."""
        num_layers = settings.get("model", "num_layers")
        if num_layers is None:
            return
        sizes = settings.sizes
        split: dict[str, Any] = {
            "num_layers": num_layers,
            "pipeline_model_parallel_size": sizes.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline_model_parallel_size,
            "mtp_num_layers": settings.get("model", "mtp_num_layers"),
        }
        if self.pipeline_model_parallel_layout is None:
            self.layout = PipelineLayout.even(**split)
        else:
            self.layout = PipelineLayout.parse(self.pipeline_model_parallel_layout, **split)
        settings.sizes = replace(
            sizes, virtual_pipeline_model_parallel_size=self.layout.virtual_pipeline_model_parallel_size
        )
        settings.contribute(
            f"{_OWNER}(pipeline_model_parallel_layout=...)",
            "model",
            pipeline_model_parallel_layout=self.layout.to_megatron(),
        )

    @staticmethod
    def _config_classes(module: L.LightningModule) -> dict[Any, type]:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import TransformerConfig

        model = module.config_class() if is_chunked(module) else TransformerConfig
        return {"model": model, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}

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
    def _precision(self) -> MegatronPrecision:
        plugin = self.precision_plugin
        assert isinstance(plugin, MegatronPrecision)
        return plugin

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else MegatronPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = MegatronPrecision.from_lightning(precision_plugin) if precision_plugin else None

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = MegatronCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.sizes.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    def sizes(self) -> ParallelSizes:
        """The parallel sizes of this run; known once the Trainer starts."""
        assert self.settings is not None, "the sizes are known when the Trainer starts"
        return self.settings.sizes

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the samples this rank reads; equal on all ranks that cut one model between them."""
        return int(self.sizes.coordinates(self.global_rank).dp)

    @override
    def _configure_launcher(self) -> None:
        self.parallel_sizes(self.num_nodes * self.num_processes)  # sizes that don't fit fail when the Trainer is made
        self._launcher = _CheckedLauncher(self)

    def set_world_ranks(self) -> None:
        """Lightning calls this as soon as the devices are known."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    @override
    def setup_environment(self) -> None:
        module = self.lightning_module
        assert module is not None
        runtime.select("cuda" if self.root_device.type == "cuda" else "cpu")
        self.set_world_ranks()
        settings = self.resolve_settings(module.trainer)
        super().setup_environment()

        from lt_parallel.strategies import process_groups

        assert self.cluster_environment is not None
        process_groups.init_default_group(
            self.cluster_environment, self.sizes.world_size, self.root_device, self.timeout
        )
        self._failure_watch = FailureWatch.for_default_group()
        self.groups = process_groups.init_model_parallel(settings.sizes, timeout=self.timeout)
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

    _drawn_seed: int | None = None

    # ---------------------------------------------------------------- model and optimizer

    @property
    def model_config(self) -> Any:
        """Megatron Core's config of the model, built once per run from the settings."""
        assert self.settings is not None
        if self._config is None:
            module = self.lightning_module
            if is_chunked(module):
                self._config = module.config_class()(**self.settings.fields("model"))
            else:
                from lt_parallel.strategies.plain_module import plain_config

                self._config = plain_config(self.settings)
        return self._config

    def build_chunks(self, module: ChunkedModule) -> nn.ModuleList:
        """Builds and initialises this rank's chunks; `ChunkedModule.configure_model` calls it."""
        return nn.ModuleList(build_chunks(module, self.model_config, self.sizes, self.groups))

    @override
    def setup(self, trainer: L.Trainer) -> None:
        from lt_parallel.strategies.data_parallel import connect_schedule, wrap_chunks
        from lt_parallel.strategies.schedule import StepSchedule

        module = self.lightning_module
        assert self.accelerator is not None and module is not None and self.settings is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        chunks = self._chunks_in_precision(module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            classes = self._config_classes(module)
            ddp_config = classes["ddp"](**self.settings.fields("ddp"))
            self._wrapped = wrap_chunks(chunks, self.model_config, ddp_config, self.groups)
            if not is_chunked(module):
                self._equalize_plain(module)
            connect_schedule(self.model_config, self._wrapped)
        else:
            self._wrapped = chunks
        shape = module.micro_batch_shape if is_chunked(module) else None
        self._schedule = StepSchedule(self._wrapped, self.model_config, self.groups, shape, self.root_device)
        self._reducer = StepMetricsReducer(self.groups.dp_cp, self.groups.pp, self.root_device)
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _chunks_in_precision(self, module: L.LightningModule) -> list[nn.Module]:
        """This rank's chunks with parameters in the run's dtype, ready for the schedules."""
        half = self._precision.params_dtype is not torch.float32
        if not is_chunked(module):
            from lt_parallel.strategies.plain_module import PlainModuleChunk

            module.to(self._precision.params_dtype)
            return [PlainModuleChunk(self.model_config, module)]
        assert module.model_chunks is not None
        if not half:
            return list(module.model_chunks)
        from megatron.core.transformer.module import Float16Module

        return [Float16Module(self.model_config, chunk) for chunk in module.model_chunks]

    def _equalize_plain(self, module: L.LightningModule) -> None:
        """A plain module's weights come from each rank's own generator; rank 0's count."""
        self._wrapped[0].broadcast_params()
        for buffer in module.buffers():
            torch.distributed.broadcast(
                buffer, src=torch.distributed.get_global_rank(self.groups.dp_cp, 0), group=self.groups.dp_cp
            )

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        from lt_parallel.strategies.optimizer import MegatronOptimizer, wrap_torch_optimizer

        if len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers; {_OWNER} steps exactly one per "
                "global step (use parameter groups for different rates)"
            )
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
        from megatron.core.optimizer import OptimizerConfig

        assert self.settings is not None and self.lightning_module is not None
        for name in fields.keys() & self.settings.fields("optimizer").keys():
            raise ValueError(f"{name} is set by {self.settings.owner('optimizer', name)}; set it there")
        clip = self.lightning_module.trainer.gradient_clip_val
        # Megatron Core measures the norm only when it clips; at an infinite threshold it measures and never clips.
        fields["clip_grad"] = float(clip) if clip else float("inf")
        return OptimizerConfig(**fields, **self.settings.fields("optimizer"))

    def build_optimizer(self, **fields: Any) -> MegatronOptimizer:
        """Megatron Core's optimizer over this rank's chunks, for a module's `configure_optimizers`.

        Args:
            fields: OptimizerConfig fields, e.g. `lr`, `weight_decay`, `adam_beta2`.
        """
        from lt_parallel.strategies.optimizer import build_optimizer

        return build_optimizer(self.optimizer_config(**fields), self._wrapped, self.groups)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    # ---------------------------------------------------------------- data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        if trainer.predicting:
            return dataloader
        replicas = self.sizes.data_parallel_size
        ordered = with_global_order(dataloader, replicas, self.data_parallel_rank)
        if not trainer.training and not is_chunked(module):
            require_every_rank(ordered, replicas)
        return MicroBatchLoader(
            ordered,
            num_microbatches=self._microbatches_of(dataloader),
            num_replicas=replicas,
            complete_only=trainer.training,
            seed=self.seed + self.data_parallel_rank,
        )

    def _microbatches_of(self, dataloader: Any) -> int:
        if self._global_batch_size is None:
            return self._num_microbatches or 1
        micro_batch = getattr(dataloader, "batch_size", None)
        if micro_batch is None:
            raise ValueError(
                f"global_batch_size={self._global_batch_size} needs a DataLoader with a batch_size; this loader "
                f"({type(dataloader).__name__}) has none: give num_microbatches instead"
            )
        per_round = micro_batch * self.sizes.data_parallel_size
        if self._global_batch_size % per_round:
            lower = self._global_batch_size // per_round * per_round
            raise ValueError(
                f"global_batch_size={self._global_batch_size} must be divisible by micro batch {micro_batch} x "
                f"data-parallel size {self.sizes.data_parallel_size} (= {per_round}); nearest valid: "
                f"{f'{lower} or ' if lower else ''}{lower + per_round}"
            )
        count: int = self._global_batch_size // per_round
        self._check_rounds(
            count, self.sizes.pipeline_model_parallel_size, self.sizes.virtual_pipeline_model_parallel_size
        )
        return count

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Micro batch by micro batch, so that the module's transfer hooks see what its loader yields."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if not isinstance(batch, list) or trainer is None or trainer.predicting:
            return self._convert(super().batch_to_device(batch, device, dataloader_idx))
        transfer = super().batch_to_device
        return [self._convert(transfer(micro_batch, device, dataloader_idx)) for micro_batch in batch]

    def _convert(self, batch: Any) -> Any:
        # Chunks convert at their own door; a plain module has none.
        return batch if is_chunked(self.lightning_module) else self._precision.convert_input(batch)

    # ---------------------------------------------------------------- steps

    @override
    def training_step(self, batch: list[Any], batch_idx: int, *args: Any) -> dict[str, Tensor]:
        module = self.lightning_module
        assert module is not None and self._schedule is not None and self._reducer is not None
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.clear_gradients()
        samples = num_samples(batch[0]) * len(batch)
        with one_log_per_step(module, samples):
            metrics = self._schedule.run(
                batch, self._chunk_step("training_step", batch_idx), self._loss_function(), forward_only=False
            )
        reduced = self._reducer.reduce(metrics)
        loss = reduced.pop("loss").mean
        if reduced:
            module.log_dict({name: value.mean for name, value in reduced.items()}, batch_size=1)
        self.consumed_samples += samples * self.sizes.data_parallel_size
        return {"loss": loss}

    def _chunk_step(self, method: str, *args: Any) -> Callable[[Any, Any], Any]:
        module = self.lightning_module
        assert module is not None
        if not is_chunked(module):
            return lambda batch, chunk: chunk(batch, *args)

        def step(batch: Any, chunk: nn.Module) -> Any:
            self._activate(chunk)
            return getattr(module, method)(batch, *args)

        return step

    def run_chunks(
        self, batch: Any, step: Callable[[Any], Any], loss_function: Callable[[Any, Any], Any]
    ) -> StepMetrics | None:
        """Forward of one micro batch through the pipeline, for generation and the like. Collective over the pipeline.

        Args:
            batch: The micro batch.
            step: Called with it on every stage while the stage's chunk is active; returns the chunk's output.
            loss_function: Called with (output, batch) on the last stage; returns (loss_sum, num_tokens, metrics).
        """
        from lt_parallel.strategies.data_parallel import whole_parameters

        assert self._schedule is not None

        def chunk_step(batch: Any, chunk: nn.Module) -> Any:
            self._activate(chunk)
            return step(batch)

        with whole_parameters(self._wrapped):
            return self._schedule.run([batch], chunk_step, loss_function, forward_only=True)

    def _activate(self, chunk: nn.Module) -> None:
        # Past nn.Module's registration: the chunk is a child of the module already, in `model_chunks`.
        assert self.lightning_module is not None
        self.lightning_module.__dict__["active_chunk"] = chunk

    def _loss_function(self) -> Callable[[Any, Any], Any]:
        module = self.lightning_module
        if is_chunked(module):
            return module.loss_function
        return lambda triple, batch: triple

    @property
    def last_lr(self) -> float | None:
        """Learning rate of the last step (the first parameter group's)."""
        return self._last_lr

    _last_lr: float | None = None

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._last_lr = float(optimizer.param_groups[0]["lr"])
        return super().optimizer_step(optimizer, *args, **kwargs)

    @property
    def _optimizer(self) -> MegatronOptimizer:
        optimizer: Any = self.optimizers[0]
        return optimizer

    @override
    def validation_step(self, batch: list[Any], batch_idx: int, *args: Any) -> Any:
        return self._evaluation_step("validation_step", batch, batch_idx, *args)

    @override
    def test_step(self, batch: list[Any], batch_idx: int, *args: Any) -> Any:
        return self._evaluation_step("test_step", batch, batch_idx, *args)

    def _evaluation_step(self, method: str, batch: list[Any], *args: Any) -> Any:
        from lt_parallel.strategies.data_parallel import whole_parameters

        module = self.lightning_module
        assert module is not None and self._schedule is not None and self._reducer is not None
        with whole_parameters(self._wrapped):
            if not is_chunked(module):
                return self._evaluate_plain(module, getattr(module, method), batch, args)
            metrics: StepMetrics | None
            metrics = self._schedule.run(
                batch, self._chunk_step(method, *args), self._loss_function(), forward_only=True
            )
        reduced = self._reducer.reduce(metrics)
        for name, value in reduced.items():
            if name != "loss":
                # Weighted, so that the epoch's mean is over tokens; equal on every rank, so the sync changes nothing.
                module.log(name, value.mean, batch_size=int(value.weight), sync_dist=True)
        return {"loss": reduced["loss"].mean} if reduced else None

    @staticmethod
    def _evaluate_plain(module: L.LightningModule, step: Callable[..., Any], batch: list[Any], args: Any) -> Any:
        output = None
        for micro_batch in batch:
            with logs_weighted_by(module, num_samples(micro_batch)):
                output = step(micro_batch, *args)
        return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        from lt_parallel.strategies.data_parallel import whole_parameters

        module = self.lightning_module
        assert module is not None
        with whole_parameters(self._wrapped):
            return module.predict_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the hooks around backward; the schedule did backward itself."""
        module = self.lightning_module
        assert module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        result: Tensor = self.precision_plugin.post_backward(closure_loss, module)
        return result

    # ---------------------------------------------------------------- collectives

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over all ranks; model-parallel ranks hold equal values, so a mean over all is the data-parallel mean."""
        if not isinstance(tensor, Tensor) or not torch.distributed.is_initialized():
            return tensor
        group = group or torch.distributed.group.WORLD
        result = tensor.clone()
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = torch.distributed.ReduceOp.SUM if mean or isinstance(reduce_op, str) else reduce_op
        torch.distributed.all_reduce(result, op=op, group=group)
        return result / torch.distributed.get_world_size(group) if mean else result

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

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Megatron Core's sharded tensors of this rank's chunks."""
        from lt_parallel.strategies.sharded_state import model_sharded_state

        return model_sharded_state(self._wrapped, self.groups)

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Megatron Core's sharded optimizer state of this rank."""
        from lt_parallel.strategies.sharded_state import optimizer_sharded_state

        return optimizer_sharded_state(self._optimizer.core, self._wrapped, self.groups, is_loading=False)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        from lt_parallel.strategies.data_parallel import whole_parameters
        from lt_parallel.strategies.sharded_state import rng_sharded_state

        checkpoint["consumed_samples"] = self.consumed_samples
        checkpoint["parallel_sizes"] = asdict(self.sizes)
        checkpoint["rng_state"] = rng_sharded_state(self.sizes, self.global_rank)
        with whole_parameters(self._wrapped):
            self.checkpoint_io.save_checkpoint(checkpoint, self.broadcast(str(filepath)), storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        from lt_parallel.strategies.sharded_state import load_template

        assert self.lightning_module is not None
        io = self.checkpoint_io
        assert isinstance(io, MegatronCheckpointIO)
        checkpoint = io.load_checkpoint(checkpoint_path)
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        template = load_template(
            self._wrapped,
            self._optimizer.core if fitting and "lr_schedulers" in checkpoint else None,
            self.groups,
            self.sizes if checkpoint["parallel_sizes"] == asdict(self.sizes) else None,
            self.global_rank,
        )
        checkpoint.update(io.load_sharded(checkpoint_path, template))
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        from lt_parallel.strategies.sharded_state import load_model

        load_model(self._wrapped, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        from lt_parallel.strategies.sharded_state import load_optimizer, load_rng

        load_optimizer(self._optimizer.core, checkpoint["optimizer_states"][0])
        self.consumed_samples = checkpoint["consumed_samples"]
        if "rng_state" in checkpoint:
            load_rng(checkpoint["rng_state"])

    # ---------------------------------------------------------------- the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks, which may be waiting for this one."""
        if self._failure_watch is not None:
            self._failure_watch.report(exception)

    @override
    def teardown(self) -> None:
        """Ends what runs in the background. Groups and wrapped chunks stay: a script may evaluate or save after `fit`."""
        if self._failure_watch is not None:
            self._failure_watch.stop()
        self.precision_plugin.teardown()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
