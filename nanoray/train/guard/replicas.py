"""Compare the replicas' state by hashes of the tensors' bits; a minority receives the majority's
state.

weights, optimizer, loss scale ─► hash_tensors() ─► compare over all ranks ─► equal, or share()
heals a minority
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoray.errors import StateDiverged
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import is_cut
from nanoray.state import TrainState, optimizer_tensors, share
from nanoray.train.guard.certificate import written

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REMEDY = (
    "The newest checkpoint was written while all agreed: resume from it; ranks on devices of "
    "different models round "
    "differently and need hash_every 0"
)
# Elements: an int64 product that stays in cache, or fills a GPU
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}


def compare(
    state: TrainState,
    mesh: Mesh,
    losses: Sequence[float] = (),
    tell: Callable[[dict[str, Any]], None] = lambda found: None,
) -> tuple[int, str]:
    """Compare the ranks' weights and optimizer state; heal a minority from the majority's memory.
    (all ranks)

    Of a sharded optimizer state, each share is compared with its mirror, if it has one. `tell` gets
    what certificate.py keeps of this state, before it is healed; `losses` are those of the newest
    step on this rank. Returns the number of healed ranks, and a warning for the user. Raises
    StateDiverged when there is no majority. Costs one pass over the state, and one wait for the
    device.
    """
    own_losses = [loss if math.isfinite(loss) else None for loss in losses]
    names, hashes = hash_tensors(state.tensors())
    # Of a model that is cut
    rows = hash_tensors({shard.piece.place: shard.param for shard in state.weights or ()})
    cut = is_cut(state.model)  # then its ranks differ, and are compared piece by piece
    digests = [] if cut else mesh.all_gather((combine(hashes), state.samples))
    gathered = mesh.all_gather(
        (combine(hashes + rows[1]), own_losses, dict(zip(*rows, strict=True)))
    )
    told: dict[str, Any] = {
        "samples": state.samples,
        "losses": [loss for _, own, _ in gathered for loss in own],
    }
    told["ranks"] = [written(digest) for digest, *_ in gathered]
    told["tensors"] = {
        place: written(value) for *_, of_rank in gathered for place, value in of_rank.items()
    }
    if cut:
        _compare_pieces(
            dict(zip(names, hashes, strict=True)), state, mesh, lambda differ: tell(told | differ)
        )
        _compare_mirrors(state, mesh)
        return 0, ""
    (winner, votes), *others = Counter(digests).most_common()
    if not others:
        told["tensors"] |= dict(zip(names, map(written, hashes), strict=True))
        tell(told | {"differ": {}})
        _compare_mirrors(state, mesh)
        return 0, ""
    _compare_mirrors(state, mesh)
    everyone = mesh.all_gather((len(hashes), hashes))
    majority = votes > mesh.world_size / 2
    source = digests.index(winner) if majority else 0
    strays = {
        r: _first_difference(names, everyone[r], everyone[source])
        for r, digest in enumerate(digests)
        if digest != digests[source]
    }
    what = "; ".join(f"rank {r} in {tensor}" for r, tensor in strays.items())
    told["tensors"] |= dict(zip(names, map(written, everyone[source][1]), strict=False))
    tell(told | {"differ": {str(r): tensor for r, tensor in strays.items()}})
    if not majority:
        raise StateDiverged(
            f"after step {state.step} the ranks hold different weights or optimizer state, and no "
            "majority agrees:"
            f" {what}, compared with rank {source}. {_REMEDY}"
        )
    # If a rank is lost now, no other rank may copy a differing state
    state.whole = mesh.rank not in strays
    share(state, mesh, source)
    return len(strays), (
        f"after step {state.step} the state differs from the majority's on {what}: a flipped bit, "
        "or a "
        f"faulty device. It took over the state of rank {source}; training goes on"
    )


def digest(state: TrainState) -> int:
    """Return a hash of what must be equal on all replicas."""
    return combine([*hash_tensors(state.tensors())[1], state.samples])


def agreed(digests: Sequence[int | None], step: int) -> tuple[int, tuple[int, ...]]:
    """Return the first rank of the majority among those that have a digest, and which of them
    differ from it.

    Raises StateDiverged where no majority agrees.
    """
    held = Counter(found for found in digests if found is not None)
    (winner, votes), *others = held.most_common()
    if others and 2 * votes <= held.total():
        raise StateDiverged(
            f"after step {step} the ranks that are left hold different weights or optimizer state, "
            "and no majority "
            f"agrees: a flipped bit, or a faulty device. {_REMEDY}"
        )
    return digests.index(winner), tuple(
        r for r, found in enumerate(digests) if found not in (None, winner)
    )


def _compare_pieces(
    own: dict[str, int], state: TrainState, mesh: Mesh, tell: Callable[[dict[str, Any]], None]
) -> None:
    """Compare the ranks that hold the same piece. (all ranks) Raises StateDiverged: nothing is
    healed.
    """
    everyone = mesh.all_gather({**own, "the data cursor": state.samples})
    found: dict[str, dict[int, int]] = {}
    for rank, hashes in enumerate(everyone):
        for place, value in hashes.items():
            found.setdefault(place, {})[rank] = value
    wrong = {place: held for place, held in found.items() if len(set(held.values())) > 1}
    if not wrong:
        tell({"differ": {}})
        return
    place, held = next(iter(wrong.items()))
    (winner, votes), *_ = Counter(held.values()).most_common()
    strays = (
        [rank for rank, value in held.items() if value != winner]
        if votes > len(held) / 2
        else [*held]
    )
    tell({"differ": {str(rank): place for rank in strays}})
    raise StateDiverged(
        f"after step {state.step} ranks that hold the same piece of the state differ in "
        f"{len(wrong)} of "
        f"{len(found)} pieces, first in {place}, on rank {', '.join(map(str, strays))} of "
        f"{sorted(held)}: a flipped "
        "bit, or a faulty device. A model that is cut is not healed: resume from the newest "
        "checkpoint, which was "
        "written while all agreed; ranks on devices of different models round differently and need "
        "hash_every 0"
    )


def _compare_mirrors(state: TrainState, mesh: Mesh) -> None:
    """Compare each rank's share of a sharded state with its mirror. (all ranks, if any has one)

    Raises StateDiverged on all ranks where they differ: of two holders, nobody knows which one is
    right.
    """
    if state.mirror is None:
        return
    mirror, hashes = state.mirror, []
    for shards, optimizer in ((state.shards, state.optimizer), (mirror.shards, mirror.optimizer)):
        kept = optimizer_tensors(optimizer, shards)
        kept |= {shard.piece.name: shard.param for shard in shards} if state.shards_weights else {}
        hashes.append(combine(hash_tensors(dict(sorted(kept.items())))[1]))
    everyone = mesh.all_gather((mirror.owner, *hashes))
    if differ := [
        (owner, rank)
        for rank, (owner, _, copy) in enumerate(everyone)
        if everyone[owner][1] != copy
    ]:
        pairs = ", ".join(
            f"of rank {owner} and its mirror on rank {rank}" for owner, rank in differ
        )
        raise StateDiverged(
            f"after step {state.step} the sharded state differs {pairs}: a flipped bit, or a "
            "faulty device. Of two "
            "copies nobody knows which one is right: resume from the newest checkpoint"
        )


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in a row, as integers of their size: equal where all bits are."""
    return tensor.detach().reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.int64))


