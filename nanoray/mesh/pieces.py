"""Which part of a parameter a rank holds: a Piece, written as boxes in the parameter's own
dimensions.

    whole            narrow(dim 1, 2, 2)        flat_range(3, 9)
    ■ ■ ■ ■          · · ■ ■                    · · · ■       the boxes [0:1, 3:4], [1:2, 0:4] and [2:3, 0:1]
    ■ ■ ■ ■          · · ■ ■                    ■ ■ ■ ■
    ■ ■ ■ ■          · · ■ ■                    ■ · · ·

Two cuts make every split: `narrow` (tensor parallelism) and `flat_range` (ZeRO, FSDP). Each rank
saves its pieces, and `fill` puts any other cut together from them: so any mesh loads what any other
mesh saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

Box = tuple[tuple[int, int], ...]  # (start, end) in each dimension


@dataclass(frozen=True)
class Piece:
    """A part of the parameter `name`; its elements are those of its boxes, one box after the other,
    row by row.

    `view` is the shape in which the parameter, whose own is `shape`, is cut. It is the same on
    every mesh.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    boxes: tuple[Box, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], view: Sequence[int] | None = None) -> Piece:
        view = tuple(shape if view is None else view)
        return cls(name, tuple(shape), view, (tuple((0, size) for size in view),))

    @property
    def all(self) -> Piece:
        """The whole parameter that this is a part of."""
        return Piece.whole(self.name, self.shape, self.view)

    @property
    def place(self) -> str:
        """The name, and which part of it: equal on the ranks that hold the same piece."""
        return self.name if self.is_whole else f"{self.name} {self.boxes}".replace(" ", "")

    @property
    def numel(self) -> int:
        return sum(_numel(box) for box in self.boxes)

    @property
    def is_whole(self) -> bool:
        return self.numel == prod(self.view)

    @property
    def span(self) -> tuple[int, int]:
        """Where a `flat_range` of a whole parameter begins and ends, in row-major order."""
        return self.span_in(self.all)

    def span_in(self, other: Piece) -> tuple[int, int]:
        """Where a `flat_range` of another piece, which has one box, begins and ends in it, in
        row-major order.
        """
        if not self.boxes:
            return 0, 0
        begin = 0
        for (first, last), (start, _) in zip(other.boxes[0], self.boxes[0], strict=True):
            begin = begin * (last - first) + start - first
        return begin, begin + self.numel

    def narrow(self, dim: int, start: int, size: int) -> Piece:
        """Return the part from `start` of length `size` along one dimension of a piece with one
        box.
        """
        (box,) = self.boxes
        begin = box[dim][0] + start
        return replace(self, boxes=((*box[:dim], (begin, begin + size), *box[dim + 1 :]),))

    def flat_range(self, begin: int, end: int) -> Piece:
        """Return elements `begin` to `end` - 1, in row-major order, of a piece with one box."""
        (box,) = self.boxes
        cuts = boxes_of_range([stop - start for start, stop in box], begin, end)
        at = [
            tuple((start + a, start + b) for (start, _), (a, b) in zip(box, cut, strict=True))
            for cut in cuts
        ]
        return replace(self, boxes=tuple(at))

    def take(self, full: Tensor) -> Tensor:
        """Return the piece's elements of the whole parameter, (numel,): a copy unless it is the
        whole one.
        """
        view = full.reshape(self.view)
        parts = [view[_slices(box)].reshape(-1) for box in self.boxes]
        return parts[0] if len(parts) == 1 else torch.cat([*parts, full.new_empty(0)])

    def to_json(self) -> dict[str, Any]:
        boxes = [[[*side] for side in box] for box in self.boxes]
        return {"shape": [*self.shape], "view": [*self.view], "boxes": boxes}

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> Piece:
        boxes = tuple(tuple((int(a), int(b)) for a, b in box) for box in data["boxes"])
        shape, view = (tuple(int(size) for size in data[key]) for key in ("shape", "view"))
        return cls(name, shape, view, boxes)


