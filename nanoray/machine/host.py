"""This machine's CPUs and memory, as the kernel and the container's limits show them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_CPU_FEATURES = frozenset(
    {"amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2", "fma", "bf16", "sve", "asimd"}
)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _cgroups(root: str, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup folders, innermost first.

    Files of a folder that the container hides read as empty.
    """
    for line in _read(Path(root, "proc/self/cgroup")).splitlines():
        # A line is number:controllers:path, and the path itself may contain colons.
        number, names, path = line.split(":", 2)
        if number != "0" and controller not in names.split(","):
            continue
        # Version 2 has one tree, numbered 0; version 1 has a tree for each controller.
        base = Path(root, "sys/fs/cgroup", "" if number == "0" else controller)
        inner = base / path.strip("/")
        # A limit on any level holds for all levels below it.
        for folder in (inner, *inner.parents):
            if folder == base or base in folder.parents:
                yield folder


def available_cpus(root: str = "/") -> float:
    """Return the cores that this process may use; at least 1.

    They are its affinity, or a smaller cgroup quota.
    """
    cores = float(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    # The smallest quota on the way to the root is the one that binds.
    for folder in _cgroups(root, "cpu"):
        # Version 2 writes quota and period into one file, version 1 into two.
        version_1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        quota, _, period = (_read(folder / "cpu.max") or version_1).partition(" ")
        if quota.isdecimal() and period.isdecimal():  # not "max", not -1
            cores = min(cores, int(quota) / int(period))
    return max(1.0, round(cores, 2))


def available_memory_bytes(root: str = "/", usable: float = 1.0) -> int:
    """Return the bytes that this process may still allocate.

    They are the free memory, or less under a cgroup limit. usable: the share of all memory, or of a
    limit, that may be in use.
    """
    meminfo = _read(Path(root, "proc/meminfo"))
    kib = {key: int(number) for key, number in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.M)}
    if "MemAvailable" in kib:
        free = 1024 * (kib["MemAvailable"] - int((1 - usable) * kib["MemTotal"]))
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal():
            rows = _read(folder / "memory.stat").splitlines()
            stat = dict(row.split(maxsplit=1) for row in rows)
            # The kernel frees these pages on demand, so they do not count as used.
            cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            free = min(free, max(0, int(usable * int(limit)) - int(used) + cache))
    return free


def cpu_name() -> str:
    """Return the processor's name, or its architecture where the name is unknown."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def cpu_features() -> frozenset[str]:
    """Return the CPU's vector extensions that matter to training; empty without /proc/cpuinfo."""
    match = re.search(
        r"^(?:flags|Features)\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE
    )
    return _CPU_FEATURES & frozenset(match[1].split()) if match else frozenset()


def resident_bytes(key: str, pid: int | str = "self") -> int:
    """Return a process's resident memory (VmRSS), its peak (VmHWM), or what of it is in no file
    (RssAnon); 0 where Linux gives none.
    """
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    return 0


def forget_peak_memory() -> None:
    """Let this process's peak (VmHWM) begin anew at what is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def trim_freed_memory() -> None:
    """Let glibc return what it keeps of freed memory, once."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def return_freed_memory() -> None:
    """Make glibc return freed memory at once, so that resident memory is the memory of tensors.

    From 64 KiB on each tensor has pages of its own. Slower: every tensor of a step is faulted in
    again.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # malloc.h
        libc.mallopt(mmap_threshold, 64 << 10)
        libc.mallopt(mmap_max, 1 << 20)
        libc.mallopt(trim_threshold, 64 << 10)
        libc.malloc_trim(0)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step.

    Otherwise it is returned and faulted in again. On CPU activations come from malloc, and
    `bench step cpu` has an arm with and without it. C libraries without mallopt are left as they are.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 32 << 20)  # the largest that glibc accepts
        libc.mallopt(top_pad, 256 << 20)
