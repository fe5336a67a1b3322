"""What a run prints before it starts and after it ends. The driver uses it, so torch is imported
late.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

from nanoray.run import RunSpec, expected_loss
from nanoray.train.watch.observers import clock, short


def closing_lines(spec: RunSpec, summary: dict[str, Any], quiet: bool = False) -> list[str]:
    """Return the last lines of a run: loss, expected loss, a sample, the run's folder, and commands
    to run next.

    `quiet`: only the losses and the folder.
    """
    expected = expected_loss(spec)
    lines = [""]
    val = summary["val_loss"]
    verdict, target = "", spec.config.target_loss
    if val is not None and target:
        verdict = f" (target ≤ {target:g}: {'reached' if val <= target else 'NOT REACHED'})"
    elif val is not None and expected is not None and summary["exit_reason"] == "finished":
        verdict = f" (expected ≤ {expected}: {'ok' if val <= expected else 'NOT REACHED'})"
    train = summary["train_loss"]
    loss = (
        f"val loss {val:.4f}{verdict}"
        if val is not None
        else "no loss"
        if train is None
        else f"train loss {train:.4f}"
    )
    speed = f" · {short(summary['tok_per_sec'])} tok/s" if summary["tok_per_sec"] else ""
    if images_per_s := summary.get("samples_per_sec"):
        speed = f" · {short(images_per_s)} samples/s"
    restarts = f" · {summary['restarts']} restart(s)" if summary["restarts"] else ""
    steps = "no" if summary["steps"] is None else summary["steps"]
    lines.append(
        f"{summary['exit_reason']:<6} {steps} steps in {clock(summary['total_s'])} · "
        f"{loss}{speed}{restarts}"
    )
    run = shlex.quote(_from_here(str(spec.folder)))
    if quiet:
        return [lines[-1], f"files  {run}"]
    lines += comm_lines(summary.get("comm"), _from_here(str(spec.folder)))
    if summary.get("sample"):
        lines += ["sample", *("  " + line for line in summary["sample"].splitlines())]
    python = shlex.quote(_from_here(sys.executable))
    again = (
        f"       {python} -m nanoray.launch --resume {run} --max_steps {2 * spec.config.max_steps}"
    )
    return [
        *lines,
        f"files  {run}",
        f"next   {python} -m tensorboard.main --logdir "
        f"{shlex.quote(_from_here(str(spec.folder.parent)))}",
        *(
            [f"       {python} -m nanoray.sample {run} --prompt 'To be'"]
            if spec.config.model == "gpt"
            else []
        ),
        *([] if spec.config.model == "own" else [again]),
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
        compared = (
            f"; {abs(comm['ab_ms']):.1f} ms {side} than under no_sync, n = {comm['compared_steps']}"
        )
    lines = [
        f"comm   {comm['busy_share']:.0f} % of a step in collectives, {comm['exposed_share']:.0f} "
        "% exposed "
        f"({comm['exposed_ms']:.1f} of {comm['step_ms']:.1f} ms{compared}); {comm['traced_steps']} "
        "steps traced"
    ]
    if "bubble" in comm:
        lines.append(
            f"       stages idle {comm['bubble']:.0f} % of the time, {comm['bubble_theory']:.0f} % "
            "by the schedule"
        )
    if "slowest" in comm:
        slowest, limit = (
            comm["slowest"],
            f", {comm['limit_share']:.0f} % of {comm['limit']}" if "limit" in comm else "",
        )
        lines.append(
            f"       slowest: bucket {slowest['bucket']} of {slowest['bytes'] / 1e6:.2g} MB at "
            f"step {slowest['step']}, "
            f"{slowest['time_us'] / 1e3:.1f} ms; busbw {comm['busbw_gbps']:.2f} GB/s{limit}"
        )
    if straggler := comm["straggler"]:
        until = f"to {straggler['until']}" if straggler["until"] else "to the end"
        lines.append(
            f"       straggler: rank {straggler['rank']}, {straggler['behind_ms']:.1f} ms a step "
            "behind in "
            f"{straggler['phase']}, from step {straggler['since']} {until}"
        )
    return [*lines, f"       {run}/comm/timeline.svg"]


def _from_here(path: str) -> str:
    """Return a path below the working directory as a relative one."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
