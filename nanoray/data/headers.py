"""Recognise files of tokens by their content: bare numbers, llm.c's header, or numpy's.

                  first bytes             then
    llm.c         256 int32: magic,       as many uint16 or uint32 as the third int32 says
                  version, count
    numpy         b"\\x93NUMPY", a dict   a 1-d array of the dict's dtype
    bare numbers  -                       numbers; meta.json says which, or nanoGPT's uint16

A file is never read as uint16 because nothing is known about it. nanoGPT's own files say nothing
either, so those are read as uint16 only if their first bytes look like that and like nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nanoray.errors import DataError

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int32", "int64")  # that meta.json may name
NANOGPT_DTYPE = "uint16"  # of train.bin and val.bin without another word

LLMC_HEADER_BYTES = 256 * 4
_NUMPY_MAGIC = b"\x93NUMPY"
_SAMPLE_BYTES = 1 << 20  # a multiple of 8
# No vocabulary is larger. So the upper halves of 32-bit ids are small.
_LARGEST_VOCABULARY = 1 << 20
_ENOUGH = 32  # bytes; fewer show nothing


@dataclass(frozen=True)
class Header:
    """What a file says about its tokens."""

    kind: str  # bare | llm.c | numpy
    dtype: str
    offset: int  # bytes before the first token
    tokens: int
    vocabulary: str = ""  # gpt2 | llama3, if the header says so


@dataclass(frozen=True)
class Stated:
    """What meta.json or meta.pkl says about the files beside it; None where it says nothing."""

    dtype: str | None = None
    vocab_size: int | None = None
    in_json: bool = False  # there is a meta.json


# llm.c's kinds of token files: (magic, version) -> dtype, vocabulary
LLMC_TOKENS = {
    (20240520, 1): ("uint16", "gpt2"),
    (20240801, 7): ("uint32", "llama3"),
}
# Its files that hold no tokens, and begin in the same way
_LLMC_OTHERS = {
    20240326: "a model",
    20240327: "a state for debugging",
    20240328: "a tokenizer",
    20240522: "questions of an evaluation",
    20240527: "the state of a training run",
}


def read_header(path: Path, stated: Stated) -> Header:
    """Return what `path` contains. Raises DataError for a file that cannot be read for certain."""
    header = read_own_header(path)
    if header is None:
        header = _read_bare(path, stated)
    if stated.dtype and stated.dtype != header.dtype:
        raise DataError(
            f"{path} has {header.dtype} by its own header ({header.kind}), but meta.json says "
            f"{stated.dtype}; drop dtype from meta.json"
        )
    return header


def read_own_header(path: Path) -> Header | None:
    """Return what a file's header says; None for bare numbers. Raises DataError as `read_header`."""
    with _open(path) as file:
        size = path.stat().st_size
        start = file.read(LLMC_HEADER_BYTES)
        if start.startswith(_NUMPY_MAGIC):
            return _read_numpy(path, file, size)
        if path.suffix == ".npy":
            raise DataError(
                f"{path} has no header of numpy, in spite of its name; if it holds bare numbers, "
                "name it .bin and write meta.json with their dtype and vocab_size"
            )
        return _read_llmc(path, start, size)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file. Raises DataError when it cannot be opened or read."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions") from None


# llm.c.


def _read_llmc(path: Path, start: bytes, size: int) -> Header | None:
    """Return what llm.c's header says; None for a file without one."""
    if len(start) < 12:
        return None
    magic, version, count = np.frombuffer(start[:12], "<i4").tolist()
    if magic in _LLMC_OTHERS:
        raise DataError(
            f"{path} is {_LLMC_OTHERS[magic]} of llm.c (magic {magic}), not tokens; leave it out"
        )
    versions = [known for known in LLMC_TOKENS if known[0] == magic]
    if not versions:
        return None
    if (magic, version) not in LLMC_TOKENS:
        raise DataError(
            f"{path} has llm.c's magic {magic} with version {version}, but nanoray reads version "
            f"{versions[0][1]}; write it again with llm.c's scripts"
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
    return Header("llm.c", dtype, LLMC_HEADER_BYTES, count, vocabulary)


def llmc_header(dtype: str, tokens: int) -> bytes:
    """Return llm.c's header for a file of uint16 or uint32 tokens."""
    for (magic, version), (known, _) in LLMC_TOKENS.items():
        if known == dtype:
            header = np.zeros(LLMC_HEADER_BYTES // 4, "<i4")
            header[:3] = magic, version, tokens
            return header.tobytes()
    raise AssertionError(f"llm.c has no files of {dtype}")


# numpy.


def _read_numpy(path: Path, file: BinaryIO, size: int) -> Header:
    """Return what the header of a .npy file says. Nothing is unpickled."""
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"format version {version}")  # for names of fields
    # The header is a Python literal, and numpy lets the errors of Python's parser through.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise DataError(
            f"{path} has a damaged header of numpy: {first_line}; write it again with numpy.save"
        ) from None

    remedy = 'write it again with numpy.save(path, ids.astype("uint16" or "uint32"))'
    if dtype.kind not in "ui" or not dtype.isnative or dtype.name not in DTYPES:
        raise DataError(
            f"{path} is an array of {dtype.str}, and tokens are {', '.join(DTYPES)}; {remedy}"
        )
    if len(shape) != 1:
        raise DataError(
            f"{path} is an array of shape {shape}, and tokens are one dimension; {remedy}"
        )
    offset = file.tell()
    expected = offset + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes, but by its header {expected}; it is cut off: copy it again"
        )
    return Header("numpy", dtype.name, offset, shape[0])


