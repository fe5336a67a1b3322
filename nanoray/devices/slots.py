"""Slots: which of a node's devices, and how many CPUs, each rank gets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanoray.devices.device import Device
from nanoray.devices.mig import mig_commands
from nanoray.errors import PlacementError

MAX_RANKS_PER_CPU = 4


@dataclass(frozen=True)
class Slots:
    """The slots of one machine: one rank per device, or `workers` ranks on its CPUs."""

    kind: str
    devices: tuple[Device, ...]  # empty on CPU
    workers: int
    reason: str


def local_slots(device: str, workers: int | None, gpus: list[Device], cpus: float) -> Slots:
    """Choose this machine's slots; `device` and `workers` as in the Config, with None for auto
    workers.

    GPUs and slices keep the order in which they were discovered. Raises PlacementError.
    """
    whole = tuple(d for d in gpus if d.kind == "cuda" and not d.mig_mode)
    slices = tuple(d for d in gpus if d.kind == "mig")
    in_mig_mode = [d for d in gpus if d.kind == "cuda" and d.mig_mode]
    nothing = f"device = {device} (asked: {workers or 'all'}, available: 0"
    if device in ("cuda", "mig") and not gpus:
        raise PlacementError(
            f"{nothing}): no GPU is visible; use --device cpu, or see nvidia-smi -L"
        )
    if device == "cuda" and not whole:
        first = "" if slices else f"; {mig_commands(in_mig_mode[0], workers)}"
        raise PlacementError(
            f"{nothing} whole GPUs): all GPUs are in MIG mode; use --device mig{first}"
        )
    if device == "mig" and not slices:
        raise PlacementError(
            f"{nothing} MIG slices); {mig_commands((in_mig_mode or gpus)[0], workers)}"
        )
    auto = device == "auto"
    if device == "cuda" or (auto and whole):
        return _take("cuda", "whole GPU(s)", whole, workers, auto)
    if device == "mig" or (auto and slices):
        return _take("mig", "MIG slice(s)", slices, workers, auto)
    why = f"{len(in_mig_mode)} GPU in MIG mode without slices" if in_mig_mode else "no GPU found"
    why = f"auto: {why}" if auto else "asked for"
    count = workers or (2 if cpus >= 2 else 1)
    cpu_share([cpus], count)
    return Slots(
        "cpu",
        (),
        count,
        f"{why}; {count} of at most {MAX_RANKS_PER_CPU * cpus:g} ranks on {cpus:g} CPUs",
    )


def _take(
    kind: str, noun: str, found: tuple[Device, ...], workers: int | None, auto: bool
) -> Slots:
    count, n = workers or len(found), len(found)
    if count > n:
        raise PlacementError(
            f"asked: {count} workers, available: {n} {noun}; lower workers to {n}, or use --device "
            "cpu"
        )
    reason = f"{'auto' if auto else 'asked for'}: {count} of {n} {noun}"
    if len({d.profile or d.name for d in found[:count]}) > 1:
        reason += "; they differ, and the slowest sets the pace"
    return Slots(kind, found[:count], count, reason)


def cpu_share(node_cpus: list[float], workers: int) -> float:
    """Return the largest CPU share (a whole number, or 1/2, 1/3, 1/4) with which `workers` ranks
    fit on the nodes.

    Raises PlacementError when they do not fit at MAX_RANKS_PER_CPU ranks per CPU.
    """

    def held(share: float) -> int:  # 1e-9 is for rounding errors such as 3 * (1/3) < 1
        return sum(math.floor(cpus / share + 1e-9) for cpus in node_cpus)

    whole = [float(share) for share in range(math.floor(max(node_cpus, default=0)), 0, -1)]
    for share in whole + [1 / ranks for ranks in range(2, MAX_RANKS_PER_CPU + 1)]:
        if held(share) >= workers:
            return share
    most = held(1 / MAX_RANKS_PER_CPU)
    raise PlacementError(
        f"asked: {workers} ranks on CPU, available per node: "
        f"{', '.join(f'{c:g}' for c in node_cpus) or 'none'} CPUs, "
        f"which hold {most} at {MAX_RANKS_PER_CPU} ranks per CPU; lower workers to {most}, or add "
        "nodes"
    )
