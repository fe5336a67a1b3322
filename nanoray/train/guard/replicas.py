"""Compare the replicas' state by hashes of the tensors' bits; heal a minority.

weights, optimizer, loss scale ─► hash_tensors() ─► compare over all ranks ─► equal, or broadcast_state()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoray.checkpoint.state.optimizers import optimizer_tensors
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.errors import StateDiverged
from nanoray.machine.tensor_memory import plain_memory
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.pieces import is_cut
from nanoray.train.broadcast_state import broadcast_state
from nanoray.train.guard.state_hashes import format_hash

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REMEDY = (
    "The newest checkpoint was written while all agreed: resume from it; ranks on devices of "
    "different models round differently and need hash_every 0"
)
_CURSOR = "the data cursor"
# Elements: an int64 product that stays in cache, or fills a GPU
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}


def compare(
    state: TrainState,
    mesh: Mesh,
    losses: Sequence[float] = (),
    certify: Callable[[dict[str, Any]], None] = lambda hashes: None,
) -> tuple[int, str]:
    """Compare the state of all ranks, and heal a minority from the majority. (all ranks)

    Each share of a sharded optimizer state is compared with its mirror, if it has one. Where the
    model is cut, or groups of hybrid sharding hold the same shares, ranks are compared piece by
    piece; of hybrid sharding each piece is healed from the majority of its holders. `certify`
    receives the line of state_hashes.py for this state, before it is healed; `losses` are those of
    the newest step on this rank. Returns the number of healed ranks, and a warning for the user.
    Raises StateDiverged when there is no majority. Costs one pass over the state, and one wait for
    the device.
    """
    # JSON has no word for NaN.
    own_losses = [loss if math.isfinite(loss) else None for loss in losses]
    names, hashes = hash_tensors(state.tensors())
    # The rows of a model that is cut; its ranks differ, and are compared piece by piece.
    places, row_hashes = hash_tensors(_rows(state))
    by_piece = is_cut(state.model) or state.copies > 1

    digests = []
    if not by_piece:
        digests = mesh.all_gather((combine(hashes), state.samples))
    of_ranks = mesh.all_gather(
        (combine(hashes + row_hashes), own_losses, dict(zip(places, row_hashes, strict=True)))
    )
    line = _line_of(of_ranks, state.samples)
    if by_piece:
        own = dict(zip(names, hashes, strict=True))
        healed = _compare_pieces(own, state, mesh, line, certify)
        _compare_mirrors(state, mesh)
        return healed

    # The usual case: all ranks have the same hash.
    (winner, votes), *others = Counter(digests).most_common()
    if not others:
        line["tensors"] |= dict(zip(names, map(format_hash, hashes), strict=True))
        certify(line | {"differ": {}})
        _compare_mirrors(state, mesh)
        return 0, ""

    # Some differ: find the first tensor on each, compared with a rank of the majority.
    _compare_mirrors(state, mesh)
    everyone = mesh.all_gather((len(hashes), hashes))
    has_majority = votes > mesh.world_size / 2
    source = digests.index(winner) if has_majority else 0
    strays = {}
    for rank, digest_of_rank in enumerate(digests):
        if digest_of_rank != digests[source]:
            strays[rank] = _first_difference(names, everyone[rank], everyone[source])
    what = "; ".join(f"rank {rank} in {tensor}" for rank, tensor in strays.items())

    line["tensors"] |= dict(zip(names, map(format_hash, everyone[source][1]), strict=False))
    certify(line | {"differ": {str(rank): tensor for rank, tensor in strays.items()}})
    if not has_majority:
        raise StateDiverged(
            f"after step {state.step} the ranks hold different weights or optimizer state, and no "
            f"majority agrees: {what}, compared with rank {source}. {_REMEDY}"
        )

    # If a rank is lost now, no other rank may copy a differing state.
    state.whole = mesh.rank not in strays
    broadcast_state(state, mesh, source)
    return len(strays), (
        f"after step {state.step} the state differs from the majority's on {what}: a flipped bit, "
        f"or a faulty device. It took over the state of rank {source}; training goes on"
    )


def _rows(state: TrainState) -> dict[str, Tensor]:
    """Return this rank's weights by their places, where no rank has all weights; else {}."""
    return {shard.piece.place: shard.param for shard in state.weights or ()}


