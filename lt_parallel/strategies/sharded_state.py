"""What a checkpoint holds of a rank, as Megatron Core's sharded tensors: each says its global name, shape and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lt_parallel.strategies.optimizer import create_adam_states

if TYPE_CHECKING:
    from lt_parallel.topology import ParallelSizes


def _metadata(groups: Any) -> dict[str, Any]:
    # The distributed optimizer's buffers as they lie: written and read without any gathering.
    return {"distrib_optim_sharding_type": "dp_reshardable", "dp_cp_group": groups.dp_cp}


def _unwrapped(wrapped: Any) -> Any:
    """The chunk inside Megatron Core's DDP, when it is in one."""
    return wrapped.module if hasattr(wrapped, "ddp_config") else wrapped


def model_sharded_state(wrapped: Sequence[Any], groups: Any) -> dict[str, Any]:
    """Parameters and persistent buffers of this rank's chunks.

    Args:
        wrapped: This rank's chunks, wrapped or not.
        groups: The `ProcessGroupCollection`.

    Returns:
        One entry per chunk, `model` or `model0`, `model1`, ...
    """
    return {
        name: _unwrapped(chunk).sharded_state_dict(metadata=_metadata(groups))
        for name, chunk in zip(_chunk_names(wrapped), wrapped, strict=True)
    }


def _chunk_names(wrapped: Sequence[Any]) -> list[str]:
    return ["model"] if len(wrapped) == 1 else [f"model{index}" for index in range(len(wrapped))]


def optimizer_sharded_state(core: Any, wrapped: Sequence[Any], groups: Any, *, is_loading: bool) -> dict[str, Any]:
    """Optimizer states of this rank's shard.

    Args:
        core: Megatron Core's optimizer.
        wrapped: This rank's wrapped chunks.
        groups: The `ProcessGroupCollection`.
        is_loading: Whether it is a template to load into.
    """
    if is_loading:
        for part in core.chained_optimizers:
            create_adam_states(part.optimizer)
    state: dict[str, Any] = core.sharded_state_dict(
        model_sharded_state(wrapped, groups), is_loading=is_loading, metadata=_metadata(groups)
    )
    return state


def load_optimizer(core: Any, state: Mapping[str, Any]) -> None:
    """Puts optimizer states back, each parameter with its own step count.

    Without Apex or TransformerEngine, Megatron Core either gives all parameters one step tensor, which torch's Adam
    then counts up once per parameter, or leaves it as it was before the load.

    Args:
        core: Megatron Core's optimizer.
        state: What was read into `optimizer_sharded_state(..., is_loading=True)`.
    """
    steps = [_saved_step(part) for part in _part_states(core, state)]
    with torch.no_grad():  # an fp32 shard is a view of its parameter
        core.load_state_dict(state)
    for part, step in zip(core.chained_optimizers, steps, strict=True):
        if step is None:
            continue
        for parameter_state in part.optimizer.state.values():
            if isinstance(parameter_state.get("step"), torch.Tensor):
                parameter_state["step"] = torch.full_like(parameter_state["step"], step)


def _part_states(core: Any, state: Mapping[Any, Any]) -> list[Mapping[str, Any]]:
    """The state of each chained optimizer; Megatron Core leaves out the level when there is one."""
    count = len(core.chained_optimizers)
    return [state] if count == 1 else [state[index] for index in range(count)]


def _saved_step(part: Mapping[str, Any]) -> float | None:
    """Where Megatron Core's optimizers keep the number of steps done; None if torch's Adam isn't the one that steps."""
    inner = part.get("optimizer", part)  # the distributed and the mixed precision optimizer nest torch's state
    step = inner.get("state", {}).get("common_step")
    if step is None:
        step = next((group["step"] for group in inner["param_groups"] if "step" in group), None)
    return None if step is None else float(step)


def rng_sharded_state(sizes: ParallelSizes, rank: int) -> Any:
    """This rank's random generators: torch's own and Megatron Core's tracked ones.

    Args:
        sizes: The parallel sizes; the state is only meaningful for the same ones.
        rank: Global rank.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    state = {"cpu": torch.get_rng_state(), "tracked": dict(get_cuda_rng_tracker().get_states())}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng_state", state, (sizes.world_size,), (rank,), replica_id=0)


def load_rng(state: Mapping[str, Any]) -> None:
    """Puts the generators back."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["tracked"]))


