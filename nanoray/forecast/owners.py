"""Which rank holds what of each parameter, and which updates it: the cuts of a run, made on the
meta device.

Nothing communicates and no memory is taken: the same functions cut the model as in a run, for one
rank after another.

    held      the weights that a rank has: all of them, a stage's (pp), some heads and hidden units (tp), experts
              (ep), or rows (fsdp)
    updated   of these, what its optimizer updates: all, or a slice of each gradient bucket (zero1, zero2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.mesh.axis import Axis
from nanoray.mesh.layout import Coords, Layout
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Piece, whole_pieces
from nanoray.models.build import build_model
from nanoray.parallel import ep, tp
from nanoray.parallel.buckets import Buckets
from nanoray.parallel.fsdp import rows_of
from nanoray.parallel.pp import split

MOST_RANKS = 128  # whose shards are laid out one by one


@dataclass(frozen=True)
class Holder:
    """A rank's share of the model, by the names of the parameters."""

    place: Coords
    held: dict[str, Piece]
    updated: dict[str, Piece]


def rank_model(config: Config, classes: int, dtype: torch.dtype, place: Coords) -> nn.Module:
    """Return the model as the rank at `place` has it before data parallelism shares it, on the meta
    device.
    """
    with torch.device("meta"):
        model = build_model(config, classes).to(dtype)
        for cut, name, size, index in (
            (tp.cut, "tp", config.tp, place.tp),
            (ep.cut, "ep", config.ep, place.ep),
        ):
            if size > 1:
                cut(model, _axis(name, size, index))
        if config.pp > 1:
            split(model, place.pp, config.pp, config.chunks)
    return model


def holders_of(
    config: Config, layout: Layout, bucket_mb: float, model_at: Callable[[Coords], nn.Module]
) -> list[Holder]:
    """Return what each rank has, by rank; `model_at` makes the model of a place, as `rank_model`
    does.

    Raises ConfigError for too many ranks.
    """
    if layout.world_size > MOST_RANKS:
        raise ConfigError(
            f"world_size = {layout.world_size}: the shards of at most {MOST_RANKS} ranks are laid "
            "out one by one; "
            "lower --world_size, or see `nanoray launch --dry_run --world_size N` for bytes and "
            "memory at any scale"
        )
    places = [layout.coords(rank) for rank in range(layout.world_size)]
    models: dict[tuple[int, int, int], nn.Module] = {}
    found = []
    for place in places:
        key = place.tp, place.pp, place.ep
        if key not in models:
            models[key] = model_at(place)
        held = whole_pieces(models[key])
        if layout.dp == 1 or config.dp_mode in ("ddp", "ddp_by_hand"):
            found.append(Holder(place, held, held))
        elif config.dp_mode == "fsdp":
            sizes = {name: p.shape[0] for name, p in models[key].named_parameters()}
            rows = {
                name: rows_of(piece, sizes[name], layout.dp, place.dp)
                for name, piece in held.items()
            }
            rows = {name: piece for name, piece in rows.items() if piece.numel}
            found.append(Holder(place, rows, rows))
        else:
            found.append(
                Holder(place, held, _slices(models[key], config, layout, place, bucket_mb))
            )
    return found


def _slices(
    model: nn.Module, config: Config, layout: Layout, place: Coords, bucket_mb: float
) -> dict[str, Piece]:
    """Return what the rank at `place` updates with zero1 or zero2."""
    data = _axis("dp", layout.dp, place.dp)
    buckets: Buckets | ep.ExpertParallel
    if layout.ep > 1:
        replicas = _axis("edp", layout.dp // layout.ep, place.dp // layout.ep)
        buckets = ep.ExpertParallel(model, data, replicas, config.dp_mode, bucket_mb)
    else:
        buckets = Buckets(model, data, config.dp_mode, bucket_mb)
    return {shard.piece.name: shard.piece for shard in buckets.shards or ()}


def _axis(name: str, size: int, index: int) -> Axis:
    """Return an axis of ranks that are not there."""
    return Axis(
        name,
        tuple(range(size)),
        index,
        None,
        Mesh(index, size, 0, torch.device("meta"), "none", "dry run"),
    )
