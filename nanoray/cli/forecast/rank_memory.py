"""The memory of one rank of a GPT at the peak of a step, by part, and how it is written.

Every dry run and search gets its numbers from `rank_memory`: state by
`nanoray.cli.forecast.memory`, activations by `nanoray.models.costs` for as many micro batches as the
timetable of the pipeline keeps in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from nanoray.cli.forecast.job import AssumedDevice, Job
from nanoray.cli.forecast.memory import RankSizes, Sizes, rank_state
from nanoray.cli.forecast.parallelisms.registry import PARALLELISMS
from nanoray.config import Batch, Config
from nanoray.config.layout import Layout
from nanoray.models.build import kernels_of
from nanoray.models.costs import Cut, activation_memory, with_kernels
from nanoray.models.gpt import ModelShape
from nanoray.models.precision import weight_type
from nanoray.models.weights import Weights, weights_of
from nanoray.parallel.schedules import in_flight

GB = 1e9
MIB = 2**20
MOST_MIB = 10_000  # larger sizes are written in GB


def rank_memory(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    batch: Batch,
    device: AssumedDevice,
    stage: int = 0,
) -> dict[str, int]:
    """Return the bytes of a rank of `stage` by part: see `state_memory` and `activation_memory`."""
    # Data replicas and parts of sequences share one copy of the state, or those of one group do.
    shared_by = layout.shard_size
    sizes = rank_sizes(config, shape, layout, stage)
    state = rank_state(config, sizes, shared_by, batch.accum, device.bucket_mb, device.mirrored)
    activations = stage_activations(config, shape, batch, device.precision, stage)
    return state | activations


def largest_rank(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    batch: Batch,
    device: AssumedDevice,
) -> tuple[int, dict[str, int]]:
    """Return the stage whose rank needs most, and the bytes of that rank by part.

    The first stage has the embedding and the last one the head. Of those between, the second keeps
    the most micro batches.
    """
    largest = 0
    most: dict[str, int] = {}
    for stage in sorted({0, min(1, config.pp - 1), config.pp - 1}):
        parts = rank_memory(config, shape, layout, batch, device, stage)
        if sum(parts.values()) > sum(most.values()):
            largest, most = stage, parts
    return largest, most


def memory_of(job: Job, layout: Layout, micro: int) -> dict[str, int]:
    """Return the bytes of the rank that needs most, with micro batches of `micro` sequences."""
    batch = Batch(micro, job.sequences // (layout.dp * micro), layout.dp)
    device = AssumedDevice("", job.precision, job.bucket_mb, job.mirrored)
    return largest_rank(job.config_at(layout), job.shape, layout, batch, device)[1]


def fits(parts: Mapping[str, int], memory_gb: float | None) -> bool:
    """Return whether a rank fits into a device of `memory_gb`, in 1e9 bytes; None: of any size."""
    return memory_gb is None or sum(parts.values()) <= GB * memory_gb


def stage_activations(
    config: Config, shape: ModelShape, batch: Batch, precision: str, stage: int
) -> dict[str, int]:
    """Return the bytes of activations on one stage, for all micro batches whose backward is due."""
    parts = _kept_activations(config, shape, batch, precision, stage)
    for parallelism in PARALLELISMS:
        parts |= parallelism.keeps(config, shape, batch, precision)
    return parts


def _kept_activations(
    config: Config, shape: ModelShape, batch: Batch, precision: str, stage: int
) -> dict[str, int]:
    """Return what a stage keeps for backward, of all micro batches whose backward is due."""
    checkpointing = config.activation_checkpointing
    kernels = kernels_of(config)
    cut = Cut.of(config)
    pp = config.pp
    if pp == 1:
        parts = activation_memory(shape, batch.micro, precision, checkpointing, cut)
        return with_kernels(parts, shape, batch.micro, precision, kernels, checkpointing, cut)

    # Each chunk of layers keeps its own number of micro batches, and the stage keeps their sum.
    chunks = config.chunks
    chunk_shape = replace(shape, n_layer=shape.n_layer // (pp * chunks))
    kept = in_flight(config.pp_schedule, pp, stage, batch.accum, chunks)
    total = Counter[str]()
    for chunk, count in enumerate(kept):
        # Only the first chunk holds the embedding, and only the last one holds head and loss.
        is_first = (stage, chunk) == (0, 0)
        is_last = (stage, chunk) == (pp - 1, chunks - 1)
        parts = activation_memory(
            chunk_shape, batch.micro, precision, checkpointing, cut, count, (is_first, is_last)
        )
        sequences = batch.micro * count
        total.update(
            with_kernels(parts, chunk_shape, sequences, precision, kernels, checkpointing, cut)
        )
    return dict(total)


# How it is written.


def format_memory(parts: Mapping[str, int], unit: str | None = None, about: str = "") -> str:
    """Return the total per rank and its parts, in MiB or in GB (1e9 bytes).

    `unit`: MiB or GB; by default GB for totals above MOST_MIB. `about` stands behind the total.
    """
    total = sum(parts.values())
    if unit is None:
        unit = "MiB" if total <= MOST_MIB * MIB else "GB"

    def number(size: int) -> str:
        return f"{size / MIB:,.1f}" if unit == "MiB" else f"{size / GB:,.2f}"

    # A part that this layout does not have says nothing.
    written = [f"{name.replace('_', ' ')} {number(size)}" for name, size in parts.items() if size]
    return f"{number(total)} {unit} per rank{about}: {' + '.join(written)}"


def memory_line(
    config: Config,
    batch: Batch,
    precision: str,
    parts: Mapping[str, int],
    stage: int = 0,
    limit_gb: float | None = None,
) -> str:
    """Return the line of a dry run on the memory of a rank.

    `stage`: that of the rank, in a pipeline. `limit_gb`: the memory of a rank's device, in 1e9
    bytes; the sizes are then written in the same unit.
    """
    mode: str = config.dp_mode
    # With one replica data parallelism shards nothing, so the name of the mode would mislead.
    if batch.dp * config.cp == 1:
        mode = "one data rank" if config.model_ranks > 1 else "one rank"
    elif config.replicas > 1:
        mode += f" in {config.replicas} groups"

    limit = ""
    if limit_gb is not None:
        limit = f" of {limit_gb:g}"
        if not fits(parts, limit_gb):
            limit += ": DOES NOT FIT"

    place = f"stage {stage}, which needs most: " if config.pp > 1 else ""
    guess = " (auto: the device decides)" if config.precision == "auto" else ""
    unit = None if limit_gb is None else "GB"
    about = f"{limit}, {mode} at {precision}{guess}"
    return f"memory     {place}{format_memory(parts, unit, about)}"


# The sizes of one rank's parameters, by formulas: no model is built.


def sizes_of(tensors: Iterable[Weights], bytes_of_one: float = 4.0) -> Sizes:
    """Return the sums of the parameters that the memory formula needs."""
    outside = 0
    largest = 0
    layers: dict[int, int] = {}
    for each in tensors:
        largest = max(largest, each.numel)
        if each.layer is None:
            outside += each.numel
        else:
            layers[each.layer] = layers.get(each.layer, 0) + each.numel
    total = outside + sum(layers.values())
    return Sizes(total, outside, max(layers.values(), default=0), largest, total, bytes_of_one)


def rank_sizes(config: Config, shape: ModelShape, layout: Layout, stage: int) -> RankSizes:
    """Return the sizes of a rank of `stage`; experts apart where fewer ranks share them."""
    each = weight_type(config.precision).itemsize
    tensors = weights_of(shape, layout, stage)
    if layout.ep == 1:
        return RankSizes(sizes_of(tensors, each))
    routed = [tensor for tensor in tensors if tensor.expert]
    rest = [tensor for tensor in tensors if not tensor.expert]
    return RankSizes(sizes_of(rest, each), sizes_of(routed, each))
