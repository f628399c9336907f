"""How training scales with the number of devices, and what holds it back.

    Throughput(N)  tokens per second on N devices
    Speedup(N)     Throughput(N) / Throughput(1)
    Efficiency(N)  Speedup(N) / N

In strong scaling a step is the same work on any number of devices; in weak scaling it grows with them. The formulas are
the same.

Where steps were timed in parts, the loss is decomposed. A token costs ``N * step_s / tokens_per_step`` device-seconds.
What it costs more than on 1 device, part by part and as a share of the step's device time, is what is lost: the shares
add up to ``1 - Efficiency(N)``, as far as the timed steps run at the measured throughput. The largest share is the
likely cause, if it is at least 5% of the step. Waiting and fixed costs that take 15% of a step or more count whole,
even if 1 device has them as well: they scale, but they waste devices.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

EXCELLENT = "excellent"
GOOD = "good"
BOTTLENECK = "bottleneck"
VERDICTS = (EXCELLENT, GOOD, BOTTLENECK)

#: Efficiency above which scaling is excellent, and below which there is a bottleneck.
EXCELLENT_ABOVE = 0.90
BOTTLENECK_BELOW = 0.70
#: Share of a step's device time that a loss must have to be named as the cause.
CAUSE_FROM = 0.05
#: Share of a step's device time from which a wait or a fixed cost is a cause even where 1 device has it too.
WASTE_FROM = 0.15
#: How far the parts of a step may be from the whole, as a share of it: timers of overlapping parts.
PARTS_TOLERANCE = 0.05
#: Processes per core above which they share cores.
SHARED_CORES_ABOVE = 1.0

MODES = ("strong", "weak")

#: The parts of a step, in the order in which they are shown.
PARTS = (
    "compute_s",
    "communication_s",
    "bubble_s",
    "imbalance_s",
    "data_wait_s",
    "optimizer_s",
    "rest_s",
)

#: What a file's numbers may be: beyond, one was mistyped, and ratios overflow.
_SMALLEST, _LARGEST = 1e-9, 1e15

NO_CAUSE = "none"
UNKNOWN_CAUSE = "unknown"
SHARED_CORES = "shared cores"
SMALLER_PIECES = "smaller pieces per device"

#: What is lost, by the parts that it is measured from. "compute" has a name for each of its two reasons.
_LOSSES: Mapping[str, tuple[str, ...]] = {
    "data wait": ("data_wait_s",),
    "pipeline bubble": ("bubble_s",),
    "unequal stages": ("imbalance_s",),
    "communication": ("communication_s",),
    "small batch": ("optimizer_s", "rest_s"),
    "compute": ("compute_s",),
}

_ADVICE: Mapping[str, str] = {
    "data wait": "more loader workers, or data prepared beforehand",
    "pipeline bubble": "more micro batches per step, or virtual pipeline stages",
    "unequal stages": "a pipeline layout that evens out the stages",
    "communication": "overlap it with compute, keep tensor parallel groups within a node, or sync less often",
    "small batch": "a larger micro batch, or more micro batches per step: the step's fixed costs weigh too much",
    SHARED_CORES: "no more processes than cores: these compete for the same cores",
    SMALLER_PIECES: "a larger micro batch, or fewer ways to split each layer: small matrices are slow",
    NO_CAUSE: "",
    UNKNOWN_CAUSE: "",
}


@dataclass(frozen=True)
class StepBreakdown:
    """Where the time of a step goes, in seconds per step, averaged over the devices. The parts add up to the step.

    Args:
        step_s: The whole step.
        tokens_per_step: Tokens of the global batch.
        compute_s: Forward and backward compute.
        communication_s: Gradient sync, pipeline p2p, tensor parallel collectives, as far as compute waits for them.
        bubble_s: Idle time that the pipeline schedule's formula explains.
        imbalance_s: Idle time that unequal stages explain: the slowest stage's compute minus the mean.
        data_wait_s: Waiting for the loader.
        optimizer_s: The optimizer's step.
        rest_s: What remains of the step.
        processes_per_core: Training processes per CPU core, for training on CPUs; above 1 they share cores.
    """

    step_s: float
    tokens_per_step: float
    compute_s: float
    communication_s: float = 0.0
    bubble_s: float = 0.0
    imbalance_s: float = 0.0
    data_wait_s: float = 0.0
    optimizer_s: float = 0.0
    rest_s: float = 0.0
    processes_per_core: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name}={value} of a step must be a number that is not negative")
        for name in ("step_s", "tokens_per_step"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} of a step must be positive")
        total = sum(self.parts().values())
        if abs(total - self.step_s) > PARTS_TOLERANCE * self.step_s:
            raise ValueError(
                f"the parts of a step add up to {total:.6g} s, the step took {self.step_s:.6g} s; "
                f"they may differ by {PARTS_TOLERANCE:.0%}: what no part covers belongs into rest_s"
            )

    def parts(self) -> dict[str, float]:
        """Seconds per step by the names in `PARTS`."""
        return {name: getattr(self, name) for name in PARTS}


@dataclass(frozen=True)
class ScalingPoint:
    """Measurements on one number of devices; either rates or times, one value per repeat.

    Args:
        devices: How many.
        tokens_per_sec: Throughput of all devices together.
        seconds: Time for a fixed amount of work, where the tokens in it aren't known.
        breakdown: Where the time goes, if it was measured.
    """

    devices: int
    tokens_per_sec: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    breakdown: StepBreakdown | None = None

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"devices={self.devices} must be at least 1")
        if bool(self.tokens_per_sec) == bool(self.seconds):
            raise ValueError(f"{_devices(self.devices)}: give either tokens_per_sec or seconds")
        for value in self.tokens_per_sec or self.seconds:
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{_devices(self.devices)}: measured {value}, it must be positive")

    @property
    def rates(self) -> tuple[float, ...]:
        """Throughput of each repeat: tokens/s, or the fixed work per second."""
        return self.tokens_per_sec or tuple(1 / seconds for seconds in self.seconds)


@dataclass(frozen=True)
class ScalingRow:
    """One line of the report.

    Args:
        devices: How many.
        rates: Throughput of each repeat: tokens/s, or the fixed work per second.
        rate: Their median.
        speedup: Over 1 device.
        efficiency: Speedup per device, 1 is ideal.
        verdict: "excellent", "good" or "bottleneck".
        cause: What most of the loss is due to; "none" if nothing stands out, "unknown" without timed steps.
        advice: What to do about it, empty if there is nothing to do.
        losses: Share of the step's device time lost to each cause, over what 1 device spends; negative where less is
            spent. Empty without timed steps.
        wasted: Share of the step's device time by cause, that the likely cause is chosen by: the loss, or all that is
            spent on waiting or fixed costs where that is much.
        breakdown: Where the time goes, if it was measured.
    """

    devices: int
    rates: tuple[float, ...]
    rate: float
    speedup: float
    efficiency: float
    verdict: str
    cause: str
    advice: str
    losses: Mapping[str, float]
    wasted: Mapping[str, float]
    breakdown: StepBreakdown | None = None

    @property
    def ideal(self) -> float:
        """The speedup without any loss."""
        return float(self.devices)

    def time_shares(self) -> dict[str, float]:
        """Shares of a step by what they are spent on; compute is split into what 1 device needs and the excess."""
        if self.breakdown is None:
            return {}
        parts = self.breakdown.parts()
        total = sum(parts.values())
        shares = {name.removesuffix("_s").replace("_", " "): seconds / total for name, seconds in parts.items()}
        slower = min(max(self.losses.get(SHARED_CORES, self.losses.get(SMALLER_PIECES, 0.0)), 0.0), shares["compute"])
        return {"compute": shares.pop("compute") - slower, "slower compute": slower} | shares


@dataclass(frozen=True)
class ScalingReport:
    """What `analyse` found.

    Args:
        rows: By number of devices, from 1.
        mode: "strong" or "weak".
        label: What was measured, for titles.
        tokens_known: Whether rates are tokens/s; otherwise they mean something relative to each other only.
    """

    rows: tuple[ScalingRow, ...]
    mode: str = "strong"
    label: str = ""
    tokens_known: bool = True

    @property
    def causes_known(self) -> bool:
        """Whether any row says where its loss comes from."""
        return any(row.cause != UNKNOWN_CAUSE for row in self.rows)


class Scaling(NamedTuple):
    """Speedup over the baseline, and efficiency (1 is ideal)."""

    speedup: float
    efficiency: float


def speedup_and_efficiency(
    tokens_per_sec: float, devices: int, baseline_tokens_per_sec: float, baseline_devices: int = 1
) -> Scaling:
    """Speedup and efficiency of one measurement.

    Args:
        tokens_per_sec: Throughput now.
        devices: On how many devices.
        baseline_tokens_per_sec: Throughput to compare with.
        baseline_devices: On how many devices that was.

    Raises:
        ValueError: If the baseline or a number of devices isn't positive.
    """
    if not math.isfinite(baseline_tokens_per_sec) or baseline_tokens_per_sec <= 0:
        raise ValueError(
            f"the baseline is {baseline_tokens_per_sec} tokens/s; it must be positive: "
            "give what the same training reaches on the baseline's devices"
        )
    if devices < 1 or baseline_devices < 1:
        raise ValueError(f"devices={devices} and baseline_devices={baseline_devices} must be at least 1")
    speedup = tokens_per_sec / baseline_tokens_per_sec
    return Scaling(speedup, speedup * baseline_devices / devices)


def verdict(efficiency: float) -> str:
    """What an efficiency is called: "excellent" above 90%, "bottleneck" below 70%, "good" between."""
    if efficiency > EXCELLENT_ABOVE:
        return EXCELLENT
    return BOTTLENECK if efficiency < BOTTLENECK_BELOW else GOOD


def analyse(points: Iterable[ScalingPoint], mode: str = "strong", label: str = "") -> ScalingReport:
    """Speedup, efficiency, verdict and likely cause of each point.

    Args:
        points: One per number of devices, in any order; 1 device among them.
        mode: "strong" if a step is the same work on any number of devices, "weak" if the work grows with them.
        label: What was measured, for titles.

    Raises:
        ValueError: If 1 device isn't there, a number of devices is there twice, or the points can't be compared.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is neither {' nor '.join(map(repr, MODES))}")
    ordered = sorted(points, key=lambda point: point.devices)
    _check(ordered, mode)
    base = ordered[0]
    base_rate = statistics.median(base.rates)
    rows = tuple(_row(point, base_rate, base.breakdown) for point in ordered)
    return ScalingReport(rows, mode=mode, label=label, tokens_known=bool(base.tokens_per_sec))


