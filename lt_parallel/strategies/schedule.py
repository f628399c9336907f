"""Running one global step through Megatron Core's forward-backward schedules.

The schedules call back with a model chunk; here the module's `training_step` runs on that chunk, and on the last stage
its `loss_function`. Nothing of the loss is read on the host while the schedule runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt_parallel.strategies.step_metrics import StepMetrics

if TYPE_CHECKING:
    from lt_parallel.strategies.plain_module import LossTriple

#: (batch, chunk) -> output of the chunk; on the last stage the loss function is called with that output.
ChunkStep = Callable[[Any, Any], Any]
LossFunction = Callable[[Any, Any], "LossTriple"]


class StepSchedule:
    """Forward (and backward) of a list of micro batches over this rank's chunks.

    Args:
        wrapped: This rank's wrapped chunks, in virtual pipeline order.
        config: The Megatron config that the chunks share.
        groups: The `ProcessGroupCollection`.
        micro_batch_shape: (seq_length, micro_batch_size) of one micro batch, which fixes the shape that pipeline stages
            exchange. None when there is no pipeline.
        device: Where the metrics are summed.
    """

    def __init__(
        self,
        wrapped: Sequence[Any],
        config: Any,
        groups: Any,
        micro_batch_shape: Callable[[Any], tuple[int, int]] | None,
        device: torch.device,
    ) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        self._wrapped = list(wrapped)
        self._groups = groups
        self._shape_of = micro_batch_shape
        self._device = device
        pp_size = groups.pp.size()
        virtual_size = len(wrapped) if len(wrapped) > 1 else None
        self._forward_backward = get_forward_backward_func(pp_size=pp_size, vp_size=virtual_size)
        self._p2p = P2PCommunicator(pp_group=groups.pp, config=config)
        # The interleaved schedule works on whole rounds of micro batches, one round per pipeline rank.
        self._round = pp_size if virtual_size is not None else 1

    @property
    def computes_loss(self) -> bool:
        """Whether this rank is on the last pipeline stage."""
        return bool(self._groups.pp.rank() == self._groups.pp.size() - 1)

    def run(
        self,
        batches: Sequence[Any],
        chunk_step: ChunkStep,
        loss_function: LossFunction,
        *,
        forward_only: bool,
        num_counted: int | None = None,
    ) -> StepMetrics | None:
        """Runs one step. Collective over the pipeline; with a backward also over the data-parallel ranks.

        Args:
            batches: This data-parallel rank's micro batches.
            chunk_step: Called with (batch, chunk) on every stage.
            loss_function: Called with (output, batch) on the last stage.
            forward_only: No backward (validation, test). Micro batches may then differ in shape, and there may be none.
            num_counted: Micro batches whose loss counts; those behind them only run, as other ranks run as many.

        Returns:
            The step's sums on the last stage, None on the others.
        """
        metrics = StepMetrics(self._device)
        if not forward_only:
            self._run_equal(list(batches), chunk_step, loss_function, metrics, forward_only=False)
        else:
            left = len(batches) if num_counted is None else num_counted
            for _, group in groupby(batches, key=self._shape):
                equal = list(group)
                counted = min(left, len(equal))
                self._run_equal(equal, chunk_step, loss_function, metrics, forward_only=True, num_counted=counted)
                left -= counted
        return metrics if self.computes_loss else None

    def _shape(self, batch: Any) -> tuple[int, int]:
        return (1, 1) if self._shape_of is None else self._shape_of(batch)

    def _run_equal(
        self,
        batches: list[Any],
        chunk_step: ChunkStep,
        loss_function: LossFunction,
        metrics: StepMetrics,
        *,
        forward_only: bool,
        num_counted: int | None = None,
    ) -> None:
        seq_length, micro_batch_size = self._shape(batches[0])
        num_real = len(batches) if num_counted is None else num_counted
        if forward_only:  # fill the last round with repeats, which aren't counted
            batches = batches + [batches[-1]] * (-len(batches) % self._round)

        def measure(index: int, batch: Any, output: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
            if index >= num_real:
                return torch.zeros(()), torch.zeros((), dtype=torch.int), {}
            loss_sum, num_tokens, values = loss_function(output, batch)
            metrics.add(loss_sum, num_tokens, values)
            return loss_sum, _whole(num_tokens), {}

        def forward_step(
            indexed: Iterator[tuple[int, Any]], chunk: Any, return_schedule_plan: bool = False
        ) -> tuple[Any, Callable[[Any], Any]]:
            index, batch = next(indexed)
            loss = partial(measure, index, batch)
            return (_plan(chunk_step, batch, chunk) if return_schedule_plan else chunk_step(batch, chunk)), loss

        iterators = [iter(enumerate(batches)) for _ in self._wrapped]
        self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._wrapped if len(self._wrapped) > 1 else self._wrapped[0],
            num_microbatches=len(batches),
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self._groups,
        )


def _plan(chunk_step: ChunkStep, batch: Any, chunk: Any) -> Any:
    """What Megatron Core's combined schedule is to run, instead of an output."""
    from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan

    from lt_parallel.strategies.schedule_plan import ChunkPlanner

    plan = chunk_step(batch, ChunkPlanner(chunk))
    if not isinstance(plan, AbstractSchedulePlan):
        raise ValueError(
            "with CommunicationOverlap(moe_expert_parallel_comm=True) training_step must return what the active chunk "
            f"returned, as it is (`return self(batch)`), and returned {type(plan).__name__}; what depends on the "
            "output belongs into loss_function"
        )
    return plan


def _whole(num_tokens: Tensor) -> Tensor:
    """The count as Megatron Core takes it; on a GPU, where looking would make it wait, a fraction is cut off."""
    if num_tokens.device.type == "cpu" and num_tokens.is_floating_point() and num_tokens != num_tokens.round():
        raise ValueError(
            f"num_tokens={float(num_tokens):g} must be a whole number, as gradients are divided by it; let loss_mask "
            "hold zeros and ones, and apply weights to the loss itself"
        )
    return num_tokens.to(torch.int)
