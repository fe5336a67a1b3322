"""A stand-in for nvidia-ml-py, which asks nvidia-smi: whole GPUs, without their MIG slices."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

QUERY = "uuid,name,memory.total,compute_cap,mig.mode.current,driver_version"


class NVMLError(Exception):
    """A question that nvidia-smi does not answer."""


class _Memory(NamedTuple):
    total: int  # bytes


def _ask() -> list[list[str]]:
    """Return the answers to QUERY, a list for each GPU. Raises NVMLError."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NVMLError(f"cannot run nvidia-smi: {error}") from None
    if done.returncode:
        raise NVMLError(f"nvidia-smi: exit code {done.returncode}: {done.stdout}{done.stderr}")
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]


def nvmlInit() -> None:
    """Raise NVMLError where there is no driver."""
    if not _ask():
        raise NVMLError("nvidia-smi lists no GPU")


def nvmlShutdown() -> None:
    """Do nothing."""


def nvmlSystemGetDriverVersion() -> str:
    """Return the version of the driver."""
    return _ask()[0][5]


def nvmlDeviceGetCount() -> int:
    """Return the number of GPUs."""
    return len(_ask())


def nvmlDeviceGetHandleByIndex(index: int) -> list[str]:
    """Return what nvidia-smi says of a GPU."""
    return _ask()[index]


def nvmlDeviceGetUUID(handle: list[str]) -> str:
    """Return its id."""
    return handle[0]


def nvmlDeviceGetName(handle: list[str]) -> str:
    """Return its name."""
    return handle[1]


def nvmlDeviceGetMemoryInfo(handle: list[str]) -> _Memory:
    """Return its memory. nvidia-smi writes MiB."""
    return _Memory(int(handle[2]) * 2**20)


def nvmlDeviceGetCudaComputeCapability(handle: list[str]) -> tuple[int, int]:
    """Return its compute capability."""
    major, minor = handle[3].split(".")
    return int(major), int(minor)


def nvmlDeviceGetMigMode(handle: list[str]) -> tuple[bool, bool]:
    """Return whether it is in MIG mode, now and after its next reset."""
    enabled = handle[4] == "Enabled"
    return enabled, enabled


def nvmlDeviceGetMaxMigDeviceCount(handle: list[str]) -> int:
    """Return 0: slices are not listed."""
    return 0
