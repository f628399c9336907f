"""`self.log` inside micro batches.

Lightning takes the batch it knows, here a list of micro batches, for the thing that a `self.log` call is about: it
keeps the last value that was logged in a step, and weighs epoch means by the list's first size. While a micro batch
runs, `self.log` of that one module object goes through here and puts both right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

LogFunction = Callable[..., None]


@contextmanager
def _redirected(module: LightningModule, log: LogFunction) -> Iterator[None]:
    def log_dict(dictionary: Mapping[str, Any], **options: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, **options)

    # The instance's dictionary is looked up before the class; removing the entries gives the methods back.
    module.__dict__["log"], module.__dict__["log_dict"] = log, log_dict
    try:
        yield
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]


@contextmanager
def one_log_per_step(module: LightningModule, num_samples: int) -> Iterator[None]:
    """Collects the module's `log` calls and logs each name once at the end, with the mean.

    A number or tensor is averaged over the calls with equal weight, as micro batches of a training step are equal; a
    torchmetrics object, which accumulates by itself, is logged as it is.

    Args:
        module: Only this object is concerned, and only inside the context.
        num_samples: Samples of the step on this rank, which Lightning weighs epoch means by.
    """
    values: dict[str, list[Any]] = {}
    options_of: dict[str, dict[str, Any]] = {}

    def collect(name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:  # prog_bar and logger are the two that people pass by position
            options = {**dict(zip(("prog_bar", "logger"), args, strict=False)), **options}
        values.setdefault(name, []).append(value)
        options_of[name] = {"batch_size": num_samples, **options}

    with _redirected(module, collect):
        yield
    for name, collected in values.items():
        module.log(name, _mean(collected), **options_of[name])


def _mean(values: list[Any]) -> Any:
    if len(values) == 1 or not isinstance(values[-1], Tensor | int | float):
        return values[-1]
    tensors = [torch.as_tensor(value).detach().float() for value in values]
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors]).mean()


@contextmanager
def logs_weighted_by(module: LightningModule, num_samples: int) -> Iterator[None]:
    """Gives `log` calls without a `batch_size` the size of the micro batch that runs.

    Args:
        module: Only this object is concerned, and only inside the context.
        num_samples: Samples of the micro batch.
    """
    original = module.log

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        original(name, value, *args, **{"batch_size": num_samples, **options})

    with _redirected(module, log):
        yield
