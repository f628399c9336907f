"""The same script started by torchrun and by Lightning's own launcher: both end well, with the same losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """
import json
import sys

import torch

from tests.ranks.parity_runs import train_with_trainer

if __name__ == "__main__":
    strategy = {"tensor_model_parallel_size": 2}
    numbers = train_with_trainer("gpt2", 2, strategy, max_steps=3, val_check_interval=3, limit_val_batches=1)
    with open(f"{sys.argv[1]}/{torch.distributed.get_rank()}.json", "w") as file:
        json.dump(numbers, file)
"""
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "lightning": [],
}


def start(arguments: list[str], script: Path, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    unwanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    environment = {name: value for name, value in os.environ.items() if not name.endswith(unwanted)}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "LT_PARALLEL_DEVICE": "cpu"}
    return subprocess.Popen(
        [sys.executable, *arguments, str(script), str(folder)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.timeout(240)
def test_torchrun_and_lightning_give_the_same_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started = {name: start(arguments, script, tmp_path / name) for name, arguments in LAUNCHERS.items()}
    try:
        for name, process in started.items():
            output, _ = process.communicate(timeout=180)
            assert process.returncode == 0, f"{name}:\n{output}"
            assert "Traceback" not in output, f"{name}:\n{output}"
            for noise in ("deprecated", "megatron/core", "experimental"):
                assert noise not in output.lower(), f"{name}:\n{output}"
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = {
        f"{name} {rank}": json.loads((tmp_path / name / f"{rank}.json").read_text())
        for name in LAUNCHERS
        for rank in (0, 1)
    }
    first = found["torchrun 0"]
    assert len(first["loss"]) == 3 and len(first["val_loss"]) == 1
    assert 3.5 < first["loss"][0] < 5.5, "near ln(100), the loss of a model that knows nothing"
    assert first["loss"][2] != first["loss"][0]
    for where, numbers in found.items():
        assert numbers == first, where
