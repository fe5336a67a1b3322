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
    """A part of the parameter `name`: the elements of its boxes, one box after the other, by rows.

    `view` is the shape in which the parameter is cut; its own is `shape`. Both are the same on
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

    def span_in(self, other: Piece) -> tuple[int, int]:
        """Where a `flat_range` of another piece begins and ends in it, in row-major order.

        The other piece has one box.
        """
        if not self.boxes:
            return 0, 0

        # The index of this piece's first element, by Horner's rule over the dimensions.
        begin = 0
        for (first, last), (start, _) in zip(other.boxes[0], self.boxes[0], strict=True):
            begin = begin * (last - first) + start - first
        return begin, begin + self.numel

    def narrow(self, dim: int, start: int, size: int) -> Piece:
        """Return the part from `start` of length `size` along one dimension.

        For a piece with one box.
        """
        (box,) = self.boxes
        sides = list(box)
        begin = box[dim][0] + start
        sides[dim] = (begin, begin + size)
        return replace(self, boxes=(tuple(sides),))

    def flat_range(self, begin: int, end: int) -> Piece:
        """Return elements `begin` to `end` - 1, in row-major order, of a piece with one box."""
        (box,) = self.boxes
        shape = [stop - start for start, stop in box]

        # `boxes_of_range` counts from 0: move its boxes to where this box begins.
        moved = []
        for part in boxes_of_range(shape, begin, end):
            sides = []
            for (origin, _), (start, stop) in zip(box, part, strict=True):
                sides.append((origin + start, origin + stop))
            moved.append(tuple(sides))
        return replace(self, boxes=tuple(moved))

    def take(self, full: Tensor) -> Tensor:
        """Return the piece's elements of the whole parameter, (numel,).

        A copy, unless the piece is contiguous there.
        """
        # Box after box: the order in which the elements lie in a shard.
        view = full.reshape(self.view)
        parts = [view[_slices(box)].reshape(-1) for box in self.boxes]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([*parts, full.new_empty(0)])  # a piece may have no box

    def to_json(self) -> dict[str, Any]:
        boxes = [[[*side] for side in box] for box in self.boxes]
        return {"shape": [*self.shape], "view": [*self.view], "boxes": boxes}

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> Piece:
        shape = tuple(int(size) for size in data["shape"])
        view = tuple(int(size) for size in data["view"])
        boxes = []
        for box in data["boxes"]:
            boxes.append(tuple((int(start), int(stop)) for start, stop in box))
        return cls(name, shape, view, tuple(boxes))


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
    # The parameter of this rank's model, which may be a piece itself; None: it is `piece`
    cut_from: Piece | None = None
    trained: bool = True  # whether an optimizer updates it; False: a frozen weight

    @property
    def origin(self) -> Piece:
        """The parameter of this rank's model, as a piece: equal on the ranks that share it."""
        return self.cut_from or self.piece

    @property
    def span(self) -> tuple[str, int, int]:
        """The place of `origin`, and where the elements begin and end in it."""
        return self.origin.place, *self.piece.span_in(self.origin)


