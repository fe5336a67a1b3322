"""The driver of any program: start all ranks, watch them, name the first cause, start all again.

place ─► actors ─► start ─► watch ─┬─► all have ended with 0: done
                     ▲             ├─► one has failed: end the others, name the cause ─┐
                     │             └─► no rank moves: their stacks, as a failure ──────┤
                     └──────── again, unless no restart can cure it ◄──────────────────┘
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from nanoray.base.atomic import read_json
from nanoray.base.output import say
from nanoray.base.text import clock
from nanoray.errors import PlacementError
from nanoray.faults import exit_record
from nanoray.faults.cause import (
    Failure,
    FailureCollector,
    FaultReport,
    announce,
    how_it_ended,
    reason_to_give_up,
    reports_lost_peer,
    title_of,
)
from nanoray.host.interfaces import LOOPBACK
from nanoray.host.launchers import torchrun_variables
from nanoray.launch.placement import START_TIMEOUT_S, Placement, strategy
from nanoray.launch.program.rank import ProgramRank
from nanoray.launch.signals import Stop

POLL_S = 0.1
MOMENT_S = 0.2  # of CPU: more than a rank uses that only waits
# From the first failure until all are known that happened at the same moment
SETTLE_S = 2 * POLL_S
# A failure so soon after the start says something of the program, if it comes again.
AT_ONCE_S = 30.0
# Errors of Python that come again at each start
INCURABLE = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError")
USAGE = 2  # the exit code of a command line that argparse, absl or a shell refuses
RANK_PREFIX = re.compile(rb"^\[rank\d+\]: ", re.M)  # of torch, before each line of a traceback
TRACEBACK = re.compile(
    rb"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*([\w.]+)(?:: (.*))?"
)
LINES_SHOWN = 15  # of the failed rank's output


@dataclass(frozen=True)
class RankProgram:
    """What is run, and how."""

    kind: str  # script | module | command
    words: list[str]  # the script, module or command, and its arguments
    folder: Path  # of the run: its log files
    variables: dict[str, str] = field(default_factory=dict)
    max_failures: int = 3
    hang_timeout_s: float = 600.0  # 0: no rank is taken for hung
    grace_s: float = 30.0  # between SIGTERM and SIGKILL
    tee: str = "0"  # whose output is shown: 0 | all

    def log(self, rank: int) -> Path:
        """Return the file of a rank's output."""
        return self.folder / "logs" / f"rank{rank}.log"


class StopRequestedNow(Exception):
    """A stop was requested while ranks were running, which have ended since."""


