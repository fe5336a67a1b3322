"""A rank's death record: exit code or signal, and the moment, told by a small process beside the rank.

Ray reports that an actor died, but not of what: `kill -9` and `os._exit(3)` look alike, and only a parent may ask the
kernel. There is another way. The rank holds a robust mutex in shared memory; when it dies, the kernel hands that over
to whoever waits for it, before the parent can reap the rank, and for that moment /proc/PID/stat still has the exit
status. (pthread_mutexattr_setrobust(3), proc_pid_stat(5); Linux only. Elsewhere there is no record.)
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_EXIT_CODE = 49  # of /proc/PID/stat's fields after the command's name
_PAGE = 4096


def attend(record: Path) -> None:
    """Start the process that writes `record` when this one dies, however it does. Linux only, else nothing."""
    if sys.platform != "linux":
        return
    page = os.memfd_create("nanoray-sentinel", 0)
    os.ftruncate(page, _PAGE)
    held = threading.Event()
    threading.Thread(target=_hold, args=(page, held), daemon=True).start()
    if not held.wait(1.0):
        os.close(page)
        return  # no such mutex here: then nobody tells how this process dies
    command = [sys.executable, "-S", "-E", __file__, str(page), str(os.getpid()), str(record)]
    subprocess.Popen(command, pass_fds=[page], stdin=subprocess.DEVNULL, start_new_session=True)
    os.close(page)


def read(record: Path) -> dict[str, float | str | None]:
    """Return a death record: pid, signal (its name) or exit_code, oom, boot and monotonic; empty when there is none."""
    with suppress(OSError, ValueError):
        return dict(json.loads(record.read_text(encoding="utf-8")))
    return {}


def boot_id() -> str:
    """Return what tells this boot of this host: monotonic clocks compare within one only."""
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
    threading.Event().wait()  # this thread, and with it the lock, lives as long as the process


def _address(shared: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(shared)))


def _oom_kills() -> int:
    """Return how many processes of this cgroup the kernel has ended for want of memory; 0 where nobody counts."""
    for events in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in Path(events).read_text(encoding="utf-8").splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def _main(page: int, pid: int, record: str) -> None:
    stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    before = _oom_kills()
    shared = mmap.mmap(page, _PAGE)
    ctypes.CDLL(None).pthread_mutex_lock(_address(shared))  # returns when the process that holds it is dying
    death: dict[str, object] = {"pid": pid, "boot": boot_id(), "monotonic": time.monotonic()}
    with suppress(OSError):  # it has been reaped already: then only the moment is known
        status = int(os.pread(stat, 4096, 0).rsplit(b") ", 1)[1].split()[_EXIT_CODE])
        number = status & 0x7F
        death |= {"signal": signal.Signals(number).name} if number else {"exit_code": status >> 8}
    death["oom"] = death.get("signal") == "SIGKILL" and _oom_kills() > before
    aside = f"{record}.{os.getpid()}"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(death, file)
    os.replace(aside, record)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
