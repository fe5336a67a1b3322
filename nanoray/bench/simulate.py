"""What a DDP step costs at any number of ranks: steps simulated with fitted links, or those of a file.

    scaling()      a topology, ranks  -> predicted steps, by forecast/links.py and forecast/simulate.py

Pure arithmetic: nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanoray.config import Config
from nanoray.data.tokenizer import VOCAB as VOCAB
from nanoray.forecast.links import Topology, all_reduce
from nanoray.forecast.simulate import SimulatedBucket, Step, simulate
from nanoray.models.costs import flops_per_token
from nanoray.models.gpt import GPT, ModelShape
from nanoray.parallel.ddp import default_bucket_mb


@dataclass(frozen=True)
class Work:
    """The compute of a rank, in proportion to its sequences.

    `buckets` are those of the backward pass of one sequence.
    """

    forward_s: float  # one sequence
    backward_s: float
    optimizer_s: float  # once a step
    buckets: tuple[SimulatedBucket, ...]
    # Sequences that fit at once; more are accumulated, and only the last backward communicates
    micro: int

    def step(self, sequences: int) -> Step:
        """Return the compute of a step with that many sequences on this rank."""
        last = sequences / math.ceil(sequences / self.micro)
        before = (sequences - last) * (self.forward_s + self.backward_s)
        buckets = tuple(SimulatedBucket(b.ready_s * last, b.nbytes) for b in self.buckets)
        return Step(
            before + self.forward_s * last, self.backward_s * last, self.optimizer_s, buckets
        )


def model_work(config: Config, topology: Topology, compute_ms: float | None = None) -> Work:
    """Return what a rank computes for a preset's model, of which forward is a third.

    `compute_ms` is forward and backward of one micro batch; without it the topology's peak and MFU
    say. The optimizer is not apart: the MFU that people measure holds it.
    """
    shape = ModelShape.of(config, VOCAB[config.tokenizer])
    micro = config.micro_batch_size or config.global_batch_size // (config.grad_accum_steps or 1)
    if compute_ms:
        seconds = 1e-3 * compute_ms / micro
    else:
        assert topology.peak_tflops, "a topology without one runs the step that was measured here"
        seconds = (
            flops_per_token(shape) * shape.block_size / (1e12 * topology.peak_tflops * topology.mfu)
        )
    backward_s = seconds * 2 / 3
    cap_mb = config.bucket_mb or default_bucket_mb(torch.device("cuda"))
    buckets = tuple(
        SimulatedBucket(share * backward_s, nbytes)
        for share, nbytes in gradient_buckets(shape, cap_mb)
    )
    return Work(seconds / 3, backward_s, 0.0, buckets, micro)


def gradient_buckets(shape: ModelShape, cap_mb: float) -> list[tuple[float, int]]:
    """Return (share of backward after which it is ready, float32 bytes) of DDP's buckets.

    Backward runs from the last layer to the first, in proportion to parameters, each of which
    multiplies every token. lm_head's product comes first, but its gradient is the embedding's too,
    which is complete at the very end.
    """
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in GPT(shape).named_parameters()}
    embedding = next(iter(sizes))
    done = sizes[embedding]
    total = sum(sizes.values())
    held = 0
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
    topology: Topology,
    work: Work,
    ranks: Sequence[int],
    algorithm: str,
    global_batch: int | None = None,
) -> list[Point]:
    """Predict steps at each number of ranks.

    Weak scaling: every rank has work.micro sequences. Strong, with a global_batch: the ranks share
    it, and from there on, where a rank would be left without a sequence, the list ends.
    """

    def point(count: int) -> Point:
        sequences = math.ceil((global_batch or count * work.micro) / count)
        plan = simulate(
            work.step(sequences),
            lambda n: all_reduce(topology, algorithm, count, n),
            topology.lanes,
        )
        alone_s = work.step(global_batch or work.micro).compute_s / (global_batch or work.micro)
        speed = (global_batch / count if global_batch else sequences) / plan.step_s
        return Point(count, sequences, plan.step_s, speed * alone_s, plan.exposed_s / plan.step_s)

    return [point(count) for count in ranks if count <= (global_batch or count)]
