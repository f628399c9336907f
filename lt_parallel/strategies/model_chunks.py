"""What a model must offer to be cut into chunks, and cutting it.

The strategy knows chunks, never a model class: anything with this interface trains under every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from torch import Tensor, nn

from lt_parallel.strategies.step_metrics import MetricValue

if TYPE_CHECKING:
    from lt_parallel.settings import Settings
    from lt_parallel.topology import ParallelSizes


class ChunkedModule(Protocol):
    """A LightningModule whose model is cut over pipeline stages and tensor-parallel ranks."""

    #: This rank's chunks; set in `configure_model`.
    model_chunks: nn.ModuleList | None
    #: The chunk that runs now, wrapped; set by the strategy before each `training_step`.
    active_chunk: nn.Module | None

    def contribute(self, settings: Settings) -> None:
        """Adds the model's own config fields and checks them."""

    def config_class(self) -> type:
        """Megatron Core's config class for this model (TransformerConfig or a subclass)."""

    def build_chunk(
        self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None, groups: Any
    ) -> nn.Module:
        """Builds one chunk.

        Args:
            config: Megatron Core's config, complete.
            pre_process: Whether the chunk begins with the embedding.
            post_process: Whether it ends with the output layer.
            vp_stage: Virtual stage, None without interleaving.
            groups: The `ProcessGroupCollection`.
        """

    def initialize_chunks(self, seed: int) -> None:
        """Gives all parameters their first values, the same ones at any layout."""

    def micro_batch_shape(self, batch: Any) -> tuple[int, int]:
        """(seq_length, micro_batch_size) of a micro batch, before context or sequence parallelism cut it."""

    def begin_step(self, micro_batches: Sequence[Any]) -> None:
        """Called on every rank with a training step's micro batches, before the first of them runs."""

    def end_step(self, num_microbatches: int) -> Mapping[str, Tensor]:
        """Called on every rank after a training step's micro batches.

        Args:
            num_microbatches: How many this rank has run.

        Returns:
            What the step measured besides what `loss_function` returned, by name; equal on every rank.
        """

    def pad_micro_batch(self, batch: Any, num_samples: int) -> Any:
        """A micro batch filled up to `num_samples` with samples that count for nothing.

        Called in evaluation where ranks share experts and the last micro batches differ in size.
        """

    def loss_function(self, output: Any, batch: Any) -> tuple[Tensor, Tensor, Mapping[str, MetricValue]]:
        """(loss_sum, num_tokens, metrics) of the last chunk's output for one micro batch."""


def is_chunked(module: object) -> TypeGuard[ChunkedModule]:
    """Whether a LightningModule is made of chunks; otherwise it's a plain one."""
    return all(hasattr(type(module), name) for name in ("build_chunk", "loss_function", "micro_batch_shape"))


def build_chunks(module: ChunkedModule, config: Any, sizes: ParallelSizes, groups: Any) -> list[nn.Module]:
    """Builds this rank's chunks in virtual pipeline order, their parameters not yet initialised.

    Args:
        module: The model.
        config: Megatron Core's config.
        sizes: The parallel sizes.
        groups: The `ProcessGroupCollection`.
    """
    pp_rank, pp_size = groups.pp.rank(), groups.pp.size()
    count = sizes.num_model_chunks
    return [
        module.build_chunk(
            config,
            pre_process=pp_rank == 0 and index == 0,
            post_process=pp_rank == pp_size - 1 and index == count - 1,
            vp_stage=index if count > 1 else None,
            groups=groups,
        )
        for index in range(count)
    ]
