"""One rank of a run: a RunSpec and a Rendezvous become an outcome. No Ray here.

`nanoray train` runs it in this process; torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT in the environment, make it one rank of many. The Ray actors of nanoray.launch call the
same `train`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config.conflicts import refuse
from nanoray.config.layout import Layout
from nanoray.data.prepare import prepare
from nanoray.data.verify import verify
from nanoray.errors import ConfigError, NanorayError
from nanoray.faults.inject import Injector
from nanoray.machine.fault_points import reached
from nanoray.machine.host import keep_freed_memory
from nanoray.observe.track.observer import Observer
from nanoray.parallel.mesh import Mesh, join, refuse_meeting
from nanoray.parallel.rendezvous import Order, Rendezvous
from nanoray.train.agree import (
    agree_on_precision,
    decided_otherwise,
    describe_run,
    facts,
    find_checkpoint,
    log_to,
    require_same_tensors,
    require_shared_folder,
    resolve_precision,
    resolved,
)
from nanoray.train.elastic import Rejoin, TrainingGroup, compares, furthest, train_in_groups
from nanoray.train.hardware import compare_hardware
from nanoray.train.model import use_products
from nanoray.train.out_of_memory import (
    ENOUGH,
    Shortage,
    agree,
    agreed_record,
    asked_of,
    resumed_with,
)
from nanoray.train.recipe import Recipe
from nanoray.train.tasks import ConfiguredTask, Task, task_of

log = logging.getLogger("nanoray.rank")


Meet = Callable[..., Mesh]  # takes the arguments of nanoray.parallel.mesh.join


def train(
    spec: RunSpec,
    rendezvous: Rendezvous,
    observers: Sequence[Observer] = (),
    wanted: Callable[[], Order] = lambda: Order.GO_ON,
    store: Any = None,
    rejoin: Rejoin | None = None,
    meet: Meet = join,
    task_of: Callable[[RunSpec], Task] = task_of,
    tensors: Sequence[str] = (),
) -> dict[str, Any]:
    """Train `spec` as one rank and return the outcome as plain data. (all ranks)

    `observers` receive notes and records on rank 0. `wanted` is called once per step: STOP on any
    rank stops all ranks after the same step, with a checkpoint; REGROUP makes them form new groups.
    `rejoin` is called for REGROUP and when a peer is lost, and returns the spec and rendezvous to
    continue with. `meet` forms the process groups. `task_of` returns model and data;
    `tensors` are those of a script's model, in their order, which must be equal on all ranks. Raises
    NanorayError when the run cannot start or continue.
    """
    injector = Injector(spec.folder / "faults.jsonl")
    meet_others = partial(meet_group, injector, meet, tensors=tensors)
    mesh = first_meeting(meet_others, spec, rendezvous, store)
    # A process that replaces a lost rank takes everything from the ranks that are left.
    start = join_run(spec, mesh) if rendezvous.live else begin_run(spec, mesh)
    task, group = complete(start, mesh, task_of)

    recipe = Recipe(group, observers, wanted, injector, task, replaces_lost=rejoin is not None)
    wait_for_orders = partial(recipe.wait_for_orders, rejoin) if rejoin else None
    try:
        # A new command prints its settings. A process that joins prints that it has joined (rejoined).
        if start.source is None:
            announce(recipe, group, start)
        outcome = train_in_groups(group, recipe.state, recipe.build, meet_others, wait_for_orders)
        recipe.ended(outcome, spec.checkpoints)
    except BaseException as error:
        recipe.observers.failed(error)
        raise
    finally:
        recipe.close()
    return outcome


def first_meeting(
    meet_others: Callable[..., Mesh], spec: RunSpec, rendezvous: Rendezvous, store: Any
) -> Mesh:
    """Prepare this process and meet the other ranks; they learn where it cannot. (all ranks)"""
    try:
        prepare_process(spec, rendezvous)
    except NanorayError as error:
        if store is not None:  # without it this rank has not reached the others yet
            refuse_meeting(store, rendezvous, str(error))
        raise
    return meet_others(spec, rendezvous, store)


def complete(
    start: Start, mesh: Mesh, task_of: Callable[[RunSpec], Task]
) -> tuple[Task, TrainingGroup]:
    """Complete the configuration by what task and device decide; return the first group. (all ranks)"""
    use_products(mesh.device, start.precision)
    task = task_of(start.spec)
    config = resolved(start.spec.config, mesh, start.precision, task.settings())
    spec = replace(start.spec, config=config)
    if isinstance(task, ConfiguredTask):
        task.config = config  # the model needs a resolved `attention`, and not `auto`
    # (all ranks) A run that had run out of memory begins with what has fitted since.
    memory = start.memory if start.source is not None else agreed_record(spec.folder, config, mesh)
    return task, TrainingGroup(spec, mesh, start.source, start.strays, memory)


def announce(recipe: Recipe, group: TrainingGroup, start: Start) -> None:
    """Open the observers, and print the settings of a new command. (all ranks)

    Raises ConfigError on all ranks where an observer of rank 0, such as a tracker, cannot work.
    """
    spec, mesh = group.spec, group.mesh
    recipe.observers.open(mesh.rank, start.resume_step)
    problem = mesh.broadcast(recipe.observers.problem())
    if problem:
        raise ConfigError(problem)
    batch = recipe.batch_for(mesh)
    lines = describe_run(spec, batch, mesh, recipe.device, start.why_precision, recipe.task)
    if group.memory.limit:
        lines.append(resumed_with(group.memory.limit, asked_of(spec.config, mesh)))
    for line in lines:
        recipe.observers.note(line)


def prepare_process(spec: RunSpec, rendezvous: Rendezvous) -> None:
    """Check that this node has the run's files, and set this process up for its device.

    Raises ConfigError or DataError when the files are missing or differ.
    """
    require_shared_folder(spec.folder, spec.dataset, partial(prepare, spec.config), rendezvous.rank)
    if spec.dataset.kind != "own":
        verify(spec.dataset)
    log_to(spec.log(rendezvous.slot))

    # NCCL reads the environment when the groups form. Each rank has its share of the cores.
    os.environ.update(rendezvous.env)
    torch.set_num_threads(rendezvous.threads)
    # A step frees what the next one takes: without this the system would zero it each time.
    if rendezvous.device == "cpu":
        keep_freed_memory()


def meet_group(
    injector: Injector,
    meet: Meet,
    spec: RunSpec,
    rendezvous: Rendezvous,
    store: Any = None,
    tensors: Sequence[str] = (),
) -> Mesh:
    """Form the process groups of an attempt with all other ranks. (all ranks)"""
    # Before the ranks meet: a planned fault can fire while they do.
    injector.plan(spec.config.faults, rendezvous.slot, spec.attempt, spec.started)
    reached("meet")
    log.info("attempt %d, pid %d, nice %d, %s", spec.attempt, os.getpid(), os.nice(0), rendezvous)
    config = spec.config
    layout = Layout.of(config, rendezvous.world_size, rendezvous.slots)
    mesh = meet(
        rendezvous, facts(spec), config.timeout_s, config.init_timeout_s, store, layout=layout
    )
    if tensors:
        require_same_tensors(mesh, tensors, rendezvous.reference)
    reached("met")
    log.info("met the group")
    return mesh


@dataclass(frozen=True)
class Start:
    """The agreement of the first group of this process."""

    spec: RunSpec
    precision: str
    why_precision: str = ""
    resume_step: int = 0
    source: int | None = None  # the rank that sends its state; None: there is none yet
    strays: tuple[int, ...] = ()  # ranks whose state differs from the majority's
    memory: Shortage = ENOUGH  # of a run that goes on


def begin_run(spec: RunSpec, mesh: Mesh) -> Start:
    """Agree on precision and checkpoint at the start of a command. (all ranks)"""
    # (all ranks) The weakest device decides the precision.
    precision, why = agree_on_precision(mesh, resolve_precision(spec.config, mesh))
    refuse(spec.config, precision=precision, about=["precision"])
    # (all ranks) Rank 0 chooses the checkpoint: others may see an older listing of the folder.
    found: tuple[str, int, tuple[str, ...]] = ("", 0, ())
    if mesh.rank == 0:
        path, step, notes = find_checkpoint(spec)
        decided = resolved(spec.config, mesh, precision, {})
        found = (path, step, (*notes, *decided_otherwise(path, spec.config, decided, why)))
    resume, resume_step, notes = mesh.broadcast(found)
    spec = replace(spec, resume=resume, notes=(*spec.notes, *notes, *compare_hardware(mesh)))
    return Start(spec, precision, why, resume_step)


def join_run(spec: RunSpec, mesh: Mesh) -> Start:
    """Find the rank with the newest state in a run that goes on. (all ranks)"""
    source, precision, _, strays = furthest(mesh, None, "", compares(spec.config))
    memory = agree(mesh, ENOUGH)
    return Start(spec, precision, source=source, strays=strays, memory=memory)
