"""Atomic, verified checkpoints: safetensors and JSON, never pickle, nothing of process groups.

    RUN/checkpoints/step_00000200/
        model.safetensors  optimizer.safetensors  rng.safetensors  state.json
        manifest.json      format version; bytes and sha256 of each file above; written last

`save` commits by a rename, so a process killed at any instant leaves the old set of checkpoints or the new one. There
is no `latest` pointer: readers take the newest folder whose checksums match, because the formats do not detect a
flipped bit. A kill can leave hidden folders: .tmp-step_… was being written, .del-step_… was being removed, .old-step_…
was set aside while the same step was saved again. The last kind counts as a checkpoint while its step is missing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoray.errors import CheckpointError
from nanoray.points import reached
from nanoray.state import StateDict

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")

STEP_NAME = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(tmp|old|del)-(step_\d{8,})-[\w.]*-\d+")
_GONE = (FileNotFoundError, NotADirectoryError)
_CHUNK = 8 << 20  # bytes hashed and written at a time
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Damage(Exception):
    """Why a folder is not a valid checkpoint: "FILE: reason"."""


def save(folder: Path, state: StateDict, keep: int, attempt: str = "", fence: Callable[[], None] | None = None) -> Path:
    """Write `folder`/step_XXXXXXXX, then prune to the newest `keep` and the one of lowest val_loss. (rank 0 only)

    Tensors may lie on any device and need not be contiguous; at most one at a time is copied, and none may change
    meanwhile. hashlib and os.write release the GIL, so a thread beside the training loop may call this. Only one
    process may save to a folder at a time, because hidden folders of others are removed. NaN and infinity in `meta`
    become null. `fence` is called before the folder is touched and right before the commit; it raises when this process
    may not write there any more. Raises CheckpointError when the write fails; then older checkpoints are as they were,
    and no partial file remains.
    """
    assert keep >= 1, keep
    if bad := [f"{key} = {value}" for key, value in state.scaler.items() if not math.isfinite(value)]:
        raise CheckpointError(f"the loss scaler is not finite ({', '.join(bad)}); resume from an older checkpoint")
    name = f"step_{int(state.meta['step']):08d}"
    tag = f"{name}-{re.sub(r'[^A-Za-z0-9_.]', '_', attempt)}-{os.getpid()}"
    temp, aside, final = folder / f".tmp-{tag}", folder / f".old-{tag}", folder / name
    rng = {f"{rank}.{key}": value for rank, generators in enumerate(state.rng) for key, value in generators.items()}
    files = {f: _layout(t) for f, t in zip(TENSOR_FILES, (state.model, state.optimizer, rng), strict=True)}
    rest = {"ranks": len(state.rng), "scaler": state.scaler, "meta": _plain(state.meta, "meta")}
    files[STATE] = [_bytes(json.dumps(rest, indent=1, allow_nan=False).encode())]
    may_write = fence or (lambda: None)
    may_write()  # before _clean: hidden folders may belong to a newer attempt
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)  # before the space is measured: a killed save leaves gigabytes
        disk, need = os.statvfs(folder), sum(tensor.nbytes for parts in files.values() for tensor in parts)
        have = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and have < need + (1 << 16):  # manifest and rounding; some FUSE mounts report no blocks
            raise OSError(errno.ENOSPC, f"disk full: need {need / 1e6:.2f} MB, have {have / 1e6:.2f} MB", str(folder))
        temp.mkdir()
        reached("save")
        sums = {file: _write(temp / file, parts) for file, parts in files.items()}
        _write(temp / MANIFEST, [_bytes(_manifest_json(sums))])
        _fsync_folder(temp)
        may_write()
        reached("written")
        if final.is_dir():
            os.rename(final, aside)
            reached("aside")
        os.rename(temp, final)
        reached("renamed")
        _fsync_folder(folder)
    except BaseException as error:
        _clean(folder, tag)  # removes `temp`, puts `aside` back
        if not isinstance(error, OSError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free space, raise the limit or lower keep_checkpoints" if full else "check the disk and permissions"
        raise CheckpointError(
            f"cannot write checkpoint {name} in {folder}: {error.strerror} ({Path(str(error.filename)).name}); "
            f"{remedy}, or set another out_dir; older checkpoints are untouched"
        ) from error
    _prune(folder, final, keep)
    _clean(folder)
    return final


def _layout(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Lay out a safetensors file: length of header (8 bytes), JSON header padded to 8, buffers, widest dtypes first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[Tensor] = []
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in _DTYPE_NAMES or name in header:
            raise CheckpointError(
                f"cannot store tensor {name} of dtype {tensor.dtype}; rename it, or cast it to one of {[*_DTYPE_NAMES]}"
            )
        offsets = [at, at := at + tensor.nbytes]
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        parts.append(tensor.detach())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [_bytes(len(text).to_bytes(8, "little") + text), *parts]


def _plain(value: Any, where: str) -> Any:
    """Return `value` as JSON data, null for floats that are not finite. Raises CheckpointError for other types."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    kind = type(value).__name__
    raise CheckpointError(f"{where} is a {kind}, which JSON cannot hold; use str keys; str, int, float, bool or list")


