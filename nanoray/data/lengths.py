"""The length of sequences: short at first, where a run warms up with short sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nanoray.config import Config


def lengths_of(config: Config) -> Callable[[int], int] | None:
    """Return the function from step to sequence length; None where it is always the same."""
    return partial(length_at, config=config) if config.seq_warmup_steps else None


def length_at(step: int, config: Config) -> int:
    """Return the tokens of a sequence in the step that follows `step` completed ones."""
    if step >= config.seq_warmup_steps:
        return config.block_size

    # From seq_warmup_from the length doubles, after equal numbers of steps, up to half of
    # block_size
    doublings = (config.block_size // config.seq_warmup_from).bit_length() - 1
    return config.seq_warmup_from << doublings * step // config.seq_warmup_steps


def format_lengths(config: Config) -> str:
    """Write up to which step sequences have which length: `cut into 8 to step 10, then 64 tok`."""
    last_step = {}
    for step in range(config.seq_warmup_steps):
        last_step[length_at(step, config)] = step + 1
    stages = ", ".join(f"{length} to step {step}" for length, step in last_step.items())
    return f"cut into {stages}, then {config.block_size} tok"