def load_template(
    wrapped: Sequence[Any], core: Any | None, groups: Any, rng_sizes: ParallelSizes | None, rank: int
) -> dict[str, Any]:
    """What to read from a checkpoint.

    Args:
        wrapped: This rank's chunks, wrapped or not.
        core: Megatron Core's optimizer, None to read weights only.
        groups: The `ProcessGroupCollection`.
        rng_sizes: The parallel sizes if the checkpoint was made with the same ones, else None.
        rank: Global rank.
    """
    template: dict[str, Any] = {"state_dict": model_sharded_state(wrapped, groups)}
    if core is not None:
        template["optimizer_states"] = [optimizer_sharded_state(core, wrapped, groups, is_loading=True)]
        if rng_sizes is not None:
            template["rng_state"] = rng_sharded_state(rng_sizes, rank)
    return template


def require_same_model(saved: Mapping[str, tuple[int, ...]], state: Mapping[str, Any], *, strict: bool) -> None:
    """Compares a checkpoint's tensors with the model's. Collective over all ranks.

    Args:
        saved: Global shapes of what the checkpoint holds, by global name.
        state: This rank's `model_sharded_state`.
        strict: Whether neither may have parameters that the other lacks.

    Raises:
        ValueError: They differ; names the first few differences.
    """
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, _global_shapes(state))
    model: dict[str, tuple[int, ...]] = {name: shape for each in every for name, shape in each.items()}
    of_model = {name for name in saved if not name.startswith("optimizer.")}
    differing = [
        f"{name} is {saved[name]} in the checkpoint and {shape} here"
        for name, shape in model.items()
        if saved.get(name, shape) != shape
    ]
    if strict:
        differing += [f"{name} {shape} isn't in the checkpoint" for name, shape in model.items() if name not in saved]
        differing += [f"the checkpoint's {name} {saved[name]} isn't in the model" for name in of_model - model.keys()]
    if differing:
        shown = "; ".join(sorted(differing)[:4])
        more = f"; and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise ValueError(
            f"the checkpoint holds another model than this one: {shown}{more}. Make the module with the arguments "
            "that it was trained with (they are in the checkpoint's hyper-parameters)"
        )


def _global_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    shapes = {}
    for value in nested_values(dict(state)):
        built = [value.build()] if isinstance(value, ShardedTensorFactory) else [value]
        for piece in nested_values(built):
            if isinstance(piece, ShardedTensor):
                shapes[piece.key] = tuple(piece.global_shape)
    return shapes


def require_same_sharding(checkpoint: Mapping[str, Any], sizes: ParallelSizes, sharding: str) -> None:
    """Checks that optimizer states can be read at this layout; weights can at any.

    Args:
        checkpoint: The trainer's part of a checkpoint.
        sizes: The parallel sizes of this run.
        sharding: Its `data_parallel_sharding_strategy`.

    Raises:
        ValueError: They were saved for another one.
    """
    saved_sharding, saved_sizes = checkpoint["data_parallel_sharding_strategy"], checkpoint["parallel_sizes"]
    differing = {"data_parallel_sharding_strategy": (saved_sharding, sharding)}
    if sharding == "optim":
        # As the buffers lie: they depend on everything but the data-parallel size.
        names = [name for name in saved_sizes if name.endswith("_parallel_size")]
        differing |= {name: (saved_sizes[name], getattr(sizes, name)) for name in names}
    wrong = [f"{name}={saved!r}, not {now!r}" for name, (saved, now) in differing.items() if saved != now]
    if wrong:
        raise ValueError(
            f"the checkpoint's optimizer states were saved with {', '.join(wrong)}; resume with the same, or start "
            "from the weights alone (Trainer.save_checkpoint(weights_only=True) writes such a checkpoint)"
        )


def load_model(wrapped: Sequence[Any], state: Mapping[str, Any], *, strict: bool) -> None:
    """Copies what was read into the chunks."""
    for name, chunk in zip(_chunk_names(wrapped), wrapped, strict=True):
        _unwrapped(chunk).load_state_dict(state[name], strict=strict)
