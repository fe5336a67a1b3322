"""What `--dry_run --world_size N` prints: a run at any scale, from formulas. It takes no device and
needs no data set.

The driver uses it, so torch is imported late.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanoray.base.text import aligned
from nanoray.cli import Scale
from nanoray.config import Config, Settings, resolve_batch
from nanoray.data.cifar10 import CLASSES
from nanoray.data.dataset import DatasetInfo
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError
from nanoray.forecast.dry_run import layout_lines
from nanoray.mesh.layout import Layout

if TYPE_CHECKING:
    from nanoray.forecast.job import Job
    from nanoray.forecast.layouts import Found
    from nanoray.forecast.links import Topology
    from nanoray.forecast.parallelisms.record import Talk
    from nanoray.forecast.predict import Network, Prediction

GB = 1e9
MB = 1e6
MOST_LAYOUTS = 3  # of the search, that are listed
MOST_SIZES = 4  # of an axis refused by the same rule, that are listed
OPS = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "send": "send",
}


def forecast_lines(
    settings: Settings,
    dataset: DatasetInfo,
    scale: Scale,
    topology: Topology | None,
    about_batch: str,
) -> list[str]:
    """Return mesh, batch, memory and traffic and, on a topology, the step and the best layouts.

    settings: a plan for the ranks of `scale`. `about_batch` ends the line on the batch. Raises
    ConfigError.
    """
    from nanoray.forecast.by_link import link_lines
    from nanoray.forecast.predict import OnTopology, Speed, predict
    from nanoray.forecast.rank_memory import assume_device

    config = settings.config
    layout = Layout.of(config, scale.world_size)
    batch = resolve_batch(config, layout.dp)

    # A topology describes GPUs. Without one, `device = auto` means what this machine has.
    on_gpus = True if topology else None
    job = job_of(config, dataset.vocab_size, batch.global_size, on_gpus)
    device = assume_device(config, on_gpus)
    memory_gb = scale.memory_gb
    if memory_gb is None and topology:
        memory_gb = topology.memory_gb

    lines = _mesh(layout, topology, scale.topology)
    lines.append(f"data       {dataset.note}")
    lines += layout_lines(config, job.shape, layout, batch, device, memory_gb, about_batch)
    if topology is None:
        from nanoray.forecast.traffic import talks_of

        lines += _traffic(layout, talks_of(job, layout, batch.micro, layout.pp - 1))
        lines += link_lines(job, layout, batch.micro, None)
        lines += settings.notes
        if config.device == "auto" and device.kind == "cpu":
            lines.append(
                "device     this machine has no GPU, so the ranks are CPUs; give --device cuda, or "
                "--topology, for GPUs"
            )
        lines.append("step       give --topology NAME or FILE for seconds and the best layouts")
        return lines

    network = OnTopology(topology)
    step = predict(job, layout, batch.micro, network, Speed.of(topology))
    lines += _traffic(layout, step.talks, network)
    lines += link_lines(job, layout, batch.micro, topology.ranks_per_node)
    lines += _step(job, step, topology)
    lines += settings.notes
    lines += _search(job, step, config, topology, memory_gb)
    return lines


def job_of(config: Config, vocab_size: int, sequences: int, on_gpus: bool | None = None) -> Job:
    """Return what a configuration trains, in steps of `sequences`. Raises ConfigError.

    Its axes come with Layout.of. `on_gpus`: see `assume_device`.
    """
    from nanoray.forecast.job import Job
    from nanoray.forecast.rank_memory import assume_device
    from nanoray.models.gpt import ModelShape

    if config.pure or config.precision == "fp8":
        nearest = "bf16" if config.precision == "fp8" else config.precision.removesuffix("_pure")
        raise ConfigError(
            f"a forecast has no prediction for precision = {config.precision}; use precision "
            f"{nearest}, or --dry_run for the memory of a rank"
        )
    if config.grad_compress != "none":
        raise ConfigError(
            f"a forecast has no prediction for grad_compress = {config.grad_compress}; use "
            "grad_compress none, or --dry_run for the memory of a rank"
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


def complete_topology(name: str) -> Topology:
    """Load a topology with all numbers of a prediction. Raises ConfigError."""
    from nanoray.forecast.links import Link, load_topology, topology_names

    # A prediction needs the speed of both links and of the device.
    topology = load_topology(name)
    missing = [key for key in ("intra", "inter") if not isinstance(getattr(topology, key), Link)]
    if not missing and topology.peak_tflops:
        return topology

    what = "no peak_tflops"
    if missing:
        what = f"{' and '.join(missing)} = fit, which only a measurement can fill"
    complete = []
    for other in topology_names():
        # For the message: which of the packaged topologies would do.
        candidate = load_topology(other)
        if other != name and candidate.peak_tflops and candidate.inter != "fit":
            complete.append(other)
    raise ConfigError(
        f"topology {name} has {what}; write numbers into a YAML file, use {', '.join(complete)}, "
        "or for this machine run `python -m nanoray.bench layouts predicted`"
    )


def known_dataset(config: Config) -> DatasetInfo:
    """Return a description of the data that is as true as it can be without reading them.

    Only a text or folder of the user's own, and epochs, are read.
    """
    if config.model == "resnet":
        return DatasetInfo(
            config.dataset, "not read", Path(), "uint8", len(CLASSES), 0, 0, "", "", {}, "images"
        )
    from nanoray.data.tokenizer import VOCAB

    if config.num_epochs or config.dataset not in ("auto", "shakespeare", "stdlib"):
        return prepare(config)
    tokenizer = config.tokenizer
    if config.dataset == "stdlib" and tokenizer == "auto":
        tokenizer = "byte"
    size = VOCAB[tokenizer]
    note = f"not read: a vocabulary of {size:,} is assumed (tokenizer {tokenizer})"
    return DatasetInfo(config.dataset, note, Path(), "uint16", size, 0, 0, "", "", {})


# The layout that was given.


def _mesh(layout: Layout, topology: Topology | None, name: str | None) -> list[str]:
    """Return the mesh, and for each axis its groups, one of them, and the link that it uses."""
    nodes = ""
    if topology:
        size = topology.ranks_per_node
        nodes = f"; {-(-layout.world_size // size):,} node(s) of {size} ({name})"
    # The innermost axis first. Groups of replicas divide the data axis.
    axes: list[str] = []
    for axis in layout.steps:
        if axis == "dp" and layout.replicas > 1:
            axes += layout.gradient_axes
        elif axis in layout.sizes():
            axes.append(axis)
    rows = []
    for axis in axes:
        stride, size = layout.steps[axis]
        if size == 1:
            continue
        # The ranks of one group: the first two and the last. Rank 0 is in the first group.
        first, second, last = (place * stride for place in (0, 1, size - 1))
        example = f"ranks {first} {second}"
        if size > 2:
            example += f" .. {last}"
        groups = f"{layout.world_size // size:,} group(s) of {size:,}"
        rows.append((axis, groups, example, _link(layout, axis, topology) if topology else ""))
    mesh = f"mesh       {layout.world_size:,} ranks = {layout}{_ep(layout)}{nodes}"
    return [mesh, *_indented("axes", rows)]


def _link(layout: Layout, axis: str, topology: Topology) -> str:
    """Write the link that the groups of an axis use."""
    from nanoray.forecast.links import placed

    intra, inter = topology.levels
    place = placed(layout, axis, topology.ranks_per_node)
    if place.inside:
        return f"inside a node: {intra.bandwidth_gb_per_s:g} GB/s"
    shared = f" shared by {place.sharing}" if place.sharing > 1 else ""
    return f"between nodes, {place.local} on each: {inter.bandwidth_gb_per_s:g} GB/s a node{shared}"


def _traffic(layout: Layout, talks: Sequence[Talk], network: Network | None = None) -> list[str]:
    """Return each kind of collective of a step: how many, of what size, what a rank sends, and
    seconds if a network is given.
    """
    from nanoray.forecast.layouts import ms

    rows = []
    for talk in talks:
        ranks = layout.size_of(talk.axis)
        row = [
            talk.axis,
            OPS[talk.op],
            talk.what,
            f"{talk.times:,.0f} × {talk.nbytes / MB:,.3g} MB",
            f"a rank sends {talk.sent(ranks) / MB:,.1f} MB",
        ]
        if network:
            cost = network.cost(layout, talk.axis, talk.op, talk.nbytes)
            row.append(f"{ms(talk.times * cost.seconds)} ms")
        rows.append(row)
    return _indented("talk", rows) or ["talk       nothing: one rank"]


def _step(job: Job, step: Prediction, topology: Topology) -> list[str]:
    """Return bubble and predicted step by part, with throughput and MFU."""
    from nanoray.forecast.layouts import ms
    from nanoray.models.costs import flops_per_token

    layout = step.layout
    tokens = job.sequences * job.shape.block_size
    bubble = "none: one stage"
    if layout.pp > 1:
        bubble = (
            f"{100 * step.bubble:.1f} %: {job.config.pp_schedule}, {step.accum} micro batches through "
            f"{layout.pp} stages"
        )
    flops_per_s = flops_per_token(job.shape) * tokens / step.step_s
    peak = 1e12 * (topology.peak_tflops or 1) * layout.world_size
    mfu = 100 * flops_per_s / peak
    return [
        f"bubble     {bubble}",
        f"step       {ms(step.step_s)} ms predicted = {_parts(step)}",
        f"speed      {tokens / step.step_s:,.0f} tok/s, MFU {mfu:.1f} % (a rank alone: "
        f"{100 * topology.mfu:g} %)",
    ]


def _parts(step: Prediction) -> str:
    """Write the parts of a step that take time."""
    from nanoray.forecast.layouts import ms

    parts = []
    for name, seconds in step.parts.items():
        if seconds > 0:
            exposed = "" if name in ("compute", "bubble") else "exposed "
            parts.append(f"{exposed}{name} {ms(seconds)}")
    return " + ".join(parts)


# The search.


def _search(
    job: Job, given: Prediction, config: Config, topology: Topology, memory_gb: float | None
) -> list[str]:
    """Return the best layouts, the rank of the given one among them, and why others are slower."""
    from nanoray.forecast.layouts import DOES_NOT_FIT, ms, needs, search, why_slower
    from nanoray.forecast.predict import OnTopology, Speed

    most = config.micro_batch_size or job.sequences
    ranks = given.layout.world_size
    network = OnTopology(topology)
    per_node = topology.ranks_per_node
    found = search(job, ranks, most, network, Speed.of(topology), memory_gb, per_node)
    steps = [layout.best for layout in found if layout.best]
    large = [layout for layout in found if layout.refused.startswith(DOES_NOT_FIT)]
    best = steps[0]

    refused = len(found) - len(steps) - len(large)
    title = (
        f"{len(found)} layouts of {ranks:,} ranks, the same {job.sequences} sequences a step, "
        f"micro batches to {most}: {refused} break a rule, {len(large)} do not fit; the best of "
        f"{len(steps)}"
    )
    if not memory_gb:
        title += "; no device memory known, so none is too large (--memory_gb)"

    rows = []
    for place, step in enumerate(steps[:MOST_LAYOUTS], 1):
        rows.append(
            (
                f"{place}. {step.layout}{_ep(step.layout)}",
                f"{ms(step.step_s)} ms",
                f"micro {step.micro} × {step.accum}",
                f"{sum(step.memory.values()) / GB:.3g} GB",
                _parts(step),
            )
        )
    lines = [f"layouts    {title}", *_indented("", rows)]

    if given.layout != best.layout:
        faster = sum(step.step_s < given.step_s for step in steps)
        place_of_given = f"number {faster + 1} of {len(steps)}"
        if memory_gb and sum(given.memory.values()) > GB * memory_gb:
            place_of_given = needs(given.memory, memory_gb)
        lines.append(f"asked      {given.layout}: {place_of_given}, {why_slower(given, best)}")

    reasons = _why_not(found, best)
    if large:
        widest = max(large, key=lambda layout: layout.layout.dp)
        reasons.append((f"{widest.layout}{_ep(widest.layout)}", widest.refused))
    return lines + _indented("why not", reasons)


def _ep(layout: Layout) -> str:
    return f", ep {layout.ep}" if layout.ep > 1 else ""


def _why_not(found: Sequence[Found], best: Prediction) -> list[tuple[str, str]]:
    """Return for each other size of an axis the fastest layout with it, or the rule that refuses
    all of them.
    """
    from nanoray.forecast.layouts import why_slower
    from nanoray.forecast.parallelisms.registry import PARALLELISMS

    rows: list[tuple[str, str]] = []
    for axis in [each.key for each in PARALLELISMS if each.key in best.layout.sizes()]:
        others = {getattr(layout.layout, axis) for layout in found}
        others.discard(getattr(best.layout, axis))
        refused: dict[str, list[int]] = {}
        for size in sorted(others):
            # `found` is sorted: if any of these has a step, the first one has the fastest.
            of_size = [layout for layout in found if getattr(layout.layout, axis) == size]
            step = of_size[0].best
            if step is not None:
                reason = f"{step.layout}{_ep(step.layout)}: {why_slower(step, best)}"
                rows.append((f"{axis} {size}", reason))
            else:
                refused.setdefault(_clearest_refusal(of_size, axis), []).append(size)
        # Sizes that break the same rule share a row.
        for reason, sizes in refused.items():
            if len(sizes) <= MOST_SIZES:
                shown = ", ".join(map(str, sizes))
            else:
                shown = f"{sizes[0]}, {sizes[1]}, ... {sizes[-1]}"
            rows.append((f"{axis} {shown}", reason))
    return rows


def _clearest_refusal(layouts: Sequence[Found], axis: str) -> str:
    """Return the refusal to show for an axis: one that names the axis or the memory, if any does."""
    from nanoray.forecast.layouts import DOES_NOT_FIT

    def clarity(layout: Found) -> tuple[bool, int]:
        return not layout.refused.startswith((axis, DOES_NOT_FIT)), layout.layout.tp

    return min(layouts, key=clarity).refused


def _indented(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as a table with the title before the first row."""
    if not rows:
        return []
    first, *others = aligned(rows)
    return [f"{title:<10} {first}", *(f"{'':<10} {line}" for line in others)]
