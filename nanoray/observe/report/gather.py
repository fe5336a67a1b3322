"""Read the folder of a run for its report.

The folder of a run that was killed, or that still trains, lacks files. It gets a report as well.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanoray.checkpoint.run_folder import is_locked
from nanoray.config import Config
from nanoray.config.settings import public
from nanoray.errors import ConfigError
from nanoray.faults.cause import read_reports
from nanoray.machine.atomic import read_json, read_json_lines
from nanoray.observe.faults import story
from nanoray.observe.trace.accounts import Accounts, accounts_of

NONE = "–"


class Badge(NamedTuple):
    """How a run has ended: what the badge of its page shows."""

    word: str  # finished, stopped, failed, running, ...
    kind: str  # good, bad or open: the badge's colour
    why: str  # the cause of a failure; "" where there is nothing to explain


@dataclass(frozen=True)
class RunFiles:
    """The files of a run's folder, parsed."""

    folder: Path
    config: dict[str, Any]
    spec: dict[str, Any]  # run.json, or program.json
    summary: dict[str, Any]  # empty: the run has not ended, or was killed
    records: list[dict[str, Any]]  # metrics.jsonl
    faults: list[dict[str, Any]]
    story: list[str]  # the faults, as `nanoray faults` prints them
    accounts: Accounts | None  # the ledger; None where it has no entries
    is_running: bool = False

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    def series(self, *metrics: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of the first of these metrics that was recorded."""
        steps: list[int] = []
        values: list[float] = []
        for metric in metrics:
            for record in self.records:
                if metric in record:
                    steps.append(record["step"])
                    values.append(record[metric])
            if steps:
                break
        return steps, values

    def last(self, *metrics: str) -> float | None:
        """Return the newest value of the first of these metrics that was recorded, else None."""
        _, values = self.series(*metrics)
        return values[-1] if values else None

    @property
    def badge(self) -> Badge:
        """How the run has ended, if it has."""
        reason = self.summary.get("exit_reason")
        if reason:
            word, _, why = str(reason).partition(": ")
            kind = "good" if self.summary.get("exit_code") == 0 else "open"
            if word == "failed":
                kind = "bad"
            return Badge(word.replace("_", " "), kind, why)
        if self.is_running:
            return Badge("running", "open", "")
        return Badge("not ended", "bad", "its command was killed, or runs on another machine")

    @property
    def unit(self) -> str:
        """What the records are numbered by: without --trace a program's steps are not known."""
        # Only program.json, of `nanoray run`, has the key.
        return "second" if self.spec.get("trace_every") == 0 else "step"


def read_run(folder: Path) -> RunFiles:
    """Read a run."""
    # A program that `nanoray run` has run has program.json in the place of the other two.
    spec = read_json(folder / "run.json") or read_json(folder / "program.json")
    # A run without a ledger has a page without that chart.
    accounts = None
    with suppress(ConfigError):
        accounts = accounts_of(folder)

    faults = [event for event in read_reports(folder) if event["event"] == "fault"]
    fault_lines: list[str] = []
    if faults:
        fault_lines = story(folder)[1:]  # the first line names the folder, as the page does

    return RunFiles(
        folder=folder,
        config=read_json(folder / "config.json") or spec.get("config", {}),
        spec=spec,
        summary=read_json(folder / "summary.json"),
        records=read_json_lines(folder / "metrics.jsonl"),
        faults=faults,
        story=fault_lines,
        accounts=accounts,
        is_running=is_locked(folder),
    )


class Setting(NamedTuple):
    """A key, each run's value, and whether the page marks each of them."""

    key: str
    values: list[str]
    marks: list[bool]

    @property
    def marked(self) -> bool:
        """Whether the page marks some value of this key."""
        return any(self.marks)

    @property
    def is_empty(self) -> bool:
        """Whether no run has a value of this key."""
        return all(value == NONE for value in self.values)


def settings(runs: list[RunFiles]) -> list[Setting]:
    """Return the settings of all runs, those with a mark first, without those that are empty.

    With several runs, a value that differs from the first run's is marked; with one run, a value
    that differs from the default.
    """
    defaults = Config.model_construct().model_dump(mode="json")
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = []
    for key in keys:
        values = [run.config.get(key) for run in runs]
        reference = values[0] if len(runs) > 1 else defaults.get(key)
        marks = [value != reference for value in values]
        rows.append(Setting(key, [_format_setting(public(key, value)) for value in values], marks))
    shown = [row for row in rows if row.marked or not row.is_empty]
    return sorted(shown, key=lambda row: not row.marked)  # stable: keys keep their order


def _format_setting(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return NONE
    return json.dumps(value).strip('"')
