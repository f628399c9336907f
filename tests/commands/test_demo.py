"""`make demo`'s program, from an empty folder to its results."""

import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_trains_reloads_and_writes_its_results(tmp_path: Path) -> None:
    leftover = tmp_path / "runs" / "demo" / "leftover.txt"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("from an earlier run")
    environment = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}
    done = subprocess.run(
        [sys.executable, "-m", "lt_parallel.demo"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not leftover.exists()
    assert (tmp_path / "runs" / "demo.previous" / "leftover.txt").read_text() == "from an earlier run"
    bits = re.search(r"validation bits/byte \(uniform: 8\)\s*│\s*([\d.]+)", done.stdout)
    assert bits is not None, done.stdout
    assert float(bits[1]) < 3.2

    folder = tmp_path / "runs" / "demo"
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    val_losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert len(losses) == 200
    assert losses[5] < losses[0] < math.log(384) + 1
    assert abs(val_losses[-1] / math.log(2) - float(bits[1])) < 5e-4
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("def ")
    assert any((folder / "checkpoints").iterdir())
