"""The dump of a model as plain data: modules, and tensors with their owners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from nanoray import __version__
from nanoray.checkpoint.state.optimizers import name_of
from nanoray.cli.forecast.job import assume_device
from nanoray.cli.forecast.parallelisms.registry import PARALLELISMS
from nanoray.cli.forecast.probe import Seen, WatchedPass, probe_on_fakes
from nanoray.config.layout import Coords, Layout
from nanoray.config.mesh import CUTS_MODEL
from nanoray.errors import ConfigError
from nanoray.lab.inspect.owners import Holder, holders_of
from nanoray.lab.inspect.target import InspectTarget
from nanoray.machine.script_errors import one_line
from nanoray.models.gpt import ModelShape
from nanoray.models.resnet import ResNetShape
from nanoray.parallel.pieces import Box, Piece


def dump(target: InspectTarget) -> dict[str, Any]:
    """Return a description of a model without computing anything. Raises ConfigError."""
    config = target.config
    layout = target.layout
    batch = target.batch
    notes = [*target.notes]

    # Shapes, connections and counts come from a pass on fake tensors, where one is possible.
    watched = None
    try:
        watched = probe_on_fakes(
            target.model, target.loss, *target.example, config.precision, backward=True
        )
    except Exception as error:
        # Any exception: a model that reads values, such as `.item()`, fails on fake tensors.
        # It may still run on real ones, so the dump goes on without what the pass gives.
        notes.append(
            "tree without shapes, connections and counts: a pass on fake tensors failed "
            f"({one_line(error)}); --verify has them"
        )

    unit, units_per_sample = _unit(target)

    # A script brings its optimizer as an object; any other model's is a name.
    optimizer: str = config.optimizer
    if target.optimizer:
        optimizer = name_of(target.optimizer)
    checkpoint = None
    if target.checkpoint:
        checkpoint = str(target.checkpoint)
    step = None
    if target.state:
        step = target.state.meta["step"]
    loss_reads = watched.loss_reads if watched else None
    dp_mode: str = config.dp_mode
    if layout.size_of("dp_cp") == 1:
        dp_mode = "one data rank"

    # The keys are the JSON's; scripts of users read them.
    return {
        "nanoray": __version__,
        "subject": target.title,
        "checkpoint": checkpoint,
        "step": step,
        "model": type(target.model).__name__,
        "shape": target.shape.to_dict(),
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "precision": config.precision,
        "why_precision": target.why,
        "device": config.device,
        "ranks": layout.world_size,
        "layout": layout.sizes(),
        "dp_mode": dp_mode,
        "optimizer": optimizer,
        "batch": {**batch._asdict(), "unit": unit, "units": batch.micro * units_per_sample},
        "modules": modules_of(target, watched),
        "loss_reads": loss_reads,
        "tensors": tensors_of(target, notes),
        "notes": notes,
        # Sections that a flag asks for, or that only a run has.
        "verify": None,
        "statistics": None,
    }


def _unit(target: InspectTarget) -> tuple[str, int]:
    """Return the unit in which a batch is counted, and the units of one sample."""
    if isinstance(target.shape, ModelShape):
        return "tokens", target.shape.block_size
    if isinstance(target.shape, ResNetShape):
        return "images", 1
    return "samples", 1


def modules_of(target: InspectTarget, watched: WatchedPass | None) -> list[dict[str, Any]]:
    """Return the modules in the model's order, each with what a pass recorded of it."""
    rows = []
    for name, module in target.model.named_modules():
        # Only a module's direct parameters, so that the rows add up to the model.
        own = dict(module.named_parameters(recurse=False))
        depth = 0  # of the model itself, whose name is empty
        if name:
            depth = 1 + name.count(".")
        row: dict[str, Any] = {
            "name": name,
            "type": type(module).__name__,
            "depth": depth,
            "layer": layer_of(name),
            "parameters": sum(p.numel() for p in own.values()),
            "weights": {key: [*p.shape] for key, p in own.items()},
        }
        # Without a pass the row has the same keys, with empty values.
        seen = watched.seen[name] if watched else Seen()
        rows.append(row | asdict(seen))
    return rows


