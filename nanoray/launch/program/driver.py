"""The driver of any program: start all ranks, watch them, name the first cause, start all again.

place ─► actors ─► start ─► watch ─┬─► all have ended with 0: done
                     ▲             ├─► one has failed: end the others, name the cause ─┐
                     │             └─► no rank moves: their stacks, as a failure ──────┤
                     └──────── again, unless no restart can cure it ◄──────────────────┘
"""

from __future__ import annotations

import re
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from nanoray.errors import ConfigError, PlacementError
from nanoray.faults.cause import (
    Failure,
    FailureCollector,
    FaultReport,
    announce,
    reason_to_give_up,
)
from nanoray.launch.caller import in_copy_of_job
from nanoray.launch.placement import START_TIMEOUT_S, Placement, strategy
from nanoray.launch.program.ends import failure_of_actor, failure_of_program
from nanoray.launch.program.folder import ProgramFolder, digest
from nanoray.launch.program.forked import ForkServer
from nanoray.launch.program.observed import RunObserver, explain_wait
from nanoray.launch.program.output import RankOutputs
from nanoray.launch.program.rank import CONCURRENCY, ProgramRank
from nanoray.launch.signals import Stop
from nanoray.machine.interfaces import LOOPBACK
from nanoray.machine.launchers import torchrun_variables
from nanoray.machine.output import say
from nanoray.machine.text import clock

POLL_S = 0.1
HEAD_START_S = 10.0  # at most, of rank 0 before the others
NEVER_S = 1e9  # a program begins, or its rank is lost
TICK_S = 0.25  # the longest wait for news of the ranks: a stop is noticed in between
MOVES_S = 15.0  # between two looks whether the ranks move: each reads all of /proc
# Of one core: more than a rank uses that only waits, though some of its threads look around at times
WAITING_SHARE = 0.005
CLOCK_TICK_S = 0.01  # in which the kernel counts CPU time
# From the first failure until all are known that happened at the same moment
SETTLE_S = 2 * POLL_S
# A failure so soon after the start says something of the program, if it comes again.
AT_ONCE_S = 30.0
MOST_SENT = 100 * 2**20  # bytes of a packed folder, as with `ray job submit`
# Where the thread that got the signal is, of the stacks that faulthandler writes
CURRENT = re.compile(rb'Current thread .*\n  File "([^"]+)", line (\d+) in (\S+)')
STACKS_S = 5.0  # for the ranks of a busy machine to write them
CLOSE_S = 5.0  # for the ranks to end what is left of their processes


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
    code: ProgramFolder | None = None  # what nodes without it get a copy of
    trace_every: int = 0  # of this number of steps two are noted, after the first ones; 0: none
    start_timeout_s: float = START_TIMEOUT_S  # for all ranks' processes, also after a node is lost

    def log(self, rank: int) -> Path:
        """Return the file of a rank's output."""
        return self.folder / "logs" / f"rank{rank}.log"


class Movement(NamedTuple):
    """What shows that a rank moves."""

    output: int  # bytes
    cpu: float  # seconds
    ended: int  # collectives; with --trace only
    waits: bool  # in a collective

    def is_after(self, before: Movement, seconds: float) -> bool:
        """Whether it has printed, ended a collective, or computed in the seconds since `before`.

        A rank that waits in a collective of NCCL computes without end, which is no movement.
        """
        if self.output != before.output or self.ended != before.ended:
            return True
        computes = self.cpu - before.cpu > WAITING_SHARE * seconds + CLOCK_TICK_S
        return computes and not (self.waits and before.waits)


class StopRequestedNow(Exception):
    """A stop was requested while ranks were running, which have ended since."""


