"""What a benchmark says: the conditions, rows of medians with their spread, ratios of pairs,
targets and verdicts.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from nanoray import __version__
from nanoray.atomic import write_json
from nanoray.devices.gpus import discover_gpus
from nanoray.devices.host import available_cpus, cpu_features, cpu_name
from nanoray.mesh.rendezvous import runtime_nccl_version

MIN_JUDGED = 5  # a target is judged from this many rounds on; fewer only show which way it points


@dataclass(frozen=True)
class Row:
    """One measured quantity: a value per round, or the reason why there is none.

    wrong    elements that differ from the exact result; None where nothing is compared
    skipped  why there is no value although nothing is broken: the backend lacks it, the size does not fit
    extra    further keys of the row in the JSON file, such as op, dtype, bytes
    """

    arm: str
    metric: str
    unit: str
    values: tuple[float, ...]
    note: str = ""
    error: str = ""
    wrong: int | None = None
    skipped: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Return why this is no result, in one line; "" when it is one, or when it was skipped."""
        if self.error or not (self.values or self.skipped):
            return (self.error or "no value").splitlines()[0]
        return f"{self.wrong} wrong" if self.wrong else ""

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        """Return the median: one disturbed round hardly moves it."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the lower and the upper quartile."""
        if self.n < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    @property
    def speed(self) -> str:
        """Return what a ratio of times says of the upper one: neither, where its quartiles lie on
        both sides of 1.
        """
        low, high = self.quartiles
        return "faster than" if high < 1 else "slower than" if low > 1 else "as fast as"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as it stands in the JSON file; without values it has `error` or `skipped`,
        and no median.
        """
        row = self.extra | {
            "arm": self.arm,
            "metric": self.metric,
            "unit": self.unit,
            "note": self.note,
        }
        row |= {
            "n": self.n,
            "values": list(self.values),
            "median": self.median if self.values else None,
        }
        row |= {} if self.wrong is None else {"wrong": self.wrong}
        if self.values:
            low, high = self.quartiles
            row |= {
                "min": min(self.values),
                "max": max(self.values),
                "lower_quartile": low,
                "upper_quartile": high,
            }
        elif self.skipped and not self.error:
            return row | {"skipped": self.skipped}
        return row | ({} if self.values and not self.error else {"error": self.error or "no value"})

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Row:
        """Read `to_dict` back; keys that are no field's are `extra`."""
        own = {f.name for f in fields(cls)}
        extra = {key: value for key, value in row.items() if key not in own | _STATISTICS}
        return cls(
            **{key: value for key, value in row.items() if key in own}
            | {"extra": extra, "values": tuple(row["values"])}
        )


# They follow from the values
_STATISTICS = {"n", "median", "min", "max", "lower_quartile", "upper_quartile"}


def ratio(name: str, metric: str, upper: Row, lower: Row, note: str = "") -> Row:
    """Return the row of `upper` / `lower`, one ratio per round.

    Both sides of a ratio were measured in the same round, so a machine that is slow for a minute
    slows both and the ratio stays. A ratio of two medians would compare one's good minute with the
    other's bad one.
    """
    # A failed arm has fewer rounds
    values = tuple(u / v for u, v in zip(upper.values, lower.values, strict=False))
    return Row(
        name,
        metric,
        "ratio",
        values,
        note,
        upper.error or lower.error,
        None,
        upper.skipped or lower.skipped,
    )


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
            return "not measured" if self.row.problem else f"does not apply: {self.row.skipped}"
        reached = (
            self.row.median <= self.limit
            if self.relation == "<="
            else self.row.median >= self.limit
        )
        if self.row.n < MIN_JUDGED:
            return f"{'ok' if reached else 'missed'}, not judged: n = {self.row.n} < {MIN_JUDGED}"
        return "ok" if reached else "MISSED"

    @property
    def failed(self) -> bool:
        return self.verdict in ("MISSED", "not measured")

    def to_dict(self) -> dict[str, Any]:
        value = self.row.median if self.row.values else None
        return {
            "target": self.text,
            "relation": self.relation,
            "limit": self.limit,
            "measured": value,
        } | {
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
    skipped: str = ""  # why it was not run at all, although nothing is broken

    def row(self, arm: str, metric: str) -> Row | None:
        """Return the row of that arm and metric, if it was measured or failed."""
        return next((r for r in self.rows if (r.arm, r.metric) == (arm, metric)), None)

    def compare(self, upper: str, lower: str, metric: str, note: str = "") -> Row | None:
        """Add the row of ratios `upper` / `lower` of a metric; None when one of the two was not
        asked for.
        """
        above, below = self.row(upper, metric), self.row(lower, metric)
        if above is None or below is None:
            return None
        self.rows.append(ratio(f"{upper} / {lower}", metric, above, below, note))
        return self.rows[-1]

    @property
    def problems(self) -> list[str]:
        """Return one line per failure, wrong result and missed target. Rows that a failure explains
        do not count.
        """
        told = [failure.splitlines()[0] for failure in self.failures]
        told += [
            f"{r.arm}, {r.metric}: {r.problem}"
            for r in self.rows
            if r.problem and (r.wrong or not told)
        ]
        return told + [f"{t.text}: {t.verdict}" for t in self.targets if t.failed]

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    def to_dict(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "conditions": self.conditions,
            "rows": [r.to_dict() for r in self.rows],
            "targets": [t.to_dict() for t in self.targets],
            "failures": self.failures,
            "ok": not self.failed,
        } | ({"skipped": self.skipped} if self.skipped else {})

    def write(self, path: Path) -> None:
        """Write the JSON file; a reader never sees half of it."""
        write_json(path, self.to_dict())

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read conditions and rows of a written report back, to draw or to paste them again."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            found["bench"], found["conditions"], [Row.from_dict(row) for row in found["rows"]]
        )

    def lines(self, rows: Sequence[str] | None = None) -> list[str]:
        """Return the conditions, the table, the failures, the targets, and OK or FAILED as the last
        line.

        `rows` is a benchmark's own table in place of `table`.
        """
        width = max(10, *map(len, self.conditions)) + 2 if self.conditions else 0
        lines = [f"{key:<{width}}{condition(value)}" for key, value in self.conditions.items()]
        lines += ["", *(table(self.rows) if rows is None else rows), ""]
        for failure in self.failures:
            first, *rest = failure.splitlines()
            lines += [f"FAILED  {first}", *("  | " + line for line in rest)]
        for target in self.targets:
            measured = f"{target.row.median:.3f}" if target.row.values else "no value"
            lines.append(
                f"target  {target.text} {target.relation} {target.limit:g}: {measured}  "
                f"{target.verdict}"
            )
        if self.skipped:
            return [*lines, f"skipped  {self.skipped}"]
        return [
            *lines,
            f"FAILED  {'; '.join(self.problems)}" if self.failed else f"OK  {self.counts}",
        ]

    def cell(self, arm: str, metric: str, spread: str = "quartiles") -> str:
        """Return an arm's median with its `spread` (quartiles, range or none); FAILED, or ""
        without a value.
        """
        row = self.row(arm, metric)
        if row is None or not row.values:
            return "FAILED" if row and row.problem else ""
        if spread == "none" or row.n == 1:
            return number(row.median)
        low, high = row.quartiles if spread == "quartiles" else (min(row.values), max(row.values))
        return f"{number(row.median)} ({number(low)}–{number(high)})"

    @property
    def summary(self) -> tuple[str, str, str, str]:
        """Return the report's line in the table of all benchmarks: bench, verdict, seconds, first
        problem.
        """
        text = self.problems[0] if self.failed else self.skipped or self.counts
        return self.bench, self.verdict, str(self.conditions.get("seconds", "")), text

    @property
    def verdict(self) -> str:
        return "FAILED" if self.failed else "skipped" if self.skipped else "OK"

    @property
    def counts(self) -> str:
        skipped = sum(not r.values for r in self.rows if not r.problem)
        return f"{len(self.rows)} rows, {len(self.targets)} target(s)" + (
            f", {skipped} skipped" if skipped else ""
        )


