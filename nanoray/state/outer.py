"""What rarely communicating replicas share: the anchor, and the momentum of the outer optimizer.

    anchor      the weights that the newest exchange has left on all replicas: the model of the run
    momentum    of the outer optimizer, SGD with Nesterov momentum; equal on all replicas, too
    weights     the model's own parameters: the anchor, and the steps that a replica has done since

A checkpoint, and a rank that joins, receive the anchor as the model. A replica's weights travel
beside the optimizer's tensors under a kind of their own, and so does the momentum: a reader that
wants only a model finds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nanoray.config.optim import FRAGMENT_DELAY
from nanoray.mesh.pieces import Shard

# Kinds beside those of the optimizer: "KIND.PARAMETER"
REPLICA_WEIGHTS = "replica_weights"
SENT_WEIGHTS = "sent_weights"
OUTER_MOMENTUM = "outer_momentum"
KINDS = (REPLICA_WEIGHTS, SENT_WEIGHTS, OUTER_MOMENTUM)

Tensors = dict[str, Tensor]


class Outer:
    """Anchor and momentum of this rank's shards, by parameter."""

    def __init__(
        self, shards: Sequence[Shard], momentum: bool, fragments: Sequence[Sequence[str]]
    ) -> None:
        """Begin a first round: the anchor is the weights of now, and there is no momentum yet.

        fragments: the names of the parameters that are averaged together.
        """
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
        self.saves = True  # whether it saves its replica's state, or its part of that

        # The weights of fragments that are on their way while training goes on
        self.sent: Tensors = {}
        # What another replica has finished of a fragment that is to be applied some steps later: the
        # step whose weights were averaged, anchor and momentum
        self._later: dict[int, tuple[int, Tensors, Tensors]] = {}
        self._fragments = fragments

    def begin(self, shards: Sequence[Shard], step: int) -> None:
        """Begin a first round after `step`, from the weights of now."""
        for shard in shards:
            self.anchor[shard.piece.name].copy_(shard.param.detach())
        for momentum in self.momentum.values():
            momentum.zero_()
        self.sent.clear()
        self._later.clear()
        self.synced = [step] * len(self.synced)
        self.joined = step

    def shards_of(self, shards: Sequence[Shard], fragment: int) -> list[Shard]:
        """Return the shards of a fragment, in their order."""
        names = set(self._fragments[fragment])
        return [shard for shard in shards if shard.piece.name in names]

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

    def put_aside(self, shards: Sequence[Shard], fragment: int) -> None:
        """Keep a fragment's weights of now, which travel while training changes them."""
        for shard in self.shards_of(shards, fragment):
            if shard.piece.name not in self.sent:
                self.sent[shard.piece.name] = shard.param.detach().clone()

    @torch.no_grad()
    def moved(self, shards: Sequence[Shard], fragment: int) -> list[Tensor]:
        """Return by how much each shard of a fragment has moved away from the anchor.

        As a gradient it points back: anchor minus weights.
        """
        moved = []
        for shard in self.shards_of(shards, fragment):
            name = shard.piece.name
            weights = self.sent.get(name, shard.param.detach())
            moved.append(self.anchor[name] - weights)
        return moved

    @torch.no_grad()
    def update(
        self,
        shards: Sequence[Shard],
        fragment: int,
        means: Sequence[Tensor],
        step: int,
        lr: float,
        decay: float,
    ) -> None:
        """Move the anchor of a fragment by the mean differences of `step`, and the weights with it.

        The update is that of torch.optim.SGD(lr, momentum=decay, nesterov=True), to the bit. Where
        training has gone on since `step`, the weights keep what they have learned meanwhile.
        Nothing communicates, so an exchange is finished as a whole or not at all.
        """
        for shard, gradient in zip(self.shards_of(shards, fragment), means, strict=True):
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

    def tensors(self, places: Mapping[str, str] | None = None) -> Tensors:
        """Return what must be equal on all replicas: the anchor under the parameters' names.

        places: the names to use in their place, where ranks hold different pieces of parameters.
        """
        tensors = {}
        for name, anchor in self.anchor.items():
            place = places[name] if places else name
            tensors[place] = anchor
            if name in self.momentum:
                tensors[f"{OUTER_MOMENTUM}.{place}"] = self.momentum[name]
        return tensors

    def packed(self, shards: Sequence[Shard], step: int) -> Tensors:
        """Return the momentum, and this replica's weights, as tensors beside the optimizer's.

        Where the weights after `step` are the anchor, they are left out.
        """
        tensors = self._named(OUTER_MOMENTUM, self.momentum)
        if not self.at_anchor(step):
            weights = {shard.piece.name: shard.param.detach() for shard in shards}
            tensors |= self._named(REPLICA_WEIGHTS, weights)
            tensors |= self._named(SENT_WEIGHTS, self.sent)
        return tensors

    def _named(self, kind: str, tensors: Tensors) -> Tensors:
        return {f"{kind}.{name}": tensor for name, tensor in tensors.items()}

    def values(self) -> dict[str, Any]:
        """Return the counters as JSON."""
        return {"synced": list(self.synced), "joined": self.joined, "replicas": self.replicas}

    @torch.no_grad()
    def load(
        self, shards: Sequence[Shard], tensors: Tensors, values: Mapping[str, Any], step: int
    ) -> None:
        """Restore a state of `step`, whose anchor the weights have now.

        `tensors` and `values` are what `packed` and `values` returned; both are empty for a state
        of a run that averaged its gradients.
        """
        self.begin(shards, step)
        if values:
            self.synced = list(values["synced"])
            self.joined = values["joined"]
        for name, momentum in self.momentum.items():
            saved = tensors.get(f"{OUTER_MOMENTUM}.{name}")
            if saved is not None:
                momentum.copy_(saved.view_as(momentum))
        for shard in shards:
            name = shard.piece.name
            saved = tensors.get(f"{REPLICA_WEIGHTS}.{name}")
            if saved is not None:
                shard.param.copy_(saved.view_as(shard.param))
            saved = tensors.get(f"{SENT_WEIGHTS}.{name}")
            if saved is not None:
                self.sent[name] = saved.view_as(shard.param).to(shard.param.device, copy=True)

    def follow(
        self,
        shards: Sequence[Shard],
        model: Tensors,
        tensors: Tensors,
        values: Mapping[str, Any],
        step: int,
    ) -> None:
        """Take over the exchanges that another replica has finished and this one has not.

        `model` has that replica's anchor; `tensors` and `values` are its `packed` and `values`. What
        travels beside training is applied after the step after which that replica has applied it;
        this one is after `step`.
        """
        for fragment, synced in enumerate(values["synced"]):
            if synced <= self.synced[fragment]:
                continue
            anchor = {}
            momentum = {}
            for shard in self.shards_of(shards, fragment):
                name = shard.piece.name
                anchor[name] = model[name].clone()
                if name in self.momentum:
                    momentum[name] = tensors[f"{OUTER_MOMENTUM}.{name}"].clone()
            self._later[fragment] = (synced, anchor, momentum)
        self.apply_later(shards, step)

    @torch.no_grad()
    def apply_later(self, shards: Sequence[Shard], step: int) -> None:
        """Apply what `follow` has taken over and is due after `step`; nothing is sent."""
        for fragment, (synced, anchor, momentum) in list(self._later.items()):
            of_fragment = self.shards_of(shards, fragment)
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
    def in_model(
        self, shards: Sequence[Shard], step: int, changed: Callable[[], None]
    ) -> Iterator[None]:
        """Let the parameters have the anchor inside, and the replica's weights again afterwards.

        `changed` is called after each change, and sends shards to ranks that hold whole weights.
        """
        if self.at_anchor(step):
            yield
            return
        self._exchange(shards)
        changed()
        try:
            yield
        finally:
            self._exchange(shards)
            changed()

    @torch.no_grad()
    def _exchange(self, shards: Sequence[Shard]) -> None:
        # One parameter after the other, so that no second copy of the model is needed.
        for shard in shards:
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


def without_outer(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return an optimizer's own tensors, and those of the kinds of this file."""
    own = {}
    others = {}
    for name, tensor in tensors.items():
        kind, _, _ = name.partition(".")
        if kind in KINDS:
            others[name] = tensor
        else:
            own[name] = tensor
    return own, others
