"""Train a few steps of a script on the CPU, with plain PyTorch and in each mode, and compare.

    nanoray check train.py                                six steps, two ranks, every mode
    nanoray check train.py --dp_mode zero1,fsdp           these modes alone
    nanoray check train.py --ranks 3 -- --width 64        the words after -- are the script's own

plain    a loop of plain PyTorch over the same samples, in this many pieces
resume   one rank, stopped after half of the steps and resumed in another process: the same bits
ddp ...  ranks that train in a mode: the weights of plain PyTorch, but for rounding

Each trains in processes of its own, in fp32, into a folder that is removed; callbacks are not called.
Exit codes: 0, all are equal, or refused with a message; 1, something differs or fails; 2, the script
cannot be checked, or the flags are wrong.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.cli import exit_code_of, tool_parser
from nanoray.errors import CheckpointError, ConfigError, WorkerFailed
from nanoray.lab import local_ranks
from nanoray.machine.host import available_cpus
from nanoray.machine.interfaces import LOOPBACK
from nanoray.machine.output import say
from nanoray.parallel.rendezvous import open_store

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Mapping[str, Tensor]

MODES = ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp")
TOLERANCE = 2e-5  # of fp32, relative to the largest number of a tensor
ROUNDING = 10  # times as far as rounding alone moves a tensor: no rounding
CHANGES = (
    "changes in each step, and no checkpoint has it: after a resume, and on a rank that is replaced, "
    "it begins anew; keep it in a buffer (register_buffer), and draw random numbers from the default "
    "generators, which nanoray seeds for each micro batch"
)
NO_MEAN = (
    'the loss of two samples is not the mean of their own, as with reduction="sum", or where it '
    "compares samples: what is learned depends on the ranks and the micro batch; return the mean, or "
    "nanoray.Weighted(sum=..., weight=...) where it is one over targets"
)
EQUAL = (
    f"what is not refused has the weights of plain torch, within {TOLERANCE:g} of the largest of each "
    f"tensor (fp32), or {ROUNDING} times what rounding alone changes"
)
APART = {
    "begin": "the model has other weights in another process; make modules in a fixed order (not that "
    "of a set), and seed numpy and Python, which nanoray does not do before main",
    "read": "the data have other samples in another process; read them in a fixed order (sorted), and "
    "seed what draws them",
}


def main(argv: list[str]) -> int:
    """Check the script that the first word names; return the exit code."""
    return exit_code_of(lambda: _run(argv))


def _run(argv: list[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = tool_parser("nanoray check", __doc__)
    parser.add_argument("script", help="ends with nanoray.launch(main, config)")
    parser.add_argument("--steps", type=int, default=6, help="steps to train [6]")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each mode [2]")
    parser.add_argument("--dp_mode", default=",".join(MODES), help="modes to train in [all]")
    args = parser.parse_args(argv[:split])
    args.arguments = argv[split + 1 :]
    if not Path(args.script).is_file():
        raise ConfigError(f"there is no file {args.script}; check the path")
    if args.steps < 2 or args.ranks < 1:
        raise ConfigError(f"--steps {args.steps} --ranks {args.ranks}; at least 2 steps on 1 rank")
    args.modes = args.dp_mode.split(",")
    for mode in args.modes:
        if mode not in MODES:
            raise ConfigError(f"dp_mode = {mode} is not one of {', '.join(MODES)}")

    number = max(2, args.ranks)
    with (
        local_ranks.ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="nanoray-check-") as folder,
        Processes(number, Path(folder)) as processes,
    ):
        return Check(args, Path(folder), processes).run()


@dataclass(frozen=True)
class CheckJob:
    """One process that a check wants."""

    script: str
    arguments: list[str]  # of the script
    settings: dict[str, Any]  # keys of the configuration, over those of every check
    environment: dict[str, str]  # the place of the rank
    result: str  # the file for what comes of it, as JSON; the output goes beside it
    # "": a rank of a run. plain: PyTorch alone. nudged: that, from weights with other last bits
    plain: str = ""


class Processes:
    """Python processes that have imported torch, and fork one for each job (check_child.py)."""

    def __init__(self, number: int, folder: Path) -> None:
        self._folder = folder
        self._processes: list[Any] = []
        # No GPU, so that a script that looks for one trains on the CPU, too
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        pipe = subprocess.PIPE
        for _ in range(number):
            with (folder / "errors").open("ab") as errors:
                command = [sys.executable, "-m", "nanoray.lab.check_child"]
                process = local_ranks.start_process(
                    command,
                    env=env,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=errors,
                    bufsize=0,
                    start_new_session=True,
                )
            self._processes.append(process)
        # The ranks meet there. It imports torch, as the processes do at the same time.
        self._store = open_store(LOOPBACK, number, 60.0)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for process in self._processes:
            process.stdin.close()
            # With what it has forked, which may still train
            if kind is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()

    def run(self, jobs: Sequence[CheckJob | None]) -> list[dict[str, Any]]:
        """Let each process do its job, if any, at the same time; return the results."""
        busy = [(p, job) for p, job in zip(self._processes, jobs, strict=False) if job]
        for process, job in busy:
            process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        results = []
        for process, job in busy:
            code = process.stdout.readline().decode().strip()
            if not code:
                errors = (self._folder / "errors").read_text(encoding="utf-8", errors="replace")
                raise WorkerFailed(f"a process of the check has ended by itself: {errors[-300:]}")
            result = {"fault": f"the process has ended with {code}", "kind": "failed"}
            if code == "0":
                result = json.loads(Path(job.result).read_text(encoding="utf-8"))
            results.append(result)
        return results

    def variables(self, ranks: int) -> list[dict[str, str]]:
        """Return the variables of each of some ranks, which meet in the store of this process."""
        return local_ranks.variables_of_ranks(self._store, ranks)


class Check:
    """The check of one script."""

    def __init__(self, args: Namespace, folder: Path, processes: Processes) -> None:
        self._args = args
        self._folder = folder
        self._processes = processes
        self._steps = args.steps
        self._limits: dict[str, float] = {}  # how far each tensor may be from plain PyTorch
        self._wrong = 0  # arms that differ or fail, and mistakes that were found beside them

    def run(self) -> int:
        """Train in every way, print a line for each, and return the exit code."""
        plain = self._plain()
        if plain:
            self._resume()
            for mode in self._args.modes:
                self._mode(mode, plain)
        if self._wrong:
            say(f"wrong: {self._wrong} of these differ or fail")
            return 1
        say(f"equal: {EQUAL}")
        return 0

    def _say(self, name: str, text: str) -> None:
        say(f"{name:<12} {text}")

    def _failed(self, name: str, results: list[dict[str, Any]]) -> bool:
        """Print why an arm has not trained; return whether that is so."""
        faults = [result for result in results if "fault" in result]
        # The consequences on other ranks come last.
        faults.sort(key=lambda fault: ("failed", "refused", "lost").index(fault["kind"]))
        if not faults:
            return False
        is_refused = faults[0]["kind"] == "refused"
        self._wrong += not is_refused
        self._say(name, f"{'refused' if is_refused else 'FAILED'}: {faults[0]['fault']}")
        return True

    def _jobs(self, name: str, ranks: int, **settings: Any) -> list[CheckJob]:
        """Return the jobs of the ranks of a run, in a folder of this name."""
        settings = {
            "workers": ranks,
            "cpus_per_worker": max(1.0, available_cpus() // ranks),
            "stop_at": self._steps,
            "out_dir": str(self._folder / name),
        } | settings
        jobs = []
        for rank, environment in enumerate(self._processes.variables(ranks)):
            result = str(self._folder / f"{name}-{rank}-{secrets.token_hex(4)}.json")
            jobs.append(
                CheckJob(self._args.script, self._args.arguments, settings, environment, result)
            )
        return jobs

    def _weights(self, name: str) -> Weights:
        """Return the weights in the newest checkpoint of a run."""
        from nanoray.checkpoint.resume import newest_valid

        (folder,) = (self._folder / name).glob("*/checkpoints")
        newest, notes = newest_valid(folder)
        if newest is None:
            raise CheckpointError(f"the run {name} has no valid checkpoint: {notes}")
        return newest.state.model

    def _plain(self) -> Weights:
        """Train with plain PyTorch; return the weights, or none."""
        import torch

        ranks = self._args.ranks
        kinds = ("plain", "nudged")
        jobs = [replace(self._jobs(kind, ranks)[0], plain=kind) for kind in kinds]
        results = self._processes.run(jobs)
        if "unusable" in results[0]:
            raise ConfigError(results[0]["unusable"])
        if self._failed("plain", results):
            self._wrong = 1  # also where it is refused: nothing was compared
            return {}

        plain = results[0]
        self._steps = plain["steps"]
        self._say("plain", f"{plain['about']} in plain torch, in the pieces of {ranks} rank(s)")
        for name in plain["attributes"]:
            self._say("attribute", f"{name} {CHANGES}")
        if plain["loss"]:
            self._wrong += 1
            self._say("loss", f"WRONG: {NO_MEAN}")
        # Two processes that begin or read differently cannot be compared, and nor could two ranks.
        for key, what in APART.items():
            if plain[key] != results[1][key]:
                self._wrong += 1
                self._say("script", f"DIFFERS: {what}")
                return {}
        weights, nudged = (torch.load(f"{job.result}.pt", weights_only=True) for job in jobs)
        by_rounding = {name: distance(nudged[name], weights[name]) for name in weights}
        self._limits = {name: max(TOLERANCE, ROUNDING * by_rounding[name]) for name in weights}
        moved = [name for name in weights if self._limits[name] > TOLERANCE]
        if moved:
            worst, by = _largest(by_rounding)
            self._say("rounding", f"moves {len(moved)} of {len(weights)} tensors: {worst} by {by}")
        return weights

    def _resume(self) -> None:
        """Compare a run that was resumed with an unbroken one."""
        half = self._steps // 2
        if not half:
            return
        begun = self._jobs("resume", 1, stop_at=half)
        unbroken = self._jobs("unbroken", 1)
        results = self._processes.run(begun + unbroken)
        if not any("fault" in result for result in results):
            # Not in the process that has begun: it has the same hash seed.
            resumed = self._jobs("resume", 1, resume="auto")
            results = self._processes.run([None, *resumed])
        if not self._failed("resume", results):
            expected = self._weights("unbroken")
            self._compare("resume", 1, "an unbroken run", expected, dict.fromkeys(expected, 0.0))

    def _mode(self, mode: str, plain: Weights) -> None:
        """Compare a run in a mode with plain PyTorch."""
        ranks = self._args.ranks
        jobs = self._jobs(mode, ranks, dp_mode=mode)
        if self._failed(mode, self._processes.run(jobs)):
            return
        self._compare(mode, ranks, "plain torch", plain, self._limits)

    def _compare(
        self, name: str, ranks: int, what: str, expected: Weights, limits: Mapping[str, float]
    ) -> None:
        """Print how far the weights of a run are from others."""
        ours = self._weights(name)
        after = f"after {self._steps} steps"
        far = {}
        for tensor, theirs in expected.items():
            far[tensor] = distance(ours[tensor], theirs) if tensor in ours else math.inf
        wrong = {tensor: far[tensor] for tensor in far if far[tensor] > limits[tensor]}
        if wrong:
            self._wrong += 1
            worst, by = _largest(wrong)
            self._say(name, f"DIFFERS: {worst} is {by} away from {what} {after}")
            return

        within = "to the bit"
        if any(far.values()):
            # Of tensors that rounding moves further, only their limits say something.
            within = f"within {_largest({t: far[t] for t in far if limits[t] <= TOLERANCE})[1]}"
        self._say(name, f"{ranks} rank(s): equal to {what} {within} {after}")


def _largest(far: Mapping[str, float]) -> tuple[str, str]:
    """Return the tensor that is furthest away, and how far: a number such as 3e-7."""
    name = max(far, key=lambda tensor: far[tensor], default="")
    return name, f"{far.get(name, 0.0):.0e}".replace("e-0", "e-").replace("e+00", "")


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return how far two tensors are apart at most, relative to the largest number of the second."""
    import torch

    from nanoray.machine.tensor_memory import equal_bits

    if ours.shape != theirs.shape:
        return math.inf
    if equal_bits(ours, theirs):
        return 0.0
    # Any type becomes that one without loss.
    apart = ours.to(torch.complex128) - theirs
    far = apart.abs().max() / theirs.to(torch.complex128).abs().max()
    return math.inf if far.isnan() else far.item()
