"""Weights & Biases: `--track wandb`. W&B's own variables choose project, entity, group and mode."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoray.observe.track.tracker import Results

FINISH_S = 20  # how long W&B may go on to upload at the end; `wandb sync` sends the rest
WITHOUT_NETWORK = ("offline", "disabled", "dryrun")  # modes that need no key


class WandbTracker:
    """A run of Weights & Biases. Its files are in the run's folder, below wandb/."""

    kind = "wandb"

    def __init__(self) -> None:
        self._run: Any = None

    def problem(self) -> str | None:
        """Return that there is no key, which W&B would ask for at the terminal."""
        import wandb  # now, and not beside the first steps

        mode = os.environ.get("WANDB_MODE") or "online"
        if mode in WITHOUT_NETWORK or wandb.login(prompt=False, verify=False):
            return None
        return (
            "track = wandb finds no API key of Weights & Biases for this process; run `wandb "
            "login`, pass the shell's key on with --env WANDB_API_KEY, or set WANDB_MODE=offline"
        )

    def start(self, folder: Path, config: dict[str, Any], known_id: str) -> tuple[str, str]:
        """Begin W&B's run, or continue it; return its id and where it is."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "nanoray",
            name=folder.name,
            id=known_id or None,
            resume="allow",
            config=config,
            dir=os.environ.get("WANDB_DIR") or str(folder),
            # The console is the run's own.
            settings=wandb.Settings(silent=True, console="off", finish_timeout=FINISH_S),
            reinit="create_new",  # a run that the program itself has begun stays as it is
        )
        # The x axis is our step. W&B's own only grows, and would drop the steps that a resume or a
        # rollback repeats.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step", step_sync=True)
        return self._run.id, self._run.url or f"offline; `wandb sync` uploads {self._run.dir}"

    def log(self, step: int, time_s: float, values: Mapping[str, float | str]) -> None:
        """Report the metrics of a logged step."""
        self._run.log({"step": step, **values})

    def finish(self, step: int, results: Results) -> None:
        """Report how the run ended, and flush."""
        if results.sample:
            self._run.summary["sample_text"] = results.sample
        self._run.summary.update(results.values)
        self._run.finish(exit_code=1 if results.status == "failed" else 0)
