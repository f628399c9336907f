"""What `import lt_parallel` adds to importing Lightning, and what `lt-parallel --help` takes.

Each figure is from fresh interpreters, started in turns so that other work on the machine meets all of them; the
smallest of several runs is taken, as everything else that happens can only add time. CPU time is the processes' own.

Run `python -m benchmarks.import_time` from the repository's root.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time

from benchmarks.report import Report

LIGHTNING = "import lightning.pytorch"
BARE_CLI = """
import sys
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel
sys.argv = ["bare", *{arguments!r}]
LightningCLI(DemoModel, BoringDataModule)
"""
OURS = "import sys; from lt_parallel.cli import main; sys.argv = ['lt-parallel', *{arguments!r}]; sys.exit(main())"
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def import_s(statement: str, module: str) -> float:
    """Cumulative seconds that `-X importtime` gives for a module imported by a statement."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, env=_ENVIRONMENT).stderr.splitlines()
    for line in lines:
        found = re.fullmatch(rf"import time:\s+\d+ \|\s+(\d+) \| {re.escape(module)}", line)
        if found:
            return int(found[1]) / 1e6
    raise ValueError(f"{module} isn't imported by {statement!r}")


def cpu_and_wall_s(code: str) -> tuple[float, float]:
    """CPU and wall seconds of an interpreter that runs the code."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_ENVIRONMENT)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{code!r} ended with {done.returncode}:\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def add_imports(report: Report, runs: int) -> None:
    both = f"{LIGHTNING}, lt_parallel"
    lightning, added = [], []
    for _ in range(runs):
        lightning.append(import_s(LIGHTNING, "lightning.pytorch"))
        added.append(import_s(both, "lt_parallel"))
    report.add(LIGHTNING, f"{min(lightning):.3f} s", f"{statistics.median(lightning):.3f} s", "")
    report.add("import lt_parallel after it", f"{min(added):.4f} s", f"{statistics.median(added):.4f} s", "<= 0.1 s")


def add_help(report: Report, runs: int, arguments: list[str]) -> None:
    shown = " ".join(arguments)
    codes = {"bare": BARE_CLI.format(arguments=arguments), "ours": OURS.format(arguments=arguments)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in codes}
    for _ in range(runs):
        for name, code in codes.items():
            times[name].append(cpu_and_wall_s(code))
    for index, kind in enumerate(("CPU", "wall")):
        bare, ours = ([pair[index] for pair in times[name]] for name in ("bare", "ours"))
        low, middle = min(ours) / min(bare), statistics.median(ours) / statistics.median(bare)
        report.add(f"bare LightningCLI, {shown} ({kind})", f"{min(bare):.2f} s", f"{statistics.median(bare):.2f} s", "")
        report.add(f"lt-parallel {shown} ({kind})", f"{min(ours):.2f} s", f"{statistics.median(ours):.2f} s", "")
        report.add(f"ratio ({kind})", f"{low:.2f}", f"{middle:.2f}", "<= 1.1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="interpreters started for each figure")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    report = Report(
        "Import and --help times", ["what", "smallest", "median", "goal"], "python -m benchmarks.import_time"
    )
    add_imports(report, options.runs)
    for arguments in (["--help"], ["fit", "--help"]):
        add_help(report, options.runs, arguments)
    report.note(f"{options.runs} fresh interpreters for each figure, in turns; ratios are of smallest and of medians.")
    report.show()
    if not options.no_write:
        report.write("import_time")


if __name__ == "__main__":
    main()
