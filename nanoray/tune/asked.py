"""The words that a search takes. Imports no torch: the command reads them."""

from __future__ import annotations

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
