"""The outer loop: train in a group of ranks; after the loss of a rank form a new one, and go on.

    survivor   collective error ─► leave the groups ─► wait for the driver ─┐
    newcomer   process starts ─► imports torch ─────────────────────────────┤
                                                                            │
                          new engine ◄─ handover ◄─ furthest ◄─ meet ◄──────┘

The ranks of the new process group bring all of them to the state of the rank with the most
completed steps (handover.py): nothing is read from disk and no completed step is repeated.
Survivors can be one step apart, because the last all-reduce may have finished on some of them only.
All ranks repeat the interrupted step with the same data and dropout, so the losses equal those of a
run without the fault.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from nanoray.base.points import reached
from nanoray.checkpoint.run import RunSpec
from nanoray.config import Config
from nanoray.errors import ConfigError, NanorayError, StateDiverged, StateLost
from nanoray.faults.cause import is_collective_error
from nanoray.mesh.mesh import Mesh, abandon_groups
from nanoray.mesh.rendezvous import Rendezvous
from nanoray.parallel import cp
from nanoray.state.train_state import TrainState
from nanoray.train.engine import Engine, Regroup
from nanoray.train.guard.replicas import agreed, digest
from nanoray.train.optim.groups import make_optimizer
from nanoray.train.tasks import task_of

log = logging.getLogger("nanoray.rank")
# Takes the error; returns once the lost rank has been replaced
Rejoin = Callable[[str], tuple[RunSpec, Rendezvous]]


@dataclass(frozen=True)
class TrainingGroup:
    """The ranks that train now, and the spec that they agreed on."""

    spec: RunSpec
    mesh: Mesh
    # The rank that sends its state to the others; None at the start of a run
    source: int | None = None
    # Ranks whose state differed from that of the majority, whose `source` is one
    strays: tuple[int, ...] = ()


def train_in_groups(
    first: TrainingGroup,
    state: TrainState,
    build: Callable[[TrainingGroup], Engine],
    meet: Callable[[RunSpec, Rendezvous], Mesh],
    rejoin: Rejoin | None,
) -> dict[str, Any]:
    """Run the loop in one group after another, and return the outcome of the run. (all ranks)

    `build` makes an engine for a group and fills `state`; `meet` joins the next group; `rejoin`
    waits for the driver's orders. A rank may also be lost while the others meet or build; it is
    replaced in the same way.
    """
    group, orders = first, None
    while True:
        engine = None
        try:
            if orders:
                group = meet_again(orders, group.spec, state, meet)
            engine = build(group)
            reached("built")
            outcome = engine.fit()
            reached("last")
            group.mesh.barrier()  # (all ranks) no rank leaves while another one needs it
            engine.par.close()
            return outcome
        except Regroup:
            assert rejoin is not None
            lost = "the driver ordered a new group"
        except torch.OutOfMemoryError as error:  # on a GPU: a retry would fail in the same way
            raise ConfigError(
                f"out of GPU memory ({str(error).splitlines()[0]}); halve --micro_batch_size: "
                "accumulation doubles and the result stays the same"
            ) from error
        except Exception as error:
            # A failed meeting does not end a rank that holds the state: a newcomer may be the unfit
            # one. A state that is lost, or differs, is so on all ranks: they end, and start again
            # from the newest checkpoint.
            state_is_gone = isinstance(error, (StateLost, StateDiverged))
            met = engine is not None
            unmet = isinstance(error, NanorayError) and not met and not state_is_gone
            peer_lost = is_collective_error(error) or unmet
            if rejoin is None or not state.whole or not peer_lost:
                raise
            lost = f"{type(error).__name__}: {error}"

        # Outside the except block, because the error's frames would keep the broken wrapper alive.
        log.warning("leaving the group after step %d: %s", state.step, lost)
        if engine:
            engine.writer.hold()
            for check in engine.checks:
                check.forget()
            engine.par.undo()
        del engine
        reached("leave")
        leave(group, state)
        reached("wait")
        orders = rejoin(lost)


def leave(group: TrainingGroup, state: TrainState) -> None:
    """Release the broken group; weights, optimizer and data cursor stay as they are.

    So do gradients with which the step in progress can be finished.
    """
    if not state.can_finish:
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)

    # A model that was cut for the group refers to it.
    config = group.spec.config
    if config.model_parts > 1 or config.dp_mode == "fsdp":
        state.leave_model()
    else:
        cp.release(state.model)

    # Frees the DDP wrapper with its hooks on the parameters and its reference to the group
    gc.collect()
    group.mesh.leave()
    abandon_groups()  # of a join that failed


def meet_again(
    orders: tuple[RunSpec, Rendezvous],
    before: RunSpec,
    state: TrainState,
    meet: Callable[[RunSpec, Rendezvous], Mesh],
) -> TrainingGroup:
    """Join the driver's new attempt, and find the rank with the most completed steps. (all ranks)"""
    spec, rendezvous = orders  # the driver's configuration, which all ranks compare in `meet`
    mesh = meet(spec, rendezvous)
    spec = replace(spec, config=before.config, resume=before.resume)
    source, _, _, strays = furthest(mesh, state, before.config.precision, compares(spec.config))
    return TrainingGroup(spec, mesh, source, strays)


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
        own = (state.step, precision, *state.rounds)
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


def rehearse(spec: RunSpec) -> None:
    """Run a rank's first operations once, on CPU, so that a spare starts without their delay.

    The first model, optimizer, process group and DDP wrapper of a process load code and take a
    second or two; the second ones take milliseconds. All of them are thrown away.
    """
    torch.set_num_threads(1)
    if spec.config.model == "own":
        return  # the user's script makes the model
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    # A function of its own: the wrapper must be gone before the group (see `apply_ddp`).
    _take_two_steps(spec)
    abandon_groups()


def _take_two_steps(spec: RunSpec) -> None:
    """Train a model of the run for two steps in a group of this process alone."""
    task = task_of(spec)
    alone = task.model()
    optimizer = make_optimizer(alone, spec.config)
    data = task.data(torch.device("cpu"))
    model = DistributedDataParallel(alone)
    for _ in range(2):  # DDP regroups its buckets at the start of the second pass
        model(*data.train_batch(0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
