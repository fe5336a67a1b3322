"""One HTML page of benchmark reports: no network, no other file, readable on a phone and on paper."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from nanoray.atomic import replace_text
from nanoray.bench.harness.report import Row, Section, cells, condition

TEMPLATE = Path(__file__).with_name("report.html.j2")
WRONG = "elements that differ from the exact result"
STRIP = 0.5  # the spread is drawn from half of the median to one and a half


class Line(NamedTuple):
    """A row as the page shows it: texts, value to sort by, marks of the spread in %, and ok | failed | skipped."""

    cells: tuple[str, ...]
    median: float | str
    marks: tuple[float, ...]
    kind: str


def write(path: Path, sections: Sequence[Section], texts: Mapping[str, str]) -> None:
    """Write the page of these reports, whole or not at all."""
    reports = [section.report for section in sections]
    shared = {
        k: v
        for k, v in reports[0].conditions.items()
        if all(r.conditions.get(k) == v for r in reports)
    }
    page = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string(TEMPLATE.read_text(encoding="utf-8"))
    html = page.render(
        title=reports[0].bench if len(sections) == 1 else "all",
        failed=[report.bench for report in reports if report.failed],
        shared=_told(shared),
        sections=[
            {
                "report": report,
                "text": texts.get(report.bench, ""),
                "conditions": _told(
                    {k: v for k, v in report.conditions.items() if k not in shared}
                ),
                "failures": [failure.partition("\n") for failure in report.failures],
                "lines": [line(row) for row in report.rows],
                "compared": any(row.wrong is not None for row in report.rows),
                "figure": base64.b64encode(svg.encode()).decode(),
                "own": "\n".join(own).strip("\n"),
                "wrong": wrong or WRONG,
            }
            for report, svg, own, wrong in sections
        ],
        nonce=secrets.token_urlsafe(16),  # the one script that may run
    )
    replace_text(path, html)


def line(row: Row) -> Line:
    """Return a row as the page shows it."""
    kind = "failed" if row.problem else "ok" if row.values else "skipped"
    if row.n < 2 or not row.median > 0:
        return Line(cells(row), row.median if row.values else "", (), kind)
    ends = min(row.values), *row.quartiles, max(row.values)
    marks = tuple(
        round(100 * min(max((v / row.median - 1) / STRIP / 2 + 0.5, 0), 1), 2) for v in ends
    )
    return Line(cells(row), row.median, marks, kind)


def _told(conditions: Mapping[str, Any]) -> dict[str, str]:
    return {key: condition(value) for key, value in conditions.items()}
