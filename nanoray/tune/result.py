"""What a search has found: a row for each choice, tuned.yaml, and lines for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nanoray.base.atomic import replace_text, write_json
from nanoray.base.text import aligned, clock
from nanoray.config import Config
from nanoray.config.settings import OF_ONE_COMMAND
from nanoray.tools.report.html import render
from nanoray.tune.may import MAY
from nanoray.tune.search import Ratio, Search
from nanoray.tune.space import Choice, changes_of, left_out, words

TABLE = "tune.json"
TUNED = "tuned.yaml"
PAGE = "report.html"
TEMPLATE = Path(__file__).with_name("tune.html.j2")
SHOWN = 10  # rows of the printed table
MIB = 2**20
# Keys that tuned.yaml leaves to the command that takes it
NOT_TUNED = (*OF_ONE_COMMAND, "env", "upload", "ray_address", "workers")


class ChoiceRow(NamedTuple):
    """One choice, as the table has it."""

    differs: str  # from the present setting
    predicted_ms: float | None
    step_ms: float | None  # the median of its blocks; None: it was not trained
    ratio: Ratio | None  # to the present setting: above 1 is faster
    peak_bytes: int
    mfu: float | None  # percent
    changes: str  # in the result beyond rounding, words of --may
    note: str  # why it was not tried, or failed


def rows_of(search: Search, flops: float | None, peak_flops: float | None) -> list[ChoiceRow]:
    """Return a row for each choice, the fastest first, then those that were not trained.

    flops: of a step, by formula; peak_flops: of all ranks together, a second.
    """
    trials = search.trials
    rows = []
    for choice, samples in trials.samples.items():
        step_s = statistics.median(sample.step_s for sample in samples)
        mfu = 100 * flops / step_s / peak_flops if flops and peak_flops else None
        predicted_s = search.predicted_s.get(choice)
        rows.append(
            ChoiceRow(
                words(choice),
                1e3 * predicted_s if predicted_s else None,
                1e3 * step_s,
                search.ratio(choice, ()) if choice else None,
                max(sample.peak_bytes for sample in samples),
                mfu,
                ", ".join(changes_of(search.here, choice)),
                trials.refused.get(choice, ""),
            )
        )
    # A choice with a wrong loss was measured, too, and is none of the fast ones.
    rows.sort(key=lambda row: (row.note != "", -(row.ratio.median if row.ratio else 1.0)))
    untried = [choice for choice in trials.refused if choice not in trials.samples]
    for choice in untried:
        rows.append(ChoiceRow(words(choice), None, None, None, 0, None, "", trials.refused[choice]))
    return rows


class Cells(NamedTuple):
    """A measured row as text."""

    step: str
    ratio: str
    turns: str
    predicted: str
    peak: str
    mfu: str
    differs: str


TITLES = Cells(
    "step, ms", "x present", "turns", "predicted, ms", "peak, MiB", "MFU, %", "what differs"
)


def cells_of(row: ChoiceRow) -> Cells:
    """Write a row that was measured."""
    ratio = turns = ""
    if row.ratio and row.ratio.turns:
        ratio = f"{row.ratio.median:.2f} ({row.ratio.low:.2f} to {row.ratio.high:.2f})"
        turns = str(row.ratio.turns)
    return Cells(
        f"{row.step_ms:.3g}",
        ratio,
        turns,
        f"{row.predicted_ms:.3g}" if row.predicted_ms else "",
        f"{row.peak_bytes / MIB:,.0f}",
        f"{row.mfu:.1f}" if row.mfu else "",
        f"{row.differs} (changes {row.changes})" if row.changes else row.differs,
    )


def table_lines(rows: Sequence[ChoiceRow]) -> list[str]:
    """Return the measured rows as text, the fastest first, and how many were not trained."""
    measured = [row for row in rows if not row.note]
    shown = measured[:SHOWN]
    shown += [row for row in measured[SHOWN:] if row.ratio is None]  # the present setting
    lines = aligned([TITLES, *map(cells_of, shown)], right=range(6))
    hidden = len(measured) - len(shown)
    untried = len(rows) - len(measured)
    if hidden or untried:
        lines.append(f"and {hidden} slower ones; {untried} were left out: {TABLE} says why")
    return lines


def closing_lines(search: Search, rows: Sequence[ChoiceRow], may: Sequence[str]) -> list[str]:
    """Return the table, the verdict, and what was left out."""
    lines = table_lines(rows)
    verdict = search.verdict
    if search.best:
        changed = changes_of(search.here, search.best)
        result = f"; it changes {', '.join(changed)}" if changed else ""
        lines.append(
            f"tuned  {words(search.best)}: {verdict.median:.2f} x the present setting "
            f"({verdict.low:.2f} to {verdict.high:.2f}, {verdict.turns} turns){result}"
        )
    else:
        found = ""
        if verdict.turns:
            found = f" (the best one found: {verdict.median:.2f} x, {verdict.low:.2f} to {verdict.high:.2f})"
        # What was not measured often enough may well be faster.
        what = "is" if not search.ended else "was shown to be"
        lines.append(
            f"tuned  nothing {what} faster than the present setting by more than the spread{found}"
        )
    for word, knobs in left_out(search.here, may).items():
        lines.append(f"note   not tried: {', '.join(knobs)} (--may {word}: {MAY[word]})")
    if search.ended:
        # A script's search begins anew.
        more = "a larger budget_s looks further" if search.here.draws else "--resume goes on"
        lines.append(f"note   {search.ended} after {clock(search.trials.spent_s)} of steps; {more}")
    return lines


def tuned_values(config: Config, name: str, choice: Choice, place: str) -> dict[str, Any]:
    """Return the keys of tuned.yaml: all that have no default, with those of the choice."""
    values = config.model_dump() | dict(choice) | {"name": name, "tuned_for": place}
    defaults = Config.model_construct().model_dump()
    return {
        key: value
        for key, value in values.items()
        if key not in NOT_TUNED and value != defaults[key]
    }


def page_of(search: Search, rows: Sequence[ChoiceRow], place: str, lines: Sequence[str]) -> str:
    """Return the page of a search, as HTML."""
    measured = [row for row in rows if not row.note]
    ratios = [row.ratio.median if row.ratio else 1.0 for row in measured]
    tuned = words(search.best)
    shown = [
        cells_of(row)._asdict()
        | {"share": round(100 * ratio / max(ratios)), "tuned": row.differs == tuned}
        for row, ratio in zip(measured, ratios, strict=True)
    ]
    found = bool(search.best)
    return render(
        TEMPLATE,
        title=tuned if found else "nothing is faster",
        verdict=f"{search.verdict.median:.2f} x" if found else "as it is",
        found=found,
        place=place,
        measured=shown,
        untried=[row._asdict() for row in rows if row.note],
        lines=lines,
    )


def write_results(
    folder: Path,
    config: Config,
    name: str,
    search: Search,
    rows: Sequence[ChoiceRow],
    place: str,
    lines: Sequence[str],
) -> None:
    """Write tune.json, tuned.yaml and report.html. (rank 0 only)"""
    table = {
        "place": place,
        "tuned": dict(search.best),
        "ended": search.ended,
        "spent_s": search.trials.spent_s,
        "verdict": search.verdict._asdict(),
        "rows": [
            {**row._asdict(), "ratio": row.ratio._asdict() if row.ratio else None} for row in rows
        ],
    }
    write_json(folder / TABLE, table)
    what = words(search.best)
    if not search.best:
        shown = "shown to be " if search.ended else ""
        what = f"the present setting, than which nothing was {shown}faster"
    head = f"# Found by `nanoray tune`: {what}\n# Measured on {place}\n"
    values = tuned_values(config, name, search.best, place)
    replace_text(folder / TUNED, head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    replace_text(folder / PAGE, page_of(search, rows, place, lines))
