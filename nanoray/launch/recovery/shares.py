"""Which slots hold which share of a run's state, and which of them go on as fewer whole replicas.

dp 2 x tp 2   slots 0 and 2 hold one half of each layer, 1 and 3 the other
slot 1 lost   0 2 3 are left: three ranks make one replica of two; 0 and 3 hold all, 2 is left out
after that    slots 0 and 3 are ranks 0 and 1: a slot's share follows from the group, not its number
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nanoray.config import Config, batch_for
from nanoray.config.layout import Layout, mirrored
from nanoray.config.mesh import AXES


@dataclass(frozen=True)
class Shares:
    """The slots that hold each share of a group's state.

    These are a share's owner and its mirror, or all replicas of a part of the model.
    """

    held: Sequence[tuple[int, ...]] = ()
    mirrored: bool = False
    # Of hybrid sharding: the slots of each group, which are neighbours
    groups: Sequence[tuple[int, ...]] = ()

    @classmethod
    def of(
        cls,
        config: Config,
        backend: str,
        members: Sequence[int],
        local_ranks: Sequence[int],
        workers: int,
    ) -> Shares:
        """Return the shares of a group.

        members: its slots, by rank. local_ranks: each rank's number on its node. workers: the ranks
        that the run was started with. With one replica no other rank mirrors a share: its owner is
        listed for both.
        """
        layout = Layout.of(config, len(members), workers)
        mirrors = config.mirrors(backend)
        if mirrors:
            pairs = []
            for rank in range(len(members)):
                owner = mirrored(layout, rank, local_ranks)[1]
                pairs.append((owner, rank))
            rank_groups: list[tuple[int, ...]] = sorted(pairs)
        elif config.replicas > 1:
            rank_groups = layout.groups("replica")
        else:
            rank_groups = layout.groups(layout.copies_axis)
        held = [tuple(members[rank] for rank in ranks) for ranks in rank_groups]
        groups: dict[int, list[int]] = {}
        if layout.replicas > 1:
            for rank, slot in enumerate(members):
                groups.setdefault(layout.coords(rank).replicas, []).append(slot)
        return cls(held, mirrors, [tuple(slots) for slots in groups.values()])

    def lost(self, gone: Collection[int]) -> str | None:
        """Return a message with the shares that only `gone` slots held; None if there are none."""
        lost_holders = []
        for share in self.held:
            if set(share) <= set(gone):
                lost_holders.append(list(dict.fromkeys(share)))  # without duplicates, in order
        if not lost_holders:
            return None
        if self.mirrored:
            owners = [f"that of rank {' with rank '.join(map(str, s))}" for s in lost_holders]
            return f"shares of the state are lost, each with its mirror: {', '.join(owners)}"
        groups = []
        for holders in lost_holders:
            noun = "ranks" if len(holders) > 1 else "rank"
            groups.append(f"{noun} {_listed(holders)}")
        return f"shares of the state are lost with all that held them: {'; '.join(groups)}"

    def whole_replicas(
        self,
        config: Config,
        workers: int,
        slots: Sequence[int],
        done: Mapping[int, int],
        saves: bool = False,
    ) -> list[int]:
        """Return the most of `slots` that make whole replicas among which the batch can be divided.

        workers: the ranks that the run was started with. done: the steps of each slot that holds
        the state. saves: the batch need not be divisible. Together the returned slots hold each
        share that one of `slots` holds; none are returned if that is impossible. Those that hold
        the state come first, then those that have done more steps.
        """
        # The largest number of replicas that the batch allows. The batch is that of the full group.
        full = Layout.of(config, workers)
        least = full.least_ranks
        count = 0
        for ranks in range(len(slots) // least * least, 0, -least):
            if saves or batch_for(config, full.dp, ranks // full.replica_ranks):
                count = ranks
                break
        # Holders of the state first, of these the most advanced: what they hold is not repeated. Of
        # equal ones those whose group has lost no rank: neighbours send each other most.
        broken: set[int] = set()
        for group in self.groups:
            if not set(group) <= set(slots):
                broken.update(group)
        preferred = sorted(
            slots, key=lambda slot: (slot not in done, -done.get(slot, 0), slot in broken, slot)
        )
        return sorted(keep(preferred, count, self.held))


def smaller(
    config: Config, before: int, members: Sequence[int], left_out: Sequence[int], workers: int
) -> str:
    """Return a message: how a group shrank.

    before: its size until then. left_out: the slots that could go on and do not.
    """
    layout = Layout.of(config, len(members), workers)
    size = f"{before} -> {len(members)} rank(s)"
    if layout.replica_ranks * layout.ep > 1 or config.replicas > 1:
        size += f" = {layout}"
    missing = sorted(set(range(workers)) - set(members))
    message = f"{size} with the same global batch, until rank {_listed(missing)} is back"
    if left_out:
        message += f"; rank {_listed(left_out)} has no part in that and ends"
    return message


def no_replica(config: Config, left: Sequence[int]) -> str:
    """Return a message: why none of the ranks that are left can go on."""
    keys = [axis.key for axis in AXES]
    sizes = f"{'*'.join(str(getattr(config, key)) for key in keys)} = {'*'.join(keys)}"
    whole = f"replicas of {sizes} ranks"
    if config.replicas > 1:
        whole = f"groups of the size that replicas = {config.replicas} gives them"
    return (
        f"of the {len(left)} rank(s) {_listed(left)} no whole number of {whole} has every share of "
        f"the state (dp_mode {config.dp_mode}) and divides the global batch"
    )


def _listed(slots: Iterable[int]) -> str:
    return ", ".join(map(str, slots))


def keep(slots: Sequence[int], count: int, shares: Iterable[Collection[int]]) -> list[int]:
    """Return `count` of these slots that together have each share; none if that is impossible.

    shares: the slots that have each. A share that no slot has is ignored. The first of several
    equal slots are taken.
    """
    # The numbers of the shares that each slot has.
    numbers_of: dict[int, list[int]] = {slot: [] for slot in slots}
    for number, holders in enumerate(shares):
        for slot in numbers_of.keys() & set(holders):
            numbers_of[slot].append(number)
    copies = Counter(number for numbers in numbers_of.values() for number in numbers)

    # From the last slot on, leave out each whose shares all have another copy.
    for slot in reversed(slots):
        if len(numbers_of) <= count:
            break
        if all(copies[number] > 1 for number in numbers_of[slot]):
            copies.subtract(numbers_of.pop(slot))
    return list(numbers_of) if len(numbers_of) == count else []
