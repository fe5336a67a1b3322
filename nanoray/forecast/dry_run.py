"""A dry run: what a configuration would do on the devices at hand, without starting anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from nanoray.cli import Loaded
from nanoray.config import VOCAB_MULTIPLE, Batch, Config, make_config, resolve_batch
from nanoray.config.conflicts import refuse, require_divisible, require_groups
from nanoray.data.lengths import format_lengths
from nanoray.data.prepare import DatasetInfo
from nanoray.devices.gpus import discover_gpus
from nanoray.errors import ConfigError
from nanoray.faults.plan import parse_plan
from nanoray.mesh.layout import Layout

WIDEST = 16  # turns of a kind that a timetable is drawn with


def plan(loaded: Loaded, ranks: int, dataset: DatasetInfo) -> tuple[Config, list[str]]:
    """Apply the scaling rules and check mesh and batch arithmetic; return the configuration and its
    derivation.
    """
    config, notes = loaded.config, []
    dp = Layout.of(config, ranks).dp
    if config.tp > 1:
        padded = -(-dataset.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        require_divisible(config.tp, config.n_head, config.n_embd, padded)
    if config.scaling == "nanochat":
        from nanoray.forecast.scaling import derive_scaling
        from nanoray.models.costs import scaling_parameters
        from nanoray.models.gpt import ModelShape

        params = scaling_parameters(ModelShape.of(config, dataset.vocab_size))
        config, derived = derive_scaling(config, loaded.given, params, dp)
        notes = [f"scale  {d.key} = {d.value:.4g}: {d.reason}" for d in derived]
    batch = resolve_batch(config, dp)
    global_size = batch.global_size
    if config.pp > 1:
        require_groups(config.pp_schedule, config.pp, batch.accum)
    if config.num_epochs:
        config, note = _count_steps(config, dataset, global_size)
        notes.append(note)
    # What needs other ranks is refused here, where their number is known
    refuse(config, ranks=ranks)
    for fault in parse_plan(config.faults):
        if fault.rank >= ranks:
            raise ConfigError(
                f"fault on rank {fault.rank} would never fire: ranks are 0 to {ranks - 1}"
            )
        if fault.step > config.max_steps:
            raise ConfigError(
                f"fault at step {fault.step} would never fire: max_steps is {config.max_steps}"
            )
    return config, notes


def _count_steps(config: Config, dataset: DatasetInfo, global_size: int) -> tuple[Config, str]:
    """Turn num_epochs into max_steps. An epoch of a text has as many sequences as fit into it side
    by side.
    """
    images = dataset.kind == "images"
    samples = dataset.train_tokens if images else max(1, dataset.train_tokens // config.block_size)
    steps = -(-config.num_epochs * samples // global_size)
    unit = "images" if images else "sequences"
    note = f"epochs max_steps = {steps}: {config.num_epochs} epoch(s) × {samples:,} {unit} / {global_size} per step"
    return make_config(config.model_dump() | {"max_steps": steps, "num_epochs": 0}), note


def dry_run_lines(
    config: Config, notes: list[str], batch: Batch, dataset: DatasetInfo, placement: str
) -> list[str]:
    """Return what `--dry_run` prints: mesh, batch arithmetic, parameters, memory, placement."""
    from nanoray.models import costs, resnet_costs
    from nanoray.models.build import OwnShape, shape_of
    from nanoray.models.gpt import ModelShape
    from nanoray.models.resnet import ResNetShape

    shape = shape_of(config, dataset.vocab_size)
    assert not isinstance(shape, OwnShape), (
        "forecast/own_models.py has the lines of a script's own model"
    )
    precision = "fp32" if config.precision == "auto" else config.precision
    if isinstance(shape, ResNetShape):
        stages = [resnet_costs.activation_memory(shape, batch.micro, precision)]
        parameters, unit, size = resnet_costs.count_parameters(shape), "images", batch.global_size
        what = f"{batch.micro} images × {batch.accum} accum × {batch.dp} dp"
    else:
        stages = [
            stage_activations(config, shape, batch, precision, stage) for stage in range(config.pp)
        ]
        parameters, unit, size = (
            costs.count_parameters(shape),
            "tok",
            batch.global_size * config.block_size,
        )
        what = f"{batch.micro} seq × {batch.accum} accum × {batch.dp} dp × {config.block_size} tok"
        notes = (
            [*notes, f"sequences  {format_lengths(config)}"] if config.seq_warmup_steps else notes
        )
    layout = Layout(dp=batch.dp, tp=config.tp, pp=config.pp, ep=config.ep)
    return [
        f"mesh       {layout.world_size} rank(s) = {layout}",
        *talk_lines(layout, config.sequence_parallel),
        f"placement  {placement}",
        f"data       {dataset.note}, {'vocabulary' if unit == 'tok' else 'classes'} "
        f"{dataset.vocab_size}",
        f"batch      {what} = {size:,} {unit}/step, {config.max_steps:,} steps = "
        f"{size * config.max_steps:,} {unit}",
        f"model      {parameters:,} parameters{costs.told_experts(shape) if isinstance(shape, ModelShape) else ''}",
        *pipeline_lines(config, batch),
        *(
            memory_line(config, dataset.vocab_size, batch, precision, of, stage)
            for stage, of in enumerate(stages)
        ),
        *notes,
        "dry run: nothing was started",
    ]


def talk_lines(layout: Layout, sequence: bool = False) -> list[str]:
    """Return who talks to whom in each step, where not all ranks talk to all."""
    if layout.tp * layout.pp * layout.ep == 1:
        return []
    sums = "all-gathers and 2 reduce-scatters" if sequence else "sums"
    whats = {
        "tp": f"2 {sums} of activations per block, forward and backward each",
        "pp": "the residual stream of each micro batch, and its gradient back",
        "ep": "tokens to their experts and back, per block, forward and backward each",
        "edp": "gradients of experts, once per step",
        "dp": "gradients" + (" of the rest" if layout.ep > 1 else "") + ", once per step",
    }

    def written(groups: list[tuple[int, ...]]) -> str:
        shown = [
            f"{group[0]}..{group[-1]}" if len(group) > 4 else " ".join(map(str, group))
            for group in groups[:4]
        ]
        return " | ".join(
            [*shown, f"and {len(groups) - 4} more groups"] if len(groups) > 4 else shown
        )

    axes = [axis for axis in whats if layout.ep > 1 or axis != "edp"]
    axes = [axis for axis in axes if len(layout.groups(axis)[0]) > 1]
    return [
        f"talk       {axis}: ranks {written(layout.groups(axis))}: {whats[axis]}" for axis in axes
    ]


def stage_activations(
    config: Config, shape: Any, batch: Batch, precision: str, stage: int
) -> dict[str, int]:
    """Return what one stage of a GPT holds for the micro batches that wait for their backward;
    without pp all of it.
    """
    from nanoray.models.build import kernels_of
    from nanoray.models.costs import Cut, activation_memory, with_kernels
    from nanoray.parallel.schedules import in_flight

    pp, chunks, kept = config.pp, config.chunks, config.activation_checkpointing
    cut, kernels = Cut(config.tp, config.ep, config.sequence_parallel), kernels_of(config)
    if pp == 1:
        whole = activation_memory(shape, batch.micro, precision, kept, cut)
        return with_kernels(whole, shape, batch.micro, precision, kernels, kept, config.tp)
    part, held = replace(shape, n_layer=shape.n_layer // (pp * chunks)), Counter[str]()
    for chunk, count in enumerate(in_flight(config.pp_schedule, pp, stage, batch.accum, chunks)):
        ends = (stage, chunk) == (0, 0), (stage, chunk) == (pp - 1, chunks - 1)
        own = activation_memory(part, batch.micro, precision, kept, cut, count, ends)
        held.update(
            with_kernels(own, part, batch.micro * count, precision, kernels, kept, config.tp)
        )
    return dict(held)


def pipeline_lines(config: Config, batch: Batch) -> list[str]:
    """Return what the schedule of a pipeline costs by itself, and its timetable where it fits on a
    screen.
    """
    from nanoray.parallel.schedules import bubble, drawing, in_flight, timetable

    if config.pp == 1:
        return []
    order = (config.pp_schedule, config.pp)
    kept = [sum(in_flight(*order, stage, batch.accum, config.chunks)) for stage in range(config.pp)]
    drawn = (
        drawing(timetable(*order, batch.accum, config.chunks))
        if batch.accum * config.chunks <= WIDEST
        else []
    )
    chunks = f" in {config.chunks} chunks each" if config.chunks > 1 else ""
    return [
        f"pipeline   {config.pp_schedule}, {config.pp} stages{chunks}, {batch.accum} micro "
        "batches: a stage waits "
        f"{100 * bubble(*order, batch.accum, config.chunks):.0f} % of the time; forwards kept, by "
        "stage: "
        f"{' '.join(map(str, kept))}",
        *(f"           {line}" for line in drawn),
    ]


def memory_line(
    config: Config,
    classes: int,
    batch: Batch,
    precision: str,
    activations: dict[str, int],
    stage: int = 0,
) -> str:
    """Return the memory of one rank at the peak of a step, by part; what a part is, its function
    says.
    """
    from nanoray.forecast.memory import model_memory
    from nanoray.forecast.owners import rank_model
    from nanoray.mesh.layout import Coords
    from nanoray.models.precision import weight_type

    model = rank_model(config, classes, weight_type(config.precision), Coords(0, 0, stage, 0))
    parts = model_memory(config, model, batch.dp, batch.accum, *buckets_of(config)) | activations
    return told_memory(config, batch, precision, parts, stage)


def buckets_of(config: Config) -> tuple[float, bool]:
    """Return the MB of a gradient bucket on this machine, and whether each rank mirrors another
    one's share.
    """
    import torch

    from nanoray.parallel.ddp import default_bucket_mb

    gpu = config.device in ("cuda", "mig") or (config.device == "auto" and bool(discover_gpus()))
    bucket_mb = config.bucket_mb or default_bucket_mb(torch.device("cuda" if gpu else "cpu"))
    return bucket_mb, config.mirrors("gloo" if not gpu else config.backend)


def told_memory(
    config: Config, batch: Batch, precision: str, parts: dict[str, int], stage: int = 0
) -> str:
    """Return the line that tells the bytes of one rank by part."""
    told = " + ".join(
        f"{name.replace('_', ' ')} {size / 2**20:,.1f}" for name, size in parts.items() if size
    )
    mode = (
        config.dp_mode
        if batch.dp > 1
        else "one data rank"
        if config.tp * config.pp > 1
        else "one rank"
    )
    where = f"stage {stage}: " if config.pp > 1 else ""
    return (
        f"memory     {where}{sum(parts.values()) / 2**20:,.1f} MiB per rank, {mode} at {precision}"
        f"{' (auto may pick a smaller one)' if config.precision == 'auto' else ''}: {told}"
    )
