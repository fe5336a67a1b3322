"""Whether the program that started this rank still lives: torchrun's agent, mpirun, srun's daemon.

Their ranks are of no use without them: nothing would end them, or collect how they ended. So a rank
whose launcher is gone stops after the step, with a checkpoint, as it does on Ray without a driver.
A process that no launcher started may outlive its parent: a shell that ran `nohup ... &`, setsid.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nanoray.faults.proc import start_time, stat_of
from nanoray.mesh.launchers import Place

CHECK_S = 1.0  # how often the launcher's entry in /proc is read


def watch_launcher(place: Place | None, on_end: Callable[[str], None]) -> None:
    """Call `on_end`, once and in a thread, when the launcher that started this rank has ended.

    Its argument names the launcher. A process that no launcher started has no such thread.
    """
    if place is None or not place.supervised:
        return
    parent = os.getppid()
    launcher = _launcher_pid(place.launcher.rank)
    started = start_time(launcher)

    def wait_for_end() -> None:
        # An orphan gets another parent. Scripts between this process and the launcher may live on.
        while os.getppid() == parent and start_time(launcher) == started:
            time.sleep(CHECK_S)
        on_end(f"{place.launcher.command} (pid {launcher})")

    threading.Thread(target=wait_for_end, name="nanoray-launcher", daemon=True).start()


def _launcher_pid(variable: str) -> int:
    """Return the nearest ancestor that was started without this rank's variable: the launcher.

    Scripts that the launcher runs around the rank were started with it.
    """
    pid = os.getppid()
    while pid > 1 and _was_started_with(pid, variable):
        fields = stat_of(pid)
        if not fields:
            break
        pid = int(fields[1])
    return pid


def _was_started_with(pid: int, variable: str) -> bool:
    value = os.environ.get(variable, "")
    entry = f"{variable}={value}".encode()
    with suppress(OSError):  # it belongs to another user, as srun's daemon does
        return entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
