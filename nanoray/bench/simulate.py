"""What a DDP step costs at any number of ranks: link models fitted to measurements, and an event-driven simulation.

    fit()          measured all-reduces       -> alpha (seconds a message) and beta (seconds a byte)
    all_reduce()   a topology, ranks, bytes   -> seconds of latency and of transfer
    simulate()     compute, buckets, lanes    -> the schedule of a step: busy, exposed, hidden

Pure arithmetic: nothing here measures, and a step of 16,384 ranks takes a millisecond.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nanoray.config import Config, did_you_mean, refuse_unknown
from nanoray.errors import ConfigError
from nanoray.mesh.algorithms import cost
from nanoray.models.costs import flops_per_token
from nanoray.models.gpt import GPT, ModelShape
from nanoray.parallel.ddp import default_bucket_mb

TOPOLOGY_DIR = Path(__file__).resolve().parents[1] / "topologies"
VOCAB = {"auto": 65, "char": 65, "byte": 256, "gpt2": 50257}  # Shakespeare has 65 characters
# Recursive doubling and flat send whole buffers all the time: at the size of gradient buckets they never win.
FLAT = ("ring", "tree", "double_tree", "halving_doubling")
MODELS = (*FLAT, "two_level")


def coefficients(algorithm: str, ranks: int, nbytes: int) -> tuple[float, float]:
    """Return how many messages follow each other, and how many bytes pass through the busiest link.

    An all-reduce takes alpha · the first + beta · the second. `backend` counts as ring: gloo has nothing else, and
    NCCL's choice inside a node is one.
    """
    form = "ring" if algorithm == "backend" else algorithm
    return cost(form, ranks, nbytes, 1.0, 0.0), cost(form, ranks, nbytes, 0.0, 1.0)


@dataclass(frozen=True)
class Fit:
    """Alpha and beta of one algorithm as measured, and how far to trust them."""

    algorithm: str
    ranks: int
    alpha_s: float
    beta_s_per_byte: float
    residuals: tuple[float, ...]  # fitted / measured - 1, one per measured point
    smallest_bytes: int
    largest_bytes: int

    @property
    def median_error(self) -> float:
        return statistics.median(map(abs, self.residuals))

    @property
    def link(self) -> Link:
        """The link that would behave so; a beta of 0 becomes a very fast one."""
        return Link(alpha_us=1e6 * self.alpha_s, bandwidth_gb_per_s=1e-9 / max(self.beta_s_per_byte, 1e-15))

    def seconds(self, ranks: int, nbytes: int) -> float:
        """Predict an all-reduce over `ranks` equal links."""
        messages, moved = coefficients(self.algorithm, ranks, nbytes)
        return self.alpha_s * messages + self.beta_s_per_byte * moved

    def outside(self, nbytes: int) -> str:
        """Return a warning when a prediction for that size is an extrapolation, else ""."""
        if self.smallest_bytes <= nbytes <= self.largest_bytes:
            return ""
        return f"{nbytes} bytes are outside the measured {self.smallest_bytes} .. {self.largest_bytes}"


def fit(points: Sequence[tuple[int, float]], algorithm: str, ranks: int) -> Fit:
    """Fit alpha and beta to (bytes, seconds) by least squares on the relative errors, neither below 0.

    Relative, because absolute errors of the largest size would drown the latency that the small ones show.
    """
    sizes = {nbytes for nbytes, _ in points}
    if len(sizes) < 2 or ranks < 2:
        raise ConfigError(f"{len(sizes)} size(s) at {ranks} rank(s) fix no line; measure 2 sizes or more at 2 ranks")
    seconds = np.array([s for _, s in points])
    design = np.array([coefficients(algorithm, ranks, nbytes) for nbytes, _ in points]) / seconds[:, None]
    solution = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)[0]
    for negative in np.flatnonzero(solution < 0):  # noise; then the other one alone explains the times
        other = design[:, 1 - negative]
        solution[negative], solution[1 - negative] = 0.0, other.sum() / (other @ other)
    residuals = tuple((design @ solution - 1).tolist())
    return Fit(algorithm, ranks, float(solution[0]), float(solution[1]), residuals, min(sizes), max(sizes))


# Topologies: a YAML file of link speeds.


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Link(_Strict):
    """What a message costs, and how fast its bytes follow."""

    alpha_us: Annotated[float, Field(ge=0)]
    bandwidth_gb_per_s: Annotated[float, Field(gt=0)]


class Topology(_Strict):
    """Equal nodes of equal ranks. A link may be `fit`: what the sweep of this machine says."""

    note: str = ""  # where the numbers come from
    ranks_per_node: Annotated[int, Field(ge=1)]
    intra: Link | Literal["fit"]  # between two ranks of a node, while all of them talk
    inter: Link | Literal["fit"]  # between two nodes: all network cards of a node together
    lanes: Annotated[int, Field(ge=1)] = 1  # collectives in flight: 1 in NCCL, 2 in gloo
    peak_tflops: Annotated[float, Field(gt=0)] | None = None  # of a rank; without it, what was measured here computes
    mfu: Annotated[float, Field(gt=0, le=1)] = 0.4  # share of the peak that a rank alone reaches

    def filled(self, link: Link) -> Topology:
        """Put the fitted link where the file says `fit`."""
        return self.model_copy(update={k: link for k in ("intra", "inter") if getattr(self, k) == "fit"})

    @property
    def levels(self) -> tuple[Link, Link]:
        """Intra and inter link of a filled topology."""
        assert isinstance(self.intra, Link), "fill it first"
        assert isinstance(self.inter, Link), "fill it first"
        return self.intra, self.inter


def topology_names() -> list[str]:
    """Return the names of the presets in nanoray/topologies."""
    return sorted(path.stem for path in TOPOLOGY_DIR.glob("*.yaml"))


def load_topology(name: str) -> Topology:
    """Read a preset of nanoray/topologies, or a YAML file by its path. Raises ConfigError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else TOPOLOGY_DIR / f"{name}.yaml"
    if path.parent == TOPOLOGY_DIR and not path.is_file():
        refuse_unknown(name, topology_names(), "topology")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Topology.model_validate(values)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read topology {path}: {' '.join(str(error).split())}; check the file") from None
    except ValidationError as error:
        raise ConfigError(f"topology {path}: {_problem(error, values)}") from None


