"""`nanoray train|launch|sample|check|bench ...` is `python -m nanoray.train|launch|... ...`."""

from __future__ import annotations

import difflib
import importlib
import sys

COMMANDS = {
    "train": ("nanoray.train", "train in this process, or as one rank of a torchrun"),
    "launch": ("nanoray.launch", "train on Ray: one actor per GPU, MIG slice or CPU share"),
    "sample": ("nanoray.sample", "generate text from a checkpoint"),
    "timeline": ("nanoray.timeline", "draw traced steps of a run: phases and collectives of all ranks"),
    "checkpoint": ("nanoray.checkpoint_cli", "list, verify, show or export checkpoints"),
    "faults": ("nanoray.faults_cli", "the story of a run's faults: cause, recovery, cost"),
    "check": ("nanoray.check", "is this machine ready, and what would run where"),
    "kube": ("nanoray.kube.__main__", "train on Kubernetes: render, submit, status, logs, stop, fetch"),
    "mig": ("nanoray.mig", "what a card can be cut into, and what is cut here"),
    "bench": ("nanoray.bench.__main__", "measure it"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: nanoray COMMAND [--help | flags]\n")
        print("\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()))
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(COMMANDS)}"
        print(f"error: unknown command {argv[0]}; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[argv[0]][0])
    return module.main(argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
