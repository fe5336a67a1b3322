"""The outer loop: train in a group of ranks; after the loss of a rank form a new one, and go on.

    survivor   collective error ─► leave the groups ─► wait for the driver ─┐
    newcomer   process starts ─► imports torch ─────────────────────────────┤
                                                                            │
                          new engine ◄─ catch up ◄─ furthest ◄─ meet ◄──────┘

The ranks of the new process group bring all of them to the state of the rank with the most
completed steps (broadcast_state.py, mirror.py): nothing is read from disk and no completed step is repeated.
Survivors can be one step apart, because the last all-reduce may have finished on some of them only.
All ranks repeat the interrupted step with the same data and dropout, so the losses equal those of a
run without the fault.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.config import Config
from nanoray.errors import (
    ConfigError,
    MemoryExhausted,
    NanorayError,
    OutOfMemory,
    StateDiverged,
    StateLost,
)
from nanoray.faults.cause import is_collective_error, is_out_of_memory
from nanoray.faults.progress import ProgressFile
from nanoray.machine.fault_points import reached
from nanoray.parallel import cp
from nanoray.parallel.mesh import Mesh, abandon_groups
from nanoray.parallel.rendezvous import Order, Rendezvous
from nanoray.train.engine import Engine, Regroup
from nanoray.train.guard.replicas import agreed, digest
from nanoray.train.out_of_memory import (
    ENOUGH,
    LESS,
    Shortage,
    agree,
    asked_of,
    describe,
    record,
    shortage_of,
    update_is_done_in_part,
)
from nanoray.train.tasks import Task

log = logging.getLogger("nanoray.rank")
# Takes the error; returns once the lost rank has been replaced
Rejoin = Callable[[str], tuple[RunSpec, Rendezvous]]
# Likewise; it also takes whether this rank has run out of memory
Wait = Callable[[str, bool], tuple[RunSpec, Rendezvous]]


@dataclass(frozen=True)
class TrainingGroup:
    """The ranks that train now, and the spec that they agreed on."""

    spec: RunSpec
    mesh: Mesh
    # The rank that sends its state to the others; None at the start of a run
    source: int | None = None
    # Ranks whose state differed from that of the majority, whose `source` is one
    strays: tuple[int, ...] = ()
    # How many sequences of a micro batch fit, and where memory ran out in the group before
    memory: Shortage = ENOUGH


class Next(Enum):
    """What a rank does after its group has ended."""

    END = "end"  # with the error
    AGAIN = "again"  # build anew: one process has all that the next group needs
    MEET = "meet"  # leave the group, and meet the ranks of the next one


@dataclass(frozen=True)
class Ending:
    """How a group has ended for this rank: all that decides what follows."""

    ordered: bool = False  # the driver ordered a new group
    is_short: bool = False  # this rank has run out of memory
    collective: bool = False  # a collective has failed: a peer is lost, or has left
    ours: bool = False  # an error that nanoray has raised
    met: bool = False  # the group had met, and its engine was built
    state_is_gone: bool = False  # the state is lost, or differs, on all ranks
    whole: bool = True  # this rank holds the state of the run
    can_wait: bool = False  # a driver replaces lost ranks
    alone: bool = False  # the group is one process

    @classmethod
    def of(cls, error: Exception, group: TrainingGroup, state: TrainState, met: bool) -> Ending:
        """Describe an error. `met`: the group's engine was built."""
        return cls(
            ordered=isinstance(error, Regroup),
            is_short=is_out_of_memory(error),
            collective=is_collective_error(error),
            ours=isinstance(error, NanorayError),
            met=met,
            state_is_gone=isinstance(error, (StateLost, StateDiverged)),
            whole=state.whole,
            alone=group.mesh.world_size == 1,
        )


def what_follows(ending: Ending) -> Next:
    """Decide what a rank does after its group has ended."""
    if ending.ordered:
        return Next.MEET
    # A failed meeting does not end a rank that holds the state: a newcomer may be the unfit one. A
    # state that is lost, or differs, is so on all ranks: they end, and start again from the newest
    # checkpoint.
    unmet = ending.ours and not ending.met and not ending.state_is_gone
    can_go_on = ending.collective or unmet or ending.is_short
    if not ending.whole or not can_go_on:
        return Next.END
    if ending.can_wait:
        return Next.MEET
    return Next.AGAIN if ending.is_short and ending.alone else Next.END


