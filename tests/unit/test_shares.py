"""Which ranks go on when some are lost: whole replicas that together hold each share of the state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nanoray.config import make_config
from nanoray.launch.recovery.shares import Shares, keep
from tests.harness.ranks import TINY


def config(**settings: Any) -> Any:
    return make_config(TINY | {"n_head": 4, "n_layer": 4, "recovery": "shrink"} | settings)


AXES: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"pp": 2, "dp_mode": "ddp_by_hand"},
    {"tp": 2, "pp": 2, "dp_mode": "ddp_by_hand"},
    {"ep": 2, "experts": 4, "dp_mode": "ddp_by_hand", "global_batch_size": 24},
    {"dp_mode": "zero1"},
    {"tp": 2, "dp_mode": "zero1"},
    {"pp": 2, "dp_mode": "zero2"},
    {"tp": 2, "dp_mode": "fsdp"},
    {"ep": 2, "experts": 4, "dp_mode": "zero1", "global_batch_size": 24},
]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("dp", [2, 3, 4])
def test_after_any_two_losses_what_is_left_goes_on_or_says_what_is_lost(
    dp: int, axes: dict[str, Any]
) -> None:
    """One loss never costs a share. Two, in either order, do so only where they had all copies of
    one.
    """
    cfg = config(**axes)
    size = cfg.tp * cfg.pp * cfg.ep
    workers = dp * size
    for first, second in itertools.permutations(range(workers), 2):
        members = [*range(workers)]
        for lost in (first, second):
            if lost not in members:  # it was left out
                continue
            shares = Shares.of(cfg, "gloo", members, members, workers)
            left = [slot for slot in members if slot != lost]
            slots = shares.whole_replicas(cfg, workers, left, dict.fromkeys(left, 7))
            assert len(slots) == len(left) // size * size
            assert slots or len(members) == size, "only one replica had been left"
            if not slots:  # but of experts each may be in two places
                assert bool(shares.lost([lost])) == (
                    cfg.ep == 1 or cfg.dp_mode == "ddp_by_hand" or size == 1
                )
                break
            assert not shares.lost({*members} - {*slots})
            members = slots


@pytest.mark.parametrize("axes", AXES[5:], ids=str)
def test_two_ranks_that_are_lost_together(axes: dict[str, Any]) -> None:
    """With mirrors a share is lost with both of its holders, and those are neighbours along the
    data axis.
    """
    cfg = config(**axes)
    size = cfg.tp * cfg.pp * cfg.ep
    workers = 4 * size
    shares = Shares.of(cfg, "gloo", range(workers), range(workers), workers)
    gone = [pair for pair in itertools.combinations(range(workers), 2) if shares.lost(pair)]
    assert len(gone) == workers, "each rank with its mirror"
    for pair in itertools.combinations(range(workers), 2):
        left = [slot for slot in range(workers) if slot not in pair]
        slots = shares.whole_replicas(cfg, workers, left, dict.fromkeys(left, 7))
        assert pair in gone or not shares.lost({*range(workers)} - {*slots})
        assert len(slots) == len(left) // size * size


@pytest.mark.parametrize(
    ("workers", "batch", "sizes"),
    [
        (8, 12, {7: 6, 6: 6, 5: 4, 4: 4, 3: 2, 2: 2}),
        (8, 8, {7: 4, 6: 4, 5: 4, 4: 4, 3: 2, 2: 2}),  # three replicas cannot share 8 samples
    ],
)
def test_how_many_ranks_go_on(workers: int, batch: int, sizes: dict[int, int]) -> None:
    cfg = config(tp=2, global_batch_size=batch)
    shares = Shares.of(cfg, "gloo", range(workers), range(workers), workers)
    for left, size in sizes.items():
        assert (
            len(shares.whole_replicas(cfg, workers, range(left), dict.fromkeys(range(left), 0)))
            == size
        )


def test_ranks_that_only_save_need_not_share_the_batch() -> None:
    """Two of three cannot share 9 samples in micro batches of one size; they hold all, and can
    write it.
    """
    cfg = config(dp_mode="zero1", global_batch_size=9)
    shares, done = Shares.of(cfg, "gloo", range(3), range(3), 3), {0: 5, 2: 5}
    assert shares.whole_replicas(cfg, 3, [0, 2], done) == [] != shares.held
    assert shares.whole_replicas(cfg, 3, [0, 2], done, saves=True) == [0, 2]


def test_what_a_new_process_in_a_lost_slot_does_not_hold() -> None:
    """Slot 1 is lost and has a new process, slot 2 has none: 0 and 3 hold all, and the newcomer
    would hold nothing.
    """
    cfg = config(tp=2)
    shares = Shares.of(cfg, "gloo", range(4), range(4), 4)
    assert shares.whole_replicas(cfg, 4, [0, 1, 3], {0: 5, 3: 5}) == [0, 3]


GROUPS: list[dict[str, Any]] = [
    {"dp_mode": "zero1", "replicas": 2},
    {"dp_mode": "fsdp", "replicas": 2, "tp": 2},
    {"dp_mode": "zero2", "replicas": 3},
]


@pytest.mark.parametrize("axes", GROUPS, ids=str)
def test_groups_that_hold_the_same_are_dropped_as_a_whole(axes: dict[str, Any]) -> None:
    """A share is lost with all ranks that hold it, one in each group; a smaller run keeps the size
    of the groups, and prefers those that have lost no rank.
    """
    cfg = config(**axes, global_batch_size=24)
    group = 2 * cfg.tp
    workers = cfg.replicas * group
    shares = Shares.of(cfg, "gloo", range(workers), range(workers), workers)
    assert len(shares.held) == group
    for pair in itertools.combinations(range(workers), 2):
        first, second = pair
        are_twins = first % group == second % group
        assert bool(shares.lost(pair)) == (are_twins and cfg.replicas == 2), pair
        if shares.lost(pair):
            assert shares.lost(pair) == (
                f"shares of the state are lost with all that held them: ranks {first}, {second}"
            )
            continue

        # What goes on has each share, in groups of the size that there was.
        left = [slot for slot in range(workers) if slot not in pair]
        slots = shares.whole_replicas(cfg, workers, left, dict.fromkeys(left, 7))
        assert len(slots) == len(left) // group * group
        assert not shares.lost({*range(workers)} - {*slots})
        untouched = {
            slot for slot in left if slot // group not in (first // group, second // group)
        }
        assert untouched <= {*slots} or not slots

        # A group that is left alone has no twins: each of its ranks is needed.
        if len(slots) == group:
            again = Shares.of(cfg, "gloo", slots, range(group), workers)
            assert all(again.lost([slot]) for slot in slots)


def test_slots_that_hold_what_no_other_does_are_kept() -> None:
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert keep([0, 1, 2, 3], 2, ring) == [0, 2]
    assert keep([1, 2, 3], 2, ring) == [1, 3], (
        "0 is gone: its neighbours have copies of what it had"
    )
    assert keep([0, 1, 2, 3], 1, ring) == []
