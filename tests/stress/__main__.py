"""`python -m tests.stress NAME`: what judges nanoray itself, with the reports of `nanoray bench`.

control      what thousands of ranks cost the driver, and how soon it names a failed one
equivalence  every data-parallel mode against one process: losses, weights, bits
soak         half an hour under random faults: the weights of a run without, nothing left behind
tune         what `nanoray tune` finds, beside the present setting and a full grid
"""

from __future__ import annotations

import sys

from nanoray.bench.__main__ import exit_code_of, run_one
from nanoray.bench.registry import Entry, at
from nanoray.config import refuse_unknown

JUDGES = {
    name: Entry(
        name, summary, at(f"tests.stress.{name}:{cls}"), command=f"python -m tests.stress {name}"
    )
    for name, cls, summary in (
        (
            "control",
            "ControlBenchmark",
            "the driver at 64 to 4000 ranks: what it costs, whom it names",
        ),
        ("equivalence", "EquivalenceBenchmark", "every data-parallel mode against one process"),
        ("soak", "SoakBenchmark", "half an hour under random faults: the weights of a run without"),
        (
            "tune",
            "TuneBenchmark",
            "what a search finds, beside the present setting and a full grid",
        ),
    )
}


def main(argv: list[str] | None = None) -> int:
    """Run one of them, and return the exit code, as `python -m nanoray.bench NAME` does."""
    name, *flags = (sys.argv[1:] if argv is None else argv) or [""]

    def run() -> int:
        if name not in JUDGES:
            refuse_unknown(name, list(JUDGES), "stress")
        return run_one(name, JUDGES[name], flags)

    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
