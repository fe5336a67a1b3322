"""What a run prints before it starts and after it ends. The driver uses it, so torch is imported late."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

from nanoray.cli import Loaded
from nanoray.config import Batch, Config, resolve_batch
from nanoray.data.prepare import DatasetInfo
from nanoray.errors import ConfigError
from nanoray.faults.plan import parse_plan
from nanoray.run import RunSpec, expected_loss
from nanoray.train.observers import clock, short


def plan(loaded: Loaded, dp: int, dataset_vocab: int) -> tuple[Config, list[str]]:
    """Apply the scaling rules and check the batch arithmetic; return the final configuration and its derivation."""
    config, notes = loaded.config, []
    if config.scaling == "nanochat":
        from nanoray.models.costs import scaling_parameters
        from nanoray.models.gpt import ModelShape
        from nanoray.train.optim import derive_scaling

        params = scaling_parameters(ModelShape.of(config, dataset_vocab))
        config, derived = derive_scaling(config, loaded.given, params, dp)
        notes = [f"scale  {d.key} = {d.value:.4g}: {d.reason}" for d in derived]
    resolve_batch(config, dp)
    for key, idle in (("comm_trace", "off"), ("allreduce", "backend")):
        if dp == 1 and getattr(config, key) != idle:
            raise ConfigError(
                f"{key} = {getattr(config, key)} would be ignored: there is only one rank; start more ranks "
                f"(--workers 2, or torchrun), or use --{key} {idle}"
            )
    for fault in parse_plan(config.faults):
        if fault.rank >= dp:
            raise ConfigError(f"fault on rank {fault.rank} would never fire: ranks are 0 to {dp - 1}")
        if fault.step > config.max_steps:
            raise ConfigError(f"fault at step {fault.step} would never fire: max_steps is {config.max_steps}")
    return config, notes


def dry_run_lines(config: Config, notes: list[str], batch: Batch, dataset: DatasetInfo, placement: str) -> list[str]:
    """Return what `--dry_run` prints: mesh, batch arithmetic, parameters, memory, placement."""
    from nanoray.models.costs import count_parameters, memory_estimate
    from nanoray.models.gpt import ModelShape

    shape = ModelShape.of(config, dataset.vocab_size)
    precision, hint = (
        (config.precision, "") if config.precision != "auto" else ("fp32", " (auto may pick a smaller one)")
    )
    memory = memory_estimate(shape, batch.micro, precision)
    parts = " + ".join(f"{name} {size / 2**20:,.1f}" for name, size in memory.items() if name != "total")
    return [
        f"mesh       {batch.dp} rank(s) = dp {batch.dp}",
        f"placement  {placement}",
        f"data       {dataset.note}, vocabulary {dataset.vocab_size}",
        f"batch      {batch.micro} seq × {batch.accum} accum × {batch.dp} dp × {config.block_size} tok = "
        f"{batch.global_size * config.block_size:,} tok/step, {config.max_steps:,} steps = "
        f"{batch.global_size * config.block_size * config.max_steps:,} tok",
        f"model      {count_parameters(shape):,} parameters",
        f"memory     {memory['total'] / 2**20:,.1f} MiB per rank at {precision}{hint}: {parts}",
        *notes,
        "dry run: nothing was started",
    ]


def closing_lines(spec: RunSpec, summary: dict[str, Any]) -> list[str]:
    """Return the last lines of a run: loss, expected loss, a sample, the run's folder, and commands to run next."""
    expected = expected_loss(spec)
    lines = [""]
    val = summary["val_loss"]
    verdict = ""
    if val is not None and expected is not None and summary["exit_reason"] == "finished":
        verdict = f" (expected ≤ {expected}: {'ok' if val <= expected else 'NOT REACHED'})"
    train = summary["train_loss"]
    loss = (
        f"val loss {val:.4f}{verdict}" if val is not None else "no loss" if train is None else f"train loss {train:.4f}"
    )
    speed = f" · {short(summary['tok_per_sec'])} tok/s" if summary["tok_per_sec"] else ""
    restarts = f" · {summary['restarts']} restart(s)" if summary["restarts"] else ""
    steps = "no" if summary["steps"] is None else summary["steps"]
    lines.append(f"{summary['exit_reason']:<6} {steps} steps in {clock(summary['total_s'])} · {loss}{speed}{restarts}")
    lines += comm_lines(summary.get("comm"), _from_here(str(spec.folder)))
    if summary.get("sample"):
        lines += ["sample", *("  " + line for line in summary["sample"].splitlines())]
    run = shlex.quote(_from_here(str(spec.folder)))
    python = shlex.quote(_from_here(sys.executable))
    return [
        *lines,
        f"files  {run}",
        f"next   {python} -m tensorboard.main --logdir {shlex.quote(_from_here(str(spec.folder.parent)))}",
        f"       {python} -m nanoray.sample {run} --prompt 'To be'",
        f"       {python} -m nanoray.launch --resume {run} --max_steps {2 * spec.config.max_steps}",
    ]


def comm_lines(comm: dict[str, Any] | None, run: str) -> list[str]:
    """Return a few lines on the cost of communication; none for a run that was not traced."""
    if not comm:
        return []
    if not comm["traced_steps"]:
        return ["comm   no step was traced: this part of the run ended before one was due"]
    compared = ""
    if comm["ab_ms"] is not None:
        side = "more" if comm["ab_ms"] >= 0 else "less"
        compared = f"; {abs(comm['ab_ms']):.1f} ms {side} than under no_sync, n = {comm['compared_steps']}"
    lines = [
        f"comm   {comm['busy_share']:.0f} % of a step in collectives, {comm['exposed_share']:.0f} % exposed "
        f"({comm['exposed_ms']:.1f} of {comm['step_ms']:.1f} ms{compared}); {comm['traced_steps']} steps traced"
    ]
    if "slowest" in comm:
        slowest, limit = comm["slowest"], f", {comm['limit_share']:.0f} % of {comm['limit']}" if "limit" in comm else ""
        lines.append(
            f"       slowest: bucket {slowest['bucket']} of {slowest['bytes'] / 1e6:.2g} MB at step {slowest['step']}, "
            f"{slowest['time_us'] / 1e3:.1f} ms; busbw {comm['busbw_gbps']:.2f} GB/s{limit}"
        )
    if straggler := comm["straggler"]:
        until = f"to {straggler['until']}" if straggler["until"] else "to the end"
        lines.append(
            f"       straggler: rank {straggler['rank']}, {straggler['behind_ms']:.1f} ms a step behind in "
            f"{straggler['phase']}, from step {straggler['since']} {until}"
        )
    return [*lines, f"       {run}/comm/timeline.svg"]


def _from_here(path: str) -> str:
    """Return a path below the working directory as a relative one."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
