"""What is trained, whatever the layout, and on which devices: the input of every formula of this room."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoray.config import Config
from nanoray.config.layout import Layout
from nanoray.errors import ConfigError
from nanoray.machine.gpus import discover_gpus
from nanoray.models.gpt import ModelShape
from nanoray.parallel.ddp import default_bucket_mb


@dataclass(frozen=True)
class AssumedDevice:
    """What a dry run assumes about the device of a rank, which it does not open."""

    kind: str  # cpu | cuda
    precision: str  # of the run; where it is auto, what such a device usually gets
    bucket_mb: float
    mirrored: bool  # each rank also holds a copy of another rank's share


def assume_device(config: Config, gpus: bool | None = None) -> AssumedDevice:
    """Return the assumptions of a dry run about the devices of `config`.

    `gpus`: whether `device = auto` means GPUs; None: whether this machine has any.
    """
    # A dry run must not open a device: a CUDA context takes seconds and memory.
    if config.device == "auto":
        if gpus is None:
            gpus = bool(discover_gpus())
        kind = "cuda" if gpus else "cpu"
    else:
        kind = "cpu" if config.device == "cpu" else "cuda"

    precision = config.precision
    if precision == "auto":
        precision = "bf16" if kind == "cuda" else "fp32"
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if kind == "cuda" else "gloo"
    bucket_mb = config.bucket_mb or default_bucket_mb(torch.device(kind))
    return AssumedDevice(kind, precision, bucket_mb, config.mirrors(backend))


@dataclass(frozen=True)
class Job:
    """A GPT, its configuration, and the batch of a step. The layout is an argument of each formula."""

    shape: ModelShape
    config: Config
    sequences: int  # of a step, over all replicas
    precision: str  # fp32 | tf32 | bf16 | fp16
    bucket_mb: float
    mirrored: bool = False  # each rank also holds a copy of another rank's share

    @property
    def half(self) -> bool:
        """Whether matrix products take 2 bytes per number."""
        return self.precision not in ("fp32", "tf32")

    def cuts_sequence(self, layout: Layout) -> bool:
        """Return whether the tensor ranks also divide the positions of the residual stream."""
        return self.config.sequence_parallel and layout.tp > 1

    def mode(self, layout: Layout) -> str:
        """Return the data-parallel mode in this layout.

        torch's DDP supports neither pipelines nor expert parallelism; ddp_by_hand replaces it.
        """
        # One data rank has nothing to shard or to reduce.
        if layout.size_of("dp_cp") == 1:
            return "ddp"
        mode: str = self.config.dp_mode
        if mode == "ddp" and layout.pp * layout.ep > 1:
            return "ddp_by_hand"
        return mode

    def config_at(self, layout: Layout) -> Config:
        """Return the configuration with the axes of this layout, unchecked.

        Accumulation follows from the micro batch.
        """
        sizes = layout.sizes()
        del sizes["dp"]  # which follows from the number of ranks
        mode = self.mode(layout)
        return self.config.model_copy(update={"dp_mode": mode, "grad_accum_steps": 0, **sizes})


def job_of(config: Config, vocab_size: int, sequences: int, on_gpus: bool | None = None) -> Job:
    """Return what a configuration trains, in steps of `sequences`. Raises ConfigError.

    Its axes come with Layout.of. `on_gpus`: see `assume_device`.
    """
    if config.model != "gpt":
        raise ConfigError(
            f"the layers of a gpt have formulas, but model = {config.model}; drop --topology"
        )
    # The formulas of what ranks send count gradients and weights of 32 bits.
    if config.pure or config.precision == "fp8":
        nearest = "bf16" if config.precision == "fp8" else config.precision.removesuffix("_pure")
        raise ConfigError(
            f"a step is not predicted for precision = {config.precision}; use precision {nearest}, "
            "or drop --topology"
        )
    if config.grad_compress != "none":
        raise ConfigError(
            f"a step is not predicted for grad_compress = {config.grad_compress}; use "
            "grad_compress none, or drop --topology"
        )
    device = assume_device(config, on_gpus)
    return Job(
        shape=ModelShape.of(config, vocab_size),
        config=config,
        sequences=sequences,
        precision=device.precision,
        bucket_mb=device.bucket_mb,
        mirrored=device.mirrored,
    )
