"""What can be asked of a search. Imports no torch: the command and the driver use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Words for what a setting changes in the result of a run, beyond rounding: those of --may
MASKS = "masks"
NORMS = "norms"
PRECISION = "precision"
COMPRESSION = "compression"
MAY = {
    MASKS: "other random masks of dropout, which follow from the micro batch and the kernel",
    NORMS: "other statistics of batch norms, which follow from the micro batch",
    PRECISION: "other number formats",
    COMPRESSION: "gradients that are sent in fewer bits",
}

# The knobs of knobs.py, for --leave
KNOB_NAMES = (
    "micro_batch",
    "attention",
    "loss_chunk",
    "checkpointing",
    "threads",
    "dp_mode",
    "buckets",
    "allreduce",
    "layout",
    "replicas",
    "pipeline",
    "context",
    "tensor",
    "precision",
    "compression",
    "compile",
)


@dataclass(frozen=True)
class SearchRequest:
    """What a command asks of a search."""

    label: str  # of the run that is tuned
    budget_s: float
    may: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()  # names of knobs
    main: Callable[[Any], Any] | None = None  # of a script that brings its own model
    given: frozenset[str] = frozenset()  # keys that the script has set
