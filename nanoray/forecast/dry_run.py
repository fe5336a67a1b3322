"""A dry run: what a configuration would do in a layout, without starting anything.

`dry_run_lines` serves `--dry_run`, `scale.forecast_lines` serves `--dry_run --world_size N`. Both
get the batch, the model, the pipeline and the memory of a rank from `layout_lines`.

The driver uses it, so torch is imported late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoray.config import Batch, Config
from nanoray.data.dataset import DatasetInfo
from nanoray.data.lengths import format_lengths
from nanoray.mesh.layout import Layout

if TYPE_CHECKING:
    from nanoray.forecast.rank_memory import AssumedDevice
    from nanoray.models.gpt import ModelShape
    from nanoray.models.resnet import ResNetShape

WIDEST = 16  # turns of a kind, and stages, up to which a timetable is drawn
MOST_GROUPS = 4  # of an axis, that are listed


def dry_run_lines(
    config: Config, notes: Sequence[str], batch: Batch, dataset: DatasetInfo, placement: str
) -> list[str]:
    """Return what `--dry_run` prints: mesh, batch arithmetic, parameters, memory, placement."""
    from nanoray.forecast.rank_memory import assume_device
    from nanoray.models.build import OwnShape, shape_of

    shape = shape_of(config, dataset.vocab_size)
    assert not isinstance(shape, OwnShape), "own/dry_run.py describes a script's own model"
    layout = Layout.of(config, batch.dp * config.replica_ranks)
    classes = "vocabulary" if config.model == "gpt" else "classes"

    return [
        f"mesh       {layout.world_size} rank(s) = {layout}",
        *talk_lines(config, layout),
        f"placement  {placement}",
        f"data       {dataset.note}, {classes} {dataset.vocab_size}",
        *layout_lines(config, shape, layout, batch, assume_device(config)),
        *_sent_by_groups(config, shape, layout, batch),
        *notes,
    ]


def _sent_by_groups(
    config: Config, shape: ModelShape | ResNetShape, layout: Layout, batch: Batch
) -> list[str]:
    """Return the line on what a rank sends inside its node and between nodes; none without groups.

    There is no formula for a ResNet, or for weights of 16 bits.
    """
    from nanoray.forecast.by_link import link_lines
    from nanoray.forecast.job import Job
    from nanoray.forecast.rank_memory import assume_device
    from nanoray.models.gpt import ModelShape

    if layout.replicas == 1 or not isinstance(shape, ModelShape) or config.pure:
        return []
    device = assume_device(config)
    job = Job(shape, config, batch.global_size, device.precision, device.bucket_mb)
    return link_lines(job, layout, batch.micro, None)


def layout_lines(
    config: Config,
    shape: ModelShape | ResNetShape,
    layout: Layout,
    batch: Batch,
    device: AssumedDevice,
    limit_gb: float | None = None,
    about_batch: str = "",
) -> list[str]:
    """Return the lines on batch, model, pipeline and memory: equal however the layout was given.

    `limit_gb`: the memory of a rank's device, in 1e9 bytes. `about_batch` ends the line on the batch.
    """
    from nanoray.forecast.rank_memory import memory_lines, rank_memory, rank_sizes
    from nanoray.models import costs, resnet_costs
    from nanoray.models.gpt import ModelShape

    if isinstance(shape, ModelShape):
        parameters = costs.count_parameters(shape)
        about_model = costs.describe_experts(shape)
        lines = [batch_line(config, batch, "seq", config.block_size) + about_batch]
        if config.seq_warmup_steps:
            lines.append(f"sequences  {format_lengths(config)}")
    else:
        parameters = resnet_costs.count_parameters(shape)
        about_model = ""
        lines = [batch_line(config, batch, "images") + about_batch]

    # Stages differ: the first holds the embedding and the last holds the head.
    stages = range(layout.pp)
    if layout.model_parts > 1:
        most = max(rank_sizes(config, shape, layout, stage).params for stage in stages)
        about_model += f", {most:,} on a rank"
    lines.append(f"model      {parameters:,} parameters{about_model}")

    lines += pipeline_lines(config, batch)
    parts = [rank_memory(config, shape, batch, device, stage) for stage in stages]
    return lines + memory_lines(config, batch, device.precision, parts, limit_gb)


def batch_line(config: Config, batch: Batch, samples: str, tokens: int = 0) -> str:
    """Return the arithmetic of a step and of the run. `tokens`: of a sample; 0 where it has none."""
    factors = f"{batch.micro} {samples} × {batch.accum} accum × {batch.dp} dp"
    size = batch.global_size
    unit = samples
    if tokens:
        factors += f" × {tokens:,} tok"
        size *= tokens
        unit = "tok"
    line = (
        f"batch      {factors} = {size:,} {unit}/step, {config.max_steps:,} steps = "
        f"{size * config.max_steps:,} {unit}"
    )
    if config.micro_batch_search:
        line += f"; micro_batch_size auto tries up to {batch.micro}, whose memory this is"
    return line


def talk_lines(config: Config, layout: Layout) -> list[str]:
    """Return the groups of ranks that exchange tensors in a step; none if all exchange with all."""
    from nanoray.forecast.parallelisms.registry import PARALLELISMS

    # With data parallelism alone there is one group, and it contains every rank.
    if layout.sizes() == Layout(dp=layout.dp).sizes():
        return []
    # A later parallelism may exchange something else over the groups of an earlier one.
    contents: dict[str, str] = {}
    for parallelism in PARALLELISMS:
        contents |= parallelism.words(config, layout)
    lines = []
    for axis, content in contents.items():
        groups = layout.groups(axis)
        if len(groups[0]) > 1:
            lines.append(f"talk       {axis}: ranks {_format_groups(groups)}: {content}")
    return lines


def _format_groups(groups: list[tuple[int, ...]]) -> str:
    """Write groups of ranks as 0 2 | 1 3; long groups and many groups are shortened."""
    shown = []
    for group in groups[:MOST_GROUPS]:
        if len(group) > 4:
            shown.append(f"{group[0]}..{group[-1]}")
        else:
            shown.append(" ".join(map(str, group)))
    if len(groups) > MOST_GROUPS:
        shown.append(f"and {len(groups) - MOST_GROUPS} more groups")
    return " | ".join(shown)


def pipeline_lines(config: Config, batch: Batch) -> list[str]:
    """Return the cost of a pipeline's schedule, and its timetable if it fits on a screen."""
    from nanoray.parallel.schedules import drawing, in_flight, timetable, waited

    if config.pp == 1:
        return []
    schedule = config.pp_schedule
    chunks = config.chunks
    kept = [
        sum(in_flight(schedule, config.pp, stage, batch.accum, chunks))
        for stage in range(config.pp)
    ]
    forwards = " ".join(map(str, kept))
    if config.pp > WIDEST:
        forwards = f"{kept[0]} .. {kept[-1]}"

    # From the time of one micro batch to a share of the step.
    waited_turns = waited(schedule, config.pp, batch.accum, chunks)
    idle = waited_turns / (batch.accum + waited_turns)
    in_chunks = f" in {chunks} chunks each" if chunks > 1 else ""
    lines = [
        f"pipeline   {schedule}, {config.pp} stages{in_chunks}, {batch.accum} micro batches: "
        f"a stage waits {100 * idle:.0f} % of the time; forwards kept, by stage: {forwards}"
    ]
    # Wider timetables would wrap on a screen and could not be read.
    if batch.accum * chunks <= WIDEST and config.pp <= WIDEST:
        drawn = drawing(timetable(schedule, config.pp, batch.accum, chunks))
        lines += [f"           {row}" for row in drawn]
    return lines
