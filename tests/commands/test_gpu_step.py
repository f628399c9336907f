"""`python -m benchmarks.gpu.step`: the script for a GPU machine, as far as it can be tried without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import step

ROWS = {
    "kernels": {
        "rows": [
            {"name": "auto", "passed": True, "operators": ["_scaled_dot_product_cudnn_attention"], "error": 1e-3},
            {"name": "fused", "passed": False, "failure": "No available kernel"},
        ]
    },
    "rates": {
        "trainer": {"step_s": 0.5},
        "megatron": {"step_s": 0.4},
        "memory_gib": 40.0,
        "flops": {"model": 8e9, "hardware": 9e9, "full_attention": 1e10},
        "operators": ["_scaled_dot_product_flash_attention"],
        "loss_error": 1e-6,
        "compared": 5,
    },
}


def command(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["step", *options])
    return step.main()


def with_parts(monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], device: str = "NVIDIA H200") -> None:
    """Parts that give these results at once."""
    monkeypatch.setattr(step.Run, "_started", lambda self, name: parts[name])
    monkeypatch.setattr(step, "machine", lambda name: {"device": device, "python": "3", "versions": {}, "date": "now"})


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(step, "has_cuda", lambda: False)
    assert command(monkeypatch, f"--out={tmp_path / 'r.json'}") == 2
    shown = capsys.readouterr()
    assert shown.out == "" and not list(tmp_path.iterdir())
    assert shown.err.count("\n") == 1 and "no CUDA device" in shown.err and "--device cpu --shape tiny" in shown.err
    assert command(monkeypatch, "--device=cpu", f"--out={tmp_path}/nowhere/r.json") == 2
    assert capsys.readouterr().err == f"benchmarks.gpu.step: --out: there is no folder {tmp_path}/nowhere\n"
    assert command(monkeypatch, "--device=cpu", "--tests") == 2
    assert capsys.readouterr().err == "benchmarks.gpu.step: --tests needs a CUDA device\n"


def test_what_failed_and_what_was_left_out_is_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with_parts(monkeypatch, ROWS)
    monkeypatch.setattr(step.importlib.util, "find_spec", lambda name: None if name == "transformers" else True)
    out = tmp_path / "r.json"
    options = ("--device=cpu", "--shape=tiny", f"--out={out}", "--only", "kernels", "rates", "hugging_face")
    assert command(monkeypatch, *options) == 1
    shown = capsys.readouterr()
    assert "FAILED kernels: fused: No available kernel" in shown.err
    table = out.with_suffix(".md").read_text()
    assert table == shown.out.rstrip("\n") + "\n"
    assert "| fused | FAILED | No available kernel |" in table
    assert "| Hugging Face Llama, SDPA, autocast | transformers isn't installed here |" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.md"]
    # 256 tokens in 0.5 s, over the 989.4 dense bf16 TFLOP/s of the data sheet halved from 1,979.
    share = 256 / 0.5 / 989.5e12
    shares = [f"{100 * share * flops:.1f}%" for flops in (8e9, 9e9, 1e10)]
    assert f"| Trainer + MegatronParallelStrategy | 500 ms | 512 | {' | '.join(shares)} | 40.0 GiB |" in table
    assert "Trainer / plain loop: 1.2500" in table
    assert json.loads(out.read_text())["parts"]["kernels"] == ROWS["kernels"]


def test_numbers_that_disagree_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reference = {"loss": [5.0, 4.0], "grad_norm": [1.0, 1.0]}
    near = {"loss": [5.0001, 4.0], "grad_norm": [1.0, 1.001]}
    far = {"loss": [5.0, 4.1], "grad_norm": [1.0, 1.0]}
    with_parts(monkeypatch, {"parity": {"32-true": near, "bf16-mixed": far}, step.REFERENCE: reference})
    assert command(monkeypatch, "--device=cpu", "--only", "parity") == 1
    failed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("FAILED")]
    assert failed == ["FAILED parity: bf16-mixed loss: 0.025"]
    with_parts(monkeypatch, {"parity": {"32-true": near, "bf16-mixed": near}, step.REFERENCE: reference})
    assert command(monkeypatch, "--device=cpu", "--only", "parity") == 0


def test_a_part_that_ends_badly_is_one_line_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = step.Run("cpu", "tiny", None, 60)

    def ended(*args: Any, **options: Any) -> Any:
        return subprocess.CompletedProcess(args, 1, "", "Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory")

    monkeypatch.setattr(subprocess, "run", ended)
    run.part("rates")
    run.part("kernels")
    line = "ended with status 1: torch.OutOfMemoryError: CUDA out of memory"
    assert run.failures == [f"rates: {line}", f"kernels: {line}"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_script_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    options = ("--device=cpu", "--shape=tiny", "--limit-s=800", f"--out={out}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.step", *options],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert all(row["passed"] for part in ("kernels", "parity") for row in parts[part]["rows"])
    assert len(parts["kernels"]["rows"]) == len(parts["parity"]["rows"]) == 5
    flash = ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"]
    assert parts["rates"]["operators"] == parts["kernels"]["rows"][0]["operators"] == flash
    assert parts["rates"]["loss_error"] == 0 and parts["rates"]["compared"] == 5
    assert min(parts["rates"][loop]["step_s"] for loop in ("trainer", "megatron")) > 0
