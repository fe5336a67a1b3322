"""Recover a sharded state after the loss of a rank: another rank mirrors each share.

    rank r's gradients ─► rank r + d ─► the norm's all-reduce ─► both update r's share, and spread it
                                        └ the commit point

When a rank has the norm, every rank has the gradients of its own share and of the one that it
mirrors. So if one rank has completed the step, all that are left can complete it: they do the same
update from the gradients that they kept. If none has, all repeat the step. Then the ranks that hold
pieces of weights and optimizer state send them to the ranks that need them, which may be fewer or
more than before. Nothing is read from disk.

The fused kernel rounds the last elements of a tensor differently, so a mirror is cut exactly as its
owner's share is. Ranks that hold the same part of a model that tp or pp has cut need no mirror: they
mirror each other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanoray.checkpoint.state.optimizers import elements_of, members_of, put_element
from nanoray.checkpoint.state.rank_state import Holding, Share, Update
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.errors import StateLost
from nanoray.machine.fault_points import reached
from nanoray.models.precision import step_unless
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.norm import clip_to
from nanoray.parallel.pieces import Shard
from nanoray.train.broadcast_state import receive_state

log = logging.getLogger("nanoray.rank")
# A place (the part of a parameter that a model has), and where elements of it begin and end
Span = tuple[str, int, int]
Kept = tuple[Shard, Optimizer | None]  # a shard, and its optimizer
# The kinds of an optimizer's state for a place: key -> (one number for a parameter, its type)
Kinds = dict[str, tuple[bool, torch.dtype]]


def give_shares(
    state: TrainState,
    mesh: Mesh,
    source: int,
    wanted: Share,
    weights: Sequence[Shard],
    clip: float,
) -> None:
    """Bring all ranks to the step of rank `source`, each with its share of the state. (all ranks)

    A rank gets its share, `wanted`, from those that hold it, or mirror it; of further `weights` it
    needs no optimizer state. Until all of it has arrived, the shards in `state` stay valid. Another
    rank may be lost meanwhile: then those that had the state can still give it. Raises StateLost on
    all ranks where no rank is left that has some part of it.
    """
    # A rank holds the state of the source's step, or can do the one update that it lacks.
    behind = mesh.broadcast(state.step, source) - state.step
    is_current = behind == 0
    can_catch_up = behind == 1 and state.can_finish
    holds = state.whole and (is_current or can_catch_up)

    norm, leave_out = mesh.broadcast(tuple(state.update), source)
    update = Update(
        None if norm is None else norm.to(mesh.device),
        None if leave_out is None else leave_out.to(mesh.device),
    )
    packed, session = receive_state(state, mesh, source, pieces=False)
    if mesh.rank != source:
        # Nothing communicates from here to the end of this block, so a step is finished as a whole
        # or not at all.
        if holds and behind:
            finish(state, update, clip)
            log.info("finished step %d, which rank %d had done", state.step + 1, source)
        state.load(packed)
        state.session = session
        state.update = update
    reached("caught_up")

    held = state.holdings if holds else []
    deal(mesh, held, wanted.holdings, [shard for shard in weights if shard.trained])
    state.can_finish = False
    state.hold(wanted)


def finish(state: TrainState, update: Update, clip: float) -> None:
    """Do the newest update of the other ranks from the gradients that this rank has kept."""
    shards = [shard for holding in state.holdings for shard in holding.shards]
    gradients = [shard.param.grad for shard in shards if shard.param.grad is not None]
    if clip and update.norm is not None:
        clip_to(clip, gradients, update.norm)
    for optimizer in state.optimizers:
        step_unless(optimizer, update.leave_out)


def copy_to_mirror(state: TrainState, mesh: Mesh) -> None:
    """Send each rank's share, just read from disk, to the rank that mirrors it. (all ranks)"""
    if state.mirror:
        # What has no state at this step must have none in the copy.
        for member in members_of(state.mirror.optimizer):
            member.state.clear()
        deal(mesh, [state.own], [state.mirror])


@torch.no_grad()
def deal(
    mesh: Mesh, held: Sequence[Holding], wanted: Sequence[Holding], weights: Sequence[Shard] = ()
) -> None:
    """Send parts of weights and optimizer state from holders to ranks that need them. (all ranks)

    Frozen weights have no such state, and of `weights`, which are further shards, it is not needed
    here. Sender and receiver may cut a parameter differently. Each element is sent once, to all.
    Raises StateLost on all ranks where no rank holds a needed one.
    """
    sources = _by_place(_pairs_of(held))
    targets = _by_place([*_pairs_of(wanted), *((shard, None) for shard in weights)])

    # (all ranks) Exchange: spans held, sizes and types of the places needed, kinds of state.
    own_spans = [shard.span for kept in sources.values() for shard, _ in kept]
    own_sizes = {}
    for place, kept in targets.items():
        shard, _ = kept[0]
        own_sizes[place] = (shard.origin.numel, shard.param.dtype)
    everyone = mesh.all_gather((own_spans, own_sizes, _kinds_of(sources)))

    # All ranks must derive the same order of broadcasts: by the sorted names of places.
    spans_of_ranks = []
    all_sizes: dict[str, tuple[int, torch.dtype]] = {}
    kinds: dict[str, Kinds] = {}
    for spans_of_rank, sizes_of_rank, kinds_of_rank in everyone:
        spans_of_ranks.append(spans_of_rank)
        all_sizes |= sizes_of_rank
        for place, of_place in kinds_of_rank.items():
            kinds[place] = kinds.get(place) or of_place
    sizes = dict(sorted(all_sizes.items()))
    numbers = {place: size for place, (size, _) in sizes.items()}

    # (all ranks) Broadcast each span: its weights, under the key "", then each kind of state.
    for (place, begin, end), rank in senders(spans_of_ranks, numbers):
        own = _cut(sources[place], begin, end) if rank == mesh.rank else {}
        _, weight_type = sizes[place]
        for key, (single, dtype) in {"": (False, weight_type), **kinds[place]}.items():
            if own:
                part = own[key]
            else:
                shape = () if single else (end - begin,)
                part = torch.empty(shape, dtype=dtype, device=mesh.device)
            mesh.broadcast_tensor(part, rank)
            for shard, optimizer in targets.get(place, ()):
                _paste(shard, optimizer, (begin, end), key, part)


