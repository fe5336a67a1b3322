"""What the engine of a dry run predicts with links and compute that were measured, beside real steps.

    speed_of()         a measured micro batch    -> how fast a rank computes
    FittedLinks        fitted collectives        -> the network of this machine
    OneAlgorithm       a topology                -> a network of one all-reduce
    predict_step()     these, a layout           -> the step, by parts (cli/forecast/predict.py)
    add_step_rows()    measured, predicted steps -> rows with their error, and the target

Arithmetic for `bench scaling` and `bench layouts predicted`: nothing here measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanoray.bench.fit import Fit
from nanoray.bench.harness.figure import dots, with_values
from nanoray.bench.harness.report import Measurement, Report
from nanoray.cli.forecast.job import Job
from nanoray.cli.forecast.links import all_reduce, placed, seen_by
from nanoray.cli.forecast.predict import (
    Cost,
    Network,
    OnTopology,
    Prediction,
    Speed,
    flops_of,
    predict,
)
from nanoray.config import Config
from nanoray.config.layout import Layout
from nanoray.data.tokenizer import VOCAB as VOCAB
from nanoray.models.gpt import ModelShape
from nanoray.models.weights import weights_of
from nanoray.parallel.ddp import default_bucket_mb

MEASURED = "step, measured"
PREDICTED = "step, predicted"
ERROR = "|predicted / measured - 1|"
ERROR_LIMIT = 0.15


def shape_of(config: Config) -> ModelShape:
    """Return the shape of a configuration's GPT, as large as before a text is read."""
    return ModelShape.of(config, VOCAB[config.tokenizer])


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


def speed_of(
    config: Config, compute: Mapping[str, float], micro: int, cut: Mapping[str, float] | None = None
) -> Speed:
    """Return how fast a rank computes, from the seconds of a micro batch that were measured.

    cut: those of a model of which a rank has half of each layer. It does not take half of the time.
    """
    shape = shape_of(config)
    job = Job(shape, config, micro, "fp32", 1.0)
    forward, backward = flops_of(job, Layout(), 0)  # of a token
    tokens = micro * shape.block_size
    uncut = 0.0
    if cut:
        ratio = (cut["forward_s"] + cut["backward_s"]) / (
            compute["forward_s"] + compute["backward_s"]
        )
        uncut = min(1.0, max(0.0, 2 * ratio - 1))  # ratio = uncut + (1 - uncut) / 2
    return Speed(
        forward * tokens / compute["forward_s"],
        backward * tokens / compute["backward_s"],
        compute["update_s"] / sum(tensor.numel for tensor in weights_of(shape, Layout(), 0)),
        uncut,
    )


@dataclass(frozen=True)
class FittedLinks:
    """The network of this machine: links that were fitted, by the name of the collective."""

    links: Mapping[str, Fit]
    cpu: Mapping[str, Fit]  # their CPU seconds, where they take any

    def cost(self, layout: Layout, axis: str, op: str, nbytes: float) -> Cost:
        """Return the cost of a collective, and the cores that it keeps busy."""
        ranks = layout.size_of(axis)
        if ranks == 1:
            return Cost(0.0)
        seconds = self.links[op].seconds(ranks, round(nbytes))
        cpu = self.cpu.get(op)
        busy_s = cpu.seconds(ranks, round(nbytes)) if cpu else 0.0
        return Cost(seconds, busy_s / seconds if seconds else 0.0)


@dataclass(frozen=True)
class OneAlgorithm(OnTopology):
    """A topology on which every all-reduce is done by one algorithm."""

    algorithm: str

    def cost(self, layout: Layout, axis: str, op: str, nbytes: float) -> Cost:
        """Return the cost of a collective."""
        if op != "all_reduce":
            return super().cost(layout, axis, op, nbytes)
        place = placed(layout, axis, self.topology.ranks_per_node)
        own = seen_by(self.topology, place)
        return Cost(all_reduce(own, self.algorithm, place.ranks, round(nbytes)))


def predict_step(
    config: Config,
    layout: Layout,
    micro: int,
    network: Network,
    speed: Speed,
    device: str = "cpu",
    sequences: int = 0,
) -> Prediction:
    """Predict a step of `config`, as a dry run does. sequences: of all replicas; 0: one micro batch each."""
    cap_mb = config.bucket_mb or default_bucket_mb(torch.device(device))
    job = Job(shape_of(config), config, sequences or micro * layout.dp, "fp32", cap_mb)
    return predict(job, layout, micro, network, speed)
