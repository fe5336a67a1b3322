"""Names and shapes of the tensors in a file, without torch, and without running what the file says.

safetensors    8 bytes: the length of the header; the header, JSON; the tensors
torch.save     a pickle of everything but the numbers: torch reads it in a process of its own
               (torch_outline.py)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from nanoray.base.atomic import json_mapping
from nanoray.errors import ConfigError

T = TypeVar("T")
Shape = tuple[int, ...]
Places = Mapping[str, str]  # the weight_map of an index: tensor -> file
NO_INDEX: Places = MappingProxyType({})
_MAX_HEADER = 100 << 20  # bytes; the limit of the format
_POINTER = b"version https://git-lfs"
_TORCH_S = (
    600.0  # for torch to start and to read a large file of an old version, which is not mapped
)


class Outline(NamedTuple):
    """The tensors of a file, and what else is in it."""

    tensors: dict[str, Shape]
    # safetensors: the header's texts; torch.save: the entries that are no tensors of the model
    rest: dict[str, Any]


def outline_of(*paths: Path, places: Places = NO_INDEX) -> Outline:
    """Return the outline of the files of one model, of safetensors or torch.save.

    places: of their index, where they have one. Raises ConfigError.
    """
    outlines: dict[Path, Outline] = {}
    of_torch = []
    for path in paths:
        _refuse_pointer(path)
        if path.suffix == ".safetensors":
            outlines[path] = _outline_of_safetensors(path)
        else:
            of_torch.append((path, path.stat().st_mtime_ns))
    if of_torch:
        outlines |= _outlines_of_torch_save(tuple(of_torch))

    tensors: dict[str, Shape] = {}
    rest: dict[str, Any] = {}
    for path, outline in outlines.items():
        tensors |= in_place(outline.tensors, path, places)
        rest |= outline.rest
    return Outline(tensors, rest)


def in_place(tensors: Mapping[str, T], path: Path, places: Places) -> dict[str, T]:
    """Return the tensors of a file without stale ones: those that the index has in another file."""
    return {name: t for name, t in tensors.items() if places.get(name, path.name) == path.name}


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file of a folder of weights. Raises ConfigError."""
    try:
        return json_mapping(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"init_from: cannot read {path}: {error.strerror}; mend that") from None
    except ValueError as error:
        raise ConfigError(
            f"init_from: {path} is not the JSON of a model ({error}); copy it again"
        ) from None


def _refuse_pointer(path: Path) -> None:
    """Raise ConfigError for a file that git has not fetched: it contains its address only."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
    except OSError as error:
        raise ConfigError(f"init_from: cannot read {path}: {error.strerror}; mend that") from None
    if begin == _POINTER:
        raise ConfigError(
            f"init_from: {path} is a pointer of Git LFS and not the weights; run `git lfs pull` there"
        )


# ---- safetensors ---------------------------------------------------------------------------------


def _outline_of_safetensors(path: Path) -> Outline:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, _MAX_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json_mapping(file.read(length))
        rest = header.pop("__metadata__", {})
        tensors = {name: tuple(entry["shape"]) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"init_from: {path} is no safetensors file ({error}); copy it again"
        ) from None

    # A download that was cut off has its whole header.
    if 8 + length + end != size:
        raise ConfigError(
            f"init_from: {path} has {size} bytes instead of {8 + length + end}; copy it again"
        )
    return Outline(tensors, rest)


# ---- torch.save ----------------------------------------------------------------------------------


@cache
def _outlines_of_torch_save(files: tuple[tuple[Path, int], ...]) -> dict[Path, Outline]:
    """Return the outlines of files. Their times keep the answer for older ones from counting."""
    outlines = {}
    paths = [path for path, _ in files]
    for path, found in zip(paths, _read_with_torch(paths), strict=True):
        if "refused" in found:
            raise ConfigError(
                f"init_from: {path} is no file of weights that torch.save wrote "
                f"({found['refused']}); copy it again, or save only the model's tensors, and for "
                "nanoGPT model_args"
            )
        if found["tensors"] is None:
            raise ConfigError(
                f"init_from: {path} contains no names and tensors; give a state_dict, or nanoGPT's "
                "ckpt.pt"
            )
        tensors = {name: tuple(shape) for name, shape in found["tensors"].items()}
        outlines[path] = Outline(tensors, {"model_args": found["model_args"]})
    return outlines


def _read_with_torch(paths: list[Path]) -> list[dict[str, Any]]:
    """Return what torch_outline.py prints of each file; it starts once, which takes seconds."""
    script = Path(__file__).with_name("torch_outline.py")
    command = [sys.executable, str(script), *map(str, paths)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TORCH_S * len(paths), check=False
        )
    except subprocess.TimeoutExpired:
        return [{"refused": f"torch did not read it within {_TORCH_S:g} s"}] * len(paths)
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        reason = f"its reader ended with {done.returncode}: {last[:200]}"
        return [{"refused": reason}] * len(paths)
    return [json.loads(line) for line in done.stdout.splitlines()]
