"""Read the folder of a run for its report.

The folder of a run that was killed, or that still trains, lacks files. It gets a report as well.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanoray.config import Config
from nanoray.config.settings import public
from nanoray.errors import ConfigError
from nanoray.faults.cause import read_reports
from nanoray.machine.atomic import read_json, read_json_lines
from nanoray.machine.text import clock, short
from nanoray.observe.faults import story
from nanoray.observe.trace.accounts import Accounts, accounts_of

NONE = "–"


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

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric was recorded, and its values."""
        steps = []
        values = []
        for record in self.records:
            if metric in record:
                steps.append(record["step"])
                values.append(record[metric])
        return steps, values

    def last(self, metric: str) -> float | None:
        """Return the newest value of a metric, None if it was never recorded."""
        _, values = self.series(metric)
        return values[-1] if values else None

    @property
    def state(self) -> str:
        """How the run ended, in a word or a line."""
        reason = self.summary.get("exit_reason")
        return str(reason or "not ended: it trains, or its command was killed")

    @property
    def is_program(self) -> bool:
        """Whether `nanoray run` has run it: a program with a loop of its own."""
        return "words" in self.spec

    @property
    def unit(self) -> str:
        """What the records are numbered by: without --trace nothing is known of a program's steps."""
        return "second" if self.is_program and not self.spec["trace_every"] else "step"

    @property
    def good(self) -> bool:
        """Whether the run ended without an error."""
        return self.summary.get("exit_code") == 0


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
    )


class Fact(NamedTuple):
    """A figure of a run as text, and as a number where runs can be compared by it."""

    text: str
    value: float | None = None

    def change_from(self, first: Fact) -> str:
        """Return by how much this figure differs from another run's; "" where it does not."""
        if self.value is None or not first.value:
            return ""
        change = 100 * (self.value / first.value - 1)
        if abs(change) < 0.05:
            return ""
        return f"{change:+.1f} %"


def facts(run: RunFiles) -> dict[str, Fact]:
    """Return a run's figures by label; the text of a figure that is not known is a dash."""
    # The summary is written when the run ends. Until then the newest record has some of its values.
    summary = run.summary
    comm = summary.get("comm") or {}
    newest: dict[str, Any] = {}
    if run.records:
        newest = run.records[-1]

    steps = summary.get("steps")
    if steps is None:
        steps = newest.get("step", 0)
    max_steps = run.config.get("max_steps", 0)
    val_loss = run.last("val/loss")
    train_loss = summary.get("train_loss") or newest.get("train/loss")
    precision = summary.get("precision") or run.config.get("precision", NONE)
    dataset = summary.get("dataset_note") or run.spec.get("dataset", {}).get("note", NONE)

    done = f"{steps:,} of {max_steps:,}"
    if run.is_program:
        done = f"{steps:,}" if run.unit == "step" else NONE

    return {
        "state": Fact(run.state),
        "steps": Fact(done),
        "validation loss": Fact(_validation_loss(run), val_loss),
        "training loss": Fact(_format_loss(train_loss), train_loss),
        "speed": _speed(run),
        "time per step": _known("{:.3g} ms", summary.get("step_ms") or comm.get("step_ms")),
        "MFU": _known("{:.1f} %", run.last("perf/mfu")),
        "goodput": _goodput(run),
        "time to the first step": _known("{:.2f} s", summary.get("first_step_s")),
        "time of the last command": _total_time(summary),
        "ranks": Fact(_ranks(summary)),
        "precision": Fact(str(precision)),
        "peak memory of rank 0": _known("{:.2f} GiB", _largest(run, "mem/peak_gib")),
        "memory of the largest rank": _known("{:.2f} GiB", _largest(run, "mem/rss_gib")),
        "memory of the fullest GPU": _known("{:.2f} GiB", _largest(run, "gpu/mem_gib")),
        "collectives in a step": _known("{:.3g} ms", comm.get("busy_ms")),
        "exposed communication": _known("{:.1f} %", comm.get("exposed_share")),
        "bus bandwidth": _known("{:.3g} GB/s", comm.get("busbw_gbps")),
        "faults": Fact(_faults(run)),
        "dataset": Fact(str(dataset)),
        "resumed from": Fact(str(summary.get("resumed_from") or NONE)),
        "nanoray, torch": Fact(f"{run.spec.get('nanoray', NONE)}, {summary.get('torch', NONE)}"),
    }


def shown_facts(runs: list[RunFiles]) -> list[dict[str, Fact]]:
    """Return each run's figures; of programs alone without those that none of them can have."""
    of_runs = [facts(run) for run in runs]
    labels = [
        label
        for label in of_runs[0]
        if any(not run.is_program for run in runs)
        or any(of_run[label].text != NONE for of_run in of_runs)
    ]
    return [{label: of_run[label] for label in labels} for of_run in of_runs]


def _largest(run: RunFiles, metric: str) -> float | None:
    return max(run.series(metric)[1], default=None)


def _known(template: str, value: float | None) -> Fact:
    """Return a figure; a dash for one that is unknown or zero (not measured)."""
    if not value:
        return Fact(NONE)
    return Fact(template.format(value), value)


def _format_loss(value: float | None) -> str:
    # A loss that is not finite was recorded as null, or is an infinity.
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.4f}"


def _validation_loss(run: RunFiles) -> str:
    loss = _format_loss(run.last("val/loss"))
    expected = run.summary.get("expected_val_loss")  # only of a preset that was trained before
    if expected:
        loss += f" (expected: {expected:g})"
    return loss


def _speed(run: RunFiles) -> Fact:
    """Return samples per second of a model of images, else tokens per second."""
    samples = run.summary.get("samples_per_sec") or run.last("perf/samples_per_sec")
    if samples:
        return Fact(f"{short(samples)} samples/s", samples)
    tokens = run.summary.get("tok_per_sec") or run.last("perf/tok_per_sec")
    if tokens:
        return Fact(f"{short(tokens)} tok/s", tokens)
    return Fact(NONE)


def _goodput(run: RunFiles) -> Fact:
    if not run.accounts:
        return Fact(NONE)
    percent = 100 * run.accounts.goodput
    return Fact(f"{percent:.1f} %", percent)


def _total_time(summary: dict[str, Any]) -> Fact:
    total_s = summary.get("total_s")
    if not total_s:
        return Fact(NONE)
    return Fact(clock(total_s), total_s)


def _ranks(summary: dict[str, Any]) -> str:
    if not summary.get("world_size"):
        return NONE
    backend = f", {summary['backend']}" if "backend" in summary else ""  # a program chooses its own
    return f"{summary['world_size']} x {summary['device']}{backend}"


def _faults(run: RunFiles) -> str:
    if not run.faults:
        return "0"
    return f"{len(run.faults)}, {run.summary.get('restarts', 0)} restart(s)"


class Setting(NamedTuple):
    """A key, each run's value, and whether the page marks each of them."""

    key: str
    values: list[str]
    marks: list[bool]

    @property
    def marked(self) -> bool:
        """Whether the page marks some value of this key."""
        return any(self.marks)


def settings(runs: list[RunFiles]) -> list[Setting]:
    """Return the settings of all runs, those with a mark first.

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
        shown = [NONE if value is None else _format_setting(public(key, value)) for value in values]
        rows.append(Setting(key, shown, marks))
    return sorted(rows, key=lambda row: not row.marked)  # stable: keys keep their order


def _format_setting(value: Any) -> str:
    return json.dumps(value).strip('"')
