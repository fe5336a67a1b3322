"""Ranks that live on over many runs of the zoo's modules: a process starts once, not once a run."""

from __future__ import annotations

import gc
import json
import secrets
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nanoray.parallel.rendezvous import Rendezvous, open_store
from tests.harness.commands import forkserver

SETTINGS: dict[str, Any] = {
    "global_batch_size": 12,
    "micro_batch_size": 0,
    "grad_accum_steps": 2,
    "max_steps": 12,
    "log_every": 4,
    "hash_every": 1,
    "eval_every": 0,
    "checkpoint_every": 0,
    "tensorboard": False,
    "precision": "fp32",
    "bucket_mb": 0.0004,  # some 100 elements, so that every module has several buckets
    "timeout_s": 20,
    "init_timeout_s": 20,
}
# class of torch.optim, and its settings. With weight decay and momentum a gradient of zeros moves
# a weight that should rest.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 0.02, "weight_decay": 0.5, "fused": True}),
    "adamw foreach": ("AdamW", {"lr": 0.02, "weight_decay": 0.5, "foreach": True}),
    "sgd": ("SGD", {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9}),
}


@dataclass(frozen=True)
class Case:
    """A module of the zoo in one mode. `stops`: the steps at which the run is cut and resumed."""

    exhibit: str
    mode: str
    optimizer: str = "adamw"
    stops: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """What became of a case: the weights in its last checkpoint, or what each rank raised."""

    weights: dict[str, Any] = field(default_factory=dict)  # by name, numpy
    optimizer: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    log: str = ""  # of rank 0


def run_cases(
    cases: Sequence[Case], world: int, folder: Path, timeout_s: float = 170
) -> list[Found]:
    """Train all cases, one after the other, in one group of `world` processes."""
    store = open_store("127.0.0.1", world, 30)
    secret = secrets.token_hex(8)
    pipes = []
    processes = []
    for rank in range(world):
        here, there = forkserver.Pipe(duplex=False)
        order = rank, world, store.port, [*cases], str(folder), secret, there
        process = forkserver.Process(target=_rank_main, args=order, daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)

    found = [Found() for _ in cases]
    open_pipes = dict(zip(pipes, range(world), strict=True))
    deadline = time.monotonic() + timeout_s
    try:
        while open_pipes:
            ready = wait([*open_pipes], max(0.1, deadline - time.monotonic()))
            assert ready, f"ranks {[*open_pipes.values()]} were too slow"
            for pipe in ready:
                _receive(pipe, open_pipes, found)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
    return found


def _receive(pipe: Any, open_pipes: dict[Any, int], found: list[Found]) -> None:
    try:
        number, result = pipe.recv()
    except EOFError:
        open_pipes.pop(pipe)
        return
    of_case = found[number]
    of_case.errors += result.errors
    of_case.weights = of_case.weights or result.weights
    of_case.optimizer = of_case.optimizer or result.optimizer
    of_case.log = of_case.log or result.log


def _rank_main(
    rank: int, world: int, port: int, cases: list[Case], folder: str, secret: str, pipe: Any
) -> None:
    import os

    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    for number, case in enumerate(cases):
        pipe.send((number, _run(case, rank, world, store, port, Path(folder), secret, number)))
    pipe.close()
    os._exit(0)


def _run(
    case: Case, rank: int, world: int, store: Any, port: int, folder: Path, secret: str, number: int
) -> Found:
    """Train a case in parts, each of which resumes the one before. (all ranks)"""
    from nanoray.checkpoint.resume import newest_valid
    from nanoray.checkpoint.run_folder import RunSpec
    from nanoray.parallel.mesh import abandon_groups
    from nanoray.script.program import Program

    found = Found()
    stops = (*case.stops, 0)
    for part, stop in enumerate(stops):
        settings = case.settings | {"dp_mode": case.mode, "stop_at": stop}
        name = f"{number}-{part}"
        # Rank 0 opens the run; the others read in the store what it has opened.
        if rank == 0:
            opened = _open(folder / str(number), settings, part > 0)
            store.set(f"spec/{name}", json.dumps(opened.to_dict()))
        spec = RunSpec.from_dict(json.loads(store.get(f"spec/{name}")))
        rendezvous = Rendezvous(
            rank=rank,
            world_size=world,
            local_rank=rank,
            local_world_size=world,
            master_addr="127.0.0.1",
            master_port=port,
            backend_reason="test",
            secret=f"{secret}/{name}",
            agent_store=True,
        )
        try:
            Program(partial(train_case, case=case), frozenset(settings))(
                spec, rendezvous, store=store if world > 1 else None
            )
        except Exception as error:
            found.errors.append(f"{type(error).__name__}: {error}")
            found.log += traceback.format_exc()
            break
        finally:
            abandon_groups()
            gc.collect()

    if rank == 0 and not found.errors:
        newest, _ = newest_valid(spec.checkpoints)
        assert newest is not None
        for name, tensor in newest.state.model.items():
            found.weights[name] = tensor.numpy()
        for name, tensor in newest.state.optimizer.items():
            found.optimizer[name] = tensor.numpy()
        found.log = spec.log(0).read_text(encoding="utf-8")
    return found


def open_case(folder: Path, case: Case) -> Any:
    """Open a new run of a case."""
    return _open(folder, case.settings | {"dp_mode": case.mode}, False)


def _open(folder: Path, settings: dict[str, Any], resume: bool) -> Any:
    from nanoray.cli.open_folder import open_run
    from nanoray.config import make_config
    from nanoray.data.dataset import script_data
    from nanoray.script.settings import DEFAULTS

    more = {"out_dir": str(folder), "resume": "auto" if resume else "none"}
    spec = open_run(make_config(DEFAULTS | SETTINGS | more | settings), script_data(), time.time())
    return replace(spec, lock=None)  # the next part opens the run again


def train_case(run: Any, case: Case) -> None:
    """What a script does: a model, its optimizer, its data."""
    from nanoray.script.engine import RuntimeEngine
    from tests.harness.zoo import BY_NAME

    exhibit = BY_NAME[case.exhibit]
    model = exhibit.model()
    optimizer = make_optimizer(case.optimizer, model)
    RuntimeEngine(model, optimizer, run, exhibit.loss).fit(exhibit.dataset())


def make_optimizer(name: str, model: Any) -> Any:
    """Return an optimizer of OPTIMIZERS."""
    import torch

    kind, settings = OPTIMIZERS[name]
    return getattr(torch.optim, kind)(model.parameters(), **settings)
