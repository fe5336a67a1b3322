"""Aim: `--track aim`, and nanoray.AimCallback.

Aim has no package for Python 3.13, and wants a `filelock` below 4. What a run writes shows up when
Aim has indexed it, as `aim up` does.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from nanoray.base.atomic import one_at_a_time
from nanoray.train.track.tracker import Results, TrackedRun, Tracker


class AimTracker(Tracker):
    """A run of Aim. Without a repository it is in one beside the runs' folders."""

    kind: ClassVar[str] = "aim"
    packages: ClassVar[tuple[str, ...]] = ("aim",)

    def __init__(
        self, repo: str | None = None, experiment: str | None = None, name: str | None = None
    ) -> None:
        self._repo = repo
        self._experiment = experiment or "nanoray"
        self._name = name
        self._run: Any = None

    @property
    def key(self) -> str:
        return f"{self.kind}/{self._experiment}"

    def problem(self, run: TrackedRun) -> str | None:
        if self.missing():
            return self.missing()
        import aim  # now, and not beside the first steps  # noqa: F401

        return None

    def start(self, run: TrackedRun, keep_id: Callable[[str], None]) -> str:
        import aim

        repo = self._repo or str(run.folder.parent)
        # The repository belongs to the runs' folder: make it at the first run.
        if "://" not in repo:
            with one_at_a_time(Path(repo) / "aim.lock"):
                if not (Path(repo) / ".aim").exists():
                    aim.Repo.from_path(repo, init=True)
        self._run = aim.Run(
            run_hash=run.known_id or None,
            repo=repo,
            experiment=self._experiment,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        keep_id(self._run.hash)
        self._run.name = self._name or run.name
        self._run["config"] = run.config
        return f"in {repo}; `aim up --repo {shlex.quote(repo)}` shows it"

    def describe(self, units: Mapping[str, str]) -> None:
        for name, unit in units.items():
            self._run["units", name] = unit

    def log(self, step: int, time_s: float, values: Mapping[str, float | str]) -> None:
        import aim

        for name, value in values.items():
            tracked = aim.Text(value) if isinstance(value, str) else value
            self._run.track(tracked, name=name, step=step)

    def finish(self, step: int, results: Results) -> None:
        import aim

        if results.sample:
            self._run.track(aim.Text(results.sample), name="sample", step=step)
        self._run["results"] = results.values
        self._run.close()
