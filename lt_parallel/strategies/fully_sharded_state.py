"""What a checkpoint holds of a chunk in Megatron-FSDP: DTensors, which `torch.distributed.checkpoint` reads and writes.

Each rank writes the rows that it owns, under the parameter's name in the chunk. They can be read back at another
data-parallel size, and with the other one of the two strategies. Reading goes straight into the live tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, override

import torch
from torch import Tensor

from lt_parallel.plugins.checkpoint_io import FSDP_DTENSOR
from lt_parallel.strategies.fully_sharded import cut_again
from lt_parallel.strategies.optimizer import create_adam_states
from lt_parallel.strategies.sharded_state import ShardedState, generator_states, restore_generators


class FullyShardedState(ShardedState):
    """As `ShardedState`, of the one chunk in Megatron-FSDP that a rank has."""

    format: ClassVar[str] = FSDP_DTENSOR

    @override
    def model(self) -> dict[str, Any]:
        state = self._chunk.state_dict()
        return _with_places({name: value for name, value in state.items() if isinstance(value, Tensor)})

    @override
    def optimizer(self, core: Any, *, is_loading: bool = False) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self._chunk.named_parameters()}
        states: dict[str, Any] = {}
        for part in getattr(core, "chained_optimizers", [core]):
            create_adam_states(part.optimizer)  # a parameter of which this rank owns no row has none
            for parameter, state in part.optimizer.state.items():
                states[names[parameter]] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        if not is_loading:
            self._count_equal_steps(states)
        return {"state": _with_places(states), "groups": _groups_without_parameters(core)}

    def _count_equal_steps(self, states: dict[str, Any]) -> None:
        """Gives all parameters the steps done: Adam doesn't count where this rank owns no row."""
        counts = torch.tensor([0.0, *(float(state["step"]) for state in states.values())], device=self._device)
        done = counts.max()
        torch.distributed.all_reduce(done, op=torch.distributed.ReduceOp.MAX)
        for state in states.values():
            state["step"].fill_(done)

    @override
    def rng(self) -> Any:
        state = generator_states()
        flat = {name: value for name, value in state.items() if name != "tracked"}
        flat |= {f"tracked/{name}": value for name, value in state["tracked"].items()}
        return {f"rank{self._rank}/{name}": value.clone() for name, value in flat.items()}

    @override
    def model_shapes(self, state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in state.items()}

    @override
    def load_model(self, state: Mapping[str, Any], *, strict: bool) -> None:
        self._wrapped[0].module.install_optimized_model_weights()
        cut_again(self._wrapped[0])  # what was gathered of the old ones

    @override
    def load_optimizer(self, core: Any, state: Mapping[str, Any]) -> None:
        saved = state["groups"]
        if len(saved) != len(core.param_groups):
            raise ValueError(
                f"the checkpoint's optimizer has {len(saved)} parameter groups and this one {len(core.param_groups)}; "
                "make it as it was, or start from the weights alone"
            )
        for group, values in zip(core.param_groups, saved, strict=True):
            group.update(values)

    @override
    def load_rng(self, state: Mapping[str, Any]) -> None:
        own = {name.removeprefix(f"rank{self._rank}/"): value for name, value in state.items()}
        tracked = {name.removeprefix("tracked/"): value for name, value in own.items() if name.startswith("tracked/")}
        restore_generators(own | {"tracked": tracked})

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._wrapped[0].module.device
        return device

    @property
    def _chunk(self) -> torch.nn.Module:
        chunk: torch.nn.Module = self._wrapped[0].module.module
        return chunk


def _with_places(state: dict[str, Any]) -> dict[str, Any]:
    """The same tensors, which now know their rows' place in the whole; collective over all ranks."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )

    placed: dict[str, Any] = preprocess_state_dict_for_uneven_dtensor(state)
    return placed


def _groups_without_parameters(core: Any) -> list[dict[str, Any]]:
    return [{key: group[key] for key in group if key != "params"} for group in core.param_groups]
