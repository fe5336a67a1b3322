"""Find this node's GPUs and MIG slices through NVML.

Neither torch nor ray is imported here, so the driver starts fast. NVML is opened and closed in each
call.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nanoray.machine.device import Device
from nanoray.machine.mig import fractions_of, profile_of

T = TypeVar("T")


def discover_gpus(nvml: Any = None) -> list[Device]:
    """List whole GPUs, each followed by its MIG slices, filtered and ordered by
    CUDA_VISIBLE_DEVICES.

    Without a driver the list is empty. A GPU in CUDA_VISIBLE_DEVICES includes its slices. Indices
    are NVML's (bus order), which may differ from CUDA's order by speed; ranks are bound by UUID, so
    this does not matter.
    """
    devices: list[Device] = _ask(_read_gpus, [], nvml)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return devices if visible is None else _visible(devices, visible)


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or "" without one."""
    return _ask(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()), "")


def gpu_usage(ids: Sequence[str], nvml: Any = None) -> dict[str, float]:
    """Return the mean load and the largest memory in use of some GPUs or MIG slices, as metrics.

    ids: UUIDs, or NVML's numbers. Empty without any; of a slice NVML gives no load.
    """

    def read(nvml: Any) -> dict[str, float]:
        loads = []
        used = []
        for name in ids:
            if name.isdecimal():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(name)
            used.append(nvml.nvmlDeviceGetMemoryInfo(handle).used / (1 << 30))
            with contextlib.suppress(nvml.NVMLError):
                loads.append(float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        usage = {"gpu/mem_gib": max(used)}
        return usage | ({"gpu/load": sum(loads) / len(loads)} if loads else {})

    return _ask(read, {}, nvml) if ids else {}


def _ask(question: Callable[[Any], T], otherwise: T, nvml: Any = None) -> T:
    """Return the answer of `question` to an open NVML; `otherwise` without its module or a driver."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return otherwise
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            return question(nvml)
        finally:
            nvml.nvmlShutdown()
    return otherwise


def take_own_slice(local_rank: int) -> list[str]:
    """Reduce CUDA_VISIBLE_DEVICES to one MIG slice, and return it; empty where there are none.

    CUDA shows every process only the first of several. Call it before CUDA starts.
    """
    slices = [
        d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.startswith("MIG-")
    ]
    if len(slices) > 1:
        # Ranks of a node take different slices as long as there are enough.
        slices = [slices[local_rank % len(slices)]]
        os.environ["CUDA_VISIBLE_DEVICES"] = slices[0]
    return slices


def _read_gpus(nvml: Any) -> list[Device]:
    devices: list[Device] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):  # a GPU that fell off the bus
            devices += _read_gpu(nvml, index)
    return devices


def _read_gpu(nvml: Any, index: int) -> list[Device]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    name = nvml.nvmlDeviceGetName(handle)
    # Compute capability 8 (Ampere) is the first that multiplies bf16.
    bf16 = nvml.nvmlDeviceGetCudaComputeCapability(handle)[0] >= 8
    total = 0
    mig_mode = False
    with contextlib.suppress(nvml.NVMLError):  # not permitted in a container that has one slice
        total = nvml.nvmlDeviceGetMemoryInfo(handle).total
    with contextlib.suppress(nvml.NVMLError):  # not supported by this GPU
        mig_mode = bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    # A GPU in MIG mode is listed too, so that an error can name it.
    devices = [Device("cuda", index, uuid, name, total, uuid, mig_mode=mig_mode, bf16=bf16)]
    if not mig_mode:
        return devices
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # an empty place
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            attributes = nvml.nvmlDeviceGetAttributes_v2(part)
            profile = profile_of(nvml.nvmlDeviceGetName(part), attributes, total)
            label = f"{name} MIG {profile or 'unknown'}"
            compute_fraction, bandwidth_fraction = fractions_of(label)
            devices.append(
                Device(
                    kind="mig",
                    index=place,
                    uuid=nvml.nvmlDeviceGetUUID(part),
                    name=label,
                    memory_bytes=int(attributes.memorySizeMB) << 20,
                    parent_uuid=uuid,
                    profile=profile,
                    compute_fraction=compute_fraction,
                    bandwidth_fraction=bandwidth_fraction,
                    bf16=bf16,
                )
            )
    return devices


def _visible(devices: list[Device], value: str) -> list[Device]:
    """Apply CUDA's rule: the list ends at the first entry that names no device, or more than one."""
    chosen: list[Device] = []
    for entry in value.split(","):
        token = entry.strip()
        if token.isdecimal():
            hits = [d.uuid for d in devices if d.kind == "cuda" and d.index == int(token)]
        elif token.startswith(("GPU-", "MIG-")):
            # CUDA accepts the beginning of a UUID, if only one device has it.
            exact = [d.uuid for d in devices if d.uuid == token]
            hits = exact or [d.uuid for d in devices if d.uuid.startswith(token)]
        else:
            hits = []
        if len(hits) != 1:
            break
        # A GPU brings its slices with it.
        for device in devices:
            if hits[0] in (device.uuid, device.parent_uuid) and device not in chosen:
                chosen.append(device)
    return chosen
