"""What a search has found: tuned.yaml, tune.json with a row for each choice, and lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from nanoray.base.atomic import replace_text, write_json
from nanoray.base.text import aligned, clock
from nanoray.config import Config
from nanoray.config.settings import OF_ONE_COMMAND
from nanoray.config.spellings import join
from nanoray.tune.asked import MAY
from nanoray.tune.knobs import Choice, as_written, changes_of, left_out, words
from nanoray.tune.search import Search

TABLE = "tune.json"
TUNED = "tuned.yaml"
SHOWN = 10  # rows of the printed table
TITLES = ("step, ms", "x present", "turns", "peak, MiB", "what differs")
# Keys that tuned.yaml leaves to the command that takes it
NOT_TUNED = (*OF_ONE_COMMAND, "env", "upload", "ray_address", "workers")


class ChoiceRow(NamedTuple):
    """One choice, as the table has it."""

    differs: str  # from the present setting
    step_ms: float | None = None  # the median of its blocks; None: it was not trained
    speedup: float = 0.0  # beside the present setting
    turns: int = 0
    peak_bytes: int = 0
    changes: str = ""  # in the result beyond rounding, words of --may
    note: str = ""  # why it was not tried, or failed


def rows_of(search: Search) -> list[ChoiceRow]:
    """Return a row for each choice, the fastest first, then those that were left out."""
    refused = search.trials.refused
    rows = [ChoiceRow(words(choice), note=why) for choice, why in refused.items()]
    for choice, samples in search.trials.samples.items():
        if choice not in refused:
            row = ChoiceRow(
                words(choice),
                1e3 * median(sample.step_s for sample in samples),
                search.ratio(choice, ()),
                len(search.ratios(choice, ())),
                max(sample.peak_bytes for sample in samples),
                ", ".join(changes_of(search.here, choice)),
            )
            rows.append(row)
    return sorted(rows, key=lambda row: -row.speedup)


def table_lines(rows: Sequence[ChoiceRow]) -> list[str]:
    """Return the fastest rows as text, and how many there are beside them."""
    shown = [row for row in rows if not row.note][:SHOWN]
    cells = [
        (
            f"{row.step_ms:.3g}",
            f"{row.speedup:.2f}",
            str(row.turns),
            f"{row.peak_bytes / 2**20:,.0f}",
            f"{row.differs} (changes {row.changes})" if row.changes else row.differs,
        )
        for row in shown
    ]
    lines = aligned([TITLES, *cells], right=range(4))
    if len(rows) > len(shown):
        lines.append(f"and {len(rows) - len(shown)} that are slower or were left out: see {TABLE}")
    return lines


def closing_lines(search: Search) -> list[str]:
    """Return the table, the verdict, and what was left out."""
    lines = table_lines(rows_of(search))
    turns = search.verdict
    shown = f"{median(turns):.2f} x the present setting in {len(turns)} turns" if turns else ""
    if search.best:
        changed = changes_of(search.here, search.best)
        result = f"; it changes {', '.join(changed)}" if changed else ""
        lines.append(f"tuned  {words(search.best)}: {shown}{result}")
    else:
        # What was not measured often enough may well be faster.
        what = "was shown to be" if search.ended else "is"
        found = f" (the best one found: {shown})" if shown else ""
        lines.append(
            f"tuned  nothing {what} faster than the present setting by more than the spread{found}"
        )
    for word, knobs in left_out(search.here, search.may).items():
        lines.append(f"note   not tried: {', '.join(knobs)} (--may {word}: {MAY[word]})")
    if search.ended:
        lines.append(
            f"note   {search.ended} after {clock(search.trials.spent_s)} of steps; a larger budget "
            "looks further"
        )
    return lines


def tuned_values(config: Config, name: str, choice: Choice, place: str) -> dict[str, Any]:
    """Return the keys of tuned.yaml: all that have no default, with those of the choice."""
    values = config.model_dump() | dict(choice) | {"name": name, "tuned_for": place}
    defaults = join(Config.model_construct().model_dump())
    return {
        key: value
        for key, value in join(values).items()
        if key not in NOT_TUNED and value != defaults[key]
    }


def write_results(
    folder: Path, config: Config, name: str, search: Search, place: str, lines: Sequence[str]
) -> None:
    """Write tune.json, and tuned.yaml below the lines for people. (rank 0 only)"""
    table = {
        "place": place,
        "tuned": as_written(search.best),
        "speedup": median(search.verdict) if search.best else 1.0,
        "ended": search.ended,
        "spent_s": search.trials.spent_s,
        "rows": [row._asdict() for row in rows_of(search)],
    }
    write_json(folder / TABLE, table)
    head = [f"# {line}" for line in (f"Found by `nanoray tune` on {place}", *lines)]
    values = tuned_values(config, name, search.best, place)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    replace_text(folder / TUNED, "\n".join([*head, text]))
