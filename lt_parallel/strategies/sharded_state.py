"""What a checkpoint holds of a rank, as Megatron Core's sharded tensors: each says its global name, shape and place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lt_parallel.plugins.checkpoint_io import TORCH_DIST
from lt_parallel.strategies.fully_sharded import FSDP_STRATEGIES
from lt_parallel.strategies.optimizer import create_adam_states

if TYPE_CHECKING:
    from lt_parallel.topology import ParallelSizes

#: Global names of optimizer states. Experts' parameters have an optimizer of their own, and then both are numbered.
_OF_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


class ShardedState:
    """Parameters, optimizer states and generators of a rank, to write and to read.

    Args:
        wrapped: This rank's chunks, wrapped or not.
        groups: The `ProcessGroupCollection`.
        sizes: The parallel sizes.
        rank: Global rank.
    """

    #: Of the files, see `MegatronCheckpointIO`.
    format: ClassVar[str] = TORCH_DIST

    def __init__(self, wrapped: Sequence[Any], groups: Any, sizes: ParallelSizes, rank: int) -> None:
        self._wrapped, self._groups, self._sizes, self._rank = wrapped, groups, sizes, rank

    def model(self) -> dict[str, Any]:
        """Parameters and persistent buffers of this rank's chunks: `model`, or `model0`, `model1`, ..."""
        return {
            name: _unwrapped(chunk).sharded_state_dict(metadata=self._metadata) for name, chunk in self._named_chunks()
        }

    def optimizer(self, core: Any, *, is_loading: bool = False) -> dict[str, Any]:
        """Optimizer states of this rank's shard.

        Args:
            core: Megatron Core's optimizer.
            is_loading: Whether it is a template to load into.
        """
        if is_loading:
            for part in core.chained_optimizers:
                create_adam_states(part.optimizer)
        state: dict[str, Any] = core.sharded_state_dict(self.model(), is_loading=is_loading, metadata=self._metadata)
        return state

    def rng(self) -> Any:
        """This rank's random generators; they mean something for the same parallel sizes only."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        return ShardedObject("rng_state", generator_states(), (self._sizes.world_size,), (self._rank,), replica_id=0)

    def template(self, core: Any | None, *, with_rng: bool) -> dict[str, Any]:
        """What to read from a checkpoint.

        Args:
            core: Megatron Core's optimizer, None to read weights only.
            with_rng: Whether the generators are read, which needs the optimizer too.
        """
        template: dict[str, Any] = {"state_dict": self.model()}
        if core is not None:
            template["optimizer_states"] = [self.optimizer(core, is_loading=True)]
            if with_rng:
                template["rng_state"] = self.rng()
        return template

    def model_shapes(self, state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Global shapes of what `model()` gave on this rank, by global name."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        shapes = {}
        for value in nested_values(dict(state)):
            built = [value.build()] if isinstance(value, ShardedTensorFactory) else [value]
            for piece in nested_values(built):
                if isinstance(piece, ShardedTensor):
                    shapes[piece.key] = tuple(piece.global_shape)
        return shapes

    def load_model(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Copies what was read into the chunks."""
        for name, chunk in self._named_chunks():
            _unwrapped(chunk).load_state_dict(state[name], strict=strict)

    def load_optimizer(self, core: Any, state: Mapping[str, Any]) -> None:
        """Puts optimizer states back, each parameter with its own step count.

        Without Apex or TransformerEngine, Megatron Core either gives all parameters one step tensor, which torch's Adam
        then counts up once per parameter, or leaves it as it was before the load.

        Args:
            core: Megatron Core's optimizer.
            state: What was read into `optimizer(..., is_loading=True)`.
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

    def load_rng(self, state: Mapping[str, Any]) -> None:
        """Puts the generators back."""
        restore_generators(state)

    @property
    def _metadata(self) -> dict[str, Any]:
        # The distributed optimizer's buffers as they lie: written and read without any gathering.
        return {"distrib_optim_sharding_type": "dp_reshardable", "dp_cp_group": self._groups.dp_cp}

    def _named_chunks(self) -> list[tuple[str, Any]]:
        if len(self._wrapped) == 1:
            return [("model", self._wrapped[0])]
        return [(f"model{index}", chunk) for index, chunk in enumerate(self._wrapped)]


def _unwrapped(wrapped: Any) -> Any:
    """The chunk inside Megatron Core's DDP, when it is in one."""
    return wrapped.module if hasattr(wrapped, "ddp_config") else wrapped


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


def generator_states() -> dict[str, Any]:
    """States of this rank's random generators: torch's own and Megatron Core's tracked ones."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    state = {"cpu": torch.get_rng_state(), "tracked": dict(get_cuda_rng_tracker().get_states())}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: Mapping[str, Any]) -> None:
    """Puts back what `generator_states` gave."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["tracked"]))


def require_same_model(
    saved: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], *, strict: bool
) -> None:
    """Compares a checkpoint's tensors with the model's. Collective over all ranks.

    Args:
        saved: Global shapes of what the checkpoint holds, by global name.
        own: This rank's `model_shapes`.
        strict: Whether neither may have parameters that the other lacks.

    Raises:
        ValueError: They differ; names the first few differences.
    """
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    model: dict[str, tuple[int, ...]] = {name: shape for each in every for name, shape in each.items()}
    of_model = {name for name in saved if not _OF_OPTIMIZER.match(name)}
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
    differing = {} if sharding in FSDP_STRATEGIES else {"data_parallel_sharding_strategy": (saved_sharding, sharding)}
    if sharding != "no_shard":
        # As the buffers lie: they depend on everything but the data-parallel size.
        names = [name for name in saved_sizes if name.endswith("_parallel_size")]
        differing |= {name: (saved_sizes[name], getattr(sizes, name)) for name in names}
    wrong = [f"{name}={saved!r}, not {now!r}" for name, (saved, now) in differing.items() if saved != now]
    if wrong:
        raise ValueError(
            f"the checkpoint's optimizer states were saved with {', '.join(wrong)}; resume with the same, or start "
            "from the weights alone (Trainer.save_checkpoint(weights_only=True) writes such a checkpoint)"
        )


def require_same_format(checkpoint: Mapping[str, Any], expected: str, sharding: str) -> None:
    """Checks that tensors were written in the form in which this run reads them.

    Args:
        checkpoint: The trainer's part of a checkpoint.
        expected: The run's form.
        sharding: Its `data_parallel_sharding_strategy`.

    Raises:
        ValueError: They weren't.
    """
    if checkpoint.get("sharded_format", TORCH_DIST) != expected:
        saved = checkpoint["data_parallel_sharding_strategy"]
        fitting = FSDP_STRATEGIES if saved in FSDP_STRATEGIES else ("no_shard", "optim")
        raise ValueError(
            f"the checkpoint was saved with data_parallel_sharding_strategy={saved!r}, whose files {sharding!r} can't "
            f"read; use {' or '.join(map(repr, fitting))}"
        )