def _check(points: Sequence[ScalingPoint], mode: str) -> None:
    counts = [point.devices for point in points]
    if not counts or counts[0] != 1:
        raise ValueError(_no_baseline(counts))
    twice = sorted({count for count in counts if counts.count(count) > 1})
    if twice:
        raise ValueError(f"{_devices(twice[0])}: two points; put repeats into one point")
    if len({bool(point.tokens_per_sec) for point in points}) > 1:
        raise ValueError("some points have tokens_per_sec, others seconds; they can't be compared")
    timed = {point.devices: point.breakdown.tokens_per_step for point in points if point.breakdown}
    work = {count: tokens / (count if mode == "weak" else 1) for count, tokens in timed.items()}
    if work and not math.isclose(min(work.values()), max(work.values()), rel_tol=1e-6):
        rule = "the same on all" if mode == "strong" else "in proportion to the devices"
        raise ValueError(f"mode={mode!r} needs tokens per step that are {rule}; found {timed} (devices: tokens)")


def _no_baseline(counts: Sequence[int]) -> str:
    found = f" (found {', '.join(map(str, sorted(set(counts))))})" if counts else ""
    return f"no row for 1 device{found}; speedup is relative to it: measure 1 device as well"


def _row(point: ScalingPoint, base_rate: float, base: StepBreakdown | None) -> ScalingRow:
    rates = point.rates
    rate = statistics.median(rates)
    speedup, efficiency = speedup_and_efficiency(rate, point.devices, base_rate)
    losses = _losses(point, base)
    wasted = _wasted(point.breakdown, losses)
    cause = _cause(wasted)
    return ScalingRow(
        devices=point.devices,
        rates=rates,
        rate=rate,
        speedup=speedup,
        efficiency=efficiency,
        verdict=verdict(efficiency),
        cause=cause,
        advice=_ADVICE[cause],
        losses=losses,
        wasted=wasted,
        breakdown=point.breakdown,
    )


