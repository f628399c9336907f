"""The results as a table, and what of them is a failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.shapes import rounded
from lt_parallel.metrics.peaks import device_peak

#: Relative; on a GPU sums aren't made in the same order twice.
LOSS_LIMIT = 1e-2


def peak_of(results: dict[str, Any]) -> float | None:
    """Dense bf16 peak in FLOP/s; None where it isn't known."""
    peak = device_peak(results["machine"]["device"])
    return None if peak is None else peak.flops_per_sec("bf16")


def rate_rows(results: dict[str, Any]) -> list[list[str]]:
    """A row for each loop."""
    parts, shape = results["parts"], results["shape"]
    tokens = shape["seq_length"] * shape["micro_batch_size"] * shape["num_microbatches"]
    ours, other = parts.get("rates", {}), parts.get("hugging_face", {})
    loops = [
        ("Trainer + MegatronParallelStrategy", ours.get("trainer"), ours.get("memory_gib")),
        ("plain Megatron Core loop", ours.get("megatron"), None),
        ("Hugging Face Llama, SDPA, autocast", other if "step_s" in other else None, other.get("memory_gib")),
    ]
    peak, rows = peak_of(results), []
    for name, loop, memory_gib in loops:
        if loop is None:
            why = other.get("skipped") or other.get("failure") if name.startswith("Hugging") else ours.get("failure")
            rows.append([name, why or "not run", *[""] * 5])
            continue
        per_second = tokens / loop["step_s"]
        flops = ours.get("flops", {})
        shares = [
            f"{100 * per_second * flops[kind] / peak:.1f}%" if peak and flops else "unknown"
            for kind in ("model", "hardware", "full_attention")
        ]
        memory = "" if memory_gib is None else f"{memory_gib:.1f} GiB"
        rows.append([name, f"{1000 * loop['step_s']:.0f} ms", f"{per_second:,.0f}", *shares, memory])
    return rows


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def check_rows(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    for part in ("kernels", "parity"):
        found = results["parts"].get(part, {})
        if "failure" in found:
            rows.append([part, "FAILED", found["failure"], "", "", ""])
        for row in found.get("rows", ()):
            error = "" if row.get("error") is None else f"{row['error']:g}"
            limit = "" if row.get("limit") is None else f"< {row['limit']:g}"
            milliseconds = "" if row.get("ms") is None else f"{row['ms']:g}"
            what = row.get("failure") or ", ".join(row.get("operators", ()))
            rows.append([row["name"], "passed" if row["passed"] else "FAILED", what, error, limit, milliseconds])
    return rows


def page(results: dict[str, Any]) -> str:
    """What a reader wants to see, in Markdown."""
    machine_, shape, parts = results["machine"], results["shape"], results["parts"]
    text = f"# One GPU step: {shape['name']}\n\n"
    text += table(
        ["loop", "step", "tokens/s", "MFU", "hardware MFU", "full-attention MFU", "peak memory"], rate_rows(results)
    )
    ours = parts.get("rates", {})
    if "trainer" in ours:
        ratio = ours["trainer"]["step_s"] / ours["megatron"]["step_s"]
        text += (
            f"\nTrainer / plain loop: {ratio:.4f}; losses of {ours['compared']} steps differ by at most "
            f"{ours['loss_error']:g}. Attention in the model: {', '.join(ours['operators'])}.\n"
        )
    text += "\n" + table(["check", "result", "what ran", "relative error", "limit", "ms"], check_rows(results))
    if "tests" in parts:
        text += f"\n`pytest -m gpu`: {parts['tests'].get('summary') or 'FAILED: ' + parts['tests']['failure']}\n"
    known = ", ".join(f"{name} {number}" for name, number in machine_["versions"].items())
    cuda = f", CUDA {machine_['cuda']}, cuDNN {machine_['cudnn']}" if "cuda" in machine_ else ""
    text += (
        f"\n* Machine: {machine_['device']}\n* Date: {machine_['date']}\n"
        f"* Versions: Python {machine_['python']}, {known}{cuda}\n"
        f"* Shape: {', '.join(f'{name} {value}' for name, value in shape.items() if name != 'name')}\n"
    )
    return text


#: Relative, by precision and number: fp32 sums in another order; bf16 has 8 bits.
PARITY_LIMITS = {"32-true": {"loss": 1e-4, "grad_norm": 5e-3}, "bf16-mixed": {"loss": 1e-2, "grad_norm": 5e-2}}


def compare(found: dict[str, Any], reference: dict[str, list[float]]) -> dict[str, Any]:
    """Largest relative error of each number, against its limit."""
    rows = []
    for precision, limits in PARITY_LIMITS.items():
        for name, limit in limits.items():
            pairs = list(zip(found[precision][name], reference[name], strict=True))
            error = max(abs(mine - other) / abs(other) for mine, other in pairs)
            passed = error < limit and all(math.isfinite(mine) for mine, _ in pairs)
            rows.append({"name": f"{precision} {name}", "error": rounded(error), "limit": limit, "passed": passed})
    moved = reference["loss"][-1] != reference["loss"][0]
    rows.append({"name": "losses move", "error": None, "limit": None, "passed": moved})
    return {"rows": rows, "found": found, "reference": reference}
