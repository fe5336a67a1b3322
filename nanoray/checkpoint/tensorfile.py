"""Files of tensors: written and hashed in one pass, read and checked in one pass.

The format is safetensors. A file is: length of the header (8 bytes), a JSON header padded to 8, the
tensors' buffers with the widest types first.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoray.checkpoint.manifest import Damage
from nanoray.errors import CheckpointError
from nanoray.mesh.memory import bytes_of

GONE = (FileNotFoundError, NotADirectoryError)
CHUNK = 8 << 20  # bytes hashed and written at a time
DTYPES = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@contextmanager
def damage_of(file: str) -> Iterator[None]:
    """Turn an error from reading `file` into Damage."""
    try:
        yield
    except GONE:
        raise Damage(f"{file}: missing") from None
    except OSError as error:
        raise Damage(f"{file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise Damage(f"{file}: not as nanoray writes it") from None


def layout(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return the parts of a safetensors file: length and header as bytes, then the tensors.

    Raises CheckpointError for a dtype that the format lacks.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[Tensor] = []
    offset = 0
    # The widest types first, so that every buffer is aligned.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in DTYPE_NAMES or name in header:
            raise CheckpointError(
                f"cannot store tensor {name} of dtype {tensor.dtype}; rename it, or cast it to one "
                f"of {list(DTYPE_NAMES)}"
            )
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
        parts.append(tensor.detach())
    # Padded with spaces, which JSON ignores, so that the first buffer is aligned.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [as_bytes(len(text).to_bytes(8, "little") + text), *parts]


def plain(value: Any, where: str) -> Any:
    """Return `value` as JSON data, with null for floats that are not finite.

    Raises CheckpointError for other types.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    kind = type(value).__name__
    raise CheckpointError(
        f"{where} is a {kind}, which JSON cannot hold; use str keys; str, int, float, bool or list"
    )


def as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def write_file(path: Path, parts: list[Tensor]) -> dict[str, Any]:
    """Write and fsync a new file, hashing in the same pass."""
    digest = hashlib.sha256()
    # O_EXCL: a file of this name would belong to another writer.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for tensor in parts:
            # Each of these steps copies only if it must.
            data = bytes_of(tensor.cpu()).numpy().data
            for start in range(0, len(data), CHUNK):
                chunk = data[start : start + CHUNK]
                digest.update(chunk)
                while chunk:  # a write may be partial
                    chunk = chunk[os.write(fd, chunk) :]
        # Without it a machine that loses power may keep the name and lose the data.
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)
    return {"bytes": sum(tensor.nbytes for tensor in parts), "sha256": digest.hexdigest()}


def fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def read_file(path: Path, entry: dict[str, Any]) -> Tensor:
    """Read a whole file into a uint8 tensor, hashing in the same pass."""
    digest = hashlib.sha256()
    with damage_of(path.name), open(path, "rb", buffering=0) as file:
        # One buffer for the whole file; tensors become views of it, without a copy.
        data = torch.empty(entry["bytes"], dtype=torch.uint8)
        view = data.numpy().data
        start = 0
        while count := file.readinto(view[start : start + CHUNK]):
            digest.update(view[start : start + count])
            start += count
    # A shorter file leaves the rest of the buffer undefined, and its checksum differs.
    if digest.hexdigest() != entry["sha256"]:
        raise Damage(f"{path.name}: sha256 differs")
    return data


def tensors_in(data: Tensor, file: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file in memory, as views of `data`."""
    with damage_of(file):
        header_end = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
        header = json.loads(data[8:header_end].numpy().tobytes())
        header.pop("__metadata__")
        buffers = data[header_end:]
        tensors: dict[str, Tensor] = {}
        for name, spec in header.items():
            start, end = spec["data_offsets"]
            tensors[name] = buffers[start:end].view(DTYPES[spec["dtype"]]).view(spec["shape"])
        return tensors
