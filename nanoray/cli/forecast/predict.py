"""Predict the step of a GPT in a layout, by formulas: memory and seconds. Nothing is started.

    weights_of()               parameters of a stage's rank            ─┐
    rank_memory.memory_of()    the state and activations that it holds  ├─► predict(): a step by parts
    traffic.talks_of()         its collectives in a step, in bytes      │
    Network                    the seconds of each of them             ─┘

With m micro batches of N = B·T tokens, p stages of v chunks, F and B the seconds of a stage's
forward and backward with what it waits for inside of them:

    step  =  m·(F + B)  +  bubble  +  what gradients still take after the last backward  +  update
    bubble   (p - 1)/v · (F + B); in zero_bubble, with as many micro batches as stages, (p - 1)/3 · (F + B)

With context parallelism F and B contain, of each pass round the ring, what the attention of the
block that is there does not hide. That attention is quadratic in T and a pass is linear, so long
sequences hide it:

    pass       2·B·(T/cp)·C/tp numbers over the link
    attention  2·B·(T/cp)·(T/cp)·C/tp FLOPs in forward, twice as many in backward: of each block
               a rank attends to half of the pairs. Compute counts all of them, as MFU does

Left out: smaller matrix products are slower ones, so the same share of a device's peak is assumed
in every layout; ranks are equal; experts get equally many tokens; the messages of a pipeline are
not hidden behind compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from nanoray.cli.forecast.job import Job
from nanoray.cli.forecast.links import (
    Cost,
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    in_sequence,
    placed,
    seen_by,
    send,
)
from nanoray.cli.forecast.parallelisms.record import Compute, Talk
from nanoray.cli.forecast.parallelisms.registry import PARALLELISMS
from nanoray.cli.forecast.rank_memory import memory_of
from nanoray.cli.forecast.simulate import NOTHING, SimulatedBucket, Step, simulate
from nanoray.cli.forecast.traffic import talks_of
from nanoray.config.layout import Layout
from nanoray.config.mesh import IN_REPLICA, SHARDS_STATE
from nanoray.models.costs import used_by_token
from nanoray.models.weights import layers_of, weights_of
from nanoray.parallel.schedules import waited

# Simulated one by one; more are simulated in groups, each with the latency of its members
MOST_BUCKETS = 64
# The kinds of talks for which each pass waits
WAITS = {
    "forward": ("forward", "ring_forward"),
    "backward": ("backward", "ring_again", "ring_backward"),
}


class Network(Protocol):
    """A source of the seconds of a collective on the groups of an axis."""

    @property
    def lanes(self) -> int:
        """Collectives in flight at a time."""

    def cost(self, layout: Layout, axis: str, op: str, nbytes: float) -> Cost:
        """Return the cost of one collective."""

    def one_link(self, layout: Layout, axis: str, other: str) -> bool:
        """Return whether two axes share a link."""


@dataclass(frozen=True)
class OnTopology:
    """A network as a topology file describes it."""

    topology: Topology

    @property
    def lanes(self) -> int:
        return self.topology.lanes

    def cost(self, layout: Layout, axis: str, op: str, nbytes: float) -> Cost:
        place = placed(layout, axis, self.topology.ranks_per_node)
        own = seen_by(self.topology, place)
        size = round(nbytes)
        if op == "all_reduce":
            return all_reduce(own, "best", place.ranks, size)
        if op == "all_gather":
            return all_gather(own, place.ranks, size)
        if op == "send":
            return send(own, place.ranks, size)
        # A reduce-scatter moves the bytes of an all-to-all.
        return all_to_all(own, place.ranks, size)

    def one_link(self, layout: Layout, axis: str, other: str) -> bool:
        per_node = self.topology.ranks_per_node
        return placed(layout, axis, per_node).inside == placed(layout, other, per_node).inside


@dataclass(frozen=True)
class Speed:
    """The compute speed of a rank, and its share of the machine's cores."""

    forward_flops: float
    backward_flops: float
    # Per updated parameter; 0 on a topology, whose share of the peak includes the update
    optimizer_s: float = 0.0
    uncut: float = 0.0  # share of a stage's time that tp does not divide
    cores: float = math.inf
    threads: float = 1.0

    @classmethod
    def of(cls, topology: Topology) -> Speed:
        """Return the speed of a rank of a topology that has `peak_tflops`."""
        assert topology.peak_tflops, "the caller checks it"
        flops = 1e12 * topology.peak_tflops * topology.mfu
        return cls(flops, flops)


@dataclass(frozen=True)
class Prediction:
    """The step of one layout, on a rank of the slowest stage."""

    layout: Layout
    micro: int
    accum: int
    memory: dict[str, int]
    # Seconds of compute, of exposed communication by axis, and of the bubble; they add up to a step
    parts: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())


