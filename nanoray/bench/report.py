"""What a benchmark says: the conditions, rows of medians with their spread, ratios of pairs, targets and verdicts."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoray import __version__
from nanoray.devices import available_cpus, cpu_features, cpu_name, discover_gpus
from nanoray.run import write_json

MIN_JUDGED = 5  # a target is judged from this many rounds on; fewer only show which way it points


@dataclass(frozen=True)
class Row:
    """One measured quantity: a value per round, or the reason why there is none."""

    arm: str
    metric: str
    unit: str
    values: tuple[float, ...]
    note: str = ""
    error: str = ""

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        """Half of the rounds were below it: one disturbed round does not move it far."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the values between which the middle half of the rounds lies."""
        if self.n < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def to_dict(self) -> dict[str, Any]:
        """Return the row as it stands in the JSON file; a failed one has `error` and no numbers."""
        row: dict[str, Any] = {"arm": self.arm, "metric": self.metric, "unit": self.unit, "note": self.note}
        if not self.values:
            return row | {"error": self.error or "no value", "n": 0, "values": []}
        numbers = {"median": self.median, "min": min(self.values), "max": max(self.values)}
        low, high = self.quartiles
        return row | numbers | {"lower_quartile": low, "upper_quartile": high, "n": self.n, "values": list(self.values)}


def ratio(name: str, metric: str, upper: Row, lower: Row, note: str = "") -> Row:
    """Return the row of `upper` / `lower`, one ratio per round.

    Both sides of a ratio were measured in the same round, so a machine that is slow for a minute slows both and the
    ratio stays. A ratio of two medians would compare one's good minute with the other's bad one.
    """
    values = tuple(u / v for u, v in zip(upper.values, lower.values, strict=False))  # a failed arm has fewer rounds
    return Row(name, metric, "ratio", values, note, upper.error or lower.error)


@dataclass(frozen=True)
class Target:
    """What a row should come to. `excuse` says why this machine cannot show it."""

    text: str
    row: Row
    relation: str  # "<=" or ">="
    limit: float
    excuse: str = ""

    @property
    def verdict(self) -> str:
        """ok | MISSED | not measured | does not apply: WHY | ok or missed, not judged."""
        if self.excuse:
            return f"does not apply: {self.excuse}"
        if not self.row.values:
            return "not measured"
        reached = self.row.median <= self.limit if self.relation == "<=" else self.row.median >= self.limit
        if self.row.n < MIN_JUDGED:
            return f"{'ok' if reached else 'missed'}, not judged: n = {self.row.n} < {MIN_JUDGED}"
        return "ok" if reached else "MISSED"

    @property
    def failed(self) -> bool:
        return self.verdict in ("MISSED", "not measured")

    def to_dict(self) -> dict[str, Any]:
        value = self.row.median if self.row.values else None
        return {"target": self.text, "relation": self.relation, "limit": self.limit, "measured": value} | {
            "n": self.row.n,
            "verdict": self.verdict,
        }


@dataclass
class Report:
    """Everything one benchmark found."""

    bench: str
    conditions: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self, arm: str, metric: str) -> Row | None:
        """Return the row of that arm and metric, if it was measured or failed."""
        return next((r for r in self.rows if (r.arm, r.metric) == (arm, metric)), None)

    def compare(self, upper: str, lower: str, metric: str, note: str = "") -> Row | None:
        """Add the row of ratios `upper` / `lower` of a metric; None when one of the two was not asked for."""
        above, below = self.row(upper, metric), self.row(lower, metric)
        if above is None or below is None:
            return None
        self.rows.append(ratio(f"{upper} / {lower}", metric, above, below, note))
        return self.rows[-1]

    @property
    def failed(self) -> bool:
        return bool(self.failures) or any(t.failed for t in self.targets)

    def to_dict(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "conditions": self.conditions,
            "rows": [r.to_dict() for r in self.rows],
            "targets": [t.to_dict() for t in self.targets],
            "failures": self.failures,
            "ok": not self.failed,
        }

    def write(self, path: Path) -> None:
        """Write the JSON file; a reader never sees half of it."""
        write_json(path, self.to_dict())

    def lines(self) -> list[str]:
        """Return the conditions, the table, the failures, the targets, and OK or FAILED as the last line."""
        lines = [f"{key:<12}{_condition(value)}" for key, value in self.conditions.items()]
        lines += ["", *table(self.rows), ""]
        for failure in self.failures:
            first, *rest = failure.splitlines()
            lines += [f"FAILED  {first}", *("  | " + line for line in rest)]
        for target in self.targets:
            measured = f"{target.row.median:.3f}" if target.row.values else "FAILED"
            lines.append(f"target  {target.text} {target.relation} {target.limit:g}: {measured}  {target.verdict}")
        missed = [f"{t.text}: {t.verdict}" for t in self.targets if t.failed]
        problems = [*(f.splitlines()[0] for f in self.failures), *missed]
        counts = f"{len(self.rows)} rows, {len(self.targets)} target(s)"
        return [*lines, f"FAILED  {'; '.join(problems)}" if problems else f"OK  {counts}"]


def _condition(value: Any) -> str:
    if isinstance(value, dict):
        return " · ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as aligned text: arm, metric, unit, median, middle half, range, n, note."""
    cells = [("arm", "metric", "unit", "median", "quartiles", "min .. max", "n", "")]
    for row in rows:
        if row.values:
            half, span = (
                f"{number(low)} .. {number(high)}" for low, high in (row.quartiles, (min(row.values), max(row.values)))
            )
            cells.append((row.arm, row.metric, row.unit, number(row.median), half, span, str(row.n), row.note))
        else:
            cells.append((row.arm, row.metric, row.unit, "FAILED", "", "", "0", row.error.splitlines()[0]))
    width = [max(len(line[i]) for line in cells) for i in range(7)]
    right = {3, 6}
    return [
        "  ".join(c.rjust(width[i]) if i in right else c.ljust(width[i]) for i, c in enumerate(line[:7])).rstrip()
        + (f"  {line[7]}" if line[7] else "")
        for line in cells
    ]


def number(value: float) -> str:
    """Write a value with three significant digits and no exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table that a README can paste; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *lines)]


def conditions(bench: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return what the numbers depend on: versions, machine, load, date and the command that made them."""
    installed = {name: next((d.version for d in metadata.distributions(name=name)), None) for name in ("torch", "ray")}
    features = cpu_features() & {"amx_bf16", "avx512_bf16", "avx512f", "avx2"}
    return {
        "command": shlex.join(["python", "-m", "nanoray.bench", bench, *argv]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"nanoray": __version__, "python": platform.python_version(), **installed},
        "cpu": {"name": cpu_name(), "usable cores": available_cpus(), "features": " ".join(sorted(features))},
        "gpus": [f"{d.name} {d.profile}".strip() for d in discover_gpus()],
        "load": {"before": load_average()},
    }


def load_average() -> float:
    """Return how many processes wanted a CPU over the last minute: what else this machine was doing."""
    return round(os.getloadavg()[0], 2)
