"""The dump of a model as plain data: modules, tensors with their owners, layers with their costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from nanoray import __version__
from nanoray.errors import ConfigError
from nanoray.forecast.dry_run import sizes_of_stage
from nanoray.forecast.own_models import first_line
from nanoray.forecast.owners import Holder, holders_of
from nanoray.forecast.rank_memory import assume_device, memory_lines, rank_memory
from nanoray.forecast.trial import Seen, Trial, trial_on_fakes
from nanoray.inspect.layers import layer_of, layers_of, totals
from nanoray.inspect.subject import Subject
from nanoray.mesh.layout import Layout
from nanoray.mesh.pieces import Box, Piece
from nanoray.models import costs, resnet_costs
from nanoray.models.gpt import ModelShape
from nanoray.models.resnet import ResNetShape

SHAPELESS = "tree without shapes, connections and counts"


def dump(subject: Subject) -> dict[str, Any]:
    """Return a description of a model without computing anything. Raises ConfigError."""
    config = subject.config
    layout = subject.layout
    batch = subject.batch
    notes = [*subject.notes]

    # Shapes, connections and counts come from a trial on fake tensors, where one is possible.
    trial = None
    if subject.example is None:
        notes.append(f"{SHAPELESS}: the inputs of the model are not known")
    else:
        try:
            trial = trial_on_fakes(
                subject.model, subject.loss, *subject.example, config.precision, backward=True
            )
        except Exception as error:
            notes.append(
                f"{SHAPELESS}: a trial on fake tensors failed ({first_line(error)}); --verify has "
                "them"
            )

    modules = modules_of(subject, trial)
    layers = layers_of(subject, modules)
    if subject.shape.to_dict() == {}:
        how = "counted in a trial on fake tensors" if trial else "unknown"
        notes.append(
            f"a script's own model has no formula: FLOPs and activations of its layers are {how}"
        )
    unit, units_per_sample = _unit(subject)
    optimizer: str = config.optimizer
    if subject.optimizer:
        optimizer = type(subject.optimizer).__name__
    return {
        "nanoray": __version__,
        "subject": subject.title,
        "checkpoint": str(subject.checkpoint) if subject.checkpoint else None,
        "step": subject.state.meta["step"] if subject.state else None,
        "model": type(subject.model).__name__,
        "shape": subject.shape.to_dict(),
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "precision": config.precision,
        "why_precision": subject.why,
        "device": config.device,
        "ranks": layout.world_size,
        "layout": {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "ep": layout.ep},
        "dp_mode": config.dp_mode if layout.dp > 1 else "one data rank",
        "optimizer": optimizer,
        "batch": {**batch._asdict(), "unit": unit, "units": batch.micro * units_per_sample},
        "flops_by_formula": _flops(subject),
        "memory": _memory(subject),
        "modules": modules,
        "loss_reads": trial.loss_reads if trial else None,
        "unused": trial.unused if trial else None,
        "tensors": tensors_of(subject, notes),
        "layers": [asdict(layer) for layer in layers],
        "totals": totals(layers),
        "notes": notes,
    }


def _unit(subject: Subject) -> tuple[str, int]:
    """Return the unit in which a batch is counted, and how many of it a sample has."""
    if isinstance(subject.shape, ModelShape):
        return "tokens", subject.shape.block_size
    if isinstance(subject.shape, ResNetShape):
        return "images", 1
    return "samples", 1


def _flops(subject: Subject) -> int | None:
    """Return the FLOPs of forward and backward of a micro batch, by the formula of MFU."""
    if isinstance(subject.shape, ModelShape):
        return subject.batch.micro * subject.shape.block_size * costs.flops_per_token(subject.shape)
    if isinstance(subject.shape, ResNetShape):
        return subject.batch.micro * resnet_costs.flops_per_image(subject.shape)
    return None


def _memory(subject: Subject) -> list[str]:
    """Return the lines of a dry run on the memory of a rank, one for each stage."""
    config = subject.config
    batch = subject.batch
    shape = subject.shape
    if not isinstance(shape, ModelShape | ResNetShape):
        return []
    device = assume_device(config)
    stages = []
    for stage in range(config.pp):
        sizes = sizes_of_stage(config, subject.dataset.vocab_size, stage)
        stages.append(rank_memory(config, shape, batch, device, sizes, stage))
    lines = memory_lines(config, batch, device.precision, stages)
    return [line.removeprefix("memory").lstrip() for line in lines]


def modules_of(subject: Subject, trial: Trial | None) -> list[dict[str, Any]]:
    """Return the modules in the model's order, with the records of a trial of each."""
    rows = []
    for name, module in subject.model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        rows.append(
            {
                "name": name,
                "type": type(module).__name__,
                "depth": name.count(".") + bool(name),
                "layer": layer_of(name, subject.model, subject.shape),
                "parameters": sum(p.numel() for p in own.values()),
                "weights": {key: [*p.shape] for key, p in own.items()},
                **asdict(trial.seen[name] if trial else Seen()),
            }
        )
    return rows


