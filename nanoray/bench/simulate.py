"""What steps cost by links that are fitted here or described in a file, and how far that is from real
ones.

    cost_of()         a fitted collective        -> its seconds, and the cores that it keeps busy
    scaling()         a topology, ranks          -> predicted steps of DDP, by cli/forecast/simulate.py
    add_step_rows()   measured, predicted steps  -> rows with their error, and the target

Arithmetic for `bench scaling` and `bench layouts predicted`: nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanoray.bench.harness.figure import dots, with_values
from nanoray.bench.harness.report import Measurement, Report
from nanoray.cli.forecast.fit import Fit
from nanoray.cli.forecast.links import Cost, Topology, all_reduce, coefficients
from nanoray.cli.forecast.simulate import SimulatedBucket, Step, simulate
from nanoray.config import Config
from nanoray.data.tokenizer import VOCAB as VOCAB
from nanoray.models.costs import flops_per_token
from nanoray.models.gpt import GPT, ModelShape
from nanoray.parallel.ddp import default_bucket_mb

MEASURED = "step, measured"
PREDICTED = "step, predicted"
ERROR = "|predicted / measured - 1|"
ERROR_LIMIT = 0.15


def shape_of(config: Config) -> ModelShape:
    """Return the shape of a configuration's GPT, as large as before a text is read."""
    return ModelShape.of(config, VOCAB[config.tokenizer])


def cost_of(ranks: int, nbytes: float, link: Fit, cpu: Fit | None) -> Cost:
    """Return the cost of a collective that was fitted here; one of a single rank sends nothing."""
    if ranks == 1:
        return Cost(0.0, 0.0, 0.0)
    messages, moved = coefficients("backend", ranks, round(nbytes))
    latency_s = messages * link.alpha_s
    transfer_s = moved * link.beta_s_per_byte
    busy_s = cpu.seconds(ranks, round(nbytes)) if cpu else 0.0
    seconds = latency_s + transfer_s
    return Cost(latency_s, transfer_s, busy_s / seconds if seconds else 0.0)


def add_step_rows(
    report: Report,
    arm: str,
    measured_s: Sequence[float],
    predicted_s: Sequence[float],
    notes: tuple[str, str],
    extra: dict[str, Any] | None = None,
    of_prediction: dict[str, Any] | None = None,
) -> Measurement:
    """Add an arm's measured and predicted steps and their error; return the row of the error.

    There is one error per round, so that a target judges a median and not the best case. `extra`
    is of all three rows.
    """
    extra = extra or {}
    errors = [abs(p / m - 1) for p, m in zip(predicted_s, measured_s, strict=True)]
    milliseconds = [[1e3 * s for s in steps] for steps in (measured_s, predicted_s)]
    own = (extra, extra | (of_prediction or {}))
    for metric, ms, note, more in zip((MEASURED, PREDICTED), milliseconds, notes, own, strict=True):
        report.add(arm, metric, "ms", ms, note, extra=more)
    return report.add(arm, ERROR, "ratio", errors, extra=extra)


def add_error_target(report: Report, error: Measurement, what: str) -> None:
    """Add the target that a prediction has to reach."""
    text = f"error of the predicted step, {what}"
    report.add_target(text, error, "<=", ERROR_LIMIT)


def percent_of_error(report: Report, arm: str, spread: str) -> str:
    """Write the cell of the error."""
    error = report.row(arm, ERROR)
    return f"{100 * error.median:.0f} %" if error else ""


def draw_steps(axes: Any, report: Report, across: bool) -> None:
    """Draw measured and predicted steps: medians, and the middle half of the rounds."""
    for metric, marker in ((MEASURED, "o"), (PREDICTED, "x")):
        rows = with_values(report, metric)
        label = metric if across else metric.removeprefix("step, ")
        at = [row.arm for row in rows]
        dots(axes, at, rows, across=across, fmt=marker, capsize=3, label=label)


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


def model_work(config: Config, topology: Topology) -> Work:
    """Return what a rank computes for a preset's model, of which forward is a third.

    The topology's peak and MFU say how long it takes. The optimizer is not apart: the MFU that
    people measure holds it.
    """
    assert topology.peak_tflops, "a topology without one runs the step that was measured here"
    shape = shape_of(config)
    micro = config.micro_batch_size or config.global_batch_size // (config.grad_accum_steps or 1)
    flops = flops_per_token(shape) * shape.block_size  # of a sequence
    seconds = flops / (1e12 * topology.peak_tflops * topology.mfu)
    cap_mb = config.bucket_mb or default_bucket_mb(torch.device("cuda"))
    return work_of(shape, cap_mb, micro, seconds / 3, seconds * 2 / 3)


def work_of(
    shape: ModelShape,
    cap_mb: float,
    micro: int,
    forward_s: float,
    backward_s: float,
    optimizer_s: float = 0.0,
) -> Work:
    """Return the work of a model whose passes over one sequence take so long, in DDP's buckets."""
    buckets = tuple(
        SimulatedBucket(share * backward_s, nbytes)
        for share, nbytes in gradient_buckets(shape, cap_mb)
    )
    return Work(forward_s, backward_s, optimizer_s, buckets, micro)


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
