"""The slots of a node: one rank's device, or its share of the CPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanoray.errors import PlacementError
from nanoray.machine.device import Device
from nanoray.machine.mig import mig_commands

MAX_RANKS_PER_CPU = 4


@dataclass(frozen=True)
class Slots:
    """The slots of one machine: one rank per device, or `workers` ranks on its CPUs."""

    kind: str
    devices: tuple[Device, ...]  # empty on CPU
    workers: int
    reason: str
    found: str = ""  # what the machine has of them, such as 2 CPUs


def local_slots(device: str, workers: int | None, gpus: list[Device], cpus: float) -> Slots:
    """Choose this machine's slots; `device` and `workers` as in the Config, with None for auto
    workers.

    GPUs and slices keep the order in which they were discovered. Raises PlacementError.
    """
    # A GPU in MIG mode accepts no work itself, only its slices do.
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

    # auto: whole GPUs before slices before CPUs.
    auto = device == "auto"
    if device == "cuda" or (auto and whole):
        return _take("cuda", "whole GPU(s)", whole, workers, auto)
    if device == "mig" or (auto and slices):
        return _take("mig", "MIG slice(s)", slices, workers, auto)

    why = "asked for"
    if auto and in_mig_mode:
        why = f"auto: {len(in_mig_mode)} GPU in MIG mode without slices"
    elif auto:
        why = "auto: no GPU found"
    count = workers
    if count is None:
        count = 2 if cpus >= 2 else 1
    cpu_share([cpus], count)  # raises if they do not fit
    reason = f"{why}; {count} of at most {MAX_RANKS_PER_CPU * cpus:g} ranks on {cpus:g} CPUs"
    return Slots("cpu", (), count, reason, f"{cpus:g} CPUs")


def _take(
    kind: str, noun: str, found: tuple[Device, ...], workers: int | None, auto: bool
) -> Slots:
    """Return the first `workers` of these devices; all of them by default."""
    available = len(found)
    count = workers or available
    if count > available:
        raise PlacementError(
            f"asked: {count} workers, available: {available} {noun}; lower workers to {available}, "
            "or use --device cpu"
        )
    reason = f"{'auto' if auto else 'asked for'}: {count} of {available} {noun}"
    # Ranks meet in every step, so each of them waits for the slowest device.
    if len({d.profile or d.name for d in found[:count]}) > 1:
        reason += "; they differ, and the slowest sets the pace"
    return Slots(kind, found[:count], count, reason, f"{available} {noun}")


def cpu_share(node_cpus: list[float], workers: int) -> float:
    """Return the largest CPU share with which `workers` ranks fit on the nodes.

    A share is a whole number, or 1/2, 1/3, 1/4. Raises PlacementError when the ranks do not fit at
    MAX_RANKS_PER_CPU ranks per CPU.
    """

    def capacity(share: float) -> int:
        # 1e-9 is for rounding errors such as 3 * (1/3) < 1.
        return sum(math.floor(cpus / share + 1e-9) for cpus in node_cpus)

    largest = math.floor(max(node_cpus, default=0))
    whole = [float(share) for share in range(largest, 0, -1)]
    fractions = [1 / ranks for ranks in range(2, MAX_RANKS_PER_CPU + 1)]
    # Shares are sorted from large to small, so the first one with room for all ranks is the largest.
    for share in whole + fractions:
        if capacity(share) >= workers:
            return share
    most = capacity(1 / MAX_RANKS_PER_CPU)
    nodes = ", ".join(f"{cpus:g}" for cpus in node_cpus) or "none"
    raise PlacementError(
        f"asked: {workers} ranks on CPU, available per node: {nodes} CPUs, which hold {most} at "
        f"{MAX_RANKS_PER_CPU} ranks per CPU; lower workers to {most}, or add nodes"
    )