def whole_shards(model: nn.Module) -> list[Shard]:
    """Return every trainable parameter of a model, which may be cut, as one shard, in its order."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shards = []
    for name, piece in whole_pieces(model).items():
        param = trainable[name]
        shards.append(Shard(piece, param, decays=param.dim() >= 2))
    return shards


def whole_pieces(model: nn.Module) -> dict[str, Piece]:
    """Return every trainable parameter as a whole piece; of a cut model, the pieces that it has.

    A model with a method `views` names the parameters that are cut in another shape than theirs.
    """
    if is_cut(model):
        return dict(model.pieces)  # type: ignore[arg-type]
    views = {}
    if callable(getattr(model, "views", None)):
        views = model.views()  # type: ignore[operator]
    pieces = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            pieces[name] = Piece.whole(name, p.shape, views.get(name))
    return pieces


def received_gradients(shards: Sequence[Shard], model: nn.Module) -> Tensor:
    """Return one flat tensor, to be received, in which the gradients of `shards` lie.

    There may be no shard: its dtype and device are those of the model.
    """
    sizes = [shard.param.numel() for shard in shards]
    like = next(p for p in model.parameters() if p.requires_grad)
    flat = like.detach().new_zeros(sum(sizes))
    for shard, grad in zip(shards, flat.split(sizes), strict=True):
        shard.param.grad = grad
    return flat


def is_cut(model: nn.Module) -> bool:
    """Whether the model's parameters are pieces of larger ones (parallel/tp.py)."""
    return hasattr(model, "pieces")


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the boxes that make up elements `begin` to `end` - 1 of `shape`, row by row.

    They are at most 2·dims - 1.
    """
    if begin >= end:
        return []
    if len(shape) == 0:
        return [()]
    if len(shape) == 1:
        return [((begin, end),)]

    def within_row(i: int, start: int, stop: int) -> list[Box]:
        """Return the boxes of elements `start` to `stop` - 1 of row i."""
        return [((i, i + 1), *box) for box in boxes_of_range(shape[1:], start, stop)]

    # Row by row of the first dimension; a row is itself a range in the other dimensions.
    row = prod(shape[1:])  # elements
    first = begin // row
    last = (end - 1) // row
    if first == last:
        return within_row(first, begin - first * row, end - first * row)

    # The rest of the first row, all rows between as one box, the beginning of the last row.
    boxes: list[Box] = []
    if begin % row:
        boxes += within_row(first, begin % row, row)
        first += 1
    if first < end // row:
        whole_rows = tuple((0, size) for size in shape[1:])
        boxes.append(((first, end // row), *whole_rows))
    if end % row:
        boxes += within_row(last, 0, end % row)
    return boxes


def overlaps(one: Piece, other: Piece) -> bool:
    """Whether two pieces of one parameter have an element in common."""
    return any(_common(a, b) is not None for a in one.boxes for b in other.boxes)


def fill(piece: Piece, saved: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    """Put a piece together from saved ones; return its elements, (numel,).

    Each saved piece comes with its elements, (numel,), and they must not overlap. Raises ValueError
    when they lack elements or are cut from another shape.
    """
    if any(other.view != piece.view for other, _ in saved):
        raise ValueError(f"{piece.name} of shape {piece.view} is not of the shape that was saved")
    # Saved pieces do not overlap, so the right count of copied elements means that all were found.
    out = torch.empty(piece.numel, dtype=saved[0][1].dtype if saved else torch.float32)
    start = 0
    copied = 0
    for box in piece.boxes:
        target = out[start : start + _numel(box)].view(_sizes(box))
        start += _numel(box)
        # Any saved piece may have some of this box, however the other mesh had cut.
        for other, elements in saved:
            copied += _copy_common(target, box, other, elements)
    if copied != piece.numel:
        raise ValueError(f"{copied} of {piece.numel} elements of {piece.name} were saved")
    return out


def _copy_common(target: Tensor, box: Box, other: Piece, elements: Tensor) -> int:
    """Copy the elements that `box` and a saved piece have in common; return their number.

    `target` holds the elements of `box`.
    """
    start = 0
    copied = 0
    for saved_box in other.boxes:
        # The boxes of a saved piece lie one after the other in its elements.
        source = elements[start : start + _numel(saved_box)].view(_sizes(saved_box))
        start += _numel(saved_box)
        common = _common(box, saved_box)
        if common is not None:
            target[_slices(common, box)] = source[_slices(common, saved_box)]
            copied += _numel(common)
    return copied


def _common(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes have in common; None: no element."""
    sides = []
    for (start, stop), (other_start, other_stop) in zip(one, other, strict=True):
        side = (max(start, other_start), min(stop, other_stop))
        if side[0] >= side[1]:
            return None
        sides.append(side)
    return tuple(sides)


def _slices(box: Box, inside: Box | None = None) -> tuple[slice, ...]:
    """Return a box as an index; with `inside`, relative to where that box begins."""
    origins = [0] * len(box)
    if inside is not None:
        origins = [start for start, _ in inside]
    slices = []
    for (start, stop), origin in zip(box, origins, strict=True):
        slices.append(slice(start - origin, stop - origin))
    return tuple(slices)


def _sizes(box: Box) -> list[int]:
    return [stop - start for start, stop in box]


def _numel(box: Box) -> int:
    return prod(_sizes(box))
