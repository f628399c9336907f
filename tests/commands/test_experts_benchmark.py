"""`python -m benchmarks.experts`: what it checks, and what it writes; nothing here is about time."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import experts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "shape", [*experts.QUICK, *experts.SHAPES["cpu"], *experts.SHAPES["cuda"]], ids=lambda s: s.name
)
def test_every_token_has_an_expert(shape: experts.Shape) -> None:
    even, skewed, half_empty = (experts.counts(shape, balance) for balance in experts.BALANCES)
    for each in (even, skewed, half_empty):
        assert len(each) == shape.experts and sum(each) == shape.tokens and min(each) >= 0
    assert max(even) - min(even) <= 1
    assert skewed[0] > 1.3 * even[0] and skewed[0] == max(skewed)
    assert not any(half_empty[1::2]) and all(half_empty[::2])


def test_results_that_differ_are_refused() -> None:
    expected = {"output": torch.ones(4), "gradient of x": torch.zeros(4)}
    assert experts.largest_error({"output": torch.ones(4), "gradient of x": torch.zeros(4)}, expected, 1e-5) == 0
    with pytest.raises(RuntimeError, match=r"^output differs by 1\.0e-01; limit 1e-05$"):
        experts.largest_error({**expected, "output": torch.full((4,), 1.1)}, expected, 1e-5)
    for value in (1.0, torch.nan):
        with pytest.raises(RuntimeError, match=re.escape(f"gradient of x differs by {2 * value:.1e}; limit")):
            experts.largest_error({**expected, "gradient of x": torch.full((4,), value)}, expected, 1e-5)


def test_where_grouped_is_slower_is_said() -> None:
    def row(grouped_s: float) -> experts.Row:
        times_s = {"sequential": [1.0, 2.0, 1.0], "loop": [1.0, 2.0, 1.0], "grouped": [grouped_s, 9.0, grouped_s]}
        peaks = {"sequential": 4, "loop": 4, "grouped": 2}
        return experts.Row(experts.QUICK[0], "skewed", torch.bfloat16, times_s, peaks, 1e-3)

    assert experts.slower([row(0.5), row(1.04)], "loop") == "It is slower by 5% or more nowhere."
    name = "24 x 16 x 16, 4 (skewed, bf16)"
    assert experts.slower([row(0.5), row(1.5)], "loop") == f"It is slower by 5% or more in 1 of 2 rows: {name}: 1.50."
    first, *_, last = experts.summary([row(0.5), row(1.5)])
    assert first.startswith("Grouped takes 0.50 to 1.50 of the time of sequential (median 1.00) and 0.50 to 0.50 of")
    assert last.endswith("largest relative error: 1.0e-03 in bf16.")


def test_options_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for option in (f"--out={tmp_path}/nowhere/e.md", f"--out={tmp_path}/e.txt", "--rounds=0"):
        monkeypatch.setattr(sys, "argv", ["experts", option])
        assert experts.main() == 2
        assert capsys.readouterr().err.startswith(f"benchmarks.experts: {option} must ")
    assert not list(tmp_path.iterdir())


def test_the_whole_script(tmp_path: Path) -> None:
    out = tmp_path / "some.experts.md"
    command = [sys.executable, "-m", "benchmarks.experts", "--quick", f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    header, _, *lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert tuple(header) == experts.COLUMNS
    dtypes = ("fp32", "bf16")
    wanted = [
        (shape.name, balance, dtype) for shape in experts.QUICK for dtype in dtypes for balance in experts.BALANCES
    ]
    assert [tuple(line[:3]) for line in lines] == wanted
    for line in lines:
        assert all(float(cell) > 0 for cell in line[3:])
    # A step holds at least the gradients of the weights and of x.
    for shape, line in zip(itertools.chain.from_iterable([each] * 6 for each in experts.QUICK), lines, strict=True):
        gradients = (3 * shape.experts * shape.ffn + shape.tokens) * shape.hidden * (4 if line[2] == "fp32" else 2)
        assert all(gradients <= float(cell) * 2**20 * 1.001 < 12 * gradients for cell in line[-3:])
    for said in ("* Machine: ", "* Date: 20", "* Versions: Python 3", "one thread", "Grouped takes ", "It is slower"):
        assert said in text
    assert "FAILED" not in text
    assert text.endswith(f"* Command: `python -m benchmarks.experts --quick --out={out}`\n")
