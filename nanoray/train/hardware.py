"""The device of this rank, and whether the other ranks have the same model."""

from __future__ import annotations

import os

import torch

from nanoray import __version__
from nanoray.machine.device import Device
from nanoray.machine.gpus import discover_gpus, driver_version
from nanoray.machine.host import cpu_name
from nanoray.machine.peaks import peak_flops
from nanoray.parallel.mesh import Mesh

# Variables that choose among a CPU's kernels: of torch, of oneDNN under both its names, and of MKL.
KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)


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

    return None


def peak_of_all_ranks(device: Device | None, mesh: Mesh, precision: str) -> float | None:
    """Return the FLOP/s of all ranks together; None for an unknown device. `device`: of this rank."""
    peak = peak_flops(device, precision) if device else None
    return peak * mesh.world_size if peak else None


def hardware(mesh: Mesh) -> str:
    """Return the model of this rank's GPU and its driver, or of its CPU."""
    if mesh.device.type == "cpu":
        return cpu_name()
    return f"{torch.cuda.get_device_name(mesh.device)}, driver {driver_version() or 'unknown'}"


def describe_place(mesh: Mesh) -> str:
    """Return what decides how fast these ranks train: their number, their model, and versions."""
    return f"{mesh.world_size} x {hardware(mesh)}, torch {torch.__version__}, nanoray {__version__}"


def cpu_kernels() -> str:
    """Return the vector instructions that torch uses here, and the variables that choose kernels.

    Two CPUs of one name may differ in them: a virtual machine can hide instructions.
    """
    chosen = [f"{name}={os.environ[name]}" for name in KERNEL_VARIABLES if os.environ.get(name)]
    return ", ".join([torch.backends.cpu.get_cpu_capability(), *chosen])


def compare_hardware(mesh: Mesh) -> tuple[str, ...]:
    """Return a warning when other ranks have other hardware than rank 0's, else (). (all ranks)

    Ranks other than rank 0 return (), too.
    """
    own = hardware(mesh)
    if mesh.device.type == "cpu":
        own = f"{own} ({cpu_kernels()})"
    names = mesh.gather(own)
    if names is None:
        return ()
    others = [f"rank {rank} {name}" for rank, name in enumerate(names) if name != names[0]]
    if not others:
        return ()
    return (
        f"warning  ranks run on different hardware: rank 0 {names[0]}; {'; '.join(others)}. The "
        "slowest sets the pace, and a step that another model repeats may differ in its last bits",
    )