def train_in_groups(
    first: TrainingGroup,
    state: TrainState,
    build: Callable[[TrainingGroup], Engine],
    meet: Callable[[RunSpec, Rendezvous], Mesh],
    wait: Wait | None,
) -> dict[str, Any]:
    """Run the loop in one group after another, and return the outcome of the run. (all ranks)

    `build` makes an engine for a group and fills `state`; `meet` joins the next group; `wait`
    waits for the driver's orders. A rank may also be lost while the others meet or build; it is
    replaced in the same way. After a rank has run out of memory the same ranks meet.
    """
    group, orders = first, None
    own = first.memory  # what this rank says of its memory at the next meeting
    while True:
        engine = None
        try:
            if orders:
                group = meet_again(orders, group.spec, state, meet, own)
                own = Shortage(group.memory.limit)
            engine = build(group)
            reached("built")
            return train_in_group(engine, group)
        except Exception as error:
            ending = replace(
                Ending.of(error, group, state, met=engine is not None), can_wait=wait is not None
            )
            if ending.is_short:
                own = require_smaller(error, group, state, engine, wait)
            follows = what_follows(ending)
            if follows is Next.END:
                raise
            lost = f"{type(error).__name__}: {error}"
            if ending.ordered:
                lost = "the driver ordered a new group"

        # Outside the except block, because the error's frames would keep the broken wrapper alive.
        log.warning("leaving the group after step %d: %s", state.step, lost)
        if engine:
            leave_engine(engine, holds=wait is not None)
        del engine
        if follows is Next.AGAIN:
            release(state)
            group = replace(group, memory=agree(group.mesh, own))
            own = Shortage(own.limit)
            continue
        assert wait is not None, "what_follows has seen that there is a driver"
        reached("leave")
        leave(group, state)
        reached("wait")
        orders = wait(lost, ending.is_short)


def train_in_group(engine: Engine, group: TrainingGroup) -> dict[str, Any]:
    """Run the loop in one group, and return the outcome of the run. (all ranks)"""
    if group.memory.ends:
        save_and_end(engine, group)
    outcome = engine.fit()
    reached("last")
    group.mesh.barrier()  # (all ranks) no rank leaves while another one needs it
    engine.par.close()
    return outcome


def leave_engine(engine: Engine, holds: bool) -> None:
    """End what an engine has begun in a group that is gone. holds: the next group may lack a rank."""
    engine.writer.finish_copy()
    if holds:
        engine.writer.hold()
    for check in engine.checks:
        check.forget()
    engine.par.undo()


def require_smaller(
    error: Exception,
    group: TrainingGroup,
    state: TrainState,
    engine: Engine | None,
    wait: Wait | None,
) -> Shortage:
    """Return what this rank wants after it has run out of memory.

    Raises the error where the step cannot be done again, with what helps: ConfigError before the
    first step of a command, which has started nothing, else MemoryExhausted. Raises OutOfMemory where
    it could be, but the ranks cannot meet again.
    """
    mesh = group.mesh
    step, phase, _, _ = ProgressFile.read_own(group.spec.progress(mesh.slot))
    begins = state.step == state.session.begun
    ended = ConfigError if begins else MemoryExhausted
    if state.is_updating:
        raise ended(update_is_done_in_part(error, mesh, step)) from error
    if engine is None:
        raise ended(
            f"rank {mesh.rank} ran out of memory before its first step "
            f"({describe(error, mesh.device)}); {LESS}"
        ) from error
    if phase in ("checkpoint", "done"):  # no micro batch takes this memory
        raise error
    own = shortage_of(error, group.spec.config, mesh, (step, phase), engine.batches)
    if own.ends and begins:
        raise ConfigError(own.ends) from error
    if wait is not None or mesh.world_size == 1:
        return own
    if own.ends:
        raise MemoryExhausted(f"{own.ends}. Then resume") from error

    record(group.spec.folder, step, asked_of(group.spec.config, mesh), own)
    raise OutOfMemory(
        f"rank {mesh.rank} {own.why}; after a restart a micro batch has at most {own.limit} "
        f"instead of {engine.batches.batch.micro}, and the global batch stays"
    ) from error


