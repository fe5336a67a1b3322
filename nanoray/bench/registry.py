"""The list of benchmarks: `python -m nanoray.bench NAME` runs the one of that name.

A benchmark is imported only when it is used: some import torch or Ray, which takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from nanoray.bench.harness.benchmark import Benchmark
from nanoray.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """A benchmark in the list, known without importing it."""

    summary: str
    load: Callable[[], Benchmark]
    in_all: bool = True  # whether `bench all` runs it; False: it takes long and proves one thing
    quick_flags: tuple[str, ...] = ()  # that `bench all --quick` adds
    command: str = ""  # that starts it, where it is not `python -m nanoray.bench NAME`


def _load(module: str, name: str) -> Benchmark:
    benchmark: Benchmark = getattr(import_module(module), name)()
    return benchmark


def at(place: str) -> Callable[[], Benchmark]:
    """Return the function that loads the class at "module:class"."""
    return partial(_load, *place.split(":"))


# An example of the repository, which an installed nanoray has not
SPEEDRUN = Path(__file__).resolve().parents[2] / "examples" / "speedrun" / "benchmark.py"


def is_there(name: str) -> bool:
    """Whether a benchmark of the list can be loaded here."""
    return name != "speedrun" or SPEEDRUN.is_file()


def _speedrun() -> Benchmark:
    if not is_there("speedrun"):
        raise ConfigError(
            "bench speedrun is an example of nanoray's repository, and an installed nanoray has no "
            "examples; run it in a checkout"
        )
    spec = spec_from_file_location("speedrun", SPEEDRUN)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["speedrun"] = module_from_spec(spec)  # where a dataclass looks it up
    spec.loader.exec_module(module)
    benchmark: Benchmark = module.SpeedrunBenchmark()
    return benchmark


BENCHMARKS = {
    "train": Entry(
        "the same recipe under python, torchrun, nanoray on Ray, and Ray's TorchTrainer",
        at("nanoray.bench.train:TrainBenchmark"),
        # The other arms start clusters, which takes minutes
        quick_flags=("--arms", "plain,torchrun"),
    ),
    "collectives": Entry(
        "latency, algbw and busbw of every collective, and its wrong elements",
        at("nanoray.bench.collectives:CollectivesBenchmark"),
    ),
    "algorithms": Entry(
        "hand-written ring, tree, ... all-reduces against the backend's own",
        at("nanoray.bench.algorithms:AlgorithmsBenchmark"),
    ),
    "overlap": Entry(
        "bucket sizes of DDP: how much communication hides behind the backward pass",
        at("nanoray.bench.overlap:OverlapBenchmark"),
    ),
    "strategies": Entry(
        "DDP, ZeRO and FSDP, with and without activation checkpointing: step time against memory",
        at("nanoray.bench.strategies:StrategiesBenchmark"),
    ),
    "context": Entry(
        "the memory of a rank against the length of sequences, alone and with context parallelism",
        at("nanoray.bench.context:ContextBenchmark"),
    ),
    "hybrid": Entry(
        "a state sharded over all ranks or in each of two nodes, on slow links between them",
        at("nanoray.bench.hybrid:HybridBenchmark"),
        in_all=False,
    ),
    "pipeline": Entry(
        "how long the stages of a pipeline wait under each schedule, and in theory",
        at("nanoray.bench.pipeline:PipelineBenchmark"),
    ),
    "compression": Entry(
        "gradients in bf16 and fp16: bytes, step time and loss beside float32",
        at("nanoray.bench.compression:CompressionBenchmark"),
    ),
    "scaling": Entry(
        "step time from 1 to 4096 ranks: a fitted model, checked at 3 and 4",
        at("nanoray.bench.scaling:ScalingBenchmark"),
    ),
    "layouts": Entry(
        "steps that a dry run predicts for dp x tp, beside real ones at 2, 4 and 8 ranks",
        at("nanoray.bench.layouts:LayoutsBenchmark"),
    ),
    "step": Entry(
        "attention, optimizer, precision, compile, ...: what each gains a step on this CPU",
        at("nanoray.bench.step:StepBenchmark"),
        quick_flags=("--presets", "shakespeare-cpu"),
    ),
    "gpu": Entry(
        "the ladder of a step on a GPU: precision, attention, optimizer, compile, batch; MFU",
        at("nanoray.bench.gpu:GPUBenchmark"),
        in_all=False,
    ),
    "speedrun": Entry(
        "seconds from a command to a validation loss on two CPU cores; all may join",
        _speedrun,
        in_all=False,
    ),
    "recovery": Entry(
        "how long training stands still when a rank is killed; goodput under kills",
        at("nanoray.bench.recovery:RecoveryBenchmark"),
        quick_flags=("--arms", "torchrun"),
    ),
    "precision": Entry(
        "what 16 bits lose in training, by cause, what cures it, and time and memory of each mode",
        at("nanoray.bench.precision:PrecisionBenchmark"),
    ),
    "mig": Entry(
        "MIG slices: what is there, what would run where, and what it gains",
        at("nanoray.bench.mig:MIGBenchmark"),
    ),
    "checkpoint": Entry(
        "what a checkpoint costs training: nanoray's two modes, torch.save and DCP, against the raw disk",
        at("nanoray.bench.checkpoint:CheckpointBenchmark"),
    ),
}
