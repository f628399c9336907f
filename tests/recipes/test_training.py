"""The tiny recipes train as a user starts them."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from lt_parallel.recipe_files import recipe_path
from tests.recipes.contents import SIBLINGS, arguments, sizes

STEPS = 2


def _fit(recipe: str, folder: Path) -> list[dict[str, str]]:
    """Trains in processes of Lightning's launcher; returns the logged rows."""
    text = folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("def once(n):\n    return n + 1\n" * 2000)
    command = [sys.executable, "-m", "lt_parallel.cli", "fit", "--config", str(recipe_path(recipe))]
    options = [
        "--trainer.accelerator=cpu",
        f"--trainer.max_steps={STEPS}",
        f"--trainer.val_check_interval={STEPS}",
        f"--data.paths=[{text}]",
    ]
    ended = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert f"Finished fit: {STEPS} steps" in ended.stdout + ended.stderr
    with next((folder / "runs" / recipe).glob("version_0/metrics.csv")).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SIBLINGS.values())
def test_tiny_recipes_train(recipe: str, tmp_path: Path) -> None:
    rows = _fit(recipe, tmp_path)
    logged = {name: [float(row[name]) for row in rows if row.get(name)] for name in rows[0]}
    losses = logged["train_loss"]
    assert len(losses) == STEPS
    # The logarithm of 257 bytes, then less.
    assert losses[0] == pytest.approx(5.55, abs=0.2) and losses[1] < losses[0]
    assert len(logged["val_loss"]) == 1
    assert all(value > 0 for value in logged["grad_norm"])
    if "moe" in arguments(recipe, "model"):  # 1 where experts are equally busy
        assert all(0.9 < value < 1.5 for value in logged["seq_load_balancing_loss"])
    assert ("mtp_1_loss" in logged) == ("mtp_num_layers" in arguments(recipe, "model"))
    assert logged["params_total"][0] <= logged["params_this_rank"][0] * sizes(recipe).world_size
