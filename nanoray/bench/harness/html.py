"""One HTML page of benchmark reports: no network, no other file, for phones and for paper."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanoray.base.atomic import replace_text
from nanoray.bench.harness.report import Measurement, Section, cells, condition
from nanoray.tools.report.html import render

TEMPLATE = Path(__file__).with_name("report.html.j2")
STRIP = 0.5  # the spread is drawn from half of the median to one and a half


class Line(NamedTuple):
    """A row as the page shows it."""

    cells: tuple[str, ...]
    median: float | str  # to sort by
    marks: tuple[float, ...]  # of the spread: min, quartiles and max, in % of the strip's width
    kind: str  # ok | failed | skipped


def write(path: Path, sections: Sequence[Section], texts: Mapping[str, str]) -> None:
    """Write the page of these reports, whole or not at all."""
    reports = [section.report for section in sections]

    # What all reports have in common is shown once, at the top
    shared = {}
    for key, value in reports[0].conditions.items():
        if all(report.conditions.get(key) == value for report in reports):
            shared[key] = value

    html = render(
        TEMPLATE,
        title=reports[0].bench if len(sections) == 1 else "all",
        failed=[report.bench for report in reports if report.failed],
        shared=_format_conditions(shared),
        sections=[
            _section_variables(section, texts.get(section.report.bench, ""), shared)
            for section in sections
        ],
        nonce=secrets.token_urlsafe(16),  # the one script that may run
    )
    replace_text(path, html)


def _section_variables(section: Section, text: str, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables of one report; `shared` conditions are shown elsewhere."""
    report = section.report
    own = {key: value for key, value in report.conditions.items() if key not in shared}
    return {
        "report": report,
        "text": text,
        "conditions": _format_conditions(own),
        "failures": [failure.partition("\n") for failure in report.failures],
        "lines": [line(row) for row in report.rows],
        "compared": any(row.wrong is not None for row in report.rows),
        "figure": base64.b64encode(section.svg.encode()).decode(),
        "own": "\n".join(section.lines).strip("\n"),
        "wrong": section.wrong,
    }


def line(row: Measurement) -> Line:
    """Return a row as the page shows it."""
    if row.problem:
        kind = "failed"
    elif row.values:
        kind = "ok"
    else:
        kind = "skipped"

    # One value has no spread, and a median of 0 has no scale for it
    if row.n < 2 or not row.median > 0:
        return Line(cells(row), row.median if row.values else "", (), kind)

    # Place each mark on the strip; what lies outside of the strip is drawn at its end
    marks = []
    for value in (min(row.values), *row.quartiles, max(row.values)):
        place = (value / row.median - 1) / STRIP / 2 + 0.5
        marks.append(round(100 * min(max(place, 0), 1), 2))
    return Line(cells(row), row.median, tuple(marks), kind)


def _format_conditions(conditions: Mapping[str, Any]) -> dict[str, str]:
    return {key: condition(value) for key, value in conditions.items()}
