"""Atomic, verified checkpoints: safetensors and JSON, never pickle, nothing of process groups.

    RUN/checkpoints/step_00000200/
        model.safetensors  optimizer.safetensors  rng.safetensors  state.json
        manifest.json      format version; bytes and sha256 of each file above; written last

`save` commits by a rename, so a process killed at any instant leaves the old set of checkpoints or the new one. Readers
trust no `latest` pointer: the newest folder whose sums agree counts, because no format notices a flipped bit by itself.
Hidden names are what a kill leaves behind: .tmp-step_… was being written and .del-step_… removed, .old-step_… was set
aside while the same step was saved again (and counts as long as that step is missing).
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoray.errors import CheckpointError

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")

_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(tmp|old|del)-(step_\d{8,})-[\w.]*-\d+")
_RUN = re.compile(r"\d{4}-\d{2}-\d{2}_\d{6}_.+")
_GONE = (FileNotFoundError, NotADirectoryError)
_CHUNK = 8 << 20  # bytes hashed and written at a time
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass
class TrainState:
    """What a resume needs to go on bit for bit. `meta` holds `step` and anything else that is JSON."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # flat names: "exp_avg.<param>", "step.<param>"
    rng: list[dict[str, Tensor]]  # per rank: the generators' states as bytes
    scaler: dict[str, float] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class Resume:
    """Where a run goes on from. `notes`: one line about each newer checkpoint that was passed over."""

    run_dir: Path
    path: Path
    state: TrainState
    notes: list[str]


class _Damage(Exception):
    """Why a folder is no valid checkpoint: "FILE: reason"."""


def save(
    folder: Path, state: TrainState, keep: int, attempt: str = "", fence: Callable[[], None] | None = None
) -> Path:
    """Write `folder`/step_XXXXXXXX, then prune to the newest `keep` and the one of lowest val_loss. (rank 0 only)

    Tensors may lie on any device and need not be contiguous; at most one at a time is copied, and none may change
    meanwhile. hashlib and os.write release the GIL, so a thread beside the training loop may call this. One process
    saves to a folder at a time: hidden leftovers of others are taken for dead. NaN and infinity in `meta` become null.
    `fence` is called before the folder is touched and right before the commit; it raises when this process may not
    write there any more. Raises CheckpointError when it cannot; then older checkpoints are as they were, and nothing
    half-written remains.
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
    may_write()  # what lies there hidden may be another's, who writes now
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)  # before the space is measured: a killed save leaves gigabytes
        disk, need = os.statvfs(folder), sum(tensor.nbytes for parts in files.values() for tensor in parts)
        have = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and have < need + (1 << 16):  # manifest and rounding; some FUSE mounts report no blocks
            raise OSError(errno.ENOSPC, f"disk full: need {need / 1e6:.2f} MB, have {have / 1e6:.2f} MB", str(folder))
        temp.mkdir()
        sums = {file: _write(temp / file, parts) for file, parts in files.items()}
        _write(temp / MANIFEST, [_bytes(_manifest_json(sums))])
        _fsync_folder(temp)
        may_write()
        if final.is_dir():
            os.rename(final, aside)
        os.rename(temp, final)
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
    """`value` as JSON holds it. Refuses what would come back as something else; floats that are not finite: null."""
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
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data  # copies only if it must
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(fd)


def _prune(folder: Path, saved: Path, keep: int) -> None:
    """Rename for removal what is older than the newest `keep` sound ones up to `saved`, except the best one."""
    steps, losses = _steps(folder, []), dict[Path, Any]()
    for path in steps:
        with suppress(_Damage):
            losses[path] = _open(path)[1]["meta"].get("val_loss")
    newest = [path for path in losses if steps[path] <= steps.get(saved, 0)][:keep]  # a later step is another branch
    finite = {path: loss for path, loss in losses.items() if loss is not None}
    best = min(finite, key=lambda path: finite[path], default=None)  # of equals the newest
    for path in steps if len(newest) == keep else []:
        if steps[path] < steps[newest[-1]] and path != best:
            with suppress(OSError):  # renamed, because half removed it would look damaged
                os.rename(path, folder / f".del-{path.name}--{os.getpid()}")


def _clean(folder: Path, tag: str = "") -> None:
    """Remove hidden leftovers, of one save or of all; put back what was set aside for a replacement that never came."""
    for name in _names(folder, []):
        if (match := _HIDDEN.fullmatch(name)) and name.endswith(tag):
            with suppress(OSError):
                if match[1] == "old" and not os.path.lexists(folder / match[2]):
                    os.rename(folder / name, folder / match[2])
                else:
                    shutil.rmtree(folder / name)


def load(path: Path) -> TrainState:
    """Read one checkpoint folder into CPU tensors. Raises CheckpointError unless every file's size and sum agree.

    Each file is read once, into one buffer that its tensors share: the bytes used are the bytes that were checked.
    """
    try:
        return _load(path)
    except _Damage as damage:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({damage}); remove it, or --resume its run folder to use an older one"
        ) from None


def find_all(path: Path) -> list[Path]:
    """Return the checkpoints of a run's folder, of its checkpoints folder, or the one that `path` is, newest first.

    Raises CheckpointError when there is none.
    """
    if (path / MANIFEST).is_file() or _STEP.fullmatch(path.name):
        return [path]
    found = list(_steps(path / "checkpoints" if (path / "checkpoints").is_dir() else path, []))
    if not found:
        raise CheckpointError(
            f"no checkpoint in {path}; give a run folder, such as runs/2026-..., or one of its step_*"
        )
    return found


def peek(path: Path) -> tuple[int, dict[str, Any]]:
    """Return a checkpoint's bytes and its meta; the tensors are not read. Raises CheckpointError for a damaged one."""
    try:
        sums, content = _open(path)
    except _Damage as damage:
        raise CheckpointError(f"checkpoint {path} is damaged ({damage})") from None
    return sum(entry["bytes"] for entry in sums.values()), content["meta"]