def _losses(point: ScalingPoint, base: StepBreakdown | None) -> dict[str, float]:
    """Share of the step's device time lost to each cause; empty without breakdowns of it and of 1 device."""
    here = point.breakdown
    if here is None or base is None:
        return {}
    # Device-seconds that 1 device needs for this step's tokens, against what this many devices spend on them.
    work = here.tokens_per_step / base.tokens_per_step
    total = point.devices * here.step_s
    excess = {name: point.devices * here.parts()[name] - work * base.parts()[name] for name in PARTS}
    losses = {cause: sum(excess[name] for name in names) / total for cause, names in _LOSSES.items()}
    slower = SHARED_CORES if here.processes_per_core > SHARED_CORES_ABOVE else SMALLER_PIECES
    return {slower if cause == "compute" else cause: share for cause, share in losses.items()}


def _wasted(here: StepBreakdown | None, losses: Mapping[str, float]) -> dict[str, float]:
    """The losses over 1 device; where waiting or fixed costs are a large part of the step, all of that part."""
    wasted = dict(losses)
    if here is not None:
        for cause, names in _LOSSES.items():
            share = sum(here.parts()[name] for name in names) / here.step_s
            if cause != "compute" and share >= WASTE_FROM:
                wasted[cause] = max(share, wasted.get(cause, 0.0))
    return wasted


