"""The commands of `nanoray`, by name."""

from __future__ import annotations

# Command -> (module whose `main` runs it, line of the help). A module is imported only when its
# command runs, because most of them import torch.
COMMANDS = {
    "train": ("nanoray.train.__main__", "train in this process, or as one rank of a torchrun"),
    "launch": (
        "nanoray.launch.__main__",
        "train on Ray: one actor per GPU, MIG slice or CPU share",
    ),
    "run": (
        "nanoray.launch.program.__main__",
        "run any script, module or command as ranks on Ray, as torchrun would",
    ),
    "tune": (
        "nanoray.tune.__main__",
        "find the fastest way to train a recipe here, by measuring, with the same result",
    ),
    "data": (
        "nanoray.data.__main__",
        "prepare texts, JSON lines and parquet as token shards; OpenWebText, FineWeb-Edu",
    ),
    "sample": ("nanoray.tools.sample", "generate text from a checkpoint"),
    "timeline": (
        "nanoray.trace.__main__",
        "draw traced steps of a run: phases and collectives of all ranks",
    ),
    "ledger": (
        "nanoray.trace.accounts",
        "show where the time of a run went: compute, communication, recovery, ...",
    ),
    "report": (
        "nanoray.tools.report.__main__",
        "write an HTML page about a run, or compare several",
    ),
    "compare": (
        "nanoray.tools.report.__main__",
        "the same as report: several runs beside each other",
    ),
    "inspect": (
        "nanoray.tools.inspect.__main__",
        "show a model: tree, owners, FLOPs; --verify runs one batch",
    ),
    "replay": (
        "nanoray.tools.replay.__main__",
        "do a step of a run again, and compare it with what the run recorded",
    ),
    "bisect": (
        "nanoray.tools.replay.bisect",
        "find the first step, rank and tensor in which two runs differ",
    ),
    "checkpoint": ("nanoray.checkpoint.__main__", "list, verify, show or export checkpoints"),
    "weights": (
        "nanoray.checkpoint.import_weights",
        "import the weights of a GPT-2 of Hugging Face or nanoGPT, to begin a run with",
    ),
    "upload": (
        "nanoray.checkpoint.upload.__main__",
        "send a run to object storage: s3://, gs://, file://",
    ),
    "faults": ("nanoray.faults.__main__", "list a run's faults: cause, recovery, cost"),
    "check": (
        "nanoray.tools.check",
        "check that this machine is ready, and show what would run where",
    ),
    "kube": (
        "nanoray.kube.__main__",
        "train on Kubernetes: render, submit, status, logs, stop, fetch",
    ),
    "mig": (
        "nanoray.tools.mig",
        "show the MIG slices that a GPU supports, and those that exist here",
    ),
    "bench": ("nanoray.bench.__main__", "run a benchmark"),
}
