"""Prepare datasets: turn a text into train.bin, val.bin and meta.json, or open token files.

data/tokens.py reads batches from them. Images come from data/cifar10.py, in the same files;
data/images.py reads batches from those.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

from nanoray.config import Config
from nanoray.data import cifar10
from nanoray.data.cache import cache_dir, reuse, store, write
from nanoray.data.dataset import DatasetInfo, absolute, script_data
from nanoray.data.download import ANSWER_S, FetchFailed, NotDownloaded, fetch
from nanoray.data.token_folder import open_folder
from nanoray.data.tokenizer import tokenizer_from_json
from nanoray.data.utf8 import decode
from nanoray.errors import DataError

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

_NAMES = ("auto", "shakespeare", "stdlib")
_QUICK_S = 4.0  # without an answer, where dataset auto has a fallback
_LOOK_BYTES = 1 << 16  # of a file that may hold tokens
_STDLIB_BYTES = 4_000_000
_STDLIB_SKIP = {
    # Third-party code
    "site-packages",
    "dist-packages",
    "ensurepip",
    # Tests and demos
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    # No source text, or tables
    "__pycache__",
    "lib-dynload",
    "encodings",
    "pydoc_data",
}


def prepare(config: Config) -> DatasetInfo:
    """Find or make the files of `config.dataset`. (driver or rank 0 only)

    The other ranks receive the result. Raises DataError when there is no such dataset, or when a
    split is shorter than one window of block_size + 1 tokens.
    """
    # Other kinds of data have their own files.
    if config.model == "resnet":
        return cifar10.prepare(config)
    if config.model == "own":
        return script_data()
    path = absolute(config.dataset)
    if config.dataset == "auto":
        info = _tokenize(_shakespeare_or_stdlib(config), config)
    elif config.dataset == "shakespeare":
        info = _tokenize(_shakespeare(config), config)
    elif config.dataset == "stdlib":
        info = _tokenize(_stdlib(), config)
    elif os.path.isdir(path):
        info = open_folder(path, config)
        info = replace(info, name=_name(info.name))
    else:
        info = _tokenize(_text_file(path, config.dataset), config)

    _require_a_window(info, config.block_size)
    return info


def _require_a_window(info: DatasetInfo, block_size: int) -> None:
    shortest = min(info.train_tokens, info.val_tokens)
    for split, tokens in (("train", info.train_tokens), ("val", info.val_tokens)):
        if tokens < block_size + 1:
            remedy = "use a longer text"
            if shortest > 1:
                remedy += f", or lower --block_size to {shortest - 1} or less"
            raise DataError(
                f"{info.name}: the {split} split has {tokens} tokens, but block_size + 1 = "
                f"{block_size + 1} are needed; {remedy}"
            )


# Sources of text.


@dataclass(frozen=True)
class _Source:
    name: str
    note: str
    data: bytes
    where: str  # its name in error messages

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def _shakespeare_or_stdlib(config: Config) -> _Source:
    try:
        return _get_shakespeare(config, _QUICK_S)
    except FetchFailed as error:
        source = _stdlib()
        return replace(
            source,
            note=f"{source.note} (Shakespeare is not cached and the download failed: {error})",
        )


def _shakespeare(config: Config) -> _Source:
    try:
        return _get_shakespeare(config, ANSWER_S)
    except FetchFailed as error:
        raise NotDownloaded(
            f"cannot get Shakespeare from {SHAKESPEARE_URL}: {error} (sha256 expected "
            f"{SHAKESPEARE_SHA256}, got {error.got}); name a copy with --dataset PATH, or use "
            "--dataset auto"
        ) from None


def _get_shakespeare(config: Config, answer_s: float) -> _Source:
    cached = cache_dir(config) / "shakespeare.txt"
    source = _Source(
        "shakespeare", "shakespeare: Karpathy's tiny Shakespeare, cached", b"", "Shakespeare"
    )
    with contextlib.suppress(OSError):
        source = replace(source, data=cached.read_bytes())
        if source.sha256 == SHAKESPEARE_SHA256:
            return source

    # No copy in the cache, or one that is not Shakespeare.
    note = f"shakespeare: Karpathy's tiny Shakespeare, from {SHAKESPEARE_URL}"
    if source.data:
        note += "; the damaged cached copy was replaced"
    source = replace(source, data=fetch(SHAKESPEARE_URL, answer_s), note=note)
    if source.sha256 != SHAKESPEARE_SHA256:
        raise FetchFailed(f"these {len(source.data)} bytes are another text", got=source.sha256)
    write(cached, source.data)
    return source


def _stdlib() -> _Source:
    """Read the source text of Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIP]
        files += [Path(folder, name) for name in names if name.endswith(".py")]

    # In the order of a hash, so that train and val hold the same kind of text.
    def hash_of_path(file: Path) -> bytes:
        return hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()

    files.sort(key=hash_of_path)

    # Skip files that are not UTF-8, and those that would exceed the size.
    data = bytearray()
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = file.read_bytes()
            text.decode("utf-8")
            if b"\0" not in text and len(data) + len(text) <= _STDLIB_BYTES:
                data += text
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    note = f"stdlib: source text of Python {version}'s standard library"
    if not data:
        raise DataError(
            f"{note}: there are no source files in {root}; name a text file with --dataset PATH"
        )
    return _Source("stdlib", note, bytes(data), note)