def _problem(error: ValidationError, values: Any) -> str:
    """Say what is wrong with the first wrong key, with its value. A link has two readings: the one meant is Link's."""
    items = [e for e in error.errors() if "Link" in e["loc"]] or error.errors()
    item = next((e for e in items if e["type"] == "extra_forbidden"), items[0])  # a typo also leaves its key missing
    loc = [str(part) for part in item["loc"] if not str(part).startswith(("Link", "literal"))]
    if item["type"] == "extra_forbidden":
        known = Link.model_fields if len(loc) > 1 else Topology.model_fields
        return f"unknown key {'.'.join(loc)}; {did_you_mean(loc[-1], sorted(known))}"
    if item["type"] == "missing":
        return f"{'.'.join(loc)} is missing; add it"
    text = item["msg"] if loc else "it must hold `key: value` lines"
    return f"{'.'.join(loc) or 'its content'} = {item['input']!r}: {text}"


class Cost(NamedTuple):
    """What one collective takes: latencies overlap with those of another lane, transfers share the link."""

    latency_s: float
    transfer_s: float
    cpu: float = 0.0  # cores that each rank's collective keeps busy while it runs: 0 on GPUs

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s


def all_reduce(topology: Topology, algorithm: str, ranks: int, nbytes: int) -> Cost:
    """Return the cost of an all-reduce of `nbytes` over `ranks` that fill node after node; no switch blocks.

    flat       Of the messages that follow each other, as many cross nodes as the algorithm needs among the nodes
               alone; the bytes flow at the pace of the slowest link.
    two_level  Ring reduce-scatter inside each node, the fastest flat all-reduce among the nodes (every rank its part,
               so all network cards work), ring all-gather inside: three phases, one after the other.
    best       The fastest of them, as a tuner would choose.
    """
    if ranks == 1:
        return Cost(0.0, 0.0)
    if algorithm == "best":
        algorithm = best(topology, ranks, nbytes)
    local = min(ranks, topology.ranks_per_node)
    nodes = math.ceil(ranks / local)
    intra, inter = ((1e-6 * link.alpha_us, 1e-9 / link.bandwidth_gb_per_s) for link in topology.levels)
    if algorithm == "two_level":
        inside = _flat("ring", local, nbytes, intra)
        among = min((_flat(name, nodes, nbytes, inter) for name in FLAT), key=lambda c: c.seconds)
        return Cost(inside.latency_s + among.latency_s, inside.transfer_s + among.transfer_s)
    messages, moved = coefficients(algorithm, ranks, nbytes)
    crossing = coefficients(algorithm, nodes, nbytes)[0] if nodes > 1 else 0.0
    slowest = max(intra[1] if local > 1 else 0.0, inter[1] if nodes > 1 else 0.0)
    return Cost(crossing * inter[0] + (messages - crossing) * intra[0], moved * slowest)


