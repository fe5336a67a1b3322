"""The Ray driver: place one actor per slot, start them, watch, recover, report. It alone prints.

connect ─► place (placement group) ─► Gang: actors, ranks, rendezvous ─► watch ──► outcome
                                        ▲                                   │
                                        └── next attempt, newest checkpoint ┴── a rank died
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group

from nanoray.callbacks import Console
from nanoray.config import Config, Loaded, resolve_batch
from nanoray.data import prepare
from nanoray.devices import Slots, available_cpus, discover_gpus, local_slots
from nanoray.errors import ConfigError, PlacementError, WorkerFailed
from nanoray.faults import ProgressStamp, parse_plan
from nanoray.mesh import RankDevice, Rendezvous, choose_backend, network_env
from nanoray.placement import START_TIMEOUT_S, Placement, connected, strategy
from nanoray.report import closing_lines, dry_run_lines, plan, run_command
from nanoray.run import RunSpec, open_run, recovers_in_place, summary_on_failure, write_summary
from nanoray.watchdog import Position, Watchdog, behind
from nanoray.worker import Worker

POLL_S, SETTLE_S = 0.5, 0.05
SEATS = 3  # times that a new actor may be lost before it has answered
ANSWER_S = 2.0  # a process that is alive answers on its control lane in milliseconds
DRAIN_S = 1.5  # after the first failure, wait this long for the others: a survivor's error often arrives first
LOG_LINES = 8


def main(argv: list[str] | None = None) -> int:
    """Run `python -m nanoray.launch` and return its exit code."""
    what = "Train on Ray: one actor per GPU, MIG slice or CPU share."
    return run_command(launch, argv, "python -m nanoray.launch", what)


def launch(loaded: Loaded, started: float) -> int:
    """Train what `loaded` asks for on Ray and return the exit code. Raises NanorayError for what it refuses."""
    config = lasting_out_dir(loaded.config)
    address = ray_address(config)
    slots = None
    if address == "local":
        workers = None if config.workers == "auto" else config.workers
        slots = local_slots(config.device, workers, discover_gpus(), available_cpus())
        config = config.model_copy(update={"workers": slots.workers})
    if loaded.dry_run:
        return _dry_run(loaded, config, address, slots)
    if config.workers != "auto" and config.scaling == "none":
        resolve_batch(config, config.workers)  # what cannot be fails before Ray starts
    parse_plan(config.faults)
    dataset = prepare(config)
    with connected(address, slots, config), signals() as stop:
        place = Placement.make(config)
        try:
            config, notes = plan(replace(loaded, config=config), place.workers, dataset.vocab_size)
            spec = open_run(config, dataset, started)
            spec = replace(spec, notes=(*notes, *spec.notes))
            with summary_on_failure(spec):
                outcome, restarts = _attempts(spec, place, stop)
        finally:
            remove_placement_group(place.group)
    summary = write_summary(spec, outcome, restarts)
    if not outcome.get("ok"):
        error = WorkerFailed(outcome["message"])
        error.exit_code = outcome["exit_code"]
        raise error
    print("\n".join(closing_lines(spec, summary)), flush=True)
    return outcome["exit_code"]


def ray_address(config: Config) -> str:
    """Return `local`, or the address of the cluster to connect to: --ray_address, else RAY_ADDRESS."""
    if config.ray_address != "auto":
        return config.ray_address
    return os.environ.get("RAY_ADDRESS") or "local"


def lasting_out_dir(config: Config) -> Config:
    """Move a relative out_dir out of the copy of the working directory that Ray makes for a job and deletes later."""
    if "runtime_resources" not in Path.cwd().parts or Path(config.out_dir).is_absolute():
        return config
    lasting = Path.home() / "nanoray" / config.out_dir
    print(f"out    {lasting}: the job's working directory is a copy that Ray deletes (--out_dir chooses)", flush=True)
    return config.model_copy(update={"out_dir": str(lasting)})


def _dry_run(loaded: Loaded, config: Config, address: str, slots: Slots | None) -> int:
    if slots is None and config.workers == "auto":
        raise ConfigError(f"a dry run does not ask the cluster at {address} what it has; give --workers N")
    dp = slots.workers if slots else int(config.workers)
    dataset = prepare(config)
    config, notes = plan(replace(loaded, config=config), dp, dataset.vocab_size)
    where = f"{dp} × {slots.kind} on this machine ({slots.reason})" if slots else f"{dp} actors on {address}"
    print("\n".join(dry_run_lines(config, notes, resolve_batch(config, dp), dataset, where)))
    return 0


# Start, watch, recover.


@dataclass
class Failure:
    """Why a rank ended, and how close that is to the root cause (lower is closer)."""

    rank: int
    closeness: int  # 0 process or node died, out of memory; 1 an exception; 2 a collective that lost its peer
    title: str
    detail: str = ""
    retry: bool = True
    exit_code: int = 1
    step: int = 0
    signature: str = ""  # equal for failures that repeat themselves


@dataclass
class Gang:
    """The actors of one attempt, in rank order."""

    spec: RunSpec
    place: Placement
    actors: list[Any] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)
    seated: int = 0  # actors created so far: their names differ
    waiting: bool = False  # every rank that is left waits for the lost ones' replacement
    backend: str = ""
    hung: dict[int, str] = field(default_factory=dict)  # ranks that were ended because they did not move, and where

    def create(self) -> None:
        """Create the actors, named by run and rank, and learn where each one is."""
        spec, place = self.spec, self.place
        for rank in range(place.workers):
            spec.stamp(rank).unlink(missing_ok=True)  # where the last attempt's rank was says nothing of this one's
        self.actors = [None] * place.workers
        for rank in range(place.workers):
            self.seat(rank)
        self.facts = ray.get([a.describe.remote() for a in self.actors], timeout=_start_timeout_s(spec.config))

    def seat(self, rank: int) -> None:
        """Create the actor of a rank, in place of the one that was there; it begins to import torch at once."""
        spec, place = self.spec, self.place
        if self.actors[rank] is not None:
            ray.kill(self.actors[rank])
        # A runtime_env costs half a second: Ray cannot use the workers that it keeps ready. Root does without, for it
        # may raise its priority itself (raise_priority); what the network needs travels in the Rendezvous.
        runtime_env = None if os.geteuid() == 0 else {"env_vars": {"RAY_worker_niceness": "0"}}
        remote: Any = ray.remote(concurrency_groups={"control": 1})(Worker)  # type: ignore[call-overload]
        again = self.seated - place.workers + 1 if self.seated >= place.workers else 0
        suffix = (f".{spec.attempt}" if spec.attempt or again else "") + (f"-{again}" if again else "")
        self.seated += 1
        self.actors[rank] = remote.options(
            name=f"{spec.folder.name}-rank{rank}{suffix}",
            num_cpus=place.bundle["CPU"],
            num_gpus=place.bundle.get("GPU", 0),
            scheduling_strategy=strategy(place.group, place.order[rank]),
            runtime_env=runtime_env,
            max_restarts=0,  # Ray would re-execute silently; the driver decides
            max_task_retries=0,
        ).remote(spec.folder.name, rank)

    def begin(self) -> None:
        """Tell every rank where to meet the others, and start to train."""
        spec, first = self.spec, self.actors[0]
        host, port = "", 0
        if self.place.workers > 1:
            store = first.open_store.remote(self.place.workers, spec.config.init_timeout_s)
            host, port = ray.get(store, timeout=START_TIMEOUT_S)
        self.runs = [
            actor.run.remote(spec.to_dict(), replace(r, master_addr=host, master_port=port))
            for actor, r in zip(self.actors, self._rendezvous(), strict=True)
        ]

    def replace(self, lost: list[int], spec: RunSpec) -> None:
        """Let the new actors of `lost` ranks meet the survivors, who hand over the run's state and go on.

        Raises RayError or GetTimeoutError when a new actor does not start.
        """
        self.spec, self.waiting = spec, False
        for rank in lost:
            self.facts[rank] = self._seated(rank)
        host = next(rank for rank in range(len(self.actors)) if rank not in lost)
        store = self.actors[host].open_store.remote(len(self.actors), spec.config.init_timeout_s)
        address, port = ray.get(store, timeout=START_TIMEOUT_S)
        for rank, rendezvous in enumerate(self._rendezvous()):
            rendezvous = replace(rendezvous, master_addr=address, master_port=port, agent_store=True, live=True)
            if rank in lost:
                self.runs[rank] = self.actors[rank].run.remote(spec.to_dict(), rendezvous)
            else:
                self.actors[rank].go_on.remote(spec.to_dict(), rendezvous)

    def _seated(self, rank: int) -> dict[str, Any]:
        """Wait for a new actor and return where it is. Raises RayError or GetTimeoutError."""
        for left in reversed(range(SEATS)):
            try:
                described = self.actors[rank].describe.remote()
                fact: dict[str, Any] = ray.get(described, timeout=_start_timeout_s(self.spec.config))
                return fact
            except RayActorError:
                # A process is known to be dead before its node is: the new actor was sent to that node, too.
                if not left:
                    raise
                self.seat(rank)
        raise AssertionError("unreachable")

    def _rendezvous(self) -> list[Rendezvous]:
        kind, facts = self.place.kind, self.facts
        version = None
        if kind != "cpu":
            version = ray.get(self.actors[0].nccl_version.remote(), timeout=START_TIMEOUT_S)
        # Ray's ids of slices are UUIDs of slices: the same node with slices is taken for the same card.
        cards = [RankDevice(kind, f["node"], "" if kind == "mig" else ",".join(f["devices"])) for f in facts]
        choice = choose_backend(cards, self.spec.config.backend, version)
        self.backend = choice.backend
        nodes = list(dict.fromkeys(f["node"] for f in facts))
        secret = secrets.token_hex(16)
        ranks = []
        for rank, fact in enumerate(facts):
            neighbours = [r for r, other in enumerate(facts) if other["node"] == fact["node"]]
            ranks.append(
                Rendezvous(
                    rank=rank,
                    world_size=len(facts),
                    local_rank=neighbours.index(rank),
                    local_world_size=len(neighbours),
                    node_rank=nodes.index(fact["node"]),
                    device="cpu" if kind == "cpu" else "cuda:0",
                    backend=choice.backend,
                    backend_reason=choice.reason,
                    env=tuple((network_env() | choice.env).items()),
                    threads=self.place.threads,
                    secret=secret,
                )
            )
        return ranks

    def watch(self, console: Console, stop: Stop) -> tuple[dict[str, Any] | None, list[Failure]]:
        """Print what rank 0 says until all ranks are done. Return rank 0's outcome, or the failures of this attempt.

        With recovery in place it also returns once all ranks but the failed ones wait for replacements (`waiting`);
        those start meanwhile.
        """
        pending = {ref: rank for rank, ref in enumerate(self.runs)}
        outcome: dict[str, Any] | None = None
        failures: list[Failure] = []
        in_place = recovers_in_place(self.spec.config, self.backend, len(self.actors))
        patience_s = self.spec.config.timeout_s + DRAIN_S if in_place else DRAIN_S  # a survivor may be computing
        give_up = float("inf")
        told = False
        watchdog = Watchdog([self.spec.stamp(r) for r in range(len(self.actors))], self.spec.config.hang_timeout)
        while pending and time.monotonic() < give_up:
            if stop.requested and not told:
                told = True
                for actor in self.actors:
                    actor.stop.remote()
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=SETTLE_S if failures else POLL_S)
            for ref in ready:
                rank = pending.pop(ref)
                result, failure = self._result(ref, rank)
                if failure:
                    failures.append(failure)
                    give_up = min(give_up, time.monotonic() + patience_s)
                    if in_place and failure.retry and not stop.requested:
                        self.seat(rank)
                    else:
                        give_up, in_place = min(give_up, time.monotonic() + DRAIN_S), False
                elif rank == 0:
                    outcome = result
            if not failures:
                self._drain(console)
                if places := watchdog.check():
                    self._end_hung(places, watchdog.silent_s)
            elif in_place and pending and self._all_wait(pending.values()):
                self.waiting = len(pending) + len(failures) == len(self.actors)  # else some are done already
                break
        if not failures:
            self._drain(console)
        return (None if failures else outcome), failures

    def _end_hung(self, places: list[Position], silent_s: float) -> None:
        """Name the rank that all others wait for, keep the stacks of those that still answer, and end it."""
        answers = [actor.stacks.remote(str(self.spec.log(rank))) for rank, actor in enumerate(self.actors)]
        answered, _ = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_S)
        mute = [rank for rank, ref in enumerate(answers) if ref not in answered]
        late = mute or behind(places)
        for rank in late if len(late) < len(places) else late[-1:]:
            step, phase = places[rank]
            others = ", ".join(f"rank {r} in {p.phase} of step {p.step}" for r, p in enumerate(places) if r != rank)
            why = "does not answer" if rank in mute else "is behind"
            self.hung[rank] = f"made no progress for {silent_s:.0f} s in {phase} of step {step} and {why} ({others})"
            ray.kill(self.actors[rank])  # its sockets close, and whoever waits for it learns so

    def _all_wait(self, ranks: Iterable[int]) -> bool:
        """Whether each of these ranks has left its groups and waits for a replacement of the lost one."""
        try:
            return all(ray.get([self.actors[rank].waiting.remote() for rank in ranks], timeout=5))
        except (RayError, GetTimeoutError):
            return False

    def _drain(self, console: Console) -> None:
        with suppress(RayError):  # a dead rank 0 is reported by its run
            for kind, value in ray.get(self.actors[0].poll.remote(), timeout=5):
                console.on_note(value) if kind == "note" else console.on_record(value)

    def _result(self, ref: Any, rank: int) -> tuple[dict[str, Any] | None, Failure | None]:
        step, phase = ProgressStamp.read(self.spec.stamp(rank)) or (0, "init")
        fact = self.facts[rank]
        where = f"rank {rank} (pid {fact['pid']}, node {fact['ip']})"
        try:
            result = ray.get(ref)
        except OutOfMemoryError as error:
            title = f"{where} was ended by Ray's memory monitor in {phase} of step {step}"
            return None, Failure(rank, 0, title, str(error), step=step, signature="oom")
        except RayActorError as error:
            if rank in self.hung:
                detail = f"stacks of all ranks that answered: {self.spec.log(rank).parent}"
                return None, Failure(rank, 0, f"{where} {self.hung.pop(rank)}; it was ended", detail, step=step)
            what = "died" if isinstance(error, ActorDiedError) else "is out of reach"
            cause = "killed, or crashed without a Python exception" if what == "died" else "its node is lost or busy"
            title = f"{where} {what} in {phase} of step {step}: {cause}"
            return None, Failure(rank, 0, title, self._log_tail(rank), step=step)
        except RayError as error:
            return None, Failure(rank, 1, f"{where} failed: {error}", step=step, signature=type(error).__name__)
        if result["ok"]:
            return result, None
        lines = f"{result['error']}: {result['message']}"
        return None, Failure(
            rank,
            2 if result["kind"] == "collective" else 1,
            f"{where} failed in {result['phase']} of step {result['step']}: {lines}",
            "" if result["kind"] == "refused" else result["traceback"],
            retry=result["kind"] != "refused",
            exit_code=result["exit_code"],
            step=result["step"],
            signature=lines,
        )

    def _log_tail(self, rank: int) -> str:
        with suppress(OSError):
            lines = self.spec.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(["its log ends:", *lines[-LOG_LINES:]])
        return ""

    def end(self) -> None:
        """End every actor of this attempt. What they came to is on disk and in the driver already."""
        for actor in filter(None, self.actors):
            ray.kill(actor)


def _start_timeout_s(config: Config) -> float:
    """A bundle whose node is lost waits for another node: as long as the first placement may, if that is longer."""
    return max(START_TIMEOUT_S, config.placement_timeout_s)


def _attempts(spec: RunSpec, place: Placement, stop: Stop) -> tuple[dict[str, Any], int]:
    """Run attempts until one ends well, nothing is left to try, or the user has had enough."""
    console = Console(spec.config.max_steps)
    previous: Failure | None = None
    restarts = 0
    gang: Gang | None = None
    try:
        while True:
            try:
                if gang is None:
                    gang = Gang(spec, place)
                    gang.create()
                    gang.begin()
                outcome, failures = gang.watch(console, stop)
            except GetTimeoutError:
                raise PlacementError(
                    f"the actors did not start within {_start_timeout_s(spec.config):g} s; look at `ray logs`, and "
                    "whether every node has this nanoray and torch"
                ) from None
            except RayError as error:
                failures, outcome = [Failure(0, 0, f"an actor failed while starting: {error}")], None
            if outcome is not None:
                outcome["exit_code"] = stop.exit_code if outcome["exit_reason"] == "stopped" else 0
                return outcome, restarts
            began = time.monotonic()
            cause = min(failures, key=lambda f: f.closeness)
            _say(cause, failures)
            if why := _why_not(cause, previous, restarts, spec.config.max_failures, stop):
                return _gave_up(spec, cause, why), restarts
            restarts, previous = restarts + 1, cause
            spec = spec.next_attempt()
            budget = f"{restarts}/{spec.config.max_failures}"
            lost = sorted({failure.rank for failure in failures})
            if gang and gang.waiting:
                try:
                    gang.replace(lost, spec)
                    pids = ", ".join(f"rank {r} (pid {gang.facts[r]['pid']})" for r in lost)
                    seconds = time.monotonic() - began
                    print(f"replace  {budget} {pids} joins in {seconds:.1f} s; no step is repeated\n", flush=True)
                    continue
                except (RayError, GetTimeoutError) as error:
                    print(f"replace  {budget} failed: {' '.join(str(error).split())[:200]}", flush=True)
            if gang:
                gang.end()
            gang = None
            print(f"restart  {budget} from the newest checkpoint\n", flush=True)
    finally:
        if gang:
            gang.end()


def _say(cause: Failure, failures: list[Failure]) -> None:
    consequences = [f"  rank {f.rank}: {f.title}" for f in failures if f is not cause]
    print("\n".join(["", f"failure  {cause.title}", *_indented(cause.detail), *consequences]), flush=True)


def _why_not(cause: Failure, previous: Failure | None, restarts: int, most: int, stop: Stop) -> str:
    """Return why there is no further attempt; empty when there is one."""
    if not cause.retry:
        return "a restart cannot cure that"
    if cause.signature and previous and (previous.signature, previous.step) == (cause.signature, cause.step):
        return "it failed twice in the same way at the same step"
    if restarts >= most:
        return f"max_failures = {most} restart(s) are used up"
    return "a stop was asked for" if stop.requested else ""


def _gave_up(spec: RunSpec, cause: Failure, why: str) -> dict[str, Any]:
    message = f"{cause.title}. Gave up: {why}. Checkpoints and logs: {spec.folder}"
    code = 1 if cause.retry else cause.exit_code
    return {"ok": False, "exit_reason": f"failed: {cause.title}", "exit_code": code, "message": message}


def _indented(text: str) -> list[str]:
    return ["  " + line for line in text.rstrip().splitlines()]


class Stop:
    """What signals asked for: the first asks every rank to stop after this step, a second Ctrl-C stops now."""

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self, signum: int, frame: Any) -> None:
        if self.signal and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal = signum
            os.write(2, b"\nstopping after this step, with a checkpoint (Ctrl-C once more: stop now)\n")

    @property
    def requested(self) -> bool:
        return bool(self.signal)

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal, as shells count."""
        return 128 + self.signal if self.signal else 0


@contextmanager
def signals() -> Iterator[Stop]:
    """Catch SIGINT and SIGTERM for the time of a run. A second SIGINT ends the process with exit code 130."""
    stop = Stop()
    old = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


if __name__ == "__main__":
    raise SystemExit(main())
