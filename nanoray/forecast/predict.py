"""What a step of a GPT costs one rank in a layout: bytes, memory and seconds, by formulas. Nothing
is started.

    tensors_of()   which parameters a stage's rank holds          ─┐
    memory_of()    what it keeps of them, and activations          ├─► predict(): a step by parts
    talks_of()     collectives of a step on each axis, in bytes    │
    Network        what each of them costs on a topology          ─┘

With m micro batches of N = B·T tokens, p stages of v chunks, F and B the seconds of a stage's
forward and backward with what it waits for inside of them:

    step  =  m·(F + B)  +  bubble  +  what gradients still take after the last backward  +  update
    bubble   (p - 1)/v · (F + B); in zero_bubble, with as many micro batches as stages, (p - 1)/3 · (F + B)

What it leaves out: smaller matrix products are slower ones, so the same share of a device's peak is
assumed in every layout; ranks are equal; experts get equally many tokens; a pipeline's messages are
not hidden behind compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from nanoray.config import Config
from nanoray.forecast.links import (
    Cost,
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    placed,
    seen_by,
    send,
)
from nanoray.forecast.memory import Sizes, state_memory
from nanoray.forecast.simulate import NOTHING, Bucket, Step, simulate
from nanoray.mesh.layout import Layout
from nanoray.models.build import kernels_of
from nanoray.models.costs import Cut, activation_memory, with_kernels
from nanoray.models.gpt import ModelShape
from nanoray.parallel.schedules import waited

# Simulated one by one; more are simulated in groups, each with the latency of all its own
MOST_BUCKETS = 64


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each MLP; tp cuts the hidden units of each, ep shares them
    out.
    """

    count: int
    per_token: int
    hidden: int
    shared: int = 0

    @classmethod
    def of(cls, shape: ModelShape) -> Experts | None:
        """Return the experts of a model; None without any."""
        sizes = (shape.experts, shape.experts_per_token, shape.expert_hidden, shape.shared_experts)
        return cls(*sizes) if shape.experts else None


@dataclass(frozen=True)
class Job:
    """What is trained, whatever the layout."""

    shape: ModelShape
    config: Config
    sequences: int  # of a step, all replicas together
    precision: str  # fp32 | bf16 | fp16
    bucket_mb: float
    schedule: str = "1f1b"  # gpipe | 1f1b | interleaved | zero_bubble
    chunks: int = 1  # of layers on each stage
    experts: Experts | None = None
    mirrored: bool = False

    @property
    def half(self) -> bool:
        return self.precision not in ("fp32", "tf32")

    def cuts_sequence(self, layout: Layout) -> bool:
        """Whether the tensor ranks share the positions of the stream, too."""
        return self.config.sequence_parallel and layout.tp > 1

    def mode(self, layout: Layout) -> str:
        """Return the data-parallel mode there. torch's DDP knows neither pipelines nor ep: by hand
        does.
        """
        if layout.dp == 1:
            return "ddp"
        mode = self.config.dp_mode
        return "ddp_by_hand" if mode == "ddp" and layout.pp * layout.ep > 1 else mode


# Parameters.


class Weights(NamedTuple):
    """Some parameters of a rank, one tensor."""

    layer: int | None  # of its stage; None: outside of the layers
    numel: int
    expert: bool = False


