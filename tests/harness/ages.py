"""Print docs/age-of-results.md: how old each committed result is, in commits on what it measures.

`make docs` writes the page. A result is not wrong because it is old; but the more its subject has
changed since, the sooner it should be measured again.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from nanoray.bench.harness.report import markdown

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"

STEP = ("models", "parallel", "train", "data", "mesh")
RECOVERY = ("launch", "faults", "train", "start", "state", "checkpoint", "mesh")
# The folders of nanoray/ that a benchmark measures; files that no benchmark wrote, by their names
SUBJECTS: dict[str, tuple[str, ...]] = {
    "algorithms": ("mesh",),
    "checkpoint": ("checkpoint", "state"),
    "collectives": ("mesh",),
    "control": ("launch", "faults"),
    "equivalence": STEP,
    "kill-points-cpu": RECOVERY,
    "layouts": (*STEP, "forecast"),
    "mig": ("host", "mesh"),
    "moe-cpu": STEP,
    "overlap": ("parallel", "trace", "mesh"),
    "pipeline": STEP,
    "precision": ("models", "train", "parallel"),
    "recovery": RECOVERY,
    "gpu-features-nvidia-h200": ("models", "host"),
    "runs-h100": STEP,
    "runs-h200": STEP,
    "scaling": (*STEP, "forecast"),
    "soak": RECOVERY,
    "speedrun": STEP,
    "step": STEP,
    "step-walk-cpu": STEP,
    "strategies": (*STEP, "forecast"),
    "train": (*STEP, "launch", "start", "trace"),
    "tune": (*STEP, "tune"),
    "versions": (*STEP, *RECOVERY, "own"),
}
HEAD = """\
# How old are the measured results?

Each figure of these pages comes from one of these files, and `make docs` writes the figures from
them. *Commits since* counts those that changed what a file measures: the more, the sooner it should
be measured again. Written by `make docs` on {today}.
"""


def dates(content: Any) -> Iterator[str]:
    """Yield every date in a file, such as "2026-11-25 10:28 UTC"."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key == "date":
                yield value
            elif key != "rows":
                yield from dates(value)
    elif isinstance(content, list):
        for value in content:
            yield from dates(value)


def commits_since(day: str, rooms: tuple[str, ...]) -> int:
    """Return the number of commits on these folders of nanoray/ since that day began.

    Of a day alone git takes the present time of day.
    """
    paths = [f"nanoray/{room}" for room in sorted(set(rooms))]
    command = ["git", "rev-list", "--count", f"--since={day} 00:00 +0000", "HEAD", "--", *paths]
    counted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(counted.stdout)


def main() -> None:
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        rooms = SUBJECTS[content.get("bench", path.stem)]
        newest = max(dates(content))[:10]
        age = commits_since(newest, rooms)
        what = ", ".join(sorted(set(rooms)))
        lines.append((age, [f"[{path.name}](results/{path.name})", newest, str(age), what]))
    print(HEAD.format(today=date.today().isoformat()))
    lines.sort(key=lambda line: (-line[0], line[1]))
    header = ("file", "measured on", "commits since", "on these folders of nanoray/")
    print("\n".join(markdown(header, [cells for _, cells in lines])))


if __name__ == "__main__":
    main()
