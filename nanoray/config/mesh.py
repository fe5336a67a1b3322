"""Keys of the mesh: devices, axes of parallelism, and the process group."""

from __future__ import annotations

import re
from math import prod
from typing import Literal, NamedTuple

from pydantic import field_validator

from nanoray.config.fields import Group, Natural, Positive, field


class AxisKey(NamedTuple):
    """An axis of the mesh beside the data replicas, by the key of its size."""

    key: str
    in_replica: bool  # its ranks read the same samples: ranks = dp x cp x tp x pp
    cuts_model: bool  # its ranks have different weights
    goes_with_ddp: bool = True  # torch's DDP can sum the gradients beside it


# Every axis that divides a model or its samples; nanoray.cli.forecast.parallelisms has what each costs
AXES = (
    AxisKey("cp", in_replica=True, cuts_model=False),
    AxisKey("tp", in_replica=True, cuts_model=True),
    AxisKey("pp", in_replica=True, cuts_model=True, goes_with_ddp=False),
    AxisKey("ep", in_replica=False, cuts_model=True, goes_with_ddp=False),
)
IN_REPLICA = tuple(axis.key for axis in AXES if axis.in_replica)
CUTS_MODEL = tuple(axis.key for axis in AXES if axis.cuts_model)

# Values of dp_mode, by what a rank keeps
WHOLE_MODELS = ("ddp", "ddp_by_hand")  # all weights, gradients and optimizer state
SHARDS_STATE = ("zero1", "zero2", "fsdp")  # the optimizer state of its shard, or less
BY_HAND = ("ddp_by_hand", "zero1", "zero2")  # gradients in buckets of our own


