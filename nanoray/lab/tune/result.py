"""What a search has found: lines for people, tuned.yaml below them, and tune.json for a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from nanoray.config import Config
from nanoray.config.settings import OF_ONE_COMMAND
from nanoray.lab.tune.knobs import Choice, changes_of, left_out, words
from nanoray.lab.tune.request import MAY
from nanoray.lab.tune.search import Search
from nanoray.machine.atomic import replace_text, write_json
from nanoray.machine.text import aligned

TUNED = "tuned.yaml"
VERDICT = "tune.json"
SHOWN = 10  # rows of the printed table
TITLES = ("step, ms", "x present", "turns", "peak, MiB", "what differs")
# Keys that tuned.yaml leaves to the command that takes it
NOT_TUNED = (*OF_ONE_COMMAND, "env", "upload", "ray_address", "workers")


def table_lines(search: Search) -> list[str]:
    """Return a row for each of the fastest choices, and how many there are beside them."""
    samples, refused = search.trials.samples, search.trials.refused
    # A choice with a wrong loss was measured, too, and is none of the fast ones.
    right = [choice for choice in samples if choice not in refused]
    right.sort(key=lambda choice: -search.ratio(choice, ()))
    rows = [
        (
            f"{1e3 * median(trial.step_s for trial in samples[choice]):.3g}",
            f"{search.ratio(choice, ()):.2f}",
            str(len(search.ratios(choice, ()))),
            f"{max(trial.peak_bytes for trial in samples[choice]) / 2**20:,.0f}",
            words(choice),
        )
        for choice in right[:SHOWN]
    ]
    return [
        *aligned([TITLES, *rows], right=range(4)),
        f"of {len(right)} that were measured; {len(refused)} were left out: tune.jsonl says why",
    ]


def closing_lines(search: Search) -> list[str]:
    """Return the table, the verdict, and what was left out."""
    lines = table_lines(search)
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
        lines.append(f"note   {search.ended}; a larger budget looks further")
    return lines


def tuned_values(config: Config, name: str, choice: Choice) -> dict[str, Any]:
    """Return the keys of tuned.yaml: all that have no default, with those of the choice."""
    values = config.model_dump() | dict(choice) | {"name": name}
    defaults = Config.model_construct().model_dump()
    return {
        key: value
        for key, value in values.items()
        if key not in NOT_TUNED and value != defaults[key]
    }


def write_results(
    folder: Path, config: Config, name: str, search: Search, place: str, lines: Sequence[str]
) -> None:
    """Write tuned.yaml, with the lines for people as comments, and tune.json. (rank 0 only)"""
    speedup = median(search.verdict) if search.best else 1.0
    write_json(folder / VERDICT, {"settings": dict(search.best), "speedup": speedup})
    head = [f"# {line}" for line in (f"Found by `nanoray tune` on {place}", *lines)]
    values = tuned_values(config, name, search.best)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    replace_text(folder / TUNED, "\n".join([*head, text]))
