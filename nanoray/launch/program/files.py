"""The files that say what was run and how it ended: `nanoray report RUN` and `nanoray faults RUN` read them.

program.json    the command, the program and its flags; it is no run.json, because nothing resumes it
summary.json    the exit code and the reason, as of any run
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from nanoray import __version__
from nanoray.config.settings import public, public_words
from nanoray.launch.program.driver import ProgramDriver, RankProgram
from nanoray.machine.atomic import write_json
from nanoray.machine.environment import working_folder


def write_program(program: RankProgram, keys: Mapping[str, Any]) -> None:
    """Write program.json. keys: of the configuration; the values of variables stay out of it."""
    values = {
        "kind": program.kind,
        "words": program.words,
        "hang_timeout": program.hang_timeout_s,
        "grace": program.grace_s,
        "trace_every": program.trace_every,
        "config": {key: public(key, value) for key, value in keys.items()},
        "nanoray": __version__,
        "command": public_words(sys.argv),
        "cwd": working_folder(),
        "started": time.time(),
    }
    write_json(program.folder / "program.json", values)


def write_outcome(driver: ProgramDriver, device: str, code: int, total_s: float) -> None:
    """Write summary.json. device: cpu, cuda or mig."""
    reason = "finished"
    if driver.stop.requested:
        reason = "stopped"
    elif code:
        reason = f"failed: {driver.failures[-1].title}"
    values = {
        "exit_reason": reason,
        "exit_code": code,
        "total_s": total_s,
        "world_size": driver.place.workers,
        "device": device,
        "restarts": len(driver.failures) - (reason.startswith("failed")),
        **driver.observer.summary,
    }
    write_json(driver.program.folder / "summary.json", values)