# Tensors and their owners.


def tensors_of(subject: Subject, notes: list[str]) -> list[dict[str, Any]]:
    """Return parameters and buffers with the ranks that hold and update each piece of them."""
    model, layout, config = subject.model, subject.layout, subject.config
    saved = subject.state.model if subject.state else {}
    device = assume_device(config)
    try:
        holders = holders_of(config, layout, device.bucket_mb, subject.at)
    except ConfigError as error:
        notes.append(f"without owners: {error}")
        holders = []
    first: dict[int, str] = {}
    rows = []
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        tied = first.setdefault(id(tensor), name)
        row: dict[str, Any] = {
            "name": name,
            "kind": "parameter" if name in trained else "buffer",
            "shape": [*tensor.shape],
            "dtype": str(saved.get(name, tensor).dtype).removeprefix("torch."),
            "numel": tensor.numel(),
            "trained": trained.get(name, False),
            "tied_to": tied if tied != name else None,
        }
        if holders and row["trained"] and tied == name:
            row |= owners_of(name, holders, layout, config.dp_mode, device.mirrored)
        elif tied == name:
            row["owner"] = "each rank has it whole" if layout.world_size > 1 else "rank 0"
        rows.append(row)
    return rows


def owners_of(
    name: str, holders: list[Holder], layout: Layout, mode: str, mirrored: bool
) -> dict[str, Any]:
    """Return the ranks that hold and that update each piece of a parameter, and a line that says by
    which axis.
    """
    held = {}
    updated = {}
    for rank, holder in enumerate(holders):
        if name in holder.held:
            held[rank] = holder.held[name]
        if name in holder.updated:
            updated[rank] = holder.updated[name]

    parts = []
    if layout.pp > 1:
        stages = sorted({holders[rank].place.pp for rank in held})
        noun = "stages" if len(stages) > 1 else "stage"
        parts.append(f"pp: {noun} {' and '.join(map(str, stages))}")
    shape = "×".join(map(str, next(iter(held.values())).view))
    for axis in ("tp", "ep"):
        size = getattr(layout, axis)
        if size == 1:
            continue
        dim = _cut_along(axis, held, holders)
        if dim is None:
            parts.append(f"{axis}: whole on each")
        else:
            parts.append(f"{axis}: 1/{size} along dim {dim} of {shape}")
    if layout.dp > 1:
        sharing = {
            "zero1": "weights and gradients whole, optimizer sliced",
            "zero2": "weights whole, gradients and optimizer sliced",
            "fsdp": "rows of weights, gradients and optimizer",
        }
        mirror = ", mirrored" if mirrored else ""
        parts.append(f"dp {mode}: {sharing.get(mode, 'whole on each')}{mirror}")
    return {
        "owner": "; ".join(parts) or "rank 0",
        "held": _grouped(held),
        "updated": _grouped(updated),
    }


def _cut_along(axis: str, pieces: dict[int, Piece], holders: list[Holder]) -> int | None:
    """Return the dimension along which an axis cuts a parameter; None if it does not.

    Found by two ranks that differ in this axis alone.
    """
    for rank, piece in pieces.items():
        place = holders[rank].place
        for other, theirs in pieces.items():
            at = holders[other].place
            same = all(getattr(place, a) == getattr(at, a) for a in ("tp", "ep", "pp") if a != axis)
            if (
                same
                and getattr(at, axis) != getattr(place, axis)
                and (axis == "ep" or at.dp == place.dp)
            ):
                sides = enumerate(zip(piece.boxes[0], theirs.boxes[0], strict=True))
                return next((dim for dim, (a, b) in sides if a != b), None)
    return None


def _grouped(pieces: dict[int, Piece]) -> list[dict[str, Any]]:
    """Return the distinct pieces with their ranks.

    A piece is a list of boxes, each of (start, end) in every dimension of `view`.
    """
    ranks: dict[tuple[Box, ...], list[int]] = {}
    for rank, piece in pieces.items():
        ranks.setdefault(piece.boxes, []).append(rank)
    view = [*next(iter(pieces.values())).view] if pieces else []
    return [
        {"ranks": of, "boxes": [[[*side] for side in box] for box in boxes], "view": view}
        for boxes, of in ranks.items()
    ]


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text: 0-3 6 8-9."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
