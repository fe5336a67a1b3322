"""`micro_batch_size auto`: ask `nanoray tune` for the fastest micro batch before a run begins.

    launch ─► python -m nanoray.lab.tune ─► a recipe with the number ─► the run, which sees only that

The search has ranks of its own, and has given them back when the run takes its devices.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoray.cli import Loaded, stop_signals
from nanoray.config import read_yaml
from nanoray.errors import WorkerFailed
from nanoray.machine.atomic import read_json

BUDGET_S = 120.0
CHOSEN = "auto: tune chose"  # who has set the key, before the number


def with_micro_batch(loaded: Loaded) -> Loaded:
    """Return the settings with the micro batch that a search finds.

    Raises WorkerFailed where the search has failed, SystemExit where it was stopped.
    """
    micro = _of_earlier_run(loaded) or _searched(loaded)
    found = {"micro_batch_size": micro, "micro_batch_search": False}
    return loaded.set(found, f"{CHOSEN} {micro}").note(f"auto   micro_batch_size {micro}")


def _of_earlier_run(loaded: Loaded) -> int:
    """Return what was found for the run that `resume auto` goes on with; 0: nothing.

    Another micro batch would not give the same bits.
    """
    config = loaded.config
    if config.resume == "none":
        return 0
    for path in sorted(Path(config.out_dir).glob(f"*_{config.name}*/run.json"), reverse=True):
        record = read_json(path)  # {} if a kill has torn it
        if CHOSEN not in str(record.get("origins", {}).get("micro_batch_size")):
            continue
        before = record["config"]
        same = before["global_batch_size"] == config.global_batch_size
        if same and before["name"] == config.name:
            return int(before["micro_batch_size"])
    return 0


def _searched(loaded: Loaded) -> int:
    """Return the micro batch that a search finds now."""
    with TemporaryDirectory() as folder:
        recipe = Path(folder, "config.json")
        recipe.write_text(json.dumps(loaded.config.model_dump()))
        tuned = Path(folder, "tuned.yaml")
        command = [sys.executable, "-m", "nanoray.lab.tune", str(recipe)]
        command += ["--budget_s", f"{BUDGET_S:g}", "--write", str(tuned)]
        # In a file this key would not say that Ray was asked for.
        if "ray_address" in loaded.given:
            command += ["--ray_address", loaded.config.ray_address]
        if loaded.quiet:
            command.append("--quiet")
        code = _run(command)
        if code >= 128:
            raise SystemExit(code)
        if code:
            error = WorkerFailed(
                "micro_batch_size = auto: `nanoray tune` has failed, and its lines above say why; "
                "give a number"
            )
            error.exit_code = code
            raise error
        return int(read_yaml(tuned)["micro_batch_size"])


def _run(command: list[str]) -> int:
    """Run a command, which gets the signals that would stop this one; return its exit code."""
    # In a session of its own, so that Ctrl-C in a terminal reaches it once.
    with subprocess.Popen(command, start_new_session=True) as process:

        def forward(signum: int, frame: Any) -> None:
            process.send_signal(signum)

        with stop_signals(forward):
            code = process.wait()
    # A process that a signal has ended has the signal's number below 0.
    return code if code >= 0 else 128 - code
