"""A sharded state survives the loss of a rank: another one mirrors its share, and the step in progress is finished.

    rank r's gradients ─► rank r + d ─► the norm's all-reduce ─► both update r's share, and spread the weights
                                        └ the commit point

A rank that knows the norm knows that every rank has the gradients of its own share and of the one that it mirrors. So
when one of them has completed the step, all that are left can: they do the same update from the gradients that they
kept. If none has, all repeat the step. After that the ranks that hold pieces of weights and optimizer state send them
to those that want them, which may be fewer or more ranks than before: nothing is read from disk.

The fused kernel rounds the last elements of a tensor otherwise, so a mirror is cut exactly as its owner's share is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nanoray.errors import StateLost
from nanoray.mesh.mesh import Mesh
from nanoray.parallel.norm import clip_to
from nanoray.points import reached
from nanoray.state import Holding, TrainState, Update, fetch
from nanoray.train.precision import step_unless

log = logging.getLogger("nanoray")
Span = tuple[str, int, int]  # a parameter's name, and where elements of it begin and end in row-major order


def recover(
    state: TrainState, mesh: Mesh, source: int, wanted: Sequence[Holding], clip: float, by_pieces: bool = False
) -> None:
    """Bring all ranks to the step of rank `source`, the furthest, and fill `wanted` from their memory. (all ranks)

    wanted: what this rank keeps from now on: its own share, and the one that it mirrors, if any. Until this returns,
    what `state` holds stays valid: another rank may be lost meanwhile. Raises StateLost on all ranks when no rank is
    left that holds some share. by_pieces: several ranks hold the same pieces, and are cut as they were before.
    """
    device, behind = mesh.device, mesh.broadcast(state.step, source) - state.step
    holds = state.whole and (not behind or (behind == 1 and state.can_finish))
    update = Update(*(None if v is None else v.to(device) for v in mesh.broadcast(tuple(state.update), source)))
    packed, session = fetch(state, mesh, source, pieces=False)
    if mesh.rank != source:
        # Nothing communicates from here to the end of this block, so a step is finished as a whole or not at all.
        if holds and behind:
            finish(state, update, clip)
            log.info("finished step %d, which rank %d had done", state.step + 1, source)
        state.load(packed, optimizer=False, weights=False)
        state.session, state.update = session, update
    reached("caught_up")
    held = [Holding(state.shards, state.optimizer, mesh.rank), *([state.mirror] if state.mirror else [])]
    if by_pieces:
        hand_over(mesh, held if holds else [], wanted)
    else:
        deal(mesh, state.model, held if holds else [], wanted)
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
    """Give each rank's optimizer state, which was just read from disk, to the rank that mirrors it. (all ranks)"""
    if state.mirror:
        deal(mesh, state.model, [Holding(state.shards, state.optimizer, mesh.rank)], [state.mirror])


@torch.no_grad()
def deal(mesh: Mesh, model: nn.Module, held: Sequence[Holding], wanted: Sequence[Holding]) -> None:
    """Send pieces of weights and optimizer state from where they are held to where they are wanted. (all ranks)

    Every rank gets all weights, in `model`. Each element is sent once, to all. Raises StateLost on all ranks.
    """
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    has = [(shard.piece.name, *shard.piece.span) for holding in held for shard in holding.shards]
    everyone = mesh.all_gather((has, _kinds_of(held)))
    sizes = {name: p.numel() for name, p in weights.items()}
    kinds = next((kinds for _, kinds in everyone if kinds), {})
    for (name, begin, end), rank in senders([spans for spans, _ in everyone], sizes):
        own = _cut(held, name, begin, end) if rank == mesh.rank else {}
        parts = {"": weights[name].dtype} | {key: dtype for key, (_, dtype) in kinds.items()}
        for key, dtype in parts.items():
            shape = () if key and kinds[key][0] else (end - begin,)
            part = own[key] if own else torch.empty(shape, dtype=dtype, device=mesh.device)
            mesh.broadcast_tensor(part, rank)
            if not key:
                weights[name].view(-1)[begin:end].copy_(part)
            else:
                _paste(wanted, (name, begin, end), key, part)