def save_and_end(engine: Engine, group: TrainingGroup) -> NoReturn:
    """Save what the steps before a lack of memory have done; raise MemoryExhausted. (all ranks)"""
    # A step whose evaluation did not fit is done, and its record has no validation loss.
    session = engine.state.session
    if session.record is not None and session.reported != engine.state.step:
        engine.report(session.record)
    # Without a warm-up, which may not fit either
    engine.end_run(Order.STOP)
    group.mesh.barrier()
    engine.par.close()
    raise MemoryExhausted(f"{group.memory.ends}. Saved at step {engine.state.step}; then resume")


def leave(group: TrainingGroup, state: TrainState) -> None:
    """Release the broken group; weights, optimizer and data cursor stay as they are."""
    # A model that was cut for the group refers to it.
    config = group.spec.config
    if config.model_parts > 1 or config.dp_mode == "fsdp":
        state.leave_model()
    else:
        cp.release(state.model)
    release(state)
    group.mesh.leave()
    abandon_groups()  # of a join that failed


def release(state: TrainState) -> None:
    """Free what a broken step has left, but for gradients with which it can be finished."""
    if not state.can_finish:
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)

    # Frees the DDP wrapper with its hooks on the parameters and its reference to the group
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def meet_again(
    orders: tuple[RunSpec, Rendezvous],
    before: RunSpec,
    state: TrainState,
    meet: Callable[[RunSpec, Rendezvous], Mesh],
    own: Shortage,
) -> TrainingGroup:
    """Join the driver's new attempt, and find the rank with the most completed steps. (all ranks)

    `own`: what this rank says of its memory.
    """
    spec, rendezvous = orders  # the driver's configuration, which all ranks compare in `meet`
    mesh = meet(spec, rendezvous)
    spec = replace(spec, config=before.config, resume=before.resume)
    source, _, _, strays = furthest(mesh, state, before.config.precision, compares(spec.config))
    return TrainingGroup(spec, mesh, source, strays, agree(mesh, own))


def compares(config: Config) -> bool:
    """Return whether ranks with the whole state compare it before one of them sends it."""
    return bool(config.hash_every) and not config.sharded


def furthest(
    mesh: Mesh, state: TrainState | None, precision: str, compare: bool
) -> tuple[int, str, int, tuple[int, ...]]:
    """Return the rank with the most steps, the precision, those steps, and strays. (all ranks)

    With `compare` the rank is one of the majority of those at that step, and strays are those of
    them that differ. A new rank has no state yet. Raises RuntimeError when no rank has one, which
    the driver prevents; StateDiverged when there is no majority.
    """
    own: tuple[Any, ...] = (-1, "")
    if state and state.whole:
        own = (state.step, precision)
    positions = mesh.all_gather(own)
    newest = max(positions)
    step, precision, *_ = newest
    if step < 0:
        raise RuntimeError(
            "no rank holds the run's state any more; the run continues from a checkpoint"
        )
    source = positions.index(newest)
    strays: tuple[int, ...] = ()
    if compare:
        own_digest = None
        if state and own == newest:
            own_digest = digest(state)
        source, strays = agreed(mesh.all_gather(own_digest), step)
    return source, precision, step, strays


def warning_of_strays(group: TrainingGroup) -> str:
    """Return the warning for a group in which a minority has had another state."""
    ranks = ", ".join(map(str, group.strays))
    return (
        f"after a rank was lost the state of rank {ranks} differs from the majority's: a flipped "
        f"bit, or a faulty device. All take over the state of rank {group.source}; training goes on"
    )


def rehearse(task: Task) -> None:
    """Run a rank's first operations once, on CPU, so that a spare starts without their delay.

    The first model, optimizer, process group and DDP wrapper of a process load code and take a
    second or two; the second ones take milliseconds. All of them are thrown away.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    # A function of its own: the wrapper must be gone before the group (see `apply_ddp`).
    _take_two_steps(task)
    abandon_groups()


def _take_two_steps(task: Task) -> None:
    """Train a model of the run for two steps in a group of this process alone."""
    alone = task.model()
    optimizer = task.optimizer(alone, None)
    data = task.data(torch.device("cpu"))
    model = DistributedDataParallel(alone)
    for _ in range(2):  # DDP regroups its buckets at the start of the second pass
        model(*data.train_batch(0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