@dataclass
class Shard:
    """A piece of a parameter in this rank's memory, as the optimizer sees it."""

    piece: Piece
    # The elements, (numel,), or a whole parameter in its own shape; `.grad` is their gradient
    param: nn.Parameter
    decays: bool  # whether weight decay applies: the dimensions of the whole parameter decide
    # Whether this rank saves it and counts it in the norm: one of its holders does
    owner: bool = True
    holders: int = 1  # ranks that hold the same piece of a state that is cut
    # What the model of this rank has of the parameter; None: no more than the piece
    cut_from: Piece | None = None

    @property
    def origin(self) -> Piece:
        """What the model of this rank has of the parameter: equal on the ranks that share it."""
        return self.cut_from or self.piece

    @property
    def span(self) -> tuple[str, int, int]:
        """The place of `origin`, and where the elements begin and end in it."""
        return self.origin.place, *self.piece.span_in(self.origin)


def whole_shards(model: nn.Module) -> list[Shard]:
    """Return every trainable parameter, or all that a cut model has of it, as one shard, in the
    model's order.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [
        Shard(piece, trainable[name], trainable[name].dim() >= 2)
        for name, piece in whole_pieces(model).items()
    ]


def whole_pieces(model: nn.Module) -> dict[str, Piece]:
    """Return every trainable parameter as a whole piece. A model with a method `views` says how
    some are cut.

    Of a model that tensor parallelism has cut: the pieces that this rank has.
    """
    if is_cut(model):
        return dict(model.pieces)  # type: ignore[arg-type]
    views = getattr(model, "views", None)
    named = views() if callable(views) else {}
    return {
        n: Piece.whole(n, p.shape, named.get(n))
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def is_cut(model: nn.Module) -> bool:
    """Whether the model's parameters are pieces of larger ones (parallel/tp.py)."""
    return hasattr(model, "pieces")


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the boxes that make up elements `begin` to `end` - 1 of `shape`, row by row; at most
    2·dims - 1.
    """
    if begin >= end:
        return []
    if len(shape) <= 1:
        return [((begin, end),) if shape else ()]
    row = prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if first == last:
        inner = boxes_of_range(shape[1:], begin - first * row, end - first * row)
        return [((first, first + 1), *box) for box in inner]
    boxes: list[Box] = []
    if begin % row:
        boxes += [((first, first + 1), *box) for box in boxes_of_range(shape[1:], begin % row, row)]
        first += 1
    if first < end // row:
        boxes.append(((first, end // row), *((0, size) for size in shape[1:])))
    if end % row:
        boxes += [((last, last + 1), *box) for box in boxes_of_range(shape[1:], 0, end % row)]
    return boxes


def overlaps(one: Piece, other: Piece) -> bool:
    """Whether two pieces of one parameter have an element in common."""
    return any(_common(a, b) is not None for a in one.boxes for b in other.boxes)


def fill(piece: Piece, saved: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    """Put a piece together from pieces with their elements, (numel,), each; return its elements,
    (numel,).

    The saved pieces must not overlap. Raises ValueError when they lack elements or are cut from
    another shape.
    """
    if any(other.view != piece.view for other, _ in saved):
        raise ValueError(f"{piece.name} of shape {piece.view} is not of the shape that was saved")
    out = torch.empty(piece.numel, dtype=saved[0][1].dtype if saved else torch.float32)
    at = found = 0
    for box in piece.boxes:
        target = out[at : at + _numel(box)].view([stop - start for start, stop in box])
        at += _numel(box)
        for other, elements in saved:
            found += _copy_common(target, box, other, elements)
    if found != piece.numel:
        raise ValueError(f"{found} of {piece.numel} elements of {piece.name} were saved")
    return out


def _copy_common(target: Tensor, box: Box, other: Piece, elements: Tensor) -> int:
    """Copy into `target`, which holds `box`, what a saved piece has of it; return the number of
    elements.
    """
    at = copied = 0
    for theirs in other.boxes:
        source = elements[at : at + _numel(theirs)].view([stop - start for start, stop in theirs])
        at += _numel(theirs)
        if (common := _common(box, theirs)) is not None:
            target[_slices(common, box)] = source[_slices(common, theirs)]
            copied += _numel(common)
    return copied


def _common(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(a < b for a, b in common) else None


def _slices(box: Box, inside: Box | None = None) -> tuple[slice, ...]:
    """Return a box as an index; with `inside`, relative to where that box begins."""
    starts = [start for start, _ in inside] if inside is not None else [0] * len(box)
    return tuple(slice(a - at, b - at) for (a, b), at in zip(box, starts, strict=True))


def _numel(box: Box) -> int:
    return prod(stop - start for start, stop in box)
