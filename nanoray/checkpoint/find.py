"""Find the checkpoint that a run continues from."""

from __future__ import annotations

import calendar
import json
import os
import re
import time
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
from nanoray.errors import CheckpointError

_RUN = re.compile(r"\d{4}-\d{2}-\d{2}_\d{6}_.+")


@dataclass
class Resume:
    """A checkpoint to continue from. `notes` has one line for each newer checkpoint that was
    skipped.
    """

    run_dir: Path
    path: Path
    state: StateDict
    notes: list[str]


def newest_valid(folder: Path) -> tuple[Resume | None, list[str]]:
    """Load the newest valid checkpoint of a checkpoints folder, with notes on damaged newer ones.
    Changes nothing.
    """
    notes: list[str] = []
    found = None
    for path in steps_in(folder, notes):
        try:
            found = Resume(_run_dir(folder), path, load_checked(path), notes)
            break
        except Damage as damage:
            if os.path.lexists(path):  # else it was pruned meanwhile
                notes.append(f"checkpoint {path.name} is damaged ({damage})")
    used = f"using {found.path.name}" if found else "no older one is valid"
    notes[:] = [f"{note}; {used}" for note in notes]
    return found, notes


def newest_rank_states(folder: Path, otherwise: str) -> tuple[list[dict[str, Tensor]], int]:
    """Return what the newest valid checkpoint of a folder has of each rank alone, and after how
    many samples.

    If there is none, that of `otherwise`, a checkpoint's path or "". Without any: nothing, after 0
    samples.
    """
    for path in [*steps_in(folder, []), *([Path(otherwise)] if otherwise else [])]:
        with suppress(Damage):
            states, meta = load_rank_states(path)
            return states, meta["samples_seen"]
    return [], 0


def find_run(
    out_dir: Path,
    resume: str,
    model_shape: dict[str, Any],
    recipe: Mapping[str, Any] | None = None,
    passed_over: list[str] | None = None,
) -> Resume | None:
    """Resolve `--resume`: none, auto (the newest run of `out_dir` that fits), or the path of a run
    or checkpoint.

    A run fits if it is of this shape and of this `recipe`: keys and values of its config.json, and
    "tokens_sha256". If none does, `passed_over` gets a line for each run that does not, or that is
    closed to this user. Returns None for none, and for auto when no run fits. Raises
    CheckpointError when a path holds no valid checkpoint or one of another shape, and when auto
    finds only damaged ones: starting afresh would hide the loss.
    """
    if resume in ("none", "auto"):
        notes = [] if passed_over is None else passed_over
        return _find_newest(out_dir, model_shape, recipe or {}, notes) if resume == "auto" else None
    path = Path(os.path.abspath(Path(resume).expanduser()))
    notes = []
    found: Resume | None
    if (path / MANIFEST).is_file() or (STEP_NAME.fullmatch(path.name) and path.is_dir()):
        found = Resume(_run_dir(path.parent), path, load(path), notes)
    else:
        found, notes = newest_valid(
            path / "checkpoints" if (path / "checkpoints").is_dir() else path
        )
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
    runs = [out_dir / name for name in names_in(out_dir, notes) if _RUN.fullmatch(name)]
    damaged = bool(notes)
    for run_dir in sorted(runs, key=_age, reverse=True):
        if closed := _closed(run_dir):
            notes.append(f"run {run_dir.name} is closed to this user ({closed}); skipped")
            continue
        if changed := other_recipe(run_dir, recipe):
            notes.append(
                f"run {run_dir.name} is another experiment ({', '.join(changed.values())}); skipped"
            )
            continue
        other = ""
        # Compare shapes first, which reads little
        for path in reversed(steps_in(run_dir / "checkpoints", [])):
            with suppress(Damage):
                other = _difference(open_checkpoint(path)[1]["meta"], model_shape)
        if other:
            notes.append(f"run {run_dir.name} is of another model ({other}); skipped")
            continue
        found, about = newest_valid(run_dir / "checkpoints")
        notes += [f"run {run_dir.name}: {note}" for note in about]
        damaged |= bool(about)
        if found:
            return replace(found, notes=notes)
    if damaged:
        raise CheckpointError(
            f"no valid checkpoint in {out_dir}: {'; '.join(notes)}; remove what is damaged, or "
            "--resume none"
        )
    return None


def _closed(run_dir: Path) -> str:
    """Return what of a run this user may not read, or "". Run folders are private: it is another
    user's.
    """
    try:
        os.listdir(run_dir / "checkpoints")
        for name in ("config.json", "run.json"):
            (run_dir / name).open("rb").close()
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if isinstance(error, PermissionError) else ""
    return ""


def _age(run_dir: Path) -> tuple[float, int, list[str]]:
    """Return what orders runs: when the newest command on it started, its newest step, its name
    with -2 before -10.
    """
    started, newest = 0.0, 0
    try:
        started = float(json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["started"])
        newest = max(steps_in(run_dir / "checkpoints", []).values(), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        # Of an older version, or broken: its name says it, in UTC
        with suppress(ValueError):
            started = calendar.timegm(time.strptime(run_dir.name[:17], "%Y-%m-%d_%H%M%S"))
    return started, newest, _numbered(run_dir.name)


def _numbered(name: str) -> list[str]:
    return [part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def other_recipe(run_dir: Path, recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run's config.json and run.json have that differs from `recipe`: a text for each
    such key of it.

    Without these files, which older versions did not write, nothing differs.
    """
    try:
        have = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        tokens = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["dataset"][
            "tokens_sha256"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    other = {key: value for key, value in recipe.items() if key in have and have[key] != value}
    changed = {key: f"{key} is {have[key]} there and {value} here" for key, value in other.items()}
    if tokens != recipe.get("tokens_sha256", tokens):
        changed["tokens_sha256"] = "its dataset has other tokens"
    return changed


def _difference(meta: dict[str, Any], model_shape: dict[str, Any]) -> str:
    have = {**(meta.get("config") or {}), **(meta.get("model_shape") or {})}
    # Dense here
    more = {
        key: 0 for key in meta.get("model_shape") or {} if model_shape and key.startswith("expert")
    }
    model_shape = more | model_shape
    wrong = [key for key, value in model_shape.items() if have.get(key) != value]
    return ", ".join(
        f"{key} is {have.get(key, 'unknown')} there and {model_shape[key]} here" for key in wrong
    )


def check_shape(
    state: StateDict, model_shape: dict[str, Any], where: str = "the checkpoint"
) -> None:
    """Raise CheckpointError when the state is of a model of another shape."""
    if wrong := _difference(state.meta, model_shape):
        raise CheckpointError(
            f"{where} is of another model: {wrong}; give that run's values, or --resume none"
        )
