"""Reading the throughput of an earlier run."""

import json
from pathlib import Path

import pytest

from lt_parallel.metrics.baseline import Baseline, read_baseline

HEADER = "step,train_loss,train/device/tokens_per_sec,train/tokens_per_sec\n"


def test_csv_gives_the_median_and_the_devices(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "0,5.0,,\n1,,100,400\n3,,300,1200\n5,,200,800\n")
    assert read_baseline(path) == Baseline(800.0, 4)


def test_scaling_json_gives_the_row_of_one_device(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    rows = [{"devices": 2, "rate": 190.0}, {"devices": 1, "rate": 100.0}]
    path.write_text(json.dumps({"rows": rows, "tokens_known": True}))
    assert read_baseline(path) == Baseline(100.0, 1)
    path.write_text(json.dumps({"rows": rows, "tokens_known": False}))
    with pytest.raises(ValueError, match="holds no throughput"):
        read_baseline(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", HEADER + "0,5.0,,\n", "holds no throughput; it needs the columns train/tokens_per_sec"),
        ("a.csv", "other\n1\n", "holds no throughput"),
        ("a.csv", HEADER + "0,,0,0\n", "can't be read"),
        ("a.csv", HEADER + "0,,fast,fast\n", "can't be read"),
        ("a.csv", HEADER + "0,,1e-320,1e300\n", "can't be read"),
        ("a.csv", HEADER + "0,,900,100\n", "0 devices can't be a baseline"),
        ("a.csv", "x" * 200_000, "can't be read"),
        ("a.json", "{", "can't be read"),
        ("a.json", "[]", "can't be read"),
        ("a.json", '{"rows": [{"devices": 1, "rate": 0}]}', "0 tokens/s can't be a baseline; it must be positive"),
    ],
)
def test_files_that_hold_no_baseline(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_baseline(path)
    assert str(path) in str(caught.value)
