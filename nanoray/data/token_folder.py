"""Open a folder of token files: llm.c's, bare numbers, or those that `nanoray data` writes.

meta.json beside the files states their vocabulary, and the dtype of bare numbers. llm.c's header states
both.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from nanoray.config import Config
from nanoray.data.dataset import DatasetInfo, TokenFile, read_tokens
from nanoray.data.headers import DTYPES, Header, read_header
from nanoray.data.splits import Splits, find_splits
from nanoray.data.tokenizer import Tokenizer, tokenizer_from_json
from nanoray.errors import DataError
from nanoray.machine.atomic import json_mapping

_VOCABULARIES = {  # of llm.c's headers
    "gpt2": {"kind": "gpt2"},
    "llama3": {"kind": "ids", "vocab_size": 128_256},
}


def open_folder(path: Path, config: Config) -> DatasetInfo:
    """Read a data set of token files whole, and return its record.

    Once, because an id outside the vocabulary would fail in the embedding, on a GPU without a
    readable error, and for the hash of its tokens. Raises DataError.
    """
    # An option that would have no effect is an error.
    if config.val_fraction != Config.model_fields["val_fraction"].default:
        raise DataError(
            f"val_fraction would be ignored: {path} is split already; drop val_fraction"
        )

    # The vocabulary is that of meta.json, else that of llm.c's header.
    splits = find_splits(path)
    meta = _read_meta(path)
    headers = _read_headers(path, splits, meta.get("dtype"))
    first = headers[splits.train[0]]
    if "tokenizer" not in meta and first.vocabulary:
        meta["tokenizer"] = _VOCABULARIES[first.vocabulary]
    if "tokenizer" not in meta:
        raise _bad_meta(path / "meta.json", "it does not say what the tokens are")
    tokenizer = tokenizer_from_json(meta["tokenizer"])
    if config.tokenizer not in ("auto", tokenizer.kind):
        raise DataError(
            f"tokenizer = {config.tokenizer}, but {path} has tokens of {tokenizer.kind}; drop "
            "--tokenizer"
        )

    # Read all tokens.
    train = tuple(TokenFile(n, headers[n].offset, headers[n].tokens) for n in splits.train)
    val = tuple(TokenFile(n, headers[n].offset, headers[n].tokens) for n in splits.val)
    digest = hashlib.sha256()
    for file in (*train, *val):
        try:
            _scan(path, file, first.dtype, tokenizer.vocab_size, digest)
        except OSError as error:
            raise DataError(
                f"cannot read {path / file.name}: {error.strerror}; check the storage"
            ) from None
    return DatasetInfo(
        name=path.name,
        note=f"{path.name}: {len(train)} + {len(val)} token files of {first.dtype} in {path}",
        path=path,
        dtype=first.dtype,
        vocab_size=tokenizer.vocab_size,
        train_tokens=sum(file.tokens for file in train),
        val_tokens=sum(file.tokens for file in val),
        sha256=str(meta.get("sha256", "")),  # of the text that the tokens were made of
        tokens_sha256=digest.hexdigest(),
        tokenizer=tokenizer.to_json(),
        train_files=train,
        val_files=val,
    )


# What is said beside the files.


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return the tokenizer that meta.json of a folder states. Raises DataError."""
    meta = _read_meta(folder)
    return tokenizer_from_json(meta["tokenizer"]) if "tokenizer" in meta else None


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


def _read_headers(folder: Path, splits: Splits, dtype: str | None) -> dict[str, Header]:
    """Return the header of each file. Raises DataError where their tokens differ in kind."""
    headers: dict[str, Header] = {}
    names = [*splits.train, *splits.val]
    for name in names:
        header = read_header(folder / name, dtype)
        first = headers.setdefault(names[0], header)
        if (header.dtype, header.vocabulary) != (first.dtype, first.vocabulary):
            raise DataError(
                f"the files of {folder} are of different kinds: {names[0]} has {first.dtype} "
                f"{first.vocabulary}, and {name} has {header.dtype} {header.vocabulary}; write them "
                "all in one way"
            )
        # An empty file among others is one that was not copied.
        if header.tokens == 0 and len(names) > 2:
            raise DataError(f"{folder / name} has no tokens; copy it again, or leave it out")
        headers[name] = header
    return headers


# The tokens.


def _scan(
    folder: Path, file: TokenFile, dtype: str, vocab_size: int, digest: hashlib._Hash
) -> None:
    """Add the tokens of `file` to `digest`. Raises DataError for an id outside the vocabulary."""
    count = 0
    for chunk in read_tokens(folder, file):
        digest.update(chunk)
        ids = np.frombuffer(chunk, dtype)
        require_ids(ids, vocab_size, folder / file.name, count)
        count += len(ids)


def require_ids(ids: np.ndarray, vocab_size: int, path: Path, first: int) -> None:
    """Raise DataError for numbers of a file that are no ids. `first`: the place of the first one."""
    if ids.max() >= vocab_size or (ids.dtype.kind == "i" and ids.min() < 0):
        at = int(np.argmax((ids >= vocab_size) | (ids < 0)))
        raise DataError(
            f"{path}: token {first + at} is {ids[at]}, but vocab_size is {vocab_size}; correct "
            f"vocab_size or dtype in {path.parent / 'meta.json'}, or write the file again"
        )
    # The upper halves of wider numbers are 0, and would be trained on
    if len(ids) > 1 and not ids[1::2].any() and len(np.unique(ids[::2])) > 2:
        raise DataError(
            f"{path}: every second number of {ids.dtype} is 0, so its numbers are wider; correct "
            f"dtype in {path.parent / 'meta.json'}"
        )
