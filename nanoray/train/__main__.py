"""`nanoray train`: train in this process, alone or as a launcher's rank. No Ray.

Launchers are torchrun, srun, mpirun, or others that set RANK and WORLD_SIZE: machine/launchers.py.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import DistError

from nanoray.checkpoint.refused_run import discarding_refused
from nanoray.checkpoint.run_folder import (
    RunSpec,
    lock_run,
    summary_on_failure,
    write_attempt,
    write_summary,
)
from nanoray.checkpoint.upload.process import Upload
from nanoray.cli import Loaded, name_program, run_command, stop_signals
from nanoray.cli.help import TRAIN
from nanoray.cli.opening import Opening
from nanoray.config import Config
from nanoray.config.choose import require_compiler
from nanoray.config.variables import THREADS, values_of
from nanoray.errors import ConfigError, NanorayError, RendezvousError, WorkerFailed
from nanoray.faults.cause import is_collective_error
from nanoray.machine.environment import environment
from nanoray.machine.gpus import discover_gpus, take_own_slice
from nanoray.machine.host import available_cpus
from nanoray.machine.launchers import place_of
from nanoray.machine.output import say
from nanoray.observe.track.observer import Observer
from nanoray.observe.track.tracking import require_tracker
from nanoray.observe.watch.console import choose_console
from nanoray.parallel.mesh import abandon_groups
from nanoray.parallel.rendezvous import (
    Order,
    RankDevice,
    Rendezvous,
    choose_backend,
    connect_store,
    runtime_nccl_version,
)
from nanoray.train.launcher_watch import watch_launcher
from nanoray.train.model import settings_put_back
from nanoray.train.program import Trains
from nanoray.train.rank import train
from nanoray.train.report import closing_lines, words_of_training

log = logging.getLogger("nanoray.rank")


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray train` and return the exit code."""
    return run_command(run_here, argv, name_program("train"), TRAIN)


class Ended(NamedTuple):
    """The end of a run in this process."""

    code: int  # the exit code: not 0 after a stop by a signal
    outcome: dict[str, Any]
    ranks: int


def run_here(loaded: Loaded, started: float, program: Trains | None = None) -> int:
    """Train in this process, as the only rank or as one of a launcher's; return the exit code.

    `program` is a script that trains a model of its own.
    """
    ended = train_here(loaded, started, program)
    if ended is None:
        return 0
    # The results are on disk. The end of Python would wait for gloo's threads, which can hang. A
    # script may have more to do; a command has not.
    if ended.ranks > 1 and program is not None:
        abandon_groups()
    elif ended.ranks > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code)
    return ended.code


def train_here(loaded: Loaded, started: float, program: Trains | None = None) -> Ended | None:
    """Train in this process, and print; return how it ended, or None after a dry run."""
    # A program that goes on afterwards finds its environment, and torch's settings, as they were.
    with environment(values_of(loaded.config.env, os.environ, started=True)), settings_put_back():
        return _train_here(loaded, started, program)


def _train_here(loaded: Loaded, started: float, program: Trains | None) -> Ended | None:
    opening = Opening(loaded, started, program)
    if opening.forecast():
        return None
    require_tracker(loaded.config.track)
    run_rank = program or train
    place = place_of(os.environ)
    rendezvous = _local_rendezvous(loaded.config)
    config, ranks = loaded.config, rendezvous.world_size
    if config.workers not in ("auto", rendezvous.world_size):
        what = "-m nanoray.train ..."
        ray = "`python -m nanoray.launch`"
        if program:
            what = "SCRIPT.py"
            ray = "put the script into a function for nanoray.launch(main, config)"
        raise ConfigError(
            f"workers = {config.workers}, but this is {rendezvous.world_size} process(es); start "
            f"`torchrun --nproc-per-node {config.workers} {what}`, or {ray}"
        )
    if loaded.dry_run:
        where = f"this process on {rendezvous.device}, {rendezvous.threads} threads"
        own = program.dry_run if program else None
        kind = rendezvous.device.partition(":")[0]
        opening.dry_run(ranks, where, own, kind, discover_gpus() if kind != "cpu" else [])
        return None
    if config.micro_batch_search and program is None:
        raise ConfigError(
            "micro_batch_size = auto is found before a run begins, by `python -m nanoray.launch`; give the "
            "number that `nanoray tune` finds with the same flags"
        )

    # An impossible batch fails before the ranks meet.
    opening.require_batch(ranks)

    # (all ranks) Agree on backend and run folder, in the launcher's store or in rank 0's.
    store = None
    if rendezvous.world_size > 1 or rendezvous.agent_store:
        store = connect_store(rendezvous, config.init_timeout_s)
        rendezvous = _apart_from_earlier_runs(rendezvous, store)
    rendezvous = _with_backend(rendezvous, config, store)
    # Rank 0 sends the run to object storage, from a process of its own.
    url = config.upload if rendezvous.rank == 0 else ""
    with Upload(url, config.upload_timeout) as upload:
        spec = _shared_spec(opening, rendezvous, store, upload)
        if rendezvous.rank == 0:
            upload.follow(spec.folder)
        if place:
            spec = replace(spec, notes=(place.describe(), *spec.notes))
        stop = StopSignals(ends_process=program is None or ranks > 1)
        watch_launcher(place, stop.launcher_ended)
        run = partial(run_rank, spec, rendezvous, wanted=stop.wanted, store=store)
        with discarding_refused(spec):
            ended = _train(run, spec, rendezvous, stop, loaded.quiet)
    return ended


