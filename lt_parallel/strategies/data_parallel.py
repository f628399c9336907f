"""Wrapping model chunks for data parallelism, and keeping their parameters whole when they are read outside a step.

`no_shard` and `optim` use Megatron Core's `DistributedDataParallel`: gradients in contiguous buffers, reduced by
all-reduce or reduce-scatter, parameters gathered after (or, with overlap, just before) their use. The strategies that
also cut gradients and parameters are in `fully_sharded.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig


def wrap_chunks(
    chunks: Sequence[nn.Module], config: TransformerConfig, ddp_config: DistributedDataParallelConfig, groups: Any
) -> list[DistributedDataParallel]:
    """Wraps each model chunk of this rank in Megatron Core's DDP.

    Args:
        chunks: This rank's model chunks, in virtual pipeline order.
        config: Their Megatron config.
        ddp_config: Bucketing, overlap and sharding of the reductions.
        groups: The `ProcessGroupCollection`.

    Returns:
        The wrapped chunks. Chunks after the first get one bucket each, as their reductions are off the critical path.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    wrapped = []
    for index, chunk in enumerate(chunks):
        options: dict[str, Any] = {}
        if ddp_config.use_distributed_optimizer:
            options["full_param_layout"] = DistributedOptimizer.compute_full_param_layout(
                [parameter for parameter in chunk.parameters() if parameter.requires_grad],
                ddp_config.bucket_size,
                groups.dp_cp.size(),
                ddp_config,
                expert_data_parallel_world_size=groups.expt_dp.size(),
            )
        wrapped.append(
            DistributedDataParallel(
                config=config,
                ddp_config=ddp_config,
                module=chunk,
                disable_bucketing=index > 0,
                pg_collection=groups,
                **options,
            )
        )
    return wrapped


def copy_from_first_rank(module: nn.Module, groups: Any) -> None:
    """Gives every data-parallel rank the parameters and buffers of the first one.

    Args:
        module: A module that isn't cut.
        groups: The `ProcessGroupCollection`.
    """
    if groups.dp_cp.size() > 1:
        for parameter in module.parameters():
            torch.distributed.broadcast(parameter.data, group=groups.dp_cp, group_src=0)
    copy_buffers_from_first_rank(module, groups)


def copy_buffers_from_first_rank(module: nn.Module, groups: Any) -> None:
    """Gives every data-parallel rank the buffers of the first one, e.g. batch norm's running statistics.

    Args:
        module: A module that isn't cut.
        groups: The `ProcessGroupCollection`.
    """
    if groups.dp_cp.size() == 1:
        return
    for buffer in module.buffers():
        torch.distributed.broadcast(buffer, group=groups.dp_cp, group_src=0)


def connect_schedule(config: TransformerConfig, wrapped: Sequence[DistributedDataParallel]) -> None:
    """Tells the pipeline schedules how to hold back, start and finish the gradient reductions.

    Args:
        config: The config that the schedules read; changed in place.
        wrapped: This rank's wrapped chunks.
    """
    from megatron.core.distributed import finalize_model_grads

    def per_chunk(functions: list[Any]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    ddp_config = wrapped[0].ddp_config
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = per_chunk([chunk.no_sync for chunk in wrapped])
    if ddp_config.overlap_grad_reduce and ddp_config.align_param_gather:
        config.grad_sync_func = per_chunk([chunk.start_grad_sync for chunk in wrapped])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        config.param_sync_func = per_chunk([chunk.start_param_sync for chunk in wrapped])


@contextmanager
def whole_parameters(wrapped: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """A context in which every parameter is up to date and no gather hook fires (evaluation, saving, generation)."""
    overlapped = [chunk for chunk in wrapped if _gathers_in_forward(chunk)]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


def _gathers_in_forward(chunk: nn.Module) -> bool:
    ddp_config = getattr(chunk, "ddp_config", None)
    return bool(
        ddp_config is not None
        and ddp_config.overlap_param_gather
        and getattr(chunk, "remove_forward_pre_hook_handles", None)
    )
