"""Tables and pictures in the loggers that can show them; a CSV file can't and is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only


@rank_zero_only
def log_table(
    loggers: Iterable[Logger], name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, step: int = 0
) -> None:
    """Shows a table in the loggers that can: Weights & Biases as a table, TensorBoard as text.

    Args:
        loggers: The Trainer's.
        name: What they show it under.
        columns: Headings.
        rows: Cells, as many as there are columns.
        step: 0-based index of the global step that it belongs to.
    """
    content = [list(row) for row in rows]
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(name, columns=list(columns), data=content, step=step)
        elif isinstance(logger, TensorBoardLogger):
            lines = [columns, ["---"] * len(columns), *content]
            text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
            logger.experiment.add_text(name, text, global_step=step)


@rank_zero_only
def log_image(loggers: Iterable[Logger], name: str, path: Path | str, *, step: int = 0) -> None:
    """Shows an image file in the loggers that can: Weights & Biases and TensorBoard.

    Args:
        loggers: The Trainer's.
        name: What they show it under.
        path: PNG or another format that Pillow reads.
        step: 0-based index of the global step that it belongs to.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [str(path)], step=step)
        elif isinstance(logger, TensorBoardLogger):
            import numpy
            from PIL import Image

            with Image.open(path) as image:
                pixels = numpy.asarray(image.convert("RGB"))
            logger.experiment.add_image(name, pixels, global_step=step, dataformats="HWC")
