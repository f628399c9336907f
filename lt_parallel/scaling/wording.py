"""A scaling report in words and cells: what the table on the terminal and the page say alike."""

from __future__ import annotations

import math

from lt_parallel.metrics.scaling import (
    BOTTLENECK,
    BOTTLENECK_BELOW,
    CAUSE_FROM,
    EXCELLENT,
    EXCELLENT_ABOVE,
    NO_CAUSE,
    ScalingReport,
    ScalingRow,
)

#: Columns that hold words, not numbers.
WORD_COLUMNS = ("verdict", "likely cause")


def report_title(report: ScalingReport) -> str:
    """Heading of the report."""
    return ": ".join(filter(None, (f"{report.mode.capitalize()} scaling", report.label)))


def explanation(report: ScalingReport) -> str:
    """What efficiency and the verdicts mean, in a sentence."""
    work = "the same work on any number of devices" if report.mode == "strong" else "work that grows with the devices"
    return (
        f"Efficiency is the speedup over 1 device divided by the number of devices, at {work}: above "
        f"{EXCELLENT_ABOVE:.0%} {EXCELLENT}, below {BOTTLENECK_BELOW:.0%} a {BOTTLENECK}."
    )


def column_names(report: ScalingReport) -> list[str]:
    """Of the table, as far as the report has something to say in them."""
    rate = "tokens/s" if report.tokens_known else "time (s)"
    return [
        "devices",
        rate,
        *(["min .. max"] if has_repeats(report) else []),
        "speedup",
        "ideal",
        "efficiency",
        "verdict",
        *(["likely cause"] if report.causes_known else []),
    ]


def has_repeats(report: ScalingReport) -> bool:
    """Whether a point was measured more than once."""
    return any(len(row.rates) > 1 for row in report.rows)


def row_cells(report: ScalingReport, row: ScalingRow) -> list[str]:
    """A row of the table."""
    if report.tokens_known:
        middle, low, high = (f"{rate:,.{_decimals(rate)}f}" for rate in (row.rate, min(row.rates), max(row.rates)))
    else:
        middle, low, high = (f"{1 / rate:.4g}" for rate in (row.rate, max(row.rates), min(row.rates)))
    return [
        str(row.devices),
        middle,
        *([f"{low} .. {high}"] if has_repeats(report) else []),
        f"{row.speedup:.2f}",
        f"{row.ideal:.0f}",
        f"{row.efficiency:.2%}",
        row.verdict,
        *([_cause(row)] if report.causes_known else []),
    ]


def _cause(row: ScalingRow) -> str:
    if row.cause in row.wasted:
        return f"{row.cause} ({row.wasted[row.cause]:.0%})"
    several_small_ones = row.cause == NO_CAUSE and sum(row.losses.values()) >= CAUSE_FROM
    return "none stands out" if several_small_ones else row.cause


def _decimals(value: float) -> int:
    """Enough for three digits."""
    return max(0, 2 - math.floor(math.log10(value))) if value < 100 else 0


def advice_lines(report: ScalingReport) -> list[str]:
    """One line per known cause: where it is the largest loss, how large, and what to do."""
    lines = []
    for cause in dict.fromkeys(row.cause for row in report.rows if row.advice):
        rows = [row for row in report.rows if row.cause == cause]
        devices = ", ".join(str(row.devices) for row in rows)
        found = [row.wasted[cause] for row in rows]
        shares = " .. ".join(dict.fromkeys(f"{share:.0%}" for share in (min(found), max(found))))
        noun = "device" if devices == "1" else "devices"
        lines.append(f"{devices} {noun}: {cause} takes {shares} of the step; {rows[0].advice}")
    return lines
