"""Record how a rank's process ended (exit code or signal) and when, from a small process beside it.

Ray reports that an actor died, but not how: `kill -9` and `os._exit(3)` look the same, and the
kernel gives the exit status to the parent only. So the rank holds a robust mutex in shared memory.
When the rank dies, the kernel passes the mutex to the process that waits for it, before the parent
can reap the rank; at that moment /proc/PID/stat still has the exit status. On a busy machine the
parent may be faster; from Linux 6.15 on, a pidfd then has the status of a process that was reaped.
(pthread_mutexattr_setrobust(3), proc_pid_stat(5), pidfd_open(2) and PIDFD_GET_INFO in
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
# What a rank's file begins with: its last position, which progress.py writes. The record follows.
# Step, phase, the completed step from which this attempt started, monotonic seconds
POSITION = struct.Struct("<qqqd")
# A thread takes a lock within microseconds; this is for a machine that is very busy
LOCK_S = 30.0
# The count of the out-of-memory killer is read every 5 s, and 4 readings are kept: an increase
# before that is due to another process
OOM_LOOK_S = 5
OOM_LOOKS = 4


def watch(record: Path) -> None:
    """Start a process that writes into the file `record` when this one dies, in any way. Linux only.

    Returns when that process is ready: a death before would leave no record, because the parent
    reaps the status at once.
    """
    if sys.platform != "linux":
        return

    # Hold the mutex in a thread of its own, for as long as this process lives.
    page = os.memfd_create("nanoray-exit-record", 0)
    os.ftruncate(page, _PAGE)
    held = threading.Event()
    threading.Thread(target=_hold, args=(page, held), daemon=True).start()
    if not held.wait(LOCK_S):
        os.close(page)
        return  # no robust mutex on this system: there will be no record

    # Start the watching process. /proc/PID/stat is opened here, because this process may die at
    # once, and another may get its pid.
    stat = os.open(f"/proc/{os.getpid()}/stat", os.O_RDONLY)
    ready, when_ready = os.pipe()
    descriptors = [page, stat, when_ready]
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

    # It closes its end of the pipe when it is ready, and so does its death.
    select.select([ready], [], [], LOCK_S)
    os.close(ready)


def read(record: Path) -> dict[str, float | str | None]:
    """Return a record: pid, signal (its name) or exit_code, oom, boot and monotonic; else {}."""
    # Without nanoray's reader of mappings: this file is run by itself, beside the rank.
    with suppress(OSError, TypeError, ValueError):
        return dict(json.loads(record.read_bytes()[POSITION.size :]))
    return {}


def write(path: Path, record: dict[str, object]) -> None:
    """Write a record into a rank's file, in the place of an earlier process' one. Raises OSError."""
    content = json.dumps(record).encode()
    path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed meanwhile
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # The rank may have died before it wrote a position: then zeros stand there.
        os.ftruncate(file, POSITION.size)
        # In one call: a reader finds no record, or a complete one.
        os.pwrite(file, content, POSITION.size)
    finally:
        os.close(file)


def record_of(code: int) -> dict[str, object]:
    """Return what a record says of an exit code, which is minus the number of a signal."""
    if code < 0:
        return {"signal": signal.Signals(-code).name}
    return {"exit_code": code}


def boot_id() -> str:
    """Return the id of this host's boot: monotonic clocks can be compared within one boot only."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return ""


def _hold(page: int, held: threading.Event) -> None:
    """Take a robust mutex in the shared page, and hold it until the process ends."""
    libc = ctypes.CDLL(None)
    # A variable of its own: the address is valid only while the mapping is referenced.
    shared = mmap.mmap(page, _PAGE)
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


def oom_kills(pid: int | str = "self", root: Path = Path("/")) -> int:
    """Return the number of out-of-memory kills in a process' cgroup; 0 if unknown.

    Without a cgroup namespace the files are at the path that /proc/PID/cgroup names; with one, at
    the top.
    """
    version_2 = root / "sys/fs/cgroup"
    version_1 = root / "sys/fs/cgroup/memory"
    places = [version_2 / "memory.events", version_1 / "memory.oom_control"]
    with suppress(OSError):
        for line in (root / f"proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                places.insert(0, version_2 / path.strip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                places.insert(0, version_1 / path.strip("/") / "memory.oom_control")
    for events in places:
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in events.read_text(encoding="utf-8").splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _wait_for_end(mutex: ctypes.c_void_p, pid: int) -> int:
    """Wait until the holder of the mutex dies; return `oom_kills` of some seconds before.

    Some seconds, because a process that the kernel kills takes a while to die. Not from the start,
    because the kernel may have killed another process of the cgroup long before.
    """
    libc = ctypes.CDLL(None)
    counts = deque([oom_kills(pid)], maxlen=OOM_LOOKS)
    while True:
        until = _Timespec(int(time.time()) + OOM_LOOK_S, 0)
        if libc.pthread_mutex_timedlock(mutex, ctypes.byref(until)) != errno.ETIMEDOUT:
            return counts[0]
        counts.append(oom_kills(pid))


def _was_oom(record: dict[str, object], before: int) -> bool:
    """Whether the kernel killed the process for memory: its cgroup's count, ours, has increased."""
    return record.get("signal") == "SIGKILL" and oom_kills("self") > before


def _exit_status(stat: int, pidfd: int) -> int:
    """Return the status of a process that has ended, as waitpid(2) does.

    Raises OSError if the process was reaped, and the kernel is older than 6.15.
    """
    with suppress(OSError):
        return int(os.pread(stat, 4096, 0).rsplit(b") ", 1)[1].split()[_EXIT_CODE])
    # The process was reaped already.
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    mask, *_, status = _PIDFD_INFO.unpack(info)
    if not mask & _PIDFD_INFO_EXIT:
        raise ProcessLookupError(
            errno.ESRCH, "the kernel does not keep the exit status of this process"
        )
    return int(status)


def _main(page: int, stat: int, when_ready: int, pid: int, path: str) -> None:
    """Wait until process `pid` ends, and write its record to `path`."""
    shared = mmap.mmap(page, _PAGE)
    pidfd = os.pidfd_open(pid)
    os.close(when_ready)  # `watch` returns
    oom_kills = _wait_for_end(_address(shared), pid)

    # The status first: the parent may reap the process at any moment, and the status with it.
    record: dict[str, object] = {"pid": pid, "monotonic": time.monotonic()}
    with suppress(OSError):  # without a status, the record has only the time
        record |= record_of(os.waitstatus_to_exitcode(_exit_status(stat, pidfd)))
    record["oom"] = _was_oom(record, oom_kills)
    record["boot"] = boot_id()

    write(Path(path), record)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
