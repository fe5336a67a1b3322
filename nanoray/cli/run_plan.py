"""The plan of a run: its settings for a number of ranks and a dataset, or why they cannot work.

The driver uses it, so torch is imported late.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from nanoray.cli import Loaded, Scale
from nanoray.config import VOCAB_MULTIPLE, Config, Settings, resolve_batch
from nanoray.config.conflict_sizes import require_divisible, require_groups
from nanoray.config.conflicts import refuse
from nanoray.config.layout import Layout
from nanoray.config.load import run_folder_of
from nanoray.config.settings import lines_of
from nanoray.data.cifar10 import CLASSES
from nanoray.data.dataset import DatasetInfo
from nanoray.data.download import NotDownloaded
from nanoray.data.initial_weights import describe_init
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError
from nanoray.faults.inject import parse_plan

S = TypeVar("S", bound=Settings)


def plan(settings: S, layout: Layout, dataset: DatasetInfo) -> S:
    """Return the settings with what follows from the layout of the ranks and from the dataset.

    Raises ConfigError for a batch, fault or flag that cannot work with this layout.
    """
    config = settings.config
    ranks = layout.world_size
    if config.tp > 1:
        # The output head is cut over the padded vocabulary, so tp must divide the padded size.
        padded = -(-dataset.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        require_divisible(config.tp, config.n_head, config.n_embd, padded)

    # A run that is resumed has its own weights.
    if run_folder_of(config.resume) is None:
        settings = settings.note(*describe_init(config, dataset))

    batch = resolve_batch(config, layout.dp)
    if config.pp > 1:
        require_groups(config.pp_schedule, config.pp, batch.accum)
    if config.num_epochs:
        settings = _count_steps(settings, dataset, batch.global_size)
        config = settings.config
    # What needs other ranks is refused here, where their number is known
    refuse(config, ranks=ranks)
    # A fault that cannot fire would make a test of recovery pass without testing it.
    for fault in parse_plan(config.faults):
        if fault.rank >= ranks:
            raise ConfigError(
                f"fault on rank {fault.rank} would never fire: ranks are 0 to {ranks - 1}"
            )
        if fault.step > config.max_steps:
            raise ConfigError(
                f"fault at step {fault.step} would never fire: max_steps is {config.max_steps}"
            )
    return settings


def last_lines(planned: Loaded) -> list[str]:
    """Return the last lines of a dry run; with --verbose who has set each key without its default."""
    lines = [f"setting    {line}" for line in lines_of(planned.chosen()) if planned.verbose]
    return [*lines, "dry run: nothing was started"]


def _count_steps(settings: S, dataset: DatasetInfo, global_size: int) -> S:
    """Turn num_epochs into max_steps.

    An epoch of a text has as many sequences as fit into it side by side.
    """
    config = settings.config
    if dataset.kind == "images":
        samples = dataset.train_tokens
        unit = "images"
    else:
        samples = max(1, dataset.train_tokens // config.block_size)
        unit = "sequences"
    # Rounded up: the last step may reach into the next epoch.
    steps = -(-config.num_epochs * samples // global_size)
    reason = f"{config.num_epochs} epoch(s) × {samples:,} {unit} / {global_size} per step"
    settings = settings.set({"max_steps": steps, "num_epochs": 0}, reason)
    return settings.note(f"epochs max_steps = {steps}: {reason}")


# The plan of `--dry_run --world_size N`: a run on any number of ranks, which need not exist.


def forecast_at(loaded: Loaded, scale: Scale) -> list[str]:
    """Plan a run at a scale, and return what it would do. Raises ConfigError."""
    from nanoray.cli.forecast.dry_run import dry_run_lines, step_lines
    from nanoray.cli.forecast.links import complete_topology

    if loaded.config.model == "own":
        raise ConfigError(
            "world_size describes ranks by formulas, but model = own has none; use --workers "
            f"{scale.world_size}"
        )
    if scale.memory_gb and loaded.config.model == "resnet":
        raise ConfigError(
            f"memory_gb = {scale.memory_gb:g} would be ignored: the memory of a gpt has formulas, and "
            "that of a resnet has none; drop --memory_gb"
        )
    topology = complete_topology(scale.topology) if scale.topology else None

    # The same rules as for a run.
    try:
        dataset = known_dataset(loaded.config)
        layout = Layout.of(loaded.config, scale.world_size)
        planned = plan(loaded, layout, dataset)
    except ConfigError as error:
        raise ConfigError(f"world_size = {scale.world_size}: {error}") from None

    config = planned.config

    # A topology describes GPUs. Without one, `device = auto` means what this machine has.
    if topology is None:
        lines = dry_run_lines(
            config, planned.notes, layout, dataset, "ranks that need not exist", scale.memory_gb
        )
        return [*lines, *last_lines(planned)]
    size = topology.ranks_per_node
    where = f"{-(-scale.world_size // size):,} node(s) of {size} ({scale.topology})"
    memory_gb = scale.memory_gb or topology.memory_gb
    lines = dry_run_lines(config, planned.notes, layout, dataset, where, memory_gb, on_gpus=True)
    lines += step_lines(config, dataset, layout, topology, memory_gb)
    return [*lines, *last_lines(planned)]


def dataset_of_dry_run(config: Config) -> DatasetInfo:
    """Return the dataset of a run; where it could not be downloaded, what is known of it."""
    try:
        return prepare(config)
    except NotDownloaded as error:
        if config.num_epochs:  # its length decides how many steps there are
            raise
        return replace(known_dataset(config), note=f"not there yet: {error}")


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
    note = f"not read: tokenizer {tokenizer} is assumed"
    return DatasetInfo(config.dataset, note, Path(), "uint16", VOCAB[tokenizer], 0, 0, "", "", {})
