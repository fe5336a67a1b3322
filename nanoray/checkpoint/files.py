"""Atomic, verified checkpoints: safetensors and JSON, never pickle, nothing of process groups.

    RUN/checkpoints/step_00000200/
        model-00000.safetensors  optimizer-00000.safetensors    of each rank that writes: rank 0,
                           or of a sharded state every rank (sharded_files.py)
        rng.safetensors  state.json
        manifest.json      bytes and sha256 of each file above; written last

A save commits by a rename, so a process killed at any instant leaves the old set of checkpoints or
the new one. There is no `latest` pointer: readers take the newest folder whose checksums match,
because the formats do not detect a flipped bit. A kill can leave hidden folders: .tmp-step_… was
being written, .del-step_… was being removed, .old-step_… was set aside while the same step was
saved again. The last kind counts as a checkpoint while its step is missing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoray.checkpoint import sharded_files
from nanoray.checkpoint.manifest import (
    MANIFEST,
    STEP_NAME,
    Damage,
    Sums,
    manifest_json,
    parse_manifest,
)
from nanoray.checkpoint.sharded_files import MODEL, OPTIMIZER, file_of
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.checkpoint.tensorfile import (
    GONE,
    as_bytes,
    damage_of,
    fsync_folder,
    layout,
    read_file,
    tensors_in,
    write_file,
)
from nanoray.errors import CheckpointError
from nanoray.machine.atomic import without_nan
from nanoray.machine.fault_points import reached
from nanoray.parallel.pieces import Piece

STATE = "state.json"
RNG = "rng.safetensors"

# Bytes on a disk besides the tensors: the manifest, and files rounded up to blocks
RESERVE = 1 << 16

_HIDDEN = re.compile(r"\.(tmp|old|del)-(step_\d{8,})-[\w.]*-\d+")
Pieces = Mapping[str, Piece]  # by parameter


def save(
    draft: Draft, state: StateDict, writers: int, keep: int, alive: Callable[[], None]
) -> None:
    """Write rank 0's part of a state into a draft that has begun, and commit it. (rank 0 only)

    Meanwhile the other `writers` - 1 ranks call `sharded_files.write`. `alive` is called while this
    rank waits for them, and raises when a part will not be written.

    Then older checkpoints are removed, but not the newest `keep` and the one of lowest val_loss.
    Tensors may lie on any device and need not be contiguous; at most one at a time is copied, and
    none may change meanwhile. hashlib and os.write release the GIL, so a thread beside the training
    loop may call this. NaN and infinity in `meta` become null. Raises CheckpointError when the write
    fails; then older checkpoints are as they were, and no partial file remains.
    """
    assert keep >= 1, keep
    with draft.errors():
        # Its own part first, while the other ranks write theirs.
        sharded_files.write(draft.temp, 0, state)
        sums, pieces = sharded_files.collect(draft.temp, writers, alive)
        # The parts have weights and optimizer. The rest is small, and rank 0 has all of it.
        sums[RNG] = write_file(draft.temp / RNG, layout(_flat_rng(state)))
        sums[STATE] = write_file(draft.temp / STATE, [as_bytes(_rest(state, pieces))])
        draft.commit(sums)
    draft.finish(keep)


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies in a folder of checkpoints."""
    return folder / f"step_{int(step):08d}"


