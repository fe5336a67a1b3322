"""The device of this rank, and whether the other ranks have the same model."""

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
    # A card in MIG mode only holds slices, and no rank runs on the card itself.
    usable = [gpu for gpu in discover_gpus() if not gpu.mig_mode]
    properties = torch.cuda.get_device_properties(mesh.device)
    for gpu in usable:
        if str(properties.uuid) in gpu.uuid:
            return gpu

    # Some drivers hide the id of a slice. Then devices with as much memory stand for this one, if
    # all of them are of one model.
    similar = []
    for gpu in usable:
        if abs(gpu.memory_bytes / properties.total_memory - 1) < 0.1:
            similar.append(gpu)
    models = {(gpu.name, gpu.profile) for gpu in similar}
    if len(models) != 1:
        return None
    return similar[0]


def hardware(mesh: Mesh) -> str:
    """Return the model of this rank's GPU and its driver, or of its CPU."""
    if mesh.device.type == "cpu":
        return cpu_name()
    return f"{torch.cuda.get_device_name(mesh.device)}, driver {driver_version() or 'unknown'}"


def compare_hardware(mesh: Mesh) -> tuple[str, ...]:
    """Return a warning when other ranks have other hardware than rank 0's, else (). (all ranks)

    Ranks other than rank 0 return (), too.
    """
    names = mesh.gather(hardware(mesh))
    if names is None:
        return ()
    others = [f"rank {rank} {name}" for rank, name in enumerate(names) if name != names[0]]
    if not others:
        return ()
    return (
        f"warning  ranks run on different hardware: rank 0 {names[0]}; {'; '.join(others)}. The "
        "slowest sets the pace, and a step that another model repeats may differ in its last bits",
    )