def _line_of(of_ranks: Sequence[Any], samples: int) -> dict[str, Any]:
    """Return the line of state_hashes.py, given each rank's digest, losses and hashes of rows."""
    losses: list[float] = []
    digests = []
    tensors = {}
    for digest_of_rank, losses_of_rank, rows in of_ranks:
        losses += losses_of_rank
        digests.append(format_hash(digest_of_rank))
        for place, value in rows.items():
            tensors[place] = format_hash(value)
    return {"samples": samples, "losses": losses, "ranks": digests, "tensors": tensors}


def digest(state: TrainState) -> int:
    """Return a hash of everything that must be equal on all replicas."""
    _, hashes = hash_tensors(state.tensors())
    return combine([*hashes, state.samples])


def agreed(digests: Sequence[int | None], step: int) -> tuple[int, tuple[int, ...]]:
    """Return the first rank of the majority of those with a digest, and the ranks that differ.

    Raises StateDiverged where no majority agrees.
    """
    counts = Counter(value for value in digests if value is not None)
    (winner, votes), *others = counts.most_common()
    if others and 2 * votes <= counts.total():
        raise StateDiverged(
            f"after step {step} the ranks that are left hold different weights or optimizer state, "
            f"and no majority agrees: a flipped bit, or a faulty device. {_REMEDY}"
        )
    strays = [rank for rank, value in enumerate(digests) if value not in (None, winner)]
    return digests.index(winner), tuple(strays)


def _compare_pieces(
    own: dict[str, int],
    state: TrainState,
    mesh: Mesh,
    line: dict[str, Any],
    certify: Callable[[dict[str, Any]], None],
) -> tuple[int, str]:
    """Compare the ranks that hold the same piece; heal a minority. (all ranks)

    `line` is that of state_hashes.py, without what is found here. Returns as `compare` does. Raises
    StateDiverged where ranks differ and nothing is healed.
    """
    # Place -> rank -> hash
    everyone = mesh.all_gather({**own, _CURSOR: state.samples})
    pieces: dict[str, dict[int, int]] = {}
    for rank, hashes in enumerate(everyone):
        for place, value in hashes.items():
            pieces.setdefault(place, {})[rank] = value
    differing = [place for place, held in pieces.items() if len(set(held.values())) > 1]

    # Where every rank has the whole weights, no rank has listed rows of them.
    whole_weights = _whole_weights(state)
    for place, held in pieces.items():
        if place in whole_weights:
            (winner, _), *_ = Counter(held.values()).most_common()
            line["tensors"][place] = format_hash(winner)
    if not differing:
        certify(line | {"differ": {}})
        return 0, ""

    # Whether each of them can be healed: a majority of its holders agrees, and it is a tensor.
    strays: dict[int, str] = {}  # rank -> the first piece in which it differs
    minorities = {place: _minority(pieces[place]) for place in differing}
    for place, ranks in minorities.items():
        for rank in ranks:
            strays.setdefault(rank, place)
    certify(line | {"differ": {str(rank): place for rank, place in sorted(strays.items())}})
    can_heal = state.copies > 1 and _CURSOR not in minorities
    for place, ranks in minorities.items():
        can_heal = can_heal and len(ranks) < len(pieces[place])

    place = differing[0]
    held = pieces[place]
    where = f"{place}, on rank {_listed(minorities[place])} of {sorted(held)}"
    found = f"differ in {len(differing)} of {len(pieces)} pieces, first in {where}"
    if not can_heal:
        remedy = "A model that is cut is not healed"
        if state.copies > 1:
            remedy = "No majority of its holders agrees"
        if state.copies == 2:
            remedy += ", and with replicas 3 there would be one"
        raise StateDiverged(
            f"after step {state.step} ranks that hold the same piece of the state {found}: a "
            f"flipped bit, or a faulty device. {remedy}: resume from the newest checkpoint, which "
            "was written while all agreed; ranks on devices of different models round differently "
            "and need hash_every 0"
        )

    # If a rank is lost now, no other rank may copy a differing state.
    state.whole = mesh.rank not in strays
    tensors = state.tensors()
    for place, ranks in sorted(minorities.items()):
        source = min(set(pieces[place]) - set(ranks))
        _heal(tensors.get(place), mesh, source, mesh.rank in ranks)
    state.whole = True
    return len(strays), (
        f"after step {state.step} ranks that hold the same piece of the state {found}: a flipped "
        "bit, or a faulty device. They took over the pieces of the majority; training goes on"
    )


