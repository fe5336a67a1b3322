"""The last lines that a run prints. The driver uses them, so nothing here imports torch."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

from nanoray.base.environment import working_folder
from nanoray.base.text import clock, short
from nanoray.checkpoint.run import RunSpec, expected_loss


def closing_lines(spec: RunSpec, summary: dict[str, Any], quiet: bool = False) -> list[str]:
    """Return the last lines of a run: loss, expected loss, sample, folder, and commands to run next.

    `quiet`: only the losses and the folder.
    """
    if summary.get("lines"):  # of a program that is no training
        return [*summary["lines"], f"files  {shlex.quote(_from_here(str(spec.folder)))}"]
    # A run that failed before its first report has no number of steps.
    steps = summary["steps"]
    if steps is None:
        steps = "no"
    restarts = ""
    if summary["restarts"]:
        restarts = f" · {summary['restarts']} restart(s)"
    result = (
        f"{summary['exit_reason']:<6} {steps} steps in {clock(summary['total_s'])} · "
        f"{_format_loss(spec, summary)}{_format_speed(summary)}{restarts}"
    )
    is_complete = summary["exit_reason"] == "finished" and not summary["restarts"]
    if is_complete and summary["steps_before"] == summary["steps"]:
        loss = _format_loss(spec, summary)
        result = f"nothing to do: step {steps} of {spec.config.max_steps} · {loss}"
    run = shlex.quote(_from_here(str(spec.folder)))
    if quiet:
        return [result, f"files  {run}"]

    lines = ["", result]
    lines += comm_lines(summary.get("comm"), _from_here(str(spec.folder)))
    if summary.get("sample"):
        lines.append("sample")
        lines += [f"  {line}" for line in summary["sample"].splitlines()]
    lines.append(f"files  {run}")

    for number, command in enumerate(_next_commands(spec, summary)):
        label = "next" if number == 0 else ""
        lines.append(f"{label:<6} {command}")
    return lines


def _next_commands(spec: RunSpec, summary: dict[str, Any]) -> list[str]:
    """Return commands that fit this run: each can be pasted, also in another working folder."""
    config = spec.config
    python = shlex.quote(sys.executable)
    run = shlex.quote(str(spec.folder))
    commands = []
    if config.tensorboard:
        commands.append(
            f"{python} -m tensorboard.main --logdir {shlex.quote(str(spec.folder.parent))}"
        )
    # A run that was stopped while it started has no state to sample from or to resume.
    if not any((spec.folder / "checkpoints").glob("step_*")):
        return commands
    if config.model == "gpt":
        commands.append(f"{python} -m nanoray sample {run}")
    if config.model != "own":
        resume = f"{python} -m nanoray.launch --resume {run}"
        # A run that ended early (a signal, stop_at, target_loss) has steps left of its own recipe.
        if summary["exit_reason"] == "finished":
            resume += f" --max_steps {2 * config.max_steps}"
        commands.append(resume)
    return commands


def _format_loss(spec: RunSpec, summary: dict[str, Any]) -> str:
    """Write the validation loss with its target or expectation, else the training loss."""
    val = summary["val_loss"]
    train = summary["train_loss"]
    if val is None and train is None:
        return "no loss"
    if val is None:
        return f"train loss {train:.4f}"

    # A target replaces the expectation, which holds only for a run that did all its steps.
    target = spec.config.target_loss
    expected = expected_loss(spec)
    verdict = ""
    if target:
        reached = "reached" if val <= target else "NOT REACHED"
        verdict = f" (target ≤ {target:g}: {reached})"
    elif expected is not None and summary["exit_reason"] == "finished":
        reached = "ok" if val <= expected else "NOT REACHED"
        verdict = f" (expected ≤ {expected}: {reached})"
    return f"val loss {val:.4f}{verdict}"


def _format_speed(summary: dict[str, Any]) -> str:
    # Models of images report samples, all others tokens.
    images_per_s = summary.get("samples_per_sec")
    if images_per_s:
        return f" · {short(images_per_s)} samples/s"
    if summary["tok_per_sec"]:
        return f" · {short(summary['tok_per_sec'])} tok/s"
    return ""


def comm_lines(comm: dict[str, Any] | None, run: str) -> list[str]:
    """Return a few lines on the cost of communication; none for a run that was not traced."""
    if not comm:
        return []
    if not comm["traced_steps"]:
        return ["comm   no step was traced: this part of the run ended before one was due"]

    # Some steps are timed again without communication. Too few of these give no comparison.
    compared = ""
    if comm["ab_ms"] is not None:
        side = "more" if comm["ab_ms"] >= 0 else "less"
        compared = (
            f"; {abs(comm['ab_ms']):.1f} ms {side} than under no_sync, n = {comm['compared_steps']}"
        )
    lines = [
        f"comm   {comm['busy_share']:.0f} % of a step in collectives, "
        f"{comm['exposed_share']:.0f} % exposed ({comm['exposed_ms']:.1f} of "
        f"{comm['step_ms']:.1f} ms{compared}); {comm['traced_steps']} steps traced"
    ]

    # Idle stages exist in a pipeline only.
    if "bubble" in comm:
        lines.append(
            f"       stages idle {comm['bubble']:.0f} % of the time, {comm['bubble_theory']:.0f} % "
            "by the schedule"
        )

    if "slowest" in comm:
        slowest = comm["slowest"]
        lines.append(
            f"       slowest: bucket {slowest['bucket']} of {slowest['bytes'] / 1e6:.2g} MB at "
            f"step {slowest['step']}, {slowest['time_us'] / 1e3:.1f} ms; busbw "
            f"{comm['busbw_gbps']:.2f} GB/s"
        )

    straggler = comm["straggler"]
    if straggler:
        until = "to the end"
        if straggler["until"]:
            until = f"to {straggler['until']}"
        lines.append(
            f"       straggler: rank {straggler['rank']}, {straggler['behind_ms']:.1f} ms a step "
            f"behind in {straggler['phase']}, from step {straggler['since']} {until}"
        )
    lines.append(f"       nanoray report timeline {run} draws the traced steps")
    return lines


def _from_here(path: str) -> str:
    """Return a path below the working directory as a relative one."""
    here = working_folder()
    return path.removeprefix(here + os.sep) if here else path
