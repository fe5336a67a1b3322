"""Read a checkpoint into the state of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoray.checkpoint import files
from nanoray.checkpoint.find import check_shape
from nanoray.mesh.mesh import Mesh
from nanoray.parallel.plan import Plan
from nanoray.run import RunSpec
from nanoray.state import StateDict, TrainState, set_rng_state


def read_checkpoint(
    path: str,
    spec: RunSpec,
    mesh: Mesh,
    state: TrainState,
    model_shape: dict[str, Any],
    par: Plan,
    note: Callable[[str], None],
) -> StateDict:
    """Read what this rank's `state` needs of a checkpoint, and restore this rank's random
    generators. (all ranks)

    Notes what differs from this run. Raises CheckpointError when it is damaged, or of a model of
    another shape.
    """
    saved = files.load(Path(path), state.pieces if state.sharded else None, state.weight_pieces)
    check_shape(saved, model_shape, path)
    meta = saved.meta
    note(f"resume  from step {meta['step']} of {path}")
    if meta["world_size"] == mesh.world_size:
        set_rng_state(saved.rng[mesh.rank], mesh.device)
    else:
        note(
            f"resume  written by {meta['world_size']} ranks, now {mesh.world_size}: same batches, "
            "but sums in "
            "another order and new dropout masks, so losses agree closely and not bit for bit"
        )
    if not state.load_memory(saved, mesh.rank, mesh.world_size, par.forget_memory):
        note(
            f"resume  what compressed gradients of {meta['world_size']} ranks had left to send "
            "does not fit "
            f"{mesh.world_size} with grad_compress = {spec.config.grad_compress}: it begins anew; "
            "losses agree closely"
        )
    for axis in ("tp", "pp", "ep"):
        if (before := meta.get("config", {}).get(axis, 1)) != (now_ := getattr(spec.config, axis)):
            note(f"resume  written with {axis} {before}, now {now_}: the same model, cut otherwise")
    if meta["dataset"]["tokens_sha256"] != spec.dataset.tokens_sha256:
        note(f"resume  the dataset differs from the checkpoint's ({meta['dataset']['name']})")
    return saved
