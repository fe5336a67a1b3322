"""The report of a benchmark: conditions, rows of medians, ratios of pairs, targets, verdicts."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoray import __version__
from nanoray.machine.atomic import replace_text
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus, cpu_features, cpu_name
from nanoray.machine.text import aligned
from nanoray.parallel.rendezvous import runtime_nccl_version

# Names and values, as JSON has them: an event of a rank, its order, the settings of an arm
Record = dict[str, Any]
# What a function on the ranks calls with each event; those of rank 0 arrive at the benchmark
Emit = Callable[[Record], None]
# A function that a rank keeps between two calls: of its mesh, an order, and what to call with events
Kept = Callable[[Any, Record, Any], None]
# Variables that change what an arm measures. Without the files of compiled Python, which the first
# one forbids, every process compiles torch again; the others choose threads and kernels.
DISTORTING = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY")
# A target is judged and a finding drawn from this many rounds on; fewer only show a direction.
MIN_JUDGED = 5


@dataclass(frozen=True)
class Measurement:
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
    extra: Record = field(default_factory=dict)

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

    def to_dict(self) -> Record:
        """Return the row as it is written in the JSON file.

        Without values it has `error` or `skipped`, and the median is null.
        """
        row = self.extra | {
            "arm": self.arm,
            "metric": self.metric,
            "unit": self.unit,
            "note": self.note,
            "n": self.n,
            "values": list(self.values),
            "median": self.median if self.values else None,
        }
        if self.wrong is not None:
            row["wrong"] = self.wrong

        # A row may have values and an error: those of the rounds before the arm failed
        if self.values:
            low, high = self.quartiles
            row["min"] = min(self.values)
            row["max"] = max(self.values)
            row["lower_quartile"] = low
            row["upper_quartile"] = high
            if self.error:
                row["error"] = self.error
        elif self.skipped and not self.error:
            row["skipped"] = self.skipped
        else:
            row["error"] = self.error or "no value"
        return row

    @classmethod
    def from_dict(cls, row: Record) -> Measurement:
        """Read `to_dict` back; keys that are no field's are `extra`."""
        names = {f.name for f in fields(cls)}
        own = {key: value for key, value in row.items() if key in names}
        own["values"] = tuple(row["values"])
        own["extra"] = {key: value for key, value in row.items() if key not in names | _STATISTICS}
        return cls(**own)


# Keys of the JSON file that follow from the values
_STATISTICS = {"n", "median", "min", "max", "lower_quartile", "upper_quartile"}


def ratio(
    name: str, metric: str, upper: Measurement, lower: Measurement, note: str = ""
) -> Measurement:
    """Return the row of `upper` / `lower`, one ratio per round.

    Both sides of a ratio were measured in the same round, so a machine that is slow for a minute
    slows both and the ratio stays. A ratio of two medians would compare one's good minute with the
    other's bad one.
    """
    # Not strict: a failed arm has fewer rounds
    values = tuple(above / below for above, below in zip(upper.values, lower.values, strict=False))
    return Measurement(
        name,
        metric,
        "ratio",
        values,
        note,
        error=upper.error or lower.error,
        skipped=upper.skipped or lower.skipped,
    )


@dataclass(frozen=True)
class Target:
    """What a row should come to. `excuse` says why this machine cannot show it."""

    text: str
    row: Measurement
    relation: str  # "<=" or ">="
    limit: float
    excuse: str = ""

    @property
    def verdict(self) -> str:
        """Return ok, MISSED, not measured, "does not apply: WHY", or "ok|missed, not judged"."""
        if self.excuse:
            return f"does not apply: {self.excuse}"
        if not self.row.values:
            return "not measured" if self.row.problem else f"does not apply: {self.row.skipped}"
        if self.relation == "<=":
            reached = self.row.median <= self.limit
        else:
            reached = self.row.median >= self.limit
        if self.row.n < MIN_JUDGED:
            return f"{'ok' if reached else 'missed'}, not judged: n = {self.row.n} < {MIN_JUDGED}"
        return "ok" if reached else "MISSED"

    @property
    def failed(self) -> bool:
        return self.verdict in ("MISSED", "not measured")

    def to_dict(self) -> Record:
        return {
            "target": self.text,
            "relation": self.relation,
            "limit": self.limit,
            "measured": self.row.median if self.row.values else None,
            "n": self.row.n,
            "verdict": self.verdict,
        }


