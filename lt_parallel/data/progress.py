"""One progress bar for work that is counted in input bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def byte_progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr while the block runs (only on a terminal); yields ``advance(n_bytes)``."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda n_bytes: progress.advance(task, n_bytes)
