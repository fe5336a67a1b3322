"""The ranks that hold and that update each piece of a parameter.

The same functions cut the model as in a run, on the meta device, for one rank after another.
Nothing communicates and no memory is taken.

    held      the weights of a rank: all of them, a stage's (pp), some heads and hidden units (tp),
              experts (ep), or rows (fsdp)
    updated   those that its optimizer updates: all, or a slice of each gradient bucket (zero1, zero2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from nanoray.cli.forecast.parallelisms.record import axis_of
from nanoray.cli.forecast.parallelisms.registry import PARALLELISMS
from nanoray.config import Config
from nanoray.config.layout import Coords, Layout
from nanoray.config.mesh import CUTS_MODEL
from nanoray.errors import ConfigError
from nanoray.models.build import build_model
from nanoray.parallel import ep
from nanoray.parallel.axis import Axis
from nanoray.parallel.buckets import Buckets
from nanoray.parallel.fsdp import rows_of
from nanoray.parallel.pieces import Piece, whole_pieces

MOST_RANKS = 128  # whose shards are laid out one by one


@dataclass(frozen=True)
class Holder:
    """A rank's share of the model, by the names of the parameters."""

    place: Coords
    held: dict[str, Piece]
    updated: dict[str, Piece]


def rank_model(config: Config, classes: int, dtype: torch.dtype, place: Coords) -> nn.Module:
    """Return the model of the rank at `place` on the meta device, before data parallelism cuts it."""
    # In the order in which a run cuts (parallel/plan.py)
    with torch.device("meta"):
        model = build_model(config, classes).to(dtype)
        for parallelism in PARALLELISMS:
            if parallelism.cut and getattr(config, parallelism.key) > 1:
                parallelism.cut(model, config, place)
    return model


def holders_of(
    config: Config, layout: Layout, bucket_mb: float, model_at: Callable[[Coords], nn.Module]
) -> list[Holder]:
    """Return the holder of each rank. `model_at` makes the model of a place, as `rank_model` does.

    Raises ConfigError for too many ranks.
    """
    if layout.world_size > MOST_RANKS:
        raise ConfigError(
            f"world_size = {layout.world_size}: the shards of at most {MOST_RANKS} ranks are laid "
            "out one by one; lower --world_size, or see `python -m nanoray.launch --dry_run --world_size N` "
            "for bytes and memory at any scale"
        )
    # Data replicas and parts of sequences have the same model, so each place of the other axes is
    # cut once.
    models: dict[tuple[int, ...], nn.Module] = {}
    # The ranks that cut one copy of the state, and each rank's place among them
    index_of: dict[int, int] = {}
    for group in layout.groups("shard"):
        for index, rank in enumerate(group):
            index_of[rank] = index

    holders = []
    for rank in range(layout.world_size):
        place = layout.coords(rank)
        key = tuple(getattr(place, axis) for axis in CUTS_MODEL)
        if key not in models:
            models[key] = model_at(place)
        model = models[key]
        held = whole_pieces(model)
        updated = held
        shares = layout.shard_size > 1
        if shares and config.dp_mode == "fsdp":
            held = _rows(model, held, layout.shard_size, index_of[rank])
            updated = held
        elif shares and config.dp_mode in ("zero1", "zero2"):
            data = axis_of("shard", layout.shard_size, index_of[rank])
            updated = _slices(model, config, layout, place, data, bucket_mb)
        holders.append(Holder(place, held, updated))
    return holders


def _rows(model: nn.Module, whole: dict[str, Piece], ranks: int, index: int) -> dict[str, Piece]:
    """Return the rows that one of `ranks` holds with fsdp; short tensors leave some ranks none."""
    pieces = {}
    for name, p in model.named_parameters():
        if name in whole:
            piece = rows_of(whole[name], p.shape[0], ranks, index)
            # A tensor with fewer rows than ranks leaves the last ranks without a piece.
            if piece.numel:
                pieces[name] = piece
    return pieces


def _slices(
    model: nn.Module, config: Config, layout: Layout, place: Coords, data: Axis, bucket_mb: float
) -> dict[str, Piece]:
    """Return what the rank at `place` updates with zero1 or zero2, as one of the ranks of `data`."""
    buckets: Buckets | ep.ExpertParallel
    if layout.ep > 1:
        # Experts have fewer replicas, so their buckets are cut over an axis of their own.
        replicas = axis_of("edp", layout.dp // layout.ep, place.dp // layout.ep)
        buckets = ep.ExpertParallel(model, data, replicas, config.dp_mode, bucket_mb)
    else:
        buckets = Buckets(model, data, config.dp_mode, bucket_mb)
    return {shard.piece.name: shard.piece for shard in buckets.shards or ()}
