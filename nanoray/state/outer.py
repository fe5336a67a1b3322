"""What rarely communicating replicas share: the anchor, and the momentum of the outer optimizer.

    anchor      the weights that the newest exchange has left on all replicas: the model of the run
    momentum    of the outer optimizer, SGD with Nesterov momentum; equal on all replicas, too
    weights     the model's own parameters: the anchor, and the steps that a replica has done since

A checkpoint, and a rank that joins, receive the anchor as the model. A replica's weights travel
beside the optimizer's tensors under a kind of their own, and so does the momentum: a reader that
wants only a model finds one. As a part of the state it comes last, and changes what the parts before
it have packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from nanoray.config.optim import FRAGMENT_DELAY
from nanoray.mesh.pieces import Shard
from nanoray.state.part import StatePart
from nanoray.state.rank_state import Values
from nanoray.state.state_dict import StateDict, Tensors

# Kinds beside those of the optimizer: "KIND.PARAMETER"
REPLICA_WEIGHTS = "replica_weights"
SENT_WEIGHTS = "sent_weights"
OUTER_MOMENTUM = "outer_momentum"
KINDS = (REPLICA_WEIGHTS, SENT_WEIGHTS, OUTER_MOMENTUM)
# The key, beside each rank's generators, of when its replica joined, and of its loss scale
REPLICA = "replica"


class Outer(StatePart):
    """Anchor and momentum of this rank's shards, by parameter."""

    def __init__(
        self,
        shards: Sequence[Shard],
        momentum: bool,
        fragments: Sequence[Sequence[str]],
        scaler: Values | None = None,
    ) -> None:
        """Begin a first round: the anchor is the weights of now, and there is no momentum yet.

        fragments: the names of the parameters that are averaged together. scaler: the loss scale,
        of which each replica has its own.
        """
        self.shards = shards
        self._scaler = scaler
        self.anchor: Tensors = {}
        self.momentum: Tensors = {}
        for shard in shards:
            weights = shard.param.detach()
            self.anchor[shard.piece.name] = weights.clone()
            if momentum:
                self.momentum[shard.piece.name] = torch.zeros_like(weights)

        # By fragment: the step whose weights were averaged last
        self.synced = [0] * len(fragments)
        # The step after which this replica began with the state of another one
        self.joined = 0
        # The place of this rank in its present group
        self.replica = 0
        self.replicas = 1
        self.ranks = 1  # that train this replica together

        # The weights of fragments that are on their way while training goes on
        self.sent: Tensors = {}
        # What another replica has finished of a fragment that is to be applied some steps later: the
        # step whose weights were averaged, anchor and momentum
        self._later: dict[int, tuple[int, Tensors, Tensors]] = {}
        self._fragments = fragments

    def begin(self, step: int) -> None:
        """Begin a first round after `step`, from the weights of now."""
        for shard in self.shards:
            self.anchor[shard.piece.name].copy_(shard.param.detach())
        for momentum in self.momentum.values():
            momentum.zero_()
        self.sent.clear()
        self._later.clear()
        self.synced = [step] * len(self.synced)
        self.joined = step

    def shards_of(self, fragment: int) -> list[Shard]:
        """Return the shards of a fragment, in their order."""
        names = set(self._fragments[fragment])
        return [shard for shard in self.shards if shard.piece.name in names]

    def counts(self, fragment: int) -> bool:
        """Return whether this replica has done the whole round of a fragment."""
        return self.joined <= self.synced[fragment]

    @property
    def counting(self) -> list[bool]:
        """For each fragment, whether this replica counts in its next average."""
        return [self.counts(fragment) for fragment in range(len(self.synced))]

    def stand_in(self) -> None:
        """Let this replica count in all averages, because each that had begun a round is lost."""
        self.joined = min(self.synced)

    def at_anchor(self, step: int) -> bool:
        """Return whether the weights after `step` are the anchor: all has just been averaged."""
        return not self.sent and all(synced == step for synced in self.synced)

    # One exchange of a fragment.

    def put_aside(self, fragment: int) -> None:
        """Keep a fragment's weights of now, which travel while training changes them."""
        for shard in self.shards_of(fragment):
            if shard.piece.name not in self.sent:
                self.sent[shard.piece.name] = shard.param.detach().clone()

    @torch.no_grad()
    def moved(self, fragment: int) -> list[Tensor]:
        """Return by how much each shard of a fragment has moved away from the anchor.

        As a gradient it points back: anchor minus weights.
        """
        moved = []
        for shard in self.shards_of(fragment):
            name = shard.piece.name
            weights = self.sent.get(name, shard.param.detach())
            moved.append(self.anchor[name] - weights)
        return moved

    @torch.no_grad()
    def update(
        self, fragment: int, means: Sequence[Tensor], step: int, lr: float, decay: float
    ) -> None:
        """Move the anchor of a fragment by the mean differences of `step`, and the weights with it.

        The update is that of torch.optim.SGD(lr, momentum=decay, nesterov=True), to the bit. Where
        training has gone on since `step`, the weights keep what they have learned meanwhile.
        Nothing communicates, so an exchange is finished as a whole or not at all.
        """
        for shard, gradient in zip(self.shards_of(fragment), means, strict=True):
            name = shard.piece.name
            if decay:
                momentum = self.momentum[name]
                momentum.mul_(decay).add_(gradient)
                gradient = gradient.add(momentum, alpha=decay)
            self.anchor[name].add_(gradient, alpha=-lr)
            self._follow_anchor(shard)
        self.synced[fragment] = step

    def _follow_anchor(self, shard: Shard) -> None:
        """Let the weights be the new anchor, and the steps since they were sent."""
        sent = self.sent.pop(shard.piece.name, None)
        anchor = self.anchor[shard.piece.name]
        if sent is None:
            shard.param.detach().copy_(anchor)
        else:
            shard.param.detach().add_(anchor - sent)

    # To other ranks, and to a checkpoint.

    def pack(self, packed: StateDict) -> None:
        """Make the anchor the model, and add the replica's own state beside the optimizer's."""
        for name, tensor in packed.model.items():
            packed.model[name] = self.anchor.get(packed.aliases.get(name, name), tensor)
        packed.meta["outer"] = {
            "synced": list(self.synced),
            "joined": self.joined,
            "replicas": self.replicas,
        }
        if packed.has_optimizer:
            packed.optimizer |= self._beside(packed.meta["step"])

    def pack_own(self, packed: StateDict, first: bool) -> None:
        """Leave to each replica its own state, and to the first one the model."""
        packed.replica = self.replica
        pieces = packed.pieces or {}
        for name in pieces:
            if self.replica:
                del packed.model[name]
            elif name in self.anchor:  # frozen weights are not
                packed.model[name] = self.anchor[name]
        for name, tensor in self._beside(packed.meta["step"]).items():
            _, _, param = name.partition(".")
            if param in pieces:
                packed.optimizer[name] = tensor

    def _beside(self, step: int) -> Tensors:
        """Return the momentum, and this replica's weights, as tensors beside the optimizer's.

        Where the weights after `step` are the anchor, they are left out.
        """
        kinds = {OUTER_MOMENTUM: self.momentum}
        if not self.at_anchor(step):
            kinds[REPLICA_WEIGHTS] = {s.piece.name: s.param.detach() for s in self.shards}
            kinds[SENT_WEIGHTS] = self.sent
        tensors = {}
        for kind, by_name in kinds.items():
            for name, tensor in by_name.items():
                tensors[f"{kind}.{name}"] = tensor
        return tensors

    def compared(self, tensors: Tensors) -> None:
        """Replicas share the anchor and its momentum, by the places of pieces, and nothing else."""
        tensors.clear()
        for shard in self.shards:
            name = shard.piece.name
            place = shard.piece.place
            tensors[place] = self.anchor[name]
            if name in self.momentum:
                tensors[f"{OUTER_MOMENTUM}.{place}"] = self.momentum[name]

    def of_rank(self) -> Tensors:
        scale = self._scaler.values() if self._scaler else {}
        return {REPLICA: torch.tensor([self.joined, *scale.values()], dtype=torch.float64)}

    @torch.no_grad()
    def load(self, saved: StateDict) -> None:
        """Restore anchor, momentum and counters; the weights have the anchor already.

        A state of a run that averaged its gradients has none of them: a first round begins.
        """
        if not saved.has_weights:
            return
        self.begin(saved.meta["step"])
        values = saved.meta.get("outer")
        if values:
            self.synced = list(values["synced"])
            self.joined = values["joined"]
        # These are of the rank that has saved the rest, but each replica has its own.
        if REPLICA in saved.own:
            joined, *scale = saved.own[REPLICA].tolist()
            self.joined = int(joined)
            if self._scaler and scale:
                self._scaler.load_values(dict(zip(saved.scaler, scale, strict=True)))
        momenta = of_kind(OUTER_MOMENTUM, saved.optimizer)
        weights = of_kind(REPLICA_WEIGHTS, saved.optimizer)
        sent = of_kind(SENT_WEIGHTS, saved.optimizer)
        for shard in self.shards:
            name = shard.piece.name
            param = shard.param
            if name in momenta and name in self.momentum:
                self.momentum[name].copy_(momenta[name].view_as(param))
            if name in weights:
                param.copy_(weights[name].view_as(param))
            if name in sent:
                self.sent[name] = sent[name].view_as(param).to(param.device, copy=True)

    def follow(
        self, of_steps: Sequence[int], anchors: Tensors, momenta: Tensors, step: int
    ) -> None:
        """Take over the exchanges that another replica has finished and this one has not.

        `of_steps` is that replica's `synced`; anchors and momenta are its own, by parameter. What
        travels beside training is applied after the step after which that replica has applied it;
        this one is after `step`.
        """
        for fragment, synced in enumerate(of_steps):
            if synced <= self.synced[fragment]:
                continue
            anchor = {}
            momentum = {}
            for shard in self.shards_of(fragment):
                name = shard.piece.name
                anchor[name] = anchors[name].clone()
                if name in self.momentum:
                    momentum[name] = momenta[name].clone()
            self._later[fragment] = (synced, anchor, momentum)
        self.apply_later(step)

    @torch.no_grad()
    def apply_later(self, step: int) -> None:
        """Apply what `follow` has taken over and is due after `step`; nothing is sent."""
        for fragment, (synced, anchor, momentum) in list(self._later.items()):
            of_fragment = self.shards_of(fragment)
            travels = any(shard.piece.name in self.sent for shard in of_fragment)
            if travels and step < synced + FRAGMENT_DELAY:
                continue
            for shard in of_fragment:
                name = shard.piece.name
                self.anchor[name].copy_(anchor[name].view_as(self.anchor[name]))
                if name in self.momentum:
                    self.momentum[name].copy_(momentum[name].view_as(self.momentum[name]))
                self._follow_anchor(shard)
            self.synced[fragment] = synced
            del self._later[fragment]

    @contextmanager
    def in_model(self, step: int, changed: Callable[[], None]) -> Iterator[None]:
        """Let the parameters have the anchor inside, and the replica's weights again afterwards.

        `changed` is called after each change, and sends shards to ranks that hold whole weights.
        """
        if self.at_anchor(step):
            yield
            return
        self._exchange()
        changed()
        try:
            yield
        finally:
            self._exchange()
            changed()

    @torch.no_grad()
    def _exchange(self) -> None:
        # One parameter after the other, so that no second copy of the model is needed.
        for shard in self.shards:
            anchor = self.anchor[shard.piece.name]
            weights = shard.param.detach().clone()
            shard.param.copy_(anchor)
            anchor.copy_(weights)


def fragments_of(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divide parameters, in their order, into `count` fragments of about equally many elements."""
    total = sum(sizes.values())
    fragments: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for name, size in sizes.items():
        # The fragment in which the middle of the parameter lies.
        middle = before + size / 2
        fragments[min(int(middle * count / total), count - 1)].append(name)
        before += size
    return fragments


def of_kind(kind: str, tensors: Tensors) -> Tensors:
    """Return the tensors of one kind, by parameter."""
    found = {}
    for name, tensor in tensors.items():
        own_kind, _, parameter = name.partition(".")
        if own_kind == kind:
            found[parameter] = tensor
    return found


def joins_now(packed: StateDict) -> None:
    """Let a replica that loads another one's state count from the next round on."""
    if "outer" in packed.meta:
        packed.meta["outer"]["joined"] = packed.meta["step"]


def without_outer(tensors: Tensors) -> Tensors:
    """Return an optimizer's own tensors, without those of the kinds of this file."""
    return {name: t for name, t in tensors.items() if name.partition(".")[0] not in KINDS}
