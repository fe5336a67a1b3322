"""Which part of a sharded state each rank has, and of which other rank it keeps a copy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from nanoray.checkpoint.state.rank_state import Holding, Share
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.config import Config
from nanoray.config.layout import mirrored
from nanoray.errors import ConfigError
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.pieces import Shard, whole_shards
from nanoray.parallel.plan import Plan
from nanoray.train.tasks import Task


def mirrored_rank(mesh: Mesh) -> tuple[int, int]:
    """Return how far away the rank is that keeps a copy of this one's share, and whose copy this keeps.

    On another node, where there is one. (all ranks)
    """
    return mirrored(mesh.layout, mesh.rank, mesh.all_gather(mesh.local_rank))


def share_of(task: Task, par: Plan, state: TrainState, config: Config, owner: int) -> Share | None:
    """Return this rank's share of a sharded state at step 0, with a copy of `owner`'s.

    Without mirrors there is no copy. None: the state is not sharded.
    """
    if not config.sharded:
        return None
    own = whole_shards(state.model) if par.shards is None else par.shards
    # A rank that has a state already keeps its optimizer until the new one is filled.
    of_whole_model = par.shards is None and not state.whole
    optimizer = task.optimizer(state.model, None if of_whole_model else own)
    mine = Share(
        Holding(own, optimizer, frozen=par.frozen),
        sharded=par.shards is not None,
        weights=par.weights,
        copies=par.copies,
    )
    if par.mirror_shards is not None:
        optimizer = task.optimizer(state.model, par.mirror_shards)
        mine.mirror = Holding(par.mirror_shards, optimizer, owner, par.mirror_frozen)
    return mine


def weights_of(par: Plan, model: nn.Module) -> Sequence[Shard]:
    """Return what this rank has of the weights."""
    return whole_shards(model) if par.weights is None else par.weights


def require_shards(par: Plan, mesh: Mesh, config: Config) -> None:
    """Raise ConfigError where a rank would have nothing of a script's small model. (all ranks)

    Raised on all of them: the others would wait for that rank.
    """
    if config.model != "own" or par.shards is None:
        return
    counts = mesh.all_gather(len(par.shards))
    if 0 in counts:
        raise ConfigError(
            f"dp_mode = {config.dp_mode} leaves rank {counts.index(0)} no element of this small "
            "model; use fewer ranks, or dp_mode ddp"
        )
