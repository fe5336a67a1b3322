"""Resume from object storage: bring the newest whole checkpoint of a run into its local folder.

    --resume URL/RUN                        that run; config.json there has its settings
    --resume URL/RUN/checkpoints/step_...   a new run from that checkpoint
    --resume URL                            the newest run there that fits, as auto does
    --resume auto --upload URL              the newest run that fits, here or there

Afterwards the run is continued as one that was always here. Called by the driver or by rank 0, before
any rank starts.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nanoray.base.atomic import read_json
from nanoray.base.storage.remote_run import DamagedSettings, RunUrl, is_run_name
from nanoray.base.storage.store import StorageError, Store
from nanoray.base.storage.url import is_url, join
from nanoray.checkpoint.manifest import (
    MANIFEST,
    STEP_NAME,
    Damage,
    Sums,
    manifest_json,
    parse_manifest,
)
from nanoray.checkpoint.run import lock_run
from nanoray.checkpoint.upload.records import LOCAL, NOT_SENT
from nanoray.config import Settings, recipe_of
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import CheckpointError, ConfigError

S = TypeVar("S", bound=Settings)
T = TypeVar("T")
_NO_FILE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
TRIES = 4  # of an object that cannot be read
BACK_OFF_S = 1.0  # before the second try; twice as long before each further one


class NothingWhole(CheckpointError):
    """No checkpoint at a URL is whole."""


def fetch_named(settings: S) -> S:
    """Fetch the run or the checkpoint that `resume` names, if it is a URL of one.

    Returns settings whose `resume` is local then, with notes on what was done. Raises CheckpointError
    when no checkpoint there is whole, ConfigError when the storage refuses or another process uses
    the run's local folder.
    """
    config = settings.config
    if not is_url(config.resume):
        return settings
    try:
        where = RunUrl.find(config.resume)
        if where is None:
            return settings
        notes: list[str] = []
        path = fetch_run(where, Path(os.path.realpath(Path(config.out_dir).expanduser())), notes)
    except StorageError as error:
        raise _refusal(config.resume, error) from None
    return settings.set({"resume": str(path)}, f"fetched from {where.url}").note(*notes)


def fetch_fitting(settings: S, dataset: DatasetInfo) -> S:
    """Fetch the newest run that fits, for the URL of several runs and for `auto` with `upload`.

    Returns and raises as fetch_named. For auto a run that is here and was started later is not
    fetched. auto begins anew only where no checkpoint was begun, here or there, of a run that fits.
    """
    config = settings.config
    is_auto = config.resume == "auto" and bool(config.upload)
    url = config.upload if is_auto else config.resume
    if not is_auto and not is_url(url):
        return settings
    out_dir = Path(os.path.realpath(Path(config.out_dir).expanduser()))
    recipe = recipe_of(config) | {"tokens_sha256": dataset.tokens_sha256}
    started_here = _started_here(out_dir, recipe) if is_auto else 0.0
    notes: list[str] = []
    losses: list[str] = []
    try:
        there = runs_at(url, recipe, notes)
        for started, name in there.fitting:
            if started < started_here:
                break
            where = RunUrl(join(url, name))
            try:
                path = fetch_run(where, out_dir, notes)
            except NothingWhole as error:
                # Perhaps an older run has a checkpoint.
                losses.append(f"resume  {error}")
                continue
            if not is_auto:
                settings = settings.set({"resume": str(path)}, f"fetched from {where.url}")
            return settings.note(*losses, *notes)
    except StorageError as error:
        # What is needed may be here. A run that began anew would hide a loss.
        if started_here:
            return settings.note(f"warning  auto looks only in {out_dir}: {error}")
        raise _refusal(config.resume, error) from None
    if started_here:
        return settings.note(*losses)
    if is_auto and not losses and not there.unknown:
        return settings.note(*notes)

    reasons = "".join(f"; {note.removeprefix('resume  ')}" for note in [*losses, *notes])
    if is_auto:
        raise CheckpointError(
            f"no run at {url} can be continued, and a run that began anew would hide the "
            f"loss{reasons}; give --resume the URL or the folder of a run, or --resume none"
        )
    raise CheckpointError(f"no run at {url} fits this one{reasons}; give --resume the URL of a run")


def _refusal(resume: str, error: StorageError) -> Exception:
    text = f"resume = {resume}: {error}"
    if isinstance(error, DamagedSettings):
        return CheckpointError(f"{text}; restore this file there, or give --resume another run")
    if error.refused and not error.missing:
        return ConfigError(f"{text}; correct the URL, or the credentials of this command")
    return CheckpointError(f"{text}; try again when the storage answers, or --resume none")


@dataclass
class Runs:
    """The runs at a URL of which a checkpoint was begun there."""

    # Those with the recipe: when the newest command of each started, and its name; newest first
    fitting: list[tuple[float, str]] = field(default_factory=list)
    # The names of those that do not say their recipe
    unknown: list[str] = field(default_factory=list)


def runs_at(url: str, recipe: Mapping[str, Any], notes: list[str]) -> Runs:
    """Return the runs at a URL, and add a note for each that is skipped."""
    from nanoray.checkpoint.find import differences  # imports torch

    runs = Runs()
    store = Store(url)
    folders = store.folders()
    if "checkpoints" in folders:
        raise ConfigError(f"{url} is a run itself; give the URL of the folder that it is in")
    for name in folders:
        if not is_run_name(name):
            continue
        where = RunUrl(join(url, name))
        problem = "has no config.json"
        try:
            config, record = where.settings()
        except DamagedSettings as damage:
            config = {}
            problem = f"cannot be compared: {damage}"
        if not config:
            has_checkpoints = bool(store.sizes(f"{name}/checkpoints"))
            if has_checkpoints:
                runs.unknown.append(name)
            notes.append(f"resume  run {name} at {url} {problem}; skipped")
            continue
        changed = differences(config, record, recipe)
        if changed:
            notes.append(
                f"resume  run {name} at {url} is another experiment "
                f"({', '.join(changed.values())}); skipped"
            )
            continue
        if not store.sizes(f"{name}/checkpoints"):
            notes.append(
                f"resume  run {name} at {url} ended before a file of a checkpoint had arrived; skipped"
            )
            continue
        runs.fitting.append((_started(record), name))
    runs.fitting.sort(reverse=True)
    return runs


def _started(record: Mapping[str, Any]) -> float:
    """Return when the newest command of a run started; 0 if its run.json does not tell."""
    try:
        return float(record["started"])
    except (LookupError, TypeError, ValueError, OverflowError):
        return 0.0


def _started_here(out_dir: Path, recipe: Mapping[str, Any]) -> float:
    """Return when the newest run here with this recipe and a checkpoint started; 0 without one."""
    from nanoray.checkpoint.find import other_recipe

    newest = 0.0
    for run in out_dir.glob("*"):
        has_steps = any((run / "checkpoints").glob("step_*"))
        if is_run_name(run.name) and has_steps and not other_recipe(run, recipe):
            newest = max(newest, _started(read_json(run / "run.json")))
    return newest


def fetch_run(where: RunUrl, out_dir: Path, notes: list[str]) -> Path:
    """Bring a run's newest whole checkpoint, or the one that `where` names, below `out_dir`.

    Returns what to resume: the run's folder, or the folder of that checkpoint. Adds a note for each
    damaged one. Raises CheckpointError without a whole one, ConfigError when the run is in use.
    """
    store = Store(where.run)
    names = steps_there(store)
    if where.step:
        names = [name for name in names if name == where.step]
    if not names:
        raise NothingWhole(
            f"no checkpoint at {where.url} is whole: looked for checkpoints/step_*/{MANIFEST} "
            f"below {where.run}"
        )
    folder = out_dir / where.name
    is_new = not folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock, _ = lock_run(folder)
    damages: list[str] = []
    fetched = ""
    try:
        (folder / "checkpoints").mkdir(exist_ok=True)
        for name in names:
            try:
                fetched, is_newer = _fetch_checkpoint(
                    store, name, folder / "checkpoints", where.step
                )
            except Damage as damage:
                damages.append(f"checkpoint {name} at {where.run} is damaged ({damage})")
                continue
            break
        else:
            raise NothingWhole(f"no checkpoint at {where.url} is whole: {'; '.join(damages)}")
        damages_of_records = _fetch_records(store, folder, is_newer)
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        del lock  # open_run locks it again
    notes += [f"resume  {damage}; using {name}" for damage in damages]
    notes.append(f"resume  {fetched}")
    notes += [f"resume  {damage}; skipped" for damage in damages_of_records]
    if where.step:
        return folder / "checkpoints" / where.step
    return folder


def steps_there(store: Store) -> list[str]:
    """Return the names of checkpoints of a run that have a manifest, newest first."""
    names = []
    for name in _again(lambda: store.sizes("checkpoints")):
        step, _, file = name.partition("/")
        if file == MANIFEST and STEP_NAME.fullmatch(step):
            names.append(step)
    return sorted(names, key=lambda step: int(step.removeprefix("step_")), reverse=True)


def _fetch_checkpoint(store: Store, name: str, folder: Path, wanted: str) -> tuple[str, bool]:
    """Fetch a checkpoint unless it is here. Raises Damage.

    Returns what was done, and whether it is newer than all that were here. It appears by a rename,
    as one that was saved here. `wanted`: this very one is needed, and not a newer one that is here.
    """
    from nanoray.checkpoint.files import Draft, open_checkpoint, steps_in  # imports torch

    step = int(name.removeprefix("step_"))
    raw = _again(lambda: store.read(f"checkpoints/{name}/{MANIFEST}"))
    sums, version = parse_manifest(raw)

    # What is here and has the right sizes is not fetched. Its sums are compared when it is loaded.
    steps = steps_in(folder, [])
    for path, here in steps.items():
        with suppress(Damage):
            found, _ = open_checkpoint(path)
            is_same = here == step and manifest_json(found, version) == raw
            if is_same or (here > step and not wanted):
                return f"{path.name} is here already; {name} is at {store.url}", False

    began = time.monotonic()
    size = sum(entry["bytes"] for entry in sums.values())
    draft = Draft(folder, step, "fetched", None)
    with draft.errors():
        draft.begin(size)
        _fetch_files(store, name, sums, draft.temp)
        draft.commit(sums, version)
    seconds = time.monotonic() - began
    is_newer = all(here < step for here in steps.values())
    return f"{name} fetched from {store.url}: {size / 1e6:.1f} MB in {seconds:.1f} s", is_newer


def _fetch_files(store: Store, name: str, sums: Sums, folder: Path) -> None:
    """Fetch the files of a checkpoint, and compare their sums. Raises Damage."""
    for file, entry in sums.items():
        fetch = partial(_fetch_anew, store, f"checkpoints/{name}/{file}", folder / file)
        try:
            size, digest = _again(fetch)
        except StorageError as error:
            if error.missing:
                raise Damage(f"{file}: missing") from None
            raise
        if size != entry["bytes"]:
            raise Damage(f"{file}: {size} bytes instead of {entry['bytes']}")
        if digest != entry["sha256"]:
            raise Damage(f"{file}: sha256 differs")


def _fetch_records(store: Store, folder: Path, replace: bool) -> list[str]:
    """Fetch the files of a run that are not here, or with `replace` all, but no machine's logs.

    Returns a line for each object that cannot be a file here.
    """
    problems: list[str] = []
    # In this order, of `a` and `a/b` the first one becomes a file.
    for name in sorted(_again(lambda: store.sizes(""))):
        parts = name.split("/")
        # A user who may write there must not choose where this process writes.
        if any(not part or part.startswith(".") for part in parts) or not name.isprintable():
            continue
        if parts[0] in (*NOT_SENT, *LOCAL, "logs"):
            continue
        path = folder / name
        try:
            if path.exists() and not replace:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            is_free = not path.is_dir()
        except OSError as error:  # a folder of its name is a file, or it is too long
            if error.errno not in _NO_FILE:
                raise
            is_free = False
        if not is_free:
            problems.append(f"{join(store.url, name)} cannot be a file here")
            continue
        temporary = path.with_name(".fetched")
        try:
            _again(partial(_fetch_anew, store, name, temporary))
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    return problems


def _fetch_anew(store: Store, name: str, target: Path) -> tuple[int, str]:
    """Fetch an object into a file, in place of what a try before has left."""
    target.unlink(missing_ok=True)
    return store.get(name, target)


def _again(do: Callable[[], T]) -> T:
    """Return what `do` returns; after an error that may pass, try a few times more."""
    tried = 0
    while True:
        try:
            return do()
        except StorageError as error:
            tried += 1
            if error.refused or tried == TRIES:
                raise
            time.sleep(BACK_OFF_S * 2 ** (tried - 1))
