"""Which slots hold which share of a run's state, and which of them go on as fewer whole replicas.

dp 2 x tp 2   slots 0 and 2 hold one half of each layer, 1 and 3 the other
slot 1 lost   0 2 3 are left: three ranks make one replica of two, and 0 and 3 hold all; 2 is left out
after that    slots 0 and 3 are ranks 0 and 1: a slot's place follows from the group, not from its number
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nanoray.config import Config, batch_for
from nanoray.mesh.layout import Layout, mirrored


@dataclass(frozen=True)
class Shares:
    """The slots that hold each share of a group's state: its owner and who mirrors it, or all
    replicas of a part.
    """

    held: Sequence[tuple[int, ...]] = ()
    mirrored: bool = False

    @classmethod
    def of(
        cls, config: Config, backend: str, members: Sequence[int], local_ranks: Sequence[int]
    ) -> Shares:
        """Return those of a group. members: its slots, by rank; local_ranks: each rank's number on
        its node.

        With one replica no other rank mirrors a share: its owner stands for both.
        """
        layout, mirrors = Layout.of(config, len(members)), config.mirrors(backend)
        held: list[tuple[int, ...]] = layout.groups("edp")
        if mirrors:
            held = sorted(
                (mirrored(layout, rank, local_ranks)[1], rank) for rank in range(len(members))
            )
        return cls([tuple(members[rank] for rank in share) for share in held], mirrors)

    def lost(self, gone: Collection[int]) -> str:
        """Say which shares only slots that are `gone` held; empty if there are none."""
        none_left = frozenset(gone).issuperset
        lost = [list(dict.fromkeys(share)) for share in self.held if none_left(share)]
        if self.mirrored:
            shares = ", ".join(
                f"that of rank {' with rank '.join(map(str, share))}" for share in lost
            )
            return f"shares of the state are lost, each with its mirror: {shares}" if lost else ""
        shares = "; ".join(f"rank{'s' * (len(share) > 1)} {_listed(share)}" for share in lost)
        return f"shares of the state are lost with all that held them: {shares}" if lost else ""

    def whole_replicas(
        self,
        config: Config,
        workers: int,
        slots: Sequence[int],
        done: Mapping[int, int],
        saves: bool = False,
    ) -> list[int]:
        """Return as many of `slots` as make whole replicas among which the global batch can be
        divided, unless `saves`.

        workers: the ranks that the run was started with; done: the steps of each slot that holds
        the state. Together they hold each share that one of `slots` holds: if such are not found,
        none are returned. Those that hold the state come first, then those that have done more
        steps.
        """
        full = Layout.of(config, workers)
        size = full.tp * full.pp * full.ep
        fit = (
            n * size
            for n in range(len(slots) // size, 0, -1)
            if saves or batch_for(config, full.dp, n * full.ep)
        )
        order = sorted(slots, key=lambda slot: (slot not in done, -done.get(slot, 0), slot))
        return sorted(keep(order, next(fit, 0), self.held))


def smaller(
    config: Config, before: int, members: Sequence[int], left_out: Sequence[int], workers: int
) -> str:
    """Write how a group shrank. before: its size then; left_out: the slots that could go on and do
    not.
    """
    layout, missing = Layout.of(config, len(members)), sorted({*range(workers)} - {*members})
    mesh = f" = {layout}" if layout.tp * layout.pp * layout.ep > 1 else ""
    ends = f"; rank {_listed(left_out)} has no part in that and ends" if left_out else ""
    size = f"{before} -> {len(members)} rank(s){mesh}"
    return f"{size} with the same global batch, until rank {_listed(missing)} is back{ends}"


def no_replica(config: Config, left: Sequence[int]) -> str:
    """Write why none of the ranks that are left can go on."""
    return (
        f"of the {len(left)} rank(s) {_listed(left)} no whole number of replicas of "
        f"{config.tp}*{config.pp}*{config.ep} = tp*pp*ep ranks has every share of the state "
        f"(dp_mode {config.dp_mode}) "
        "and divides the global batch"
    )


def _listed(slots: Iterable[int]) -> str:
    return ", ".join(map(str, slots))


def keep(slots: Sequence[int], count: int, shares: Iterable[Collection[int]]) -> list[int]:
    """Return `count` of these slots that together have each share; none if such are not found.

    Of equals the first in `slots` are taken. shares: the slots that have each. One that no slot has
    is ignored.
    """
    of: dict[int, list[int]] = {slot: [] for slot in slots}
    for number, share in enumerate(shares):
        for slot in of.keys() & {*share}:
            of[slot].append(number)
    left = Counter(number for numbers in of.values() for number in numbers)
    for slot in reversed(slots):
        if len(of) > count and all(left[number] > 1 for number in of[slot]):
            left.subtract(of.pop(slot))
    return [*of] if len(of) == count else []
