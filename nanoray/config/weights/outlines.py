"""Names and shapes of the tensors in a file, without torch, and without running what the file says.

    safetensors    8 bytes: the length of the header; the header, JSON; the tensors
    torch.save     a zip file whose data.pkl is a pickle of everything but the numbers; before torch
                   1.6, pickles one behind the other, then the numbers

pickles.py reads the pickle.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

from nanoray.base.atomic import json_mapping
from nanoray.config.pickle_machine import Refused
from nanoray.config.weights.pickles import Shape, TensorOutline, outline_of_pickle
from nanoray.errors import ConfigError

_MAX_HEADER = 100 << 20  # bytes; the limit of the format
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a file of an old torch.save
_POINTER = b"version https://git-lfs"


class Outline(NamedTuple):
    """The tensors of a file, and what else is in it."""

    tensors: dict[str, Shape]
    # safetensors: the header's texts; torch.save: the entries that are no tensors of the model
    rest: dict[str, Any]


def outline_of(path: Path) -> Outline:
    """Return the outline of a file of safetensors or of torch.save. Raises ConfigError."""
    _refuse_pointer(path)
    if path.suffix == ".safetensors":
        return _outline_of_safetensors(path)
    return _outline_of_torch_save(path)


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


def _outline_of_torch_save(path: Path) -> Outline:
    try:
        if zipfile.is_zipfile(path):
            content = _read_zip(path)
        else:
            with path.open("rb") as file:
                content = _read_legacy(file)
    except (OSError, zipfile.BadZipFile, Refused) as error:
        raise ConfigError(
            f"init_from: {path} is no file of weights that torch.save wrote ({error}); copy it "
            "again, or save only the model's tensors, and for nanoGPT model_args"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"init_from: {path} contains no names and tensors; give a state_dict, or nanoGPT's ckpt.pt"
        )

    # nanoGPT keeps the model beside other entries. Otherwise the file is the model's state_dict.
    rest = dict(content)
    model = content
    if isinstance(content.get("model"), dict):
        model = rest.pop("model")
    tensors = {}
    for name, value in model.items():
        if isinstance(value, TensorOutline):
            tensors[str(name)] = value.shape
    return Outline(tensors, rest)


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise Refused("the zip file has no data.pkl")
        with archive.open(names[0]) as file:
            return outline_of_pickle(io.BytesIO(file.read()))


def _read_legacy(file: IO[bytes]) -> Any:
    if outline_of_pickle(file) != _LEGACY_MAGIC:
        raise Refused("it does not begin as torch.save does")
    # The version of the format and the sizes of C's types come before the content.
    for _ in range(2):
        outline_of_pickle(file)
    return outline_of_pickle(file)