class ProgramDriver:
    """Runs a program as ranks, again and again, until it ends or must not be tried again."""

    def __init__(
        self, program: RankProgram, place: Placement, stop: Stop, server: ForkServer | None = None
    ) -> None:
        """server: from which the programs of ranks on this machine are forked."""
        self.program = program
        self._server = server
        self.place = place
        self.stop = stop
        self.actors: list[Any] = []
        self.facts: list[dict[str, Any]] = []
        self.failures: list[Failure] = []
        self.observer = RunObserver(program.folder, bool(program.trace_every))
        # What is awaited -> its rank
        self._begins: dict[Any, int] = {}  # of programs
        self._ends: dict[Any, int] = {}
        self._reads: dict[Any, int] = {}
        self._output: RankOutputs  # made with the actors

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
            self.observer.close()

    def _attempt(self) -> list[Failure]:
        """Start all ranks and watch them; return the failures, the cause first.

        Raises StopRequestedNow.
        """
        try:
            self._create()
            self._start()
            failures = self._watch()
            self._output.show_rest()
            return failures
        except RayError as error:
            failure = failure_of_actor(error, self.facts)
            self._close()
            return [failure]
        finally:
            with suppress(RayError):
                self.observer.collect(now=True)

    # Start.

    def _create(self) -> None:
        """Create the actors that are missing: all at first, and after the loss of a node."""
        if self.actors:
            return
        words = self.program.words
        script = words[0] if self.program.kind == "script" else ""
        threads = self.place.threads
        warm = self.program.kind != "command"
        remote: Any = ray.remote(concurrency_groups=CONCURRENCY)(ProgramRank)  # type: ignore[call-overload]
        for rank, index in enumerate(self.place.order):
            options = {
                "num_cpus": self.place.bundle["CPU"],
                "num_gpus": self.place.bundle.get("GPU", 0),
                "scheduling_strategy": strategy(self.place.group, index),
            }
            actor = remote.options(**options)
            log = str(self.program.log(rank))
            shared = self._server.shared if self._server else None
            self.actors.append(actor.remote(log, threads, warm, self.program.variables, shared))
        self._describe(script)
        if self._server and not any(facts["shares_server"] for facts in self.facts):
            self._server.close()
            self._server = None
        self._send_folder()
        # The log of a node with a run folder of its own would be missing beside the others.
        copies = [
            None if facts["shares_run"] else self.program.log(rank)
            for rank, facts in enumerate(self.facts)
        ]
        printed = [facts["printed"] for facts in self.facts]
        self._output = RankOutputs(printed, copies, self.program.tee == "all")

    def _describe(self, script: str) -> None:
        """Ask all ranks what they are and what they see. Raises PlacementError."""
        # Each node has a copy of a Ray job's folder, in which the actors already are.
        here = "" if in_copy_of_job() else str(Path.cwd())
        marker = self.program.folder / "logs" / f".{secrets.token_hex(8)}"
        marker.touch()
        try:
            asked = [actor.describe.remote(here, str(marker), script) for actor in self.actors]
            self.facts = self._wait_for(asked)
        finally:
            marker.unlink()
        for rank, facts in enumerate(self.facts):
            facts["words"] = self.program.words
            if not facts["sees"] and self.program.code is None:
                raise PlacementError(
                    f"rank {rank}, on {facts['ip']}, does not see {script}; put it on storage that "
                    "all nodes share, or below the folder of `ray job submit --working-dir FOLDER`"
                )

    def _send_folder(self) -> None:
        """Send the program's folder to the nodes that do not have the same files.

        Such a node keeps it in the run's folder, with what the program writes there. Raises ConfigError.
        """
        code = self.program.code
        own_node = ray.get_runtime_context().get_node_id()
        others = {f["node"]: rank for rank, f in enumerate(self.facts) if f["node"] != own_node}
        if code is None or not others:
            return
        try:
            files = code.files
        except ConfigError:
            if all(facts["sees"] for facts in self.facts):
                return  # too many to compare, but the script is there
            raise
        asked = [self.actors[rank].digest.remote(str(code.path), files) for rank in others.values()]
        found = ray.get(asked, timeout=START_TIMEOUT_S)
        expected = digest(code.path, files)
        nodes = {
            node: rank
            for (node, rank), theirs in zip(others.items(), found, strict=True)
            if theirs != expected
        }
        if not nodes:
            return

        archive = code.pack(MOST_SENT, "a node", "put the folder on storage that all nodes share")
        copy = str(self.program.folder / "code")
        addresses = ", ".join(self.facts[rank]["ip"] for rank in nodes.values())
        say(f"send   {code.describe()}, to {addresses}: {copy}")
        packed = ray.put(archive)
        sent = [self.actors[rank].unpack.remote(packed, copy) for rank in nodes.values()]
        ray.get(sent, timeout=START_TIMEOUT_S)
        for facts in self.facts:
            if facts["node"] in nodes:
                facts |= {"folder": copy, "words": code.words}

    def _wait_for(self, refs: list[Any]) -> list[Any]:
        """Return what actors answer that are starting. Raises StopRequestedNow, PlacementError, RayError."""
        deadline = time.monotonic() + self.program.start_timeout_s
        while True:
            ready, pending = ray.wait(refs, num_returns=len(refs), timeout=POLL_S)
            answers = ray.get(ready)  # raises where one is lost
            if not pending:
                return answers
            if self.stop.requested:
                raise StopRequestedNow
            if time.monotonic() > deadline:
                ranks = ", ".join(str(refs.index(ref)) for ref in pending)
                raise PlacementError(
                    f"rank(s) {ranks} did not start within {self.program.start_timeout_s:g} s; `ray "
                    "status` shows which nodes are left and what is free on them; add a node or lower "
                    "--workers"
                )

    def _start(self) -> None:
        port = ray.get(self.actors[0].free_port.remote())
        on_one_host = len({facts["ip"] for facts in self.facts}) == 1
        address = LOOPBACK if on_one_host else self.facts[0]["ip"]
        starts = []
        for rank, actor in enumerate(self.actors):
            order = {
                "kind": self.program.kind,
                "words": self.facts[rank]["words"],
                "folder": self.facts[rank]["folder"],
                "trace": self._trace_of(rank),
            }
            variables = {
                **self.variables_of(rank),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            if not on_one_host and self.facts[rank]["interface"]:
                variables["GLOO_SOCKET_IFNAME"] = self.facts[rank]["interface"]
            variables |= self.program.variables
            self._output.texts[rank] = b""
            starts.append(actor.start.remote(order, variables))
            if rank == 0 and len(self.actors) > 1:
                # It begins first: the others connect to its store, and torch lets one that comes
                # too early sleep for half a second. Ray runs the two methods in any order.
                self._wait_for(starts)
                self._wait_for([actor.wait_for_begin.remote(HEAD_START_S)])
        ray.get(starts, timeout=START_TIMEOUT_S)
        for facts in self.facts:
            facts.pop("pid", None)  # of the attempt before
        self._begins = {
            actor.wait_for_begin.remote(NEVER_S): rank for rank, actor in enumerate(self.actors)
        }
        self._ends = {actor.wait_for_end.remote(): rank for rank, actor in enumerate(self.actors)}
        self._reads = {}
        for rank in range(len(self.actors)):
            self._await_output(rank)
        nodes = [facts["node"] for facts in self.facts]
        self.observer.begin(self.actors, nodes, len(self.failures))

    def _trace_of(self, rank: int) -> list[Any]:
        """Return what a rank's process needs to note its collectives; empty: it notes none."""
        every = self.program.trace_every
        return [str(self.program.log(rank).parent), rank, every] if every else []

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
        collector = FailureCollector(range(len(self.actors)), False, SETTLE_S, SETTLE_S)
        look_s = min(MOVES_S, self.program.hang_timeout_s / 4)
        looked_at = moved_at = time.monotonic()
        before = self._movements()
        while True:
            for rank, end in self._news(POLL_S if collector.failures else TICK_S):
                failure = None
                if end["code"]:
                    text = self._output.texts[rank]
                    facts = self.facts[rank]
                    failure = failure_of_program(rank, end, text, self._error_file(rank), facts)
                collector.ended(rank, failure, time.monotonic())
            # What the others say after a failure, of connections that were reset, is in their logs.
            only = collector.cause.rank if collector.failures else None
            self._output.show_new(only)
            if collector.complete(time.monotonic()):
                if not collector.failures:
                    return []
                self._end()
                return [collector.cause, *collector.others]
            if self.stop.requested:
                self._end()
                raise StopRequestedNow
            self.observer.collect()
            since_look_s = time.monotonic() - looked_at
            if look_s and since_look_s > look_s:
                looked_at += since_look_s
                now = self._movements()
                if any(
                    new.is_after(old, since_look_s) for new, old in zip(now, before, strict=True)
                ):
                    moved_at = looked_at
                elif looked_at - moved_at > self.program.hang_timeout_s:
                    return [self._hung(looked_at - moved_at)]
                before = now

    def _news(self, wait_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Take the output that is awaited, and return which ranks have ended, and how.

        It waits at most `wait_s`. Raises RayError where a rank is lost.
        """
        awaited = [*self._begins, *self._ends, *self._reads]
        ray.wait(awaited, timeout=wait_s)  # for the first one
        ready, _ = ray.wait(awaited, num_returns=len(awaited), timeout=0)
        ended = []
        for ref in ready:
            answer: Any = ray.get(ref)
            if ref in self._begins:
                self.facts[self._begins.pop(ref)]["pid"] = answer
                continue
            if ref in self._reads:
                rank = self._reads.pop(ref)
                self._output.take(rank, answer)
                self._await_output(rank)
                continue
            rank = self._ends.pop(ref)
            self.facts[rank]["pid"] = answer["pid"]
            # All that it has printed comes before its end.
            while self._output.offsets[rank] < answer["size"]:
                self._output.take(rank, ray.get(self._read(rank)))
            ended.append((rank, answer))
        return ended

    def _movements(self) -> list[Movement]:
        return [Movement(**m) for m in ray.get([actor.movement.remote() for actor in self.actors])]

    def _await_output(self, rank: int) -> None:
        """Let a rank answer when it has printed more."""
        if self._output.is_read(rank) and rank in self._ends.values():
            ref = self.actors[rank].wait_for_output.remote(self._output.offsets[rank])
            self._reads[ref] = rank

    def _read(self, rank: int) -> Any:
        offset, shown = self._output.offsets[rank], self._output.is_read(rank)
        return self.actors[rank].read.remote(offset, shown)

    def _poll(self) -> None:
        """Take what all ranks have printed by now. Raises RayError where one is lost."""
        answers = ray.get([self._read(rank) for rank in range(len(self.actors))])
        for rank, answer in enumerate(answers):
            self._output.take(rank, answer)

    # Failures.

    def _hung(self, idle_s: float) -> Failure:
        """Collect the stacks of all ranks, end them, and say who is behind, and where each was."""
        rank, why = explain_wait(ray.get([actor.counts.remote() for actor in self.actors]))
        for actor in self.actors:
            actor.show_stacks.remote()
        places: dict[int, str] = {}  # of each rank
        deadline = time.monotonic() + STACKS_S
        while len(places) < len(self.actors) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._poll()
            for of, found in enumerate(map(CURRENT.search, self._output.texts)):
                if found:
                    file, line, name = (part.decode(errors="replace") for part in found.groups())
                    places[of] = f"rank {of} in {name} ({Path(file).name}:{line})"
        self._end()
        parts = [*([why] if why else []), *(places[of] for of in sorted(places))]
        where = "; ".join(parts) or "the stacks are in their logs"
        title = f"no rank made progress for {idle_s:.0f} s, and all were ended: {where}"
        # Of ranks whose collectives were not noted it is not known for whom the others waited.
        rank = rank if why else -1
        facts = self.facts[rank] if why else {}
        return Failure(rank, "hung", title, phase="", signature=where, facts=facts, at=time.time())

    def _report(self, failures: list[Failure], reason: str | None) -> None:
        """Print a fault and what follows, and write it into faults.jsonl."""
        cause, *others = failures
        # What rank 0 prints is on the console already.
        is_shown = cause.rank == 0 or self.program.tee == "all"
        consequences = announce(cause, others, "" if is_shown else cause.detail)
        # With --trace its step; else seconds of the run, which count as no progress: so not in `failures`.
        reported = replace(cause, step=self.observer.step)
        fault = FaultReport(reported, consequences, len(self.failures) - 1, self.place.workers)
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
        self._wait_for_ends(self.program.grace_s)
        if self._ends:
            self._signal(signal.SIGKILL)
            self._wait_for_ends(float("inf"))

    def _wait_for_ends(self, patience_s: float) -> None:
        """Wait until all programs have ended, but no longer than this."""
        deadline = time.monotonic() + patience_s
        while self._ends and time.monotonic() < deadline:
            self._news(min(TICK_S, max(0.0, deadline - time.monotonic())))
            # After a failure these are the errors that follow from it.
            if self.stop.requested:
                self._output.show_new()

    def _signal(self, signum: int) -> None:
        ray.get([actor.stop.remote(int(signum)) for actor in self.actors])

    def _close(self) -> None:
        """End all actors with whatever is left of their processes."""
        closing = [actor.close.remote() for actor in self.actors]
        if closing:  # that of a lost node answers with an error, or not at all
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
