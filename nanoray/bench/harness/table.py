"""Tables of reports, declared by their columns.

A benchmark lists its tables once; the terminal shows them as aligned text, a page as Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoray.bench.harness.report import Measurement, Report, markdown
from nanoray.machine.text import aligned

# Of report, arm and spread (see Report.cell)
Cell = Callable[[Report, str, str], str]
SPREAD = "range"  # of numbers whose spread is worth its room
NO_SPREAD = "none"


@dataclass(frozen=True)
class TableColumn:
    """One cell of each line.

    value     a metric of the line's arm, or a function that writes the cell
    spread    SPREAD, "quartiles" or NO_SPREAD
    over      the value as a ratio to this arm, or to the one that a function of the line's arm names
    left      text, not a number
    optional  left out of a table in which no line has a value for it, skipped or failed or measured
    """

    head: str
    value: str | Cell
    spread: str = NO_SPREAD
    over: str | Callable[[str], str] = ""
    left: bool = False
    optional: bool = False

    def cell(self, report: Report, arm: str) -> str:
        """Write the cell of an arm."""
        if callable(self.value):
            return self.value(report, arm, self.spread)
        if self.over:
            over = self.over(arm) if callable(self.over) else self.over
            arm = f"{arm} / {over}"
        return report.cell(arm, self.value, self.spread)

    def has_rows(self, report: Report, arms: Sequence[str]) -> bool:
        """Return whether some arm has a row of this metric: one that was skipped has no cell."""
        if callable(self.value) or self.over:
            return False
        return any(report.row(arm, self.value) for arm in arms)


def names(head: str, name: Callable[[str], str] = str) -> TableColumn:
    """Return the column of the arms' names."""
    return TableColumn(head, lambda report, arm, spread: name(arm), left=True)


def count_of_rounds(metric: str) -> TableColumn:
    """Return the column of how many values a metric has."""
    return _of_row("n", metric, lambda row: str(row.n))


def wrong_of(metric: str) -> TableColumn:
    """Return the column of the wrong elements that a metric's row counts."""
    return _of_row("wrong", metric, lambda row: "" if row.wrong is None else str(row.wrong))


def _of_row(head: str, metric: str, write: Callable[[Measurement], str]) -> TableColumn:
    def cell(report: Report, arm: str, spread: str) -> str:
        row = report.row(arm, metric)
        return write(row) if row else ""

    return TableColumn(head, cell)


@dataclass(frozen=True)
class Table:
    """A table with a line per arm.

    arms     the metric whose rows are the lines (but not their ratios), or a function of the report
    columns  the first is text; or a function of the report
    missing  stands for an empty cell
    """

    arms: str | Callable[[Report], Sequence[str]]
    columns: Sequence[TableColumn] | Callable[[Report], Sequence[TableColumn]]
    missing: str = ""

    def format_text(self, report: Report) -> list[str]:
        """Return the table for the terminal; [] without a line."""
        columns, lines = self._build_lines(report)
        right = {i for i, column in enumerate(columns) if not column.left}
        return aligned([(*line, "") for line in lines], right) if lines else []

    def format_page(self, report: Report) -> list[str]:
        """Return the table for a page; [] without a line."""
        _, lines = self._build_lines(report)
        return markdown(lines[0], lines[1:]) if lines else []

    def _build_lines(self, report: Report) -> tuple[list[TableColumn], list[list[str]]]:
        """Return the columns that are shown, and their texts, the heads first."""
        arms = self.arms(report) if callable(self.arms) else arms_with(report, self.arms)
        columns = self.columns(report) if callable(self.columns) else self.columns
        shown = []
        for column in columns:
            cells = [column.cell(report, arm) for arm in arms]
            if column.optional and not any(cells) and not column.has_rows(report, arms):
                continue
            shown.append((column, [cell or self.missing for cell in cells]))
        if not arms:
            return [], []
        body = [list(line) for line in zip(*(cells for _, cells in shown), strict=True)]
        head = [column.head for column, _ in shown]
        return [column for column, _ in shown], [head, *body]


def arms_with(report: Report, metric: str) -> list[str]:
    """Return the arms that have a row of a metric, with values or without; ratios are no arms."""
    rows = (row for row in report.rows if row.metric == metric and row.unit != "ratio")
    return [row.arm for row in rows]
