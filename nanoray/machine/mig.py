"""The geometry of MIG: profiles, their sizes, and the commands that make slices.

From NVIDIA's MIG User Guide.
"""

from __future__ import annotations

import math
import re
from typing import Any

from nanoray.errors import PlacementError
from nanoray.machine.device import Device

# Compute slices (of 7) and memory slices (of 8) -> how many fit on one GPU; every GPU with 7 slices
# has these six.
MIG_SHAPES = {(1, 1): 7, (1, 2): 4, (2, 2): 3, (3, 4): 2, (4, 4): 1, (7, 8): 1}


# Nominal memory: A100, A100 and H100, H100 NVL, H100, H200, B200
_MIG_GB = (40, 80, 94, 96, 141, 180)


_PROFILE = re.compile(r"(?:(\d)c\.)?(\d+g\.\d+gb)")


def profile_of(name: str, attributes: Any, gpu_bytes: int) -> str:
    """Return the profile of a slice; "" if it is unknown."""
    match = _PROFILE.search(name)
    if match:
        return match.group()
    # Older drivers give the GPU's name only; the slice's share of the memory gives the profile.
    gb = _mig_gb(gpu_bytes)
    if not gb:
        return ""
    compute = int(attributes.gpuInstanceSliceCount)
    memory = round(8 * (attributes.memorySizeMB << 20) / gpu_bytes)
    # A shape that is not in the table would give the name of no profile.
    if (compute, memory) not in MIG_SHAPES:
        return ""
    return profile_name(gb, compute, memory)


def _mig_gb(gpu_bytes: int) -> int:
    """Return the nominal memory in a GPU's profile names; 0 for a GPU without MIG.

    It is 141 for an H200, which has 140.4 GiB.
    """
    gib = gpu_bytes / 2**30
    nearest = min(_MIG_GB, key=lambda gb: abs(gb - gib))
    return nearest if abs(nearest - gib) <= 1.5 else 0


def profile_name(gb: int, compute: int, memory: int) -> str:
    """Return a profile's name on a GPU with `gb` of memory.

    1g.18gb is one compute and one memory slice of 141 GB.
    """
    return f"{compute}g.{math.floor(gb * memory / 8 + 0.5)}gb"


def mig_profile(name: str) -> tuple[int, int]:
    """Return the compute slices (of 7) and memory slices (of 8) of a profile.

    `name`: of the profile, or of a device that ends in it. 1g.10gb is two memory slices of a 40 GB
    card or one of an 80 GB card; the latter unless the name contains 40GB. Raises PlacementError
    for an unknown profile.
    """
    match = _PROFILE.search(name)
    # Two sizes share a name; the one that is sorted last replaces the other.
    sizes = sorted(_MIG_GB, key=lambda gb: gb == (40 if "40GB" in name else 80))
    shapes = {profile_name(gb, *shape): shape for gb in sizes for shape in MIG_SHAPES}
    if not match or match[2] not in shapes:
        raise PlacementError(
            f"{name} is no MIG profile known here; known: {', '.join(sorted(shapes))}"
        )
    compute, memory = shapes[match[2]]
    return int(match[1] or compute), memory


def mig_commands(gpu: Device, workers: int | None = None) -> str:
    """Return commands to print that cut `gpu` into `workers` of the largest slices (default: 7)."""
    gb = _mig_gb(gpu.memory_bytes)
    wanted = min(workers or 7, 7)
    if not gb:
        return f"use a GPU that has MIG ({gpu.name} is not known to)"
    # From the largest slice down: the first shape with enough slices wastes the least.
    shape = next(shape for shape in reversed(MIG_SHAPES) if MIG_SHAPES[shape] >= wanted)
    profiles = ",".join([profile_name(gb, *shape)] * MIG_SHAPES[shape])
    enable = "" if gpu.mig_mode else f"sudo nvidia-smi -i {gpu.index} -mig 1 && "
    return f"run: {enable}sudo nvidia-smi mig -i {gpu.index} -cgi {profiles} -C"


def fractions_of(name: str) -> tuple[float, float]:
    """Return the shares of a GPU's compute and bandwidth of the device with this name.

    0 and 0 for an unknown profile.
    """
    if " MIG " not in name:
        return 1.0, 1.0
    try:
        compute, memory = mig_profile(name)
    except PlacementError:
        return 0.0, 0.0
    return compute / 7, memory / 8