class Draft:
    """A checkpoint in the making: files under a hidden name, which one rename commits."""

    def __init__(
        self, folder: Path, step: int, attempt: str, fence: Callable[[], None] | None
    ) -> None:
        """Touch nothing, but call `fence`, because hidden folders may belong to a newer attempt.

        `fence` is called again right before the commit, and raises when this process may not write
        there any more. Only one process may save to a folder at a time.
        """
        self.final = path_of(folder, step)
        self.name = self.final.name
        self._folder = folder
        self._fence = fence or (lambda: None)
        # The attempt and the pid, because two processes may write the same step.
        attempt = re.sub(r"[^A-Za-z0-9_.]", "_", attempt)
        self._tag = f"{self.name}-{attempt}-{os.getpid()}"
        self.temp = folder / f".tmp-{self._tag}"
        self._aside = folder / f".old-{self._tag}"
        self._fence()

    def begin(self, need: int) -> None:
        """Make the hidden folder. Raises OSError, also when the disk has less than `need` bytes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _clean(self._folder)  # before the space is measured: a killed save leaves gigabytes
        # An early error is better than a draft that fills the disk, where logs are written, too.
        disk = os.statvfs(self._folder)
        have = disk.f_bavail * disk.f_frsize
        # Some FUSE mounts report no blocks
        if disk.f_blocks and have < need + RESERVE:
            text = (
                f"disk full: need {need / 1e6:.2f} MB and {RESERVE / 1e6:.2f} MB for manifest and "
                f"rounding, have {have / 1e6:.2f} MB"
            )
            raise OSError(errno.ENOSPC, text, str(self._folder))
        self.temp.mkdir()
        reached("save")

    def commit(self, sums: Sums) -> None:
        """Write the manifest, and rename the folder to its name."""
        # The manifest last: a folder without one is not a checkpoint.
        write_file(self.temp / MANIFEST, [as_bytes(manifest_json(sums))])
        # A rename may reach the disk before the files do, unless these are synced first.
        fsync_folder(self.temp)
        self._fence()  # again, because writing may have taken minutes
        reached("written")
        # A folder cannot be replaced by a rename. If the process dies between the two, `_clean` of
        # the next one puts the old folder back.
        if self.final.is_dir():
            os.rename(self.final, self._aside)
            reached("aside")
        os.rename(self.temp, self.final)
        reached("renamed")
        fsync_folder(self._folder)

    def finish(self, keep: int) -> None:
        """Remove older checkpoints, and the draft's hidden folders."""
        _prune(self._folder, self.final, keep)
        _clean(self._folder)

    def discard(self) -> None:
        """Remove the hidden folder, and put back the older checkpoint of this step."""
        _clean(self._folder, self._tag)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Undo the draft when something fails inside; turn an OSError into a CheckpointError."""
        try:
            yield
        except BaseException as error:
            self.discard()
            if not isinstance(error, OSError):
                raise
            text = f"cannot write checkpoint {self.name} in {self._folder}: {sharded_files.reason(error)}"
            raise CheckpointError(
                f"{text}, or set another out_dir; older checkpoints are untouched"
            ) from error


def _rest(state: StateDict, pieces: list[dict[str, Any]]) -> bytes:
    """Return all but the tensors, as the JSON of state.json. `pieces`: those in each rank's files."""
    rest = {
        "ranks": len(state.rng),
        "scaler": state.scaler,
        "meta": without_nan(state.meta),
        "aliases": state.aliases,
        "pieces": pieces,
    }
    return json.dumps(rest, indent=1, allow_nan=False).encode()


def _flat_rng(state: StateDict) -> dict[str, Tensor]:
    """Return the ranks' own tensors by "RANK.NAME"."""
    flat = {}
    for rank, generators in enumerate(state.rng):
        for key, value in generators.items():
            flat[f"{rank}.{key}"] = value
    return flat


def _prune(folder: Path, saved: Path, keep: int) -> None:
    """Remove all older than the newest `keep` valid ones up to `saved`, except the best one."""
    steps = steps_in(folder, [])
    losses: dict[Path, Any] = {}  # of the valid ones, newest first
    for path in steps:
        with suppress(Damage):
            _, content = open_checkpoint(path)
            losses[path] = content["meta"].get("val_loss")

    # Later steps than the saved one belong to another branch: the run went back.
    newest = [path for path in losses if steps[path] <= steps.get(saved, 0)][:keep]
    if len(newest) < keep:
        return
    finite = {path: loss for path, loss in losses.items() if loss is not None}
    best = min(finite, key=lambda path: finite[path], default=None)  # of equal ones the newest
    for path in steps:
        if steps[path] < steps[newest[-1]] and path != best:
            with suppress(OSError):  # renamed first: a half-removed folder would look damaged
                os.rename(path, folder / f".del-{path.name}--{os.getpid()}")


def void_unfinished(folder: Path) -> None:
    """Remove drafts, so that a frozen process of an older attempt cannot commit one any more."""
    _clean(folder)


def _clean(folder: Path, tag: str = "") -> None:
    """Remove the hidden folders of one save, or of all; restore .old ones without a new one."""
    # Errors are ignored: another process may remove the same folders.
    for name in names_in(folder, []):
        match = _HIDDEN.fullmatch(name)
        if match is None or not name.endswith(tag):
            continue
        kind, step_name = match.groups()
        with suppress(OSError):
            if kind == "old" and not os.path.lexists(folder / step_name):
                os.rename(folder / name, folder / step_name)
            else:
                shutil.rmtree(folder / name)


