"""What `--dry_run --world_size N` prints: a run at any scale, from formulas. It takes no device and
needs no data set.

The driver uses it, so torch is imported late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanoray.cli import Loaded, Scale
from nanoray.config import Batch, Config, make_config, resolve_batch
from nanoray.data.cifar10 import CLASSES
from nanoray.data.dataset import DatasetInfo
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError
from nanoray.forecast.dry_run import plan
from nanoray.mesh.layout import Layout

if TYPE_CHECKING:
    from nanoray.forecast.layouts import Found
    from nanoray.forecast.links import Topology
    from nanoray.forecast.predict import Job, Prediction, Talk

GB, MB = 1e9, 1e6
SHOWN = 3  # layouts of the search
OPS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}
OPS |= {"all_to_all": "all-to-all", "send": "send"}


def forecast_lines(loaded: Loaded, scale: Scale) -> list[str]:
    """Return mesh, traffic, memory and, on a topology, the predicted step and the best layouts.
    Raises ConfigError.
    """
    from nanoray.forecast.layouts import factors
    from nanoray.forecast.predict import OnTopology, Speed, predict, tensors_of
    from nanoray.models.costs import count_parameters

    if loaded.config.model != "gpt":
        raise ConfigError(
            f"world_size predicts the layers of a gpt, but model = {loaded.config.model}; drop "
            "--world_size"
        )
    topology = _topology(scale.topology) if scale.topology else None
    try:
        layout = Layout.of(loaded.config, scale.world_size)
        dataset = known_dataset(loaded.config)
        config, grown = _divided(loaded, layout.dp)
        config, notes = plan(replace(loaded, config=config), scale.world_size, dataset)
        batch = resolve_batch(config, layout.dp)
    except ConfigError as error:
        raise ConfigError(f"world_size = {factors(scale.world_size)}: {error}") from None
    job = job_of(config, dataset.vocab_size, batch.global_size)
    memory_gb = scale.memory_gb or (topology.memory_gb if topology else None)
    own = sum(t.numel for t in tensors_of(job, layout, 0))
    lines = [
        *_mesh(layout, topology, scale.topology),
        f"batch      {batch.micro} seq × {batch.accum} accum × {batch.dp} dp × "
        f"{config.block_size:,} tok = "
        f"{batch.global_size * config.block_size:,} tok/step{grown}",
        f"data       {dataset.note}",
        f"model      {count_parameters(job.shape):,} parameters, {own:,} a rank; "
        f"{job.mode(layout)}, {job.precision}",
    ]
    if topology is None:
        return [
            *lines,
            *_talk(job, layout, batch.micro),
            _memory(job, layout, batch.micro, memory_gb),
            *notes,
            *_HINT,
        ]
    network, speed = OnTopology(topology), Speed.of(topology)
    asked = predict(job, layout, batch.micro, network, speed)
    lines += [
        *_talk(job, layout, batch.micro, asked, network),
        _memory(job, layout, batch.micro, memory_gb),
    ]
    lines += [*_step(job, asked, topology), *notes]
    return [
        *lines,
        *_search(job, asked, config, topology, memory_gb),
        "dry run: nothing was started",
    ]


_HINT = (
    "step       give --topology NAME or FILE for seconds and the best layouts",
    "dry run: nothing was started",
)


def job_of(config: Config, vocab_size: int, sequences: int) -> Job:
    """Return what a configuration trains on GPUs, or on CPUs where it says so.

    Its axes come with Layout.of.
    """
    import torch

    from nanoray.forecast.predict import Experts, Job
    from nanoray.models.gpt import ModelShape
    from nanoray.parallel.ddp import default_bucket_mb

    if config.pure or config.precision == "fp8":
        kin = "bf16" if config.precision == "fp8" else config.precision.removesuffix("_pure")
        raise ConfigError(
            f"a forecast has no prediction for precision = {config.precision}; use precision "
            f"{kin}, or --dry_run for "
            "the memory of a rank"
        )
    if config.grad_compress != "none":
        raise ConfigError(
            f"a forecast has no prediction for grad_compress = {config.grad_compress}; use "
            "grad_compress none, or "
            "--dry_run for the memory of a rank"
        )
    device = "cpu" if config.device == "cpu" else "cuda"
    precision = (
        {"cpu": "fp32", "cuda": "bf16"}[device] if config.precision == "auto" else config.precision
    )
    backend = (
        {"cpu": "gloo", "cuda": "nccl"}[device] if config.backend == "auto" else config.backend
    )
    bucket_mb = config.bucket_mb or default_bucket_mb(torch.device(device))
    shape = ModelShape.of(config, vocab_size)
    return Job(
        shape,
        config,
        sequences,
        precision,
        bucket_mb,
        config.pp_schedule,
        config.chunks,
        Experts.of(shape),
        config.mirrors(backend),
    )


def _topology(name: str) -> Topology:
    """Load a topology that says all that a prediction needs. Raises ConfigError."""
    from nanoray.forecast.links import Link, load_topology, topology_names

    topology = load_topology(name)
    missing = [key for key in ("intra", "inter") if not isinstance(getattr(topology, key), Link)]
    if missing or not topology.peak_tflops:
        what = (
            f"{' and '.join(missing)} = fit, which only a measurement can fill"
            if missing
            else "no peak_tflops"
        )
        known = [
            n
            for n in topology_names()
            if n != name and (t := load_topology(n)).peak_tflops and t.inter != "fit"
        ]
        raise ConfigError(
            f"topology {name} has {what}; write numbers into a YAML file, use {', '.join(known)}, "
            "or for this machine "
            "run `python -m nanoray.bench layouts`"
        )
    return topology


def known_dataset(config: Config) -> DatasetInfo:
    """Return what is known of the data. Only a text or folder of one's own, and epochs, need to be
    read.
    """
    if config.model == "resnet":
        return DatasetInfo(
            config.dataset, "not read", Path(), "uint8", len(CLASSES), 0, 0, "", "", {}, "images"
        )
    from nanoray.data.tokenizer import VOCAB

    if config.num_epochs or config.dataset not in ("auto", "shakespeare", "stdlib"):
        return prepare(config)
    tokenizer = (
        "byte" if (config.dataset, config.tokenizer) == ("stdlib", "auto") else config.tokenizer
    )
    size = VOCAB[tokenizer]
    note = f"not read: a vocabulary of {size:,} is assumed (tokenizer {tokenizer})"
    return DatasetInfo(config.dataset, note, Path(), "uint16", size, 0, 0, "", "", {})


def _divided(loaded: Loaded, dp: int) -> tuple[Config, str]:
    """Return a configuration whose batch divides over dp replicas; a preset's own global batch
    grows up to them.
    """
    config = loaded.config
    try:
        resolve_batch(config, dp)
    except ConfigError:
        share = (config.micro_batch_size or 1) * (config.grad_accum_steps or 1) * dp
        if config.scaling != "none" or "global_batch_size" in loaded.given:
            raise
        size = -(-config.global_batch_size // share) * share
        grown = f"; grown from {config.global_batch_size} sequences to {size} to divide (--global_batch_size chooses)"
        return make_config(config.model_dump() | {"global_batch_size": size}), grown
    return config, ""


# The asked layout.


def _mesh(layout: Layout, topology: Topology | None, name: str | None) -> list[str]:
    """Return the mesh, and for each axis its groups, one of them, and the link that it uses."""
    from nanoray.forecast.links import placed

    nodes = ""
    if topology:
        size = topology.ranks_per_node
        nodes = f"; {-(-layout.world_size // size):,} node(s) of {size} ({name})"
    lines = [f"mesh       {layout.world_size:,} ranks = {layout}{_ep(layout)}{nodes}"]
    rows = []
    for axis in ("tp", "dp", "pp", "ep"):
        if (size := getattr(layout, axis)) == 1:
            continue
        ranks = [layout.rank(**{"dp" if axis == "ep" else axis: k}) for k in (0, 1, size - 1)]
        example = f"{ranks[0]} {ranks[1]}" if size == 2 else f"{ranks[0]} {ranks[1]} .. {ranks[2]}"
        link = ""
        if topology:
            (intra, inter), place = topology.levels, placed(layout, axis, topology.ranks_per_node)
            link = f"inside a node: {intra.bandwidth_gb_per_s:g} GB/s"
            if not place.inside:
                own = f" shared by {place.sharing}" if place.sharing > 1 else ""
                link = f"between nodes, {place.local} on each: {inter.bandwidth_gb_per_s:g} GB/s a node{own}"
        rows.append(
            (axis, f"{layout.world_size // size:,} group(s) of {size:,}", f"ranks {example}", link)
        )
    return [*lines, *_indented("axes", rows)]


def _talk(
    job: Job, layout: Layout, micro: int, asked: Prediction | None = None, network: object = None
) -> list[str]:
    """Return each kind of collective of a step: how many, of what size, what a rank sends, and
    seconds.
    """
    from nanoray.forecast.layouts import ms
    from nanoray.forecast.predict import OnTopology, talks_of

    def ranks(talk: Talk) -> int:
        return layout.dp // layout.ep if talk.axis == "edp" else int(getattr(layout, talk.axis))

    rows = []
    for talk in asked.talks if asked else talks_of(job, layout, micro, layout.pp - 1):
        each = f"{talk.times:,.0f} × {talk.nbytes / MB:,.3g} MB"
        row = [
            talk.axis,
            OPS[talk.op],
            talk.what,
            each,
            f"a rank sends {talk.sent(ranks(talk)) / MB:,.1f} MB",
        ]
        if isinstance(network, OnTopology):
            seconds = talk.times * network.cost(layout, talk.axis, talk.op, talk.nbytes).seconds
            row.append(f"{ms(seconds)} ms")
        rows.append(row)
    return _indented("talk", rows) or ["talk       nothing: one rank"]


def _memory(job: Job, layout: Layout, micro: int, memory_gb: float | None) -> str:
    from nanoray.forecast.predict import memory_of

    parts = memory_of(job, layout, micro)
    told = " + ".join(
        f"{name.replace('_', ' ')} {size / GB:,.2f}" for name, size in parts.items() if size
    )
    size = sum(parts.values()) / GB
    limit = (
        ""
        if memory_gb is None
        else f" of {memory_gb:g}{'' if size <= memory_gb else ': DOES NOT FIT'}"
    )
    stage = "" if layout.pp == 1 else ", the stage that needs most"
    return f"memory     {size:,.2f} GB per rank{limit}{stage}: {told}"


def _step(job: Job, step: Prediction, topology: Topology) -> list[str]:
    """Return bubble and predicted step by part, with throughput and MFU."""
    from nanoray.forecast.layouts import ms
    from nanoray.models.costs import flops_per_token

    layout, tokens = step.layout, job.sequences * job.shape.block_size
    bubble = "none: one stage"
    if layout.pp > 1:
        bubble = f"{100 * step.bubble:.1f} %: {job.schedule}, {step.accum} micro batches through {layout.pp} stages"
    flops = flops_per_token(job.shape) * tokens / step.step_s
    mfu = 100 * flops / (1e12 * (topology.peak_tflops or 1) * layout.world_size)
    return [
        f"bubble     {bubble}",
        f"step       {ms(step.step_s)} ms predicted = {_parts(step)}",
        f"speed      {tokens / step.step_s:,.0f} tok/s, MFU {mfu:.1f} % (a rank alone: "
        f"{100 * topology.mfu:g} %)",
    ]


def _parts(step: Prediction) -> str:
    from nanoray.forecast.layouts import ms

    names = {
        name: name if name in ("compute", "bubble") else f"exposed {name}" for name in step.parts
    }
    return " + ".join(
        f"{names[name]} {ms(seconds)}" for name, seconds in step.parts.items() if seconds > 0
    )


# The search.


def _search(
    job: Job, asked: Prediction, config: Config, topology: Topology, memory_gb: float | None
) -> list[str]:
    """Return the best layouts, what is left of the one that was asked for, and why others are not
    among them.
    """
    from nanoray.forecast.layouts import ms, needs, search, why_slower
    from nanoray.forecast.predict import OnTopology, Speed

    most = config.micro_batch_size or job.sequences
    ranks = asked.layout.world_size
    found = search(job, ranks, most, OnTopology(topology), Speed.of(topology), memory_gb)
    steps = [one.best for one in found if one.best]
    large = [one for one in found if one.refused.startswith("does not fit")]
    head = (
        f"{len(found)} layouts of {ranks:,} ranks, the same {job.sequences} sequences a step, "
        f"micro batches to {most}: "
    )
    head += f"{len(found) - len(steps) - len(large)} break a rule, {len(large)} do not fit; the best of {len(steps)}"
    head += "" if memory_gb else "; no device memory known, so none is too large (--memory_gb)"
    rows = []
    for i, step in enumerate(steps[:SHOWN], 1):
        batch = Batch(step.micro, step.accum, step.layout.dp)
        size = f"{sum(step.memory.values()) / GB:.3g} GB"
        told = f"micro {batch.micro} × {batch.accum}"
        rows.append(
            (
                f"{i}. {step.layout}{_ep(step.layout)}",
                f"{ms(step.step_s)} ms",
                told,
                size,
                _parts(step),
            )
        )
    lines = [f"layouts    {head}", *_indented("", rows)]
    if asked.layout != steps[0].layout:
        place = f"number {1 + sum(step.step_s < asked.step_s for step in steps)} of {len(steps)}"
        if memory_gb and sum(asked.memory.values()) > GB * memory_gb:
            place = needs(asked.memory, memory_gb)
        lines.append(f"asked      {asked.layout}: {place}, {why_slower(asked, steps[0])}")
    why = _why_not(found, steps[0])
    if large:
        widest = max(large, key=lambda one: one.layout.dp)
        why.append((f"{widest.layout}{_ep(widest.layout)}", widest.refused))
    return lines + _indented("why not", why)


def _ep(layout: Layout) -> str:
    return f", ep {layout.ep}" if layout.ep > 1 else ""


def _why_not(found: Sequence[Found], best: Prediction) -> list[tuple[str, str]]:
    """Return for each other size of an axis the fastest layout with it, or the rule that refuses
    all of them.
    """
    from nanoray.forecast.layouts import why_slower

    rows: list[tuple[str, str]] = []
    for axis in ("tp", "pp", "ep"):
        refused: dict[str, list[int]] = {}
        for size in sorted(
            {getattr(one.layout, axis) for one in found} - {getattr(best.layout, axis)}
        ):
            some = [one for one in found if getattr(one.layout, axis) == size]
            if (step := some[0].best) is not None:
                rows.append(
                    (f"{axis} {size}", f"{step.layout}{_ep(step.layout)}: {why_slower(step, best)}")
                )
                continue
            by_rule = sorted(
                some,
                key=lambda one: (not one.refused.startswith((axis, "does not fit")), one.layout.tp),
            )
            refused.setdefault(by_rule[0].refused, []).append(size)
        for why, sizes in refused.items():
            shown = (
                ", ".join(map(str, sizes))
                if len(sizes) < 5
                else f"{sizes[0]}, {sizes[1]}, ... {sizes[-1]}"
            )
            rows.append((f"{axis} {shown}", why))
    return rows


def _indented(head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as a table, its name before the first one."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [f"{head if i == 0 else '':<10} {line}" for i, line in enumerate(cells)]