@dataclass
class Report:
    """Everything one benchmark found."""

    bench: str
    conditions: Record
    rows: list[Measurement] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self, arm: str, metric: str) -> Measurement | None:
        """Return the row of that arm and metric, if it was measured or failed."""
        return next((r for r in self.rows if (r.arm, r.metric) == (arm, metric)), None)

    def add(
        self,
        arm: str,
        metric: str,
        unit: str,
        values: float | Iterable[float],
        note: str = "",
        **more: Any,
    ) -> Measurement:
        """Add a row and return it. values: one per round, or a number that all rounds share."""
        if isinstance(values, int | float):
            values = (float(values),)
        self.rows.append(Measurement(arm, metric, unit, tuple(values), note, **more))
        return self.rows[-1]

    def compare(self, upper: str, lower: str, metric: str, note: str = "") -> Measurement | None:
        """Add the row of ratios `upper` / `lower` of a metric, and return it.

        Returns None when one of the two arms was not measured.
        """
        above = self.row(upper, metric)
        below = self.row(lower, metric)
        if above is None or below is None:
            return None
        self.rows.append(ratio(f"{upper} / {lower}", metric, above, below, note))
        return self.rows[-1]

    def add_target(
        self, text: str, row: Measurement, relation: str, limit: float, excuse: str = ""
    ) -> None:
        """Add what a row should come to; `excuse`: why this machine cannot show it."""
        self.targets.append(Target(text, row, relation, limit, excuse))

    @property
    def problems(self) -> list[str]:
        """Return one line per failure, wrong result and missed target.

        Rows without values do not count when a failure explains them.
        """
        problems = [failure.splitlines()[0] for failure in self.failures]
        for row in self.rows:
            # A failed arm has rows without values: its failure is in the list already
            if row.problem and (row.wrong or not self.failures):
                problems.append(f"{row.arm}, {row.metric}: {row.problem}")
        for target in self.targets:
            if target.failed:
                problems.append(f"{target.text}: {target.verdict}")
        return problems

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    @property
    def rounds(self) -> int:
        """The number of values of the row that has most: one per round."""
        return max((row.n for row in self.rows), default=0)

    @property
    def allows_findings(self) -> bool:
        """Whether there were enough rounds to tell a difference from noise."""
        return self.rounds >= MIN_JUDGED

    def findings(self, lines: Sequence[str]) -> list[str]:
        """Return sentences that a benchmark draws from its rows, or why there are none."""
        if not lines or self.allows_findings:
            return list(lines)
        return [
            f"no finding: n = {self.rounds}, and fewer than {MIN_JUDGED} rounds do not tell a "
            "difference from noise"
        ]

    def to_dict(self) -> Record:
        return {
            "bench": self.bench,
            "conditions": self.conditions,
            "rows": [row.to_dict() for row in self.rows],
            "targets": [target.to_dict() for target in self.targets],
            "failures": self.failures,
            "ok": not self.failed,
        }

    def write(self, path: Path) -> None:
        """Write the JSON file; a reader never sees half of it."""
        replace_text(path, to_json(self.to_dict()))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read conditions and rows of a written report back, to draw or to paste them again."""
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [Measurement.from_dict(row) for row in content["rows"]]
        return cls(content["bench"], content["conditions"], rows)

    def lines(self, shown: Sequence[str] | None = None) -> list[str]:
        """Return the conditions, the rows, the failures, the targets, and OK or FAILED.

        `shown` stands in place of a line for each row.
        """
        # The conditions, with their values in one column
        width = max([10, *map(len, self.conditions)]) + 2
        lines = [f"{key:<{width}}{condition(value)}" for key, value in self.conditions.items()]

        lines += ["", *(table(self.rows) if shown is None else shown), ""]

        # A failure is one line, and below it the traceback or the end of a log
        for failure in self.failures:
            first, *rest = failure.splitlines()
            lines.append(f"FAILED  {first}")
            lines += ["  | " + line for line in rest]
        for target in self.targets:
            measured = f"{target.row.median:.3f}" if target.row.values else "no value"
            lines.append(
                f"target  {target.text} {target.relation} {target.limit:g}: {measured}  "
                f"{target.verdict}"
            )

        if self.failed:
            lines.append(f"FAILED  {'; '.join(self.problems)}")
        else:
            lines.append(f"OK  {self.counts}")
        return lines

    def cell(self, arm: str, metric: str, spread: str = "quartiles") -> str:
        """Return an arm's median with its `spread`: quartiles, range or none.

        Without a value it is FAILED or "".
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
        """Return the report's line for `bench all`: bench, verdict, seconds, first problem."""
        seconds = str(self.conditions.get("seconds", ""))
        if self.failed:
            return self.bench, "FAILED", seconds, self.problems[0]
        return self.bench, "OK", seconds, self.counts

    @property
    def counts(self) -> str:
        counts = f"{len(self.rows)} rows, {len(self.targets)} target(s)"
        skipped = [row for row in self.rows if not row.values and not row.problem]
        if skipped:
            counts += f", {len(skipped)} skipped"
        return counts


