"""Open a folder of token files: nanoGPT's, llm.c's, numpy's, or those that `prepare` writes.

What each file contains follows from its own header (headers.py), else from meta.json. The vocabulary
follows from meta.json, else from nanoGPT's meta.pkl, else from llm.c's header. nanoGPT's folders for
OpenWebText have none of these: their tokens are GPT-2's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanoray.base.atomic import json_mapping
from nanoray.config import Config
from nanoray.config.data import is_pattern
from nanoray.data.dataset import PROGRESS, DatasetInfo, TokenFile, read_tokens
from nanoray.data.headers import DTYPES, Header, Stated, read_header
from nanoray.data.meta_pickle import read_vocabulary
from nanoray.data.splits import Splits, find_splits, match_splits
from nanoray.data.tokenizer import Tokenizer, tokenizer_from_json
from nanoray.errors import DataError

_HEADER_TOKENS = 512  # a wrong id before this one may belong to a header
_ENOUGH = 32  # ids; fewer show nothing
_MARKS = {-100: "a label that does not count", -1: "padding"}
_VOCABULARIES = {  # of llm.c's headers
    "gpt2": {"kind": "gpt2"},
    "llama3": {"kind": "ids", "vocab_size": 128_256},
}


@dataclass(frozen=True)
class TokenFolder:
    """The files of a data set and what they say, before their tokens are read."""

    path: Path
    train: tuple[TokenFile, ...]
    val: tuple[TokenFile, ...]
    header: Header  # of the first file; the others have the same kind and dtype
    tokenizer: Tokenizer
    source: str  # of the vocabulary: meta.json | meta.pkl | header | nothing
    text_sha256: str  # of the text that the tokens were made of; empty where nothing says it

    def describe(self) -> str:
        """Return one line for the log."""
        line = f"{self.path.name}: the token files in {self.path}"
        if self.header.kind != "bare" or len(self.train) + len(self.val) > 2:
            kind = "" if self.header.kind == "bare" else f"{self.header.kind}'s "
            line = (
                f"{self.path.name}: {len(self.train)} + {len(self.val)} files of {kind}"
                f"{self.header.dtype} in {self.path}"
            )
        if self.source == "meta.pkl":
            line += f", vocabulary {self.tokenizer.kind} of meta.pkl"
        if self.source == "nothing":
            line += ", read as GPT-2's tokens: no meta.json"
        largest = np.iinfo(self.header.dtype).max
        if largest < self.tokenizer.vocab_size - 1:
            line += (
                f"; warning: {self.header.dtype} has no room for ids above {largest}, and the "
                f"vocabulary has {self.tokenizer.vocab_size}: where the tokenizer made such ids, "
                "others stand in their place"
            )
        return line


def inspect_folder(path: Path, config: Config) -> TokenFolder:
    """Read names, headers and vocabulary of a folder or a pattern. Raises DataError.

    It costs one small read for each file.
    """
    # An option that would have no effect is an error.
    if config.val_fraction != Config.model_fields["val_fraction"].default:
        raise DataError(
            f"val_fraction would be ignored: {path} is split already; drop val_fraction"
        )
    _require_finished(path.parent if is_pattern(str(path)) else path)
    if is_pattern(str(path)):
        folder, splits = match_splits(str(path))
    else:
        folder = path
        splits = find_splits(path)

    meta, source = _read_beside(folder)
    stated = _stated_in(meta, folder)
    headers = _read_headers(folder, splits, stated)

    # Nothing beside the files names a vocabulary. So llm.c's header does, or they are nanoGPT's.
    first = headers[splits.train[0]]
    if "tokenizer" not in meta and first.vocabulary:
        meta["tokenizer"] = _VOCABULARIES[first.vocabulary]
        source = "header"
    elif "tokenizer" not in meta:
        if stated.in_json:
            raise _bad_meta(folder / "meta.json", "it does not say what the tokens are")
        meta["tokenizer"] = {"kind": "gpt2"}
        source = "nothing"

    tokenizer = tokenizer_from_json(meta["tokenizer"])
    if config.tokenizer not in ("auto", tokenizer.kind):
        raise DataError(
            f"tokenizer = {config.tokenizer}, but {folder} has tokens of {tokenizer.kind}; drop "
            "--tokenizer"
        )

    def files(names: list[str]) -> tuple[TokenFile, ...]:
        return tuple(TokenFile(n, headers[n].offset, headers[n].tokens) for n in names)

    return TokenFolder(
        path=folder,
        train=files(splits.train),
        val=files(splits.val),
        header=first,
        tokenizer=tokenizer,
        source=source,
        text_sha256=str(meta.get("sha256", "")),
    )


def open_folder(path: Path, config: Config) -> DatasetInfo:
    """Read a data set of token files whole, and return its record.

    Once, because an id outside the vocabulary would fail in the embedding, on a GPU without a
    readable error, and for the hash of its tokens. Raises DataError.
    """
    found = inspect_folder(path, config)
    digest = hashlib.sha256()
    for file in (*found.train, *found.val):
        try:
            _scan(found, file, digest)
        except OSError as error:
            raise DataError(
                f"cannot read {found.path / file.name}: {error.strerror}; check the storage"
            ) from None
    train_files = found.train
    val_files = found.val

    # Without a header train.bin and val.bin are the same data set as before there were others.
    if [(f.name, f.offset) for f in (*train_files, *val_files)] == [
        ("train.bin", 0),
        ("val.bin", 0),
    ]:
        train_files = ()
        val_files = ()
    return DatasetInfo(
        name=found.path.name,
        note=found.describe(),
        path=found.path,
        dtype=found.header.dtype,
        vocab_size=found.tokenizer.vocab_size,
        train_tokens=sum(file.tokens for file in found.train),
        val_tokens=sum(file.tokens for file in found.val),
        sha256=found.text_sha256,
        tokens_sha256=digest.hexdigest(),
        tokenizer=found.tokenizer.to_json(),
        train_files=train_files,
        val_files=val_files,
    )


# What is said beside the files.


def read_stated(folder: Path) -> Stated:
    """Return what meta.json or meta.pkl says about the token files of a folder. Raises DataError."""
    _require_finished(folder)
    meta, _ = _read_beside(folder)
    return _stated_in(meta, folder)


def _require_finished(folder: Path) -> None:
    """Raise DataError for a folder that `nanoray data` has begun to prepare.

    Its shards have a header already, but not all are there, and nothing says whose tokens they are.
    """
    if (folder / PROGRESS).exists():
        raise DataError(
            f"{folder} is not finished; run the command of `nanoray data` that prepares it again: it "
            "goes on"
        )


def _read_beside(folder: Path) -> tuple[dict[str, Any], str]:
    """Return what meta.json says, with the vocabulary of meta.pkl in its place, and whose it is."""
    meta = _read_meta(folder)
    if "tokenizer" in meta or not (folder / "meta.pkl").exists():
        return meta, "meta.json"
    return meta | {"tokenizer": read_vocabulary(folder / "meta.pkl")}, "meta.pkl"


def _stated_in(meta: dict[str, Any], folder: Path) -> Stated:
    # A vocabulary narrows what bare numbers can be.
    vocab_size = None
    if "tokenizer" in meta:
        vocab_size = tokenizer_from_json(meta["tokenizer"]).vocab_size
    return Stated(meta.get("dtype"), vocab_size, (folder / "meta.json").exists())


def _read_meta(folder: Path) -> dict[str, Any]:
    """Return meta.json, checked; {} where there is none.

    Its keys are tokenizer, vocab_size and dtype; each may be absent.
    """
    file = folder / "meta.json"
    if not file.exists():
        return {}
    try:
        meta = json_mapping(file.read_bytes())
        dtype = meta.get("dtype")
        size = meta.get("vocab_size")
        if "tokenizer" not in meta and size is not None:
            meta["tokenizer"] = {"kind": "ids", "vocab_size": size}
        if "tokenizer" in meta:
            of_tokenizer = tokenizer_from_json(meta["tokenizer"]).vocab_size
            if size not in (None, of_tokenizer):
                raise DataError(f"vocab_size = {size}, but its tokenizer has {of_tokenizer}")
        if dtype is not None and dtype not in DTYPES:
            raise DataError(f"dtype = {dtype!r} is none of {', '.join(DTYPES)}")
    except (OSError, ValueError, DataError) as error:
        raise _bad_meta(file, str(error)) from None
    return meta


def _bad_meta(file: Path, error: str) -> DataError:
    return DataError(f"{file}: {error}; it must hold at least vocab_size, or tokenizer")


def _read_headers(folder: Path, splits: Splits, stated: Stated) -> dict[str, Header]:
    """Return the header of each file. Raises DataError where they differ in kind."""
    headers: dict[str, Header] = {}
    names = [*splits.train, *splits.val]
    for name in names:
        header = read_header(folder / name, stated)
        first = headers.setdefault(names[0], header)
        if _kind(header) != _kind(first):
            raise DataError(
                f"the files of {folder} are of different kinds: {names[0]} has {_kind(first)}, and "
                f"{name} has {_kind(header)}; write them all in one way"
            )
        # An empty file among others is one that was not copied.
        if header.tokens == 0 and len(names) > 2:
            raise DataError(f"{folder / name} has no tokens; copy it again, or leave it out")
        headers[name] = header
    return headers


def _kind(header: Header) -> str:
    parts = [header.dtype, header.vocabulary]
    parts.append("no header" if header.kind == "bare" else f"{header.kind}'s header")
    return ", ".join(part for part in parts if part)


# The tokens.


def _scan(folder: TokenFolder, file: TokenFile, digest: hashlib._Hash) -> None:
    """Add the tokens of `file` to `digest`. Raises DataError for an id outside the vocabulary."""
    vocab_size = folder.tokenizer.vocab_size
    dtype = folder.header.dtype
    count = 0
    for chunk in read_tokens(folder.path, file):
        digest.update(chunk)
        ids = np.frombuffer(chunk, dtype)
        if ids.max() >= vocab_size or (ids.dtype.kind == "i" and ids.min() < 0):
            wrong = (ids >= vocab_size) | (ids < 0)
            first = int(np.argmax(wrong))
            remedy = _mistake_of_writer(ids, first, vocab_size) or _remedy(folder, count + first)
            raise DataError(
                f"{folder.path / file.name}: token {count + first} is {ids[first]}, but vocab_size "
                f"is {vocab_size}; {remedy}"
            )
        count += len(ids)


def _mistake_of_writer(ids: np.ndarray, first: int, vocab_size: int) -> str:
    """Return what a file with a wrong id probably is, and what to do, if it is no vocabulary's fault.

    Empty where nothing shows it. `first` is the place of the first wrong id.
    """
    # In a file of the other byte order all ids fit once they are swapped; else hardly any file's do.
    swapped = ids.byteswap()
    is_swapped = len(ids) >= _ENOUGH and swapped.min() >= 0 and swapped.max() < vocab_size
    if ids.itemsize > 1 and is_swapped:
        dtype = np.dtype(ids.dtype).newbyteorder("<").str
        return (
            "with the bytes of each number swapped all of them would fit, so the file is probably "
            f'big-endian: write it again with ids.astype("{dtype}")'
        )

    # Marks of what is no token. In unsigned numbers they are the largest ones.
    bits = 8 * ids.itemsize
    number = int(ids[first])
    signed = number - (1 << bits) if number >= 1 << (bits - 1) else number
    if signed in _MARKS:
        shown = "this" if signed == number else f"this, {signed} in {bits} bits,"
        return (
            f"{shown} is probably the mark of {_MARKS[signed]} and no token: write the ids of the "
            "tokens alone"
        )
    if signed < 0 and ids.dtype.kind == "i":
        return "no id is negative: write the ids of the tokens alone"
    return ""


def _remedy(folder: TokenFolder, place: int) -> str:
    """Return what to do about a token outside the vocabulary."""
    meta = folder.path / "meta.json"
    if folder.header.kind != "bare":
        remedy = f"write the true vocab_size into {meta}"
    elif folder.source == "meta.json":
        remedy = "correct vocab_size or dtype in meta.json"
    elif folder.source == "meta.pkl":
        remedy = "meta.pkl belongs to other tokens: prepare the folder again"
    else:
        remedy = (
            f"nothing says what these tokens are, and GPT-2's are smaller: write {meta} with their "
            "dtype and vocab_size"
        )
    # Raising vocab_size would train on the header.
    if folder.header.kind == "bare" and place < _HEADER_TOKENS:
        remedy += ". If the file begins with a header, remove that instead"
    return remedy
