"""The benchmarks: families, and their arms.

A benchmark is imported when it is asked for: some import torch or Ray, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from nanoray.bench.harness.benchmark import Benchmark


@dataclass(frozen=True)
class Entry:
    """A benchmark in the list, known without importing it."""

    words: str  # that name it after `nanoray bench`: its family, and its arm if it has one
    summary: str
    load: Callable[[], Benchmark]
    in_all: bool = True  # whether `bench all` runs it; False: it takes long and proves one thing
    quick_flags: tuple[str, ...] = ()  # that `bench all --quick` adds
    command: str = ""  # that starts it, where it is none of `nanoray bench`

    @property
    def family(self) -> str:
        return self.words.split()[0]

    @property
    def program(self) -> str:
        """Return the command that starts it, as a report has it."""
        return self.command or f"python -m nanoray.bench {self.words}"


def _load(module: str, name: str) -> Benchmark:
    benchmark: Benchmark = getattr(import_module(module), name)()
    return benchmark


def at(place: str) -> Callable[[], Benchmark]:
    """Return the function that loads the class at "module:class"."""
    return partial(_load, *place.split(":"))


# By the names that reports have
BENCHMARKS = {
    "train": Entry(
        "train",
        "the same recipe under python, torchrun, nanoray on Ray, and Ray's TorchTrainer",
        at("nanoray.bench.train:TrainBenchmark"),
        # The other arms start clusters, which takes minutes
        quick_flags=("--arms", "plain,torchrun"),
    ),
    "collectives": Entry(
        "communication collectives",
        "latency, algbw and busbw of every collective, and its wrong elements",
        at("nanoray.bench.collectives:CollectivesBenchmark"),
    ),
    "algorithms": Entry(
        "communication algorithms",
        "hand-written ring, tree, ... all-reduces against the backend's own",
        at("nanoray.bench.algorithms:AlgorithmsBenchmark"),
    ),
    "overlap": Entry(
        "communication overlap",
        "bucket sizes of DDP: how much communication hides behind the backward pass",
        at("nanoray.bench.overlap:OverlapBenchmark"),
    ),
    "strategies": Entry(
        "layouts strategies",
        "DDP, ZeRO, FSDP, 16-bit gradients, cp, tp, pp, ep: step time against memory",
        at("nanoray.bench.strategies:StrategiesBenchmark"),
    ),
    "pipeline": Entry(
        "layouts pipeline",
        "how long the stages of a pipeline wait under each schedule, and in theory",
        at("nanoray.bench.pipeline:PipelineBenchmark"),
    ),
    "layouts": Entry(
        "layouts predicted",
        "steps that a dry run predicts for dp x tp, beside real ones at 2, 4 and 8 ranks",
        at("nanoray.bench.layouts:LayoutsBenchmark"),
    ),
    "scaling": Entry(
        "scaling",
        "step time from 1 to 4096 ranks: a fitted model, checked at 3 and 4",
        at("nanoray.bench.scaling:ScalingBenchmark"),
    ),
    "step": Entry(
        "step cpu",
        "attention, optimizer, precision, compile, ...: what each gains a step on this CPU",
        at("nanoray.bench.step:StepBenchmark"),
        quick_flags=("--presets", "shakespeare-cpu"),
    ),
    "gpu": Entry(
        "step gpu",
        "the ladder of a step on a GPU: precision, attention, optimizer, compile, batch; MFU",
        at("nanoray.bench.gpu:GPUBenchmark"),
        in_all=False,
    ),
    "recovery": Entry(
        "recovery",
        "how long training stands still when a rank is killed; goodput under kills",
        at("nanoray.bench.recovery:RecoveryBenchmark"),
        quick_flags=("--arms", "torchrun"),
    ),
    "precision": Entry(
        "precision",
        "what 16 bits lose in training, by cause, and time and memory of each mode",
        at("nanoray.bench.precision:PrecisionBenchmark"),
    ),
    "mig": Entry(
        "mig",
        "MIG slices: what one to seven of a card gain, over gloo and NCCL",
        at("nanoray.bench.mig:MIGBenchmark"),
    ),
    "checkpoint": Entry(
        "checkpoint",
        "what a checkpoint costs training: nanoray, torch.save and DCP, against the raw disk",
        at("nanoray.bench.checkpoint:CheckpointBenchmark"),
    ),
}
