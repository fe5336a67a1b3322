"""Predict the step of a GPT in a layout, by formulas: memory and seconds. Nothing is started.

    weights_of()               parameters of a stage's rank            ─┐
    rank_memory.memory_of()    the state and activations that it holds  ├─► predict(): a step by parts
    traffic.talks_of()         its collectives in a step, in bytes      │
    Network                    the seconds of each of them             ─┘

With m micro batches of N = B·T tokens, p stages of v chunks, F and B the seconds of a stage's
forward and backward with what it waits for inside of them:

    step  =  m·(F + B)  +  bubble  +  gradients that no backward hides  +  update
    bubble   (p - 1)/v · (F + B); in zero_bubble, with as many micro batches as stages, (p - 1)/3 · (F + B)

Gradients travel in buckets beside the compute of a backward, once the first bucket is complete. The
last bucket, with the tied embedding, is complete when backward ends.

With context parallelism F and B contain, of each pass round the ring, what the attention of the
block that is there does not hide. That attention is quadratic in T and a pass is linear, so long
sequences hide it:

    pass       2·B·(T/cp)·C/tp numbers over the link
    attention  2·B·(T/cp)·(T/cp)·C/tp FLOPs in forward, twice as many in backward: of each block
               a rank attends to half of the pairs. Compute counts all of them, as MFU does

Left out: smaller matrix products are slower ones, so the same share of a device's peak is assumed
in every layout; ranks are equal; experts get equally many tokens; the messages of a pipeline are
not hidden behind compute; gradients do not travel while a pass waits for a message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nanoray.cli.forecast.job import Job
from nanoray.cli.forecast.links import (
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    placed,
    seen_by,
    send,
)
from nanoray.cli.forecast.parallelisms.record import Compute, Talk
from nanoray.cli.forecast.parallelisms.registry import PARALLELISMS
from nanoray.cli.forecast.rank_memory import memory_of
from nanoray.cli.forecast.traffic import talks_of
from nanoray.config.layout import Layout
from nanoray.config.mesh import SHARDS_STATE
from nanoray.models.costs import flops_per_token
from nanoray.models.weights import layers_of, weights_of
from nanoray.parallel.schedules import waited

# The kinds of talks for which a pass waits in the midst of its layers
WAITS = ("forward", "backward", "ring_forward", "ring_again", "ring_backward")


class Cost(NamedTuple):
    """The seconds of one collective, with nothing beside it."""

    seconds: float
    cpu: float = 0.0  # cores that it keeps busy on each rank while it runs: 0 on GPUs


class Network(Protocol):
    """A source of the seconds of a collective on the groups of an axis."""

    def cost(self, layout: Layout, axis: str, op: str, nbytes: float) -> Cost:
        """Return the cost of one collective."""


@dataclass(frozen=True)
class OnTopology:
    """A network as a topology file describes it."""

    topology: Topology

    def cost(self, layout: Layout, axis: str, op: str, nbytes: float) -> Cost:
        place = placed(layout, axis, self.topology.ranks_per_node)
        own = seen_by(self.topology, place)
        size = round(nbytes)
        if op == "all_reduce":
            return Cost(all_reduce(own, "best", place.ranks, size))
        if op == "all_gather":
            return Cost(all_gather(own, place.ranks, size))
        if op == "send":
            return Cost(send(own, place.ranks, size))
        # A reduce-scatter moves the bytes of an all-to-all.
        return Cost(all_to_all(own, place.ranks, size))


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

    def stretch(self, wanted: float) -> float:
        """Return how much longer work takes that wants `wanted` cores: 1 where there are enough."""
        return max(1.0, wanted / self.cores)


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

    Backward takes twice as many as forward, and what it computes again.
    """
    shape = job.shape
    forward = flops_per_token(shape) / 3
    head = 2 * (shape.padded_vocab * shape.n_embd + shape.n_embd * (1 + shape.bias))
    layers = (forward - head) * layers_of(shape.n_layer, layout.pp, stage) / shape.n_layer
    if stage < layout.pp - 1:
        head = 0
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

    def cost(self, talk: Talk) -> Cost:
        """Return the cost of one message of a kind."""
        return self.network.cost(self.layout, talk.axis, talk.op, talk.nbytes)

    def seconds(self, talk: Talk) -> float:
        """Return the seconds of one message of a kind while this rank computes nothing."""
        cost = self.cost(talk)
        return cost.seconds * self.speed.stretch(cost.cpu)

    def exposed_s(self, talk: Talk) -> float:
        """Return the seconds that compute waits for one message: all of them, if nothing hides it."""
        own_s = self.seconds(talk)
        if not own_s or talk.when not in self.hidden_s:
            return own_s
        # Messages of one kind travel in the same time.
        together_s = sum(self.seconds(other) for other in self.talks if other.when == talk.when)
        return own_s * max(0.0, 1 - self.hidden_s[talk.when] / together_s)

    def waits_s(self) -> dict[str, float]:
        """Return, by axis, what a micro batch waits for in the midst of its layers."""
        seconds = {each.key: 0.0 for each in PARALLELISMS if each.in_pass}
        for talk in self.talks:
            if talk.when in WAITS:
                seconds[talk.axis] += talk.times / self.accum * self.exposed_s(talk)
        return seconds

    def gathers_s(self) -> float:
        """Return the seconds that a micro batch waits for weights of units.

        Each unit is gathered while the one before computes.
        """
        hidden_s = min(self.forward_s, self.backward_s)
        total_s = 0.0
        for talk in self.talks:
            if talk.when == "prefetched":
                each_s = self.seconds(talk)
                later = talk.times / self.accum - 1
                total_s += each_s + max(0.0, later * each_s - hidden_s)
        return total_s

    def gradients_s(self, backwards: int) -> float:
        """Return by how much sending gradients beside it makes a backward longer.

        `backwards`: those of a step that send gradients.
        """
        beside = [talk for talk in self.talks if talk.when == "beside"]
        costs = [(talk.times / backwards, self.cost(talk)) for talk in beside]
        total_s = sum(times * cost.seconds for times, cost in costs)
        if not total_s:
            return 0.0
        cpu = sum(times * cost.seconds * cost.cpu for times, cost in costs) / total_s

        # The first tensor may be the tied embedding: backward begins with the head's product with it,
        # and its gradient is complete at the very end. All other gradients come evenly between.
        bucket = 1 / max(times for times, _ in costs)
        tied = self.tensors[0].numel / sum(tensor.numel for tensor in self.tensors)
        before_first = (tied + bucket) / (tied + 1)
        at_end = max(bucket, tied)
        beside_s = min((1 - before_first) * self.backward_s, (1 - at_end) * total_s)

        # What compute and communication do at once takes longer where they share too few cores.
        stretch, threads = self.speed.stretch, self.speed.threads
        slowed_s = beside_s * (stretch(threads + cpu) - stretch(threads))
        return slowed_s + (total_s - beside_s) * stretch(cpu)

    def parts(self) -> dict[str, float]:
        """Return the seconds of compute, of exposed communication by axis, and of the bubble."""
        accum = self.accum
        config = self.job.config
        # More threads than cores stretch all compute.
        stretch = self.speed.stretch(self.speed.threads)
        passes_s = (self.forward_s + self.backward_s) * stretch
        waits_s = self.waits_s()
        parts = {"compute": accum * passes_s + self.optimizer_s * stretch}
        for axis, seconds in waits_s.items():
            parts[axis] = accum * seconds

        # zero2 sends the gradients of every micro batch; the other modes those of the last one.
        backwards = accum if self.job.mode(self.layout) == "zero2" else 1
        after_s = sum(
            talk.times * self.seconds(talk) for talk in self.talks if talk.when == "after"
        )
        parts["dp"] = backwards * self.gradients_s(backwards) + accum * self.gathers_s() + after_s
        turns = waited(config.pp_schedule, self.layout.pp, accum, config.chunks)
        parts["bubble"] = turns * (passes_s + sum(waits_s.values()))
        return parts