class ProgramDriver:
    """Runs a program as ranks, again and again, until it ends or must not be tried again."""

    def __init__(self, program: RankProgram, place: Placement, stop: Stop) -> None:
        self.program = program
        self.place = place
        self.stop = stop
        self.actors: list[Any] = []
        self.facts: list[dict[str, Any]] = []
        self.failures: list[Failure] = []
        self._offsets: list[int] = []  # what has been read of each rank's output
        self._texts: list[bytes] = []  # its newest part
        self._shown: list[bytes] = []  # with tee all: a line that has not ended

    def run(self) -> int:
        """Run the program to its end and return the exit code."""
        try:
            while True:
                begun = time.time()
                failures = self._attempt()
                if not failures:
                    return 0
                cause = failures[0]
                if time.time() - begun > AT_ONCE_S:
                    cause.signature = ""  # what went well for a while may do so again
                self.failures.append(cause)
                reason = reason_to_give_up(cause, self.failures, self.program.max_failures)
                self._report(failures, reason)
                if reason:
                    return cause.exit_code
        except StopRequestedNow:
            return self.stop.exit_code
        finally:
            self._close()

    def _attempt(self) -> list[Failure]:
        """Start all ranks and watch them; return the failures, the cause first.

        Raises StopRequestedNow.
        """
        try:
            self._create()
            self._start()
            return self._watch()
        except RayError as error:
            self._close()
            line = " ".join(str(error).split())[:200]
            title = f"a node, or Ray's process on it, was lost: {line}"
            return [Failure(-1, "node_lost", title, phase="", at=time.time())]

    # Start.

    def _create(self) -> None:
        """Create the actors that are missing: all at first, and after the loss of a node."""
        if self.actors:
            return
        words = self.program.words
        script = words[0] if self.program.kind == "script" else ""
        threads = self.place.threads
        warm = self.program.kind != "command"
        for rank, index in enumerate(self.place.order):
            options = {
                "num_cpus": self.place.bundle["CPU"],
                "num_gpus": self.place.bundle.get("GPU", 0),
                "scheduling_strategy": strategy(self.place.group, index),
            }
            actor = ray.remote(ProgramRank).options(**options)
            self.actors.append(actor.remote(str(self.program.log(rank)), threads, warm))
        timeout_s = START_TIMEOUT_S
        self.facts = ray.get([a.describe.remote(script) for a in self.actors], timeout=timeout_s)
        for rank, facts in enumerate(self.facts):
            if not facts["sees"]:
                raise PlacementError(
                    f"rank {rank}, on {facts['ip']}, does not see {script}; put it on storage that all "
                    "nodes share, or submit with `ray job submit --working-dir FOLDER`"
                )
        self._offsets = [0] * len(self.actors)
        self._texts = [b""] * len(self.actors)
        self._shown = [b""] * len(self.actors)

    def _start(self) -> None:
        port = ray.get(self.actors[0].free_port.remote())
        on_one_host = len({facts["ip"] for facts in self.facts}) == 1
        address = LOOPBACK if on_one_host else self.facts[0]["ip"]
        starts = []
        for rank, actor in enumerate(self.actors):
            order = {
                "kind": self.program.kind,
                "words": self.program.words,
                "folder": self.facts[rank]["folder"] if not on_one_host else str(Path.cwd()),
            }
            variables = {
                **self.variables_of(rank),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                **self.program.variables,
            }
            self._texts[rank] = b""
            starts.append(actor.start.remote(order, variables))
        pids = ray.get(starts, timeout=START_TIMEOUT_S)
        for facts, pid in zip(self.facts, pids, strict=True):
            facts["pid"] = pid

    def variables_of(self, rank: int) -> dict[str, str]:
        """Return what torchrun would give a rank, and the devices of its node."""
        node = self.facts[rank]["node"]
        nodes = list(dict.fromkeys(facts["node"] for facts in self.facts))
        here = [other for other, facts in enumerate(self.facts) if facts["node"] == node]
        group, groups = nodes.index(node), len(nodes)
        devices = [device for other in here for device in self.facts[other]["devices"]]
        # CUDA sees one MIG slice at most, so each rank is the only one of its host.
        if self.place.kind == "mig":
            here, group, groups = [rank], rank, len(self.facts)
            devices = self.facts[rank]["devices"]
        variables = torchrun_variables(
            rank=rank,
            world_size=len(self.facts),
            local_rank=here.index(rank),
            local_world_size=len(here),
            group_rank=group,
            group_world_size=groups,
            run_id=self.program.folder.name,
            restarts=len(self.failures),
            max_restarts=self.program.max_failures,
            error_file=self._error_file(rank),
        )
        if self.place.kind != "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return variables

    def _error_file(self, rank: int) -> Path:
        """Return the file in which a program of torch's `@record` reports its error in this attempt."""
        return self.program.log(rank).with_suffix(f".error{len(self.failures)}.json")

    # Watch.

    def _watch(self) -> list[Failure]:
        """Watch all ranks until all have ended, or some failed; return how, the cause first."""
        moved_at = time.monotonic()
        before: list[tuple[int, float]] = []
        collector = FailureCollector(range(len(self.actors)), False, SETTLE_S, SETTLE_S)
        while True:
            answers = self._poll()
            for rank in collector.silent:
                answer = answers[rank]
                if answer["code"] is not None:
                    failure = self._failure_of(rank, answer) if answer["code"] else None
                    collector.ended(rank, failure, time.monotonic())
            # What the others say after a failure, of connections that were reset, is in their logs.
            for rank, answer in enumerate(answers):
                if not collector.failures or rank == collector.cause.rank:
                    self._show(rank, answer["output"])
            if collector.complete(time.monotonic()):
                if not collector.failures:
                    return []
                self._end()
                return [collector.cause, *collector.others]
            if self.stop.requested:
                say("stop     SIGTERM to all ranks, which may save and end")
                self._end()
                raise StopRequestedNow
            # A rank moves where it prints, or has computed for a moment since it last moved.
            now = [(self._offsets[rank], answer["cpu"]) for rank, answer in enumerate(answers)]
            idle_s = time.monotonic() - moved_at
            if not before or self._moves(before, now):
                before, moved_at = now, time.monotonic()
            elif self.program.hang_timeout_s and idle_s > self.program.hang_timeout_s:
                return [self._hung(idle_s)]
            time.sleep(POLL_S)

    def _moves(self, before: Sequence[tuple[int, float]], now: Sequence[tuple[int, float]]) -> bool:
        for (old_output, old_cpu), (output, cpu) in zip(before, now, strict=True):
            if output != old_output or cpu - old_cpu > MOMENT_S:
                return True
        return False

    def _poll(self) -> list[dict[str, Any]]:
        """Ask all ranks. Raises RayError where one is lost."""
        refs = [actor.poll.remote(self._offsets[rank]) for rank, actor in enumerate(self.actors)]
        answers: list[dict[str, Any]] = ray.get(refs)
        for rank, answer in enumerate(answers):
            data: bytes = answer["output"]
            self._offsets[rank] += len(data)
            self._texts[rank] = (self._texts[rank] + data)[-(1 << 16) :]
        return answers

    def _show(self, rank: int, data: bytes) -> None:
        """Show the output of a rank: rank 0's as it comes, or all lines with their rank."""
        text = ""
        if self.program.tee == "all":
            *lines, self._shown[rank] = (self._shown[rank] + data).split(b"\n")
            text = "".join(f"[{rank}] {line.decode(errors='replace')}\n" for line in lines)
        elif rank == 0:
            text = data.decode(errors="replace")
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()

    # Failures.

    def _failure_of(self, rank: int, answer: dict[str, Any]) -> Failure:
        """Describe how a rank's program has ended."""
        code: int = answer["code"]
        record = exit_record.record_of(code) | {"oom": answer["oom"]}
        cause, verb, how = how_it_ended(record)
        exit_code = 128 - code if code < 0 else code
        curable = code != USAGE
        kind, message = self._error_of(rank) if code > 0 else ("", "")
        if kind:
            cause, verb = "exception", "failed"
            how = f"{kind}: {message}" if message else kind
            curable = kind not in INCURABLE
            if reports_lost_peer({kind.rpartition(".")[2]}, message):
                cause = "peer_lost"
        return Failure(
            rank,
            cause,
            title_of(rank, self.facts[rank], verb, how),
            phase="",
            detail=self._tail(rank),
            retry=curable,
            exit_code=exit_code,
            signature=how,
            facts=self.facts[rank],
            exit_record=record,
            at=answer["at"],
        )

    def _tail(self, rank: int) -> str:
        """Return the last lines of a rank's output."""
        text = self._texts[rank].decode(errors="replace")
        return "\n".join(text.splitlines()[-LINES_SHOWN:])

    def _error_of(self, rank: int) -> tuple[str, str]:
        """Return class and message of the error that has ended a rank's program; "" if unknown."""
        report = read_json(self._error_file(rank)).get("message", {})
        extra = report.get("extraInfo", {}) if isinstance(report, dict) else {}
        text = str(extra.get("py_callstack", "")).encode() or self._texts[rank]
        errors = TRACEBACK.findall(RANK_PREFIX.sub(b"", text))
        if not errors:
            return "", ""
        kind, message = errors[-1]
        return kind.decode(), message.decode(errors="replace")[:300]

    def _hung(self, idle_s: float) -> Failure:
        """Collect the stacks of all ranks, end them, and say where each was."""
        for actor in self.actors:
            actor.show_stacks.remote()
        time.sleep(1.0)
        places = []
        for rank, answer in enumerate(self._poll()):
            stack = re.findall(rb'File "([^"]+)", line (\d+) in (\S+)', answer["output"])
            if stack:
                file, line, name = (part.decode(errors="replace") for part in stack[0])
                places.append(f"rank {rank} in {name} ({Path(file).name}:{line})")
        self._end()
        where = "; ".join(places) or "the stacks are in their logs"
        title = f"no rank made progress for {idle_s:.0f} s, and all were ended: {where}"
        # Which rank the others waited for is not known.
        return Failure(-1, "hung", title, phase="", signature=where, at=time.time())

    def _report(self, failures: list[Failure], reason: str | None) -> None:
        """Print a fault and what follows, and write it into faults.jsonl."""
        cause, *others = failures
        # What rank 0 prints is on the console already.
        is_shown = cause.rank == 0 or self.program.tee == "all"
        consequences = announce(cause, others, with_detail=not is_shown)
        fault = FaultReport(cause, consequences, len(self.failures) - 1, self.place.workers)
        fault.recovery = "none" if reason else "restart"
        fault.write(self.program.folder)
        if reason:
            say(f"stop     {reason}; logs: {self.program.folder / 'logs'}")
            return
        tries = f"{len(self.failures)} of {self.program.max_failures}"
        say(f"restart  {tries}: all ranks, {clock(time.time() - cause.at)} after the failure\n")

    # End.

    def _end(self) -> None:
        """End all programs: SIGTERM, time to save, then SIGKILL."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + self.program.grace_s
        while time.monotonic() < deadline:
            if all(answer["code"] is not None for answer in self._poll()):
                return
            time.sleep(POLL_S / 2)
        self._signal(signal.SIGKILL)
        while any(answer["code"] is None for answer in self._poll()):
            time.sleep(POLL_S / 2)

    def _signal(self, signum: int) -> None:
        ray.get([actor.stop.remote(int(signum)) for actor in self.actors])

    def _close(self) -> None:
        """End all actors with whatever is left of their processes."""
        for actor in self.actors:
            with suppress(RayError):
                ray.get(actor.close.remote(), timeout=5)
            ray.kill(actor)
        self.actors = []