def say(text: str) -> None:
    """Tell the user how far a benchmark is: on stderr, because stdout is the report's."""
    print(text, file=sys.stderr, flush=True)


class Section(NamedTuple):
    """What the page shows of one report besides itself: a figure as SVG text, a benchmark's own
    table and words.
    """

    report: Report
    svg: str = ""
    lines: Sequence[str] = ()
    wrong: str = ""  # what its column of wrong elements counts


def condition(value: Any) -> str:
    """Write a value of the conditions in one line."""
    if isinstance(value, dict):
        return " · ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


HEADER = ("arm", "metric", "unit", "median", "quartiles", "min .. max", "n", "wrong", "")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row's texts under HEADER. Without values, FAILED or skipped stands for the median."""
    wrong = "" if row.wrong is None else str(row.wrong)
    if not row.values:
        why = row.problem or row.skipped
        return (
            row.arm,
            row.metric,
            row.unit,
            "FAILED" if row.problem else "skipped",
            "",
            "",
            "0",
            wrong,
            why,
        )
    half, span = (
        f"{number(low)} .. {number(high)}"
        for low, high in (row.quartiles, (min(row.values), max(row.values)))
    )
    note = "; ".join(filter(None, (row.error, row.note)))
    return row.arm, row.metric, row.unit, number(row.median), half, span, str(row.n), wrong, note


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as aligned text; the column of wrong elements stands only where some row
    compared them.
    """
    lines = [HEADER, *map(cells, rows)]
    if all(row.wrong is None for row in rows):
        lines = [line[:7] + line[8:] for line in lines]
    return aligned(lines, right={3, 6, *range(7, len(lines[0]) - 1)})


def aligned(lines: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Return a table as text; the columns in `right` are numbers, the last one is free text."""
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, width, strict=True))
        ).rstrip()
        for line in lines
    ]


def number(value: float) -> str:
    """Write a value with three significant digits and no exponent; nan and inf as they are."""
    if not math.isfinite(value):
        return str(value)
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    digits = min(max(digits, 0), 12)
    return f"{value:.{digits}f}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table that a README can paste; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *lines)]


def conditions(bench: str, argv: Sequence[str], command: str = "") -> dict[str, Any]:
    """Return what the numbers depend on: versions, machine, load, date and command.

    `command` starts the benchmark; without it, `python -m nanoray.bench NAME` does.
    """
    program = command or f"python -m nanoray.bench {bench}"
    installed = {
        name: next((d.version for d in metadata.distributions(name=name)), None)
        for name in ("torch", "ray")
    }
    features = cpu_features() & {"amx_bf16", "avx512_bf16", "avx512f", "avx2"}
    gpus = discover_gpus()
    if gpus:  # torch takes seconds to import, so only where it knows something
        version = runtime_nccl_version()
        installed["nccl"] = ".".join(map(str, version)) if version else None
    return {
        "command": shlex.join([*program.split(), *argv]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"nanoray": __version__, "python": platform.python_version(), **installed},
        "cpu": {
            "name": cpu_name(),
            "usable cores": available_cpus(),
            "features": " ".join(sorted(features)),
        },
        "gpus": [f"{d.name} {d.profile}".strip() for d in gpus],
        "load": {"before": load_average()},
    }


def load_average() -> float:
    """Return the load average of the last minute: what else this machine was doing."""
    return round(os.getloadavg()[0], 2)