def senders(held: Sequence[Sequence[Span]], sizes: Mapping[str, int]) -> list[tuple[Span, int]]:
    """Return spans that make up all places, each with the rank that sends it.

    `held` contains the spans of each rank, `sizes` the elements of each place. Raises StateLost
    where no rank holds an element.
    """
    by_name: dict[str, list[tuple[int, int, int]]] = {}
    for rank, spans in enumerate(held):
        for name, begin, end in spans:
            by_name.setdefault(name, []).append((begin, end, rank))
    spans_to_send: list[tuple[Span, int]] = []
    for name, size in sizes.items():
        # From each element take the longest span that begins at or before it; of equal ones, that
        # of the lowest rank.
        first = 0
        while first < size:
            usable = []
            for begin, end, rank in by_name.get(name, []):
                if begin <= first < end:
                    usable.append((end, -rank))
            if not usable:
                raise StateLost(
                    f"elements of {name} from {first} on are in the memory of none of these ranks: "
                    "the rank that owned them is gone, and so is each that mirrored or shared "
                    "them. The run continues from the newest checkpoint"
                )
            end, negative_rank = max(usable)
            spans_to_send.append(((name, first, end), -negative_rank))
            first = end
    return spans_to_send


def _pairs_of(holdings: Sequence[Holding]) -> list[Kept]:
    """Return the shards of some holdings, each with its optimizer; frozen ones have none."""
    pairs: list[Kept] = []
    for holding in holdings:
        # Of several optimizers each has its own parameters.
        optimizer_of: dict[Tensor, Optimizer] = {}
        for member in members_of(holding.optimizer):
            for group in member.param_groups:
                optimizer_of |= dict.fromkeys(group["params"], member)
        pairs += [(shard, optimizer_of[shard.param]) for shard in holding.shards]
        pairs += [(shard, None) for shard in holding.frozen]
    return pairs


def _kinds_of(held: Mapping[str, Sequence[Kept]]) -> dict[str, Kinds]:
    """Return by place which kinds of state an optimizer keeps for it."""
    kinds: dict[str, Kinds] = {}
    for place, kept in held.items():
        shard, optimizer = kept[0]
        state = optimizer.state.get(shard.param, {}) if optimizer else {}
        of_place = {}
        for key, tensor in elements_of(state).items():
            of_place[key] = (tensor.dim() == 0, tensor.dtype)
        kinds[place] = of_place
    return kinds


def _by_place(kept: Sequence[Kept]) -> dict[str, list[Kept]]:
    places: dict[str, list[Kept]] = {}
    for shard, optimizer in kept:
        places.setdefault(shard.origin.place, []).append((shard, optimizer))
    return places


def _cut(held: Sequence[Kept], begin: int, end: int) -> dict[str, Tensor]:
    """Return elements of a place, (end - begin,), under "", and their optimizer state by key."""
    for shard, optimizer in held:
        _, first, last = shard.span
        if not (first <= begin and end <= last):
            continue
        parts = {"": shard.param.detach()}
        if optimizer:
            parts |= elements_of(optimizer.state.get(shard.param, {}))
        for key, tensor in parts.items():
            if tensor.dim():  # a step counter is one number for all elements
                parts[key] = tensor.view(-1)[begin - first : end - first]
        return parts
    raise AssertionError(f"{begin}:{end} is not held here")


def _paste(
    shard: Shard, optimizer: Optimizer | None, bounds: tuple[int, int], key: str, part: Tensor
) -> None:
    """Copy received elements, or their optimizer state under `key`, into a shard that needs them."""
    begin, end = bounds
    _, first, last = shard.span
    low = max(first, begin)
    high = min(last, end)
    if low >= high or (key and optimizer is None):
        return

    target: Tensor = shard.param
    if key:
        assert optimizer
        state = optimizer.state[shard.param]
        if not part.dim():
            put_element(state, key, part.clone())
            return
        # The optimizer of a new shard has no state before its first step.
        kept = elements_of(state)
        if key not in kept:
            zeros = torch.zeros(shard.param.shape, dtype=part.dtype, device=part.device)
            put_element(state, key, zeros)
            kept[key] = zeros
        target = kept[key]
    target.view(-1)[low - first : high - first].copy_(part[low - begin : high - begin])