def flops_of(job: Job, layout: Layout, stage: int) -> tuple[float, float]:
    """Return the FLOPs of forward and of backward for one token on a stage, of all its tp ranks.

    Backward includes what it computes again. Without experts and stages the two add up to
    nanoray.models.costs.flops_per_token.
    """
    shape = job.shape
    width = shape.n_embd

    # Two FLOPs for each weight of a layer that a token meets.
    tensors = weights_of(replace(shape, n_layer=1))
    met = sum(used_by_token(shape, tensor) for tensor in tensors if tensor.layer is not None)
    attention = 4 * width * shape.block_size
    layers = layers_of(shape.n_layer, layout.pp, stage) * (2 * met + attention)

    head = 0
    if stage == layout.pp - 1:
        head = 2 * (shape.padded_vocab * width + width * (1 + shape.bias))

    again = layers if job.config.activation_checkpointing == "block" else 0
    return layers + head, 2 * (layers + head) + again


def predict(job: Job, layout: Layout, micro: int, network: Network, speed: Speed) -> Prediction:
    """Predict a step in micro batches of `micro` sequences; they divide a replica's sequences."""
    memory = memory_of(job, layout, micro)
    # Stages in the middle have neither embedding nor head, so one of the ends is the slowest.
    stages = [
        StageStep(job, layout, micro, stage, network, speed) for stage in sorted({0, layout.pp - 1})
    ]
    parts = max((stage.parts() for stage in stages), key=lambda parts: sum(parts.values()))
    return Prediction(layout, micro, stages[0].accum, memory, parts)