class MeshKeys(Group):
    """The ranks: how many, on which devices, how they share the work, and how long they wait."""

    # Axes that only a gpt has
    ep: Positive = field(1, "dist")
    """expert parallelism: data ranks that share the experts of a layer, experts/ep each, and send
    each other tokens; divides the data ranks"""

    sequence_parallel: bool = field(False, "dist")
    """tp: each of its ranks computes norms, dropouts and sums for its own part of every sequence:
    less memory for activations, the same bytes sent"""

    # Ranks and their devices
    workers: Positive | Literal["auto"] = field("auto", "dist")
    """ranks; auto = every GPU or MIG slice, else 2 on CPU (1 on a single core)"""

    device: Literal["auto", "cuda", "mig", "cpu"] = field("auto", "dist")
    """cuda (whole GPUs) | mig (slices) | cpu | auto (the first of these that exists)"""

    backend: Literal["auto", "nccl", "gloo"] | str = field("auto", "dist")
    """process group: auto (NCCL on distinct GPUs, else gloo) | nccl | gloo | MODULE:NAME (MODULE,
    imported on each rank, registers NAME by torch.distributed.Backend.register_backend)"""

    placement: Literal["pack", "spread"] = field("pack", "dist")
    """pack ranks on few nodes, or spread them over many"""

    cpus_per_worker: float = field(0.0, "dist", ge=0)
    """CPUs reserved per rank (0 = an equal share of the node's on CPU, 1 with a GPU)"""

    # How ranks share the work
    dp_mode: Literal["ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"] = field("ddp", "dist")
    """how ranks share the work: ddp (torch's; each keeps the whole state) | ddp_by_hand (the same,
    with buckets in plain sight; the default with pp or ep) | zero1 (each keeps 1/n of the optimizer
    state) | zero2 (and of the gradients) | fsdp (and of the weights)"""

    mirror: Literal["auto", "off"] = field("auto", "dist")
    """zero1, zero2 and fsdp, on Ray with gloo: auto (another rank keeps a copy of each rank's
    share, so a lost rank is replaced with no step repeated) | off (they restart from a
    checkpoint)"""

    fsdp_reshard: Literal["full", "grad_op"] = field("full", "dist")
    """dp_mode fsdp: full (free a block's weights after its forward) | grad_op (keep them until its
    backward is done: one all-gather less, more memory)"""

    fsdp_gather: Literal["fp32", "bf16"] = field("fp32", "dist")
    """dp_mode fsdp: type in which weights are gathered and computed with; bf16 is half the bytes, and
    norms are rounded, too"""

    replicas: Positive = field(1, "dist")
    """zero1, zero2 and fsdp: groups of data ranks, such as nodes, that each hold the whole state;
    the ranks of one group shard it. Divides the data ranks"""

    # Memory against time
    activation_checkpointing: Literal["none", "selective", "block"] = field("none", "dist")
    """which activations a forward keeps for backward: none (all: fastest) | selective (of matrix
    products and attention: about a third less) | block (each block's input: least, and a second
    forward); no loss changes by a bit"""

    # Axes of the mesh; ranks = dp x cp x tp x pp
    cp: Positive = field(1, "dist")
    """context parallelism: ranks that share every sequence of a gpt, block_size/cp tokens each;
    ranks = dp x cp x tp x pp"""

    tp: Positive = field(1, "dist")
    """tensor parallelism: ranks that share each layer of a gpt, by heads, hidden units and tokens;
    ranks = dp x tp x pp"""

    pp: Positive = field(1, "dist")
    """pipeline parallelism: ranks that have n_layer/pp blocks of a gpt each, between which micro
    batches pass"""

    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = field("1f1b", "dist")
    """pp: gpipe (all forwards, then all backwards) | 1f1b (one after the other: less memory) |
    interleaved (several chunks of layers per rank: less waiting, more travels) | zero_bubble
    (gradients of weights fill the waiting time)"""

    pp_chunks: Natural = field(0, "dist")
    """pp_schedule interleaved: chunks of layers per rank (0 = 2)"""

    # Sums of gradients
    bucket_mb: float = field(0.0, "dist", ge=0)
    """gradient bucket in MB (0 = 25 on GPU, 8 on CPU); with ddp it fixes the order of sums, so a
    resume keeps it"""

    allreduce: Literal[
        "backend", "ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "flat"
    ] = field("backend", "dist")
    """how gradients are summed: backend (NCCL's or gloo's all-reduce) | one written by hand in
    parallel/algorithms.py"""

    # How long ranks and the driver wait
    timeout_s: float = field(120.0, "dist", gt=0)
    """seconds after which a waiting collective fails, and the attempt with it"""

    init_timeout_s: float = field(60.0, "dist", gt=0)
    """seconds within which all ranks must have joined"""

    head_timeout_s: float = field(15.0, "dist", gt=0)
    """seconds without the cluster's head after which the ranks save and the run ends; raise it only
    where the head's state outlives it (GCS fault tolerance)"""

    ray_address: str = field("auto", "dist", min_length=1)
    """auto (RAY_ADDRESS, else a new local Ray) | local | HOST:PORT"""

    placement_timeout_s: float = field(4.0, "dist", gt=0)
    """seconds to wait for busy resources and for nodes; above the default also for nodes that an
    autoscaler may add, or that join later"""

    @property
    def replica_ranks(self) -> int:
        """The ranks that read the same samples: each has a part of them, or of the model."""
        return prod(getattr(self, axis) for axis in IN_REPLICA)

    @property
    def model_ranks(self) -> int:
        """The ranks that share the weights of one replica, and read the same samples."""
        return prod(getattr(self, axis) for axis in IN_REPLICA if axis in CUTS_MODEL)

    @property
    def model_parts(self) -> int:
        """The parts into which the axes cut the weights."""
        return prod(getattr(self, axis) for axis in CUTS_MODEL)

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, backend: str) -> str:
        """Raise ValueError for a backend of an unknown form."""
        if not re.fullmatch(r"auto|nccl|gloo|[\w.]+:\w+", backend):
            raise ValueError(
                f"{backend!r} is none of auto, nccl, gloo, MODULE:NAME; NAME alone does not say "
                "which module registers it"
            )
        return backend

    @property
    def sharded(self) -> bool:
        """Whether no rank has the whole state: each keeps the optimizer state of its own shard."""
        return self.model_parts > 1 or self.dp_mode in SHARDS_STATE

    @property
    def chunks(self) -> int:
        """The chunks of layers that each stage of a pipeline has."""
        if self.pp_schedule != "interleaved":
            return 1
        return self.pp_chunks or 2
