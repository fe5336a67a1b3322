"""The plan of a run: its settings for a number of ranks and a dataset, or why they cannot work.

The driver uses it, so torch is imported late.
"""

from __future__ import annotations

from typing import TypeVar

from nanoray.config import VOCAB_MULTIPLE, Settings, resolve_batch
from nanoray.config.conflicts import refuse
from nanoray.config.load import run_folder_of
from nanoray.config.settings import lines_of
from nanoray.config.sizes import require_divisible, require_groups
from nanoray.data.dataset import DatasetInfo
from nanoray.data.foreign_weights import describe_init
from nanoray.errors import ConfigError
from nanoray.faults.plan import parse_plan
from nanoray.mesh.layout import Layout

S = TypeVar("S", bound=Settings)


def plan(settings: S, ranks: int, dataset: DatasetInfo) -> S:
    """Return the settings with what follows from the number of ranks and from the dataset.

    Raises ConfigError for a mesh, batch, fault or flag that cannot work with this number of ranks.
    """
    config = settings.config
    dp = Layout.of(config, ranks).dp
    if config.tp > 1:
        # The output head is cut over the padded vocabulary, so tp must divide the padded size.
        padded = -(-dataset.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        require_divisible(config.tp, config.n_head, config.n_embd, padded)

    if config.scaling == "nanochat":
        from nanoray.models.costs import scaling_parameters
        from nanoray.models.gpt import ModelShape
        from nanoray.start.scaling import scale

        params = scaling_parameters(ModelShape.of(config, dataset.vocab_size))
        settings = scale(settings, params, dp)

    # A run that is resumed has its own weights.
    if run_folder_of(config.resume) is None:
        settings = settings.note(*describe_init(config, dataset))

    # After the scaling rules, which may have changed the global batch size.
    config = settings.config
    batch = resolve_batch(config, dp)
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


def last_lines(planned: Settings) -> list[str]:
    """Return the last lines of a dry run: who has set each key that has not its default."""
    lines = [f"setting    {line}" for line in lines_of(planned.chosen())]
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
