"""Megatron Core's LR and weight-decay schedule as a Lightning LR scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

if TYPE_CHECKING:
    from lt_parallel.strategies.optimizer import MegatronOptimizer


class MegatronLRScheduler:
    """Warm-up and decay, one step per global step.

    The first step of the warm-up has lr = max_lr / lr_warmup_iters and the last max_lr, so no step is spent at zero.

    Args:
        optimizer: Whose parameter groups are set.
        max_lr: Highest rate.
        min_lr: Rate at and after lr_decay_iters.
        lr_warmup_iters: Steps of linear warm-up.
        lr_decay_iters: Step of the schedule's end, warm-up included.
        lr_decay_style: "constant", "linear", "cosine" or "inverse-square-root".
        weight_decay: Constant; groups without decay keep none.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        *,
        max_lr: float,
        min_lr: float,
        lr_warmup_iters: int,
        lr_decay_iters: int,
        lr_decay_style: str,
        weight_decay: float,
    ) -> None:
        self.optimizer = optimizer
        self._core = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=max_lr,
            min_lr=min_lr,
            lr_warmup_steps=lr_warmup_iters,
            lr_decay_steps=lr_decay_iters,
            lr_decay_style=lr_decay_style,
            start_wd=weight_decay,
            end_wd=weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        # Megatron Core's step n uses the rate of point n of the schedule; beginning at point 1 skips the zero.
        self._core.step(1)

    def step(self, metric: Any = None) -> None:
        """Moves on by one global step, unless the optimizer skipped its step."""
        if self.optimizer.step_was_successful:
            self._core.step(1)

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The position only: the lengths are the module's arguments, and may be changed on resume."""
        return {"num_steps": self._core.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to the saved position."""
        self._core.num_steps = 0
        self._core.step(int(state_dict["num_steps"]))