@torch.no_grad()
def hand_over(mesh: Mesh, held: Sequence[Holding], wanted: Sequence[Holding]) -> None:
    """Send each piece, and what the optimizer keeps for it, from a rank that has it to those that want it. (all ranks)

    A piece is sent once, to all. Raises StateLost on all ranks where a piece is wanted that nobody has.
    """
    has = {shard.piece.place: (shard.param, holding.optimizer) for holding in held for shard in holding.shards}
    wants = {shard.piece.place: (shard.param, holding.optimizer) for holding in wanted for shard in holding.shards}
    sizes = {place: (param.numel(), param.dtype) for place, (param, _) in wants.items()}
    everyone = mesh.all_gather(([*has], sizes, _kinds_of(held)))
    kinds = next((kinds for _, _, kinds in everyone if kinds), {})
    for place, (size, dtype) in sorted({at: what for _, sizes, _ in everyone for at, what in sizes.items()}.items()):
        sender = next((rank for rank, (places, _, _) in enumerate(everyone) if place in places), None)
        if sender is None:
            raise StateLost(
                f"{place} is in the memory of none of these ranks: each that held it is gone, or a step behind. "
                "The run continues from the newest checkpoint"
            )
        for key, (single, kind) in {"": (False, dtype), **kinds}.items():
            part = torch.empty(() if single else (size,), dtype=kind, device=mesh.device)
            if mesh.rank == sender:
                param, optimizer = has[place]
                part.copy_((optimizer.state[param][key] if key else param).reshape(part.shape))
            mesh.broadcast_tensor(part, sender)
            if place in wants:
                param, optimizer = wants[place]
                if key:
                    optimizer.state[param][key] = part if single else part.view_as(param)
                else:
                    param.copy_(part.view_as(param))


def senders(held: Sequence[Sequence[Span]], sizes: Mapping[str, int]) -> list[tuple[Span, int]]:
    """Return who sends what: spans that make up all parameters, of `sizes` elements, each with a rank that holds it.

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
            usable = [(end, -rank) for begin, end, rank in by_name.get(name, []) if begin <= at < end]
            if not usable:
                raise StateLost(
                    f"elements of {name} from {at} on are in the memory of none of these ranks: the rank that owned "
                    "them is gone, and so is the one that mirrored it. The run continues from the newest checkpoint"
                )
            end, rank = max(usable)
            found.append(((name, at, end), -rank))
            at = end
    return found


def _kinds_of(held: Sequence[Holding]) -> dict[str, tuple[bool, torch.dtype]]:
    """Return what an optimizer keeps for each parameter: whether it is one number for all elements, and its type."""
    for holding in held:
        for state in holding.optimizer.state.values():
            return {key: (t.dim() == 0, t.dtype) for key, t in state.items() if isinstance(t, Tensor)}
    return {}


def _cut(held: Sequence[Holding], name: str, begin: int, end: int) -> dict[str, Tensor]:
    """Return elements of a parameter, (end - begin,), as "" and what the optimizer keeps for them, by key."""
    for holding in held:
        for shard in holding.shards:
            first, last = shard.piece.span
            if shard.piece.name == name and first <= begin and end <= last:
                parts = {"": shard.param.detach(), **holding.optimizer.state.get(shard.param, {})}
                return {k: t.view(-1)[begin - first : end - first] if t.dim() else t for k, t in parts.items()}
    raise AssertionError(f"{name} {begin}:{end} is not held here")


def _paste(wanted: Sequence[Holding], span: Span, key: str, part: Tensor) -> None:
    """Copy what an optimizer keeps for a span of elements to where it is wanted, here."""
    name, begin, end = span
    for holding in wanted:
        for shard in holding.shards:
            first, last = shard.piece.span
            low, high = max(first, begin), min(last, end)
            if shard.piece.name != name or low >= high:
                continue
            state = holding.optimizer.state[shard.param]
            if not part.dim():
                state[key] = part.clone()
                continue
            if key not in state:
                state[key] = torch.zeros(shard.param.shape, dtype=part.dtype, device=part.device)
            state[key].view(-1)[low - first : high - first].copy_(part[low - begin : high - begin])
