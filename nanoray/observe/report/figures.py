"""The figures of a run: the four that a page begins with, and the others."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from nanoray.machine.text import clock, short
from nanoray.observe.report.gather import NONE, RunFiles

# A loop of its own may record either
LOSS = ("train/loss", "loss")
# The figures that matter most, best first; of those in a row the first that is known
HEADLINES = (
    ("validation loss", "training loss"),
    ("speed", "time per step"),
    ("time",),
    ("faults survived",),
    ("exposed communication",),
    ("memory of the fullest GPU", "memory of the largest rank"),
    ("ranks",),
)
MOST_HEADLINES = 4


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
    # The summary is written when the run ends. Until then the records have some of its values.
    summary = run.summary
    comm = summary.get("comm") or {}
    val_loss = run.last("val/loss")
    train_loss = summary.get("train_loss") or run.last(*LOSS)
    dataset = summary.get("dataset_note") or run.spec.get("dataset", {}).get("note")
    versions = [
        f"{name} {version}"
        for name, version in (
            ("nanoray", run.spec.get("nanoray")),
            ("torch", summary.get("torch")),
        )
        if version
    ]
    return {
        "steps": _fact_of(_steps(run)),
        "validation loss": Fact(_validation_loss(run, val_loss), val_loss),
        "training loss": Fact(_format_loss(train_loss), train_loss),
        "speed": _speed(run),
        "time per step": _measured("{:.3g} ms", summary.get("step_ms") or comm.get("step_ms")),
        "MFU": _measured("{:.1f} %", run.last("perf/mfu")),
        "goodput": _measured("{:.1f} %", 100 * run.accounts.goodput if run.accounts else None),
        "time to the first step": _measured("{:.2f} s", summary.get("first_step_s")),
        "time": _time(run),
        "ranks": _fact_of(_ranks(summary)),
        "precision": _fact_of(summary.get("precision")),
        "peak memory of rank 0": _measured("{:.2f} GiB", _largest(run, "mem/peak_gib")),
        "memory of the largest rank": _measured("{:.2f} GiB", _largest(run, "mem/rss_gib")),
        "memory of the fullest GPU": _measured("{:.2f} GiB", _largest(run, "gpu/mem_gib")),
        "collectives in a step": _measured("{:.3g} ms", comm.get("busy_ms")),
        "exposed communication": _measured("{:.1f} %", comm.get("exposed_share")),
        "bus bandwidth": _measured("{:.3g} GB/s", comm.get("busbw_gbps")),
        "faults survived": Fact(_faults_survived(run)),
        "dataset": _fact_of(dataset),
        "resumed from": _fact_of(summary.get("resumed_from")),
        "versions": _fact_of(", ".join(versions)),
    }


def known_facts(runs: list[RunFiles]) -> list[dict[str, Fact]]:
    """Return each run's figures, without those that are known of none."""
    of_runs = [facts(run) for run in runs]
    labels = [
        label for label in of_runs[0] if any(of_run[label].text != NONE for of_run in of_runs)
    ]
    return [{label: of_run[label] for label in labels} for of_run in of_runs]


def headlines(known: dict[str, Fact]) -> dict[str, Fact]:
    """Return the four figures of a run that matter most, of those that are known."""
    found: dict[str, Fact] = {}
    for labels in HEADLINES:
        label = next((label for label in labels if label in known), None)
        if label and len(found) < MOST_HEADLINES:
            found[label] = known[label]
    return found


def _fact_of(value: Any) -> Fact:
    """Return words as a figure; a dash for none."""
    return Fact(str(value or NONE))


def _measured(template: str, value: float | None) -> Fact:
    """Return a figure; a dash for one that is unknown or zero (not measured)."""
    if not value:
        return Fact(NONE)
    return Fact(template.format(value), value)


def _largest(run: RunFiles, metric: str) -> float | None:
    return max(run.series(metric)[1], default=None)


def _steps(run: RunFiles) -> str:
    steps = run.summary.get("steps")
    if steps is None and run.records and run.unit == "step":
        steps = run.records[-1]["step"]
    if steps is None:
        return ""
    # Only our own loop goes by max_steps, and it counts what it has trained on.
    if run.last("train/tokens", "train/samples") is None:
        return f"{steps:,}"
    return f"{steps:,} of {run.config['max_steps']:,}"


def _format_loss(value: float | None) -> str:
    # A loss that is not finite was recorded as null, or is an infinity.
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.4f}"


def _validation_loss(run: RunFiles, value: float | None) -> str:
    loss = _format_loss(value)
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


def _time(run: RunFiles) -> Fact:
    """Return how long the last command took; of one that has not ended, to its newest record."""
    total_s = run.summary.get("total_s")
    if total_s is None and run.records and "started" in run.spec:
        total_s = run.records[-1]["time"] - run.spec["started"]
    if not total_s:
        return Fact(NONE)
    return Fact(clock(total_s), total_s)


def _ranks(summary: dict[str, Any]) -> str:
    if not summary.get("world_size"):
        return ""
    # A program chooses its backend itself.
    backend = f", {summary['backend']}" if summary.get("backend") else ""
    return f"{summary['world_size']} x {summary['device']}{backend}"


def _faults_survived(run: RunFiles) -> str:
    """Return after how many faults the run went on, and of how many if one ended it."""
    survived = sum(fault["recovery"] != "none" for fault in run.faults)
    if survived == len(run.faults):
        return str(survived)
    return f"{survived} of {len(run.faults)}"
