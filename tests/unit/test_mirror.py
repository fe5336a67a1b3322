"""What mirrors need to know without any process: which rank mirrors which, who sends what, and when
all is lost.
"""

from __future__ import annotations

import random

import pytest

from nanoray.checkpoint.run_folder import recovers_in_place
from nanoray.config import Config, make_config
from nanoray.config.layout import Layout, mirror_distance, mirrored
from nanoray.parallel.pieces import Piece
from nanoray.train.mirror import Span, senders


@pytest.mark.parametrize("size", [(), (7,), (3, 5), (2, 3, 4)])
def test_a_piece_knows_where_it_begins_and_ends(size: tuple[int, ...]) -> None:
    whole = Piece.whole("w", size)
    assert whole.span_in(whole) == (0, whole.numel)
    for begin in range(whole.numel):
        for end in range(begin + 1, whole.numel + 1):
            assert whole.flat_range(begin, end).span_in(whole) == (begin, end)


@pytest.mark.parametrize(
    ("nodes", "distance"),
    [
        ("a", 0),
        ("aa", 1),
        ("ab", 1),
        ("aabb", 2),
        ("aaab", 3),
        ("aaabbb", 3),
        ("aabbcc", 2),
        ("abcd", 1),
    ],
)
def test_a_rank_is_mirrored_on_another_node(nodes: str, distance: int) -> None:
    found = mirror_distance([nodes[:i].count(node) for i, node in enumerate(nodes)])
    assert found == distance
    if len(set(nodes)) > 1 and len({nodes.count(node) for node in nodes}) == 1:
        assert all(node != nodes[(i + found) % len(nodes)] for i, node in enumerate(nodes))


def test_with_tp_and_pp_a_mirror_is_along_the_data_axis() -> None:
    """dp 2 x tp 2 on one node, dp 4 x tp 2 on two nodes of four, and on two stages."""

    def owners(layout: Layout, local_ranks: list[int]) -> list[int]:
        return [mirrored(layout, rank, local_ranks)[1] for rank in range(layout.world_size)]

    assert owners(Layout(dp=2, tp=2), [0, 1, 2, 3]) == [2, 3, 0, 1]
    assert owners(Layout(dp=4, tp=2), [0, 1, 2, 3] * 2) == [4, 5, 6, 7, 0, 1, 2, 3], (
        "on the other node"
    )
    assert owners(Layout(dp=2, pp=2), [0, 1, 0, 1]) == [1, 0, 3, 2]
    assert owners(Layout(dp=1, tp=2), [0, 1]) == [0, 1], "nobody mirrors"


def test_with_ep_a_mirror_has_the_same_experts() -> None:
    """The distance counts data ranks: dp 4 x ep 2, on one node and on two, dp 4 (ep 2) x tp 2.

    On one replica no rank has the same experts; the next one on the data axis keeps copies.
    """

    def found(layout: Layout, local_ranks: list[int]) -> list[tuple[int, int]]:
        return [mirrored(layout, rank, local_ranks) for rank in range(layout.world_size)]

    assert found(Layout(dp=4, ep=2), [0, 1, 2, 3]) == [(2, 2), (2, 3), (2, 0), (2, 1)]
    assert found(Layout(dp=8, ep=2), [0, 1, 2, 3] * 2) == [
        (4, (rank + 4) % 8) for rank in range(8)
    ], "the other node"
    assert found(Layout(dp=4, ep=2, tp=2), [*range(8)]) == [
        (2, (rank + 4) % 8) for rank in range(8)
    ]
    uneven = found(Layout(dp=8, ep=2), [0, 1, 2, 3, 0, 0, 1, 2])
    assert {distance for distance, _ in uneven} == {6}, (
        "one for all, as weights that are no expert's need"
    )
    assert sorted(owner for _, owner in uneven) == [*range(8)]
    assert found(Layout(dp=2, ep=2), [0, 1]) == [(1, 1), (1, 0)]
    assert found(Layout(dp=4, ep=4), [0, 1] * 2) == [(2, 2), (2, 3), (2, 0), (2, 1)], (
        "on the other node"
    )


def held(ranks: int, sizes: dict[str, int], distance: int = 1) -> list[list[Span]]:
    """The spans of each rank's own share, and of the one that it mirrors."""

    def share(rank: int) -> list[Span]:
        cuts = {name: [size * i // ranks for i in range(ranks + 1)] for name, size in sizes.items()}
        return [
            (name, at[rank], at[rank + 1]) for name, at in cuts.items() if at[rank] < at[rank + 1]
        ]

    return [share(rank) + share((rank - distance) % ranks) for rank in range(ranks)]


@pytest.mark.parametrize("seed", range(40))
def test_each_element_is_sent_once_by_a_rank_that_holds_it(seed: int) -> None:
    """Also where ranks hold shares of different cuts, because the last recovery was not completed
    everywhere.
    """
    source = random.Random(seed)
    sizes = {"a": source.randrange(1, 60), "b": 1, "c": source.randrange(1, 60)}
    ranks = source.randrange(2, 7)
    spans = held(ranks, sizes)
    lost = source.randrange(ranks)
    spans[lost] = []
    if seed % 2:
        spans += held(source.randrange(2, 5), sizes)[:1]
    found = senders(spans, sizes)
    for name, size in sizes.items():
        own = [(begin, end, rank) for (other, begin, end), rank in found if other == name]
        assert [begin for begin, _, _ in own] == [0, *(end for _, end, _ in own[:-1])]
        assert own[-1][1] == size
        for begin, end, rank in own:
            assert any(n == name and b <= begin and end <= e for n, b, e in spans[rank])


def config(**settings: object) -> Config:
    return make_config({"micro_batch_size": 1, **settings})


def test_where_a_sharded_state_recovers_in_place() -> None:
    for mode in ("zero1", "zero2", "fsdp"):
        assert recovers_in_place(config(dp_mode=mode), "gloo", 2)
        assert recovers_in_place(config(dp_mode=mode, recovery="shrink"), "gloo", 2)
        assert not recovers_in_place(config(dp_mode=mode, mirror="off"), "gloo", 2)
        assert not recovers_in_place(config(dp_mode=mode, recovery="restart"), "gloo", 2)
        assert not recovers_in_place(config(dp_mode=mode), "nccl", 2)
        assert not recovers_in_place(config(dp_mode=mode), "gloo", 1)
    assert recovers_in_place(config(dp_mode="ddp"), "gloo", 2)
    assert recovers_in_place(config(dp_mode="ddp", mirror="off"), "gloo", 2)
