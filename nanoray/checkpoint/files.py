"""Atomic, verified checkpoints: safetensors and JSON, never pickle, nothing of process groups.

    RUN/checkpoints/step_00000200/
        model.safetensors  optimizer.safetensors  rng.safetensors  state.json
        manifest.json      format version; bytes and sha256 of each file above; written last

A sharded state has several writers (parts.py): format 2, with model-RRRRR and
optimizer-RRRRR.safetensors of each rank.

`save` commits by a rename, so a process killed at any instant leaves the old set of checkpoints or
the new one. There is no `latest` pointer: readers take the newest folder whose checksums match,
because the formats do not detect a flipped bit. A kill can leave hidden folders: .tmp-step_… was
being written, .del-step_… was being removed, .old-step_… was set aside while the same step was
saved again. The last kind counts as a checkpoint while its step is missing.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoray.checkpoint import parts
from nanoray.checkpoint.tensorfile import (
    GONE,
    Damage,
    as_bytes,
    damage_of,
    fsync_folder,
    layout,
    plain,
    read_file,
    tensors_in,
    write_file,
)
from nanoray.errors import CheckpointError
from nanoray.mesh.pieces import Piece
from nanoray.points import reached
from nanoray.state import StateDict

WHOLE, SHARDED = 1, 2  # formats: whole tensors of one writer, pieces of several
MANIFEST, STATE, RNG = "manifest.json", "state.json", "rng.safetensors"
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors", RNG)

STEP_NAME = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(tmp|old|del)-(step_\d{8,})-[\w.]*-\d+")
Sums = dict[str, dict[str, Any]]  # bytes and sha256 of each file
Pieces = Mapping[str, Piece]  # by parameter


def save(
    folder: Path,
    state: StateDict,
    keep: int,
    attempt: str = "",
    fence: Callable[[], None] | None = None,
) -> Path:
    """Write `folder`/step_XXXXXXXX, then prune to the newest `keep` and the one of lowest val_loss.
    (rank 0 only)

    Tensors may lie on any device and need not be contiguous; at most one at a time is copied, and
    none may change meanwhile. hashlib and os.write release the GIL, so a thread beside the training
    loop may call this. Only one process may save to a folder at a time, because hidden folders of
    others are removed. NaN and infinity in `meta` become null. `fence` is called before the folder
    is touched and right before the commit; it raises when this process may not write there any
    more. Raises CheckpointError when the write fails; then older checkpoints are as they were, and
    no partial file remains.
    """
    assert keep >= 1, keep
    rest = [as_bytes(_rest(state))]
    tensors = zip(TENSOR_FILES, (state.model, state.optimizer, _flat_rng(state)), strict=True)
    files = {name: layout(of) for name, of in tensors} | {STATE: rest}
    draft = Draft(folder, state.meta["step"], attempt, fence)
    with draft.errors():
        draft.begin(sum(tensor.nbytes for parts in files.values() for tensor in parts))
        sums = {name: write_file(draft.temp / name, parts) for name, parts in files.items()}
        draft.commit(sums, WHOLE)
    draft.finish(keep)
    return draft.final


def save_shared(
    draft: Draft, state: StateDict, writers: int, keep: int, alive: Callable[[], None]
) -> Path:
    """Write the first rank's part of a sharded state into a draft that has begun, and commit it.
    (rank 0 only)

    Meanwhile the other `writers` - 1 ranks call `parts.write`. `alive` is called while this rank
    waits for them, and raises when one of them cannot come any more. Raises as `save`.
    """
    with draft.errors():
        parts.write(draft.temp, 0, state)
        sums, pieces = parts.collect(draft.temp, writers, alive)
        sums[RNG] = write_file(draft.temp / RNG, layout(_flat_rng(state)))
        rest = _rest(state, {"aliases": state.aliases, "pieces": pieces})
        sums[STATE] = write_file(draft.temp / STATE, [as_bytes(rest)])
        draft.commit(sums, SHARDED)
    draft.finish(keep)
    return draft.final


class Draft:
    """A checkpoint in the making: files under a hidden name, which one rename commits."""

    def __init__(
        self, folder: Path, step: int, attempt: str, fence: Callable[[], None] | None
    ) -> None:
        """Touch nothing, but call `fence`, because hidden folders may belong to a newer attempt."""
        self.name, self._folder, self._may_write = (
            f"step_{int(step):08d}",
            folder,
            fence or (lambda: None),
        )
        self._tag = f"{self.name}-{re.sub(r'[^A-Za-z0-9_.]', '_', attempt)}-{os.getpid()}"
        self.temp, self._aside = folder / f".tmp-{self._tag}", folder / f".old-{self._tag}"
        self.final = folder / self.name
        self._may_write()

    def begin(self, need: int) -> None:
        """Make the hidden folder, for `need` bytes. Raises OSError, also when the disk has no room
        for them.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        _clean(self._folder)  # before the space is measured: a killed save leaves gigabytes
        disk = os.statvfs(self._folder)
        have = disk.f_bavail * disk.f_frsize
        # Manifest and rounding; some FUSE mounts report no blocks
        if disk.f_blocks and have < need + (1 << 16):
            text = f"disk full: need {need / 1e6:.2f} MB, have {have / 1e6:.2f} MB"
            raise OSError(errno.ENOSPC, text, str(self._folder))
        self.temp.mkdir()
        reached("save")

    def commit(self, sums: Sums, version: int) -> None:
        """Write the manifest, and rename the folder to its name."""
        write_file(self.temp / MANIFEST, [as_bytes(_manifest_json(sums, version))])
        fsync_folder(self.temp)
        self._may_write()
        reached("written")
        if self.final.is_dir():
            os.rename(self.final, self._aside)
            reached("aside")
        os.rename(self.temp, self.final)
        reached("renamed")
        fsync_folder(self._folder)

    def finish(self, keep: int) -> None:
        """Remove older checkpoints, and what is left of the draft."""
        _prune(self._folder, self.final, keep)
        _clean(self._folder)

    def discard(self) -> None:
        """Remove the hidden folder, and put back what was moved aside."""
        _clean(self._folder, self._tag)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Undo the draft when something fails inside, and turn an OSError into a CheckpointError."""
        try:
            yield
        except BaseException as error:
            self.discard()
            if not isinstance(error, OSError):
                raise
            text = f"cannot write checkpoint {self.name} in {self._folder}: {parts.reason(error)}"
            raise CheckpointError(
                f"{text}, or set another out_dir; older checkpoints are untouched"
            ) from error


def _rest(state: StateDict, more: Mapping[str, Any] | None = None) -> bytes:
    """Return what is no tensor, as the JSON of state.json."""
    if bad := [
        f"{key} = {value}" for key, value in state.scaler.items() if not math.isfinite(value)
    ]:
        raise CheckpointError(
            f"the loss scaler is not finite ({', '.join(bad)}); resume from an older checkpoint"
        )
    rest = {
        "ranks": len(state.rng),
        "scaler": state.scaler,
        "meta": plain(state.meta, "meta"),
        **(more or {}),
    }
    return json.dumps(rest, indent=1, allow_nan=False).encode()


def _flat_rng(state: StateDict) -> dict[str, Tensor]:
    return {
        f"{rank}.{key}": value
        for rank, generators in enumerate(state.rng)
        for key, value in generators.items()
    }


def _manifest_json(sums: Sums, version: int) -> bytes:
    return json.dumps({"format": version, "files": sums}, indent=1).encode()


def _prune(folder: Path, saved: Path, keep: int) -> None:
    """Rename for removal what is older than the newest `keep` valid ones up to `saved`, except the
    best one.
    """
    steps, losses = steps_in(folder, []), dict[Path, Any]()
    for path in steps:
        with suppress(Damage):
            losses[path] = open_checkpoint(path)[1]["meta"].get("val_loss")
    # Later steps are of another branch
    newest = [path for path in losses if steps[path] <= steps.get(saved, 0)][:keep]
    finite = {path: loss for path, loss in losses.items() if loss is not None}
    best = min(finite, key=lambda path: finite[path], default=None)  # the newest of equals
    for path in steps if len(newest) == keep else []:
        if steps[path] < steps[newest[-1]] and path != best:
            with suppress(OSError):  # a half-removed folder would look damaged
                os.rename(path, folder / f".del-{path.name}--{os.getpid()}")


def void_unfinished(folder: Path) -> None:
    """Remove what was written and not committed. A process of an older attempt, frozen there, can
    commit it no more.
    """
    _clean(folder)


def _clean(folder: Path, tag: str = "") -> None:
    """Remove the hidden folders of one save or of all; restore an .old one whose replacement is
    missing.
    """
    for name in names_in(folder, []):
        if (match := _HIDDEN.fullmatch(name)) and name.endswith(tag):
            with suppress(OSError):
                if match[1] == "old" and not os.path.lexists(folder / match[2]):
                    os.rename(folder / name, folder / match[2])
                else:
                    shutil.rmtree(folder / name)


def load(path: Path, pieces: Pieces | None = None, weights: Pieces | None = None) -> StateDict:
    """Read one checkpoint folder into CPU tensors. Raises CheckpointError unless all sizes and
    checksums match.

    With `pieces`, by parameter, the optimizer state of these parameters comes as that piece, flat,
    and with `weights` the weights; files that have none of it are not read. Each file is read once,
    into one buffer that its tensors share: the bytes used are the bytes that were checked.
    """
    try:
        return load_checked(path, pieces, weights)
    except Damage as damage:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({damage}); remove it, or --resume its run folder to "
            "use an older one"
        ) from None


def find_all(path: Path) -> list[Path]:
    """Return the checkpoints of a run folder or its checkpoints folder, newest first, or `path` if
    it is one.

    Raises CheckpointError when there is none.
    """
    if (path / MANIFEST).is_file() or STEP_NAME.fullmatch(path.name):
        return [path]
    found = list(steps_in(path / "checkpoints" if (path / "checkpoints").is_dir() else path, []))
    if not found:
        raise CheckpointError(
            f"no checkpoint in {path}; give a run folder, such as runs/2026-..., or one of its "
            "step_*"
        )
    return found


def peek(path: Path) -> tuple[int, dict[str, Any]]:
    """Return a checkpoint's bytes and its meta; the tensors are not read. Raises CheckpointError if
    it is damaged.
    """
    try:
        sums, content = open_checkpoint(path)
    except Damage as damage:
        raise CheckpointError(f"checkpoint {path} is damaged ({damage})") from None
    return sum(entry["bytes"] for entry in sums.values()), content["meta"]


def load_checked(
    path: Path, pieces: Pieces | None = None, weights: Pieces | None = None
) -> StateDict:
    """Do the work of `load`, but raise Damage."""
    sums, content = open_checkpoint(path)
    rng = _rank_states(path, sums, content)
    with damage_of(STATE):
        state = StateDict({}, {}, rng, content["scaler"], content["meta"])
    if "pieces" in content:
        state.model, state.optimizer = parts.load(path, sums, content, pieces, weights)
        return state
    state.model, state.optimizer = (
        tensors_in(read_file(path / n, sums[n]), n) for n in TENSOR_FILES[:2]
    )
    with damage_of(TENSOR_FILES[1]):
        if pieces is not None:
            of = {
                name: pieces[name.partition(".")[2]]
                for name in state.optimizer
                if name.partition(".")[2] in pieces
            }
            found = {name: state.optimizer[name] for name in of}
            # `step`, and others of its kind
            whole = {n for n, p in of.items() if p.shape and not found[n].dim()}
            state.optimizer = {
                n: found[n] if n in whole else p.take(found[n]) for n, p in of.items()
            }
        state.model |= {
            name: piece.take(state.model[name]) for name, piece in (weights or {}).items()
        }
    return state


def load_rank_states(path: Path) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Return what a checkpoint has of each rank alone, and its meta; weights are not read. Raises
    Damage.
    """
    sums, content = open_checkpoint(path)
    return _rank_states(path, sums, content), content["meta"]


