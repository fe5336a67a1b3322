"""The options of compressed gradients, and what they do not go with. config.py is built on this
file.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from nanoray.model_options import StepOptions

COMPRESSIBLE = ("ddp", "ddp_by_hand")  # values of dp_mode


class CompressionOptions(StepOptions):
    """The keys of what ranks send of their gradients, a part of Config. Each attribute's docstring
    is a help text.
    """

    grad_compress: Literal["none", "bf16", "fp16", "int8", "powersgd"] = Field(
        "none", json_schema_extra={"group": "optim"}
    )
    """dp_mode ddp and ddp_by_hand: what ranks send of their gradients: none (all, in float32) | bf16 | fp16 (half the
    bytes) | int8 (a quarter) | powersgd (products of rank powersgd_rank: far less). int8 and powersgd add what was not
    sent to the next gradient, and keep it, 4 bytes per parameter. All change the result, and save time where a link is
    slow: see docs/precision.md"""
    powersgd_rank: int = Field(4, json_schema_extra={"group": "optim"}, gt=0)
    """grad_compress powersgd: columns of the two matrices that stand for each matrix of gradients
    """


def refuse_compression(config: Any) -> None:
    """Raise ValueError when a Config compresses gradients in a run that cannot, or says how without
    doing it.
    """
    kind, rank = config.grad_compress, config.powersgd_rank
    if kind != "powersgd" and rank != 4:
        raise ValueError(
            f"powersgd_rank = {rank} would be ignored: grad_compress = {kind}; use grad_compress "
            "powersgd, or drop it"
        )
    if kind == "none":
        return
    if config.dp_mode not in COMPRESSIBLE:
        raise ValueError(
            f"grad_compress = {kind} with dp_mode = {config.dp_mode}: compressed sums go to all "
            "ranks, and it shards "
            f"them; use dp_mode {' or '.join(COMPRESSIBLE)}, or drop grad_compress"
        )
    if config.allreduce != "backend":
        raise ValueError(
            f"grad_compress = {kind} with allreduce = {config.allreduce}: compressed gradients "
            "have exchanges of their "
            "own; drop one of the two"
        )
    for axis in ("tp", "pp", "ep"):
        if (size := getattr(config, axis)) > 1:
            raise ValueError(
                f"grad_compress = {kind} with {axis} = {size}: only whole models have compressed "
                "gradients; drop "
                f"{axis}, or grad_compress"
            )
    if config.pure:
        raise ValueError(
            f"grad_compress = {kind} with precision = {config.precision}: gradients have 16 bits "
            "already; use "
            f"precision {config.precision.removesuffix('_pure')}, or drop grad_compress"
        )