def best(topology: Topology, ranks: int, nbytes: int) -> str:
    """Return which algorithm is the fastest there."""
    return min(MODELS, key=lambda name: all_reduce(topology, name, ranks, nbytes).seconds)


def _flat(algorithm: str, ranks: int, nbytes: int, link: tuple[float, float]) -> Cost:
    messages, moved = coefficients(algorithm, ranks, nbytes) if ranks > 1 else (0.0, 0.0)
    return Cost(messages * link[0], moved * link[1])


# A step.


class Bucket(NamedTuple):
    """Gradients that travel together: ready after that much of backward's own work."""

    ready_s: float
    nbytes: int


@dataclass(frozen=True)
class Step:
    """The compute of a DDP step on one rank, in seconds of work when nothing disturbs it."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    buckets: tuple[Bucket, ...]  # in the order in which they get ready

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


class Event(NamedTuple):
    """A stretch of a schedule: a phase of compute, or a collective on its lane."""

    track: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """What happened when in a simulated step."""

    events: tuple[Event, ...]
    step_s: float
    busy_s: float  # some collective was running
    exposed_s: float  # of it: backward was over, and the optimizer waited

    @property
    def hidden_s(self) -> float:
        return self.busy_s - self.exposed_s


@dataclass(eq=False)
class _Task:
    """Work in progress: seconds left of its latency (or of compute), then of its transfer."""

    track: str
    name: str
    left: list[float]
    cpu: float
    start_s: float = 0.0


def simulate(
    step: Step, collective: Callable[[int], Cost], lanes: int = 1, cores: float = math.inf, threads: float = 1.0
) -> Schedule:
    """Simulate one step of a rank; all ranks are equal.

    Backward hands over buckets; collectives start in that order, each on the first free one of `lanes`; the optimizer
    waits for the last. Transfers in flight at the same time share the link equally. Compute keeps `threads` cores busy
    and a collective `Cost.cpu` of them; when together they want more than `cores`, this rank's share of the machine,
    all slow down equally (processor sharing): so no step is shorter than its CPU work over its cores.
    """
    marks = [0.0, *(bucket.ready_s for bucket in step.buckets), step.backward_s]
    compute = deque([_Task("compute", "forward", [step.forward_s, 0.0], threads)])
    compute += [_Task("compute", "backward", [b - a, 0.0], threads) for a, b in pairwise(marks)]
    queue, running, events = deque(enumerate(step.buckets)), list[_Task](), list[Event]()
    now = busy_s = backward_end = 0.0
    while compute or running:
        tasks = [*running, compute[0]] if compute else running
        pace = min(1.0, cores / max(sum(t.cpu for t in tasks), 1e-12))
        transfers = sum(t.left[0] == 0 for t in running)
        rates = [pace / transfers if t.left[0] == 0 and t in running else pace for t in tasks]
        needs = [(t.left[0] or t.left[1]) / rate for t, rate in zip(tasks, rates, strict=True)]
        wait = min(needs)
        now, busy_s = now + wait, busy_s + (wait if running else 0.0)
        for task, rate, need in zip(tasks, rates, needs, strict=True):
            part = 0 if task.left[0] else 1
            task.left[part] = 0.0 if need <= wait * (1 + 1e-12) else task.left[part] - wait * rate
        done = [t for t in tasks if not any(t.left)]
        events += [Event(t.track, t.name, t.start_s, now) for t in done]
        running = [t for t in running if t not in done]
        if compute and compute[0] in done:
            compute.popleft()
            if compute:
                compute[0].start_s = now
            else:
                backward_end = now
        ready = len(step.buckets) + 1 - len(compute)  # forward, then one stretch of backward per bucket, then the rest
        taken = {t.track for t in running}
        for lane in (f"lane {i}" for i in range(lanes) if f"lane {i}" not in taken):
            if queue and queue[0][0] < ready:
                index, bucket = queue.popleft()
                price = collective(bucket.nbytes)
                running.append(_Task(lane, f"bucket {index}", [price.latency_s, price.transfer_s], price.cpu, now))
    end = now + step.optimizer_s * max(1.0, threads / cores)
    return Schedule((*events, Event("compute", "optimizer", now, end)), end, busy_s, now - backward_end)


# Many ranks.


@dataclass(frozen=True)
class Work:
    """What a rank computes, in proportion to its sequences; `buckets` as for one sequence of backward."""

    forward_s: float  # one sequence
    backward_s: float
    optimizer_s: float  # once a step
    buckets: tuple[Bucket, ...]
    micro: int  # sequences that fit at once; more are accumulated, and only the last backward communicates

    def step(self, sequences: int) -> Step:
        """Return the compute of a step with that many sequences on this rank."""
        last = sequences / math.ceil(sequences / self.micro)
        before = (sequences - last) * (self.forward_s + self.backward_s)
        buckets = tuple(Bucket(b.ready_s * last, b.nbytes) for b in self.buckets)
        return Step(before + self.forward_s * last, self.backward_s * last, self.optimizer_s, buckets)


def model_work(config: Config, topology: Topology, compute_ms: float | None = None) -> Work:
    """Return what a rank computes for a preset's model, of which forward is a third.

    `compute_ms` is forward and backward of one micro batch; without it the topology's peak and MFU say. The optimizer
    is not apart: the MFU that people measure holds it.
    """
    shape = ModelShape.of(config, VOCAB[config.tokenizer])
    micro = config.micro_batch_size or config.global_batch_size // (config.grad_accum_steps or 1)
    if compute_ms:
        seconds = 1e-3 * compute_ms / micro
    else:
        assert topology.peak_tflops, "a topology without one runs the step that was measured here"
        seconds = flops_per_token(shape) * shape.block_size / (1e12 * topology.peak_tflops * topology.mfu)
    backward_s = seconds * 2 / 3
    cap_mb = config.bucket_mb or default_bucket_mb(torch.device("cuda"))
    buckets = tuple(Bucket(share * backward_s, nbytes) for share, nbytes in gradient_buckets(shape, cap_mb))
    return Work(seconds / 3, backward_s, 0.0, buckets, micro)


def gradient_buckets(shape: ModelShape, cap_mb: float) -> list[tuple[float, int]]:
    """Return DDP's buckets of a GPT: the share of backward after which each is ready, and its float32 bytes.

    Backward runs from the last layer to the first, in proportion to parameters, each of which multiplies every token.
    lm_head's product comes first, but its gradient is the embedding's too, which is complete at the very end.
    """
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in GPT(shape).named_parameters()}
    embedding = next(iter(sizes))
    done, total, held = sizes[embedding], sum(sizes.values()), 0
    buckets = []
    for name, count in reversed(sizes.items()):
        done += count if name != embedding else 0
        held += 4 * count
        if held >= cap_mb * 2**20 or name == embedding:
            buckets.append((done / total, held))
            held = 0
    return buckets


class Point(NamedTuple):
    """A predicted step. Efficiency is a rank's speed over the speed it has alone."""

    ranks: int
    sequences: int  # per rank
    step_s: float
    efficiency: float
    exposed_share: float  # of the step


def scaling(
    topology: Topology, work: Work, ranks: Sequence[int], algorithm: str, global_batch: int | None = None
) -> list[Point]:
    """Predict steps at each number of ranks.

    Weak scaling: every rank has work.micro sequences. Strong, with a global_batch: the ranks share it, and from there
    on, where a rank would be left without a sequence, the list ends.
    """

    def point(count: int) -> Point:
        sequences = math.ceil((global_batch or count * work.micro) / count)
        plan = simulate(work.step(sequences), lambda n: all_reduce(topology, algorithm, count, n), topology.lanes)
        alone_s = work.step(global_batch or work.micro).compute_s / (global_batch or work.micro)
        speed = (global_batch / count if global_batch else sequences) / plan.step_s
        return Point(count, sequences, plan.step_s, speed * alone_s, plan.exposed_s / plan.step_s)

    return [point(count) for count in ranks if count <= (global_batch or count)]