# Bare numbers.


def _read_bare(path: Path, stated: Stated) -> Header:
    """Return the tokens of a file of bare numbers, of the stated dtype or nanoGPT's."""
    with _open(path) as file:
        size = path.stat().st_size
        sample = file.read(_SAMPLE_BYTES)
    _refuse_unknown_header(path, sample)
    dtype = stated.dtype
    if dtype is None:
        _refuse_other_widths(path, sample, stated)
        dtype = NANOGPT_DTYPE
    else:
        _refuse_half_of_each_number(path, sample, dtype)
    itemsize = np.dtype(dtype).itemsize
    if size % itemsize:
        raise DataError(
            f"{path} has {size} bytes, not a multiple of {itemsize} ({dtype}); copy it again"
        )
    return Header("bare", dtype, 0, size // itemsize)


def _refuse_unknown_header(path: Path, sample: bytes) -> None:
    """Raise DataError for a file that begins with a few numbers and zeros, and goes on otherwise."""
    start = np.frombuffer(sample[:LLMC_HEADER_BYTES], np.uint8)
    rest = np.frombuffer(sample[LLMC_HEADER_BYTES : 2 * LLMC_HEADER_BYTES], np.uint8)
    if len(rest) < _ENOUGH:
        return
    # Small ids of 64 bits are zeros to 7/8.
    if np.mean(start == 0) > 0.95 and np.mean(rest == 0) < 0.9:
        raise DataError(
            f"{path} begins with {LLMC_HEADER_BYTES} bytes that are almost all 0, like a header of "
            "a kind that nanoray does not read; write the tokens alone, or with llm.c's or numpy's "
            "header"
        )


def _refuse_other_widths(path: Path, sample: bytes, stated: Stated) -> None:
    """Raise DataError where nothing names the dtype, and the numbers do not look like uint16."""
    if stated.vocab_size is not None and stated.vocab_size > 1 << 16:
        raise DataError(
            f"{path}: nothing says whether its numbers have 16 or 32 bits, and a vocabulary of "
            f"{stated.vocab_size} does not fit into 16; {_state_dtype(path, 'uint32', stated)}"
        )
    if len(sample) < _ENOUGH:
        return

    bits = _bits_of_wider_numbers(sample, stated.vocab_size is None)
    if bits:
        dtype = "uint32" if bits == 32 else "int64"
        raise DataError(
            f"{path} looks like numbers of {bits} bits, and nothing says so; "
            f"{_state_dtype(path, dtype, stated)}"
        )

    # Narrower numbers. Half of all ids have a low byte of 128 or more, while text has none. The high
    # bytes of a small vocabulary are 0, and those of text are letters.
    first_bytes = np.frombuffer(sample, np.uint8)
    high_bytes = first_bytes[1::2]
    if first_bytes.max() < 128 and np.count_nonzero(high_bytes) > len(high_bytes) // 2:
        raise DataError(
            f"{path} looks like text, or like one byte for each token; name a text by itself with "
            f"--dataset FILE, and for bytes {_state_dtype(path, 'uint8', stated)}"
        )


def _refuse_half_of_each_number(path: Path, sample: bytes, dtype: str) -> None:
    """Raise DataError where every second number of the stated dtype is 0: they are upper halves."""
    itemsize = np.dtype(dtype).itemsize
    numbers = np.frombuffer(sample, dtype, len(sample) // itemsize)
    if itemsize == 8 or len(numbers) < _ENOUGH or numbers[1::2].any():
        return
    # Fewer kinds may be a pattern that is meant.
    if len(np.unique(numbers[::2])) > 2:
        raise DataError(
            f"{path}: every second number of {dtype} is 0, so its numbers have {16 * itemsize} bits; "
            f'correct dtype in {path.parent / "meta.json"} to "uint{16 * itemsize}"'
        )


def _bits_of_wider_numbers(sample: bytes, any_vocabulary: bool) -> int:
    """Return 64 or 32 where a sample looks like numbers of that many bits, else 0.

    Ids of up to 16 bits leave the upper words of wider numbers 0. Those of a larger vocabulary, which
    only an unknown one can be, leave them small beside lower words of any size.
    """
    words = np.frombuffer(sample, "<u2", len(sample) // 2)
    lower = words[::2]
    upper = words[1::2]
    is_wide = upper.max() == 0 and lower.max() > 0
    if any_vocabulary and not is_wide:
        is_wide = upper.max() < _LARGEST_VOCABULARY >> 16 and lower.max() >= 256
    if not is_wide:
        return 0
    return 64 if len(words) >= 4 and lower[1::2].max() == 0 else 32


def _state_dtype(path: Path, dtype: str, stated: Stated) -> str:
    """Return how to say in meta.json what a file contains."""
    meta = path.parent / "meta.json"
    if stated.in_json:
        return f'add "dtype": "{dtype}" to {meta} if that is true'
    # meta.pkl has the vocabulary already.
    entry = f'"dtype": "{dtype}"'
    if stated.vocab_size is None:
        entry = f'"vocab_size": V, {entry}'
    return f"write {{{entry}}} into {meta} if that is true"
