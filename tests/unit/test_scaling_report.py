"""What the report looks like: the table, the files, and that each of them holds what was measured."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from lt_parallel.metrics.scaling import ScalingPoint, ScalingReport, StepBreakdown, analyse
from lt_parallel.outcome import CommandError
from lt_parallel.scaling import command as scaling_command
from lt_parallel.scaling.charts import _PANEL_INCHES, _figure, _panels, _style, draw_svgs
from lt_parallel.scaling.page import page
from lt_parallel.scaling.report import load_report, print_report, report_as_dict, write_report
from lt_parallel.scaling.wording import advice_lines


def breakdown(devices: int) -> StepBreakdown:
    """A step of 8 s of compute that communicates 0.1 s per further device."""
    communication = 0.1 * (devices - 1)
    compute = 8.0 / devices
    return StepBreakdown(compute + communication + 0.05, 4096, compute, communication, rest_s=0.05)


def report(devices: tuple[int, ...] = (1, 2, 4, 8), timed: bool = True, **options: str) -> ScalingReport:
    steps = {n: breakdown(n) for n in devices}
    rates = {n: 4096 / step.step_s for n, step in steps.items()}
    return analyse(
        [
            ScalingPoint(n, (0.98 * rates[n], rates[n], 1.01 * rates[n]), breakdown=steps[n] if timed else None)
            for n in devices
        ],
        **options,
    )


def printed(of: ScalingReport, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(of, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_says_what_was_found() -> None:
    text = printed(report(label="gpt_tiny [dp]"))
    assert "Strong scaling: gpt_tiny [dp]" in text
    row = next(line for line in text.splitlines() if re.match(r" +8 ", line))
    cells = re.split(r"  +", row.strip())
    assert cells == ["8", "2,341", "2,294 .. 2,364", "4.60", "8", "57.50%", "bottleneck", "communication (40%)"]
    assert "4, 8 devices: communication takes 13% .. 40% of the step; overlap it with compute" in text
    assert not any(line.startswith("1 devices") for line in advice_lines(report()))


def test_columns_that_have_nothing_to_say_are_left_out() -> None:
    single = analyse([ScalingPoint(1, (100.0,)), ScalingPoint(2, (190.0,))])
    text = printed(single)
    assert "cause" not in text and ".." not in text and "tokens/s" in text
    text = printed(analyse([ScalingPoint(1, seconds=(120.0,)), ScalingPoint(2, seconds=(64.0, 64.0))]))
    assert "time (s)" in text and "tokens/s" not in text
    assert re.search(r"2 +64 +64 \.\. 64 +1\.88 ", text)


def test_a_narrow_terminal_gets_the_causes_below_the_table_only() -> None:
    wide, narrow = (printed(report((1, 2, 4, 8, 1024)), width) for width in (100, 80))
    assert "likely cause" in wide and "likely cause" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    for text in (wide, narrow):
        assert re.search(r"^ +8 +2,341 +2,294 \.\. 2,364 +4\.60 +8 +57\.50% +bottleneck", text, re.MULTILINE)
        assert "4, 8, 1024 devices: communication takes" in text


def test_advice_is_given_once_for_each_cause() -> None:
    assert advice_lines(report((1, 4, 8))) == [
        "4, 8 devices: communication takes 13% .. 40% of the step; overlap it with compute, keep tensor parallel "
        "groups within a node, or sync less often"
    ]
    assert advice_lines(report((1,))) == advice_lines(report(timed=False)) == []


def test_many_small_losses_are_not_called_none() -> None:
    spread = StepBreakdown(2.3, 4096, 2.0, 0.1, 0.1, 0.1)
    points = [
        ScalingPoint(1, (512.0,), breakdown=StepBreakdown(8.0, 4096, 8.0)),
        ScalingPoint(4, (1780.0,), breakdown=spread),
    ]
    of = analyse(points)
    assert [row.cause for row in of.rows] == ["none", "none"]
    assert printed(of).count("none stands out") == 1


def test_json_gives_the_report_back(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    for of in (report(label="ü"), report(timed=False), analyse([ScalingPoint(1, seconds=(2.0,))], mode="weak")):
        path.write_text(json.dumps(report_as_dict(of)))
        assert load_report(path) == of


def test_json_holds_every_measurement(tmp_path: Path) -> None:
    of = report()
    write_report(of, tmp_path / "new" / "folder")
    content = json.loads((tmp_path / "new" / "folder" / "scaling.json").read_text())
    assert content == json.loads(json.dumps(report_as_dict(of)))
    assert len(content["rows"][0]["rates"]) == 3
    assert content["rows"][3]["breakdown"]["communication_s"] == pytest.approx(0.7)
    assert content["rows"][3]["losses"]["communication"] == pytest.approx(0.7 / 1.75)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "rows": []}', '{"format": 1, "rows": [{}]}']
)
def test_a_file_that_is_no_report(tmp_path: Path, text: str) -> None:
    (tmp_path / "scaling.json").write_text(text)
    with pytest.raises(ValueError, match=r"scaling\.json is not a scaling report of format 1"):
        load_report(tmp_path / "scaling.json")
    with pytest.raises(ValueError, match=r"can't read .*none"):
        load_report(tmp_path / "none.json")


def test_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(report(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"scaling.json", "scaling.png", "scaling.html"}

    def full(source: Path, target: Path) -> None:
        assert source.stat().st_size > 0
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ValueError, match=f"can't write to '{tmp_path}': No space left on device; give another folder"):
        write_report(report((1, 2)), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"can't write to '.*/file/out': "):
        write_report(report((1, 2)), tmp_path / "file" / "out")


def test_the_picture_is_a_png_of_as_many_panels(tmp_path: Path) -> None:
    sizes = []
    for timed in (True, False):
        write_report(report(timed=timed), tmp_path)
        content = (tmp_path / "scaling.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        sizes.append(struct.unpack(">II", content[16:24]))
    assert sizes[0][0] > 1.5 * sizes[1][0] and sizes[0][1] == sizes[1][1]


@pytest.mark.parametrize("devices", [(1,), (1, 2), (1, 2, 4, 8), tuple(2**k for k in range(11)), tuple(range(1, 17))])
def test_the_page_needs_nothing_from_elsewhere(devices: tuple[int, ...]) -> None:
    text = page(report(devices, label="<b>& a very long name</b> " * 10))
    links = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)|@import', text)
    assert all(link[0].startswith("#") or link[1].startswith("#") for link in links)
    assert "<script" not in text and "<link" not in text and "<b>" not in text
    assert set(re.findall(r"https?://[^\"'<> ]*", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    for used in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text):
        assert "".join(used) in ids


@pytest.mark.parametrize(
    "devices",
    [
        *((1,), (1, 2), (1, 64), (1, 2, 4, 8), (1, 2, 31), (1, 3, 6, 12, 24, 48, 96), tuple(range(1, 9))),
        *(tuple(range(1, 32)), tuple(2**k for k in range(11)), tuple(4**k for k in range(9)), (1, 1000, 1001, 1024)),
    ],
)
def test_no_label_lies_on_another(devices: tuple[int, ...]) -> None:
    of = report(devices)
    for panel in _panels(of):
        with _style("black"):
            figure = _figure(panel.width, _PANEL_INCHES[1])
            axes = figure.subplots()
            panel.draw(axes, of)
            figure.canvas.draw()
            for axis in (axes.xaxis, axes.yaxis):
                labels = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
                low, high = sorted(axis.get_view_interval())
                boxes = [x.get_window_extent() for x in labels if low <= x.get_position()[axis is axes.yaxis] <= high]
                assert boxes
                for first, second in itertools.pairwise(boxes):
                    assert not first.overlaps(second), [label.get_text() for label in labels]


def test_charts_take_the_color_of_the_page() -> None:
    text = page(report())
    assert "prefers-color-scheme: dark" in text
    svgs = draw_svgs(report())
    assert len(svgs) == 3 and all(svg in text for svg in svgs)
    for svg in svgs:
        ElementTree.fromstring(svg)
        colors = set(re.findall(r"#[0-9a-f]{6}\b|\b(?:black|white)\b", svg))
        assert "currentColor" in svg
        assert colors.isdisjoint({"#000000", "#ffffff", "black", "white", "#010203"}), colors


def test_the_page_holds_the_numbers() -> None:
    text = page(report(label="dp"))
    for expected in ("2,294 .. 2,364", "57.50%", 'class="word bottleneck">bottleneck<', "communication (40%)"):
        assert expected in text
    assert "<li>4, 8 devices: communication takes 13% .. 40% of the step" in text
    assert "What to do" not in page(report(timed=False))


def test_drawing_leaves_the_callers_matplotlib_alone() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    mpl.rcParams["font.size"] = 33
    try:
        small = draw_svgs(report((1, 2)))
        assert mpl.rcParams["font.size"] == 33
    finally:
        mpl.rcParams["font.size"] = before["font.size"]
    assert draw_svgs(report((1, 2))) == small


def test_matplotlib_is_loaded_only_to_draw() -> None:
    command = (
        "import sys, lt_parallel.scaling.report, lt_parallel.scaling.command;"
        "sys.exit(any(name in sys.modules for name in ('matplotlib', 'torch', 'numpy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", command], timeout=60).returncode == 0


# --- the command ----------------------------------------------------------------------------------------------------


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    scaling_command.add_arguments(parser)
    return scaling_command.run(parser.parse_args(arguments))


def test_the_command_reports_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = tmp_path / "rates.csv"
    rates.write_text("devices,tokens_per_sec\n1,100000\n2,190000\n4,360000\n8,650000\n")
    assert command("--from", str(rates), "--output", str(tmp_path / "out"), "--mode", "weak") == 0
    out = capsys.readouterr().out
    assert "Weak scaling: rates.csv" in out and "81.25%" in out
    assert out.endswith(f"Written to {tmp_path}/out/: scaling.json, scaling.png, scaling.html\n")
    loaded = load_report(tmp_path / "out" / "scaling.json")
    assert (loaded.mode, loaded.rows[3].speedup) == ("weak", 6.5)


def test_the_command_needs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match=r"--from FILE\.csv"):
        command()
    with pytest.raises(ValueError, match="can't read"):
        command("--from", str(tmp_path / "none.csv"), "--output", str(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir()) and capsys.readouterr().out == ""


def test_a_single_device_is_not_called_devices() -> None:
    step = StepBreakdown(step_s=1.0, tokens_per_step=100, compute_s=0.5, rest_s=0.5)
    (line,) = advice_lines(analyse([ScalingPoint(1, tokens_per_sec=(100.0,), breakdown=step)]))
    assert line.startswith("1 device: small batch takes 50% of the step")
