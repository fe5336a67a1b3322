"""Find the checkpoint that a run continues from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoray.checkpoint.files import (
    MANIFEST,
    STEP_NAME,
    Damage,
    StateDict,
    load,
    load_checked,
    load_rank_states,
    names_in,
    open_checkpoint,
    steps_in,
)
from nanoray.checkpoint.which_run import age_key
from nanoray.config.settings import public
from nanoray.errors import CheckpointError
from nanoray.machine.atomic import read_json
from nanoray.machine.storage.url import is_run_name


@dataclass
class Resume:
    """A checkpoint to continue from, with a note for each newer checkpoint that was skipped."""

    run_dir: Path
    path: Path
    state: StateDict
    notes: list[str]


def newest_valid(folder: Path) -> tuple[Resume | None, list[str]]:
    """Load the newest valid checkpoint of a folder, with notes on damaged newer ones.

    `folder` contains step_* folders, and is not changed.
    """
    notes: list[str] = []
    newest = None
    # The whole checkpoint is read, because only checksums show a flipped bit.
    for path in steps_in(folder, notes):
        try:
            newest = Resume(_run_dir(folder), path, load_checked(path), notes)
            break
        except Damage as damage:
            if os.path.lexists(path):  # else it was pruned meanwhile
                notes.append(f"checkpoint {path.name} is damaged ({damage})")
    outcome = f"using {newest.path.name}" if newest else "no older one is valid"
    notes[:] = [f"{note}; {outcome}" for note in notes]  # in place: `newest` has the same list
    return newest, notes


def newest_rank_states(folder: Path, otherwise: str) -> tuple[list[dict[str, Tensor]], int]:
    """Return each rank's own state in the newest valid checkpoint of a folder, and its samples.

    If there is none, those of `otherwise`, a checkpoint's path or "". Without either: ([], 0).
    """
    paths = list(steps_in(folder, []))
    if otherwise:
        paths.append(Path(otherwise))
    for path in paths:
        with suppress(Damage):
            states, meta = load_rank_states(path)
            return states, meta["samples_seen"]
    return [], 0


def find_resume(
    out_dir: Path,
    resume: str,
    model_shape: dict[str, Any],
    recipe: Mapping[str, Any] | None = None,
    passed_over: list[str] | None = None,
) -> Resume | None:
    """Find the checkpoint of `--resume`: none, auto, or the path of a run or checkpoint.

    auto means the newest run of `out_dir` that fits. A run fits if it has this model shape and this
    `recipe`: keys and values of its config.json, and "tokens_sha256". If none does, a line for each
    run that does not fit is added to `passed_over`. Returns None
    for none, and for auto when no run fits. Raises CheckpointError when a path has no valid
    checkpoint or one of another shape, and when auto finds only damaged ones: starting afresh would
    hide the loss.
    """
    if resume == "none":
        return None
    if resume == "auto":
        notes = [] if passed_over is None else passed_over
        return _find_newest(out_dir, model_shape, recipe or {}, notes)

    # A path: one checkpoint, a run folder, or its checkpoints folder.
    path = Path(os.path.abspath(Path(resume).expanduser()))
    notes = []
    found: Resume | None
    if (path / MANIFEST).is_file() or (STEP_NAME.fullmatch(path.name) and path.is_dir()):
        found = Resume(_run_dir(path.parent), path, load(path), notes)
    else:
        folder = path / "checkpoints"
        found, notes = newest_valid(folder if folder.is_dir() else path)
    if not found:
        raise CheckpointError(
            f"no valid checkpoint in {path}: looked for {MANIFEST}, step_*/{MANIFEST} and "
            f"checkpoints/step_*/{MANIFEST}"
            f"{''.join(f'; {note}' for note in notes)}; give --resume a run folder or one of its "
            "step_* folders"
        )
    check_shape(found.state, model_shape, f"checkpoint {found.path}")
    return found


def _run_dir(folder: Path) -> Path:
    return folder.parent if folder.name == "checkpoints" else folder


def _find_newest(
    out_dir: Path, model_shape: dict[str, Any], recipe: Mapping[str, Any], notes: list[str]
) -> Resume | None:
    # A note here means that out_dir cannot be read.
    runs = [out_dir / name for name in names_in(out_dir, notes) if is_run_name(name)]
    damaged = bool(notes)
    for run_dir in sorted(runs, key=age_key, reverse=True):
        # Ask the newest readable checkpoint before loading it: that reads little.
        meta: dict[str, Any] = {}
        for path in steps_in(run_dir / "checkpoints", []):
            with suppress(Damage):
                _, content = open_checkpoint(path)
                meta = content["meta"]
                break
        changed = other_recipe(run_dir, recipe, meta)
        if changed:
            notes.append(
                f"run {run_dir.name} is another experiment ({', '.join(changed.values())}); skipped"
            )
            continue
        other_shape = _difference(meta, model_shape) if meta else ""
        if other_shape:
            notes.append(f"run {run_dir.name} is of another model ({other_shape}); skipped")
            continue

        # The run fits: load its newest valid checkpoint. If it has none, try an older run.
        newest, damages = newest_valid(run_dir / "checkpoints")
        notes += [f"run {run_dir.name}: {note}" for note in damages]
        damaged = damaged or bool(damages)
        if newest:
            return replace(newest, notes=notes)
    if damaged:
        raise CheckpointError(
            f"no valid checkpoint in {out_dir}: {'; '.join(notes)}; remove what is damaged, or "
            "--resume none"
        )
    return None


def other_recipe(
    run_dir: Path, recipe: Mapping[str, Any], meta: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return {key: text} for each key of `recipe` whose value differs from what a run trained with.

    meta: of the run's checkpoint, where it has been read. Without config.json and run.json nothing
    differs.
    """
    config = read_json(run_dir / "config.json")
    run = read_json(run_dir / "run.json")
    if not (config and run):
        return {}
    # Of a script's run the files count: its model and data decide some keys (rates, batch size) after
    # the command has begun.
    trained = (meta or {}).get("config")
    if trained and trained.get("model") != "own":
        run = {**run, "config": trained}
    return differences(config, run, recipe)