def _rank_states(path: Path, sums: Sums, content: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    flat = tensors_in(read_file(path / RNG, sums[RNG]), RNG)
    with damage_of(STATE):
        rng: list[dict[str, Tensor]] = [{} for _ in range(content["ranks"])]
        for name, tensor in flat.items():
            rank, key = name.split(".", 1)
            rng[int(rank)][key] = tensor
    return rng


def open_checkpoint(path: Path) -> tuple[Sums, dict[str, Any]]:
    """Read a checkpoint's manifest and state.json, and compare every file's size; the tensors are
    not read.
    """
    with damage_of(MANIFEST):
        raw = (path / MANIFEST).read_bytes()
        content = json.loads(raw)
        version, sums = content["format"], content["files"]
        if version not in (WHOLE, SHARDED):
            raise Damage(
                f"{MANIFEST}: format {version!r}, but this nanoray reads the formats {WHOLE} and "
                f"{SHARDED}"
            )
        names = (*TENSOR_FILES, STATE) if version == WHOLE else (*parts.names_in(sums), RNG, STATE)
        sums = {
            name: {"bytes": sums[name]["bytes"], "sha256": sums[name]["sha256"]} for name in names
        }
        if _manifest_json(sums, version) != raw:
            raise ValueError("not byte for byte what these sums give")
    for name, entry in sums.items():
        with damage_of(name):
            if (size := (path / name).stat().st_size) != entry["bytes"]:
                raise Damage(f"{name}: {size} bytes instead of {entry['bytes']}")
    data = read_file(path / STATE, sums[STATE])
    with damage_of(STATE):
        return sums, json.loads(data.numpy().tobytes())


def names_in(folder: Path, notes: list[str]) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if not isinstance(error, GONE):
            notes.append(f"cannot read {folder}: {error.strerror}")
        return []


def steps_in(folder: Path, notes: list[str]) -> dict[Path, int]:
    """Return the checkpoint folders and their steps, newest first, with .old ones whose step is
    missing.
    """
    names = names_in(folder, notes)
    hidden = [match for match in map(_HIDDEN.fullmatch, names) if match]
    steps = [name for name in names if STEP_NAME.fullmatch(name)]
    steps += [match[0] for match in hidden if match[1] == "old" and match[2] not in names]
    numbers = {folder / name: int(STEP_NAME.findall(name)[0]) for name in steps}
    return dict(sorted(numbers.items(), key=lambda item: -item[1]))
