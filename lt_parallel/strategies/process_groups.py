"""Making and ending the process groups: the only module that touches Megatron Core's `parallel_state` globals.

Everything else gets the groups as a `ProcessGroupCollection` argument. Megatron Core's own modules still fall back on
the globals in places (embedding groups, RNG, optimizer), so they are initialised too, by Megatron Core itself.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

    from lt_parallel.topology import ParallelSizes


#: The groups that exist, and what they were made for.
_existing: tuple[tuple[Any, ...], Any] | None = None


def init_default_group(
    environment: ClusterEnvironment, world_size: int, device: torch.device, timeout: timedelta
) -> None:
    """Makes torch's default process group, unless there is one.

    Args:
        environment: Says the rank and where the ranks meet.
        world_size: Number of ranks.
        device: This rank's device; decides the backend (nccl on CUDA, gloo on CPU).
        timeout: After this long a collective that doesn't complete ends the rank.

    Raises:
        RuntimeError: There is a default group already, of another size.
    """
    if torch.distributed.is_initialized():
        found = torch.distributed.get_world_size()
        if found != world_size:
            raise RuntimeError(
                f"torch.distributed is already initialised with world_size={found}, but this Trainer has "
                f"{world_size} devices in all; call torch.distributed.destroy_process_group() between the two"
            )
        return
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    torch.distributed.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        rank=environment.global_rank(),
        world_size=world_size,
        timeout=timeout,
        **options,
    )


def init_model_parallel(
    sizes: ParallelSizes,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    embedding_pp_ranks: list[int] | None = None,
    *,
    timeout: timedelta,
) -> Any:
    """Makes every Megatron Core group and returns them.

    They live as long as the process: chunks refer to them, and a script may fit, test and save in turn. Groups for
    other sizes replace them.

    Args:
        sizes: The parallel sizes; their world size is the default group's.
        hierarchical_context_parallel_sizes: Of both levels, for cp_comm_type="a2a+p2p".
        embedding_pp_ranks: Pipeline ranks that hold the word embedding's weight; None: the first and the last.
        timeout: For the groups' collectives.

    Returns:
        Megatron Core's `ProcessGroupCollection`, with every group it defines.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    global _existing
    made_for = (sizes, hierarchical_context_parallel_sizes, embedding_pp_ranks)
    if parallel_state.model_parallel_is_initialized():
        if _existing is not None and _existing[0] == made_for:
            return _existing[1]
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
        context_parallel_size=sizes.context_parallel_size,
        hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
        get_embedding_ranks=embedding_pp_ranks and (lambda ranks: [ranks[place] for place in embedding_pp_ranks]),
        create_gloo_process_groups=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    _existing = (made_for, groups)
    return groups


def seed_model_parallel(seed: int, pp_rank: int) -> None:
    """Seeds Megatron Core's RNG tracker: equal outside, different inside the tensor-parallel regions.

    Args:
        seed: The run's seed (`seed_everything`).
        pp_rank: Pipeline rank; stages draw different dropout masks.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Offset per stage as Megatron's own trainer does it.
    model_parallel_cuda_manual_seed(seed + 100 * pp_rank, force_reset_rng=True)
