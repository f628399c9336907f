"""The throughput that a run is compared with, read from what an earlier run wrote."""

from __future__ import annotations

import csv
import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

_GLOBAL, _DEVICE = "train/tokens_per_sec", "train/device/tokens_per_sec"


class Baseline(NamedTuple):
    """Tokens/s of all devices together, and how many they were."""

    tokens_per_sec: float
    devices: int = 1

    def check(self, origin: str) -> Baseline:
        """Itself. Raises ValueError, naming its origin, if throughput or devices aren't positive."""
        if not (math.isfinite(self.tokens_per_sec) and self.tokens_per_sec > 0):
            raise ValueError(f"{origin}: {self.tokens_per_sec:g} tokens/s can't be a baseline; it must be positive")
        if self.devices < 1:
            raise ValueError(f"{origin}: {self.devices} devices can't be a baseline; there must be at least 1")
        return self


def read_baseline(path: Path) -> Baseline:
    """Reads an earlier run's throughput.

    Args:
        path: A `metrics.csv` that Lightning's CSVLogger wrote in a run with `ThroughputMonitor` (the median of its
            rows counts), or the `scaling.json` of `lt-parallel scaling` (its row for 1 device counts).

    Raises:
        ValueError: The file isn't there, is neither of the two, or holds no positive throughput.
    """
    if not path.is_file():
        raise ValueError(f"baseline: there is no file {str(path)!r}; give tokens/s, a metrics.csv or a scaling.json")
    try:
        found = _from_json(path) if path.suffix == ".json" else _from_csv(path)
    except (KeyError, TypeError, ValueError, ArithmeticError, OSError, csv.Error) as error:
        raise ValueError(f"baseline: {str(path)!r} can't be read as an earlier run's file: {error}") from error
    if found is None:
        raise ValueError(
            f"baseline: {str(path)!r} holds no throughput; it needs the columns {_GLOBAL} and {_DEVICE} of a run with "
            "ThroughputMonitor, or a row for 1 device of `lt-parallel scaling`"
        )
    return found.check(f"baseline {str(path)!r}")


def _from_csv(path: Path) -> Baseline | None:
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(_GLOBAL) and row.get(_DEVICE)]
    if not rows:
        return None
    total = statistics.median(float(row[_GLOBAL]) for row in rows)
    return Baseline(total, round(float(rows[0][_GLOBAL]) / float(rows[0][_DEVICE])))


def _from_json(path: Path) -> Baseline | None:
    content = json.loads(path.read_text())
    for row in content["rows"]:
        if row["devices"] == 1 and content.get("tokens_known", True):
            return Baseline(float(row["rate"]), 1)
    return None
