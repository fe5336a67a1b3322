"""The options of a run that begins with short sequences, and what they do not go with. A part of
config.py.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from nanoray.compression_options import CompressionOptions


class SeqOptions(CompressionOptions):
    """The keys of a sequence-length warm-up, a part of Config. Each attribute's docstring is its
    flag's help text.
    """

    seq_warmup_steps: int = Field(0, json_schema_extra={"group": "batch"}, ge=0)
    """gpt: steps in which each sequence is cut into shorter ones, of seq_warmup_from tokens at
    first, then of twice as many, and so on up to block_size (0 = off); a step has as many tokens as
    without"""
    seq_warmup_from: int = Field(8, json_schema_extra={"group": "batch"}, gt=0)
    """seq_warmup_steps: tokens of a sequence at first; block_size is 2, 4, 8, ... times that"""


def length_at(step: int, config: Any) -> int:
    """Return the tokens of a sequence in the step that follows `step` completed ones."""
    if step >= config.seq_warmup_steps:
        return int(config.block_size)
    doublings = (config.block_size // config.seq_warmup_from).bit_length() - 1
    return int(config.seq_warmup_from << doublings * step // config.seq_warmup_steps)


def told_lengths(config: Any) -> str:
    """Write until which step sequences have how many tokens."""
    last = {length_at(step, config): step + 1 for step in range(config.seq_warmup_steps)}
    stages = ", ".join(f"{length} to step {step}" for length, step in last.items())
    return f"cut into {stages}, then {config.block_size} tok"


def refuse_seq_warmup(config: Any, steps: int) -> None:
    """Raise ValueError when a Config of so many steps asks for short sequences that it cannot have."""
    if not config.seq_warmup_steps:
        if config.seq_warmup_from != 8:
            raise ValueError(
                f"seq_warmup_from = {config.seq_warmup_from} would be ignored: seq_warmup_steps = "
                "0; give "
                "seq_warmup_steps, or drop it"
            )
        return
    asked = f"seq_warmup_steps = {config.seq_warmup_steps}"
    if config.seq_warmup_steps > steps:
        raise ValueError(f"{asked} is beyond max_steps = {steps}; lower it")
    times, rest = divmod(size := config.block_size, config.seq_warmup_from)
    if rest or times < 2 or times & (times - 1):
        near = size // min(8, size & -size)
        raise ValueError(
            f"block_size = {size} is not 2, 4, 8, ... times seq_warmup_from = "
            f"{config.seq_warmup_from}; "
            + (f"try seq_warmup_from {near}" if near < size else "use an even block_size")
        )
    reasons = {
        "model": (config.model != "gpt", "only a gpt has sequences that can be cut"),
        "tp": (config.tp > 1, "its ranks pass each other sequences of block_size tokens"),
        "pp": (config.pp > 1, "its ranks pass each other sequences of block_size tokens"),
        "compile": (
            config.compile,
            "it would compile for each length, and a resumed run for other ones",
        ),
    }
    for key, (unfit, why) in reasons.items():
        if unfit:
            raise ValueError(
                f"{asked} with {key} = {getattr(config, key)}: {why}; drop one of the two"
            )
