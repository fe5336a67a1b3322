"""The cards that have MIG, the names of their profiles, and the peaks of their slices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoray.machine.device import Device
from nanoray.machine.mig import MIG_SHAPES, profile_name
from nanoray.machine.peaks import peak_bandwidth, peak_flops

# Cards that have the six profiles of MIG_SHAPES, as NVML names them -> the GB in their profiles'
# names.
CARDS = {
    "NVIDIA A100-SXM4-40GB": 40,
    "NVIDIA A100-PCIE-40GB": 40,
    "NVIDIA A100-SXM4-80GB": 80,
    "NVIDIA A100 80GB PCIe": 80,
    "NVIDIA H100 80GB HBM3": 80,
    "NVIDIA H100 PCIe": 80,
    "NVIDIA H100 NVL": 94,
    "NVIDIA H200": 141,
    "NVIDIA H200 NVL": 141,
    "NVIDIA B200": 180,
}
# SMs of the whole card outside MIG mode (the data sheet's peak is for these) and of the six
# profiles, as listed by `nvidia-smi mig -lgip`. On an H100 "1g" does not fix the SMs: a 1g slice
# has 16 with one eighth of the memory and 26 with two, and seven of the smaller leave 20 of 132 SMs
# idle. SMs of other cards are counted when a slice runs.
SMS = {
    "NVIDIA A100": (108, (14, 14, 28, 42, 56, 98)),
    "NVIDIA H100 80GB HBM3": (132, (16, 26, 32, 60, 64, 132)),
}


def smallest_profiles(card: str) -> tuple[str, str]:
    """Return the profiles of one compute slice: with an eighth of the memory, and with two."""
    return profile_name(CARDS[card], 1, 1), profile_name(CARDS[card], 1, 2)


def compute_fraction_of(device: Device) -> float:
    """Return a device's share of its card's FLOP/s: by SMs where known, else by its profile."""
    shape = (round(7 * device.compute_fraction), round(8 * device.bandwidth_fraction))
    for card, (card_sms, profile_sms) in SMS.items():
        if device.kind == "mig" and device.name.startswith(card) and shape in MIG_SHAPES:
            return profile_sms[list(MIG_SHAPES).index(shape)] / card_sms
    return device.compute_fraction


def peaks(device: Device) -> dict[str, float]:
    """Return a device's peak FLOP/s and bandwidth in its training precision, {} if not known."""
    device = replace(device, compute_fraction=compute_fraction_of(device))
    flops = peak_flops(device, "bf16" if device.bf16 else "fp32")
    bytes_per_s = peak_bandwidth(device)
    if not flops or not bytes_per_s:
        return {}
    return {"peak_tflops": flops / 1e12, "peak_gbps": bytes_per_s / 1e9}


def peak_text(known: dict[str, Any]) -> str:
    """Format the values of `peaks`."""
    if "peak_gbps" not in known:
        return "no peak known"
    return f"peak {known['peak_tflops']:.0f} TFLOP/s, {known['peak_gbps']:.0f} GB/s"
