"""Open a run's folder: a new one, or the one that `--resume` continues.

The driver uses this, so what imports torch is imported late.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run_folder import (
    RunSpec,
    lock_run,
    new_folder,
    write_attempt,
)
from nanoray.config import Config, Settings, read_yaml, recipe_of
from nanoray.config.settings import OF_ONE_COMMAND, RUN, origin_of, with_origins
from nanoray.data.dataset import DatasetInfo
from nanoray.machine.atomic import write_json


def open_run(
    config: Config,
    dataset: DatasetInfo,
    started: float,
    origins: Mapping[str, str] | None = None,
) -> RunSpec:
    """Create or find the run's folder, and write config.json and run.json. (one process)

    origins: who has set each key (Settings).

    `--resume auto` and a run folder under out_dir continue in that folder; without an out_dir of
    its own, a configuration has that of the run (make_config). A single checkpoint, or a run of
    another name or under another out_dir, starts a new folder. The run stays locked while the spec
    lives, or this process. Raises CheckpointError when there is nothing to resume at a path,
    ConfigError when another process uses the run.
    """
    out_dir = Path(os.path.realpath(Path(config.out_dir).expanduser()))  # also of a loop of links
    origins = origins or {}
    resume = ""
    folder = None
    notes: list[str] = []
    found = None
    if config.resume != "none":
        from nanoray.checkpoint.resume import find_resume, other_recipe
        from nanoray.models.build import shape_of

        # auto skips runs of another model or another recipe.
        shape = shape_of(config, dataset.vocab_size).to_dict()
        recipe = recipe_of(config) | {"tokens_sha256": dataset.tokens_sha256}
        passed_over: list[str] = []
        found = find_resume(out_dir, config.resume, shape, recipe, passed_over)
        if found is None:
            notes += [f"resume  {note}" for note in passed_over]
            notes.append(f"resume  nothing to resume in {out_dir}: starting afresh")
        else:
            notes += [f"resume  {note}" for note in found.notes]
            changed = other_recipe(found.run_dir, recipe, found.state.meta)
            name = found.run_dir.name
            if changed:
                notes.append(f"resume  not the recipe of {name}: {with_origins(changed, origins)}")
            others = other_recipe(
                found.run_dir, _compared(config, recipe, origins), found.state.meta
            )
            if others:
                notes.append(f"resume  other settings than {name}: {with_origins(others, origins)}")

            # Continue in the run's own folder, or begin a new one from its checkpoint.
            run_dir = found.run_dir.resolve()
            single_checkpoint = (Path(config.resume).expanduser() / "state.json").exists()
            in_place = run_dir.parent == out_dir and "name" not in changed
            if in_place and not single_checkpoint:
                folder = run_dir
                resume = str(run_dir)
            else:
                resume = str(found.path.resolve())

    # A resumed run keeps the record of the weights that it began with.
    settings = Settings(config, origins=origins)
    if found is not None:
        began = {"init_from": _recorded_init(found.run_dir)}
        settings = settings.set(began, RUN + found.run_dir.name)

    is_new = folder is None
    if folder is None:
        folder = new_folder(out_dir, config.name)
    # Lock the folder before anything in it changes.
    lock, warning = lock_run(folder)
    if warning:
        notes.append(warning)
    for name in ("checkpoints", "logs"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)  # written by an earlier command of this run
    spec = RunSpec(
        settings.config,
        dataset,
        folder,
        started,
        resume,
        0,
        tuple(notes),
        lock,
        is_new,
        origins=settings.origins,
    )
    # The attempt first: from then on, older processes of the run cannot commit a checkpoint.
    write_attempt(spec)
    write_json(folder / "config.json", spec.config.model_dump())
    write_json(folder / "run.json", spec.to_dict())
    return spec


def _compared(
    config: Config, recipe: Mapping[str, Any], origins: Mapping[str, str]
) -> dict[str, Any]:
    """Return the keys beside the recipe that a resume compares with those of the run.

    Not those of one command, nor paths of the run that were made absolute. What their devices decide
    is compared by the ranks (train/agree.py).
    """
    compared = {}
    for key, value in config.model_dump().items():
        is_inherited = key in ("dataset", "data_dir") and origin_of(origins, key).startswith(RUN)
        is_open = key in ("precision", "attention", "workers") and value == "auto"
        if not (key in recipe or key in OF_ONE_COMMAND or is_inherited or is_open):
            compared[key] = value
    return compared


def _recorded_init(run_dir: Path) -> str:
    """Return the weights that a run began with, as its config.json says; "" for random ones."""
    path = run_dir / "config.json"
    if not path.is_file():
        return ""
    return str(read_yaml(path).get("init_from") or "")