def differences(
    config: Mapping[str, Any], run: Mapping[str, Any], recipe: Mapping[str, Any]
) -> dict[str, str]:
    """Return the same as other_recipe for the contents of a run's config.json and run.json.

    A user may have edited config.json, so the configuration in run.json counts where it is there.
    """
    recorded = run.get("config")
    if isinstance(recorded, dict):
        config = {**config, **recorded}
    tokens = run["dataset"]["tokens_sha256"]
    changed = {}
    for key, value in recipe.items():
        if key not in config:
            continue
        if config[key] != value:
            changed[key] = _change_of(key, config[key], value)
    # Another text, or the same text with another tokenizer.
    if tokens != recipe.get("tokens_sha256", tokens):
        changed["tokens_sha256"] = "its dataset has other tokens"
    return changed


def _change_of(key: str, before: Any, after: Any) -> str:
    """Return a key's change in words; of `env` the names of the variables whose values differ."""
    if key != "env":
        return f"{key} is {public(key, before)} there and {public(key, after)} here"
    names = sorted({**before, **after})
    return f"env in {', '.join(name for name in names if before.get(name) != after.get(name))}"


def _difference(meta: dict[str, Any], model_shape: dict[str, Any]) -> str:
    """Return how a checkpoint's model differs from `model_shape`, as text; empty if it does not."""
    saved_shape = meta.get("model_shape") or {}
    differences = []
    for key, here in model_shape.items():
        there = saved_shape.get(key, "unknown")
        if there != here:
            differences.append(f"{key} is {there} there and {here} here")
    return ", ".join(differences)


def check_shape(
    state: StateDict, model_shape: dict[str, Any], where: str = "the checkpoint"
) -> None:
    """Raise CheckpointError when the state is of a model of another shape."""
    difference = _difference(state.meta, model_shape)
    if difference:
        raise CheckpointError(
            f"{where} is of another model: {difference}; give that run's values, or --resume none"
        )
