"""Peak rates of known devices: FLOP/s per precision, and bytes/s of memory.

From NVIDIA's data sheets. A peak that is not in the table is None, never a guess.
"""

from __future__ import annotations

import re

from nanoray.machine.device import Device
from nanoray.machine.mig import fractions_of

# NVML name -> dense TFLOP/s with float32 accumulation: bf16, fp16, TF32, float32; memory GB/s. 0:
# none.
_PEAKS: tuple[tuple[str, float, float, float, float, float], ...] = (
    (r"B200", 2250, 2250, 1125, 75, 8000),
    (r"H200", 989.4, 989.4, 494.7, 66.9, 4800),
    (r"H200 NVL", 835.5, 835.5, 417.8, 60, 4800),
    (r"H100 (80GB HBM3|SXM5?)", 989.4, 989.4, 494.7, 66.9, 3350),
    (r"H100 NVL", 835.5, 835.5, 417.8, 60, 3938),
    (r"H100 PCIe", 756.5, 756.5, 378.0, 51.2, 2039),
    (r"A100", 312, 312, 156, 19.5, 0),  # the memory differs by board
    (r"A100-(SXM4|PCIE)-40GB", 312, 312, 156, 19.5, 1555),
    (r"A100-SXM4-80GB", 312, 312, 156, 19.5, 2039),
    (r"A100 80GB PCIe", 312, 312, 156, 19.5, 1935),
    (r"L40S", 362.05, 362.05, 183, 91.6, 864),
    (r"L4", 121, 121, 60, 30.3, 300),
    (r"A10", 125, 125, 62.5, 31.2, 600),
    (r"RTX 3090", 71, 71, 35.6, 35.6, 936),
    (r"RTX 4090", 165.2, 165.2, 82.6, 82.6, 1008),
    (r"T4", 0, 65, 0, 8.1, 320),
    (r"V100-SXM2-(16|32)GB", 0, 125, 0, 15.7, 900),
)


_BANDWIDTH = 4  # its column, behind the precisions


def _peak(device: Device | str, column: int) -> float | None:
    """Return the peak of a column, scaled to a slice's share; None when unknown."""
    if isinstance(device, str):
        name = device
        compute_fraction, bandwidth_fraction = fractions_of(name)
    else:
        name = device.name
        compute_fraction = device.compute_fraction
        bandwidth_fraction = device.bandwidth_fraction

    # The table has bare names: without the maker, and of a slice the name of its GPU.
    bare = re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", name.partition(" MIG ")[0])
    for pattern, *peaks in _PEAKS:
        if re.fullmatch(pattern, bare):
            if column == _BANDWIDTH:
                return peaks[column] * bandwidth_fraction * 1e9 or None
            return peaks[column] * compute_fraction * 1e12 or None
    return None


def peak_flops(device: Device | str, dtype: str) -> float | None:
    """Return the dense peak FLOP/s for "bf16", "fp16", "tf32" or "fp32", None when unknown."""
    column = {"bf16": 0, "fp16": 1, "tf32": 2, "fp32": 3}.get(dtype.removesuffix("_pure"))
    if column is None:
        return None
    return _peak(device, column)


def peak_bandwidth(device: Device | str) -> float | None:
    """Return the peak memory bandwidth in bytes/s, scaled to the slice, None when unknown."""
    return _peak(device, _BANDWIDTH)
