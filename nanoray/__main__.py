"""The `nanoray` command: `nanoray launch ...` is the same as `python -m nanoray.launch ...`."""

from __future__ import annotations

import difflib
import importlib
import sys

# Command -> (module whose `main` runs it, line of the help). A module is imported only when its
# command runs, because most of them import torch.
COMMANDS = {
    "train": ("nanoray.train.__main__", "train in this process, or as one rank of a torchrun"),
    "launch": (
        "nanoray.launch.__main__",
        "train on Ray: one actor per GPU, MIG slice or CPU share",
    ),
    "data": (
        "nanoray.data.__main__",
        "prepare texts, JSON lines and parquet as token shards; OpenWebText, FineWeb-Edu",
    ),
    "sample": ("nanoray.sample", "generate text from a checkpoint"),
    "timeline": (
        "nanoray.trace.__main__",
        "draw traced steps of a run: phases and collectives of all ranks",
    ),
    "whatif": (
        "nanoray.forecast.whatif",
        "predict a run's step for another link, bucket size or number of ranks",
    ),
    "ledger": (
        "nanoray.trace.ledger",
        "show where the time of a run went: compute, communication, recovery, ...",
    ),
    "report": ("nanoray.report.__main__", "write an HTML page about a run, or compare several"),
    "compare": ("nanoray.report.__main__", "the same as report: several runs beside each other"),
    "inspect": (
        "nanoray.inspect.__main__",
        "dump a model: tree, owners, FLOPs, memory; --verify runs one batch",
    ),
    "replay": (
        "nanoray.replay.__main__",
        "do a step of a run again, and compare it with what the run recorded",
    ),
    "bisect": (
        "nanoray.replay.bisect",
        "find the first step, rank and tensor in which two runs differ",
    ),
    "experts": ("nanoray.trace.experts", "draw the load of a run's experts over its steps"),
    "checkpoint": ("nanoray.checkpoint.__main__", "list, verify, show or export checkpoints"),
    "faults": ("nanoray.faults.__main__", "list a run's faults: cause, recovery, cost"),
    "check": ("nanoray.check", "check that this machine is ready, and show what would run where"),
    "kube": (
        "nanoray.kube.__main__",
        "train on Kubernetes: render, submit, status, logs, stop, fetch",
    ),
    "alerts": ("nanoray.kube.alerts", "print the alerts for Prometheus, as a rule file"),
    "mig": ("nanoray.mig", "show the MIG slices that a GPU supports, and those that exist here"),
    "bench": ("nanoray.bench.__main__", "run a benchmark"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: nanoray COMMAND [--help | flags]\n")
        for name, (_, description) in COMMANDS.items():
            print(f"  {name:<10} {description}")
        return 0 if argv else 2  # no command at all is an error

    command = argv[0]
    if command not in COMMANDS:
        hint = f"known: {', '.join(COMMANDS)}"
        similar = difflib.get_close_matches(command, COMMANDS, n=1)
        if similar:
            hint = f"did you mean {similar[0]}?"
        print(f"error: unknown command {command}; {hint}", file=sys.stderr)
        return 2

    module_name, _ = COMMANDS[command]
    module = importlib.import_module(module_name)
    return module.main(argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
