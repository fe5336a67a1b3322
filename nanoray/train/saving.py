"""Write the state of a run as a checkpoint, and read it back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from nanoray.checkpoint import files
from nanoray.checkpoint.resume import check_shape
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.checkpoint.writer import CheckpointWriter
from nanoray.config import Config
from nanoray.config.layout import DIVISIONS
from nanoray.data.dataset import DatasetInfo
from nanoray.data.seeding import rng_state, set_rng_state
from nanoray.errors import CheckpointError, TrainingDiverged
from nanoray.models.build import shape_of
from nanoray.models.workload import Workload
from nanoray.parallel.mesh import Mesh


def save_checkpoint(
    spec: RunSpec,
    mesh: Mesh,
    state: TrainState,
    workload: Workload,
    writer: CheckpointWriter,
    final: bool,
) -> float:
    """Save a checkpoint of the newest step; return the seconds that training waited. (all ranks)

    With checkpoint_mode async the write may end later; with `final` it has ended when this returns.
    A failed write (a full disk) gives a warning; the third failure in a row, or a failed final
    write, ends the run. Raises TrainingDiverged when the weights are not finite.
    """
    start = time.perf_counter()
    states_of_ranks = gather_rank_states(mesh, state, workload)
    require_finite_weights(mesh, state)

    # Rank 0 writes a replicated state; of a sharded one every rank writes its part.
    saved = None
    if states_of_ranks is not None or state.sharded:
        saved = pack_for_checkpoint(state, mesh)
        saved.rng = states_of_ranks or []
        saved.meta["world_size"] = mesh.world_size
        saved.meta["attempt"] = spec.attempt
        saved.meta["config"] = spec.config.model_dump()
        saved.meta |= workload.meta

    # The copy is made beside the next forward and backward, if nothing but the update changes what
    # is saved. A script's code may.
    rests = spec.config.model != "own"
    writer.save(mesh, saved, final, rests)

    # Copied, perhaps not yet on disk; the final save waits for the disk.
    state.session.saved = state.step
    return writer.paused(state.step, time.perf_counter() - start)


def gather_rank_states(
    mesh: Mesh, state: TrainState, workload: Workload
) -> list[dict[str, Tensor]] | None:
    """Return the part of the state that each rank alone has, on rank 0; elsewhere None. (all ranks)

    It consists of random generators, and the state of a script's data.
    """
    return mesh.gather(rng_state(mesh.device) | workload.loader(state.samples))


def require_finite_weights(mesh: Mesh, state: TrainState) -> None:
    """Raise TrainingDiverged on all ranks when some weight is not finite. (all ranks)"""
    norm = get_total_norm([shard.param for shard in state.shards])
    if state.sharded:
        # A rank sees its own shards only, and all must raise together.
        norm = mesh.all_reduce(norm, "finite")
    if not torch.isfinite(norm):
        raise TrainingDiverged(
            f"after step {state.step} the weights are not finite; lower lr, or set grad_clip. The "
            "checkpoint before this step is good"
        )


def pack_for_checkpoint(state: TrainState, mesh: Mesh) -> StateDict:
    """Return the tensors that this rank writes: all of the state, or its part of it."""
    if state.sharded:
        return state.pack_own(first=mesh.rank == 0)
    return state.pack()


def read_checkpoint(
    path: str,
    config: Config,
    dataset: DatasetInfo,
    mesh: Mesh,
    state: TrainState,
    note: Callable[[str], None],
) -> StateDict:
    """Read this rank's part of a checkpoint, and restore its random generators. (all ranks)

    `state` names the pieces to read, and is not changed. `note` shows a line on each difference from
    this run. Raises CheckpointError when the checkpoint is damaged, or of a model of another shape.
    """
    saved = files.load(Path(path), state.pieces, state.weight_pieces)
    check_shape(saved, shape_of(config, dataset.vocab_size).to_dict(), path)
    for name in state.weight_pieces or ():
        if name not in saved.model:
            raise CheckpointError(
                f"the checkpoint {path} lacks {name}; resume with the model that wrote it"
            )
    meta = saved.meta
    note(f"resume  from step {meta['step']} of {path}")

    # Each rank continues its own generators, which only an equal number of ranks can.
    if meta["world_size"] == mesh.world_size:
        set_rng_state(saved.rng[mesh.rank], mesh.device)
    else:
        note(
            f"resume  written by {meta['world_size']} ranks, now {mesh.world_size}: same batches, "
            "but sums in another order and new dropout masks, so losses agree closely and not bit "
            "for bit"
        )

    for axis in DIVISIONS:
        before = meta.get("config", {}).get(axis, 1)
        size = getattr(config, axis)
        if before != size:
            note(f"resume  written with {axis} {before}, now {size}: the same model, cut otherwise")
    if meta["dataset"]["tokens_sha256"] != dataset.tokens_sha256:
        note(f"resume  the dataset differs from the checkpoint's ({meta['dataset']['name']})")
    return saved