def newest_valid(folder: Path) -> tuple[Resume | None, list[str]]:
    """Load the newest valid checkpoint of a checkpoints folder, with notes on damaged newer ones. Changes nothing."""
    notes: list[str] = []
    found = None
    for path in _steps(folder, notes):
        try:
            found = Resume(_run_dir(folder), path, _load(path), notes)
            break
        except _Damage as damage:
            if os.path.lexists(path):  # else it was pruned meanwhile
                notes.append(f"checkpoint {path.name} is damaged ({damage})")
    used = f"using {found.path.name}" if found else "no older one is valid"
    notes[:] = [f"{note}; {used}" for note in notes]
    return found, notes


def _load(path: Path) -> TrainState:
    sums, content = _open(path)
    model, optimizer, flat = (_tensors(_read(path / name, sums[name]), name) for name in TENSOR_FILES)
    with _damage_of(STATE):
        rng: list[dict[str, Tensor]] = [{} for _ in range(content["ranks"])]
        for name, tensor in flat.items():
            rank, key = name.split(".", 1)
            rng[int(rank)][key] = tensor
        return TrainState(model, optimizer, rng, content["scaler"], content["meta"])


@contextmanager
def _damage_of(file: str) -> Iterator[None]:
    """Turn whatever reading `file` raises into _Damage."""
    try:
        yield
    except OSError as error:
        raise _Damage(f"{file}: {'missing' if isinstance(error, _GONE) else error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise _Damage(f"{file}: not as nanoray writes it") from None


def _open(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Read a checkpoint's manifest and state.json, and compare every file's size; the tensors are not read."""
    with _damage_of(MANIFEST):
        raw = (path / MANIFEST).read_bytes()
        content = json.loads(raw)
        version, sums = content["format"], content["files"]
        if version != FORMAT:
            raise _Damage(f"{MANIFEST}: format {version!r}, but this nanoray reads format {FORMAT}")
        sums = {name: {"bytes": sums[name]["bytes"], "sha256": sums[name]["sha256"]} for name in (*TENSOR_FILES, STATE)}
        if _manifest_json(sums) != raw:
            raise ValueError("not byte for byte what these sums give")
    for name, entry in sums.items():
        with _damage_of(name):
            if (size := (path / name).stat().st_size) != entry["bytes"]:
                raise _Damage(f"{name}: {size} bytes instead of {entry['bytes']}")
    data = _read(path / STATE, sums[STATE])
    with _damage_of(STATE):
        return sums, json.loads(data.numpy().tobytes())


def _read(path: Path, entry: dict[str, Any]) -> Tensor:
    """Read a whole file into a uint8 tensor, hashing in the same pass."""
    digest = hashlib.sha256()
    with _damage_of(path.name), open(path, "rb", buffering=0) as file:
        data = torch.empty(entry["bytes"], dtype=torch.uint8)
        view, at = data.numpy().data, 0
        while got := file.readinto(view[at : at + _CHUNK]):
            digest.update(view[at : at + got])
            at += got
    if digest.hexdigest() != entry["sha256"]:
        raise _Damage(f"{path.name}: sha256 differs")
    return data


def _tensors(data: Tensor, file: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file in memory, as views of it."""
    with _damage_of(file):
        start = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
        header = json.loads(data[8:start].numpy().tobytes())
        header.pop("__metadata__")
        tensors: dict[str, Tensor] = {}
        for name, spec in header.items():
            begin, end = (start + offset for offset in spec["data_offsets"])
            tensors[name] = data[begin:end].view(_DTYPES[spec["dtype"]]).view(spec["shape"])
        return tensors


def _names(folder: Path, notes: list[str]) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if not isinstance(error, _GONE):
            notes.append(f"cannot read {folder}: {error.strerror}")
        return []


def _steps(folder: Path, notes: list[str]) -> dict[Path, int]:
    """The checkpoint folders by name with their steps, newest first; one set aside counts while its step is missing."""
    names = _names(folder, notes)
    hidden = [match for match in map(_HIDDEN.fullmatch, names) if match]
    steps = [name for name in names if _STEP.fullmatch(name)]
    steps += [match[0] for match in hidden if match[1] == "old" and match[2] not in names]
    numbers = {folder / name: int(_STEP.findall(name)[0]) for name in steps}
    return dict(sorted(numbers.items(), key=lambda item: -item[1]))


def find_run(out_dir: Path, resume: str, model_shape: dict[str, Any]) -> Resume | None:
    """Resolve `--resume`: none, auto (the newest run of `out_dir` that fits), or the path of a run or checkpoint.

    Returns None for none, and for auto when no run fits. Raises CheckpointError when a path holds no valid checkpoint
    or one of another shape, and when auto meets only damaged ones: starting afresh would hide the loss.
    """
    if resume in ("none", "auto"):
        return _find_newest(out_dir, model_shape) if resume == "auto" else None
    path = Path(os.path.abspath(Path(resume).expanduser()))
    notes: list[str] = []
    found: Resume | None
    if (path / MANIFEST).is_file() or (_STEP.fullmatch(path.name) and path.is_dir()):
        found = Resume(_run_dir(path.parent), path, load(path), notes)
    else:
        found, notes = newest_valid(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if not found:
        raise CheckpointError(
            f"no valid checkpoint in {path}: looked for {MANIFEST}, step_*/{MANIFEST} and checkpoints/step_*/{MANIFEST}"
            f"{''.join(f'; {note}' for note in notes)}; give --resume a run folder or one of its step_* folders"
        )
    check_shape(found.state, model_shape, f"checkpoint {found.path}")
    return found


def _run_dir(folder: Path) -> Path:
    return folder.parent if folder.name == "checkpoints" else folder


def _find_newest(out_dir: Path, model_shape: dict[str, Any]) -> Resume | None:
    notes: list[str] = []
    runs = [out_dir / name for name in _names(out_dir, notes) if _RUN.fullmatch(name)]
    damaged = bool(notes)
    runs.sort(key=lambda run: [p.zfill(20) if p.isdigit() else p for p in re.split(r"(\d+)", run.name)])  # -2 < -10
    for run_dir in reversed(runs):
        other = ""
        for path in reversed(_steps(run_dir / "checkpoints", [])):  # the shape first: it costs no reading of gigabytes
            with suppress(_Damage):
                other = _difference(_open(path)[1]["meta"], model_shape)
        if other:
            notes.append(f"run {run_dir.name} is of another model ({other}); passed over")
            continue
        found, about = newest_valid(run_dir / "checkpoints")
        notes += [f"run {run_dir.name}: {note}" for note in about]
        damaged |= bool(about)
        if found:
            return replace(found, notes=notes)
    if damaged:
        raise CheckpointError(f"no valid checkpoint in {out_dir}: {'; '.join(notes)}; remove these, or --resume none")
    return None


def _difference(meta: dict[str, Any], model_shape: dict[str, Any]) -> str:
    have = {**(meta.get("config") or {}), **(meta.get("model_shape") or {})}
    wrong = [key for key, value in model_shape.items() if have.get(key) != value]
    return ", ".join(f"{key} is {have.get(key, 'unknown')} there and {model_shape[key]} here" for key in wrong)


def check_shape(state: TrainState, model_shape: dict[str, Any], where: str = "the checkpoint") -> None:
    """Raise CheckpointError when the state is of a model of another shape."""
    if wrong := _difference(state.meta, model_shape):
        raise CheckpointError(f"{where} is of another model: {wrong}; give that run's values, or --resume none")
