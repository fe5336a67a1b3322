"""A sharded state survives the loss of a rank: another one mirrors its share, and the step in
progress is finished.

    rank r's gradients ─► rank r + d ─► the norm's all-reduce ─► both update r's share, and spread the weights
                                        └ the commit point

A rank that knows the norm knows that every rank has the gradients of its own share and of the one
that it mirrors. So when one of them has completed the step, all that are left can: they do the same
update from the gradients that they kept. If none has, all repeat the step. After that the ranks
that hold pieces of weights and optimizer state send them to those that want them, which may be
fewer or more ranks than before: nothing is read from disk.

The fused kernel rounds the last elements of a tensor otherwise, so a mirror is cut exactly as its
owner's share is. Ranks that hold the same part of a model that tp or pp cut need no mirror: they
are each other's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanoray.errors import StateLost
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Shard
from nanoray.models.precision import step_unless
from nanoray.parallel.norm import clip_to
from nanoray.points import reached
from nanoray.state import Holding, TrainState, Update, fetch

log = logging.getLogger("nanoray")
# What a model has of a parameter, and where elements of that begin and end, row by row
Span = tuple[str, int, int]
Kept = tuple[Shard, Optimizer | None]  # a shard, and what updates it


def recover(
    state: TrainState,
    mesh: Mesh,
    source: int,
    wanted: Sequence[Holding],
    clip: float,
    weights: Sequence[Shard] = (),
) -> None:
    """Bring all ranks to the step of rank `source`, the furthest, and fill `wanted` from their
    memory. (all ranks)

    wanted: what this rank keeps from now on: its own share, and the one that it mirrors, if any;
    weights: others that it keeps besides. Until this returns, what `state` holds stays valid:
    another rank may be lost meanwhile. Raises StateLost on all ranks when no rank is left that
    holds some share.
    """
    device, behind = mesh.device, mesh.broadcast(state.step, source) - state.step
    holds = state.whole and (not behind or (behind == 1 and state.can_finish))
    update = Update(
        *(None if v is None else v.to(device) for v in mesh.broadcast(tuple(state.update), source))
    )
    packed, session = fetch(state, mesh, source, pieces=False)
    if mesh.rank != source:
        # Nothing communicates from here to the end of this block, so a step is finished as a whole
        # or not at all.
        if holds and behind:
            finish(state, update, clip)
            log.info("finished step %d, which rank %d had done", state.step + 1, source)
        state.load(packed, optimizer=False, weights=False)
        state.session, state.update = session, update
    reached("caught_up")
    held = [
        Holding(state.shards, state.optimizer, mesh.rank),
        *([state.mirror] if state.mirror else []),
    ]
    deal(mesh, held if holds else [], wanted, weights)
    state.can_finish = False


def finish(state: TrainState, update: Update, clip: float) -> None:
    """Do the newest update of the other ranks from the gradients that this rank has kept."""
    shards = [*state.shards, *(state.mirror.shards if state.mirror else [])]
    gradients = [shard.param.grad for shard in shards if shard.param.grad is not None]
    if clip and update.norm is not None:
        clip_to(clip, gradients, update.norm)
    for optimizer in state.optimizers:
        step_unless(optimizer, update.leave_out)


def copy_to_mirror(state: TrainState, mesh: Mesh) -> None:
    """Give each rank's share, which was just read from disk, to the rank that mirrors it. (all
    ranks)
    """
    if state.mirror:
        deal(mesh, [Holding(state.shards, state.optimizer, mesh.rank)], [state.mirror])


@torch.no_grad()
def deal(
    mesh: Mesh, held: Sequence[Holding], wanted: Sequence[Holding], weights: Sequence[Shard] = ()
) -> None:
    """Send parts of weights and optimizer state from where they are held to where they are wanted.
    (all ranks)

    weights: further shards, whose optimizer state is not wanted here. Holders and those who want
    may cut otherwise. Each element is sent once, to all. Raises StateLost on all ranks where one is
    wanted that nobody holds.
    """
    sources = _by_place(
        [(shard, holding.optimizer) for holding in held for shard in holding.shards]
    )
    pairs: list[Kept] = [
        (shard, holding.optimizer) for holding in wanted for shard in holding.shards
    ]
    targets = _by_place([*pairs, *((shard, None) for shard in weights)])
    sizes = {place: (of[0][0].origin.numel, of[0][0].param.dtype) for place, of in targets.items()}
    everyone = mesh.all_gather(
        ([shard.span for of in sources.values() for shard, _ in of], sizes, _kinds_of(held))
    )
    kinds = next((kinds for _, _, kinds in everyone if kinds), {})
    sizes = dict(
        sorted({place: of for _, sizes, _ in everyone for place, of in sizes.items()}.items())
    )
    spans = senders(
        [spans for spans, _, _ in everyone], {place: size for place, (size, _) in sizes.items()}
    )
    for (place, begin, end), rank in spans:
        own = _cut(sources[place], begin, end) if rank == mesh.rank else {}
        for key, (single, dtype) in {"": (False, sizes[place][1]), **kinds}.items():
            part = (
                own[key]
                if own
                else torch.empty(() if single else (end - begin,), dtype=dtype, device=mesh.device)
            )
            mesh.broadcast_tensor(part, rank)
            for shard, optimizer in targets.get(place, ()):
                _paste(shard, optimizer, (begin, end), key, part)


def senders(held: Sequence[Sequence[Span]], sizes: Mapping[str, int]) -> list[tuple[Span, int]]:
    """Return who sends what: spans that make up all places, of `sizes` elements, each with a rank
    that holds it.

    `held`: the spans of each rank. Raises StateLost where nobody holds an element.
    """
    by_name: dict[str, list[tuple[int, int, int]]] = {}
    for rank, spans in enumerate(held):
        for name, begin, end in spans:
            by_name.setdefault(name, []).append((begin, end, rank))
    found: list[tuple[Span, int]] = []
    for name, size in sizes.items():
        at = 0
        while at < size:
            usable = [
                (end, -rank) for begin, end, rank in by_name.get(name, []) if begin <= at < end
            ]
            if not usable:
                raise StateLost(
                    f"elements of {name} from {at} on are in the memory of none of these ranks: "
                    "the rank that owned "
                    "them is gone, and so is each that mirrored or shared them. The run continues "
                    "from the newest "
                    "checkpoint"
                )
            end, rank = max(usable)
            found.append(((name, at, end), -rank))
            at = end
    return found


def _kinds_of(held: Sequence[Holding]) -> dict[str, tuple[bool, torch.dtype]]:
    """Return what an optimizer keeps for each parameter: whether it is one number for all elements,
    and its type.
    """
    for holding in held:
        for state in holding.optimizer.state.values():
            return {
                key: (t.dim() == 0, t.dtype) for key, t in state.items() if isinstance(t, Tensor)
            }
    return {}


def _by_place(kept: Sequence[Kept]) -> dict[str, list[Kept]]:
    found: dict[str, list[Kept]] = {}
    for shard, optimizer in kept:
        found.setdefault(shard.origin.place, []).append((shard, optimizer))
    return found


def _cut(held: Sequence[Kept], begin: int, end: int) -> dict[str, Tensor]:
    """Return elements of a place, (end - begin,), as "" and what the optimizer keeps for them, by
    key.
    """
    for shard, optimizer in held:
        _, first, last = shard.span
        if first <= begin and end <= last:
            parts = {
                "": shard.param.detach(),
                **(optimizer.state.get(shard.param, {}) if optimizer else {}),
            }
            return {
                k: t.view(-1)[begin - first : end - first] if t.dim() else t
                for k, t in parts.items()
            }
    raise AssertionError(f"{begin}:{end} is not held here")


def _paste(
    shard: Shard, optimizer: Optimizer | None, at: tuple[int, int], key: str, part: Tensor
) -> None:
    """Copy elements of the shard's origin, or what an optimizer keeps for them, to where they are
    wanted, here.
    """
    (begin, end), (_, first, last) = at, shard.span
    low, high = max(first, begin), min(last, end)
    if low >= high or (key and optimizer is None):
        return
    if not key:
        to = shard.param
    else:
        assert optimizer
        state = optimizer.state[shard.param]
        if not part.dim():
            state[key] = part.clone()
            return
        if key not in state:
            state[key] = torch.zeros(shard.param.shape, dtype=part.dtype, device=part.device)
        to = state[key]
    to.view(-1)[low - first : high - first].copy_(part[low - begin : high - begin])
