"""The charts of a scaling report, drawn by matplotlib: one picture, or SVG elements for a page.

The elements take the colour of the page's text, so that they are legible in a light and in a dark browser.
"""

from __future__ import annotations

import contextlib
import html
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lt_parallel.metrics.scaling import (
    BOTTLENECK,
    BOTTLENECK_BELOW,
    EXCELLENT,
    EXCELLENT_ABOVE,
    GOOD,
    ScalingReport,
)
from lt_parallel.scaling.wording import has_repeats, report_title

# Mid tones: each stands out from white and from near black.
PART_COLORS = {
    "compute": "#4c78a8",
    "slower compute": "#8fb8de",
    "communication": "#e8762c",
    "bubble": "#d1495b",
    "imbalance": "#a667b0",
    "data wait": "#3c9d5d",
    "optimizer": "#a07f3a",
    "rest": "#8a8a8a",
}
_LEGEND = {
    "compute": "compute, as on 1 device",
    "slower compute": "compute, more than on 1 device",
    "bubble": "pipeline bubble",
    "imbalance": "unequal stages",
}
_LOG_FROM_DEVICES = 32
_DPI = 120
_PANEL_INCHES = (4.6, 3.6)
_LEGEND_INCHES = 2.1
_REM_PER_INCH = 7
_TITLE_LETTERS_PER_INCH = 9
# Letters that have room under the bars, and on an axis.
_BAR_LETTERS = 40
_AXIS_LETTERS = 37
# A colour that nothing else has, replaced in the SVG by the colour of the page's text.
_TEXT_COLOR = "#010203"


class Panel(NamedTuple):
    """One chart: what it shows, its width in inches, and what draws it into an axes."""

    description: str
    width: float
    draw: Callable[[Any, ScalingReport], None]


def _panels(report: ScalingReport) -> list[Panel]:
    width = _PANEL_INCHES[0]
    panels = [
        Panel("Throughput over the number of devices, with the ideal line", width, _draw_throughput),
        Panel("Efficiency over the number of devices, with the limits of 90% and 70%", width, _draw_efficiency),
    ]
    if any(row.breakdown for row in report.rows):
        wide = width + _LEGEND_INCHES
        panels.append(Panel("Where the time of a step goes, by number of devices", wide, _draw_breakdown))
    return panels


def draw_png(report: ScalingReport) -> bytes:
    """All panels side by side, black on white."""
    panels = _panels(report)
    widths = [panel.width for panel in panels]
    title = textwrap.fill(report_title(report), int(_TITLE_LETTERS_PER_INCH * sum(widths)))
    height = _PANEL_INCHES[1] + 0.22 * len(title.splitlines())
    with _style("black"):
        figure = _figure(sum(widths), height)
        for part, panel in zip(figure.subfigures(1, len(panels), width_ratios=widths), panels, strict=True):
            panel.draw(part.subplots(), report)
        figure.suptitle(title, fontsize=12)
        return _saved(figure, "png", dpi=_DPI, facecolor="white")


def draw_svgs(report: ScalingReport) -> list[str]:
    """Each panel as an SVG element to put into a page; text and lines have the colour of the page's text."""
    elements = []
    for number, panel in enumerate(_panels(report)):
        with _style(_TEXT_COLOR):
            figure = _figure(panel.width, _PANEL_INCHES[1])
            panel.draw(figure.subplots(), report)
            svg = _saved(figure, "svg", transparent=True)
        elements.append(_inline(svg.decode(), number, panel))
    return elements


def _inline(svg: str, number: int, panel: Panel) -> str:
    """The SVG element alone, its ids unlike those of the page's other ones."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>p{number}-", svg)
    svg = svg.replace(_TEXT_COLOR, "currentColor")
    style = f"width: {_REM_PER_INCH * panel.width:g}rem"
    return svg.replace(
        "<svg", f'<svg role="img" aria-label="{html.escape(panel.description)}" style="{style}"', 1
    ).strip()


@contextlib.contextmanager
def _style(color: str) -> Iterator[None]:
    """Matplotlib's settings for one picture; the caller's own stay as they are."""
    import matplotlib as mpl

    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: Any = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "legend.frameon": False,
        "svg.fonttype": "path",
        "svg.hashsalt": "lt_parallel",
        **dict.fromkeys(names, color),
    }
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


def _figure(width: float, height: float) -> Any:
    """A figure that needs no display and stays out of pyplot's list."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, **options)
    return file.getvalue()


