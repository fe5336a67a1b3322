"""Groups of ranks that hold the same: their layouts, who recovers, and how a slice is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanoray.checkpoint.run_folder import recovers_in_place
from nanoray.config import Config, make_config
from nanoray.config.layout import Layout
from nanoray.errors import ConfigError
from nanoray.parallel.axis import Axis
from nanoray.parallel.hybrid import Groups, Sum
from nanoray.parallel.mesh import Mesh
from tests.harness.ranks import TINY


def config(**settings: Any) -> Config:
    return make_config(TINY | {"dp_mode": "zero1", "replicas": 2, "n_layer": 4} | settings)


@pytest.mark.parametrize(
    ("settings", "ranks", "slots", "sizes"),
    [
        ({}, 4, 4, (4, 2)),
        ({"replicas": 3}, 12, 12, (12, 3)),
        ({"tp": 2}, 8, 8, (4, 2)),
        ({"cp": 2}, 4, 4, (2, 2)),
        # A run that has shrunk keeps the size of its groups, also where one is left.
        ({}, 4, 8, (4, 1)),
        ({"replicas": 3}, 8, 12, (8, 2)),
        ({"tp": 2}, 4, 8, (2, 1)),
    ],
    ids=str,
)
def test_groups_keep_their_size(
    settings: dict[str, Any], ranks: int, slots: int, sizes: tuple[int, int]
) -> None:
    layout = Layout.of(config(**settings), ranks, slots)
    assert (layout.dp, layout.replicas) == sizes
    full = Layout.of(config(**settings), slots)
    assert layout.shard_size == full.shard_size
    assert {len(group) for group in layout.groups("shard")} == {layout.shard_size}
    assert {len(group) for group in layout.groups("replica")} == {layout.replicas}


@pytest.mark.parametrize(
    ("settings", "ranks", "slots", "message"),
    [
        ({}, 5, 0, "replicas = 2 does not divide dp = 5 data ranks; choose a divisor of 5"),
        (
            {"dp_mode": "fsdp"},
            2,
            0,
            "dp_mode = fsdp would be ignored: replicas = 2 on 2 data ranks leaves one rank in each "
            "group, which shards nothing; use fewer replicas, or dp_mode ddp_by_hand without",
        ),
        (
            {"tp": 2},
            6,
            8,
            "3 data rank(s) are no whole number of groups of 2: the run was started with replicas "
            "= 2 on 4 data ranks",
        ),
    ],
    ids=str,
)
def test_ranks_that_make_no_groups_are_refused(
    settings: dict[str, Any], ranks: int, slots: int, message: str
) -> None:
    with pytest.raises(ConfigError) as found:
        Layout.of(config(**settings), ranks, slots)
    assert message in str(found.value)


def test_another_group_is_the_mirror() -> None:
    """It needs no copy, and works where the backend lets a lost rank be replaced."""
    assert not config().mirrors()
    assert config().replicated(4)
    assert recovers_in_place(config(), "gloo", 4)
    assert not recovers_in_place(config(), "nccl", 4)
    assert not recovers_in_place(config(recovery="restart"), "gloo", 4)
    assert config(replicas=1).mirrors()
    assert not config(replicas=1).replicated(4)


@pytest.mark.parametrize(("elements", "groups"), [(16, 2), (16, 3), (5, 4), (1, 2), (2, 5)])
def test_a_slice_is_summed_in_equal_parts(elements: int, groups: int) -> None:
    """One part for each group; the copy that is needed where they are not equal is put back."""
    covered = 0
    for index in range(groups):
        own = torch.arange(float(elements))
        parts = Sum.of(own, axis("replica", groups, index))
        assert len(parts.parts) % groups == 0
        assert len(parts.own_part) == -(-elements // groups)
        assert (parts.parts is own) == (elements % groups == 0)
        parts.own_part.add_(100)
        parts.put_back()
        covered += int((own >= 100).sum())
    assert covered == elements


def axis(name: str, size: int, index: int) -> Axis:
    mesh = Mesh(index, size, 0, torch.device("cpu"), "none", "test")
    return Axis(name, tuple(range(size)), index, None, mesh)


def test_the_first_group_counts_and_saves() -> None:
    owners = [Groups(axis("dp", 6, 0), axis("replica", 3, index)).is_first for index in range(3)]
    assert owners == [True, False, False]
