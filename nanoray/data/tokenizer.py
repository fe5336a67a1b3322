"""Tokenizers: characters, bytes, GPT-2's BPE, or bare ids. Each is described by plain JSON.

Models pad their vocabulary, so a sampler can emit an id that has no text; `decode` shows it as
U+FFFD.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nanoray.data.download import NotDownloaded
from nanoray.errors import DataError

GPT2_VOCAB_SIZE = 50257
# The vocabulary's size before a text is read: Shakespeare has 65 characters
VOCAB = {"auto": 65, "char": 65, "byte": 256, "gpt2": GPT2_VOCAB_SIZE}
UNKNOWN = "\ufffd"


class Tokenizer(ABC):
    """Turns text into ids 0 ... vocab_size - 1 and back."""

    kind: str
    vocab_size: int
    end_of_text: int | None = None  # the id between two documents

    @property
    def dtype(self) -> str:
        """The smallest dtype of a token file: uint16 while the vocabulary fits, else uint32."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, (T,). Raises DataError for text outside the vocabulary."""

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text; all cores may work on them."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""

    def start(self) -> list[int]:
        """Return the prompt for text without one: a newline, or id 0 where there is none."""
        return [int(i) for i in self.encode("\n")]

    def to_json(self) -> dict[str, Any]:
        """Describe the tokenizer; `tokenizer_from_json` reads it back."""
        return {"kind": self.kind}


class CharTokenizer(Tokenizer):
    """One id per character of an alphabet: chars[i] has id i. nanoGPT sorts them by code point."""

    kind = "char"

    def __init__(self, chars: str) -> None:
        self.chars = chars
        self.vocab_size = len(chars)
        codes = _code_points(chars)
        self._ids = np.argsort(codes)  # of the characters by code point
        self._codes = codes[self._ids]  # sorted

    def encode(self, text: str) -> np.ndarray:
        codes = _code_points(text)
        places = np.searchsorted(self._codes, codes).clip(max=self.vocab_size - 1)
        # searchsorted also returns a place for characters outside the alphabet.
        unknown = np.flatnonzero(self._codes[places] != codes)
        if unknown.size:
            offset = int(unknown[0])
            raise DataError(
                f"character {text[offset]!r} at offset {offset} is not among the {self.vocab_size} "
                "characters of the training text; leave it out, or train with --tokenizer byte"
            )
        return self._ids[places].astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] if 0 <= i < self.vocab_size else UNKNOWN for i in ids)

    def start(self) -> list[int]:
        return [max(0, self.chars.find("\n"))]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "chars": self.chars}


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte: it encodes every text."""

    kind = "byte"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return _join(bytes([i]) if 0 <= i < 256 else None for i in ids)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte pair encoding, loaded from tiktoken on first use.

    Training on token files does not need it.
    """

    kind = "gpt2"
    vocab_size = GPT2_VOCAB_SIZE
    end_of_text = GPT2_VOCAB_SIZE - 1

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._load().encode_ordinary(text), self.dtype)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        threads = os.cpu_count() or 1
        ids_of_all = self._load().encode_ordinary_batch(list(texts), num_threads=threads)
        return [np.array(ids, self.dtype) for ids in ids_of_all]

    def decode(self, ids: Iterable[int]) -> str:
        token = self._load().decode_single_token_bytes
        return _join(token(i) if 0 <= i < self.vocab_size else None for i in map(int, ids))

    def _load(self) -> Any:
        try:
            import tiktoken  # optional, and slow to import

            return tiktoken.get_encoding("gpt2")  # cached by tiktoken
        except ImportError:
            raise DataError(
                "tokenizer gpt2 needs tiktoken; pip install tiktoken, or use --tokenizer byte"
            ) from None
        except Exception as error:  # its download raises requests' errors and others
            reason = f"{type(error).__name__}: {error}"
            if len(reason) > 90:
                reason = reason[:90] + "..."
            raise NotDownloaded(
                f"GPT-2's vocabulary could not be downloaded: {reason}; set TIKTOKEN_CACHE_DIR to a "
                "folder filled on a machine with internet, or for a text use --tokenizer byte"
            ) from None


class IdTokenizer(Tokenizer):
    """Bare numbers in place of text, for token files that come without a tokenizer."""

    kind = "ids"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        ids = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise DataError(
                    f"{word!r} is not a token id below {self.vocab_size}; this dataset came "
                    "without a tokenizer, so write ids with spaces between them"
                )
            ids.append(int(word))
        return np.array(ids, self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def start(self) -> list[int]:
        return [0]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.vocab_size}


def tokenizer_from_json(values: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer that `to_json` described. Raises DataError for anything else."""
    # The values may come from a damaged or foreign file, so every field is checked.
    match values:
        case {"kind": "char", "chars": str(chars)} if 0 < len(chars) == len(set(chars)):
            return CharTokenizer(chars)
        case {"kind": "byte"}:
            return ByteTokenizer()
        case {"kind": "gpt2"}:
            return GPT2Tokenizer()
        case {"kind": "ids", "vocab_size": int(size)} if 0 < size <= 1 << 32 and size is not True:
            return IdTokenizer(size)
    shown = repr(values)
    if len(shown) > 80:
        shown = shown[:80] + "..."
    raise DataError(
        f"not a tokenizer: {shown}; known: kind char (with chars), byte, gpt2, ids (with "
        "vocab_size)"
    )


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _join(tokens: Iterable[bytes | None]) -> str:
    """Return the text of tokens that may end within a character; None is a token without text."""
    unknown = UNKNOWN.encode()
    data = b"".join(unknown if token is None else token for token in tokens)
    return data.decode("utf-8", "replace")
