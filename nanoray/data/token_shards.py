"""Files of tokens with a header, as llm.c and modded-nanogpt read them.

int32 × 256   magic, version, number of tokens, zeros
tokens        uint16 (magic 20240520, version 1) or uint32 (magic 20240801, version 7)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanoray.errors import DataError

HEADER = 256  # int32 numbers
HEADER_BYTES = 4 * HEADER
# (magic, version) of the files of each dtype
FORMATS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}


class TokenShard(NamedTuple):
    """Where the tokens of a file are."""

    dtype: str
    offset: int  # bytes before the first token
    tokens: int


def header_of(dtype: str, count: int) -> bytes:
    """Return the header of a file with `count` tokens."""
    header = np.zeros(HEADER, "<i4")
    header[:2] = FORMATS[dtype]
    header[2] = count
    return header.tobytes()


def read_token_shard(path: Path) -> TokenShard:
    """Return where the tokens of a file are: by its header, else by meta.json in its folder.

    Raises DataError for a file that neither of them describes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header = np.frombuffer(
            file.read(HEADER_BYTES), "<i4", HEADER if size >= HEADER_BYTES else 0
        )
    for dtype, (magic, version) in FORMATS.items():
        if len(header) and header[0] == magic:
            count = int(header[2])
            expected = HEADER_BYTES + count * np.dtype(dtype).itemsize
            if header[1] != version or size != expected:
                raise DataError(
                    f"{path} has {size} bytes, but its header (version {header[1]}) says {count} "
                    f"tokens of {dtype}, which are {expected} bytes; copy or prepare it again"
                )
            return TokenShard(dtype, HEADER_BYTES, count)

    # Without a header nothing in the file says how wide a token is.
    meta = path.parent / "meta.json"
    try:
        dtype = json.loads(meta.read_bytes())["dtype"]
        itemsize = np.dtype({"uint16": "uint16", "uint32": "uint32"}[dtype]).itemsize
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(
            f"{path} has no header of token files, and {meta} gives no dtype; write there "
            '{"dtype": "uint16"} or {"dtype": "uint32"}, whichever the tokens are'
        ) from None
    if size % itemsize:
        raise DataError(f"{path} has {size} bytes, not a multiple of {itemsize} ({dtype})")
    return TokenShard(dtype, 0, size // itemsize)
