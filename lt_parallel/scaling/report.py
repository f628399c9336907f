"""A scaling report on the terminal, and as files: JSON that can be read again, a picture, a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_parallel.files import write_atomically
from lt_parallel.metrics.scaling import BOTTLENECK, EXCELLENT, GOOD, ScalingReport, ScalingRow, StepBreakdown
from lt_parallel.scaling.charts import draw_png
from lt_parallel.scaling.page import page
from lt_parallel.scaling.wording import WORD_COLUMNS, advice_lines, column_names, report_title, row_cells

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FORMAT = 1

_STYLES = {EXCELLENT: "green", GOOD: "yellow", BOTTLENECK: "red"}


def print_report(report: ScalingReport, console: Console | None = None) -> None:
    """Prints the table, and below it what to do about each loss.

    A terminal too narrow for the causes gets the table without them: the lines below name them too.

    Args:
        report: What `analyse` found.
        console: Where to; standard output if None.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    console = console or Console()
    table = _rich_table(report, column_names(report))
    if Measurement.get(console, console.options.update(max_width=1000), table).maximum > console.width:
        table = _rich_table(report, [name for name in column_names(report) if name != "likely cause"])
    console.print(table)
    for line in advice_lines(report):
        console.print(Text(line))


def _rich_table(report: ScalingReport, names: Sequence[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(report_title(report)), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        table.add_column(name, justify="left" if name in WORD_COLUMNS else "right")
    for row in report.rows:
        cells = dict(zip(column_names(report), map(Text, row_cells(report, row)), strict=True))
        cells["verdict"].stylize(_STYLES[row.verdict])
        table.add_row(*(cells[name] for name in names))
    return table


def write_report(report: ScalingReport, folder: str | Path) -> list[Path]:
    """Writes `scaling.json`, `scaling.png` and `scaling.html`, each at once, over the files of an earlier report.

    Args:
        report: What `analyse` found.
        folder: Where to; made if it isn't there.

    Returns:
        The files.

    Raises:
        ValueError: If they can't be written.
    """
    folder = Path(folder)
    contents = {
        "scaling.json": (json.dumps(report_as_dict(report), indent=2, allow_nan=False) + "\n").encode(),
        "scaling.png": draw_png(report),
        "scaling.html": page(report).encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise ValueError(f"can't write to {str(folder)!r}: {error.strerror or error}; give another folder") from error
    return [folder / name for name in contents]


def report_as_dict(report: ScalingReport) -> dict[str, Any]:
    """Everything in the report, for JSON."""
    return {"format": FORMAT, **asdict(report)}


def load_report(path: str | Path) -> ScalingReport:
    """Reads a `scaling.json`.

    Raises:
        ValueError: If the file can't be read or isn't one.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        rows = [
            ScalingRow(**row | {"rates": tuple(row["rates"]), "breakdown": _breakdown(row["breakdown"])})
            for row in content.pop("rows")
        ]
        return ScalingReport(rows=tuple(rows), **content)
    except OSError as error:
        raise ValueError(f"can't read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a scaling report of format {FORMAT}: {error}") from error


def _breakdown(fields: dict[str, Any] | None) -> StepBreakdown | None:
    return None if fields is None else StepBreakdown(**fields)