def _text_file(path: Path, given: str) -> _Source:
    if not os.path.exists(path):
        raise DataError(
            f"no dataset {given}: neither one of {', '.join(_NAMES)} nor a file or folder; check the "
            "path"
        )
    if not os.path.isfile(path):
        raise DataError(
            f"{given} is neither a text file nor a folder; name one with --dataset PATH"
        )
    try:
        # Before the whole file is read: one of tokens may be larger than the memory.
        with path.open("rb") as file:
            start = file.read(_LOOK_BYTES)
        if path.suffix == ".bin" and b"\0" in start:
            raise DataError(
                f"{given} is one file of tokens; name its folder, which has the files of both splits"
            )
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {given}: {error.strerror}; check its permissions") from None
    source = _Source(_name(path.stem), f"{path.name}: the text file {path}", data, given)
    if source.sha256 == SHAKESPEARE_SHA256:
        source = replace(source, name="shakespeare")
    return source


def _name(stem: str) -> str:
    """Return the name of a user's dataset.

    It must differ from our own names: the presets' expected losses hold for our own texts only.
    """
    return f"{stem}-file" if stem in _NAMES else stem


# From text to token files.


def _tokenize(source: _Source, config: Config) -> DatasetInfo:
    """Write or reuse the token files of `source`.

    The first 1 - val_fraction of its characters are the training split.
    """
    kind: str = config.tokenizer
    if kind == "auto":
        kind = "char" if source.name == "shakespeare" else "byte"

    # The folder's name follows from all that determines its content.
    content = f"v1 {source.sha256} {kind} {config.val_fraction!r}"
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", source.name)[:40]
    folder = cache_dir(config) / "tokens" / f"{stem}-{kind}-{key}"
    cached = reuse(folder)
    if cached is not None:
        return replace(cached, name=source.name, note=source.note)
    note = source.note
    if os.path.exists(folder / "meta.json"):
        note += "; its damaged token cache was rebuilt"

    # Tokenize.
    # The split is by characters, so that it is the same for every tokenizer.
    text = _decode(source)
    description = {"kind": kind}
    if kind == "char":
        description["chars"] = "".join(sorted(set(text)))
    tokenizer = tokenizer_from_json(description)
    cut = int(len(text) * (1 - config.val_fraction))
    train = tokenizer.encode(text[:cut])
    val = tokenizer.encode(text[cut:])
    info = DatasetInfo(
        name=source.name,
        note=note,
        path=folder,
        dtype=str(train.dtype),
        vocab_size=tokenizer.vocab_size,
        train_tokens=len(train),
        val_tokens=len(val),
        sha256=source.sha256,
        tokens_sha256=hashlib.sha256(train.tobytes() + val.tobytes()).hexdigest(),
        tokenizer=tokenizer.to_json(),
    )

    store(info, train.tobytes(), val.tobytes())
    return info


def _decode(source: _Source) -> str:
    if not source.data:
        raise DataError(f"{source.where} is empty; name a UTF-8 text file with --dataset PATH")
    # Without the mark that editors on Windows put before a text: it would be a character
    return decode(source.data, source.where).removeprefix("\ufeff")
