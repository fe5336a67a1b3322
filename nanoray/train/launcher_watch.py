"""Whether the program that started this rank still lives: torchrun's agent, mpirun, srun's daemon.

Their ranks are of no use without them: nothing would end them, or collect how they ended. So a rank
whose launcher is gone stops after the step, with a checkpoint, as it does on Ray without a driver.
A process that no launcher started may outlive its parent: a shell that ran `nohup ... &`, setsid.
So may a rank below a script that the launcher started and that does not `exec` it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from nanoray.machine.launchers import Place

CHECK_S = 1.0  # how often this process asks who its parent is


def watch_launcher(place: Place | None, on_end: Callable[[str], None]) -> None:
    """Call `on_end`, once and in a thread, when the launcher that started this rank has ended.

    Its argument names the launcher. A process that no launcher started has no such thread.
    """
    if place is None or not place.supervised:
        return
    parent = os.getppid()  # the launcher, or its daemon on this host

    def wait_for_end() -> None:
        while os.getppid() == parent:  # an orphan gets another one
            time.sleep(CHECK_S)
        on_end(f"{place.launcher.command} (pid {parent})")

    threading.Thread(target=wait_for_end, name="nanoray-launcher", daemon=True).start()
