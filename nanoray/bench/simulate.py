"""What a DDP step costs at any number of ranks: link models fitted to measurements, and steps simulated with them.

    fit()          measured all-reduces       -> alpha (seconds a message) and beta (seconds a byte)
    scaling()      a topology, ranks          -> predicted steps, by nanoray.mesh.links and nanoray.parallel.simulate

Pure arithmetic: nothing here measures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanoray.config import Config
from nanoray.data.tokenizer import VOCAB as VOCAB
from nanoray.errors import ConfigError
from nanoray.mesh.links import Link, Topology, all_reduce, coefficients
from nanoray.models.costs import flops_per_token
from nanoray.models.gpt import GPT, ModelShape
from nanoray.parallel.ddp import default_bucket_mb
from nanoray.parallel.simulate import Bucket, Step, simulate


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
