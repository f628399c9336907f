"""What every result says about where it comes from: machine, date, versions, command."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "lightning", "megatron-core", "jsonargparse")


def cpu_model() -> str:
    """The processor's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


class Report:
    """A table on the screen and, with the circumstances, in a Markdown file.

    Args:
        title: Heading of both.
        columns: Column names; the first one is left-aligned.
        command: Repeats the measurement.
    """

    def __init__(self, title: str, columns: Sequence[str], command: str) -> None:
        self._title, self._columns, self._command = title, list(columns), command
        self._rows: list[list[str]] = []
        self._notes: list[str] = []
        self._load = os.getloadavg()[0]

    def add(self, *cells: str) -> None:
        """Adds a row."""
        self._rows.append(list(cells))

    def note(self, text: str) -> None:
        """Adds a remark below the table."""
        self._notes.append(text)

    def show(self) -> None:
        """Prints the table."""
        table = Table(title=self._title)
        for index, column in enumerate(self._columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in self._rows:
            table.add_row(*row)
        console = Console()
        console.print(table)
        for note in self._notes:
            console.print(note, markup=False, highlight=False)

    def write(self, name: str) -> Path:
        """Writes `results/<name>.md` and returns its path."""
        RESULTS.mkdir(exist_ok=True)
        rows = [self._columns, ["---"] + ["---:"] * (len(self._columns) - 1), *self._rows]
        versions = ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
        path = RESULTS / f"{name}.md"
        path.write_text(
            f"# {self._title}\n\n"
            + "\n".join(f"| {' | '.join(row)} |" for row in rows)
            + "\n\n"
            + "".join(f"{note}\n\n" for note in self._notes)
            + f"* Machine: {cpu_model()}, {os.cpu_count()} cores; load {self._load:.1f} before and "
            f"{os.getloadavg()[0]:.1f} after (1 minute), so much besides this measurement\n"
            f"* Date: {date.today().isoformat()}\n"
            f"* Versions: Python {sys.version.split()[0]}, {versions}\n"
            f"* Command: `{self._command}`\n"
        )
        return path