def layer_of(name: str) -> str:
    """Return the layer of a list that a module belongs to, such as blocks.3; "" for any other."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return f"{first}.{number}" if number.isdigit() else ""


# Tensors and their owners.


def tensors_of(target: InspectTarget, notes: list[str]) -> list[dict[str, Any]]:
    """Return parameters and buffers with the ranks that hold and update each piece of them."""
    model = target.model
    layout = target.layout
    config = target.config
    device = assume_device(config)
    saved: Mapping[str, Tensor] = {}
    if target.state:
        saved = target.state.model

    # A layout that does not fit this model has no owners; the rest of the dump is still of use.
    try:
        holders = holders_of(config, layout, device.bucket_mb, target.at)
    except ConfigError as error:
        notes.append(f"without owners: {error}")
        holders = []

    # With duplicates: each name of a tied tensor gets its row, which names the first one.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    name_by_id: dict[int, str] = {}
    rows = []
    for name, tensor in (parameters | buffers).items():
        first_name = name_by_id.setdefault(id(tensor), name)
        is_tied = first_name != name
        row: dict[str, Any] = {
            "name": name,
            "kind": "parameter" if name in parameters else "buffer",
            "shape": [*tensor.shape],
            # The checkpoint's dtype, where there is one: the model may have been built in another.
            "dtype": str(saved.get(name, tensor).dtype).removeprefix("torch."),
            "numel": tensor.numel(),
            "trained": name in parameters and tensor.requires_grad,
            "tied_to": first_name if is_tied else None,
        }
        if is_tied:
            rows.append(row)
            continue

        # Buffers and frozen parameters are never cut.
        if holders and row["trained"]:
            row |= owners_of(name, holders, layout, config.dp_mode, device.mirrored)
        elif layout.world_size > 1:
            row["owner"] = "each rank has it whole"
        else:
            row["owner"] = "rank 0"
        rows.append(row)
    return rows


def owners_of(
    name: str, holders: list[Holder], layout: Layout, mode: str, mirrored: bool
) -> dict[str, Any]:
    """Return who holds and who updates each piece of a parameter, and a line on the axes that cut it."""
    held = {}
    updated = {}
    for rank, holder in enumerate(holders):
        if name in holder.held:
            held[rank] = holder.held[name]
        if name in holder.updated:
            updated[rank] = holder.updated[name]

    # One part of the line for each axis: first who has it at all, then how it is cut, then axes that
    # do not cut it.
    parts = []
    shape = "×".join(map(str, next(iter(held.values())).view))
    for parallelism in sorted(PARALLELISMS, key=lambda one: (not one.holders, not one.cut)):
        axis = parallelism.key
        if not parallelism.in_pass or layout.size_of(axis) == 1:
            continue
        dim = _cut_along(axis, held, holders) if parallelism.cut else None
        if parallelism.holders:
            places = {getattr(holders[rank].place, axis) for rank in held}
            parts.append(f"{axis}: {parallelism.holders(places)}")
        elif dim is None:
            parts.append(f"{axis}: whole on each")
        else:
            parts.append(f"{axis}: 1/{layout.size_of(axis)} along dim {dim} of {shape}")
    if layout.size_of("dp_cp") > 1:
        sharing = {
            "zero1": "weights and gradients whole, optimizer sliced",
            "zero2": "weights whole, gradients and optimizer sliced",
            "fsdp": "rows of weights, gradients and optimizer",
        }
        more = ""
        if layout.replicas > 1:
            more += f" over the {layout.shard_size} ranks of a group, the same in each of "
            more += f"{layout.replicas} groups"
        if mirrored:
            more += ", mirrored"
        axis = "dp_cp" if layout.cp > 1 else "dp"
        parts.append(f"{axis} {mode}: {sharing.get(mode, 'whole on each')}{more}")
    return {
        "owner": "; ".join(parts) or "rank 0",
        "held": _grouped(held),
        "updated": _grouped(updated),
    }


def _cut_along(axis: str, pieces: dict[int, Piece], holders: list[Holder]) -> int | None:
    """Return the dimension along which an axis cuts a parameter; None if it does not."""
    # Compare the pieces of two ranks that differ in this axis alone: what differs is its cut.
    for rank, piece in pieces.items():
        place = holders[rank].place
        for other_rank, other_piece in pieces.items():
            other_place = holders[other_rank].place
            if not _differ_only_in(axis, place, other_place):
                continue
            sides = zip(piece.boxes[0], other_piece.boxes[0], strict=True)
            for dim, (side, other_side) in enumerate(sides):
                if side != other_side:
                    return dim
            return None
    return None


def _differ_only_in(axis: str, place: Coords, other: Coords) -> bool:
    """Return whether two places differ in `axis` and in no other one."""
    differing = {name for name in place._fields if getattr(place, name) != getattr(other, name)}
    if axis == "ep":
        # Its ranks are data ranks, which also differ in what reads other samples.
        differing.intersection_update(CUTS_MODEL)
    return differing == {axis}


def _grouped(pieces: dict[int, Piece]) -> list[dict[str, Any]]:
    """Return the distinct pieces with their ranks.

    A piece is a list of boxes, each of (start, end) in every dimension of `view`.
    """
    ranks_by_boxes: dict[tuple[Box, ...], list[int]] = {}
    for rank, piece in pieces.items():
        ranks_by_boxes.setdefault(piece.boxes, []).append(rank)

    groups = []
    for boxes, ranks in ranks_by_boxes.items():
        # Lists, not tuples, so that the dump equals what its JSON contains.
        boxes_as_lists = [[[*side] for side in box] for box in boxes]
        view = [*pieces[ranks[0]].view]
        groups.append({"ranks": ranks, "boxes": boxes_as_lists, "view": view})
    return groups


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text: 0-3 6 8-9."""
    runs: list[list[int]] = []  # first and last rank of each
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])

    words = []
    for first, last in runs:
        if first == last:
            words.append(str(first))
        else:
            words.append(f"{first}-{last}")
    return " ".join(words)