def _cause(wasted: Mapping[str, float]) -> str:
    if not wasted:
        return UNKNOWN_CAUSE
    cause, share = max(wasted.items(), key=lambda item: item[1])
    return cause if share >= CAUSE_FROM else NO_CAUSE


def read_points(path: str | Path) -> list[ScalingPoint]:
    """Measurements from a CSV file with the columns `devices` and either `tokens_per_sec` or `seconds`.

    Rows with the same number of devices are repeats. With `seconds`, every row must be the time of the same work.
    Other columns are left alone.

    Raises:
        ValueError: If the file can't be used; the message gives file, line and what to change.
    """
    path = Path(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            unit = _unit(path, header)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except OSError as error:
        raise ValueError(f"can't read {str(path)!r}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8 ({error})") from error
    samples: dict[int, list[float]] = {}
    for line, cells in rows:
        if any(cells):
            if any(cells[len(header) :]):
                raise ValueError(
                    f"{path}, line {line}: {len(cells)} values in {len(header)} columns; a comma separates columns, so "
                    "write 1234.5, not 1,234.5"
                )
            row = dict(zip(header, cells, strict=False))
            devices = _number(row, "devices", path, line, whole=True)
            samples.setdefault(int(devices), []).append(_number(row, unit, path, line))
    if 1 not in samples:
        raise ValueError(f"{path}: {_no_baseline(list(samples))}")
    ordered = [(devices, tuple(values)) for devices, values in sorted(samples.items())]
    if unit == "seconds":
        return [ScalingPoint(devices, seconds=values) for devices, values in ordered]
    return [ScalingPoint(devices, tokens_per_sec=values) for devices, values in ordered]


def _unit(path: Path, header: Sequence[str]) -> str:
    """Which of the two columns the file has."""
    wanted = "wanted: devices,tokens_per_sec or devices,seconds"
    if not any(header):
        raise ValueError(f"{path} is empty; {wanted}, then a row per measurement")
    units = [name for name in ("tokens_per_sec", "seconds") if name in header]
    if "devices" not in header or not units:
        missing = "devices" if "devices" not in header else "tokens_per_sec or seconds"
        raise ValueError(f"{path}, line 1: no column {missing}; found: {','.join(header)}; {wanted}")
    twice = next((name for name in ("devices", *units) if header.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path}, line 1: two columns {twice}; keep the one that was measured")
    if len(units) > 1:
        raise ValueError(f"{path}, line 1: columns tokens_per_sec and seconds; keep the one that was measured")
    return units[0]


def _number(row: Mapping[str, str], column: str, path: Path, line: int, whole: bool = False) -> float:
    text = row.get(column, "")
    kind = f"a whole number from 1 to {_LARGEST:g}" if whole else "a positive number, such as 1234.5"
    try:
        value = float(int(text)) if whole else float(text)
    except (ValueError, OverflowError):
        value = math.nan
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"{path}, line {line}: {column} is {text[:40]!r}; write {kind}")
    return value


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"
