"""Commands that start a run again: as it was started, and by each other launcher."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

# The file of a package's command -> the words that run it.
_MODULES = {
    "nanoray/train/__main__.py": ["-m", "nanoray.train"],
    "nanoray/launch/__main__.py": ["-m", "nanoray.launch"],
    "nanoray/__main__.py": ["-m", "nanoray"],
}
# Programs that run a text, and not a file that could be run again.
_WITHOUT_FILE = ("", "-", "-c", "ipykernel_launcher.py", "colab_kernel_launcher.py")
_HOST = "HOST:29500"  # where ranks of several hosts meet
# Data sets that a pod prepares by itself; others are files, which must be on the job's volume.
_NAMED_DATA = ("auto", "shakespeare", "stdlib")


class Command(NamedTuple):
    """A command line, and how it starts the ranks."""

    how: str
    line: str


def first_command(spec: dict[str, Any]) -> Command | None:
    """Return the command that started a run, launcher included; None if it cannot be typed.

    `spec` is the run's run.json. A notebook's cells and `python -c` leave no such command.
    """
    argv = [str(word) for word in spec.get("command", [])]
    if not argv or Path(argv[0]).name in _WITHOUT_FILE:
        return None

    # A console script runs by itself, each other file in an interpreter.
    words = [argv[0]]
    needs_python = Path(argv[0]).suffix == ".py"
    for ending, module in _MODULES.items():
        if argv[0].endswith(ending):
            words = module
    words = [*words, *_without_values(argv[1:])]

    # Runs of earlier versions did not record their launcher.
    launcher = spec.get("launcher", {"by": "", "ranks": 1, "on_host": 1})
    by = launcher["by"]
    if by == "variables":
        by = "torchrun"
    if needs_python and by != "torchrun":
        words = ["python", *words]
    how = {"": "as it was started", "kuberay": "inside the KubeRay job's head pod"}.get(by, by)
    return Command(how, _join(*_starter(by, launcher["ranks"], launcher["on_host"]), *words))


def _without_values(words: list[str]) -> list[str]:
    """Return the words of a command, of variables their names alone: `--env TOKEN`.

    A report is shown to others, and the values may be keys and passwords. So given, a variable is
    taken from the environment of the command.
    """
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "--env":
            word = word.partition("=")[0]
        elif word.startswith("--env="):
            word = "=".join(word.split("=")[:2])
        shown.append(word)
    return shown


def other_commands(folder: Path, config: dict[str, Any], ranks: int, device: str) -> list[Command]:
    """Return a command for each launcher that starts the run's recipe on as many ranks.

    They read the run's own config.json, and start a new run. A script's own model has none: only
    the script can build it. `device`: what the ranks had, cpu or cuda.
    """
    if config.get("model") == "own":
        return []
    words: list[str] = ["--config", str(folder / "config.json")]
    # Every flag overrides the file. A run that was resumed would go on where it ended.
    if config.get("resume", "none") != "none":
        words += ["--resume", "none"]
    words += ["--workers", str(ranks)]
    train = ["-m", "nanoray.train", *words]
    launch = ["python", "-m", "nanoray.launch", *words]

    commands = []
    if ranks == 1:
        commands.append(Command("one process", _join("python", *train)))
    commands += [
        Command("torchrun", _join(*_starter("torchrun", ranks, ranks), *train)),
        Command("srun", _join(*_starter("srun", ranks), "python", *train)),
        Command("mpirun", _join(*_starter("mpirun", ranks), "python", *train)),
        Command("Ray", _join(*launch)),
        Command("a job on a Ray cluster", _join(*_starter("ray job"), *launch)),
    ]

    # The pods of a job need a kind of device, where a machine finds its own.
    dataset = config.get("dataset", "auto")
    if dataset in _NAMED_DATA or dataset.startswith("/data/"):
        submit = ["nanoray", "kube", "submit", *words]
        if config.get("device", "auto") == "auto":
            submit += ["--device", device]
        commands.append(Command("KubeRay", _join("python", "-m", *submit)))
    return commands


def _starter(by: str, ranks: int = 1, on_host: int = 1) -> list[object]:
    """Return the words of a launcher before the program of its ranks, `on_host` on each host.

    None for a program that is started by itself.
    """
    if by == "srun":
        return ["srun", "--ntasks", ranks]
    if by == "mpirun":
        return ["mpirun", "-np", ranks]
    if by == "ray job":
        return ["ray", "job", "submit", "--working-dir", ".", "--"]
    if by != "torchrun":
        return []
    words: list[object] = ["torchrun"]
    hosts = -(-ranks // max(1, on_host))
    if hosts > 1:
        # Typed on each host, with the name of one of them.
        words += ["--nnodes", hosts, "--rdzv-backend", "c10d", "--rdzv-endpoint", _HOST]
    return [*words, "--nproc-per-node", on_host]


def _join(*words: object) -> str:
    return shlex.join(str(word) for word in words)
