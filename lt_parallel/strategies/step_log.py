"""Showing what a global step measured, where `self.log` would show it.

Lightning's `self.log` takes some 0.3 ms of CPU per call, most of it in walking and copying the bookkeeping that it
keeps for epoch means. A step's own values need none: there is one per step and it's equal on every rank. So they are
put straight into the Trainer's `callback_metrics` and `progress_bar_metrics`, and handed to its loggers on the steps
that Lightning logs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as L


def report_step(trainer: L.Trainer, values: Mapping[str, Tensor | float], *, in_bar: Collection[str] = ()) -> None:
    """Reports the values of the global step that the optimizer has just taken; called inside `optimizer_step`.

    Callbacks see them in `on_train_batch_end`. Loggers get one row with all of them, on the steps that
    `Trainer(log_every_n_steps=...)` names; what a module logs by `self.log` makes a row of its own.

    Args:
        trainer: Which is training.
        values: By name: scalar tensors or numbers, equal on every rank.
        in_bar: Names that the progress bar shows.
    """
    tensors = _as_tensors(values)
    trainer.callback_metrics.update(tensors)
    if trainer.progress_bar_callback is not None:
        trainer.progress_bar_metrics.update({name: float(values[name]) for name in in_bar})
    if _is_logged(trainer):
        _write(trainer, values, tensors, trainer.global_step)


def log_values(trainer: L.Trainer, values: Mapping[str, float], *, step: int) -> None:
    """Shows values that belong to more than one step, for callbacks that measure; whatever step it is, they're logged.

    Args:
        trainer: Which is training.
        values: By name; equal on every rank.
        step: The 0-based index of the last global step that they are about; the loggers' step axis.
    """
    tensors = _as_tensors(values)
    trainer.callback_metrics.update(tensors)
    _write(trainer, values, tensors, step)


def _as_tensors(values: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    return {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
        for name, value in values.items()
    }


def _write(trainer: L.Trainer, values: Mapping[str, Tensor | float], tensors: dict[str, Tensor], step: int) -> None:
    """One row for each logger, and what the Trainer says it has logged."""
    trainer.logged_metrics.update(tensors)
    row = {**{name: float(value) for name, value in values.items()}, "epoch": float(trainer.current_epoch)}
    for logger in trainer.loggers:
        logger.log_metrics(row, step=step)
        logger.save()


def _is_logged(trainer: L.Trainer) -> bool:
    """Whether Lightning's loggers get this step; `global_step` doesn't count it yet."""
    options: Any = trainer  # both are set by a connector in Trainer.__init__, where types don't show
    every: int = options.log_every_n_steps
    return bool(options.fast_dev_run) or (every > 0 and (trainer.global_step + 1) % every == 0)
