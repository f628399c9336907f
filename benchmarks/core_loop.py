"""A training loop of Megatron Core alone: no Lightning, no strategy. What the Trainer's loop is measured against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

_CPU = torch.device("cpu")


class CoreLoop:
    """One model chunk per rank and everything that trains it.

    Args:
        chunk: This rank's chunk, its weights drawn.
        config: The chunk's Megatron config.
        groups: The `ProcessGroupCollection`.
        optimizer_fields: For Megatron Core's OptimizerConfig.
        ddp_fields: For its DistributedDataParallelConfig.
        schedule_fields: For Megatron Core's OptimizerParamScheduler.
        loader: Yields micro batches, as often as needed.
        num_microbatches: Micro batches per step.
        device: Where the chunk is.
    """

    def __init__(
        self,
        chunk: Any,
        config: Any,
        groups: Any,
        *,
        optimizer_fields: Mapping[str, Any],
        ddp_fields: Mapping[str, Any],
        schedule_fields: Mapping[str, Any],
        loader: DataLoader[Any],
        num_microbatches: int,
        device: torch.device = _CPU,
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        ddp_config = DistributedDataParallelConfig(**ddp_fields)
        self.model = DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(**optimizer_fields), [self.model], use_gloo_process_groups=False, pg_collection=groups
        )
        self.scheduler = OptimizerParamScheduler(self.optimizer, **schedule_fields)
        self.scheduler.step(1)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self._groups = groups
        self._forward_backward = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=None)
        self._p2p = P2PCommunicator(pp_group=groups.pp, config=config)
        self._loader, self._num_microbatches, self._device = loader, num_microbatches, device
        self._batches: Iterator[Any] = iter(loader)
        #: Loss of each step (a tensor, so that nothing waits for the device); only on the last pipeline stage.
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """One global step."""
        batches = [
            {name: value.to(self._device) for name, value in next(self._batches).items()}
            for _ in range(self._num_microbatches)
        ]
        micro_batch_size, seq_length = batches[0]["tokens"].shape
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._forward_backward(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=False,
            p2p_communicator=self._p2p,
            pg_collection=self._groups,
        )
        successful, _, _ = self.optimizer.step()
        if successful:
            self.scheduler.step(1)
        if parts:
            total, count = (sum(part[index] for part in parts) for index in (0, 1))
            self.losses.append((total / count).float())


def _forward_step(batches: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
    batch = next(batches)
    output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.to(torch.int), (total.detach().double(), count.double())
