"""Peak rates: names that drivers report, the arithmetic of the chips, and Lightning's table."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from lightning.fabric.utilities.throughput import _CUDA_FLOPS

from lt_parallel.metrics.peaks import DTYPES, PEAKS, device_peak, require_device_peak

DRIVER_NAMES = {
    "Tesla V100-SXM2-16GB": "V100 SXM2",
    "Tesla V100-SXM2-32GB": "V100 SXM2",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "Tesla V100S-PCIE-32GB": "V100S PCIe",
    "Tesla T4": "T4",
    "A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA A800 80GB PCIe": "A800",
    "NVIDIA A40": "A40",
    "NVIDIA A30": "A30",
    "NVIDIA A10": "A10",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H800": "H800",
    "NVIDIA H20": "H20",
    "NVIDIA H20-3e": "H20",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 144G HBM3e": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 Blackwell",
}

OTHER_CHIPS = (
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A100X",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA H200 MIG 1g.18gb",
    "GRID A100D-40C",
    "NVIDIA A40-48Q",
    "NVIDIA A10G",
    "NVIDIA A1000",
    "NVIDIA T400",
    "NVIDIA T4G",
    "NVIDIA L40G",
    "NVIDIA L20",
    "NVIDIA H100",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA H2",
    "NVIDIA H2000",
    "NVIDIA H20-4e",
    "Tesla V100-SXM3-32GB",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA RTX 6000",
    "Quadro RTX 6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "AMD Instinct MI300X",
    "cpu",
    "",
)

# Multiprocessors, boost clock in MHz, dense bf16 (fp16 before Ampere) FLOPs per multiprocessor and clock: the white
# papers' own way to the figure, so a slip in the table shows.
CHIPS = {
    "V100 SXM2": (80, 1530, 1024),
    "T4": (40, 1590, 1024),
    "A100": (108, 1410, 2048),
    "A800": (108, 1410, 2048),
    "A40": (84, 1740, 1024),
    "A30": (56, 1440, 2048),
    "A10": (72, 1695, 1024),
    "L4": (58, 2040, 1024),
    "L40": (142, 2490, 512),
    "L40S": (142, 2520, 1024),
    "H100 SXM": (132, 1830, 4096),
    "H100 PCIe": (114, 1620, 4096),
    "H200": (132, 1830, 4096),
    "H800": (132, 1830, 4096),
    "GH200": (132, 1830, 4096),
    "RTX 3090": (82, 1695, 512),
    "RTX 4090": (128, 2520, 512),
    "RTX 5090": (170, 2407, 512),
    "RTX 6000 Ada": (142, 2505, 1024),
    "RTX PRO 6000 Blackwell": (188, 2617, 1024),
}


def rate(name: str, dtype: str) -> float:
    flops = require_device_peak(name).flops_per_sec(dtype)
    assert flops is not None
    return flops


@pytest.mark.parametrize(("reported", "name"), DRIVER_NAMES.items())
def test_a_name_that_drivers_report_is_recognised(reported: str, name: str) -> None:
    peak = device_peak(reported)
    assert peak is not None and peak.name == name
    assert device_peak(reported.upper()) is peak


@pytest.mark.parametrize("reported", OTHER_CHIPS)
def test_another_chip_or_a_slice_of_one_has_no_peak(reported: str) -> None:
    assert device_peak(reported) is None


def test_every_device_has_a_driver_name_here_and_only_one_entry() -> None:
    assert {peak.name for peak in PEAKS} == set(DRIVER_NAMES.values())
    assert len({peak.name.lower() for peak in PEAKS}) == len(PEAKS)
    for reported in (*DRIVER_NAMES, *(peak.name for peak in PEAKS)):
        bare = reported.lower().removeprefix("nvidia ").removeprefix("tesla ")
        found = [p.name for p in PEAKS if bare == p.name.lower() or re.fullmatch(p.driver_names, bare)]
        assert len(found) == 1, f"{reported}: {found}"


@given(st.sampled_from(sorted(DRIVER_NAMES)), st.text(min_size=1, max_size=8))
def test_no_name_matches_by_a_part_of_it(reported: str, extra: str) -> None:
    longer = " ".join(f"{reported}{extra}".split()).lower()
    bare = longer.removeprefix("nvidia ").removeprefix("tesla ")
    assume(longer not in {name.lower() for name in DRIVER_NAMES})
    assume(bare not in {peak.name.lower() for peak in PEAKS})  # as "A10" + "0"
    assert device_peak(f"{reported}{extra}") is None


@pytest.mark.parametrize("name", [peak.name for peak in PEAKS])
def test_a_row_is_complete_and_its_rates_fit_together(name: str) -> None:
    peak = require_device_peak(name)
    assert "NVIDIA" in peak.source and peak.teraflops["fp32"] > 0
    assert set(peak.teraflops) <= set(DTYPES)
    assert ("tf32" in peak.teraflops) == ("bf16" in peak.teraflops)  # both came with Ampere
    if "bf16" in peak.teraflops:
        assert rate(name, "bf16") == rate(name, "fp16")
        assert rate(name, "bf16") / rate(name, "tf32") == pytest.approx(2, rel=0.03)
    if "fp8" in peak.teraflops:
        assert rate(name, "fp8") / rate(name, "bf16") == pytest.approx(2, rel=0.015)
    if "fp4" in peak.teraflops:
        assert rate(name, "fp4") >= 2 * rate(name, "fp8")


@pytest.mark.parametrize("name", CHIPS)
def test_the_rate_is_what_the_chip_can_do_at_its_clock(name: str) -> None:
    multiprocessors, megahertz, flops = CHIPS[name]
    expected = multiprocessors * megahertz * 1e6 * flops
    dtype = "bf16" if "bf16" in require_device_peak(name).teraflops else "fp16"
    assert rate(name, dtype) == pytest.approx(expected, rel=0.013 if name == "L40S" else 0.004)


def test_rates_are_flops_and_a_missing_type_is_none() -> None:
    assert rate("NVIDIA H200", "bf16") == 989.5e12
    assert rate("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert require_device_peak("Tesla V100-SXM2-32GB").flops_per_sec("bf16") is None
    assert require_device_peak("A100").flops_per_sec("fp8") is None
    with pytest.raises(ValueError, match=r"dtype='int8' has no peak; there are fp32, tf32, bf16, fp16, fp8, fp4"):
        require_device_peak("A100").flops_per_sec("int8")


def test_an_unknown_name_that_the_user_gave_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"'H100'; did you mean H100 SXM or H100 PCIe or H100 NVL\? known devices: V100"
    ):
        require_device_peak("H100")
    with pytest.raises(ValueError, match=r"'TPU v5'; known devices: .*, RTX PRO 6000 Blackwell$"):
        require_device_peak("TPU v5")
    assert require_device_peak("h100 sxm").name == "H100 SXM"


# Lightning's key, ours, and what its figures need to be comparable. Its "a10g" holds the A10's figures.
AGREEING = {
    "h100 sxm": "H100 SXM",
    "h100 pcie": "H100 PCIe",
    "a100": "A100",
    "a10g": "A10",
    "l4": "L4",
    "l40": "L40",
    "t4": "T4",
    "v100 sxm": "V100 SXM2",
    "v100 pcie": "V100 PCIe",
    "v100s pcie": "V100S PCIe",
}
THEIR_DTYPES: dict[str, str | torch.dtype] = {
    "fp32": torch.float32,
    "tf32": "tfloat32",
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@pytest.mark.parametrize(("theirs", "ours"), AGREEING.items())
def test_lightning_has_the_same_rates_for_these(theirs: str, ours: str) -> None:
    table = {dtype: _CUDA_FLOPS[theirs].get(key) for dtype, key in THEIR_DTYPES.items()}
    for dtype, expected in table.items():
        flops = require_device_peak(ours).flops_per_sec(dtype)
        assert flops == (None if expected is None else pytest.approx(expected, rel=0.003)), dtype


@pytest.mark.parametrize(
    ("theirs", "ours", "factor", "why"),
    [
        ("h200 sxm1", "H200", 2, "theirs is with sparsity"),
        ("h200 nvl1", "H200 NVL", 2, "theirs is with sparsity"),
        ("h100 nvl", "H100 NVL", 2.37, "theirs is the pair of cards at another clock"),
        ("a40", "A40", 0.25, "theirs is without tensor cores"),
        ("rtx 4090", "RTX 4090", 0.5, "theirs is without tensor cores"),
        ("rtx 3090", "RTX 3090", 0.5, "theirs is without tensor cores"),
    ],
)
def test_where_lightning_differs_it_does_so_for_a_reason(theirs: str, ours: str, factor: float, why: str) -> None:
    assert _CUDA_FLOPS[theirs][torch.bfloat16] / rate(ours, "bf16") == pytest.approx(factor, rel=0.025), why


def test_the_table_needs_no_torch() -> None:
    command = "import sys, lt_parallel.metrics.peaks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], timeout=60).returncode == 0