def _train(
    run: Callable[..., dict[str, Any]],
    spec: RunSpec,
    rendezvous: Rendezvous,
    stop: StopSignals,
    quiet: bool,
) -> Ended:
    """Train. Rank 0 prints, and writes a summary also when the run fails. (all ranks)"""
    is_first = rendezvous.rank == 0
    observers: list[Observer] = []
    if is_first:
        console = choose_console(spec.config.max_steps, quiet)
        observers = [console]
    with (
        stop_signals(stop),
        summary_on_failure(spec) if is_first else nullcontext(),
        _lost_peer_in_one_line(spec, rendezvous.rank),
    ):
        outcome = run(observers)

    # All ranks report a stop by signal, also those without one, so that a supervisor treats them in
    # the same way.
    code = 0
    if outcome["exit_reason"] == "stopped":
        code = stop.exit_code or 128 + signal.SIGTERM
    if is_first:
        summary = write_summary(spec, outcome | {"exit_code": code}, restarts=spec.attempt)
        say("\n".join(closing_lines(spec, summary, words_of_training(os.environ), quiet)))
    return Ended(code, outcome, rendezvous.world_size)


def _apart_from_earlier_runs(rendezvous: Rendezvous, store: Any) -> Rendezvous:
    """Return a rendezvous whose keys in the store are not those of an earlier run of these ranks.

    A script may call `fit` several times, on all ranks in the same order.
    """
    number = store.add(f"nanoray/{rendezvous.public}/runs/{rendezvous.rank}", 1)
    if number == 1:
        return rendezvous
    return replace(
        rendezvous,
        secret=f"{rendezvous.secret}.{number}",
        run_id=f"{rendezvous.run_id}.{number}",
    )


@contextmanager
def _lost_peer_in_one_line(spec: RunSpec, rank: int) -> Iterator[None]:
    """Raise WorkerFailed for a collective that lost its peer; its traceback goes to the log."""
    try:
        yield
    except NanorayError:
        raise
    except Exception as error:
        if not is_collective_error(error):
            raise
        log.exception("rank %d lost a peer", rank)
        reason = " ".join(str(error).split())[:200]
        what = "lost another rank"
        if "timed out" in reason.lower():
            # No connection was closed: the other rank, or the way to it, may still be there.
            what = (
                f"had no answer from another rank for timeout_s = {spec.config.timeout_s:g} s: that "
                "rank hangs, or the network between the hosts is cut"
            )
        raise WorkerFailed(
            f"rank {rank} {what} ({reason}); look at the output of the one that ended "
            f"first, and at {spec.log(rank)}; then start the command again with --resume "
            f"{shlex.quote(str(spec.folder))}"
        ) from error


def _shared_spec(opening: Opening, rendezvous: Rendezvous, store: Any, upload: Upload) -> RunSpec:
    """Return the record of the run, which rank 0 opens, or reopens after a restart. (all ranks)

    The other ranks receive it through `store`. Raises RendezvousError there when rank 0 could not
    open it.
    """
    key = f"nanoray/{rendezvous.public}/spec"  # of this attempt
    run_key = f"nanoray/{rendezvous.run_id}/run"
    if rendezvous.rank > 0:
        values = _from_rank(store, 0, key, opening.config)
        if "refused" in values:
            raise RendezvousError(f"rank 0 refused the run: {values['refused']}")
        return RunSpec.from_dict(values)
    try:
        # A restart goes on in any case: what fails now is tried again.
        if not rendezvous.restarts:
            upload.check()
        # torchrun has restarted the ranks. Its store outlives them, and contains their run.
        known = rendezvous.restarts and store and store.check([run_key])
        spec = RunSpec.from_dict(json.loads(store.get(run_key))) if known else None
        # Refused before its first step, it has no folder any more
        if spec is not None and spec.folder.is_dir():
            lock, *_ = lock_run(spec.folder)
            spec = replace(spec, attempt=rendezvous.restarts, notes=(), lock=lock)
            write_attempt(spec)
            store.set(key, json.dumps(spec.to_dict()))
            return spec
        opening.fetch()
        opening.read()
        spec = opening.open(rendezvous.world_size)
    except NanorayError as error:
        if store:
            store.set(key, json.dumps({"refused": str(error)}))
        raise
    if store:
        record = json.dumps(spec.to_dict())
        store.multi_set([key, run_key], [record, record])
    return spec


