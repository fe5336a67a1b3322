"""Profiles of all ranks on one clock: `python -m nanoray.trace RUN --profile` writes
RUN/profile/all.json.gz.

Each rank has written what torch.profiler saw, in its own wall clock, and how far that is ahead of
rank 0's.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from nanoray.atomic import replace_bytes
from nanoray.cli import writing
from nanoray.errors import ConfigError

FOLDER, ALL, KEY = "profile", "all.json.gz", "nanoray"


def name_of(rank: int | str) -> str:
    """Return the name of a rank's file, or with "*" of each rank's."""
    return f"rank{rank}.json.gz"


def read_profiles(run: Path) -> list[dict[str, Any]]:
    """Return the profiles of a run's ranks, as torch.profiler writes them. Raises ConfigError."""
    found = []
    for path in (run / FOLDER).glob(name_of("*")):
        try:
            found.append(json.loads(gzip.decompress(path.read_bytes())))
            found[-1][KEY]["rank"]
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{path} is not a whole profile ({error}); remove it, or profile again"
            ) from None
    if not found:
        raise ConfigError(
            f"{run} has no profiles; start a run with --profile 5:8, for steps 5, 6 and 7"
        )
    return sorted(found, key=lambda profile: int(profile[KEY]["rank"]))


def merge(profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one trace of all ranks in Chrome's format, in microseconds since the first rank's
    origin on its clock.
    """
    events: list[dict[str, Any]] = []
    numbers: dict[tuple[int, str], int] = {}
    origin_ns = int(profiles[0].get("baseTimeNanoseconds", 0))
    for profile in profiles:
        rank = int(profile[KEY]["rank"])
        shift_us = (int(profile.get("baseTimeNanoseconds", 0)) - origin_ns) / 1e3 - 1e6 * profile[
            KEY
        ]["ahead_s"]
        for event in profile["traceEvents"]:
            number = numbers.setdefault((rank, str(event.get("pid", ""))), len(numbers))
            moved = event | {"pid": number}
            if "ts" in event:
                moved["ts"] = event["ts"] + shift_us
            if event["name"] == "process_name":
                moved["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
            elif event["name"] == "process_sort_index":
                moved["args"] = {"sort_index": number}
            if "id" in event:  # of arrows, such as from a forward to its backward
                moved["id"] = f"{rank}.{event['id']}"
            events.append(moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_all(run: Path) -> list[str]:
    """Write the trace of all ranks, and return what to tell of it. Raises ConfigError."""
    profiles, path = read_profiles(run), run / FOLDER / ALL
    steps = {tuple(profile[KEY]["steps"]) for profile in profiles}
    error_us = 1e6 * max(profile[KEY]["uncertainty_s"] for profile in profiles)
    with writing(path, "copy the run to where you may write"):
        replace_bytes(path, gzip.compress(json.dumps(merge(profiles)).encode()), sync=False)
    which = ", ".join(f"{first} to {last}" for first, last in sorted(steps))
    told = [
        f"{path}  {len(profiles)} rank(s), steps {which}; their clocks agree to {error_us:.0f} us"
    ]
    told += ["warning  the ranks profiled different steps: a fault began a group in between"] * (
        len(steps) > 1
    )
    return [*told, "open it with https://ui.perfetto.dev"]
