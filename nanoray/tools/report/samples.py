"""What the model wrote at each checkpoint: the same prompt and seed, so only the weights differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from nanoray.errors import NanorayError
from nanoray.tools.report.gather import RunFiles

SEED = 1337  # of each checkpoint's text


class SampleText(NamedTuple):
    """A text, and the losses of the step at which the model wrote it."""

    step: int
    train_loss: float | None
    val_loss: float | None
    text: str


def write_samples(run: RunFiles, tokens: int) -> list[SampleText]:
    """Return a text of this many tokens from each checkpoint in the run's folder, the oldest first.

    Without checkpoints of a text model there are none. One that cannot be read is left out, with a
    warning on stderr: the page is about all the rest, too.
    """
    if not tokens or run.config.get("model") != "gpt":
        return []
    # Importing torch takes longer than the rest of the command.
    from nanoray.checkpoint.files import steps_in

    folders = steps_in(run.folder / "checkpoints", [])
    written = []
    for folder, step in sorted(folders.items(), key=lambda item: item[1]):
        print(f"sample {folder}", file=sys.stderr, flush=True)
        try:
            text = _write(folder, tokens)
        except NanorayError as error:
            print(f"warning: no sample of {folder.name}: {error}", file=sys.stderr)
            continue
        train_loss = _newest_at(run, "train/loss", step)
        written.append(SampleText(step, train_loss, _newest_at(run, "val/loss", step), text))
    return written


def _write(folder: Path, tokens: int) -> str:
    """Return what the model of a checkpoint writes after its tokenizer's own prompt."""
    import torch

    from nanoray.data.tokenizer import tokenizer_from_json
    from nanoray.models.sampling import write_text
    from nanoray.tools.sample import load_state, rebuild

    state, _ = load_state(folder)
    gpt, dataset = rebuild(state, torch.device("cpu"))
    return write_text(gpt, tokenizer_from_json(dataset.tokenizer), tokens, SEED)


def _newest_at(run: RunFiles, metric: str, step: int) -> float | None:
    """Return a metric's newest value up to a step; None if it was not recorded until then."""
    value = None
    for recorded, candidate in zip(*run.series(metric), strict=True):
        if recorded <= step:
            value = candidate
    return value
