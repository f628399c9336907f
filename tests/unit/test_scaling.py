"""Speedup, efficiency, verdict and cause, from numbers worked out by hand and from properties that must hold."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_parallel.metrics.scaling import (
    PARTS,
    ScalingPoint,
    ScalingReport,
    StepBreakdown,
    analyse,
    read_points,
    speedup_and_efficiency,
    verdict,
)

positive = st.floats(1e-3, 1e9)
part = st.floats(0, 10)
TEXTBOOK = {1: 100000.0, 2: 190000.0, 4: 360000.0, 8: 650000.0}


def points(rates: dict[int, float]) -> list[ScalingPoint]:
    return [ScalingPoint(devices, (rate,)) for devices, rate in rates.items()]


def timed(devices: int, tokens: float = 1000, processes_per_core: float = 0, **parts: float) -> ScalingPoint:
    """A point whose throughput is that of its step."""
    step_s = sum(parts.values())
    step = StepBreakdown(step_s, tokens, processes_per_core=processes_per_core, **{"compute_s": 0.0} | parts)
    return ScalingPoint(devices, (tokens / step_s,), breakdown=step)


def table(report: ScalingReport) -> dict[int, tuple[str, str]]:
    return {row.devices: (row.verdict, row.cause) for row in report.rows}


def test_the_textbook_example() -> None:
    report = analyse(points(TEXTBOOK))
    assert [row.devices for row in report.rows] == [1, 2, 4, 8]
    assert [row.speedup for row in report.rows] == [1.0, 1.9, 3.6, 6.5]
    assert [row.ideal for row in report.rows] == [1.0, 2.0, 4.0, 8.0]
    assert [100 * row.efficiency for row in report.rows] == [100.0, 95.0, 90.0, 81.25]
    assert [row.verdict for row in report.rows] == ["excellent", "excellent", "good", "good"]
    assert {row.cause for row in report.rows} == {"unknown"} and not report.causes_known


def test_the_limits_of_the_verdicts() -> None:
    assert [verdict(e) for e in (1.2, 0.9001, 0.9, 0.8, 0.7, 0.6999, 0.0)] == [
        *("excellent", "excellent", "good", "good", "good", "bottleneck", "bottleneck")
    ]


def test_repeats_give_a_median_and_every_repeat_is_kept() -> None:
    report = analyse([ScalingPoint(2, (10.0, 30.0, 18.0)), ScalingPoint(1, (9.0, 11.0))])
    assert [(row.rate, row.rates) for row in report.rows] == [(10.0, (9.0, 11.0)), (18.0, (10.0, 30.0, 18.0))]
    assert report.rows[1].speedup == 1.8


def test_weak_scaling_has_the_same_formulas() -> None:
    strong, weak = (analyse(points(TEXTBOOK), mode=mode) for mode in ("strong", "weak"))
    assert strong.rows == weak.rows and (strong.mode, weak.mode) == ("strong", "weak")


@given(st.dictionaries(st.integers(2, 4096), positive, max_size=6), positive, st.floats(1e-3, 1e3))
def test_scaling_all_throughputs_changes_no_speedup(rates: dict[int, float], one: float, factor: float) -> None:
    rates[1] = one
    before, after = (analyse(points({n: f * rate for n, rate in rates.items()})) for f in (1.0, factor))
    for old, new in zip(before.rows, after.rows, strict=True):
        assert new.speedup == pytest.approx(old.speedup, rel=1e-12)
        assert new.efficiency == pytest.approx(old.speedup / old.devices, rel=1e-12)
        assert new.rate == pytest.approx(factor * old.rate, rel=1e-12)


@given(st.dictionaries(st.sampled_from(PARTS[1:]), part), st.integers(1, 64), positive)
def test_the_losses_add_up_to_what_is_missing(parts: dict[str, float], devices: int, compute_s: float) -> None:
    base = timed(1, compute_s=compute_s, rest_s=0.1)
    here = timed(devices, tokens=1000, **parts, compute_s=compute_s * 0.7)
    row = analyse([base, here] if devices > 1 else [base]).rows[-1]
    assert sum(row.losses.values()) == pytest.approx(1 - row.efficiency, abs=1e-9, rel=1e-9)
    assert sum(row.time_shares().values()) == pytest.approx(1)
    assert min(row.time_shares().values()) >= 0


ONE = timed(1, compute_s=8.0, optimizer_s=0.2, rest_s=0.2)


@pytest.mark.parametrize(
    ("here", "cause", "share"),
    [
        (timed(4, compute_s=2.0, optimizer_s=0.05, rest_s=0.05), "none", 0.0),
        (timed(4, compute_s=2.0, communication_s=0.5, rest_s=0.1), "communication", 0.5 / 2.6),
        (timed(4, compute_s=2.0, bubble_s=0.7, communication_s=0.3), "pipeline bubble", 0.7 / 3),
        (timed(4, compute_s=2.0, imbalance_s=0.7, bubble_s=0.3), "unequal stages", 0.7 / 3),
        (timed(4, compute_s=2.0, data_wait_s=1.0), "data wait", 1 / 3),
        # The optimizer is replicated: 0.2 s on each of 4, where 1 device spent 0.4 s on both in all.
        (timed(4, compute_s=2.0, optimizer_s=0.2, rest_s=0.2), "small batch", (4 * 0.4 - 0.4) / (4 * 2.4)),
        (timed(4, compute_s=3.0), "smaller pieces per device", 1 / 3),
        (timed(4, compute_s=3.0, processes_per_core=2), "shared cores", 1 / 3),
        (timed(4, compute_s=3.0, processes_per_core=1), "smaller pieces per device", 1 / 3),
        # 5% of the step is enough to be named, less isn't.
        (timed(4, compute_s=2.0, rest_s=0.1, communication_s=2.1 * 0.0501 / 0.9499), "communication", 0.0501),
        (timed(4, compute_s=2.0, rest_s=0.1, communication_s=2.1 * 0.0499 / 0.9501), "none", 0.0),
    ],
)
def test_the_cause_is_the_largest_loss(here: ScalingPoint, cause: str, share: float) -> None:
    row = analyse([ONE, here]).rows[1]
    assert row.cause == cause
    assert row.losses.get(cause, 0.0) == pytest.approx(share)
    assert bool(row.advice) == (cause != "none")


def test_what_1_device_spends_too_is_no_loss() -> None:
    one = timed(1, compute_s=9.0, data_wait_s=1.0)
    report = analyse([one, timed(2, compute_s=4.5, data_wait_s=0.5), timed(4, compute_s=2.25, data_wait_s=4.0)])
    assert table(report) == {1: ("excellent", "none"), 2: ("excellent", "none"), 4: ("bottleneck", "data wait")}
    assert report.rows[2].losses["data wait"] == pytest.approx((4 * 4 - 1) / (4 * 6.25))


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("data_wait_s", "data wait"),
        ("optimizer_s", "small batch"),
        ("rest_s", "small batch"),
        ("communication_s", "communication"),
    ],
)
def test_what_takes_much_of_every_step_is_named_although_it_scales(part: str, cause: str) -> None:
    report = analyse([timed(1, compute_s=6.0, **{part: 4.0}), timed(2, compute_s=3.0, **{part: 2.0})])
    assert table(report) == {1: ("excellent", cause), 2: ("excellent", cause)}
    assert report.rows[1].wasted[cause] == pytest.approx(0.4)
    assert report.rows[1].losses[cause] == pytest.approx(0.0)
    assert report.rows[1].advice


def test_weak_scaling_compares_the_cost_of_a_token() -> None:
    one = timed(1, tokens=1000, compute_s=1.0)
    report = analyse([one, timed(4, tokens=4000, compute_s=1.0, communication_s=0.25)], mode="weak")
    assert report.rows[1].efficiency == pytest.approx(0.8)
    assert report.rows[1].losses == pytest.approx(
        {"communication": 0.2}
        | dict.fromkeys(("data wait", "pipeline bubble", "unequal stages", "small batch"), 0)
        | {"smaller pieces per device": 0}
    )


def test_slower_compute_is_told_from_what_1_device_needs() -> None:
    row = analyse([timed(1, compute_s=8.0), timed(4, compute_s=3.0, communication_s=1.0)]).rows[1]
    shares = row.time_shares()
    assert (shares["compute"], shares["slower compute"], shares["communication"]) == pytest.approx((0.5, 0.25, 0.25))


def test_without_a_timed_step_on_1_device_only_waste_is_known() -> None:
    report = analyse([replace(ONE, breakdown=None), timed(4, compute_s=2.0, communication_s=2.0)])
    assert table(report) == {1: ("excellent", "unknown"), 4: ("bottleneck", "communication")}
    assert not report.rows[1].losses and report.rows[1].wasted == {"communication": 0.5}
    assert report.rows[1].time_shares()["communication"] == 0.5
    assert report.rows[0].time_shares() == {}


@pytest.mark.parametrize(
    ("given_points", "mode", "message"),
    [
        ([], "strong", r"^no row for 1 device; .*measure 1 device as well"),
        (points({2: 1.0, 8: 3.0}), "strong", r"no row for 1 device \(found 2, 8\)"),
        ([*points(TEXTBOOK), *points({4: 1.0})], "strong", "4 devices: two points"),
        ([ScalingPoint(1, (1.0,)), ScalingPoint(2, seconds=(1.0,))], "strong", "some points have tokens_per_sec"),
        (points(TEXTBOOK), "medium", "mode='medium' is neither 'strong' nor 'weak'"),
        ([ONE, timed(2, tokens=2000, compute_s=1.0)], "strong", r"the same on all; found \{1: 1000, 2: 2000\}"),
        ([ONE, timed(2, tokens=1000, compute_s=1.0)], "weak", "in proportion to the devices"),
    ],
)
def test_points_that_cannot_be_analysed(given_points: list[ScalingPoint], mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        analyse(given_points, mode=mode)


def test_a_point_holds_positive_rates_or_times() -> None:
    assert ScalingPoint(2, seconds=(4.0, 2.0)).rates == (0.25, 0.5)
    for arguments in ({}, {"tokens_per_sec": (1.0,), "seconds": (1.0,)}):
        with pytest.raises(ValueError, match="2 devices: give either tokens_per_sec or seconds"):
            ScalingPoint(2, **arguments)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"1 device: measured .*, it must be positive"):
            ScalingPoint(1, (5.0, bad))
    with pytest.raises(ValueError, match="devices=0 must be at least 1"):
        ScalingPoint(0, (5.0,))


def test_the_parts_of_a_step_must_add_up() -> None:
    assert StepBreakdown(1.0, 10, compute_s=0.7, rest_s=0.34).parts()["rest_s"] == 0.34
    with pytest.raises(ValueError, match=r"add up to 0\.7 s, the step took 1 s; they may differ by 5%"):
        StepBreakdown(1.0, 10, compute_s=0.7)
    with pytest.raises(ValueError, match=r"data_wait_s=-0\.1"):
        StepBreakdown(1.0, 10, compute_s=1.1, data_wait_s=-0.1)
    with pytest.raises(ValueError, match="tokens_per_step of a step must be positive"):
        StepBreakdown(1.0, 0, compute_s=1.0)


def test_a_live_measurement_against_a_baseline() -> None:
    assert speedup_and_efficiency(650000, 8, 100000) == (6.5, 0.8125)
    # Against the rate of 2 devices: 8 have 4 times as many.
    speedup, efficiency = speedup_and_efficiency(600, 8, 200, baseline_devices=2)
    assert (speedup, efficiency) == (3.0, 0.75)
    for baseline in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"the baseline is .* tokens/s; it must be positive"):
            speedup_and_efficiency(1.0, 1, baseline)
    with pytest.raises(ValueError, match="devices=0"):
        speedup_and_efficiency(1.0, 0, 1.0)


# --- files ----------------------------------------------------------------------------------------------------------


def written(folder: Path, text: str) -> Path:
    path = folder / "rates.csv"
    path.write_text(text)
    return path


def test_a_file_of_rates_is_the_textbook_example(tmp_path: Path) -> None:
    text = "devices,tokens_per_sec\n1,100000\n2,190000\n4,360000\n8,650000\n"
    read = read_points(written(tmp_path, text))
    assert read == points(TEXTBOOK)
    assert [row.efficiency for row in analyse(read).rows] == [1.0, 0.95, 0.9, 0.8125]


def test_a_file_may_have_repeats_blank_lines_other_columns_and_any_order(tmp_path: Path) -> None:
    text = "\ufeffdevices, tokens_per_sec ,note\n2,3.5e3,first\n\n1,1000,\n,,\n 2 , 3700 , second\n"
    assert read_points(written(tmp_path, text)) == [ScalingPoint(1, (1000.0,)), ScalingPoint(2, (3500.0, 3700.0))]


def test_a_file_of_times_gives_speedups_but_no_tokens(tmp_path: Path) -> None:
    report = analyse(read_points(written(tmp_path, "devices,seconds\n1,100\n2,50\n4,40\n4,40\n")))
    assert [row.speedup for row in report.rows] == pytest.approx([1, 2, 2.5])
    assert report.rows[2].verdict == "bottleneck" and not report.tokens_known


@given(st.dictionaries(st.integers(2, 4096), positive, max_size=5), positive)
def test_times_and_rates_of_the_same_runs_agree(times: dict[int, float], one: float) -> None:
    times[1] = one
    by_time = analyse([ScalingPoint(n, seconds=(s,)) for n, s in times.items()])
    by_rate = analyse([ScalingPoint(n, (2048 / s,)) for n, s in times.items()])
    for a, b in zip(by_time.rows, by_rate.rows, strict=True):
        assert a.speedup == pytest.approx(b.speedup, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"rates\.csv is empty; wanted: devices,tokens_per_sec or devices,seconds"),
        ("gpus,tokens_per_sec\n1,2\n", "line 1: no column devices; found: gpus,tokens_per_sec; wanted: devices"),
        ("devices,rate\n1,2\n", "line 1: no column tokens_per_sec or seconds; found: devices,rate"),
        ("devices;seconds\n1;2\n", "line 1: no column devices; found: devices;seconds"),
        ("devices,seconds,tokens_per_sec\n1,2,3\n", "line 1: columns tokens_per_sec and seconds; keep the one"),
        ("devices,tokens_per_sec\n1,fast\n", "line 2: tokens_per_sec is 'fast'; write a positive number"),
        ("devices,tokens_per_sec\n1,5\n\n2,0\n", "line 4: tokens_per_sec is '0'"),
        ("devices,tokens_per_sec\n1,-5\n", "line 2: tokens_per_sec is '-5'"),
        ("devices,tokens_per_sec\n1,100,000\n2,190,000\n", r"line 2: 3 values in 2 columns; .* write 1234.5, not 1,"),
        ("devices,tokens_per_sec,tokens_per_sec\n1,5,6\n", "line 1: two columns tokens_per_sec; keep the one"),
        ("devices,tokens_per_sec\n1,1e300\n2,1e-300\n", "line 2: tokens_per_sec is '1e300'"),
        ("devices,seconds\n1,1e-320\n", "line 2: seconds is '1e-320'"),
        (f"devices,seconds\n1,1\n1{'0' * 29},1\n", "line 3: devices is '10*'; write a whole number from 1 to 1e.15"),
        ("devices,tokens_per_sec\n1,nan\n", "line 2: tokens_per_sec is 'nan'"),
        ("devices,tokens_per_sec\n1\n", "line 2: tokens_per_sec is ''"),
        ('devices,tokens_per_sec\n1,"100,000"\n', "line 2: tokens_per_sec is '100,000'"),
        ("devices,seconds\n1.5,5\n", "line 2: devices is '1.5'; write a whole number from 1"),
        ("devices,seconds\n0,5\n", "line 2: devices is '0'"),
        (f"devices,seconds\n{'9' * 400},5\n", "line 2: devices is '999"),
        ("devices,tokens_per_sec\n2,5\n4,9\n", r"no row for 1 device \(found 2, 4\)"),
        ("devices,tokens_per_sec\n", "no row for 1 device; "),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_points(written(tmp_path, text))
    assert "rates.csv" in str(error.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"can't read '.*none\.csv': No such file or directory"):
        read_points(tmp_path / "none.csv")
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\r\n\xff\xfe")
    with pytest.raises(ValueError, match=r"picture\.csv is not a CSV file in UTF-8"):
        read_points(tmp_path / "picture.csv")


def test_the_definitions_need_no_torch() -> None:
    command = "import sys, lt_parallel.metrics.scaling; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], timeout=60).returncode == 0
