"""Turning the `self.log` calls of several micro batches into one per step.

Lightning keeps the last value that was logged in a step. A step of several micro batches calls `training_step` several
times, so that value would be one micro batch's. While the micro batches run, `self.log` of that one module object
collects; afterwards each name is logged once, with the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class _Captured:
    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self.options: dict[str, dict[str, Any]] = {}

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.values.setdefault(name, []).append(value)
        self.options[name] = options

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, **options)


@contextmanager
def one_log_per_step(module: LightningModule, num_microbatches: int) -> Iterator[None]:
    """Collects the module's `log` and `log_dict` calls and logs their means at the end of the context.

    A number or tensor is averaged over the micro batches with equal weight; a torchmetrics object, which accumulates by
    itself, is logged as it is.

    Args:
        module: The module whose calls are collected. Only this object is concerned, and only inside the context.
        num_microbatches: With one micro batch nothing is collected.
    """
    if num_microbatches == 1:
        yield
        return
    captured = _Captured()
    # nn.Module looks attributes up in the instance's dictionary first; removing the entries gives the methods back.
    module.__dict__["log"], module.__dict__["log_dict"] = captured.log, captured.log_dict
    try:
        yield
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]
    for name, values in captured.values.items():
        module.log(name, _mean(values), **captured.options[name])


def _mean(values: list[Any]) -> Any:
    if not isinstance(values[-1], Tensor | int | float):
        return values[-1]
    tensors = [torch.as_tensor(value).detach().float() for value in values]
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors]).mean()
