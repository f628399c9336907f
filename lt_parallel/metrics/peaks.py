"""What a device can compute per second at most, by its maker's data sheets: what model FLOPs utilization divides by.

All figures are **dense**. NVIDIA's sheets often print the rate with 2:4 structured sparsity, which training doesn't
use and which is twice the dense one; `DevicePeak.note` says where a figure is the half of such a rate. Matrix rates are
those that accumulate in fp32, as training does: GeForce cards run fp16 and fp8 twice as fast when they accumulate in
fp16, which is the figure often quoted for them.

"fp32" is the rate of the ordinary cores; with `torch.set_float32_matmul_precision("high")` matrix products run on the
tensor cores at the "tf32" rate.

A device is recognised by the whole name that its driver reports. A name that isn't in the table (another chip, a MIG
slice, a virtual GPU) has no peak here, because a wrong one is worse than none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")

_TERA = 1e12
_HALVED = "sheet gives rates with sparsity, halved here"


@dataclass(frozen=True)
class DevicePeak:
    """Dense peak rates of one device.

    Args:
        name: What the table calls it.
        teraflops: Rate in 10^12 FLOP/s by the names in `DTYPES`; a type that the device lacks isn't there.
        source: The data sheet or white paper that the rates are from.
        driver_names: Regular expression for the whole name that the driver reports, "NVIDIA" and "Tesla" left out.
        note: How the rates follow from the source, where they aren't copied from it.
    """

    name: str
    teraflops: Mapping[str, float]
    source: str
    driver_names: str
    note: str = ""

    def flops_per_sec(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s, None for a type that the device has no rate for.

        Args:
            dtype: One of `DTYPES`.

        Raises:
            ValueError: If there is no such type.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} has no peak; there are {', '.join(DTYPES)}")
        rate = self.teraflops.get(dtype)
        return None if rate is None else rate * _TERA


def device_peak(name: str) -> DevicePeak | None:
    """The device's peak rates, None for a device that isn't in the table.

    Args:
        name: What `torch.cuda.get_device_name()` returns, or a name of the table ("H100 SXM").
    """
    bare = _bare(name)
    for peak in PEAKS:
        if bare == peak.name.lower() or re.fullmatch(peak.driver_names.lower(), bare):
            return peak
    return None


def require_device_peak(name: str) -> DevicePeak:
    """As `device_peak`, for a name that the user gave.

    Raises:
        ValueError: If the device isn't in the table; the message lists the names.
    """
    peak = device_peak(name)
    if peak is not None:
        return peak
    names = [known.name for known in PEAKS]
    bare = _bare(name)
    close = [known for known in names if known.lower().startswith(f"{bare} ")] if bare else []
    close = close or difflib.get_close_matches(name.upper(), names, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise ValueError(f"no peak FLOP/s is known for {name!r}; {hint}known devices: {', '.join(names)}")


def _bare(name: str) -> str:
    """The name in small letters, spaces made single, without the words that drivers put before it or leave out."""
    words = " ".join(name.split()).lower()
    return re.sub(r"^(nvidia )?(tesla )?", "", words)


def _rates(**teraflops: float) -> Mapping[str, float]:
    """A table row: `half` stands for bf16 and fp16, which all devices since Ampere run at the same rate."""
    half = teraflops.pop("half", None)
    if half is not None:
        teraflops |= {"bf16": half, "fp16": half}
    return MappingProxyType({dtype: teraflops[dtype] for dtype in DTYPES if dtype in teraflops})


_A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet, nvidia.com/en-us/data-center/a100"
_V100_SHEET = "NVIDIA V100 Tensor Core GPU data sheet, nvidia.com/en-us/data-center/v100"
_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture white paper, table of H100 PCIe and SXM5 (dense)"
_H100_SHEET = "NVIDIA H100 data sheet, nvidia.com/en-us/data-center/h100"
_H200_SHEET = "NVIDIA H200 data sheet, nvidia.com/en-us/data-center/h200"
_BLACKWELL_SHEET = "NVIDIA Blackwell data sheet (GB200 NVL72 and HGX B200), nvidia.com/en-us/data-center/hgx"
_ULTRA_SHEET = "NVIDIA Blackwell Ultra data sheet (GB300 NVL72 and HGX B300), nvidia.com/en-us/data-center/gb300-nvl72"
_AMPERE_PAPER = "NVIDIA Ampere GA102 GPU Architecture white paper V2, appendix A (fp32 accumulate)"
_ADA_PAPER = "NVIDIA Ada GPU Architecture white paper V2, appendix A (fp32 accumulate)"
_RTX_BLACKWELL_PAPER = "NVIDIA RTX Blackwell GPU Architecture white paper, appendix A (fp32 accumulate)"

PEAKS: tuple[DevicePeak, ...] = (
    DevicePeak("V100 SXM2", _rates(fp32=15.7, fp16=125), _V100_SHEET, r"v100-sxm2-\d+gb"),
    DevicePeak("V100 PCIe", _rates(fp32=14, fp16=112), _V100_SHEET, r"v100-pcie-\d+gb"),
    DevicePeak("V100S PCIe", _rates(fp32=16.4, fp16=130), _V100_SHEET, r"v100s-pcie-32gb"),
    DevicePeak("T4", _rates(fp32=8.1, fp16=65), "NVIDIA T4 data sheet, nvidia.com/en-us/data-center/tesla-t4", r"t4"),
    DevicePeak(
        "A100",
        _rates(fp32=19.5, tf32=156, half=312),
        _A100_SHEET,
        r"a100-sxm4-(40|80)gb|a100-pcie-(40|80)gb|a100 80gb pcie",
        "SXM and PCIe alike; not the A100 with 64 GB, which is another chip",
    ),
    DevicePeak(
        "A800",
        _rates(fp32=19.5, tf32=156, half=312),
        _A100_SHEET,
        r"a800-sxm4-(40|80)gb|a800-pcie-(40|80)gb|a800 80gb pcie|a800 40gb active",
        "an A100 with less NVLink bandwidth",
    ),
    DevicePeak(
        "A40",
        _rates(fp32=37.4, tf32=74.8, half=149.7),
        "NVIDIA A40 data sheet, nvidia.com/en-us/data-center/a40",
        r"a40",
    ),
    DevicePeak(
        "A30",
        _rates(fp32=10.3, tf32=82, half=165),
        "NVIDIA A30 data sheet, nvidia.com/en-us/data-center/products/a30-gpu",
        r"a30",
    ),
    DevicePeak(
        "A10",
        _rates(fp32=31.2, tf32=62.5, half=125),
        "NVIDIA A10 data sheet, nvidia.com/en-us/data-center/products/a10-gpu",
        r"a10",
        "not the A10G, whose tensor cores are slower",
    ),
    DevicePeak(
        "L4",
        _rates(fp32=30.3, tf32=60, half=121, fp8=242.5),
        "NVIDIA L4 data sheet, nvidia.com/en-us/data-center/l4",
        r"l4",
        f"tf32 120, bf16 and fp16 242, fp8 485: {_HALVED}",
    ),
    DevicePeak(
        "L40",
        _rates(fp32=90.5, tf32=90.5, half=181.05, fp8=362),
        "NVIDIA L40 data sheet, nvidia.com/en-us/data-center/l40",
        r"l40",
    ),
    DevicePeak(
        "L40S",
        _rates(fp32=91.6, tf32=183, half=362.05, fp8=733),
        "NVIDIA L40S data sheet, nvidia.com/en-us/data-center/l40s",
        r"l40s",
        "the sheet's dense bf16 rate is 1.2% below half of its sparse one (733)",
    ),
    DevicePeak(
        "H100 SXM",
        _rates(fp32=66.9, tf32=494.7, half=989.4, fp8=1978.9),
        _H100_PAPER,
        r"h100 80gb hbm3",
    ),
    DevicePeak("H100 PCIe", _rates(fp32=51.2, tf32=378, half=756, fp8=1513), _H100_PAPER, r"h100 pcie"),
    DevicePeak(
        "H100 NVL",
        _rates(fp32=60, tf32=417.5, half=835.5, fp8=1670.5),
        _H100_SHEET,
        r"h100 nvl",
        f"of one card; tf32 835, bf16 and fp16 1671, fp8 3341: {_HALVED}",
    ),
    DevicePeak(
        "H800",
        _rates(fp32=66.9, tf32=494.7, half=989.4, fp8=1978.9),
        _H100_PAPER,
        r"h800",
        "SXM: an H100 SXM with less NVLink bandwidth and fp64",
    ),
    DevicePeak(
        "H20",
        _rates(fp32=44, tf32=74, half=148, fp8=296),
        "NVIDIA's figures for partners as reported by the press; there is no public data sheet",
        r"h20|h20-3e",
        "the H20-3e differs in memory only",
    ),
    DevicePeak(
        "H200",
        _rates(fp32=67, tf32=494.5, half=989.5, fp8=1979),
        _H200_SHEET,
        r"h200",
        f"SXM; tf32 989, bf16 and fp16 1979, fp8 3958: {_HALVED}",
    ),
    DevicePeak(
        "H200 NVL",
        _rates(fp32=60, tf32=417.5, half=835.5, fp8=1670.5),
        _H200_SHEET,
        r"h200 nvl",
        f"of one card; tf32 835, bf16 and fp16 1671, fp8 3341: {_HALVED}",
    ),
    DevicePeak(
        "GH200",
        _rates(fp32=67, tf32=494.5, half=989.5, fp8=1979),
        "NVIDIA GH200 Grace Hopper Superchip data sheet, nvidia.com/en-us/data-center/grace-hopper-superchip",
        r"gh200 (120|480)gb|gh200 144g hbm3e",
        f"tf32 989, bf16 and fp16 1979, fp8 3958: {_HALVED}",
    ),
    DevicePeak(
        "B200",
        _rates(fp32=75, tf32=1100, half=2250, fp8=4500, fp4=9000),
        _BLACKWELL_SHEET,
        r"b200",
        f"HGX; tf32 2200, bf16 and fp16 4500, fp8 9000, fp4 18000: {_HALVED}",
    ),
    DevicePeak(
        "GB200",
        _rates(fp32=80, tf32=1250, half=2500, fp8=5000, fp4=10000),
        _BLACKWELL_SHEET,
        r"gb200",
        f"of one GPU; tf32 2500, bf16 and fp16 5000, fp8 10000, fp4 20000: {_HALVED}",
    ),
    DevicePeak(
        "B300",
        _rates(fp32=75, tf32=1100, half=2250, fp8=4500, fp4=14000),
        _ULTRA_SHEET,
        r"b300( sxm6( ac)?)?",
        f"HGX; fp4 is printed dense; tf32 2200, bf16 and fp16 4500, fp8 9000: {_HALVED}",
    ),
    DevicePeak(
        "GB300",
        _rates(fp32=80, tf32=1250, half=2500, fp8=5000, fp4=15000),
        _ULTRA_SHEET,
        r"gb300",
        f"of one GPU; fp4 is printed dense; tf32 2500, bf16 and fp16 5000, fp8 10000: {_HALVED}",
    ),
    DevicePeak("RTX 3090", _rates(fp32=35.6, tf32=35.6, half=71), _AMPERE_PAPER, r"geforce rtx 3090"),
    DevicePeak("RTX 4090", _rates(fp32=82.6, tf32=82.6, half=165.2, fp8=330.3), _ADA_PAPER, r"geforce rtx 4090"),
    DevicePeak(
        "RTX 5090",
        _rates(fp32=104.8, tf32=104.8, half=209.5, fp8=419, fp4=1676),
        _RTX_BLACKWELL_PAPER,
        r"geforce rtx 5090",
    ),
    DevicePeak(
        "RTX 6000 Ada",
        _rates(fp32=91.1, tf32=182.1, half=364.2, fp8=728.5),
        "NVIDIA Ada GPU Architecture white paper (professional), RTX 6000 Ada Generation",
        r"rtx 6000 ada generation",
        "the data sheet prints only fp8 with sparsity, 1457",
    ),
    DevicePeak(
        "RTX PRO 6000 Blackwell",
        _rates(fp32=126, tf32=251.9, half=503.8, fp8=1007.6, fp4=2015.2),
        "NVIDIA RTX Blackwell PRO GPU Architecture white paper, RTX PRO 6000 Blackwell Workstation Edition",
        r"rtx pro 6000 blackwell workstation edition",
        "600 W Workstation Edition; the Max-Q and Server Editions run at other clocks",
    ),
)
