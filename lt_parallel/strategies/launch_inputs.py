"""What a run reads, looked at before other processes start: one early error, instead of one from every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as L

from lt_parallel.plugins.checkpoint_io import MegatronCheckpointIO

#: In place of a path; Lightning finds out what they stand for.
_NAMED_CHECKPOINTS = ("best", "last", "hpc", "registry")


@runtime_checkable
class ChecksSource(Protocol):
    """A LightningDataModule that can tell early, without reading much, that its data can't be used."""

    def check_source(self, stage: str) -> None:
        """Raises what can be known before `setup`.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """


def check_inputs(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], stage: str, io: MegatronCheckpointIO
) -> None:
    """Checks the data module and the checkpoint that the Trainer was called with.

    Args:
        function: What Lightning is about to launch; its parameters are those of `Trainer.fit` and its relatives.
        args: Its positional arguments.
        kwargs: Its named arguments.
        stage: "fit", "validate", "test" or "predict".
        io: Reads the checkpoint.

    Raises:
        ValueError: The data can't be used.
        FileNotFoundError: There is no such checkpoint.
    """
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    path = given.get("ckpt_path")
    if path is not None and str(path).split(":")[0] not in _NAMED_CHECKPOINTS:
        io.require_checkpoint(path)
    for value in given.values():
        if isinstance(value, L.LightningDataModule) and isinstance(value, ChecksSource):
            value.check_source(stage)
