"""Files of tokens: llm.c's header, or bare numbers of the dtype that meta.json states.

llm.c           256 int32: magic, version, count, zeros; then as many uint16 or uint32 as the count says
bare numbers    numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanoray.errors import DataError

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int32", "int64")  # that meta.json may name
LLMC_HEADER_BYTES = 256 * 4

# llm.c's kinds of token files: (magic, version) -> dtype, vocabulary
LLMC_TOKENS = {
    (20240520, 1): ("uint16", "gpt2"),
    (20240801, 7): ("uint32", "llama3"),
}


@dataclass(frozen=True)
class Header:
    """Where the tokens of a file are, and what they are."""

    dtype: str
    offset: int  # bytes before the first token
    tokens: int
    vocabulary: str = ""  # gpt2 | llama3, of llm.c's header


def read_header(path: Path, dtype: str | None) -> Header:
    """Return what `path` contains. Raises DataError for a file that cannot be read for certain.

    dtype: of bare numbers, where meta.json states it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(12)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions") from None

    header = _read_llmc(path, start, size)
    if header is not None:
        return header
    if dtype is None:
        raise DataError(
            f"nothing says what the numbers of {path} are; write {path.parent / 'meta.json'}, for "
            'example {"dtype": "uint16", "tokenizer": {"kind": "gpt2"}} for GPT-2\'s tokens as nanoGPT '
            'writes them, or {"dtype": "uint32", "vocab_size": 100277}'
        )
    itemsize = np.dtype(dtype).itemsize
    if size % itemsize:
        raise DataError(
            f"{path} has {size} bytes, not a multiple of {itemsize} ({dtype}); copy it again"
        )
    return Header(dtype, 0, size // itemsize)


def _read_llmc(path: Path, start: bytes, size: int) -> Header | None:
    """Return what llm.c's header says; None for a file without one."""
    if len(start) < 12:
        return None
    magic, version, count = np.frombuffer(start, "<i4").tolist()
    if magic not in [known for known, _ in LLMC_TOKENS]:
        return None
    if (magic, version) not in LLMC_TOKENS:
        raise DataError(
            f"{path} has llm.c's magic {magic} with version {version}, which nanoray does not read; "
            "write it again with llm.c's scripts"
        )

    # The size must agree: some tools write this header before tokens of another width.
    dtype, vocabulary = LLMC_TOKENS[magic, version]
    expected = LLMC_HEADER_BYTES + count * np.dtype(dtype).itemsize
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes, but its header counts {count} tokens of {dtype}, which are "
            f"{expected} bytes; the file is cut off, or its tokens are of another type: copy or "
            "write it again"
        )
    return Header(dtype, LLMC_HEADER_BYTES, count, vocabulary)


def llmc_header(dtype: str, tokens: int) -> bytes:
    """Return llm.c's header for a file of uint16 or uint32 tokens."""
    for (magic, version), (known, _) in LLMC_TOKENS.items():
        if known == dtype:
            header = np.zeros(LLMC_HEADER_BYTES // 4, "<i4")
            header[:3] = magic, version, tokens
            return header.tobytes()
    raise AssertionError(f"llm.c has no files of {dtype}")
