"""The plan of `--dry_run --world_size N`: a run on any number of ranks, which need not exist.

The driver uses it, so torch is imported late.
"""

from __future__ import annotations

from nanoray.cli import Loaded, Scale
from nanoray.config import resolve_batch
from nanoray.errors import ConfigError
from nanoray.forecast import scale as forecast
from nanoray.mesh.layout import Layout
from nanoray.start.plan import last_lines, plan


def forecast_at(loaded: Loaded, scale: Scale) -> list[str]:
    """Plan a run at a scale, and return what it would do. Raises ConfigError."""
    from nanoray.forecast.layouts import factors

    if loaded.config.model != "gpt":
        raise ConfigError(
            f"world_size predicts the layers of a gpt, but model = {loaded.config.model}; drop "
            "--world_size"
        )
    topology = forecast.complete_topology(scale.topology) if scale.topology else None

    # The same rules as for a run, in an error that names the factors of the number of ranks.
    try:
        dp = Layout.of(loaded.config, scale.world_size).dp
        dataset = forecast.known_dataset(loaded.config)
        grown = _grow_batch(loaded, dp)
        planned = plan(grown, scale.world_size, dataset)
        resolve_batch(planned.config, dp)
    except ConfigError as error:
        raise ConfigError(f"world_size = {factors(scale.world_size)}: {error}") from None
    about_batch = ""
    if grown is not loaded:
        about_batch = f"; {grown.origins['global_batch_size']} (--global_batch_size chooses)"
    lines = forecast.forecast_lines(planned, dataset, scale, topology, about_batch)
    return [*lines, *last_lines(planned)]


def _grow_batch(loaded: Loaded, dp: int) -> Loaded:
    """Return settings whose batch divides over dp replicas.

    The global batch of a preset grows until it does; one given by the user does not: ConfigError.
    """
    config = loaded.config
    try:
        resolve_batch(config, dp)
    except ConfigError:
        if config.scaling != "none" or "global_batch_size" in loaded.given:
            raise
    else:
        return loaded
    # Whole micro batches for every replica, and at least as many sequences as were given.
    unit = (config.micro_batch_size or 1) * (config.grad_accum_steps or 1) * dp
    size = -(-config.global_batch_size // unit) * unit
    grown = f"grown from {config.global_batch_size} sequences to {size} to divide"
    return loaded.set({"global_batch_size": size}, grown)
