"""The list of benchmarks: `python -m nanoray.bench NAME` runs the one of that name.

A benchmark is imported only when it is used: some import torch or Ray, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanoray.bench.harness.benchmark import Benchmark


@dataclass(frozen=True)
class Entry:
    """A benchmark in the list, known without importing it."""

    summary: str
    load: Callable[[], Benchmark]
    in_all: bool = True  # whether `bench all` runs it; False: it takes long and proves one thing
    quick_flags: tuple[str, ...] = ()  # that `bench all --quick` adds
    command: str = ""  # that starts it, where it is not `python -m nanoray.bench NAME`


def load_train() -> Benchmark:
    from nanoray.bench.train import TrainBenchmark

    return TrainBenchmark()


def load_collectives() -> Benchmark:
    from nanoray.bench.collectives import CollectivesBenchmark

    return CollectivesBenchmark()


def load_algorithms() -> Benchmark:
    from nanoray.bench.algorithms import AlgorithmsBenchmark

    return AlgorithmsBenchmark()


def load_overlap() -> Benchmark:
    from nanoray.bench.overlap import OverlapBenchmark

    return OverlapBenchmark()


def load_strategies() -> Benchmark:
    from nanoray.bench.strategies import StrategiesBenchmark

    return StrategiesBenchmark()


def load_pipeline() -> Benchmark:
    from nanoray.bench.pipeline import PipelineBenchmark

    return PipelineBenchmark()


def load_compression() -> Benchmark:
    from nanoray.bench.compression import CompressionBenchmark

    return CompressionBenchmark()


def load_rarely() -> Benchmark:
    from nanoray.bench.rarely import RarelyBenchmark

    return RarelyBenchmark()


def load_equivalence() -> Benchmark:
    from nanoray.bench.equivalence import EquivalenceBenchmark

    return EquivalenceBenchmark()


def load_scaling() -> Benchmark:
    from nanoray.bench.scaling import ScalingBenchmark

    return ScalingBenchmark()


def load_layouts() -> Benchmark:
    from nanoray.bench.layouts import LayoutsBenchmark

    return LayoutsBenchmark()


def load_step() -> Benchmark:
    from nanoray.bench.step import StepBenchmark

    return StepBenchmark()


def load_gpu() -> Benchmark:
    from nanoray.bench.gpu import GPUBenchmark

    return GPUBenchmark()


def load_speedrun() -> Benchmark:
    from nanoray.bench.speedrun import SpeedrunBenchmark

    return SpeedrunBenchmark()


def load_recovery() -> Benchmark:
    from nanoray.bench.recovery import RecoveryBenchmark

    return RecoveryBenchmark()


def load_precision() -> Benchmark:
    from nanoray.bench.precision import PrecisionBenchmark

    return PrecisionBenchmark()


def load_mig() -> Benchmark:
    from nanoray.bench.mig import MIGBenchmark

    return MIGBenchmark()


def load_checkpoint() -> Benchmark:
    from nanoray.bench.checkpoint import CheckpointBenchmark

    return CheckpointBenchmark()


def load_soak() -> Benchmark:
    from nanoray.bench.soak import SoakBenchmark

    return SoakBenchmark()


# In the order in which `bench all` runs them
BENCHMARKS = {
    "train": Entry(
        "the same recipe under python, torchrun, nanoray on Ray, and Ray's TorchTrainer",
        load_train,
        # The other arms start clusters, which takes minutes
        quick_flags=("--arms", "plain,torchrun"),
    ),
    "collectives": Entry(
        "latency, algbw and busbw of every collective, and its wrong elements", load_collectives
    ),
    "algorithms": Entry(
        "hand-written ring, tree, ... all-reduces against the backend's own", load_algorithms
    ),
    "overlap": Entry(
        "bucket sizes of DDP: how much communication hides behind the backward pass", load_overlap
    ),
    "strategies": Entry(
        "DDP, ZeRO and FSDP, with and without activation checkpointing: step time against memory",
        load_strategies,
    ),
    "pipeline": Entry(
        "how long the stages of a pipeline wait under each schedule, and in theory", load_pipeline
    ),
    "compression": Entry(
        "gradients in bf16, fp16, int8 and PowerSGD: bytes, step time and loss beside float32",
        load_compression,
    ),
    "rarely": Entry(
        "replicas that rarely communicate: bytes, step time on thin links, and loss beside ddp",
        load_rarely,
        in_all=False,
    ),
    "equivalence": Entry(
        "every data-parallel mode against one process: losses, weights, bits", load_equivalence
    ),
    "scaling": Entry(
        "step time from 1 to 4096 ranks: a fitted model, checked at 3 and 4", load_scaling
    ),
    "layouts": Entry(
        "steps that a dry run predicts for dp x tp, beside real ones at 2, 4 and 8 ranks",
        load_layouts,
    ),
    "step": Entry(
        "attention, optimizer, precision, compile, ...: what each gains a step on this CPU",
        load_step,
        quick_flags=("--presets", "shakespeare-cpu"),
    ),
    "gpu": Entry(
        "the ladder of a step on a GPU: precision, attention, optimizer, compile, batch; MFU",
        load_gpu,
        in_all=False,
    ),
    "speedrun": Entry(
        "seconds from a command to a validation loss on two CPU cores; all may join",
        load_speedrun,
        in_all=False,
    ),
    "recovery": Entry(
        "how long training stands still when a rank is killed; goodput under kills",
        load_recovery,
        quick_flags=("--arms", "torchrun"),
    ),
    "precision": Entry(
        "what 16 bits lose in training, by cause, what cures it, and time and memory of each mode",
        load_precision,
    ),
    "mig": Entry("MIG slices: what is there, what would run where, and what it gains", load_mig),
    "checkpoint": Entry(
        "what a checkpoint costs training: nanoray's two modes, torch.save and DCP, against the raw disk",
        load_checkpoint,
    ),
    "soak": Entry(
        "half an hour under random faults: the weights of a run without, nothing left behind",
        load_soak,
        in_all=False,
    ),
}
