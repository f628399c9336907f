"""A scaling report as one HTML page that holds everything it shows; it needs no network and no script."""

from __future__ import annotations

import html
from collections.abc import Sequence

from lt_parallel.metrics.scaling import VERDICTS, ScalingReport
from lt_parallel.scaling.charts import PART_COLORS, draw_svgs
from lt_parallel.scaling.wording import WORD_COLUMNS, advice_lines, column_names, explanation, report_title, row_cells

_CSS = """\
:root { color-scheme: light dark; --text: #1b1d21; --page: #ffffff; --line: #d5d8dd; --quiet: #5a606b;
  --excellent: #157347; --good: #8a5a00; --bottleneck: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --page: #15171b; --line: #3a3f47; --quiet: #a4abb6;
  --excellent: #5fd39a; --good: #e8b64c; --bottleneck: #ff8f85; } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 72rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
p.quiet { color: var(--quiet); }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th.word, td.word { text-align: left; }
.excellent { color: var(--excellent); } .good { color: var(--good); } .bottleneck { color: var(--bottleneck); }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.charts svg { max-width: 100%; height: auto; color: var(--text); }
@media print { :root { --text: #000; --page: #fff; } }"""


def page(report: ScalingReport) -> str:
    """The report as one HTML page that needs nothing else."""
    title = html.escape(report_title(report))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>\n{_CSS}\n</style></head>",
            "<body>",
            f"<h1>{title}</h1>",
            f'<p class="quiet">{html.escape(explanation(report))}</p>',
            *_html_table(column_names(report), [row_cells(report, row) for row in report.rows]),
            *_html_advice(report),
            '<h2>Charts</h2>\n<div class="charts">',
            *draw_svgs(report),
            "</div>",
            *_html_breakdown(report),
            "</body>\n</html>\n",
        ]
    )


def _html_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def cell(tag: str, name: str, text: str) -> str:
        classes = (["word"] if name in WORD_COLUMNS else []) + ([text] if text in VERDICTS else [])
        attribute = f' class="{" ".join(classes)}"' if classes else ""
        return f"<{tag}{attribute}>{html.escape(text)}</{tag}>"

    return [
        '<div class="wide"><table>',
        "<tr>" + "".join(cell("th", name, name) for name in names) + "</tr>",
        *(
            "<tr>" + "".join(cell("td", name, text) for name, text in zip(names, row, strict=True)) + "</tr>"
            for row in rows
        ),
        "</table></div>",
    ]


def _html_advice(report: ScalingReport) -> list[str]:
    lines = advice_lines(report)
    if not lines:
        return []
    return ["<h2>What to do</h2>", "<ul>", *(f"<li>{html.escape(line)}</li>" for line in lines), "</ul>"]


def _html_breakdown(report: ScalingReport) -> list[str]:
    """The numbers behind the bars."""
    rows = [row for row in report.rows if row.breakdown]
    if not rows:
        return []
    shares = [row.time_shares() for row in rows]
    parts = [part for part in PART_COLORS if any(share[part] for share in shares)]
    steps = [row.breakdown.step_s for row in rows if row.breakdown]
    names = ["devices", "step (s)", *parts]
    cells = [
        [str(row.devices), f"{step:.4g}", *(f"{share[part]:.1%}" for part in parts)]
        for row, step, share in zip(rows, steps, shares, strict=True)
    ]
    return ["<h2>Where the time of a step goes</h2>", *_html_table(names, cells)]
