"""Files of tensors: written and hashed in one pass, read and checked in one pass.

The format is safetensors. A file is: length of the header (8 bytes), a JSON header padded to 8, the
tensors' buffers with the widest types first.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoray.checkpoint.manifest import Damage
from nanoray.errors import CheckpointError
from nanoray.machine.tensor_memory import bytes_of

GONE = (FileNotFoundError, NotADirectoryError)
CHUNK = 8 << 20  # bytes hashed and written at a time
DIRECT_SIZE = 64 << 20  # bytes of a file that is written past the page cache
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


def as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def write_file(path: Path, parts: list[Tensor]) -> dict[str, Any]:
    """Write and fsync a new file, hashing in the same pass."""
    digest = hashlib.sha256()
    size = sum(tensor.nbytes for tensor in parts)
    # O_EXCL: a file of this name would belong to another writer.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        chunks = _chunks(parts)
        is_direct = size >= DIRECT_SIZE and set_direct(fd, True)
        if is_direct:
            chunks = _aligned(chunks)
        for chunk in chunks:
            digest.update(chunk)
            # The end of a file is no full block.
            if is_direct and len(chunk) % CHUNK:
                set_direct(fd, False)
            while chunk:  # a write may be partial
                chunk = chunk[_write(fd, chunk, is_direct) :]
        # Without it a machine that loses power may keep the name and lose the data.
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _chunks(parts: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of tensors, at most CHUNK at a time."""
    for tensor in parts:
        # Each of these steps copies only if it must.
        data = bytes_of(tensor.cpu()).numpy().data
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]


def _aligned(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes, CHUNK at a time and in memory that begins a page.

    Each is valid until the next one is asked for; only the last may be shorter.
    """
    memory = memoryview(mmap.mmap(-1, CHUNK))
    buffer = np.frombuffer(memory, dtype=np.uint8)
    filled = 0
    for chunk in chunks:
        data = np.frombuffer(chunk, dtype=np.uint8)
        while len(data):
            count = min(CHUNK - filled, len(data))
            buffer[filled : filled + count] = data[:count]
            data = data[count:]
            filled += count
            if filled == CHUNK:
                yield memory
                filled = 0
    if filled:
        yield memory[:filled]


def set_direct(fd: int, wanted: bool) -> bool:
    """Let writes of a file go to the disk from this process's memory, or through the page cache.

    Past the page cache they leave training its cores: nothing is copied in the kernel, and no thread
    of it writes later. The cache keeps what is read again, such as the dataset. Returns whether the
    file system can.
    """
    flag = getattr(os, "O_DIRECT", 0)  # Linux has it
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~flag
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (flag if wanted else 0))
    except OSError:
        return False
    return bool(flag)


def _write(fd: int, chunk: memoryview, is_direct: bool) -> int:
    """Write bytes, and return how many were written."""
    try:
        return os.write(fd, chunk)
    except OSError as error:
        if error.errno != errno.EINVAL or not is_direct:
            raise
    # A file system may refuse direct writes only now, or those of blocks of this size.
    set_direct(fd, False)
    return os.write(fd, chunk)


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
