"""The commands of `nanoray`, by name, and the names that were commands once."""

from __future__ import annotations

from typing import NamedTuple


class CommandLine(NamedTuple):
    """A command: the group of `nanoray --help` that lists it, its module and what it does."""

    group: str
    module: str  # its `main` runs; imported only then, because most modules import torch
    about: str


COMMANDS = {
    "run": CommandLine(
        "train",
        "nanoray.launch.program.__main__",
        "run any script, module or command as ranks on Ray, as torchrun would",
    ),
    "launch": CommandLine(
        "train",
        "nanoray.launch.__main__",
        "train on Ray: one actor per GPU, MIG slice or CPU share",
    ),
    "train": CommandLine(
        "train",
        "nanoray.train.__main__",
        "train in this process, or as one rank of a torchrun",
    ),
    "tune": CommandLine(
        "train",
        "nanoray.lab.tune.__main__",
        "find the fastest way to train a recipe here, by measuring, with the same result",
    ),
    "data": CommandLine(
        "data and weights",
        "nanoray.cli.data",
        "prepare texts and JSON lines as token shards; OpenWebText, FineWeb-Edu",
    ),
    "checkpoint": CommandLine(
        "data and weights",
        "nanoray.cli.checkpoint",
        "list, verify, export or upload checkpoints; import the weights of a GPT-2",
    ),
    "sample": CommandLine(
        "data and weights", "nanoray.cli.sample", "generate text from a checkpoint"
    ),
    "report": CommandLine(
        "look at a run",
        "nanoray.observe.report.__main__",
        "write an HTML page about a run; or compare runs, its ledger, its timeline",
    ),
    "faults": CommandLine(
        "look at a run", "nanoray.observe.faults", "list a run's faults: cause, recovery, cost"
    ),
    "inspect": CommandLine(
        "look at a run",
        "nanoray.lab.inspect.__main__",
        "show a model: tree, owners, FLOPs; --verify runs one batch",
    ),
    "replay": CommandLine(
        "look at a run",
        "nanoray.lab.replay.__main__",
        "do a step of a run again and compare; or bisect: where do two runs part?",
    ),
    "check": CommandLine(
        "machines and clusters",
        "nanoray.lab.check",
        "check this machine, a script, or the MIG slices of a GPU",
    ),
    "kube": CommandLine(
        "machines and clusters",
        "nanoray.kube.__main__",
        "train on Kubernetes: render, submit, status, logs, stop, fetch",
    ),
    "bench": CommandLine("machines and clusters", "nanoray.bench.__main__", "run a benchmark"),
}

# Names that were commands once -> what does the same now
RENAMED = {
    "timeline": "report timeline",
    "ledger": "report ledger",
    "compare": "report compare",
    "bisect": "replay bisect",
    "weights": "checkpoint import",
    "upload": "checkpoint upload",
    "mig": "check mig",
}
