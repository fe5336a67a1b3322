"""The Ray driver: place one actor per slot, start them, watch, recover, report. It alone prints.

connect ─► place (placement group) ─► Campaign: attempts of a Gang ─► watch ──► outcome
                                        ▲                              │
                                        └─ replace, shrink or restart ─┴─ a rank is lost: who, why, what now?
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import remove_placement_group

from nanoray import sentinel
from nanoray.callbacks import Console
from nanoray.config import Config, Loaded, resolve_batch
from nanoray.data import prepare
from nanoray.devices import Slots, available_cpus, discover_gpus, local_slots
from nanoray.errors import ConfigError, PlacementError, WorkerFailed
from nanoray.failures import Failure, FaultReport, Inquest, Recovering, back_off_s, echo_of, why_not
from nanoray.faults import parse_plan
from nanoray.gang import DRAIN_S, POLL_S, SEATS, Gang, start_timeout_s
from nanoray.placement import ClusterWatch, Placement, bounded, connected, stuck
from nanoray.report import closing_lines, dry_run_lines, plan, run_command
from nanoray.run import RunSpec, open_run, summary_on_failure, write_attempt, write_summary
from nanoray.watchdog import Position, Watchdog
from nanoray.worker import Beat


def main(argv: list[str] | None = None) -> int:
    """Run `python -m nanoray.launch` and return its exit code."""
    what = "Train on Ray: one actor per GPU, MIG slice or CPU share."
    code = run_command(launch, argv, "python -m nanoray.launch", what)
    if stuck():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


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
                campaign = Campaign(spec, place, stop)
                outcome = campaign.run()
        finally:
            bounded(lambda: remove_placement_group(place.group))
    summary = write_summary(spec, outcome, len(campaign.history))
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


class Campaign:
    """The attempts of one run: start, judge what failed, recover, until the run ends or nothing is left to try."""

    def __init__(self, spec: RunSpec, place: Placement, stop: Stop) -> None:
        self.spec, self.place, self.stop = spec, place, stop
        self.console = Console(spec.config.max_steps)
        self.history: list[Failure] = []  # one cause per event
        self.gang: Gang | None = None
        self.recovering: Recovering | None = None
        self.started = False
        self.lost_on_the_way: dict[int, int] = {}  # by seat: new actors that died before they answered
        self.outcome: dict[str, Any] | None = None
        self.cluster = ClusterWatch(place)

    def run(self) -> dict[str, Any]:
        """Return rank 0's outcome, or why there is none (`ok` False)."""
        try:
            with self.cluster:
                while True:
                    inquest = self._attempt()
                    if self.outcome is not None:  # it comes after the last checkpoint: later failures change nothing
                        return self._ended()
                    if not inquest.failures:
                        if inquest.all_wait and self._can_grow():
                            self._grow()
                            continue
                        self._broke(inquest)
                    why = self._judge(inquest)
                    if not self.cluster.head_answers():
                        why = "the cluster's head is gone; start it again, and this run with --resume auto"
                    tries = not why or self.stop.requested  # with a stop under way, who is left can still save
                    if tries and inquest.all_wait and self._in_place():
                        continue
                    if why:
                        return self._gave_up(why)
                    self._restart()
        finally:
            if self.recovering:  # a fault that nothing came after
                self._write_report("none")
            if self.gang:
                bounded(self.gang.end)

    def _attempt(self) -> Inquest:
        """Start the ranks, if there are none, and watch them until they are done, have failed, or wait for orders."""
        self.outcome = None
        try:
            if self.gang is None:
                self._begin_attempt()
                self.gang = Gang(self.spec, self.place)
                self.gang.create()
                self.gang.begin()
                self._require_use_of_spares()
            return self._watch(self.gang)
        except GetTimeoutError:
            raise PlacementError(
                f"the actors did not start within {start_timeout_s(self.spec.config):g} s; look at `ray logs`, and "
                "whether every node has this nanoray and torch"
            ) from None
        except RayError as error:
            inquest = Inquest([0], False, 0.0, 0.0)
            inquest.ended(0, Failure(0, "killed", f"an actor failed while starting: {error}"), time.monotonic())
            return inquest

    def _begin_attempt(self) -> None:
        """Count attempts, and let no rank of an older one commit a checkpoint any more."""
        if self.started:
            self.spec = self.spec.next_attempt()
        self.started = True
        write_attempt(self.spec)

    def _require_use_of_spares(self) -> None:
        if self.spec.config.spares not in ("auto", 0) and self.gang and not self.gang.in_place:
            raise ConfigError(
                f"spares = {self.spec.config.spares} would be ignored: with backend {self.gang.backend}, "
                f"{self.place.workers} rank(s) and allreduce {self.spec.config.allreduce} all ranks start anew; "
                "drop spares"
            )

    def _watch(self, gang: Gang) -> Inquest:
        """Hear what the ranks say and print it, until they are done, have failed, or all wait for orders."""
        config, stop = self.spec.config, self.stop
        patience_s = max(config.timeout_s, config.init_timeout_s) + DRAIN_S  # a survivor may be computing
        inquest = Inquest(gang.members, gang.in_place, patience_s, DRAIN_S)
        watchdog = Watchdog(gang.members, config.hang_timeout)
        for seat in gang.members:
            gang.ask(seat, after=self.recovering.target if self.recovering else None)
        told, members = False, set(gang.members)
        while not inquest.closed(time.monotonic()):
            if not stop.requested and (trouble := self.cluster.trouble()):
                stop.because(trouble)
            if stop.requested and not told:
                told = True
                gang.tell_all("stop")
            for kind, seat, news in gang.hear(POLL_S):
                if kind == "ended":
                    watchdog.over(seat)
                    self._rank_ended(gang, inquest, seat, news)
                elif kind == "beat" and seat in gang.runs and seat in members:
                    self._beat(gang, inquest, watchdog, seat, news)
                elif kind == "here":
                    self._arrived(gang, inquest, seat, news)
            if not inquest.failures:
                gang.drain(self.console)
                if watchdog.quiet:
                    for seat, (place, stamped) in gang.positions().items():
                        watchdog.reread(seat, place, stamped)
                if watchdog.hangs():
                    gang.end_hung(watchdog, inquest)
                    self._seat_anew(gang, inquest, inquest.failures)
        if not inquest.failures:
            gang.drain(self.console, wait_s=5.0)
        return inquest

    def _rank_ended(self, gang: Gang, inquest: Inquest, seat: int, ref: Any) -> None:
        result, failure = gang.result(ref, seat)
        if seat not in gang.members:  # it was left over while the group is smaller
            gang.seat(seat)
            return
        inquest.ended(seat, failure, time.monotonic())
        if failure:
            self._seat_anew(gang, inquest, [failure])
        elif seat == gang.members[0]:
            self.outcome = result
            inquest.rank_0_is_done(time.monotonic())

    def _seat_anew(self, gang: Gang, inquest: Inquest, failures: list[Failure]) -> None:
        """Let the newcomers start at once, while the others notice; with a stop under way nobody is replaced."""
        if inquest.in_place and not self.cluster.head_answers():
            inquest.nobody_is_replaced(time.monotonic())
        if inquest.in_place and not self.stop.requested:
            for failure in failures:
                gang.seat(failure.rank)

    def _beat(self, gang: Gang, inquest: Inquest, watchdog: Watchdog, seat: int, beat: Beat) -> None:
        inquest.waits(seat, beat.waiting and beat.attempt == self.spec.attempt, time.monotonic())
        watchdog.see(seat, Position(beat.step, beat.phase), beat.stamped)
        if self.recovering and self.recovering.over(beat.step, beat.base, beat.waiting):
            self._say_recovered()
        elif not self.recovering and beat.step > 1 and not inquest.failures:
            gang.add_spares()
        gang.ask(seat, beat.waiting, self.recovering.target if self.recovering else None)

    def _arrived(self, gang: Gang, inquest: Inquest, seat: int, well: bool) -> None:
        """A new actor is there, or was lost on the way. In a group that is too small it is a reason to meet again."""
        if well:
            self.lost_on_the_way.pop(seat, None)
            if not inquest.failures and not self.stop.requested and self._can_grow():
                gang.tell_all("pause")
            return
        self.lost_on_the_way[seat] = tries = self.lost_on_the_way.get(seat, 0) + 1
        if tries < SEATS:
            gang.seat(seat)
        else:
            del gang.actors[seat]
            print(f"shrink   {tries} new actors for rank {seat} were lost on the way; going on without it", flush=True)

    def _can_grow(self) -> bool:
        """Whether more ranks are there than train, and the global batch can be split over them."""
        assert self.gang
        return len(self.gang.fitting(self.gang.taken)) > len(self.gang.members)

    def _broke(self, inquest: Inquest) -> None:
        """Name who is to blame when ranks left their group and nobody ended: the ones that did not follow, if any."""
        assert self.gang
        gang, late = self.gang, inquest.silent
        for seat in late:
            gang.end_silent(seat, inquest)
        if late:
            self._seat_anew(gang, inquest, inquest.failures)
            return
        seat = gang.members[0]
        step, phase = gang.positions().get(seat, (Position(0, "init"), 0.0))[0]
        title = f"the group of {len(gang.members)} rank(s) broke in {phase} of step {step}, though no rank was lost"
        failure = Failure(seat, "peer_lost", title, step, phase, signature="group broke", fact=gang.facts[seat])
        inquest.failures.append(failure)
        inquest.whole, inquest.first_news = True, time.monotonic()

    # After a failure.

    def _judge(self, inquest: Inquest) -> str:
        """Say what failed, and return why it is not tried again, empty when it is."""
        assert self.gang
        cause, gang = inquest.cause, self.gang
        others = [failure for failure in inquest.failures if failure is not cause]
        consequences = [f"  {line}" for line in echo_of(others)]
        print("\n".join(["", f"failure  {cause.title}", *_indented(cause.detail), *consequences]), flush=True)
        if self.recovering:  # it never came back to work
            self._write_report(self.recovering.report.recovery)
        self.history.append(cause)
        report = FaultReport.of(cause, others, self.spec.attempt, len(gang.members))
        known = inquest.first_news
        if cause.cause == "hung":
            report.detect_s = round(cause.silent_s, 3)
        elif cause.death.get("boot") and cause.death["boot"] == sentinel.boot_id():
            report.detect_s = round(max(0.0, known - cause.death["monotonic"]), 4)
        done = [Failure(0, "killed", "", *place).completed for place, _ in gang.positions().values()]
        done += [failure.completed for failure in inquest.failures]
        self.recovering = Recovering(report, known, max(done))
        return why_not(cause, self.history, self.spec.config.max_failures, self.stop.requested)

    def _in_place(self) -> bool:
        """Bring the ranks that are left, and the new ones, into a group of their own; False when that cannot be."""
        assert self.gang
        assert self.recovering
        gang, config, began = self.gang, self.spec.config, time.monotonic()
        lost = [seat for seat in gang.members if seat not in gang.runs]
        budget = f"{len(self.history)}/{config.max_failures}"
        stopping = self.stop.requested
        if not stopping:
            gang.arrived(lost, config.replace_timeout)
        left = [seat for seat in gang.members if seat in gang.runs]
        seats, before = gang.fitting(left if stopping else gang.taken), len(gang.members)
        if len(seats) < self.place.workers and not (seats and (stopping or config.recovery == "shrink")):
            print(f"replace  {budget} no new actor within {config.replace_timeout:g} s", flush=True)
            return False
        try:
            self._begin_attempt()
            gang.regroup(self.spec, seats)
        except (RayError, OSError) as error:
            print(f"replace  {budget} failed: {' '.join(str(error).split())[:200]}", flush=True)
            return False
        how, seconds = "", time.monotonic() - began
        if joined := [seat for seat in lost if seat in seats]:
            how = "spare" if set(joined) <= gang.promoted else "in_place"
            pids = ", ".join(f"rank {s} (pid {gang.facts[s]['pid']}{_spare(s in gang.promoted)})" for s in joined)
            print(f"replace  {budget} {pids} joins in {seconds:.1f} s; no step is repeated\n", flush=True)
        if stopping:
            how = "none"
            print(f"stop     {len(seats)} rank(s) are left; they finish the step and save\n", flush=True)
        elif len(seats) < self.place.workers:
            how = "shrink"
            print(
                f"shrink   {budget} {before} -> {len(seats)} rank(s) with the same global batch, until "
                f"rank {', '.join(map(str, sorted({*range(self.place.workers)} - {*seats})))} is back\n",
                flush=True,
            )
        gang.promoted.clear()
        self.recovering.report.recovery = how
        return True

    def _grow(self) -> None:
        """Take up the actors that have arrived since the group shrank."""
        assert self.gang
        gang = self.gang
        before, seats = len(gang.members), gang.fitting(gang.taken)
        try:
            self._begin_attempt()
            gang.regroup(self.spec, seats)
        except (RayError, OSError) as error:  # a rank was lost in this very moment
            print(f"grow     failed: {' '.join(str(error).split())[:200]}; all ranks start again", flush=True)
            gang.end()
            self.gang = None
            return
        print(f"grow     {before} -> {len(seats)} ranks; no step is repeated\n", flush=True)

    def _restart(self) -> None:
        """End everybody; the next attempt starts from the newest checkpoint."""
        assert self.recovering
        if self.gang:
            self.gang.end()
        self.gang = None
        self.recovering.report.recovery = "restart"
        seconds = back_off_s(self.history)
        pause = f", in {seconds:.0f} s: nothing was completed since the last failure" if seconds else ""
        budget = f"{len(self.history)}/{self.spec.config.max_failures}"
        print(f"restart  {budget} from the newest checkpoint{pause}\n", flush=True)
        self.stop.wait(seconds)

    def _say_recovered(self) -> None:
        """Complete the report of the fault, now that a step was done which had not been done before it."""
        assert self.recovering
        report = self.recovering.closed()
        self._write_report(report.recovery)
        print(f"recover  {report.outcome()}\n", flush=True)

    def _write_report(self, recovery: str) -> None:
        """Write down what is known of the last fault; a full disk must not end the run."""
        assert self.recovering
        report, self.recovering = self.recovering.report, None
        report.recovery = recovery
        try:
            report.write(self.spec.folder)
        except OSError as error:
            print(f"warning  faults.jsonl did not take the report: {error.strerror}", flush=True)

    # The end.

    def _ended(self) -> dict[str, Any]:
        assert self.outcome is not None
        if self.recovering:  # the run was over before another step
            self._say_recovered()
        stopped = self.outcome["exit_reason"] == "stopped"
        return self.outcome | {
            "exit_code": (self.stop.exit_code or 128 + signal.SIGTERM) if stopped else 0,
            "why": self.stop.reason if stopped else "",
        }

    def _gave_up(self, why: str) -> dict[str, Any]:
        self._write_report("none")
        cause = self.history[-1]
        message = f"{cause.title}. Gave up: {why}. Checkpoints and logs: {self.spec.folder}"
        code = self.stop.exit_code or (1 if cause.retry else cause.exit_code)
        return {"ok": False, "exit_reason": f"failed: {cause.title}", "exit_code": code, "message": message}


def _spare(promoted: bool) -> str:
    return ", a spare" if promoted else ""


def _indented(text: str) -> list[str]:
    return ["  " + line for line in text.rstrip().splitlines()]


class Stop:
    """What signals asked for: the first asks every rank to stop after this step, a second Ctrl-C stops now."""

    def __init__(self) -> None:
        self.signal = 0
        self.reason = ""

    def __call__(self, signum: int, frame: Any) -> None:
        if self.signal and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal = signum
            os.write(2, b"\nstopping after this step, with a checkpoint (Ctrl-C once more: stop now)\n")

    def because(self, reason: str) -> None:
        """Stop for a reason of the cluster's, as SIGTERM would."""
        self.signal, self.reason = signal.SIGTERM, reason
        print(f"\nstop     {reason}: stopping after this step, with a checkpoint", flush=True)

    def wait(self, seconds: float) -> None:
        """Sleep, but not into a stop."""
        until = time.monotonic() + seconds
        while not self.signal and time.monotonic() < until:
            time.sleep(0.1)

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
