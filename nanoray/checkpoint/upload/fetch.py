"""Resume from object storage: copy the newest complete checkpoint of a run into its local folder.

    --resume URL/RUN                        that run; config.json there has its settings
    --resume URL/RUN/checkpoints/step_...   a new run from that checkpoint
    --resume auto --upload URL              the newest run that fits, here or there

Afterwards the run is continued as one that was always here. Called by the driver or by rank 0, before
any rank starts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nanoray.checkpoint.manifest import MANIFEST, STEP_NAME, Damage, parse_manifest
from nanoray.checkpoint.run_folder import lock_run
from nanoray.checkpoint.upload.send import is_record, step_of
from nanoray.config import Settings, recipe_of
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import CheckpointError, ConfigError
from nanoray.machine.storage.store import StorageError, Store
from nanoray.machine.storage.url import is_run_name, is_url, join, run_of

S = TypeVar("S", bound=Settings)
_CHUNK = 8 << 20  # bytes that are hashed at a time


def fetch_named(settings: S) -> S:
    """Fetch the run or the checkpoint that `resume` names, if it is a URL.

    Returns settings whose `resume` is local then, with notes on what was done. Raises CheckpointError
    when no checkpoint there is complete, ConfigError when the storage fails or another process uses
    the run's local folder.
    """
    resume = settings.config.resume
    named = run_of(resume) if is_url(resume) else None
    if named is None:
        return settings
    notes: list[str] = []
    with _refusing(resume):
        path = fetch_run(*named, _out_dir(settings), notes)
    return settings.set({"resume": str(path)}, f"fetched from {resume}").note(*notes)


def fetch_fitting(settings: S, dataset: DatasetInfo) -> S:
    """Fetch the newest run that fits, for `auto` with `upload`; what is here counts, too.

    Returns and raises as fetch_named.
    """
    config = settings.config
    url = config.upload
    if config.resume != "auto" or not url:
        return settings
    recipe = recipe_of(config) | {"tokens_sha256": dataset.tokens_sha256}
    notes: list[str] = []
    with _refusing(url):
        for name in _fitting_runs(url, recipe, notes):
            where = join(url, name)
            if not _steps_there(Store(where)):
                notes.append(f"resume  run {name} at {url} has no complete checkpoint; skipped")
                continue
            fetch_run(where, "", _out_dir(settings), notes)
            break
    return settings.note(*notes)


def _out_dir(settings: Settings) -> Path:
    return Path(os.path.realpath(Path(settings.config.out_dir).expanduser()))


@contextmanager
def _refusing(url: str) -> Iterator[None]:
    """Raise ConfigError where the storage fails: a run that began anew would hide a loss."""
    try:
        yield
    except StorageError as error:
        raise ConfigError(
            f"cannot resume from {url}: {error}; correct the URL or the credentials, try again when "
            "the storage answers, or give --resume a local run or none"
        ) from None


def _fitting_runs(url: str, recipe: Mapping[str, Any], notes: list[str]) -> list[str]:
    """Return the names of runs at a URL that have this recipe, the one that ran last first.

    Adds a note for each other one.
    """
    from nanoray.checkpoint.resume import differences  # imports torch

    store = Store(url)
    started = {}
    for name in store.folders():
        if not is_run_name(name):
            continue
        record = store.read_json(f"{name}/run.json")
        if record is None:
            notes.append(f"resume  run {name} at {url} has no run.json; skipped")
            continue
        changed = differences({}, record, recipe)
        if changed:
            notes.append(
                f"resume  run {name} at {url} is another experiment "
                f"({', '.join(changed.values())}); skipped"
            )
            continue
        started[name] = record["started"]
    return sorted(started, key=lambda name: started[name], reverse=True)


def fetch_run(url: str, step: str, out_dir: Path, notes: list[str]) -> Path:
    """Copy a run's newest complete checkpoint, or its `step`, below `out_dir` if it is not here.

    Returns what to resume: the run's folder, or the folder of that checkpoint. Adds a note for each
    damaged one. Raises CheckpointError without a complete one, ConfigError when the run is in use.
    """
    from nanoray.checkpoint.files import steps_in  # imports torch

    store = Store(url)
    names = [step] if step else _steps_there(store)
    if not names:
        raise CheckpointError(
            f"no checkpoint at {url} is complete: looked for checkpoints/step_*/{MANIFEST}"
        )
    run = out_dir / url.rpartition("/")[2]
    checkpoints = run / "checkpoints"
    path = checkpoints / step if step else run
    run.mkdir(mode=0o700, parents=True, exist_ok=True)  # losses and texts are private
    checkpoints.mkdir(exist_ok=True)
    lock, _ = lock_run(run)
    here = steps_in(checkpoints, []).values()
    newest_here = max(here, default=-1)
    problems = []
    try:
        for name in names:
            number = step_of(name)
            if number in here or (number < newest_here and not step):
                notes.append(f"resume  {name} of {url} is not fetched: it, or a newer one, is here")
                return path
            try:
                # A kill in between leaves no checkpoint without its records.
                _fetch_records(store, run, replace=number > newest_here)
                size = _fetch_checkpoint(store, name, checkpoints)
            except Damage as damage:
                problems.append(f"checkpoint {name} at {url} is damaged ({damage})")
                continue
            notes += [f"resume  {problem}; using {name}" for problem in problems]
            notes.append(f"resume  {name} fetched from {url}: {size / 1e6:.1f} MB")
            return path
    finally:
        del lock  # open_run locks it again
    if here and not step:
        notes += [f"resume  {problem}; using what is here" for problem in problems]
        return path
    raise CheckpointError(f"no checkpoint at {url} is complete: {'; '.join(problems)}")


def _steps_there(store: Store) -> list[str]:
    """Return the names of the complete checkpoints of a run, newest first."""
    steps = []
    for name, size in store.sizes("checkpoints").items():
        step, _, file = name.partition("/")
        if file == MANIFEST and size and STEP_NAME.fullmatch(step):
            steps.append(step)
    return sorted(steps, key=step_of, reverse=True)


def _fetch_checkpoint(store: Store, name: str, folder: Path) -> int:
    """Fetch a checkpoint, compare its sums, and commit it; return its bytes. Raises Damage.

    It appears by a rename, as one that was saved here.
    """
    from nanoray.checkpoint.files import Draft  # imports torch

    raw = store.read(f"checkpoints/{name}/{MANIFEST}")
    if not raw:
        raise Damage(f"{MANIFEST}: missing")
    sums = parse_manifest(raw)
    size = sum(entry["bytes"] for entry in sums.values())
    draft = Draft(folder, step_of(name), "fetched", None)
    with draft.errors():
        draft.begin(size)
        for file, entry in sums.items():
            try:
                store.get(f"checkpoints/{name}/{file}", draft.temp / file)
            except StorageError as error:
                if error.missing:
                    raise Damage(f"{file}: missing") from None
                raise
            if _sha256(draft.temp / file) != entry["sha256"]:
                raise Damage(f"{file}: sha256 differs")
        draft.commit(sums)
    return size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _fetch_records(store: Store, run: Path, replace: bool) -> None:
    """Fetch the files of a run that are not here, or with `replace` all, but no machine's logs."""
    for name in store.sizes(""):
        path = run / name
        if not is_record(name) or name.startswith("logs/"):
            continue
        if replace or not path.exists():
            store.get(name, path)