def hash_tensors(tensors: dict[str, Tensor]) -> tuple[list[str], list[int]]:
    """Return the names and a 64-bit sum of each tensor's bits: sum over i of (2i + 1)·x_i in int64,
    which wraps.

    x_i is an element's bits as an integer. One flipped bit changes a term by an odd multiple of a
    power of two below 2^64, and two swapped elements of 32 bits change the sum by (x_i - x_j)·2(j -
    i), which 2^64 does not divide either. So both are always detected.
    """
    if not tensors:  # no replicas: each rank holds its own shard
        return [], []
    odd: dict[torch.device, Tensor] = {}
    sums = [sum_of_bits(tensor, odd) for tensor in tensors.values()]
    main = sums[0].device
    return list(tensors), torch.stack([s.to(main) for s in sums]).tolist()


def sum_of_bits(tensor: Tensor, odd: dict[torch.device, Tensor]) -> Tensor:
    """Return that sum, a scalar on the tensor's device. `odd` keeps the factors for the next
    tensor.
    """
    flat = bits_of(tensor)
    chunk = _CHUNK.get(flat.device.type, 1 << 20)
    if flat.device not in odd:
        odd[flat.device] = torch.arange(1, 2 * chunk, 2, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for at in range(0, flat.numel(), chunk):
        part = flat[at : at + chunk]
        total += (part * odd[flat.device][: part.numel()]).sum()
        if at:
            total += part.sum(dtype=torch.int64) * (2 * at)
    return total


def combine(hashes: list[int]) -> int:
    """Return one 64-bit number that changes when one of the hashes does."""
    return sum((2 * i + 1) * value for i, value in enumerate(hashes)) % 2**64


def _first_difference(
    names: list[str], ours: tuple[int, list[int]], theirs: tuple[int, list[int]]
) -> str:
    if ours[0] != theirs[0]:
        return "the number of tensors of the optimizer"
    pairs = zip(names, ours[1], theirs[1], strict=False)
    return next((name for name, a, b in pairs if a != b), "the data cursor")