def tensors_of(job: Job, layout: Layout, stage: int) -> list[Weights]:
    """Return the parameters of a stage's rank, in the model's order. The last of several has the
    embedding, too.
    """
    shape, tp, C, last = job.shape, layout.tp, job.shape.n_embd, layout.pp - 1
    ends = [C] * (1 + shape.bias)  # of a norm

    def linear(rows: int, columns: int, cut_rows: bool) -> list[int]:
        return [rows * columns // tp] + [rows // tp if cut_rows else rows] * shape.bias

    attention = [*ends, *linear(3 * C, C, True), *linear(C, C, False), *ends]
    first = (shape.padded_vocab * C // tp, *[shape.block_size * C] * (not shape.rotary))
    own = [Weights(None, n) for n in first] if stage == 0 else []
    for layer in range(layers_of(shape.n_layer, layout.pp, stage)):
        own += [Weights(layer, n) for n in attention]
        if (e := job.experts) is None:
            own += [Weights(layer, n) for n in (*linear(4 * C, C, True), *linear(C, 4 * C, False))]
            continue
        mine = e.count // layout.ep
        hidden = e.hidden // tp
        routed = [hidden * C, *[hidden] * shape.bias, C * hidden, *[C] * shape.bias]
        own += [Weights(layer, C * e.count), *(Weights(layer, mine * n, True) for n in routed)]
        own += [
            Weights(layer, n)
            for n in (*linear(e.shared * e.hidden, C, True), *linear(C, e.shared * e.hidden, False))
            if e.shared
        ]
    if stage == last:
        own += [Weights(None, n) for n in ends]
        own += [Weights(None, shape.padded_vocab * C // tp)] * (last > 0)
    return own


def layers_of(layers: int, pp: int, stage: int) -> int:
    """Return the number of layers of a stage; the first ones have one more where they do not
    divide.
    """
    return layers // pp + (stage < layers % pp)


def sizes_of(tensors: Iterable[Weights]) -> Sizes:
    """Return the sums that the memory formula needs."""
    outside, layers, largest = 0, dict[int, int](), 0
    for layer, numel, _ in tensors:
        largest = max(largest, numel)
        if layer is None:
            outside += numel
        else:
            layers[layer] = layers.get(layer, 0) + numel
    total = outside + sum(layers.values())
    return Sizes(total, outside, max(layers.values(), default=0), largest, total)


# Memory.


def kept(schedule: str, pp: int, stage: int, micro: int, chunks: int = 1) -> float:
    """Return how many micro batches' activations a stage keeps at most, in shares of all its
    layers.
    """
    if schedule == "gpipe":
        return micro
    if schedule == "zero_bubble":
        return min(micro, pp)
    if schedule == "interleaved":
        return min(micro * chunks, 2 * (pp - 1 - stage) + (chunks - 1) * pp + 1) / chunks
    return min(micro, pp - stage)


def memory_of(job: Job, layout: Layout, micro: int) -> dict[str, int]:
    """Return the bytes by part of the rank that needs most: of the first, second or last stage."""
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    return max(
        (stage_memory(job, layout, micro, stage) for stage in stages),
        key=lambda parts: sum(parts.values()),
    )


def stage_memory(job: Job, layout: Layout, micro: int, stage: int) -> dict[str, int]:
    """Return the bytes of a stage's rank by part, for micro batches of `micro` sequences."""
    config = job.config.model_copy(update={"dp_mode": job.mode(layout), "ep": layout.ep})
    accum = job.sequences // (layout.dp * micro)
    tensors, parts = tensors_of(job, layout, stage), dict[str, int]()
    for expert, ranks in ((False, layout.dp), (True, layout.dp // layout.ep)):
        some = [t for t in tensors if t.expert == expert]
        if some:
            found = state_memory(config, sizes_of(some), ranks, accum, job.bucket_mb, job.mirrored)
            parts |= {name: parts.get(name, 0) + size for name, size in found.items()}
    return parts | _activations(job, layout, micro, stage, accum)


def _activations(job: Job, layout: Layout, micro: int, stage: int, accum: int) -> dict[str, int]:
    """Return the activations of all micro batches in flight; what a step needs once, once; logits
    on the last stage.
    """

    def held(layers: int) -> dict[str, int]:
        shape = replace(job.shape, n_layer=layers)
        how, kernels = job.config.activation_checkpointing, kernels_of(job.config)
        cut = Cut(layout.tp, layout.ep, job.cuts_sequence(layout))
        one = activation_memory(shape, micro, job.precision, how, cut)
        return with_kernels(one, shape, micro, job.precision, kernels, how, layout.tp)

    one, two = held(1), held(2)
    layer = two["activations"] - one["activations"]
    layers, flight = layers_of(job.shape.n_layer, layout.pp, stage), 1.0
    if layout.pp > 1:
        flight = kept(job.schedule, layout.pp, stage, accum, job.chunks)
    matrices = sum(
        t.numel for t in tensors_of(job, layout, stage) if t.numel > 8 * job.shape.n_embd
    )
    if stage == 0 and not job.shape.rotary:
        matrices -= job.shape.block_size * job.shape.n_embd  # positions are looked up
    found = {
        "copies": 2 * job.half * matrices,
        "activations": round(layers * layer * flight) + one["activations"] - layer,
    }
    if (
        (e := job.experts) is not None and not job.shape.experts
    ):  # else counted above. What is routed: inputs, hidden units twice, outputs, of per_token experts
        size, tokens = 2 if job.half else 4, micro * job.shape.block_size
        more = (e.per_token + e.shared) * (2 * e.hidden // layout.tp + 2 * job.shape.n_embd)
        more -= 9 * job.shape.n_embd // layout.tp  # of the MLP in whose place they are
        block = job.config.activation_checkpointing == "block"
        found["experts"] = max(0, round(tokens * size * more * (1 if block else layers * flight)))
    return found | ({"logits": one["logits"]} if stage == layout.pp - 1 else {})


# What travels.


class Talk(NamedTuple):
    """Collectives of one kind, of a rank in a step."""

    axis: str  # tp | dp | edp (gradients of experts) | ep | pp
    op: str  # all_reduce | reduce_scatter | all_gather | all_to_all | send
    what: str
    times: float
    nbytes: float  # the tensor of one of them
    # Forward | backward: compute waits; beside: of backward; after: the update; once: neither hides
    # it
    when: str

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank of the axis sends in a step."""
        share = (
            1.0
            if self.op == "send"
            else (ranks - 1) / ranks * (2 if self.op == "all_reduce" else 1)
        )
        return self.times * self.nbytes * share


def talks_of(job: Job, layout: Layout, micro: int, stage: int) -> list[Talk]:
    """Return all that a rank of a stage sends in a step, except sums of single numbers."""
    accum, size = job.sequences // (layout.dp * micro), 2 if job.half else 4
    shape, layers = job.shape, layers_of(job.shape.n_layer, layout.pp, stage)
    tokens, first, last = micro * shape.block_size, stage == 0, stage == layout.pp - 1
    stream, again = tokens * shape.n_embd, job.config.activation_checkpointing != "none"
    talks = []
    if layout.tp > 1:
        talks += _tensor(job, layout, stage, accum, tokens)
    if layout.ep > 1 and job.experts:
        there, routed = accum * layers * 2, size * stream * job.experts.per_token
        talks += [Talk("ep", "all_to_all", "tokens to experts and back", there, routed, "forward")]
        talks += [
            Talk("ep", "all_to_all", "their gradients", there * (1 + again), routed, "backward")
        ]
    if layout.pp > 1:
        sends, part = (
            accum * job.chunks,
            4 * stream / (layout.tp if job.cuts_sequence(layout) else 1),
        )
        talks += [Talk("pp", "send", "residual stream", sends, part, "forward")]
        talks += [Talk("pp", "send", "its gradient", sends, part, "backward")]
        tied = 4 * shape.padded_vocab * shape.n_embd / layout.tp
        talks += [Talk("pp", "send", "gradient of the embedding", 1, tied, "once")] * (
            first or last
        )
    tensors = tensors_of(job, layout, stage)
    dense, routed = (
        4 * sum(t.numel for t in tensors if t.expert == kind) for kind in (False, True)
    )
    talks += _gradients(job, job.mode(layout), "dp", layout.dp, dense, accum)
    return talks + (
        _gradients(job, job.mode(layout), "edp", layout.dp // layout.ep, routed, accum)
        if routed
        else []
    )


def _tensor(job: Job, layout: Layout, stage: int, accum: int, tokens: int) -> list[Talk]:
    """Return what a stage's rank sends to those that share its layers; `tokens` are those of a
    micro batch.
    """
    shape, layers, size = (
        job.shape,
        layers_of(job.shape.n_layer, layout.pp, stage),
        2 if job.half else 4,
    )
    stream, first, last = (
        tokens * shape.n_embd,
        accum * (stage == 0),
        accum * (stage == layout.pp - 1),
    )
    shared, again = (
        bool(job.experts and job.experts.shared),
        job.config.activation_checkpointing != "none",
    )
    sums, width = accum * layers * (2 + shared), size * stream
    twice = accum * layers * (1 + shared) * again  # the last sum of a block is not needed again
    if job.cuts_sequence(layout):
        # Norms, biases of proj and down
        rows = 2 + 3 * shape.bias + shape.bias * (job.experts is None or shared)
        rows = layers * (rows + (job.experts.count if job.experts else 0))  # the router
        # Positions, the last norm
        rows += shape.block_size * (stage == 0) + (1 + shape.bias) * (last > 0)
        talks = [
            Talk("tp", "all_gather", "activations into layers", sums + last, 4 * stream, "forward"),
            Talk("tp", "reduce_scatter", "activations out of them", sums, width, "forward"),
            Talk(
                "tp",
                "all_gather",
                "activations into layers, again",
                sums * again,
                4 * stream,
                "backward",
            ),
            Talk(
                "tp", "reduce_scatter", "activations out of them, again", twice, width, "backward"
            ),
            Talk(
                "tp",
                "reduce_scatter",
                "gradients out of layers",
                sums + last,
                4 * stream,
                "backward",
            ),
            Talk("tp", "all_gather", "gradients into them", sums, width, "backward"),
            Talk("tp", "reduce_scatter", "embedding", first, 4 * stream, "forward"),
            Talk("tp", "all_gather", "its gradient", first, 4 * stream, "backward"),
            Talk(
                "tp",
                "all_reduce",
                "gradients of norms and positions",
                1,
                4 * rows * shape.n_embd,
                "once",
            ),
        ]
    else:
        talks = [
            Talk("tp", "all_reduce", "activations", sums, width, "forward"),
            Talk("tp", "all_reduce", "activations, again", twice, width, "backward"),
            Talk("tp", "all_reduce", "their gradients", sums + last, 4 * stream, "backward"),
            Talk("tp", "all_reduce", "embedding", first, 4 * stream, "forward"),
        ]
    if job.experts:
        gates, rated = (4 * tokens * n for n in (job.experts.per_token, job.experts.count))
        talks.append(
            Talk("tp", "all_reduce", "gradients of gates", accum * layers, gates, "backward")
        )
        each = accum * layers * job.cuts_sequence(layout)
        talks.append(Talk("tp", "all_gather", "ratings of experts", each, rated, "forward"))
        talks.append(
            Talk("tp", "all_gather", "ratings of experts, again", each * again, rated, "backward")
        )
    # 4 and 8 a token
    talks.append(Talk("tp", "all_reduce", "loss", 2 * last, 6 * tokens, "forward"))
    return [talk for talk in talks if talk.times]


def _gradients(job: Job, mode: str, axis: str, ranks: int, nbytes: int, accum: int) -> list[Talk]:
    """Return what a mode of data parallelism sends for parameters of so many bytes in float32."""
    if ranks == 1:
        return []
    cap = job.bucket_mb * 2**20
    buckets = math.ceil(nbytes / cap)
    each = nbytes / buckets
    if mode == "ddp":
        return [Talk(axis, "all_reduce", "gradients", buckets, each, "beside")]
    times = accum if mode == "zero2" else 1
    scatter = Talk(axis, "reduce_scatter", "gradients", buckets * times, each, "beside")
    if mode == "fsdp":
        units = job.shape.n_layer + 1
        narrow = 0.5 if job.config.fsdp_gather == "bf16" else 1.0
        passes = 2 if job.config.fsdp_reshard == "full" else 1
        gather = Talk(
            axis, "all_gather", "weights", accum * units, narrow * nbytes / units, "prefetched"
        )
        again = gather._replace(what="weights, again")
        return [
            gather,
            *[again] * (passes - 1),
            scatter._replace(times=units, nbytes=nbytes / units),
        ]
    what, when = ("gradients", "beside") if mode == "ddp_by_hand" else ("weights", "after")
    return [scatter, Talk(axis, "all_gather", what, buckets, each, when)]


# What it costs.


class Network(Protocol):
    """The seconds of a collective on the groups of an axis."""

    @property
    def lanes(self) -> int:
        """How many collectives are in flight at a time."""

    def cost(self, layout: Layout, axis: str, op: str, nbytes: float) -> Cost:
        """Return the cost of one."""

    def one_link(self, layout: Layout, axis: str, other: str) -> bool:
        """Whether two axes share a link."""


@dataclass(frozen=True)
class OnTopology:
    """A network as a topology file describes it."""

    topology: Topology

    @property
    def lanes(self) -> int:
        return self.topology.lanes

    def cost(self, layout: Layout, axis: str, op: str, nbytes: float) -> Cost:
        place = placed(layout, axis, self.topology.ranks_per_node)
        own, size = seen_by(self.topology, place), round(nbytes)
        if op == "all_reduce":
            return all_reduce(own, "best", place.ranks, size)
        return {"all_gather": all_gather, "send": send}.get(op, all_to_all)(own, place.ranks, size)

    def one_link(self, layout: Layout, axis: str, other: str) -> bool:
        inside = (
            placed(layout, each, self.topology.ranks_per_node).inside for each in (axis, other)
        )
        return len(set(inside)) == 1


@dataclass(frozen=True)
class Speed:
    """What a rank computes in a second, and what it has of the machine."""

    forward_flops: float
    backward_flops: float
    # Per parameter that it updates; on a topology it is within the FLOPs' share of the peak
    optimizer_s: float = 0.0
    uncut: float = 0.0  # share of a stage's time that tp does not divide
    cores: float = math.inf
    threads: float = 1.0

    @classmethod
    def of(cls, topology: Topology) -> Speed:
        """Return the speed of a topology with a peak."""
        assert topology.peak_tflops, "checked before"
        flops = 1e12 * topology.peak_tflops * topology.mfu
        return cls(flops, flops)


@dataclass(frozen=True)
class Prediction:
    """One layout's step, on the slowest stage's rank."""

    layout: Layout
    micro: int
    accum: int
    memory: dict[str, int]
    talks: list[Talk]
    # Seconds: compute, what is exposed of each axis, bubble; their sum is the step
    parts: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time in which a stage waits for others."""
        pipe = self.step_s - self.parts["dp"]
        return self.parts["bubble"] / pipe if pipe else 0.0


def flops_of(job: Job, layout: Layout, stage: int) -> tuple[float, float]:
    """Return the FLOPs of forward and of backward, which computes again what was not kept, for one
    token on a stage.

    All tp ranks together. Without experts and stages they add up to
    nanoray.models.costs.flops_per_token.
    """
    shape, C = job.shape, job.shape.n_embd
    alone = replace(job, shape=replace(shape, n_layer=1))
    dense = [t for t in tensors_of(alone, Layout(), 0) if t.layer is not None]
    if job.experts:
        share = job.experts.per_token / job.experts.count
        dense = [t._replace(numel=round(t.numel * share)) if t.expert else t for t in dense]
    layer = layers_of(shape.n_layer, layout.pp, stage) * (
        2 * sum(t.numel for t in dense) + 4 * C * shape.block_size
    )
    head = 2 * (shape.padded_vocab * C + C * (1 + shape.bias)) * (stage == layout.pp - 1)
    again = layer if job.config.activation_checkpointing == "block" else 0
    return layer + head, 2 * (layer + head) + again


def predict(job: Job, layout: Layout, micro: int, network: Network, speed: Speed) -> Prediction:
    """Predict a step in micro batches of `micro` sequences, which divide a replica's share of the
    step.
    """
    steps = [
        _stage(job, layout, micro, stage, network, speed) for stage in sorted({0, layout.pp - 1})
    ]
    return max(steps, key=lambda found: found.step_s)


def _stage(
    job: Job, layout: Layout, micro: int, stage: int, network: Network, speed: Speed
) -> Prediction:
    accum, talks = job.sequences // (layout.dp * micro), talks_of(job, layout, micro, stage)
    share = (speed.uncut + (1 - speed.uncut) / layout.tp) * micro * job.shape.block_size
    forward, backward = (flops * share for flops in flops_of(job, layout, stage))
    forward_s, backward_s = forward / speed.forward_flops, backward / speed.backward_flops
    tensors = tensors_of(job, layout, stage)
    updated = sum(t.numel for t in tensors)
    updated = updated // layout.dp if job.mode(layout) in ("zero1", "zero2", "fsdp") else updated
    stretch = max(1.0, speed.threads / speed.cores)

    def price(talk: Talk) -> Cost:
        return network.cost(layout, talk.axis, talk.op, talk.nbytes)

    waits, alone_s = {}, dict.fromkeys(("tp", "ep", "pp"), 0.0)
    for when in ("forward", "backward"):
        costs = [(t.axis, t.times / accum, price(t)) for t in talks if t.when == when]
        waits[when] = _sum([(count, cost) for _, count, cost in costs])
        for axis, count, cost in costs:
            alone_s[axis] += count * cost.seconds
    gathers = [t for t in talks if t.when == "prefetched"]
    exposed = sum(
        _exposed_gather(price(t), t.times / accum, forward_s, backward_s) for t in gathers
    )
    one_link = network.one_link(layout, "tp" if layout.tp > 1 else "pp", "dp")
    often = job.mode(layout) == "zero2"  # which sends the gradients of each micro batch
    buckets, collective = _buckets(tensors, talks, accum if often else 1, backward_s, price)
    quiet = Step(forward_s, backward_s, 0.0, (), (waits["forward"], waits["backward"]), one_link)
    loud = replace(quiet, optimizer_s=speed.optimizer_s * updated, buckets=buckets)
    quiet_s = simulate(quiet, lambda n: NOTHING, 1, speed.cores, speed.threads).step_s
    last_s = simulate(loud, collective, network.lanes, speed.cores, speed.threads).step_s
    update_s = loud.optimizer_s * stretch
    after = sum(t.times * price(t).seconds for t in talks if t.when in ("after", "once"))
    total_s = (
        last_s + (accum - 1) * (last_s - update_s if often else quiet_s) + accum * exposed + after
    )
    bubble_s = waited(job.schedule, layout.pp, accum, job.chunks) * quiet_s
    compute_s = accum * (forward_s + backward_s) * stretch + update_s
    wait_s, whole_s = accum * quiet_s - (compute_s - update_s), sum(alone_s.values())
    parts = {"compute": compute_s} | {
        axis: wait_s * s / whole_s if whole_s else 0.0 for axis, s in alone_s.items()
    }
    parts |= {"dp": max(0.0, total_s - compute_s - wait_s), "bubble": bubble_s}
    return Prediction(layout, micro, accum, memory_of(job, layout, micro), talks, parts)


def _sum(costs: Iterable[tuple[float, Cost]]) -> Cost:
    """Return collectives one after the other as one; its cores are the mean over its time."""
    latency = transfer = busy = 0.0
    for count, cost in costs:
        latency, transfer = latency + count * cost.latency_s, transfer + count * cost.transfer_s
        busy += count * cost.cpu * cost.seconds
    return Cost(latency, transfer, busy / (latency + transfer) if busy else 0.0)


def _exposed_gather(one: Cost, count: float, forward_s: float, backward_s: float) -> float:
    """Return what a pass waits for weights that are gathered unit by unit, each while the one
    before computes.
    """
    return one.seconds + max(0.0, (count - 1) * one.seconds - min(forward_s, backward_s))


def _buckets(
    tensors: list[Weights],
    talks: list[Talk],
    passes: int,
    backward_s: float,
    price: Callable[[Talk], Cost],
) -> tuple[tuple[Bucket, ...], Callable[[int], Cost]]:
    """Return the buckets of one backward, ready in the reverse order of a rank's tensors; and what
    one of them costs.

    `passes`: backwards of a step that send gradients. The embedding's product comes first in
    backward, but its gradient is complete at the very end.
    """
    beside = [t for t in talks if t.when == "beside"]
    if not beside:
        return (), lambda nbytes: NOTHING
    total = sum(t.numel for t in tensors)
    parts = min(MOST_BUCKETS, max(t.times / passes for t in beside))
    early, done, held = (tensors[0].numel if tensors[0].layer is None else 0), 0, 0
    buckets = []
    for t in reversed(tensors[1:]):
        done, held = done + t.numel, held + t.numel
        if held >= total / parts:
            buckets.append(Bucket((early + done) / (early + total) * backward_s, 4 * held))
            held = 0
    buckets.append(Bucket(backward_s, 4 * (held + tensors[0].numel)))
    every = _sum([(t.times / passes, price(t)) for t in beside])

    def collective(nbytes: int) -> Cost:
        part = nbytes / (4 * total)
        return Cost(every.latency_s * part, every.transfer_s * part, every.cpu)

    return tuple(buckets), collective