def to_json(report: Mapping[str, Any]) -> str:
    """Return a report's dict as JSON text in which each condition, row and target is one line.

    So a file has hardly more lines than rows, and a row that changes is one line of a diff.
    """
    parts = []
    for key, value in report.items():
        if isinstance(value, dict):
            inner = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in value.items()]
            text = "{\n    " + ",\n    ".join(inner) + "\n  }"
        elif isinstance(value, list) and value:
            text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        else:
            text = json.dumps(value)
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"


def say(text: str) -> None:
    """Print the progress of a benchmark to stderr; stdout is for the report."""
    print(text, file=sys.stderr, flush=True)


def condition(value: Any) -> str:
    """Write a value of the conditions in one line."""
    if isinstance(value, dict):
        return " · ".join(f"{key} {part}" for key, part in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


HEADER = ("arm", "metric", "unit", "median", "quartiles", "min .. max", "n", "wrong", "")


def cells(row: Measurement) -> tuple[str, ...]:
    """Return a row's texts under HEADER. Without values, FAILED or skipped stands for the median."""
    wrong = "" if row.wrong is None else str(row.wrong)
    name = (row.arm, row.metric, row.unit)
    if not row.values:
        state = "FAILED" if row.problem else "skipped"
        return (*name, state, "", "", "0", wrong, row.problem or row.skipped)

    low, high = row.quartiles
    quartiles = f"{number(low)} .. {number(high)}"
    span = f"{number(min(row.values))} .. {number(max(row.values))}"
    note = "; ".join(filter(None, (row.error, row.note)))
    return (*name, number(row.median), quartiles, span, str(row.n), wrong, note)


def table(rows: Sequence[Measurement]) -> list[str]:
    """Return the rows as aligned text.

    The column of wrong elements is shown only where some row has compared them.
    """
    lines = [HEADER, *map(cells, rows)]
    if all(row.wrong is None for row in rows):
        lines = [line[:7] + line[8:] for line in lines]
    return aligned(lines, right={3, 6, *range(7, len(lines[0]) - 1)})


def number(value: float) -> str:
    """Write a value with three significant digits and no exponent; nan and inf as they are."""
    if not math.isfinite(value):
        return str(value)
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    digits = min(max(digits, 0), 12)
    return f"{value:.{digits}f}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table that a README can paste; the first column is text, the others are numbers."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return ["| " + " | ".join(line) + " |" for line in (header, rule, *lines)]


def conditions(program: str, argv: Sequence[str]) -> Record:
    """Return what the numbers depend on: versions, machine, load, date and command."""
    # From the packages' metadata: importing torch and Ray takes seconds
    installed: dict[str, str | None] = {}
    for name in ("torch", "ray"):
        versions = [distribution.version for distribution in metadata.distributions(name=name)]
        installed[name] = versions[0] if versions else None
    features = cpu_features() & {"amx_bf16", "avx512_bf16", "avx512f", "avx2"}
    gpus = discover_gpus()
    if gpus:  # this imports torch
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
        # Of the shell; arms run without them
        "variables": {name: os.environ[name] for name in DISTORTING if os.environ.get(name)},
        "load": {"before": load_average()},
    }


def load_average() -> float:
    """Return the load average of the last minute: what else this machine was doing."""
    return round(os.getloadavg()[0], 2)
