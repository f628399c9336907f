"""One global step, training or evaluation, of a module made of chunks or of a plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lt_parallel.strategies.data_parallel import copy_buffers_from_first_rank, whole_parameters
from lt_parallel.strategies.fully_sharded import as_many_everywhere, evaluated_by_all, is_fully_sharded
from lt_parallel.strategies.log_capture import logs_weighted_by, one_log_per_step
from lt_parallel.strategies.micro_batches import num_samples
from lt_parallel.strategies.model_chunks import is_chunked
from lt_parallel.strategies.schedule import StepSchedule
from lt_parallel.strategies.step_checks import UnusedParameters
from lt_parallel.strategies.step_metrics import StepMetrics, StepMetricsReducer

if TYPE_CHECKING:
    import lightning.pytorch as L


class GlobalStep:
    """Runs lists of micro batches through this rank's chunks, and makes what they measured equal on every rank.

    Args:
        module: The user's module; its step methods and `loss_function` are called back.
        wrapped: This rank's chunks, wrapped for data parallelism when training.
        config: The Megatron config that they share.
        groups: The `ProcessGroupCollection`.
        device: This rank's device.
    """

    def __init__(
        self, module: L.LightningModule, wrapped: Sequence[Any], config: Any, groups: Any, device: torch.device
    ) -> None:
        self._module, self._wrapped, self._groups = module, wrapped, groups
        self._device = device
        self._chunked = is_chunked(module)
        # Data-parallel ranks that exchange parameters or tokens inside the layers must run them equally often.
        self._share_experts = groups.ep.size() > 1
        self._together = any(is_fully_sharded(chunk) for chunk in wrapped) or self._share_experts
        shape = module.micro_batch_shape if is_chunked(module) and groups.pp.size() > 1 else None
        self._schedule = StepSchedule(wrapped, config, groups, shape, device)
        self._reducer = StepMetricsReducer(groups.dp_cp, groups.pp, device)
        self._unused = UnusedParameters(wrapped, device)
        #: What the last training step's loss function measured, by name, beside the loss itself; equal on every rank.
        self.measured: dict[str, Tensor] = {}
        self._loss_function = module.loss_function if is_chunked(module) else _triple_as_it_is

    def train(self, batch: list[Any], batch_idx: int) -> Tensor:
        """Forward and backward; collective over all ranks.

        Args:
            batch: This rank's micro batches.
            batch_idx: Index of the global step.

        Returns:
            The loss per token over the global batch, a scalar equal on every rank.
        """
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        if is_chunked(self._module):
            self._module.begin_step(batch)
        with self._unused.watched(), one_log_per_step(self._module, num_samples(batch[0]) * len(batch)):
            metrics = self._schedule.run(
                batch, self._chunk_step("training_step", batch_idx), self._loss_function, forward_only=False
            )
        if not self._chunked:  # evaluation and checkpoints must see one model, as after every step of torch's DDP
            copy_buffers_from_first_rank(self._module, self._groups)
        self.measured = {name: value.mean for name, value in self._reducer.reduce(metrics).items()}
        if is_chunked(self._module):
            self.measured.update(self._module.end_step(len(batch)))
        return self.measured.pop("loss")

    def evaluate(self, method: str, batch: list[Any], *args: Any) -> Any:
        """Forward only; collective over all ranks for chunks, local for a plain module.

        Args:
            method: "validation_step" or "test_step".
            batch: This rank's micro batches; may be empty.
            args: Lightning's further arguments: batch_idx and perhaps dataloader_idx.

        Returns:
            {"loss": loss per token} of chunks; what a plain module returned for the last micro batch.
        """
        with whole_parameters(self._wrapped):
            if not self._chunked:
                return self._evaluate_plain(method, batch, args)
            num_counted = len(batch)
            if self._together:
                batch = as_many_everywhere(batch, self._groups.dp_cp, self._device)
            if self._share_experts:
                batch = self._as_large_everywhere(batch)
            step = self._chunk_step(method, *args)
            metrics = self._schedule.run(batch, step, self._loss_function, forward_only=True, num_counted=num_counted)
        reduced = self._reducer.reduce(metrics)
        for name, value in reduced.items():
            if name != "loss":
                # Weighted, so that the epoch's mean is over tokens; equal on every rank, so the sync changes nothing.
                self._module.log(name, value.mean, batch_size=int(value.weight), sync_dist=True)
        return {"loss": reduced["loss"].mean} if reduced else None

    def forward_chunks(
        self, batch: Any, step: Callable[[Any], Any], loss_function: Callable[[Any, Any], Any]
    ) -> StepMetrics | None:
        """Forward of one micro batch, for generation and the like. Collective over the pipeline.

        Args:
            batch: The micro batch.
            step: Called with it on every stage while the stage's chunk is active; returns the chunk's output.
            loss_function: Called with (output, batch) on the last stage; returns (loss_sum, num_tokens, metrics).
        """

        def chunk_step(batch: Any, chunk: nn.Module) -> Any:
            self._activate(chunk)
            return step(batch)

        with whole_parameters(self._wrapped):
            return self._schedule.run([batch], chunk_step, loss_function, forward_only=True)

    def _as_large_everywhere(self, batch: list[Any]) -> list[Any]:
        """Micro batches that hold as many samples on every rank: ranks that share experts exchange equal parts."""
        module, sizes = self._module, [num_samples(each) for each in batch]
        every: list[Any] = [None] * self._groups.dp_cp.size()
        torch.distributed.all_gather_object(every, sizes, group=self._groups.dp_cp)
        if all(each == sizes for each in every):
            return batch
        assert is_chunked(module), "experts are in chunks"
        largest = [max(of_ranks) for of_ranks in zip(*every, strict=True)]
        return [module.pad_micro_batch(each, size) for each, size in zip(batch, largest, strict=True)]

    def _chunk_step(self, method: str, *args: Any) -> Callable[[Any, Any], Any]:
        if not self._chunked:
            return lambda batch, chunk: chunk(method, batch, *args)

        def step(batch: Any, chunk: nn.Module) -> Any:
            self._activate(chunk)
            return getattr(self._module, method)(batch, *args)

        return step

    def _activate(self, chunk: nn.Module) -> None:
        # Past nn.Module's registration: the chunk is a child of the module already, in `model_chunks`.
        self._module.__dict__["active_chunk"] = chunk

    def _evaluate_plain(self, method: str, batch: list[Any], args: Any) -> Any:
        output, chunk = None, self._wrapped[0]
        with evaluated_by_all(chunk, len(batch), self._groups.dp_cp) if self._together else nullcontext():
            for micro_batch in batch:
                with logs_weighted_by(self._module, num_samples(micro_batch)):
                    output = chunk(method, micro_batch, *args)
        return output


def _triple_as_it_is(output: Any, batch: Any) -> Any:
    """A plain module's chunk returns (loss_sum, num_tokens, metrics) itself."""
    return output
