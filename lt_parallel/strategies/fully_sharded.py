"""Megatron-FSDP: gradients and optimizer states, and with `optim_grads_params` the parameters too, cut over the ranks.

Between steps a chunk's parameters are DTensors, of which each rank holds some rows. With `optim_grads_params` a forward
pass works unit by unit (a unit is a layer, say): its parameters are gathered just before it runs and released after it,
gathered again for its backward pass, after which its gradients go to the ranks that own them. So every rank has to run
the units equally often.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import nn
from torch.distributed.tensor import DTensor

from lt_parallel.strategies.model_chunks import is_chunked

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer import TransformerConfig

#: The sharding strategies that Megatron-FSDP does here; Megatron Core's DDP does the others.
FSDP_STRATEGIES = ("optim_grads", "optim_grads_params")


def is_fully_sharded(chunk: object) -> TypeGuard[FullyShardedDataParallel]:
    """Whether a chunk, as it runs, is wrapped in Megatron-FSDP."""
    return bool(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False))


def fully_shard(
    module: LightningModule,
    chunk: nn.Module,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    groups: Any,
) -> FullyShardedDataParallel:
    """Wraps a rank's one chunk in Megatron-FSDP.

    Args:
        module: The user's module, which may say its units.
        chunk: The chunk; equal on all data-parallel ranks.
        config: Its Megatron config.
        ddp_config: Says the strategy and what is overlapped.
        groups: The `ProcessGroupCollection`.

    Raises:
        ValueError: The module's parameters are cut already, or it has no units.
    """
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    if any(isinstance(parameter, DTensor) for parameter in chunk.parameters()):
        raise ValueError(
            f"the parameters of this {type(module).__name__} have been cut over the ranks in another Trainer's run; "
            "make the module anew and load a checkpoint of that run"
        )
    cuts_parameters = ddp_config.data_parallel_sharding_strategy == "optim_grads_params"
    wrapped = FullyShardedDataParallel(
        config=config,
        ddp_config=ddp_config,
        module=chunk,
        fsdp_unit_modules=fsdp_units(module) if cuts_parameters else [],
        pg_collection=groups,
    )
    #: Whether whole parameters come and go with each forward pass.
    wrapped.gathers_in_forward = ddp_config.overlap_param_gather
    if not is_chunked(module):
        _gather_before_step(wrapped)
    return wrapped


def fsdp_units(module: Any) -> list[type[nn.Module]]:
    """Classes of the modules whose parameters are gathered and released together.

    What the module's `fsdp_unit_modules()` returns, where it has that; otherwise the classes that its ModuleLists and
    Sequentials hold, which are the repeated layers of most models.

    Args:
        module: The LightningModule.

    Raises:
        ValueError: There are none, or two modules share a parameter that only one of them would gather.
    """
    if hasattr(module, "fsdp_unit_modules"):
        return list(module.fsdp_unit_modules())
    containers = [each for each in module.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    members = [member for each in containers for member in each]
    units = list({type(member): None for member in members if any(True for _ in member.parameters())})
    name = type(module).__name__
    advice = (
        f"give {name} a method fsdp_unit_modules() that returns the classes of layers whose parameters are used only "
        "by calling them, or use data_parallel_sharding_strategy='optim_grads'"
    )
    if not units:
        raise ValueError(
            "data_parallel_sharding_strategy='optim_grads_params' gathers parameters layer by layer, and "
            f"{name} has no layers in a ModuleList or Sequential; {advice}"
        )
    shared = _shared_parameters(module)
    if shared:
        raise ValueError(
            f"{' and '.join(shared)} are one parameter of {name}, and data_parallel_sharding_strategy="
            f"'optim_grads_params' would release it while one of them still needs it; {advice}"
        )
    return units


def _shared_parameters(module: nn.Module) -> list[str]:
    """Names of the first parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return next((each for each in names.values() if len(each) > 1), [])


def _gather_before_step(chunk: FullyShardedDataParallel) -> None:
    """Gathers what belongs to no unit before a plain module's step, which may use it without calling a module.

    Args:
        chunk: The wrapped chunk.
    """
    buffer = chunk.module.param_and_grad_buffer
    loose = [each for group in buffer.parameter_groups if group.fsdp_unit_id is None for each in group.params]
    if loose:
        chunk.module.module.register_forward_pre_hook(
            lambda *_: chunk.module.all_gather_and_wait_parameters_ready(loose, prefetch=False)
        )


def as_many_everywhere(batches: list[Any], group: Any, device: torch.device) -> list[Any]:
    """Micro batches of one evaluation step, with repeats at the end so that every rank of the group has as many.

    Args:
        batches: This rank's; may be empty.
        group: Data-parallel ranks.
        device: This rank's.
    """
    counts: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(counts, len(batches), group=group)
    if min(counts) == 0:  # a rank has nothing to repeat
        source = counts.index(max(counts))
        parcel = [move_data_to_device(batches[-1], torch.device("cpu")) if group.rank() == source else None]
        torch.distributed.broadcast_object_list(parcel, group=group, group_src=source, device=device)
        batches = batches or [move_data_to_device(parcel[0], device)]
    return batches + batches[-1:] * (max(counts) - len(batches))


@contextmanager
def evaluated_by_all(chunk: FullyShardedDataParallel, num_batches: int, group: Any) -> Iterator[None]:
    """A context for evaluating a plain module, whose steps can't be repeated where ranks have unequally many.

    Where they do, all parameters are whole meanwhile, as no rank may then wait for another's layer.

    Args:
        chunk: The wrapped chunk.
        num_batches: Of this rank.
        group: Data-parallel ranks; collective over them.
    """
    counts: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(counts, num_batches, group=group)
    unequal = len(set(counts)) > 1
    if unequal:
        hold_whole(chunk)
    yield
    if unequal or chunk.gathers_in_forward:
        cut_again(chunk)


def hold_whole(chunk: FullyShardedDataParallel) -> None:
    """Gathers all parameters, to stay until `cut_again`; collective."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import TrainingState

    chunk.start_param_sync(force_sync=True)
    for module in chunk.module.modules():
        module._training_state = TrainingState.PRE_BACKWARD  # its hooks then neither gather ahead nor release
    chunk.ddp_config.overlap_param_gather = False  # nor does Megatron Core's schedule after a forward pass


def cut_again(chunk: FullyShardedDataParallel) -> None:
    """Releases what was gathered, so that the module has its cut parameters; also what is out of date after a load.

    In Megatron-FSDP a whole parameter that isn't gathered has no memory, and reading it ends the process.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import TrainingState

    for module in chunk.module.modules():
        module._training_state = TrainingState.IDLE
    chunk.ddp_config.overlap_param_gather = chunk.gathers_in_forward
    chunk.synchronize_param_gather()
