"""Megatron Core's optimizer behind the `torch.optim.Optimizer` that Lightning expects.

Lightning calls `step(closure)` once per global step. The closure runs the whole schedule, forward and backward; then
Megatron Core checks, clips and updates. Lightning's own `zero_grad` comes after that backward, where it would wipe the
gradients, so the facade ignores it: the strategy clears the buffers when a step begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lt_parallel.metrics.timers import OPTIMIZER, StepTimers, timed
from lt_parallel.strategies.fully_sharded import is_fully_sharded

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer as CoreOptimizer
    from megatron.core.optimizer import OptimizerConfig


class MegatronOptimizer(torch.optim.Optimizer):
    """What Lightning, its callbacks and LR schedulers see of Megatron Core's optimizer.

    Args:
        core: Megatron Core's optimizer, over this rank's shard of the parameters.
    """

    def __init__(self, core: CoreOptimizer) -> None:
        self.core = core
        #: The global gradient norm of the last step, before clipping.
        self.grad_norm: float | None = None
        #: False when the last step was skipped because a gradient wasn't finite.
        self.step_was_successful = True
        #: Measures the step where somebody wants to know.
        self.timers: StepTimers | None = None
        self._complete = False
        super().__init__([nn.Parameter(torch.empty(0))], {})
        self._complete = True

    # torch's base class assigns both; Megatron Core owns them.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Megatron Core's own groups: an LR scheduler that writes `lr` here changes the real one."""
        groups: list[dict[str, Any]] = self.core.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by the base class with its placeholder; nobody else may.

        Raises:
            ValueError: The optimizer exists: its groups are fixed once Megatron Core has sharded them.
        """
        if self._complete:
            raise ValueError(
                "parameters can't be added to an optimizer of MegatronParallelStrategy while it trains (callbacks that "
                "unfreeze layers do that); give configure_optimizers all parameters and begin with a rate of 0 in the "
                "group that is to be trained later"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, see the module's docstring."""

    def clear_gradients(self) -> None:
        """Drops the gradients that the optimizer refers to; the buffers are the wrapped chunks'."""
        self.core.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the closure (schedule), then Megatron Core's step.

        Returns:
            The closure's result.
        """
        result = closure() if closure is not None else None
        with timed(self.timers, OPTIMIZER):
            self.step_was_successful, grad_norm, _ = self.core.step()
        self.grad_norm = None if grad_norm is None else float(grad_norm)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Megatron Core's state of this rank's shard."""
        state: dict[str, Any] = self.core.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` or a sharded checkpoint gave."""
        self.core.load_state_dict(state_dict)


def build_optimizer(config: OptimizerConfig, wrapped: Sequence[nn.Module], groups: Any) -> MegatronOptimizer:
    """Megatron Core's own optimizer with its weight-decay groups (none on biases and norms).

    Args:
        config: Megatron Core's optimizer config.
        wrapped: This rank's wrapped chunks.
        groups: The `ProcessGroupCollection`.
    """
    from megatron.core.optimizer import get_megatron_optimizer

    core = get_megatron_optimizer(config, list(wrapped), use_gloo_process_groups=False, pg_collection=groups)
    return MegatronOptimizer(core)


def wrap_torch_optimizer(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, wrapped: Sequence[Any], groups: Any
) -> MegatronOptimizer:
    """A user's torch optimizer as Megatron Core's: sharded, with main parameters, clipped over all ranks.

    The user's object stays the one that steps, so LR schedulers made from it go on working.

    Args:
        optimizer: Over parameters of the plain module.
        config: Only the parallel, precision and clipping fields matter; rates are the optimizer's own.
        wrapped: The one wrapped chunk.
        groups: The `ProcessGroupCollection`.

    Raises:
        ValueError: It has no parameters, or the distributed optimizer was asked for and it isn't Adam or AdamW.
    """
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "configure_optimizers returned no optimizer that holds parameters to train; a step of Megatron Core needs "
            "exactly one"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss several times per step, which Megatron Core's step can't; "
            "use an optimizer whose step() needs no closure, e.g. torch.optim.AdamW"
        )
    for group in optimizer.param_groups:
        group.setdefault("is_expert_parallel", False)
        # Megatron Core's buffers hold what is trained, and it looks up every parameter of the groups in them.
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    core: Any
    if config.use_distributed_optimizer:
        if not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
            raise ValueError(
                f"data_parallel_sharding_strategy other than 'no_shard' cuts the states of Adam and AdamW, not of "
                f"{type(optimizer).__name__}; use 'no_shard', or torch.optim.AdamW"
            )
        _require_same_parameters(optimizer, wrapped[0])
        core = DistributedOptimizer(
            optimizer,
            config,
            None,
            create_adam_states,
            model_chunks=list(wrapped),
            per_model_buffers={} if is_fully_sharded(wrapped[0]) else {0: wrapped[0].buffers},
            data_parallel_group=groups.dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=groups.mp.rank(),
            distributed_optimizer_instance_id=0,
        )
        core.grad_stats_parallel_group = groups.intra_dist_opt
    elif config.bf16:
        core = Float16OptimizerWithFloat16Params(optimizer, config, None, create_adam_states)
        core.grad_stats_parallel_group = groups.mp
    else:
        core = FP32Optimizer(optimizer, config, create_adam_states)
        core.grad_stats_parallel_group = groups.mp
    core.tp_group = core.expert_tp_group = groups.tp
    return MegatronOptimizer(ChainedOptimizer([core]))


def _require_same_parameters(optimizer: torch.optim.Optimizer, chunk: Any) -> None:
    """The distributed optimizer shards whole gradient buffers, so it steps exactly what is in them.

    Raises:
        ValueError: The optimizer leaves out a parameter, or one was frozen or set free after the buffers were made.
    """
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if is_fully_sharded(chunk):
        names = {parameter: name for name, parameter in chunk.module.module.module.named_parameters()}
        groups = chunk.param_and_grad_buffer.parameter_groups
        trained = {each for group in groups if group.requires_grad for each in group.params}
        buffered = {each for _, each in chunk.param_and_grad_buffer.optimizer_named_parameters}
        buffered = {each for each in buffered if each.orig_param in trained}
    else:
        names = {parameter: name for name, parameter in chunk.module.module.named_parameters()}
        buffered = {parameter for buffer in chunk.buffers for parameter in buffer.params}
    wrong = [name for parameter, name in names.items() if (parameter in stepped) != (parameter in buffered)]
    if wrong:
        raise ValueError(
            "a data_parallel_sharding_strategy other than 'no_shard' steps all parameters with requires_grad=True, but "
            f"the optimizer of configure_optimizers disagrees on {', '.join(wrong[:5])}"
            f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}; give it every trained parameter, set "
            "requires_grad=False on the others in __init__ or configure_model, or use 'no_shard'"
        )


def create_adam_states(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Makes the states of torch's Adam that a checkpoint is read into; other optimizers make theirs on loading.

    Megatron Core's distributed optimizer expects them before it loads when torch's Adam does the step (no Apex, no
    TransformerEngine): without them it fails on the missing step count.

    Args:
        optimizer: Left alone if it isn't torch's Adam; parameters that have a state keep it.
        config: Megatron Core passes its own; not needed.
    """
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter.data)
                state["exp_avg_sq"] = torch.zeros_like(parameter.data)