def load(path: Path, pieces: Pieces | None = None, weights: Pieces | None = None) -> StateDict:
    """Read one checkpoint folder into CPU tensors.

    With `pieces`, by parameter, only these pieces of the optimizer state are returned, flat, and
    with `weights` only those of the weights; files that contain none of them are not read. Each
    file is read once, into one buffer that its tensors share: the bytes used are the bytes that
    were checked. Raises CheckpointError unless all sizes and checksums match.
    """
    try:
        return load_checked(path, pieces, weights)
    except Damage as damage:
        raise _damaged(path, damage) from None


def _damaged(path: Path, damage: Damage) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is damaged ({damage}); remove it, or --resume its run folder to "
        "use an older one"
    )


def find_all(path: Path) -> list[Path]:
    """Return the checkpoints of a run folder, newest first; `path` alone if it is a checkpoint.

    Also accepts the run's checkpoints folder. Raises CheckpointError when there is none.
    """
    # A step_* folder without a manifest counts, too, so that its damage is reported.
    if (path / MANIFEST).is_file() or STEP_NAME.fullmatch(path.name):
        return [path]
    folder = path / "checkpoints"
    if not folder.is_dir():
        folder = path
    steps = list(steps_in(folder, []))
    if not steps:
        raise CheckpointError(
            f"no checkpoint in {path}; give a run folder, such as runs/2026-..., or one of its "
            "step_*"
        )
    return steps


def peek(path: Path) -> tuple[int, dict[str, Any]]:
    """Return a checkpoint's bytes and its meta, without reading the tensors.

    Raises CheckpointError if it is damaged.
    """
    try:
        sums, content = open_checkpoint(path)
    except Damage as damage:
        raise _damaged(path, damage) from None
    return sum(entry["bytes"] for entry in sums.values()), content["meta"]


def load_checked(
    path: Path, pieces: Pieces | None = None, weights: Pieces | None = None
) -> StateDict:
    """Load a checkpoint as `load` does, but raise Damage."""
    sums, content = open_checkpoint(path)
    rng = _rank_states(path, sums, content)
    with damage_of(STATE):
        state = StateDict({}, {}, rng, content["scaler"], content["meta"])
    state.model, state.optimizer = sharded_files.load(path, sums, content, pieces, weights)
    return state


def load_rank_states(path: Path) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Return each rank's own tensors and the meta of a checkpoint, without the weights.

    Raises Damage.
    """
    sums, content = open_checkpoint(path)
    return _rank_states(path, sums, content), content["meta"]


def _rank_states(path: Path, sums: Sums, content: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    flat = tensors_in(read_file(path / RNG, sums[RNG]), RNG)
    with damage_of(STATE):
        # A rank may have saved nothing of its own, so their number is stored, too.
        rng: list[dict[str, Tensor]] = [{} for _ in range(content["ranks"])]
        for name, tensor in flat.items():
            rank, key = name.split(".", 1)
            rng[int(rank)][key] = tensor
    return rng


def open_checkpoint(path: Path) -> tuple[Sums, dict[str, Any]]:
    """Read a checkpoint's manifest and state.json, and compare every file's size. Raises Damage.

    The tensors are not read.
    """
    with damage_of(MANIFEST):
        sums = parse_manifest((path / MANIFEST).read_bytes())
    # Sizes are compared without reading; checksums when a file is read.
    for name, entry in sums.items():
        with damage_of(name):
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                raise Damage(f"{name}: {size} bytes instead of {entry['bytes']}")
    with damage_of(STATE):
        content = json.loads(read_file(path / STATE, sums[STATE]).numpy().tobytes())
        names = {RNG, STATE}
        for rank in range(len(content["pieces"])):
            names |= {file_of(MODEL, rank), file_of(OPTIMIZER, rank)}
    if sums.keys() != names:
        raise Damage(f"{MANIFEST}: not as nanoray writes it")
    return sums, content


def names_in(folder: Path, notes: list[str]) -> list[str]:
    """Return the names in a folder, sorted; add a note to `notes` if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if not isinstance(error, GONE):
            notes.append(f"cannot read {folder}: {error.strerror}")
        return []


def steps_in(folder: Path, notes: list[str]) -> dict[Path, int]:
    """Return the checkpoint folders and their steps, newest first.

    An .old folder counts while its step is missing: a process died between two renames.
    """
    names = names_in(folder, notes)
    steps = {}
    for name in names:
        match = STEP_NAME.fullmatch(name)
        if match:
            steps[folder / name] = int(match[1])
    for name in names:
        match = _HIDDEN.fullmatch(name)
        if match and match[1] == "old" and match[2] not in names:
            steps[folder / name] = int(match[2].removeprefix("step_"))
    return dict(sorted(steps.items(), key=lambda item: -item[1]))