def _manifest_json(sums: dict[str, dict[str, Any]]) -> bytes:
    return json.dumps({"format": FORMAT, "files": sums}, indent=1).encode()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _write(path: Path, parts: list[Tensor]) -> dict[str, Any]:
    """Write and fsync a new file, hashing in the same pass."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for tensor in parts:
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data  # copies only if needed
            for start in range(0, len(data), _CHUNK):
                chunk = data[start : start + _CHUNK]
                digest.update(chunk)
                while chunk:  # a write may be partial
                    chunk = chunk[os.write(fd, chunk) :]
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)
    return {"bytes": sum(tensor.nbytes for tensor in parts), "sha256": digest.hexdigest()}


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(fd)


def _prune(folder: Path, saved: Path, keep: int) -> None:
    """Rename for removal what is older than the newest `keep` valid ones up to `saved`, except the best one."""
    steps, losses = steps_in(folder, []), dict[Path, Any]()
    for path in steps:
        with suppress(Damage):
            losses[path] = open_checkpoint(path)[1]["meta"].get("val_loss")
    newest = [path for path in losses if steps[path] <= steps.get(saved, 0)][:keep]  # later steps are of another branch
    finite = {path: loss for path, loss in losses.items() if loss is not None}
    best = min(finite, key=lambda path: finite[path], default=None)  # the newest of equals
    for path in steps if len(newest) == keep else []:
        if steps[path] < steps[newest[-1]] and path != best:
            with suppress(OSError):  # a half-removed folder would look damaged
                os.rename(path, folder / f".del-{path.name}--{os.getpid()}")


def void_unfinished(folder: Path) -> None:
    """Remove what was written and not committed. A process of an older attempt, frozen there, can commit it no more."""
    _clean(folder)


def _clean(folder: Path, tag: str = "") -> None:
    """Remove the hidden folders of one save or of all; restore an .old one whose replacement is missing."""
    for name in names_in(folder, []):
        if (match := _HIDDEN.fullmatch(name)) and name.endswith(tag):
            with suppress(OSError):
                if match[1] == "old" and not os.path.lexists(folder / match[2]):
                    os.rename(folder / name, folder / match[2])
                else:
                    shutil.rmtree(folder / name)


def load(path: Path) -> StateDict:
    """Read one checkpoint folder into CPU tensors. Raises CheckpointError unless all sizes and checksums match.

    Each file is read once, into one buffer that its tensors share: the bytes used are the bytes that were checked.
    """
    try:
        return load_checked(path)
    except Damage as damage:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({damage}); remove it, or --resume its run folder to use an older one"
        ) from None


def find_all(path: Path) -> list[Path]:
    """Return the checkpoints of a run folder or its checkpoints folder, newest first, or `path` if it is one.

    Raises CheckpointError when there is none.
    """
    if (path / MANIFEST).is_file() or STEP_NAME.fullmatch(path.name):
        return [path]
    found = list(steps_in(path / "checkpoints" if (path / "checkpoints").is_dir() else path, []))
    if not found:
        raise CheckpointError(
            f"no checkpoint in {path}; give a run folder, such as runs/2026-..., or one of its step_*"
        )
    return found


def peek(path: Path) -> tuple[int, dict[str, Any]]:
    """Return a checkpoint's bytes and its meta; the tensors are not read. Raises CheckpointError if it is damaged."""
    try:
        sums, content = open_checkpoint(path)
    except Damage as damage:
        raise CheckpointError(f"checkpoint {path} is damaged ({damage})") from None
    return sum(entry["bytes"] for entry in sums.values()), content["meta"]


