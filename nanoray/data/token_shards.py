"""Where the tokens of one file of a stream are: by its header, else by meta.json beside it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from nanoray.data.headers import DTYPES, Header, Stated, read_header, read_own_header
from nanoray.errors import DataError


def read_token_shard(path: Path) -> Header:
    """Return the type, number and place of a file's tokens.

    Raises DataError for a file that neither its header nor meta.json describes: a stream reads files
    from anywhere, so nanoGPT's uint16 is not assumed.
    """
    header = read_own_header(path)
    if header:
        return header
    meta = path.parent / "meta.json"
    dtype = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        dtype = json.loads(meta.read_bytes())["dtype"]
    if dtype not in DTYPES:
        raise DataError(
            f"{path} has no header of token files, and {meta} gives no dtype; write there "
            '{"dtype": "uint16"} or {"dtype": "uint32"}, whichever the tokens are'
        )
    return read_header(path, Stated(dtype))
