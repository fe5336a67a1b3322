"""The Ray actor of one rank: bind a device, join the others, train, and answer the driver.

Ray places the actor and reports its death. No gradient, weight or batch passes through Ray.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray

from nanoray.checkpoint.run_folder import RunSpec, can_regroup
from nanoray.config.choose import require_compiler
from nanoray.errors import NanorayError, OutOfMemory, RankDiffers, RendezvousError
from nanoray.faults import exit_record
from nanoray.faults.cause import is_collective_error
from nanoray.faults.progress import NOT_BEGUN, ProgressFile
from nanoray.launch.devices import bound_devices
from nanoray.launch.gauges import RayMetrics
from nanoray.launch.ray_compat import memory_threshold
from nanoray.launch.recovery.messages import MessageQueue
from nanoray.launch.recovery.pickled_script import PickledScript
from nanoray.launch.recovery.rank_output import RankOutput
from nanoray.launch.recovery.silence import DriverSilence
from nanoray.machine.host import available_memory_bytes, resident_bytes
from nanoray.machine.proc import start_time
from nanoray.machine.script_errors import exit_code_after, how_it_ended_itself
from nanoray.parallel.rendezvous import Order, Rendezvous

log = logging.getLogger("nanoray.rank")

REPLACE_TIMEOUT_S = 600.0  # a survivor that gets no order for this long ends by itself

# The driver calls every second or two. A rank that was not called for this long stops with a
# checkpoint, or, if it waits for orders while the driver is busier, goes on alone to save.
DRIVER_SILENT_S = 20.0
ORPHAN_S = 60.0
ORPHAN_CODE = 75  # the exit code of a rank that ends because its driver is silent

# Bytes of a script's lines that wait for the driver, which polls several times a second unless its
# console is blocked. More are in the log alone.
MOST_WAITING = 1 << 20

CHECK_S = 0.005  # how often `heartbeat` checks whether the step that it waits for has passed


class LostPeer(RuntimeError):
    """A collective lost its peer, and the peer was not replaced."""


class Heartbeat(NamedTuple):
    """Where a rank is: the step being computed, or just completed, and its phase."""

    step: int
    phase: str
    base: int  # the completed step that its attempt started from
    written_at: float  # when it wrote its position, in its own monotonic seconds
    attempt: int  # the attempt it is in, or has left
    waiting: bool  # it has left its process groups and waits for the next attempt


class Worker:
    """One rank. `run` trains; other methods answer at the same time, in Ray's concurrency groups.

    With rank None it is a spare: it imports torch, holds no device, and waits for `take_slot`.
    """

    def __init__(
        self,
        run_name: str,
        rank: int | None,
        rehearsal: dict[str, Any] | None = None,
        script: PickledScript | None = None,
        variables: Mapping[str, str] | None = None,
        record: Path | None = None,
        train: Callable[..., dict[str, Any]] | None = None,
        api: Any = ray,
    ) -> None:
        """Bind this process's devices and start to import torch.

        rehearsal: a RunSpec, as a dict, to rehearse a step with. variables: for this process's
        environment. record: the file for how this process ends; a spare has none before it is a
        rank. Tests replace rank.train and ray (`api`).
        """
        # First of all: libraries read them when torch is imported.
        os.environ.update(variables or {})
        self._name = run_name
        self._rank = rank
        self._rehearsal = rehearsal
        self._script = script
        self._train = train
        self._api = api
        self._captures = api is ray  # a test's stand-in has no process of its own

        self._messages: deque[tuple[str, Any]] = deque()
        self._printed_bytes = 0  # of printed lines, since the driver's last poll
        self._metrics: RayMetrics | None = None
        self._output: RankOutput | None = None
        self._store: Any = None

        # Orders of the driver: stop, leave the groups of this attempt, take up the next attempt.
        self._stop = threading.Event()
        self._pause_in = -1
        self._attempts: queue.Queue[tuple[dict[str, Any], Rendezvous]] = queue.Queue()

        # The present attempt; and whether this rank has left its groups and waits for the next one.
        self._spec: RunSpec | None = None
        self._rendezvous = Rendezvous()
        self._waiting = threading.Event()

        self._silence = DriverSilence()
        self._devices = bound_devices(api)

        # Before the imports, in which memory may run out.
        if record:
            exit_record.watch(record)

        # Importing torch takes seconds: start now, while the driver creates the other actors.
        # Methods that need torch join this thread first, because two threads that import
        # torch.distributed at once abort the process.
        self._importing = threading.Thread(target=self._prepare, daemon=True)
        self._importing.start()

    def _prepare(self) -> None:
        # Collecting garbage among modules, which stay anyway, is a sixth of an import's time.
        gc.disable()
        program = self._script.module if self._script else "nanoray.train.rank"
        importlib.import_module(program)
        gc.freeze()
        gc.enable()
        if self._rehearsal:
            from nanoray.train.elastic import rehearse
            from nanoray.train.tasks import task_of

            rehearse(task_of(RunSpec.from_dict(self._rehearsal)))

    def __repr__(self) -> str:
        role = "spare" if self._rank is None else f"rank {self._rank}"
        return f"{self._name} {role}"

    @ray.method(concurrency_group="control")
    def take_slot(self, rank: int, devices: list[str], record: Path) -> dict[str, Any]:
        """Make this spare a rank, on the devices of the lost one; `record`: see __init__.

        Returns what `describe` does. The driver waits for that, so `run` finds the devices.
        """
        self._rank = rank
        self._devices = devices
        # CUDA reads this when it is initialized, which comes later: see add_spares.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        exit_record.watch(record)  # takes a tenth of a second, on a busy machine longer
        return self._describe()

    @ray.method(concurrency_group="control")
    def describe(self) -> dict[str, Any]:
        """Return this process's pid, start in ticks, node, IP address, Ray id and devices."""
        return self._describe()

    def ready(self) -> dict[str, Any]:
        """Do as `describe` does, once torch is imported and the rehearsal, if any, is done."""
        self._importing.join()
        return self._describe()

    def _describe(self) -> dict[str, Any]:
        context = self._api.get_runtime_context()
        return {
            "pid": os.getpid(),
            "start": start_time(os.getpid()),
            "node": context.get_node_id(),
            "ip": self._api.util.get_node_ip_address(),
            "actor": context.get_actor_id(),
            "devices": self._devices,
        }

    @ray.method(concurrency_group="control")
    def memory(self) -> tuple[int, int]:
        """Return the bytes that this process takes, and those that its node has free.

        Above a threshold Ray's memory monitor ends processes there.
        """
        return resident_bytes("RssAnon"), available_memory_bytes(usable=memory_threshold())

    @ray.method(concurrency_group="control")
    def nccl_version(self) -> tuple[int, int, int] | None:
        """Return the version of the NCCL library in force on this node."""
        self._importing.join()
        from nanoray.parallel.rendezvous import runtime_nccl_version

        return runtime_nccl_version()

    @ray.method(concurrency_group="control")
    def open_store(self, world_size: int, timeout_s: float) -> tuple[str, int]:
        """Serve the store on a port that the kernel picks; return its address.

        One rank is called: rank 0 of a new run, else a rank that holds the run's state.
        """
        self._importing.join()
        from nanoray.parallel.rendezvous import open_store

        host = self._api.util.get_node_ip_address()
        self._store = open_store(host, world_size, timeout_s)
        return host, self._store.port

    @ray.method(concurrency_group="control")
    def break_meeting(self, secret: str, absent: int) -> None:
        """Write into this process's store that a rank which the others wait for is lost."""
        from nanoray.parallel.mesh import break_meeting

        break_meeting(self._store, secret, absent)

    @ray.method(concurrency_group="control")
    def abort(self, attempt: int) -> None:
        """Abort the process groups of this attempt, if this rank is in them: a peer is lost.

        An order for another attempt does nothing. There can be no newer groups yet, because `go_on`
        runs in the same thread as this method.
        """
        is_present = self._spec is not None and self._spec.attempt == attempt
        if is_present and not self._waiting.is_set():
            from nanoray.parallel.mesh import abort_groups

            abort_groups()

    def run(self, spec: dict[str, Any], rendezvous: Rendezvous) -> dict[str, Any]:
        """Train as one rank; return the outcome, or as data the failure and its kind."""
        self._importing.join()
        from nanoray.train.agree import require_run_folder
        from nanoray.train.rank import train

        assert self._rank is not None
        run = RunSpec.from_dict(spec)
        self._spec = run
        self._rendezvous = rendezvous
        self._silence.note_call()

        # The file of an earlier process in this slot must not be read as this one's.
        run.progress(self._rank).unlink(missing_ok=True)

        try:
            if self._captures:
                # First: a script would run, and its log be opened, in a folder that is not there.
                require_run_folder(run.folder, self._rank)
                self._output = self._keep_output(run.log(self._rank))
            require_compiler(run.config, rendezvous.device)
            self._metrics = RayMetrics(self._name, self._rank)
            observers = [MessageQueue(self._messages, self._metrics)]

            # Rank 0 of a new run trains with the store that this process serves already. A survivor
            # serves the store of a later attempt for all ranks, also for rank 0.
            store = self._store if rendezvous.rank == 0 and not rendezvous.agent_store else None
            regroups = can_regroup(run.config, rendezvous.backend, rendezvous.slots)
            rejoin = self._rejoin if regroups else None

            trainer: Callable[..., dict[str, Any]] = self._train or train
            if self._script:
                trainer = self._script.unpack(partial(self._note_of_node, rendezvous.local_rank))
            outcome = trainer(run, rendezvous, observers, self._next_order, store, rejoin)
        # The driver compares it with what other ranks report. What a script ends itself with is no
        # Exception: Ray would take it for a killed process or a cancelled task.
        except BaseException as error:
            log.exception("rank %d failed", self._rank)
            if self._output:
                self._output.finish()
            self._end_if_orphaned()
            step, phase, _, _ = ProgressFile.read_own(run.progress(self._rank))
            message = str(error)
            if not isinstance(error, Exception):
                message = how_it_ended_itself(error)
            return {
                "ok": False,
                "kind": _kind_of(error, rendezvous),
                "exit_code": exit_code_after(error),
                "error": type(error).__name__,
                "message": message,
                "traceback": traceback.format_exc(),
                "step": step,
                "phase": phase,
            }
        if self._output:
            self._output.finish()
        self._end_if_orphaned()
        return {"ok": True, **outcome}

    def _note_of_node(self, local_rank: int, text: str) -> None:
        """Show a line that is the same for all ranks of a node."""
        log.warning(text)
        if local_rank == 0:
            self._messages.append(("note", text))

    def _keep_output(self, path: Path) -> RankOutput | None:
        """Send what this process prints to the rank's log; None if that cannot be opened.

        A full disk, or a log that another program has put something else in the place of, must not
        end a rank.
        """
        try:
            return RankOutput(path, self._send_line)
        except OSError as error:
            log.warning("what rank %d prints is not kept: %s", self._rank, error)
            return None

    def _rejoin(self, lost: str) -> tuple[RunSpec, Rendezvous]:
        """Wait, during `run`, for the driver's next attempt and return it.

        If the driver is silent, one of the ranks that wait goes on alone, only to save. Raises
        LostPeer if no attempt comes.
        """
        assert self._spec
        self._waiting.set()
        timeout_s = max(REPLACE_TIMEOUT_S, 2 * self._spec.config.replace_timeout)
        deadline = self._silence.now() + timeout_s

        orders = None
        while orders is None:
            with suppress(queue.Empty):
                orders = self._attempts.get(timeout=ORPHAN_S / 60)
                # Several may have come at once: only the newest counts.
                while True:
                    orders = self._attempts.get_nowait()
            if orders is not None:
                break

            orphaned = self._silence.exceeds(ORPHAN_S)
            if orphaned and self._is_first_orphan():
                # Train alone from here, with a stop requested: that writes a checkpoint.
                self._stop.set()
                orders = (self._spec.to_dict(), _alone(self._rendezvous))
            elif orphaned or self._silence.now() > deadline:
                raise LostPeer(lost)

        self._waiting.clear()
        self._silence.note_call()
        spec, rendezvous = orders
        self._spec = RunSpec.from_dict(spec)
        self._rendezvous = rendezvous
        return self._spec, self._rendezvous

    def _is_first_orphan(self) -> bool:
        """Return whether no other waiting rank has noticed the silence: only one may save."""
        assert self._spec
        name = f"orphan-{self._spec.started!r}-{self._spec.attempt}"
        mark = self._spec.folder / "logs" / name
        # O_EXCL: of several ranks that create the file at once, one succeeds.
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return True
        return False

    def _next_order(self) -> Order:
        """Return the driver's order for the time after this step; STOP if it is silent too long."""
        if self._stop.is_set() or self._silence.exceeds(DRIVER_SILENT_S):
            return Order.STOP
        if self._spec and self._pause_in == self._spec.attempt:
            return Order.REGROUP
        return Order.GO_ON

    def _end_if_orphaned(self) -> None:
        """End this process if the driver is silent, before `run` returns.

        Ray ends actors only once it has noticed that their driver is dead. The rank whose patience
        ended first stops all of them; the others wait here for the driver's next call. A driver
        that was only frozen finds the exit code in the exit record.
        """
        while True:
            if not self._silence.exceeds(DRIVER_SILENT_S / 2):
                return
            if self._silence.exceeds(DRIVER_SILENT_S):
                os._exit(ORPHAN_CODE)
            time.sleep(CHECK_S)

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self, patience_s: float, waiting: bool, after: int | None) -> Heartbeat:
        """Return this rank's position once there is news, at the latest after `patience_s`.

        News: this rank waits for an attempt, or not, other than `waiting`; or it has passed step
        `after`.
        """
        deadline = time.monotonic() + patience_s
        self._silence.note_call(next_within_s=patience_s)
        while True:
            # Read the spec before `waiting`: `_rejoin` clears `waiting` before it sets the next
            # spec, so no heartbeat says that a rank waits in the attempt that it has just joined.
            spec = self._spec
            position = NOT_BEGUN
            attempt = -1
            if spec:
                position = ProgressFile.read_own(spec.progress(self._rank or 0))
                attempt = spec.attempt
            heartbeat = Heartbeat(*position, attempt, self._waiting.is_set())

            passed = after is not None and heartbeat.step > after
            remaining_s = deadline - time.monotonic()
            if heartbeat.waiting != waiting or passed or remaining_s <= 0:
                return heartbeat
            # A step is polled for; the change to waiting wakes this thread at once.
            if after is None and not waiting:
                self._waiting.wait(remaining_s)
            else:
                time.sleep(CHECK_S)

    @ray.method(concurrency_group="control")
    def stacks(self, log_file: str) -> int:
        """Append the stacks of all threads to the log; return the number of started collectives."""
        from nanoray.parallel.mesh import collectives_started

        path = Path(log_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("stacks of all threads of this rank, because no rank makes progress:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        return collectives_started()

    @ray.method(concurrency_group="control")
    def go_on(self, spec: dict[str, Any], rendezvous: Rendezvous) -> None:
        """Start the next attempt on a waiting rank."""
        self._attempts.put((spec, rendezvous))

    @ray.method(concurrency_group="control")
    def poll(self) -> list[tuple[str, Any]]:
        """Return the notes, records and printed lines since the last call."""
        if self._metrics:
            self._metrics.hold()
        self._printed_bytes = 0
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def _send_line(self, stream: str, line: str) -> None:
        """Let the driver print a line of a script, if this is the first rank."""
        if not self._script or self._rendezvous.rank != 0:
            return
        before = self._printed_bytes
        self._printed_bytes += len(line) + 1
        if self._printed_bytes <= MOST_WAITING:
            self._messages.append((stream, line))
        elif before <= MOST_WAITING:
            warning = (
                "warning  the script prints faster than this console reads: lines are left out "
                f"here, and logs/rank{self._rank}.log of the run has all of them"
            )
            self._messages.append(("stderr", warning))

    @ray.method(concurrency_group="control")
    def pause(self, attempt: int) -> None:
        """Leave the process groups of this attempt after the step that all ranks agree on; wait."""
        self._pause_in = attempt

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Stop after the step that all ranks agree on, with a checkpoint."""
        self._stop.set()


def _alone(rendezvous: Rendezvous) -> Rendezvous:
    """Return the rendezvous of a group of one, for a rank whose group broke."""
    return replace(
        rendezvous,
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        live=True,
        reference=0,
        master_addr="",
        master_port=0,
        agent_store=True,
    )


def _kind_of(error: BaseException, rendezvous: Rendezvous) -> str:
    """Return the key of CAUSES for an exception of `run`."""
    if not isinstance(error, Exception):
        return "refused"  # the script wants to end, and would end again
    if isinstance(error, LostPeer) or is_collective_error(error):
        return "peer_lost"
    missed_the_others = isinstance(error, RendezvousError) and not isinstance(error, RankDiffers)
    if rendezvous.live and missed_the_others:
        return "peer_lost"  # a new rank whose peers are lost or frozen
    if isinstance(error, OutOfMemory):
        return "no_memory"
    if getattr(error, "retry", False):
        return "diverged"
    return "refused" if isinstance(error, NanorayError) else "exception"