def load_checked(path: Path) -> StateDict:
    sums, content = open_checkpoint(path)
    model, optimizer, flat = (_tensors(_read(path / name, sums[name]), name) for name in TENSOR_FILES)
    with damage_of(STATE):
        rng: list[dict[str, Tensor]] = [{} for _ in range(content["ranks"])]
        for name, tensor in flat.items():
            rank, key = name.split(".", 1)
            rng[int(rank)][key] = tensor
        return StateDict(model, optimizer, rng, content["scaler"], content["meta"])


@contextmanager
def damage_of(file: str) -> Iterator[None]:
    """Turn an error from reading `file` into Damage."""
    try:
        yield
    except OSError as error:
        raise Damage(f"{file}: {'missing' if isinstance(error, _GONE) else error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise Damage(f"{file}: not as nanoray writes it") from None


def open_checkpoint(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Read a checkpoint's manifest and state.json, and compare every file's size; the tensors are not read."""
    with damage_of(MANIFEST):
        raw = (path / MANIFEST).read_bytes()
        content = json.loads(raw)
        version, sums = content["format"], content["files"]
        if version != FORMAT:
            raise Damage(f"{MANIFEST}: format {version!r}, but this nanoray reads format {FORMAT}")
        sums = {name: {"bytes": sums[name]["bytes"], "sha256": sums[name]["sha256"]} for name in (*TENSOR_FILES, STATE)}
        if _manifest_json(sums) != raw:
            raise ValueError("not byte for byte what these sums give")
    for name, entry in sums.items():
        with damage_of(name):
            if (size := (path / name).stat().st_size) != entry["bytes"]:
                raise Damage(f"{name}: {size} bytes instead of {entry['bytes']}")
    data = _read(path / STATE, sums[STATE])
    with damage_of(STATE):
        return sums, json.loads(data.numpy().tobytes())


def _read(path: Path, entry: dict[str, Any]) -> Tensor:
    """Read a whole file into a uint8 tensor, hashing in the same pass."""
    digest = hashlib.sha256()
    with damage_of(path.name), open(path, "rb", buffering=0) as file:
        data = torch.empty(entry["bytes"], dtype=torch.uint8)
        view, at = data.numpy().data, 0
        while got := file.readinto(view[at : at + _CHUNK]):
            digest.update(view[at : at + got])
            at += got
    if digest.hexdigest() != entry["sha256"]:
        raise Damage(f"{path.name}: sha256 differs")
    return data


def _tensors(data: Tensor, file: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file in memory, as views of `data`."""
    with damage_of(file):
        start = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
        header = json.loads(data[8:start].numpy().tobytes())
        header.pop("__metadata__")
        tensors: dict[str, Tensor] = {}
        for name, spec in header.items():
            begin, end = (start + offset for offset in spec["data_offsets"])
            tensors[name] = data[begin:end].view(_DTYPES[spec["dtype"]]).view(spec["shape"])
        return tensors


def names_in(folder: Path, notes: list[str]) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if not isinstance(error, _GONE):
            notes.append(f"cannot read {folder}: {error.strerror}")
        return []


def steps_in(folder: Path, notes: list[str]) -> dict[Path, int]:
    """Return the checkpoint folders and their steps, newest first, with .old ones whose step is missing."""
    names = names_in(folder, notes)
    hidden = [match for match in map(_HIDDEN.fullmatch, names) if match]
    steps = [name for name in names if STEP_NAME.fullmatch(name)]
    steps += [match[0] for match in hidden if match[1] == "old" and match[2] not in names]
    numbers = {folder / name: int(STEP_NAME.findall(name)[0]) for name in steps}
    return dict(sorted(numbers.items(), key=lambda item: -item[1]))
