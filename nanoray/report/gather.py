"""Read the folder of a run for its report. One that was killed, or still trains, lacks files, and
has a report.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.atomic import read_json_lines
from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.faults.__main__ import story
from nanoray.faults.cause import read_reports
from nanoray.report.memory import read_memory
from nanoray.trace.__main__ import read_steps
from nanoray.trace.ledger import Accounts, accounts_of
from nanoray.train.watch.dangers import FILE, PRECISION, dangers
from nanoray.train.watch.observers import clock, short

NONE = "–"


@dataclass(frozen=True)
class Run:
    """What is on disk about a run."""

    folder: Path
    config: dict[str, Any]
    spec: dict[str, Any]  # run.json
    summary: dict[str, Any]  # empty: the run has not ended, or was killed
    records: list[dict[str, Any]]
    faults: list[dict[str, Any]]
    story: list[str]  # the faults, as `nanoray faults` prints them
    accounts: Accounts | None
    traced: list[dict[str, Any]]  # steps with their collectives
    layers: list[dict[str, Any]]  # statistics of each layer, by step
    memory: list[dict[str, Any]]  # of one step, by rank

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric was recorded, and its values."""
        found = [(record["step"], record[metric]) for record in self.records if metric in record]
        return [step for step, _ in found], [value for _, value in found]

    @property
    def precision(self) -> list[dict[str, Any]]:
        """What its number formats lost in each layer, by step, as `layers` has its statistics."""
        return [{"step": r["step"], "layers": r[PRECISION]} for r in self.records if PRECISION in r]

    def last(self, metric: str) -> float | None:
        """Return the newest value of a metric."""
        _, values = self.series(metric)
        return values[-1] if values else None

    @property
    def warnings(self) -> list[str]:
        """What its layers' statistics warned of: each kind at the first step at which it was there."""
        first: dict[str, str] = {}
        for record in self.layers:
            for kind, text in dangers(record["layers"]).items():
                first.setdefault(kind, f"{kind} at step {record['step']}: {text}")
        return [*first.values()]

    @property
    def state(self) -> str:
        """How the run ended, in a word or a line."""
        return str(
            self.summary.get("exit_reason") or "not ended: it trains, or its command was killed"
        )

    @property
    def good(self) -> bool:
        """Whether the run ended as it was meant to."""
        return self.summary.get("exit_code") == 0


def read_run(folder: Path) -> Run:
    """Read a run. Raises ConfigError where there is none."""
    if not (folder / "run.json").is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run (no run.json); give one such as runs/2026-..."
        )
    spec = _json(folder / "run.json")
    traced: list[dict[str, Any]] = []
    accounts = None
    with suppress(ConfigError):
        traced = read_steps(folder)
    with suppress(ConfigError):
        accounts = accounts_of(folder)
    faults = [event for event in read_reports(folder) if event["event"] == "fault"]
    told = story(folder)[1:] if faults else []
    config, summary = _json(folder / "config.json"), _json(folder / "summary.json")
    records, layers = (read_json_lines(folder / name) for name in ("metrics.jsonl", FILE))
    return Run(
        folder,
        config,
        spec,
        summary,
        records,
        faults,
        told,
        accounts,
        traced,
        layers,
        read_memory(folder),
    )


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def facts(run: Run) -> dict[str, str]:
    """Return a run's figures as labels and texts; what is not known is a dash."""
    end, newest = run.summary, run.records[-1] if run.records else {}
    rate, unit = _rate(run)
    steps = end.get("steps") if end.get("steps") is not None else newest.get("step", 0)
    _, memory = run.series("mem/peak_gib")
    expected = end.get("expected_val_loss")
    ranks = (
        f"{end['world_size']} x {end['device']}, {end['backend']}"
        if end.get("world_size")
        else NONE
    )
    lost = f"{len(run.faults)}, {end.get('restarts', 0)} restart(s)" if run.faults else "0"
    return {
        "state": run.state,
        "steps": f"{steps:,} of {run.config.get('max_steps', 0):,}",
        "validation loss": _loss(run.last("val/loss"))
        + (f" (expected: {expected:g})" if expected else ""),
        "training loss": _loss(end.get("train_loss") or newest.get("train/loss")),
        "speed": f"{short(rate)} {unit}" if rate else NONE,
        "time per step": f"{end['step_ms']:.3g} ms" if end.get("step_ms") else NONE,
        "MFU": f"{run.last('perf/mfu'):.1f} %" if run.last("perf/mfu") else NONE,
        "goodput": f"{100 * run.accounts.goodput:.1f} %" if run.accounts else NONE,
        "time to the first step": f"{end['first_step_s']:.2f} s"
        if end.get("first_step_s")
        else NONE,
        "time of the last command": clock(end["total_s"]) if end.get("total_s") else NONE,
        "ranks": ranks,
        "precision": str(end.get("precision") or run.config.get("precision", NONE)),
        "peak memory of rank 0": f"{max(memory):.2f} GiB" if memory else NONE,
        "faults": lost,
        "dataset": str(end.get("dataset_note") or run.spec.get("dataset", {}).get("note", NONE)),
        "resumed from": str(end.get("resumed_from") or NONE),
        "nanoray, torch": f"{run.spec.get('nanoray', NONE)}, {end.get('torch', NONE)}",
        "command": " ".join(run.spec.get("command", [])) or NONE,
    }


def _rate(run: Run) -> tuple[float, str]:
    images = run.summary.get("samples_per_sec") or run.last("perf/samples_per_sec")
    tokens = run.summary.get("tok_per_sec") or run.last("perf/tok_per_sec")
    return (images, "samples/s") if images else (tokens or 0.0, "tok/s")


def _loss(value: float | None) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:.4f}"


def settings(runs: list[Run]) -> list[tuple[str, list[str], bool]]:
    """Return (key, each run's value, whether it is worth a look), those first.

    Worth a look is what differs between runs; with one run, what differs from the default.
    """
    defaults = Config.model_construct().model_dump(mode="json")
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [run.config.get(key) for run in runs]
        differs = (
            any(value != values[0] for value in values)
            if len(runs) > 1
            else values[0] != defaults.get(key)
        )
        rows.append(
            (
                key,
                [NONE if value is None else json.dumps(value).strip('"') for value in values],
                differs,
            )
        )
    return sorted(rows, key=lambda row: not row[2])
