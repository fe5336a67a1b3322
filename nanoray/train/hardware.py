"""What this rank runs on, and whether the others run on the same."""

from __future__ import annotations

import torch

from nanoray.devices.device import Device
from nanoray.devices.gpus import discover_gpus, driver_version
from nanoray.devices.host import cpu_name
from nanoray.mesh.mesh import Mesh


def this_device(mesh: Mesh) -> Device | None:
    """Return NVML's record of this rank's GPU or slice; None on CPU, or when NVML has none."""
    if mesh.device.type != "cuda":
        return None
    # A card in MIG mode only holds slices
    usable = [gpu for gpu in discover_gpus() if not gpu.mig_mode]
    properties = torch.cuda.get_device_properties(mesh.device)
    own = [gpu for gpu in usable if str(properties.uuid) in gpu.uuid]
    alike = [gpu for gpu in usable if abs(gpu.memory_bytes / properties.total_memory - 1) < 0.1]
    same_kind = {(gpu.name, gpu.profile) for gpu in alike}
    return own[0] if own else alike[0] if len(same_kind) == 1 else None


def hardware(mesh: Mesh) -> str:
    """Return the model of this rank's GPU and its driver, or of its CPU."""
    if mesh.device.type == "cpu":
        return cpu_name()
    return f"{torch.cuda.get_device_name(mesh.device)}, driver {driver_version() or 'unknown'}"


def compare_hardware(mesh: Mesh) -> tuple[str, ...]:
    """Return a line that names the ranks with other hardware than rank 0's, if any. (all ranks;
    lines on rank 0)
    """
    found = mesh.gather(hardware(mesh)) or [""]
    others = [f"rank {rank} {name}" for rank, name in enumerate(found) if name != found[0]]
    if not others:
        return ()
    return (
        f"warning  ranks run on different hardware: rank 0 {found[0]}; {'; '.join(others)}. The "
        "slowest sets the pace, "
        "and a step that another kind does again may differ in its last bits",
    )