class StageStep:
    """The step of a rank of one stage: its messages, its compute, and what compute waits for."""

    def __init__(
        self, job: Job, layout: Layout, micro: int, stage: int, network: Network, speed: Speed
    ) -> None:
        self.job = job
        self.layout = layout
        self.network = network
        self.speed = speed
        self.accum = job.sequences // (layout.dp * micro)
        self.talks = talks_of(job, layout, micro, stage)
        self.tensors = weights_of(job.shape, layout, stage)

        # Compute of one micro batch, undisturbed.
        rank_share = speed.uncut + (1 - speed.uncut) / layout.tp
        own_tokens = micro * job.shape.block_size // layout.cp
        tokens = rank_share * own_tokens
        forward, backward = flops_of(job, layout, stage)
        self.forward_s = forward * tokens / speed.forward_flops
        self.backward_s = backward * tokens / speed.backward_flops

        # The update, of the parameters that this rank updates.
        updated = sum(tensor.numel for tensor in self.tensors)
        if job.mode(layout) in SHARDS_STATE:
            updated = updated // layout.shard_size
        self.optimizer_s = speed.optimizer_s * updated

        # Compute beside which messages in the midst of a pass travel, by their kind.
        compute = Compute(
            job, own_tokens // micro, tokens, speed.forward_flops, speed.backward_flops
        )
        self.hidden_s: dict[str, float] = {}
        for parallelism in PARALLELISMS:
            self.hidden_s |= parallelism.hides(compute)

    def price(self, talk: Talk) -> Cost:
        """Return the cost of one message of a kind."""
        return self.network.cost(self.layout, talk.axis, talk.op, talk.nbytes)

    def exposed(self, talk: Talk) -> Cost:
        """Return what compute waits for of one message: all of it, if nothing hides it."""
        cost = self.price(talk)
        if talk.when not in self.hidden_s:
            return cost
        # Messages of one kind travel in the same time.
        together_s = sum(
            self.price(other).seconds for other in self.talks if other.when == talk.when
        )
        left = 1.0
        if together_s:
            left = max(0.0, 1 - self.hidden_s[talk.when] / together_s)
        return Cost(cost.latency_s * left, cost.transfer_s * left, cost.cpu)

    def waits(self, when: str) -> Cost:
        """Return what a pass of a micro batch waits for in the midst of its layers."""
        costs = []
        for talk in self.talks:
            if talk.when in WAITS[when]:
                costs.append((talk.times / self.accum, self.exposed(talk)))
        return in_sequence(costs)

    def alone_s(self) -> dict[str, float]:
        """Return the seconds of `waits` by axis, without what travels and computes beside them."""
        seconds = {each.key: 0.0 for each in PARALLELISMS if each.in_pass}
        for talk in self.talks:
            if any(talk.when in kinds for kinds in WAITS.values()):
                seconds[talk.axis] += talk.times / self.accum * self.exposed(talk).seconds
        return seconds

    def gathers_s(self) -> float:
        """Return the seconds that a micro batch waits for weights of units.

        Each unit is gathered while the one before computes.
        """
        hidden_s = min(self.forward_s, self.backward_s)
        total_s = 0.0
        for talk in self.talks:
            if talk.when == "prefetched":
                each_s = self.price(talk).seconds
                later = talk.times / self.accum - 1
                total_s += each_s + max(0.0, later * each_s - hidden_s)
        return total_s

    def micro_batches_s(self, sending: int) -> tuple[float, float]:
        """Return the seconds of a micro batch that only computes, and of one that sends gradients.

        The latter ends with the update. `sending`: micro batches of a step that send gradients.
        """
        # What a pass waits for travels mostly along the innermost axis of a replica.
        steps = self.layout.steps
        inner = min(IN_REPLICA, key=lambda axis: (steps[axis].size == 1, steps[axis]))
        one_link = any(
            self.network.one_link(self.layout, inner, axis) for axis in self.layout.gradient_axes
        )
        waits = (self.waits("forward"), self.waits("backward"))
        quiet = Step(self.forward_s, self.backward_s, 0.0, (), waits, one_link)
        buckets, collective = self.buckets(sending)
        loud = replace(quiet, optimizer_s=self.optimizer_s, buckets=buckets)

        cores, threads = self.speed.cores, self.speed.threads
        quiet_s = simulate(quiet, lambda nbytes: NOTHING, 1, cores, threads).step_s
        loud_s = simulate(loud, collective, self.network.lanes, cores, threads).step_s
        return quiet_s, loud_s

    def parts(self) -> dict[str, float]:
        """Return the seconds of compute, of exposed communication by axis, and of the bubble."""
        accum = self.accum
        # zero2 sends the gradients of every micro batch; the other modes those of the last one.
        every_micro_sends = self.job.mode(self.layout) == "zero2"
        quiet_s, last_s = self.micro_batches_s(accum if every_micro_sends else 1)

        # More threads than cores stretch all compute.
        stretch = max(1.0, self.speed.threads / self.speed.cores)
        update_s = self.optimizer_s * stretch
        other_s = last_s - update_s if every_micro_sends else quiet_s
        after_s = sum(
            talk.times * self.price(talk).seconds
            for talk in self.talks
            if talk.when in ("after", "once")
        )
        total_s = last_s + (accum - 1) * other_s + accum * self.gathers_s() + after_s

        # Split the total into parts. The axes share the waiting in the ratio of their own seconds.
        passes_s = accum * (self.forward_s + self.backward_s) * stretch
        waiting_s = accum * quiet_s - passes_s
        alone_s = self.alone_s()
        all_alone_s = sum(alone_s.values())
        parts = {"compute": passes_s + update_s}
        for axis, seconds in alone_s.items():
            parts[axis] = waiting_s * seconds / all_alone_s if all_alone_s else 0.0
        parts["dp"] = max(0.0, total_s - parts["compute"] - waiting_s)
        config = self.job.config
        turns = waited(config.pp_schedule, self.layout.pp, accum, config.chunks)
        parts["bubble"] = turns * quiet_s
        return parts

    def buckets(self, passes: int) -> tuple[tuple[SimulatedBucket, ...], Callable[[int], Cost]]:
        """Return the buckets of one backward, and the function that prices one of them.

        Buckets are ready in the reverse order of the tensors. `passes`: backwards of a step that
        send gradients.
        """
        beside = [talk for talk in self.talks if talk.when == "beside"]
        if not beside:
            return (), lambda nbytes: NOTHING
        tensors = self.tensors
        total = sum(tensor.numel for tensor in tensors)
        count = min(MOST_BUCKETS, max(talk.times / passes for talk in beside))

        # The head's product with the embedding comes first in backward and takes its time there,
        # but the gradient of the tied embedding is complete only at the very end.
        early = tensors[0].numel if tensors[0].layer is None else 0
        done = 0
        held = 0
        buckets = []
        for tensor in reversed(tensors[1:]):
            done += tensor.numel
            held += tensor.numel
            if held >= total / count:
                ready_s = (early + done) / (early + total) * self.backward_s
                buckets.append(SimulatedBucket(ready_s, 4 * held))
                held = 0
        buckets.append(SimulatedBucket(self.backward_s, 4 * (held + tensors[0].numel)))

        # A bucket's share of all gradients has the same share of their latency and transfer.
        whole = in_sequence([(talk.times / passes, self.price(talk)) for talk in beside])

        def collective(nbytes: int) -> Cost:
            part = nbytes / (4 * total)
            return Cost(whole.latency_s * part, whole.transfer_s * part, whole.cpu)

        return tuple(buckets), collective
