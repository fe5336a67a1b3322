"""Names and shapes of the tensors in a file, without torch, and without running what the file says.

    safetensors    8 bytes: the length of the header; the header, JSON; the tensors
    torch.save     a zip file whose data.pkl is a pickle of everything but the numbers; before torch
                   1.6, pickles one behind the other, then the numbers

A pickle can name any function, to be called when it is read. Here such names become outlines or
inert objects, and a name that `torch.load(weights_only=True)` refuses is refused as well.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from nanoray.errors import ConfigError

Shape = tuple[int, ...]
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
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"init_from: cannot read {path}: {error.strerror}; mend that") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"init_from: {path} is not JSON ({error}); copy it again") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"init_from: {path} contains a {type(values).__name__} and no mapping; copy it again"
        )
    return values


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
            header = json.loads(file.read(length))
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


class _Tensor(NamedTuple):
    """A tensor of which only the shape is known."""

    shape: Shape


class _Inert:
    """Stands for an object that does not matter here, such as a type of storage."""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _rebuild_tensor(storage: Any, offset: Any, size: Any, *more: Any) -> _Tensor:
    return _Tensor(tuple(int(n) for n in size))


def _rebuild_parameter(data: Any, *more: Any) -> Any:
    return data


_MEANING: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,  # as Python 2 wrote it
}


class _Outliner(pickle.Unpickler):
    """Unpickles without importing anything, and so without calling what the file names."""

    def persistent_load(self, pid: Any) -> None:
        """Stand for a storage, whose numbers are not read."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name. Raises UnpicklingError for names outside of torch."""
        if (module, name) in _MEANING:
            return _MEANING[module, name]
        if module == "torch" or module.startswith("torch."):
            return _Inert
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is code")


def _outline_of_torch_save(path: Path) -> Outline:
    try:
        if zipfile.is_zipfile(path):
            content = _read_zip(path)
        else:
            with path.open("rb") as file:
                content = _read_legacy(file)
    except Exception as error:  # a pickle that is cut off raises almost anything
        raise ConfigError(
            f"init_from: {path} is no file of weights that torch.save wrote ({error}); copy it "
            "again, or save only the model's tensors, and for nanoGPT model_args"
        ) from None
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"init_from: {path} contains no names and tensors; give a state_dict, or nanoGPT's ckpt.pt"
        )

    # nanoGPT keeps the model beside other entries. Otherwise the file is the model's state_dict.
    rest = dict(content)
    model = content
    if isinstance(content.get("model"), Mapping):
        model = rest.pop("model")
    tensors = {}
    for name, value in model.items():
        if isinstance(value, _Tensor):
            tensors[str(name)] = value.shape
    return Outline(tensors, rest)


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("the zip file has no data.pkl")
        with archive.open(names[0]) as file:
            return _Outliner(file).load()


def _read_legacy(file: IO[bytes]) -> Any:
    if _Outliner(file).load() != _LEGACY_MAGIC:
        raise ValueError("it does not begin as torch.save does")
    # The version of the format and the sizes of C's types come before the content.
    for _ in range(2):
        _Outliner(file).load()
    return _Outliner(file).load()
