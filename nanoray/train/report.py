"""The last lines that a run prints. The driver uses them, so nothing here imports torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.faults.cause import read_reports
from nanoray.machine.environment import from_here
from nanoray.machine.launchers import describe_start
from nanoray.machine.text import clock, short


def closing_lines(
    spec: RunSpec, summary: dict[str, Any], start: str, quiet: bool = False
) -> list[str]:
    """Return the last lines of a run: loss, expected loss, sample, folder, and commands to run next.

    start: the words that start such a run again, before its flags. `quiet`: only the losses and the
    folder.
    """
    if summary.get("lines"):  # of a program that is no training
        return [*summary["lines"], f"files  {shlex.quote(from_here(str(spec.folder)))}"]
    # A run that failed before its first report has no number of steps.
    steps = summary["steps"]
    if steps is None:
        steps = "no"
    loss = _format_loss(summary, spec.config.target_loss)
    result = (
        f"{summary['exit_reason']:<6} {steps} steps in {_format_time(summary)} · {loss}"
        f"{_format_speed(summary)}{_format_faults(summary['restarts'], spec.folder, spec.started)}"
    )
    is_complete = summary["exit_reason"] == "finished" and not summary["restarts"]
    if is_complete and summary["steps_before"] == summary["steps"]:
        result = f"nothing to do: step {steps} of {spec.config.max_steps} · {loss}"
    run = shlex.quote(from_here(str(spec.folder)))
    if quiet:
        return [result, f"files  {run}"]

    lines = ["", result]
    lines += comm_lines(summary.get("comm"), run)
    if summary.get("sample"):
        lines.append("sample")
        lines += [f"  {line}" for line in summary["sample"].splitlines()]
    lines.append(f"files  {run}")

    for number, command in enumerate(_next_commands(spec, summary, run, start)):
        label = "next" if number == 0 else ""
        lines.append(f"{label:<6} {command}")
    return lines


def _next_commands(spec: RunSpec, summary: dict[str, Any], run: str, start: str) -> list[str]:
    """Return commands that fit this run, to be pasted in this working folder."""
    config = spec.config
    nanoray = words_of_nanoray()
    commands = [f"{nanoray} report {run}"]
    # A run that was stopped while it started has no state to sample from or to resume.
    if not any((spec.folder / "checkpoints").glob("step_*")):
        return commands
    if config.model == "gpt":
        commands.append(f"{nanoray} sample {run}")
    if config.model != "own":
        resume = f"{start} --resume {run}"
        # A run that ended early (a signal, stop_at, target_loss) has steps left of its own recipe.
        if summary["exit_reason"] == "finished":
            resume += f" --max_steps {2 * config.max_steps}"
        commands.append(resume)
    return commands


def words_of_python() -> str:
    """Return how a shell calls this interpreter: `python` where it finds this one."""
    found = shutil.which("python")
    if found and os.path.dirname(found) == os.path.dirname(sys.executable):
        return "python"
    return shlex.quote(from_here(sys.executable))


def words_of_nanoray() -> str:
    """Return how a shell calls nanoray's command."""
    python = words_of_python()
    is_installed = python == "python" and shutil.which("nanoray")
    return "nanoray" if is_installed else f"{python} -m nanoray"


def words_of_training(env: Mapping[str, str]) -> str:
    """Return how a shell trains with the launcher that has started this process, or with none."""
    place = describe_start(env)
    if place["by"] == "torchrun":
        return f"torchrun --nproc-per-node {place['on_host']} -m nanoray.train"
    words = f"{words_of_nanoray()} train"
    if place["by"] in ("srun", "mpirun"):
        return f"{place['by']} -n {place['ranks']} {words}"
    return words


def _format_time(summary: dict[str, Any]) -> str:
    """Write how long the steps took, and how long it was in all."""
    total = clock(summary["total_s"])
    # The seconds of a run that goes on are those of all of its steps
    if summary["train_s"] is None or summary["resumed_from"]:
        return total
    return f"{clock(summary['train_s'])} ({total} with start)"


def _format_faults(restarts: int, folder: Path, started: float) -> str:
    """Write how many ranks were replaced, and how often all ranks began again, since `started`."""
    faults = [
        event
        for event in read_reports(folder)
        if event["event"] == "fault" and event["time"] >= started
    ]
    replaced = sum(fault["replaced"] for fault in faults)
    if faults:
        restarts = sum(fault["recovery"] == "restart" for fault in faults)
    text = ""
    if replaced:
        text += f" · {replaced} rank{'s' if replaced > 1 else ''} replaced"
    if restarts:
        text += f" · {restarts} restart{'s' if restarts > 1 else ''}"
    return text


def _format_loss(summary: dict[str, Any], target: float) -> str:
    """Write the validation loss with its target or expectation, else the training loss."""
    val = summary["val_loss"]
    train = summary["train_loss"]
    if val is None and train is None:
        return "no loss"
    if val is None:
        return f"train loss {train:.4f}"

    # A target replaces the expectation, which holds only for a run that did all its steps.
    expected = summary["expected_val_loss"]
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

    lines = [
        f"comm   {comm['busy_share']:.0f} % of a step in collectives, "
        f"{comm['exposed_share']:.0f} % exposed ({comm['exposed_ms']:.1f} of "
        f"{comm['step_ms']:.1f} ms); {comm['traced_steps']} steps traced"
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
