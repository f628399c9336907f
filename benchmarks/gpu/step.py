"""The torch layer backend on one GPU: which kernels run, whether they are right, and how fast a step is.

For a machine that is there for minutes and has no network. From the repository's root:

    pip install --no-deps --no-index megatron_core-0.19.2-*.whl   # besides torch, lightning and torchmetrics
    python -m benchmarks.gpu.step --out gpu.json --tests          # under 10 minutes; writes gpu.md too

Parts, each in processes of its own, so that one that fails or runs out of memory leaves the others:

* `kernels`: attention of the shape in bf16, forward and backward, by each attention_backend: which operators ran, and
  their error against fp32; the same for the blocks that context parallelism is made of, in bf16 and fp32
* `parity`: a tiny model's losses and gradient norms on the device, in fp32 and bf16-mixed, against fp32 on the CPU; its
  first weights are the same, bit for bit, wherever they are drawn
* `rates`: tokens/s and MFU of Trainer + MegatronParallelStrategy beside a plain Megatron Core loop of the same model,
  in turns in one process, bf16-mixed
* `hugging_face`: the same shape as transformers' Llama with SDPA, fp32 weights under bf16 autocast; left out, and said
  so, where transformers isn't installed
* `tests`, with --tests: `pytest -m gpu`

MFU is `lt_parallel.metrics.flops`' training FLOPs (causal attention) over the device's dense peak; hardware MFU counts
recompute too, full-attention MFU the whole square as publications do. Results are written after every part.

`--device cpu --shape tiny` runs the same code without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import LOSS_LIMIT, compare, page
from benchmarks.gpu.shapes import SHAPES, Shape
from lt_parallel.files import write_atomically

PACKAGES = ("torch", "lightning", "megatron-core", "transformers")
PARTS = ("kernels", "parity", "rates", "hugging_face")
REFERENCE = "parity_reference"
_ROOT = Path(__file__).resolve().parents[2]


def run_part(name: str, shape: Shape, device: str, output: Path) -> None:
    """In a process of its own."""
    import torch

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if device == "cpu":
        torch.set_num_threads(1)
    from benchmarks.gpu import attention, training

    functions: dict[str, Callable[[Shape, str], dict[str, Any]]] = {
        "kernels": attention.kernels,
        REFERENCE: training.parity_reference,
        "parity": training.parity,
        "rates": training.rates,
        "hugging_face": training.hugging_face,
    }
    result = functions[name](shape, device)
    write_atomically(output, json.dumps(result))


class Run:
    """Starts the parts, keeps within the time and writes what is known after each.

    Args:
        device: "cuda" or "cpu".
        shape_name: A key of `SHAPES`.
        out: The JSON file; the table goes beside it.
        limit_s: For everything.
    """

    def __init__(self, device: str, shape_name: str, out: Path | None, limit_s: float) -> None:
        self._device, self._shape_name, self._out = device, shape_name, out
        self._deadline_s = time.monotonic() + limit_s
        self.results: dict[str, Any] = {
            "shape": {"name": shape_name, **asdict(SHAPES[shape_name])},
            "machine": machine(device),
            "parts": {},
        }

    def part(self, name: str) -> None:
        """Runs one and notes its result, or why there is none."""
        if name == "hugging_face" and importlib.util.find_spec("transformers") is None:
            self._note(name, {"skipped": "transformers isn't installed here"})
            return
        result = self._started(name)
        if name == "parity" and "failure" not in result:
            reference = self._started(REFERENCE)
            result = reference if "failure" in reference else compare(result, reference)
        self._note(name, result)

    def _started(self, name: str) -> dict[str, Any]:
        left_s = self._deadline_s - time.monotonic()
        if left_s < 5:
            return {"failure": "no time was left for it"}
        device = "cpu" if name == REFERENCE else self._device
        environment = {**os.environ, "LT_PARALLEL_DEVICE": device, "PYTHONWARNINGS": "ignore"}
        if device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory(prefix="lt_parallel_gpu_") as folder:
            output = Path(folder) / "part.json"
            options = (f"--device={device}", f"--shape={self._shape_name}", f"--part={name}", f"--out={output}")
            command = [sys.executable, "-m", "benchmarks.gpu.step", *options]
            try:
                done = subprocess.run(
                    command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=left_s, check=False
                )
            except subprocess.TimeoutExpired:
                return {"failure": f"took longer than the {left_s:.0f} s that were left"}
            if done.returncode or not output.exists():
                print(done.stderr[-6000:], file=sys.stderr)
                last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                return {"failure": f"ended with status {done.returncode}: {last[:300]}"}
            result: dict[str, Any] = json.loads(output.read_text())
            return result

    def tests(self) -> None:
        """`pytest -m gpu`, in the files that have such tests."""
        files = [str(path) for path in sorted((_ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
        # Not all of pytest's plugins that the configuration asks for need be there.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            *files,
        ]
        environment = {**os.environ, "LT_PARALLEL_DEVICE": self._device}
        left_s = max(self._deadline_s - time.monotonic(), 5.0)
        try:
            done = subprocess.run(
                command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            self._note("tests", {"failure": f"took longer than the {left_s:.0f} s that were left"})
            return
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
        passed = done.returncode == 0
        if not passed:
            print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
        self._note("tests", {"summary": lines[-1]} if passed else {"failure": lines[-1]})

    def _note(self, name: str, result: dict[str, Any]) -> None:
        self.results["parts"][name] = result
        if self._out is not None:
            write_atomically(self._out, json.dumps(self.results, indent=2) + "\n")
            write_atomically(self._out.with_suffix(".md"), page(self.results))

    @property
    def failures(self) -> list[str]:
        """What failed, by name."""
        found = []
        for name, result in self.results["parts"].items():
            if "failure" in result:
                found.append(f"{name}: {result['failure']}")
            for row in result.get("rows", ()):
                if not row["passed"]:
                    found.append(f"{name}: {row['name']}: {row.get('failure', row.get('error'))}")
            if result.get("loss_error", 0) > LOSS_LIMIT:
                found.append(f"{name}: the loops' losses differ by {result['loss_error']}")
        return found


def machine(device: str) -> dict[str, Any]:
    """Where the numbers come from."""
    import torch

    known = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "python": platform.python_version(),
        "versions": known,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if device == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def missing() -> str | None:
    """What keeps this from running, in one line; None if nothing does."""
    for name in ("torch", "lightning", "megatron.core"):
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of its parent
            found = False
        if not found:
            return f"{name} isn't installed for {sys.executable}"
    return None


def main() -> int:
    """Runs the parts; the status is 1 where something failed, 2 where nothing could run."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama_1b")
    parser.add_argument("--out", type=Path, help="JSON file for the results; a table goes beside it, as .md")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--tests", action="store_true", help="run the tests marked gpu at the end")
    parser.add_argument("--limit-s", type=float, default=540, help="seconds for everything (default: 540)")
    parser.add_argument("--part", choices=(*PARTS, REFERENCE), help=argparse.SUPPRESS)  # started by this script
    options = parser.parse_args()
    problem = missing()
    if problem is None and options.out is not None and not options.out.absolute().parent.is_dir():
        problem = f"--out: there is no folder {options.out.absolute().parent}"
    if problem is None and options.device == "cuda" and not has_cuda():
        problem = "no CUDA device is found here; --device cpu --shape tiny runs the same code without one"
    if problem is None and options.device == "cpu" and options.tests:
        problem = "--tests needs a CUDA device"
    if problem is not None:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
        return 2
    if options.part:
        run_part(options.part, SHAPES[options.shape], options.device, options.out)
        return 0
    run = Run(options.device, options.shape, options.out, options.limit_s)
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        run.part(name)
    if options.tests:
        print("tests ...", file=sys.stderr, flush=True)
        run.tests()
    print(page(run.results))
    for failure in run.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if run.failures else 0


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