def _local_rendezvous(config: Config) -> Rendezvous:
    """Read the rendezvous from the environment and add this rank's device and threads."""
    # torchrun gives every process all MIG slices, and CUDA shows the first one alone: take one each.
    rendezvous = Rendezvous.from_env(os.environ)
    slices = take_own_slice(rendezvous.local_rank)
    gpus = 0
    if config.device != "cpu":
        gpus = torch.cuda.device_count()
    if config.device in ("cuda", "mig") and not gpus:
        raise ConfigError(
            f"device = {config.device}, but torch sees no GPU here; use device cpu, or `nanoray "
            "check`"
        )
    visible, fitting = ("MIG slices", "mig") if slices else ("no MIG slice", "cuda")
    if gpus and config.device in ("cuda", "mig") and config.device != fitting:
        raise ConfigError(
            f"device = {config.device}, but CUDA_VISIBLE_DEVICES names {visible}; use --device "
            f"{fitting}, or set CUDA_VISIBLE_DEVICES"
        )
    # The ranks of a node share its cores and its GPUs.
    threads = config.cpus_per_worker or available_cpus() / max(1, rendezvous.local_world_size)
    if THREADS in config.env:
        threads = int(os.environ[THREADS])
    device = f"cuda:{rendezvous.local_rank % gpus}" if gpus else "cpu"
    require_compiler(config, device)
    return replace(rendezvous, device=device, threads=max(1, int(threads)))


def _with_backend(rendezvous: Rendezvous, config: Config, store: Any) -> Rendezvous:
    """Choose the backend from the devices of all ranks, exchanged in the store. (all ranks)"""
    if rendezvous.world_size == 1:
        return rendezvous
    own = RankDevice("cpu", "", "")
    if rendezvous.device != "cpu":
        node = platform.node()
        if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
            own = RankDevice("mig", node, "")
        else:
            card = str(torch.cuda.get_device_properties(rendezvous.device).uuid)
            own = RankDevice("cuda", node, card)
    # (all ranks) Exchange the devices. Two ranks on one card, or a slice, rule NCCL out.
    prefix = f"nanoray/{rendezvous.public}/card"
    store.set(f"{prefix}/{rendezvous.rank}", json.dumps(own))
    cards = []
    for rank in range(rendezvous.world_size):
        cards.append(RankDevice(*_from_rank(store, rank, f"{prefix}/{rank}", config)))
    nccl = None if own.kind == "cpu" else runtime_nccl_version()
    choice = choose_backend(cards, config.backend, nccl)
    env = tuple(choice.env.items())
    return replace(rendezvous, backend=choice.backend, backend_reason=choice.reason, env=env)


def _from_rank(store: Any, rank: int, key: str, config: Config) -> Any:
    """Wait for what a rank writes into the store. Raises RendezvousError if it does not."""
    try:
        return json.loads(store.get(key))
    except DistError as error:
        raise RendezvousError(
            f"rank {rank} has not come within init_timeout_s = {config.init_timeout_s:g} s, or has "
            "ended before; look at the output of the one that ended first "
            f"({' '.join(str(error).split())[:200]})"
        ) from None


class StopSignals:
    """Turn SIGINT, SIGTERM, SIGHUP and the end of the launcher into a request to stop.

    The run stops after this step. A second SIGINT ends the process at once. Where that is the user's
    own, such as a notebook's, it raises KeyboardInterrupt.
    """

    def __init__(self, ends_process: bool) -> None:
        self._signal = 0
        self._ends_process = ends_process

    def __call__(self, signum: int, frame: Any) -> None:
        if self._signal and signum == signal.SIGINT:
            if self._ends_process:
                os._exit(130)
            raise KeyboardInterrupt
        self._signal = self._signal or signum
        with suppress(OSError):  # the terminal may be gone
            os.write(
                2, b"\nstopping after this step; what is done is saved (once more: stop now)\n"
            )

    def wanted(self) -> Order:
        """Return STOP after a signal, else GO_ON."""
        return Order.STOP if self._signal else Order.GO_ON

    def launcher_ended(self, launcher: str) -> None:
        """Stop as SIGTERM would: the launcher that started this rank is gone. (any thread)"""
        line = f"{launcher}, which started this rank, is gone: stopping after this step"
        log.warning(line)
        self._signal = self._signal or signal.SIGTERM
        with suppress(OSError):  # the terminal may be gone, too
            os.write(2, f"\n{line}; what is done is saved\n".encode())

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal number, as in a shell."""
        return 128 + self._signal if self._signal else 0


if __name__ == "__main__":
    raise SystemExit(main())
