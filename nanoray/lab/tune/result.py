"""What a search has found: lines for people, tuned.yaml below them, and tune.json for a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from nanoray.config import Config
from nanoray.config.settings import OF_ONE_COMMAND
from nanoray.lab.tune.knobs import may_change_result, options, words
from nanoray.lab.tune.search import Search
from nanoray.machine.atomic import replace_text, write_json
from nanoray.machine.text import aligned

TUNED = "tuned.yaml"
VERDICT = "tune.json"
BATCH = ("global_batch_size", "micro_batch_size", "grad_accum_steps")
SHOWN = 10  # rows of the printed table
TITLES = ("step, ms", "peak, MiB", "what differs")
# Keys that tuned.yaml leaves to the command that takes it
NOT_TUNED = (*OF_ONE_COMMAND, "env", "upload", "ray_address", "workers")


def closing_lines(search: Search) -> list[str]:
    """Return a table of the fastest choices, the verdict, and what was left out."""
    samples, refused = search.trials.samples, search.trials.refused
    # A choice with a wrong loss was measured, too, and is none of the fast ones.
    step_s = {
        choice: median(trial.step_s for trial in samples[choice])
        for choice in samples
        if choice not in refused
    }
    rows = []
    for choice in sorted(step_s, key=lambda choice: step_s[choice])[:SHOWN]:
        peak = samples[choice][0].peak_bytes / 2**20
        rows.append((f"{1e3 * step_s[choice]:.3g}", f"{peak:,.0f}", words(choice)))
    lines = aligned([TITLES, *rows], right=range(2))
    lines.append(f"of {len(step_s)} measured; {len(refused)} were left out: tune.jsonl says why")

    if search.best:
        what = "; losses may differ" if may_change_result(search.here, search.best) else ""
        lines.append(f"tuned  {words(search.best)}: {search.gain:.2f} x the present setting{what}")
    else:
        # What was not measured often enough may well be faster.
        shown = "was shown to be" if search.ended else "is"
        lines.append(
            f"tuned  nothing {shown} faster than the present setting by more than the spread"
        )
    tried = options(search.here, search.may_differ, search.only)
    untried = [name for name in options(search.here, True, search.only) if name not in tried]
    if untried:
        what = "other random masks, or statistics of batch norms (--may_differ)"
        lines.append(f"note   not tried: {', '.join(untried)}: {what}")
    if search.ended:
        lines.append(f"note   {search.ended}; a larger budget looks further")
    return lines


def settings_of(search: Search) -> dict[str, Any]:
    """Return the keys to set for the best choice; {} where that is the present setting."""
    settings = dict(search.best)
    if "micro_batch_size" in settings:
        # Accumulation follows, and the global batch stays.
        settings = {key: getattr(search.here.config, key) for key in BATCH} | settings
    return settings


def write_results(
    folder: Path, config: Config, name: str, search: Search, lines: Sequence[str]
) -> None:
    """Write tuned.yaml, with the lines for people as comments, and tune.json. (rank 0 only)"""
    settings = settings_of(search)
    write_json(folder / VERDICT, {"settings": settings, "speedup": search.gain})
    values = config.model_dump() | settings | {"name": name}
    defaults = Config.model_construct().model_dump()
    recipe = {
        key: value
        for key, value in values.items()
        if key not in NOT_TUNED and value != defaults[key]
    }
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    replace_text(folder / TUNED, "\n".join([*(f"# {line}" for line in lines), text]))