def _minority(held: dict[int, int]) -> list[int]:
    """Return the ranks whose hash of a piece is not the majority's; all without a majority."""
    (winner, votes), *_ = Counter(held.values()).most_common()
    if votes <= len(held) / 2:
        return sorted(held)
    return sorted(rank for rank, value in held.items() if value != winner)


@torch.no_grad()
def _heal(tensor: Tensor | None, mesh: Mesh, source: int, takes: bool) -> None:
    """Send a piece from rank `source` to the ranks that take it. (all ranks)

    tensor: the piece on this rank; None if it holds another one.
    """
    form: tuple[tuple[int, ...], torch.dtype] = ((), torch.float32)
    if tensor is not None:
        form = (tuple(tensor.shape), tensor.dtype)
    shape, dtype = mesh.broadcast(form, source)
    sent = torch.empty(shape, dtype=dtype, device=mesh.device)
    if mesh.rank == source:
        assert tensor is not None
        sent.copy_(tensor)
    mesh.broadcast_tensor(sent, source)
    if takes:
        assert tensor is not None
        tensor.copy_(sent)


def _whole_weights(state: TrainState) -> set[str]:
    """Return the names of the weights that every rank has as a whole, in a state of pieces."""
    if is_cut(state.model) or state.weights is not None:
        return set()
    return {name for name, _ in state.model.named_parameters()}


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _compare_mirrors(state: TrainState, mesh: Mesh) -> None:
    """Compare each rank's share of a sharded state with its mirror. (all ranks, if any has one)

    Raises StateDiverged on all ranks where they differ: there is no majority of two.
    """
    mirror = state.mirror
    if mirror is None:
        return
    hashes = []
    for shards, optimizer in ((state.shards, state.optimizer), (mirror.shards, mirror.optimizer)):
        tensors = optimizer_tensors(optimizer, shards)
        if state.weights is not None:
            tensors |= {shard.piece.name: shard.param for shard in shards}
        # Owner and mirror may list them in another order.
        _, hashes_of_tensors = hash_tensors(dict(sorted(tensors.items())))
        hashes.append(combine(hashes_of_tensors))

    everyone = mesh.all_gather((mirror.owner, *hashes))
    pairs = []
    for rank, (owner, _, copy) in enumerate(everyone):
        if everyone[owner][1] != copy:
            pairs.append(f"of rank {owner} and its mirror on rank {rank}")
    if pairs:
        raise StateDiverged(
            f"after step {state.step} the sharded state differs {', '.join(pairs)}: a flipped bit, "
            "or a faulty device. It is unknown which copy is right: resume from the newest "
            "checkpoint"
        )


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in a row, as integers of their size: equal where all bits are."""
    return plain_memory(tensor).view(_INTEGERS.get(tensor.element_size(), torch.int64))


def hash_tensors(tensors: dict[str, Tensor]) -> tuple[list[str], list[int]]:
    """Return names, and a 64-bit sum of each tensor's bits: Σ (2i + 1)·x_i in int64, which wraps.

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
    """Return that sum, a scalar on the tensor's device. `odd` keeps factors for the next tensor."""
    flat = bits_of(tensor)
    chunk = _CHUNK.get(flat.device.type, 1 << 20)
    if flat.device not in odd:
        odd[flat.device] = torch.arange(1, 2 * chunk, 2, device=flat.device)  # 1, 3, 5, ...
    factors = odd[flat.device]

    # In a chunk that begins at element `begin`, element j has the factor 2j + 1 + 2·begin.
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), chunk):
        part = flat[begin : begin + chunk]
        total += (part * factors[: part.numel()]).sum()
        if begin:
            total += part.sum(dtype=torch.int64) * (2 * begin)
    return total


def combine(hashes: list[int]) -> int:
    """Return one 64-bit number that changes when one of the hashes does."""
    return sum((2 * i + 1) * value for i, value in enumerate(hashes)) % 2**64


def _first_difference(
    names: list[str], ours: tuple[int, list[int]], theirs: tuple[int, list[int]]
) -> str:
    """Return the first tensor that differs; each side is (number of hashes, hashes)."""
    if ours[0] != theirs[0]:
        return "the number of tensors of the optimizer"
    for name, own_hash, other_hash in zip(names, ours[1], theirs[1], strict=False):
        if own_hash != other_hash:
            return name
    return _CURSOR
