"""What a rank does after its group has ended: the decision for every way in which it may end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import product

import pytest

from nanoray.train.elastic import Ending, Next, what_follows

LOST = {"collective": True, "met": True, "can_wait": True}


def endings() -> Iterator[Ending]:
    names = [field.name for field in fields(Ending)]
    for values in product((False, True), repeat=len(names)):
        yield Ending(**dict(zip(names, values, strict=True)))


@pytest.mark.parametrize(
    ("ending", "follows"),
    [
        (Ending(ordered=True, can_wait=True), Next.MEET),
        (Ending(**LOST), Next.MEET),
        (Ending(**LOST | {"can_wait": False}), Next.END),  # the launcher starts all ranks again
        (Ending(**LOST, whole=False), Next.END),  # a newcomer that has no state yet
        (Ending(ours=True, met=False, can_wait=True), Next.MEET),  # the newcomer is the unfit one
        (Ending(ours=True, met=True, can_wait=True), Next.END),  # as a loss that is not finite
        (Ending(ours=True, met=False, can_wait=True, state_is_gone=True), Next.END),
        (Ending(met=True, can_wait=True), Next.END),  # an error of the script
        (Ending(is_short=True, met=True, can_wait=True), Next.MEET),
        (Ending(is_short=True, met=True, alone=True), Next.AGAIN),
        (Ending(is_short=True, met=True), Next.END),
    ],
)
def test_what_follows_the_usual_endings(ending: Ending, follows: Next) -> None:
    assert what_follows(ending) is follows


def test_nothing_is_waited_for_in_vain() -> None:
    for ending in endings():
        follows = what_follows(ending)
        if follows is Next.MEET:
            assert ending.can_wait or ending.ordered, ending
        if not ending.whole and not ending.ordered:
            assert follows is Next.END, ending
        if follows is Next.AGAIN:
            assert ending.alone, ending
            assert not ending.can_wait, ending
