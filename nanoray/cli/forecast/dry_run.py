"""A dry run: what a configuration would do in a layout, without starting anything.

dry_run_lines()    mesh, placement, data, batch, model and memory of a rank
step_lines()       with --topology: the predicted step, and the fastest layouts
"""

from __future__ import annotations

from collections.abc import Sequence

from nanoray.cli.forecast.job import assume_device, job_of
from nanoray.cli.forecast.layouts import search
from nanoray.cli.forecast.links import Topology
from nanoray.cli.forecast.predict import OnTopology, Prediction, Speed, predict
from nanoray.cli.forecast.rank_memory import GB, largest_rank, memory_line, rank_sizes
from nanoray.config import Batch, Config, resolve_batch
from nanoray.config.layout import Layout
from nanoray.data.dataset import DatasetInfo
from nanoray.data.lengths import format_lengths
from nanoray.machine.text import aligned
from nanoray.models import costs, resnet_costs
from nanoray.models.build import ScriptShape, shape_of
from nanoray.models.resnet import ResNetShape
from nanoray.parallel.schedules import waited

MOST_LAYOUTS = 3  # of the search, that are listed


def dry_run_lines(
    config: Config,
    notes: Sequence[str],
    layout: Layout,
    dataset: DatasetInfo,
    placement: str,
    memory_gb: float | None = None,
    on_gpus: bool | None = None,
) -> list[str]:
    """Return what every dry run prints.

    `memory_gb`: the memory of a rank's device, in 1e9 bytes. `on_gpus`: see `assume_device`.
    """
    shape = shape_of(config, dataset.vocab_size)
    assert not isinstance(shape, ScriptShape), "script/dry_run.py describes a script's own model"
    batch = resolve_batch(config, layout.dp)
    lines = [
        f"mesh       {layout.world_size:,} rank(s) = {layout}",
        f"placement  {placement}",
    ]
    if isinstance(shape, ResNetShape):
        lines += [
            f"data       {dataset.note}, classes {dataset.vocab_size}",
            batch_line(config, batch, "images"),
            f"model      {resnet_costs.count_parameters(shape):,} parameters",
        ]
        return [*lines, *notes]

    lines += [
        f"data       {dataset.note}, vocabulary {dataset.vocab_size}",
        batch_line(config, batch, "seq", config.block_size),
    ]
    if config.seq_warmup_steps:
        lines.append(f"sequences  {format_lengths(config)}")
    about_model = costs.describe_experts(shape)
    # The first stage holds the embedding and the last one holds the head.
    if layout.model_parts > 1:
        sizes = [rank_sizes(config, shape, layout, one).params for one in range(layout.pp)]
        about_model += f", {max(sizes):,} on a rank"
    device = assume_device(config, on_gpus)
    stage, parts = largest_rank(config, shape, layout, batch, device)
    return [
        *lines,
        f"model      {costs.count_parameters(shape):,} parameters{about_model}",
        *_pipeline(config, batch),
        memory_line(config, batch, device.precision, parts, stage, memory_gb),
        *notes,
    ]


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


def _pipeline(config: Config, batch: Batch) -> list[str]:
    """Return the line on the time that the stages of a pipeline wait."""
    if config.pp == 1:
        return []
    # From the time of one micro batch to a share of the step.
    waited_turns = waited(config.pp_schedule, config.pp, batch.accum, config.chunks)
    idle = waited_turns / (batch.accum + waited_turns)
    return [
        f"pipeline   {config.pp_schedule}, {config.pp} stages, {batch.accum} micro batches: "
        f"a stage waits {100 * idle:.0f} % of the time"
    ]


def step_lines(
    config: Config,
    dataset: DatasetInfo,
    layout: Layout,
    topology: Topology,
    memory_gb: float | None,
) -> list[str]:
    """Return the predicted step of a GPT on a topology, and the fastest layouts of its ranks.

    Raises ConfigError for a model that has no formulas.
    """
    batch = resolve_batch(config, layout.dp)
    job = job_of(config, dataset.vocab_size, batch.global_size, on_gpus=True)
    ranks = layout.world_size
    network = OnTopology(topology)
    speed = Speed.of(topology)
    step = predict(job, layout, batch.micro, network, speed)

    tokens_per_s = job.sequences * job.shape.block_size / step.step_s
    assert topology.peak_tflops, "complete_topology has checked it"
    mfu = costs.flops_per_token(job.shape) * tokens_per_s / (1e12 * topology.peak_tflops * ranks)
    lines = [
        f"step       {ms(step.step_s)} ms predicted = {_parts(step)}; {tokens_per_s:,.0f} tok/s, "
        f"MFU {100 * mfu:.1f} %"
    ]

    most = config.micro_batch_size or job.sequences
    found = search(job, ranks, most, network, speed, memory_gb, topology.ranks_per_node)
    if not found:
        return [*lines, f"layouts    none of {ranks:,} ranks fits into {memory_gb:g} GB a rank"]
    rows = []
    for place, one in enumerate(found[:MOST_LAYOUTS], 1):
        rows.append(
            (
                f"{place}. {one.layout}",
                f"{ms(one.step_s)} ms",
                f"micro {one.micro} × {one.accum}",
                f"{sum(one.memory.values()) / GB:.3g} GB",
                _parts(one),
            )
        )
    lines.append(
        f"layouts    the fastest of {len(found)} that fit, with the same {job.sequences} sequences "
        f"a step in micro batches to {most}:"
    )
    return lines + [f"{'':<10} {row}" for row in aligned(rows)]


def _parts(step: Prediction) -> str:
    """Write the parts of a step that take time."""
    parts = []
    for name, seconds in step.parts.items():
        if seconds > 0:
            exposed = "" if name in ("compute", "bubble") else "exposed "
            parts.append(f"{exposed}{name} {ms(seconds)}")
    return " + ".join(parts)


def ms(seconds: float) -> str:
    """Write seconds as milliseconds with three digits, or more if they stand before the point."""
    if seconds >= 0.1:
        return f"{1e3 * seconds:,.0f}"
    return f"{1e3 * seconds:.3g}"
