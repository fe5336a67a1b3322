"""Make token files of numpy's arrays: `nanoray data import`.

Each array becomes a file in llm.c's format, with the same tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nanoray.data.dataset import CHUNK_BYTES
from nanoray.data.headers import llmc_header
from nanoray.data.splits import find_splits
from nanoray.data.token_folder import require_ids, tokenizer_of
from nanoray.data.tokenizer import GPT2Tokenizer, Tokenizer
from nanoray.errors import DataError
from nanoray.machine.atomic import new_folder, write_json


def import_arrays(folder: Path, out: Path) -> str:
    """Write the arrays of a folder as token files into a new folder; return a line on them.

    Their vocabulary is that of meta.json beside them, else GPT-2's. Raises DataError.
    """
    tokenizer = tokenizer_of(folder) or GPT2Tokenizer()
    arrays = sorted(folder.glob("*.npy"))
    if not arrays:
        raise DataError(f"{folder} has no .npy files; name a folder that has them")

    tokens = 0
    with new_folder(out) as folder:
        for path in arrays:
            tokens += _import_array(path, folder / f"{path.stem}.bin", tokenizer)
        find_splits(folder)
        write_json(folder / "meta.json", {"tokenizer": tokenizer.to_json()})
    return f"{out}: {len(arrays)} files, {tokens} tokens ({tokenizer.kind}, {tokenizer.dtype})"


def _import_array(path: Path, out: Path, tokenizer: Tokenizer) -> int:
    """Write an array as a token file, and return the number of its tokens."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is no array of numpy: {error}; write it with numpy.save") from None
    if array.dtype.kind not in "ui" or array.ndim != 1:
        raise DataError(
            f"{path} is an array of {array.dtype} and shape {array.shape}, and tokens are whole "
            "numbers in one dimension; write it again"
        )
    step = CHUNK_BYTES // 8
    with out.open("wb") as file:
        file.write(llmc_header(tokenizer.dtype, len(array)))
        for first in range(0, len(array), step):
            ids = array[first : first + step]
            require_ids(ids, tokenizer.vocab_size, path, first)
            file.write(ids.astype(tokenizer.dtype).tobytes())
    return len(array)
