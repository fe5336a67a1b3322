"""How a rank's process ended (exit code or signal) and when, written by a small process beside the
rank.

Ray reports that an actor died, but not how: `kill -9` and `os._exit(3)` look the same, and the
kernel gives the exit status to the parent only. So the rank holds a robust mutex in shared memory.
When the rank dies, the kernel passes the mutex to the process that waits for it, before the parent
can reap the rank; at that moment /proc/PID/stat still has the exit status. On a busy machine the
parent may be quicker all the same; from Linux 6.15 on a pidfd then has the status of a process that
was reaped. (pthread_mutexattr_setrobust(3), proc_pid_stat(5), pidfd_open(2) and PIDFD_GET_INFO in
linux/pidfd.h. Linux only; elsewhere there is no record.)
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

_EXIT_CODE = 49  # of /proc/PID/stat's fields after the command's name
# pidfd_info: mask, cgroup id, 11 ids of the process and its user, exit status
_PIDFD_INFO = struct.Struct("QQ11Ii")
# _IOWR(0xFF, 11, struct pidfd_info)
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_PAGE = 4096
# For a thread to take a lock, which takes microseconds, on a machine that is very busy
LOCK_S = 30.0
# Seconds between looks at the count, and how many are kept: an older kill is another's
OOM_LOOK_S, OOM_LOOKS = 5, 4


def watch(record: Path) -> None:
    """Start a process that writes `record` when this one dies, in whatever way. Does nothing
    outside Linux.

    Returns once it watches: a death before that would leave no record, because the parent reaps the
    status at once.
    """
    if sys.platform != "linux":
        return
    page = os.memfd_create("nanoray-exit-record", 0)
    os.ftruncate(page, _PAGE)
    held = threading.Event()
    threading.Thread(target=_hold, args=(page, held), daemon=True).start()
    if not held.wait(LOCK_S):
        os.close(page)
        return  # no robust mutex on this system: there will be no record
    # Opened here, because this process may die at once
    stat = os.open(f"/proc/{os.getpid()}/stat", os.O_RDONLY)
    watches, says = os.pipe()
    descriptors = [page, stat, says]
    command = [
        sys.executable,
        "-S",
        "-E",
        __file__,
        *map(str, descriptors),
        str(os.getpid()),
        str(record),
    ]
    subprocess.Popen(
        command, pass_fds=descriptors, stdin=subprocess.DEVNULL, start_new_session=True
    )
    for descriptor in descriptors:
        os.close(descriptor)
    select.select([watches], [], [], LOCK_S)
    os.close(watches)


def read(record: Path) -> dict[str, float | str | None]:
    """Return a record: pid, signal (its name) or exit_code, oom, boot and monotonic; empty if there
    is none.
    """
    with suppress(OSError, ValueError):
        return dict(json.loads(record.read_text(encoding="utf-8")))
    return {}


def boot_id() -> str:
    """Return the id of this boot of this host: monotonic clocks can be compared within one boot
    only.
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return ""


def _hold(page: int, held: threading.Event) -> None:
    libc, shared = ctypes.CDLL(None), mmap.mmap(page, _PAGE)
    mutex = _address(shared)
    attributes = ctypes.create_string_buffer(64)
    libc.pthread_mutexattr_init(attributes)
    libc.pthread_mutexattr_setpshared(attributes, 1)
    libc.pthread_mutexattr_setrobust(attributes, 1)
    libc.pthread_mutex_init(mutex, attributes)
    libc.pthread_mutex_lock(mutex)
    held.set()
    threading.Event().wait()  # keep this thread, and with it the lock, until the process ends


def _address(shared: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(shared)))


def _oom_kills(pid: int | str = "self", root: Path = Path("/")) -> int:
    """Return how many processes of a process' cgroup the kernel's out-of-memory killer has ended; 0
    if unknown.

    Without a cgroup namespace the files are at the path that /proc/PID/cgroup names; with one, at
    the top.
    """
    tops = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"  # version 2, version 1
    places = [tops[0] / "memory.events", tops[1] / "memory.oom_control"]
    with suppress(OSError):
        for line in (root / f"proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                places.insert(0, tops[0] / path.strip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                places.insert(0, tops[1] / path.strip("/") / "memory.oom_control")
    for events in places:
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in events.read_text(encoding="utf-8").splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _wait_for_end(mutex: ctypes.c_void_p, pid: int) -> int:
    """Wait until the holder of the mutex dies; return its cgroup's count of _oom_kills some seconds
    before.

    A process that the kernel ends takes a while to die, and another one may have been ended long
    before.
    """
    libc, counts = ctypes.CDLL(None), deque([_oom_kills(pid)], maxlen=OOM_LOOKS)
    while True:
        until = _Timespec(int(time.time()) + OOM_LOOK_S, 0)
        if libc.pthread_mutex_timedlock(mutex, ctypes.byref(until)) != errno.ETIMEDOUT:
            return counts[0]
        counts.append(_oom_kills(pid))


def _was_oom(found: dict[str, object], before: int) -> bool:
    """Whether the kernel ended the process because of memory: its cgroup, this one, counts more
    than `before`.
    """
    return found.get("signal") == "SIGKILL" and _oom_kills("self") > before


def _exit_status(stat: int, pidfd: int) -> int:
    """Return the status of a process that has ended, as waitpid(2) gives it. Raises OSError if it
    cannot be known.
    """
    with suppress(OSError):
        return int(os.pread(stat, 4096, 0).rsplit(b") ", 1)[1].split()[_EXIT_CODE])
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    mask, *_, status = _PIDFD_INFO.unpack(info)
    if not mask & _PIDFD_INFO_EXIT:
        raise ProcessLookupError(
            errno.ESRCH, "the kernel does not keep the exit status of this process"
        )
    return int(status)


def _main(page: int, stat: int, says: int, pid: int, record: str) -> None:
    shared = mmap.mmap(page, _PAGE)
    pidfd = os.pidfd_open(pid)
    os.close(says)  # the end of the pipe tells
    oom_kills = _wait_for_end(_address(shared), pid)
    # First what cannot be known later: a parent that is quick reaps the process, and with it its
    # status.
    found: dict[str, object] = {"pid": pid, "monotonic": time.monotonic()}
    # Already reaped, and the kernel is older than 6.15: only the time is known
    with suppress(OSError):
        status = _exit_status(stat, pidfd)
        number = status & 0x7F
        found |= {"signal": signal.Signals(number).name} if number else {"exit_code": status >> 8}
    found["oom"] = _was_oom(found, oom_kills)
    found["boot"] = boot_id()
    aside = f"{record}.{os.getpid()}"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(aside, record)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
