"""Put the profiles of all ranks on one clock: `nanoray report timeline RUN --profile`.

Each rank has written the trace of torch.profiler in its own wall clock, and how far that clock is
ahead of rank 0's. The merged trace is RUN/profile/all.json.gz.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from nanoray.cli import writing
from nanoray.errors import ConfigError
from nanoray.machine.atomic import json_mapping, replace_bytes

FOLDER = "profile"  # in the run's folder
ALL = "all.json.gz"  # the merged trace
KEY = "nanoray"  # of what nanoray adds to a rank's trace: rank, steps, ahead_s, uncertainty_s


def name_of(rank: int | str) -> str:
    """Return the name of a rank's file; with "*" the pattern of all ranks' files."""
    return f"rank{rank}.json.gz"


def read_profiles(run: Path) -> list[dict[str, Any]]:
    """Return the profiles of a run's ranks, as torch.profiler writes them. Raises ConfigError."""
    profiles = []
    for path in (run / FOLDER).glob(name_of("*")):
        try:
            profile = json_mapping(gzip.decompress(path.read_bytes()))
            profile[KEY]["rank"]  # a KeyError: another program wrote this file
            profiles.append(profile)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a whole profile ({error}); remove it, or profile again"
            ) from None
    if not profiles:
        raise ConfigError(
            f"{run} has no profiles; start a run with --profile 5:8, for steps 5, 6 and 7"
        )
    return sorted(profiles, key=lambda profile: int(profile[KEY]["rank"]))


def merge(profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one trace of all ranks in Chrome's format.

    Times are microseconds since the first rank's origin, on that rank's clock.
    """
    events: list[dict[str, Any]] = []
    # Process ids of two ranks may be equal, so each (rank, process) gets a number.
    numbers: dict[tuple[int, str], int] = {}
    first_base_ns = int(profiles[0].get("baseTimeNanoseconds", 0))
    for profile in profiles:
        rank = int(profile[KEY]["rank"])
        # Each profile has an origin of its own, and a clock that is ahead of rank 0's.
        base_ns = int(profile.get("baseTimeNanoseconds", 0))
        shift_us = (base_ns - first_base_ns) / 1e3 - 1e6 * profile[KEY]["ahead_s"]
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
    """Write the trace of all ranks; return lines for the user. Raises ConfigError."""
    profiles = read_profiles(run)
    path = run / FOLDER / ALL
    # After a fault, ranks may have profiled other steps than those of an earlier group.
    steps = {tuple(profile[KEY]["steps"]) for profile in profiles}
    error_us = 1e6 * max(profile[KEY]["uncertainty_s"] for profile in profiles)
    with writing(path, "copy the run to where you may write"):
        replace_bytes(path, gzip.compress(json.dumps(merge(profiles)).encode()), sync=False)
    which = ", ".join(f"{first} to {last}" for first, last in sorted(steps))
    messages = [
        f"{path}  {len(profiles)} rank(s), steps {which}; their clocks agree to {error_us:.0f} us"
    ]
    if len(steps) > 1:
        messages.append(
            "warning  the ranks profiled different steps: a fault began a group in between"
        )
    messages.append("open it with https://ui.perfetto.dev")
    return messages