def _draw_throughput(axes: Any, report: ScalingReport) -> None:
    """Medians with the range of the repeats, and the ideal line."""
    from matplotlib.ticker import LogLocator, NullLocator

    devices = [row.devices for row in report.rows]
    unit = 1.0 if report.tokens_known else report.rows[0].rate
    middle = [row.rate / unit for row in report.rows]
    below = [(row.rate - min(row.rates)) / unit for row in report.rows]
    above = [(max(row.rates) - row.rate) / unit for row in report.rows]
    if len(devices) > 1:
        ideal = [middle[0] * count for count in devices]
        axes.plot(devices, ideal, linestyle="--", linewidth=1, color=PART_COLORS["rest"], label="ideal")
    axes.errorbar(
        devices,
        middle,
        yerr=(below, above),
        fmt="o-",
        markersize=4,
        capsize=3,
        color=PART_COLORS["compute"],
        label="measured, median and range" if has_repeats(report) else "measured",
    )
    axes.set_ylabel("throughput (tokens/s)" if report.tokens_known else "speedup over 1 device")
    axes.set_title("throughput" if report.tokens_known else "speedup")
    _device_axis(axes, devices)
    if _is_log(devices):
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e4 * low else (1,), numticks=12))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    axes.spines.right.set_visible(False)
    axes.legend(loc="best")


def _draw_efficiency(axes: Any, report: ScalingReport) -> None:
    """Efficiency with the two limits; the names of the ranges stand on the right."""
    devices = [row.devices for row in report.rows]
    percent = [100 * row.efficiency for row in report.rows]
    top = max(110.0, max(percent) * 1.08)
    limits = (100 * EXCELLENT_ABOVE, 100 * BOTTLENECK_BELOW)
    for limit in limits:
        axes.axhline(limit, linestyle=":", linewidth=1, color=PART_COLORS["rest"])
    axes.plot(devices, percent, "o-", markersize=4, color=PART_COLORS["compute"])
    axes.set_ylabel("efficiency (%)")
    axes.set_title("efficiency")
    axes.set_ylim(0, top)
    axes.set_yticks([0, 20, 40, 60, 70, 80, 90, 100, *range(120, int(top), 20 * math.ceil(top / 400))])
    _device_axis(axes, devices)
    ranges = {EXCELLENT: (limits[0] + top) / 2, GOOD: sum(limits) / 2, BOTTLENECK: limits[1] / 2}
    names = axes.secondary_yaxis("right")
    names.set_yticks(list(ranges.values()), list(ranges))
    names.tick_params(length=0)
    names.spines.right.set_visible(False)
    axes.spines.right.set_visible(False)


def _draw_breakdown(axes: Any, report: ScalingReport) -> None:
    """A stacked bar per number of devices, as shares of the step."""
    rows = [row for row in report.rows if row.breakdown]
    shares = [row.time_shares() for row in rows]
    bottom = [0.0] * len(rows)
    for part, color in PART_COLORS.items():
        heights = [100 * share[part] for share in shares]
        if max(heights) >= 0.05:
            label = _LEGEND.get(part, part)
            axes.bar(range(len(rows)), heights, bottom=bottom, color=color, label=label, width=0.7)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    room = int(_BAR_LETTERS / (_digits(rows[-1].devices) + 0.5))
    labelled = range(0, len(rows), math.ceil(len(rows) / room))
    axes.set_xticks(labelled, [str(rows[place].devices) for place in labelled])
    axes.set_xlim(-0.6, max(len(rows), 3) - 0.4)
    axes.set_ylim(0, 100)
    axes.set_xlabel("devices")
    axes.set_ylabel("share of a step's time (%)")
    axes.set_title("where the time of a step goes")
    axes.spines.right.set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)


def _device_axis(axes: Any, devices: Sequence[int]) -> None:
    axes.set_xlabel("devices")
    if _is_log(devices):
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(devices) / 1.2, max(devices) * 1.2)
    else:
        axes.set_xlim(0, 2 if len(devices) == 1 else max(devices) + max(0.3, 0.05 * max(devices)))
    axes.minorticks_off()
    ticks = _spread(devices)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _is_log(devices: Sequence[int]) -> bool:
    return max(devices) >= _LOG_FROM_DEVICES


def _spread(devices: Sequence[int]) -> list[int]:
    """The numbers whose labels have room on the axis: the last one, and before it those that are far enough away."""
    place: Callable[[float], float] = math.log2 if _is_log(devices) else float
    gap = place(devices[-1]) * max(3, _digits(devices[-1])) / _AXIS_LETTERS
    kept = [devices[-1]]
    for count in reversed(devices[:-1]):
        if place(kept[-1]) - place(count) >= gap:
            kept.append(count)
    return kept[::-1]


def _digits(number: int) -> int:
    return len(str(number))


def _short(value: float) -> str:
    """A number on an axis: 1500 as 1.5k."""
    power = min(max(0, math.floor(math.log10(value) / 3 + 1e-9)), 4) if value > 0 else 0
    return f"{value / 1000**power:.4g}{('', 'k', 'M', 'G', 'T')[power]}"
