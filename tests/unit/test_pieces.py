"""Pieces of parameters: every cut and every assembly of cuts, against plain indexing."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoray.config.layout import Layout
from nanoray.models.gpt import GPT, ModelShape
from nanoray.parallel.pieces import (
    Piece,
    boxes_of_range,
    fill,
    overlaps,
    whole_pieces,
    whole_shards,
)

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@given(SHAPES, st.data())
@settings(max_examples=300)
def test_a_flat_range_is_few_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    n = prod(shape)
    begin = data.draw(st.integers(0, n))
    end = data.draw(st.integers(begin, n))
    numbers = torch.arange(n).view(shape)
    boxes = boxes_of_range(shape, begin, end)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    piece = Piece("p", tuple(shape), tuple(shape), tuple(boxes))
    assert piece.take(numbers).tolist() == list(range(begin, end))
    assert piece.numel == end - begin


@given(SHAPES, st.data())
@settings(max_examples=200)
def test_any_cut_is_put_together_from_any_other(shape: list[int], data: st.DataObject) -> None:
    n = prod(shape)
    whole, numbers = Piece.whole("p", shape), torch.arange(float(n)).view(shape)

    def tiles() -> list[Piece]:
        cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
        return [whole.flat_range(a, b) for a, b in pairwise(cuts)]

    saved = [(piece, piece.take(numbers)) for piece in tiles()]
    data.draw(st.randoms(use_true_random=False)).shuffle(saved)
    for wanted in tiles():
        near = [(piece, elements) for piece, elements in saved if overlaps(piece, wanted)]
        assert torch.equal(fill(wanted, near), wanted.take(numbers))


def test_columns_and_rows() -> None:
    numbers = torch.arange(24.0).view(4, 6)
    whole = Piece.whole("w", (4, 6))
    assert whole.narrow(1, 2, 2).take(numbers).tolist() == numbers[:, 2:4].flatten().tolist()
    part = whole.narrow(1, 2, 2).flat_range(3, 6)
    assert part.take(numbers).tolist() == numbers[:, 2:4].flatten()[3:6].tolist()
    saved = [(whole.narrow(0, r, 2), numbers[r : r + 2].flatten()) for r in (0, 2)]
    assert torch.equal(fill(part, saved), part.take(numbers))


def test_what_is_missing_or_cut_otherwise_is_an_error() -> None:
    whole = Piece.whole("w", (4, 6))
    with pytest.raises(ValueError, match=r"12 of 24 elements of w were saved"):
        fill(whole, [(whole.flat_range(0, 12), torch.zeros(12))])
    with pytest.raises(ValueError, match=r"w of shape \(4, 6\) is not of the shape that was saved"):
        fill(whole, [(Piece.whole("w", (6, 4)), torch.zeros(24))])


def test_a_gpt_cuts_queries_keys_and_values_apart() -> None:
    model = GPT(ModelShape(1, 2, 8, 4, True, 65))
    pieces = whole_pieces(model)
    assert pieces["blocks.0.attn.qkv.weight"].view == (3, 8, 8)
    assert pieces["blocks.0.attn.qkv.bias"].view == (3, 8)
    assert pieces["blocks.0.mlp.up.weight"].view == (32, 8)
    shards = whole_shards(model)
    assert [shard.piece.name for shard in shards] == [name for name, _ in model.named_parameters()]
    assert {shard.piece.name for shard in shards if not shard.decays} == {
        name for name, p in model.named_parameters() if p.dim() < 2
    }


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (4, 1, 1, 2), (2, 2, 2, 1), (3, 2, 1, 1), (4, 2, 3, 2)]
)
def test_every_rank_has_one_place_and_one_group_per_axis(sizes: tuple[int, int, int, int]) -> None:
    layout = Layout(*sizes)
    places = [layout.coords(rank) for rank in range(layout.world_size)]
    assert len({place[:3] for place in places}) == layout.world_size
    for rank, place in enumerate(places):
        assert (place.pp * layout.dp + place.dp) * layout.tp + place.tp == rank
    for axis in ("dp", "tp", "pp", "ep"):
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == [*range(layout.world_size)]
        assert {len(group) for group in groups} == {getattr(layout, axis)}
        for group in groups:
            assert [getattr(places[rank], axis) for rank in group] == [*range(len(group))]


def test_neighbours_share_a_replica() -> None:
    layout = Layout(dp=2, tp=2)
    assert layout.groups("tp") == [(0, 1), (2, 3)]
    assert layout.groups("dp") == [(0, 2), (1, 3)]
    assert Layout(dp=4, ep=2).groups("ep") == [(0, 1), (2, 3)]
