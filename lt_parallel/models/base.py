"""Base class for models that are cut into Megatron Core chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from torch import Tensor, nn

from lt_parallel.strategies.megatron import MegatronParallelStrategy

if TYPE_CHECKING:
    from lt_parallel.metrics.flops import ModelFlops
    from lt_parallel.settings import Settings
    from lt_parallel.strategies.step_metrics import MetricValue


class MegatronLightningModule(L.LightningModule, ABC):
    """A LightningModule whose model is a list of Megatron Core chunks (`lt_parallel.strategies.ChunkedModule`).

    A subclass says how one chunk is built, what `training_step` feeds to the active chunk, and how the last chunk's
    output becomes a loss. Everything else, under any layout, is the strategy's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model_chunks: nn.ModuleList | None = None
        self.active_chunk: nn.Module | None = None
        self._built_for: dict[str, Any] = {}

    @abstractmethod
    def contribute(self, settings: Settings) -> None:
        """Adds the model's fields of Megatron Core's config, and checks them against the sizes."""

    @abstractmethod
    def build_chunk(
        self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None, groups: Any
    ) -> nn.Module:
        """Builds one chunk, see `ChunkedModule.build_chunk`."""

    @abstractmethod
    def initialize_chunks(self, seed: int) -> None:
        """Gives all parameters their first values, the same ones at any layout."""

    @abstractmethod
    def micro_batch_shape(self, batch: Any) -> tuple[int, int]:
        """(seq_length, micro_batch_size) of a micro batch."""

    @abstractmethod
    def loss_function(self, output: Tensor, batch: Any) -> tuple[Tensor, Tensor, Mapping[str, MetricValue]]:
        """Last stage only: (loss_sum, num_tokens, metrics) of a micro batch."""

    def begin_step(self, micro_batches: Sequence[Any]) -> None:
        """See `ChunkedModule.begin_step`."""

    def end_step(self, num_microbatches: int) -> Mapping[str, Tensor]:
        """See `ChunkedModule.end_step`."""
        return {}

    def pad_micro_batch(self, batch: Any, num_samples: int) -> Any:
        """See `ChunkedModule.pad_micro_batch`.

        Raises:
            ValueError: The model doesn't say how.
        """
        raise ValueError(
            f"data-parallel ranks that share experts evaluate micro batches of {num_samples} samples together, and one "
            f"has fewer; write {type(self).__name__}.pad_micro_batch(batch, num_samples), or let the number of samples "
            "be a multiple of the micro batch size times the data-parallel size"
        )

    def model_flops(self) -> ModelFlops | None:
        """FLOPs of one sequence, for `ThroughputMonitor`; None where nobody has counted them.

        Raises:
            ValueError: The configuration has something that isn't counted.
        """
        return None

    def config_class(self) -> type:
        """Megatron Core's TransformerConfig; models with other fields override it."""
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig

    @property
    def megatron(self) -> MegatronParallelStrategy:
        """The strategy of the attached Trainer.

        Raises:
            TypeError: The Trainer has another strategy.
        """
        strategy = self.trainer.strategy
        if not isinstance(strategy, MegatronParallelStrategy):
            raise TypeError(
                f"{type(self).__name__} is made of Megatron Core chunks and needs "
                f"`Trainer(strategy=MegatronParallelStrategy(...))`; this Trainer has {type(strategy).__name__}"
            )
        return strategy

    def configure_model(self) -> None:
        """Builds this rank's chunks; Lightning calls it before each run, only the first one builds."""
        strategy = self.megatron
        fields = strategy.settings.fields("model")
        if self.model_chunks is None:
            self.model_chunks = strategy.build_chunks(self)
            self.initialize_chunks(strategy.seed)
            self._built_for = fields
            return
        before = self._built_for
        changed = sorted(name for name in {*fields, *before} if fields.get(name) != before.get(name))
        if changed:
            was, now = (", ".join(f"{name}={given.get(name)!r}" for name in changed) for given in (before, fields))
            raise ValueError(
                f"this {type(self).__name__} was built with {was} and can't go on with {now}; make a new module and "
                "load the weights from a checkpoint"
            )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Runs the active chunk on one micro batch; called on every stage."""
        return self(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """As `training_step`."""
        return self(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """As `training_step`."""
        return self(batch)
