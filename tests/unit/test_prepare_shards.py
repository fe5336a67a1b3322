"""Token shards from text, JSON lines and data sets of the hub: their tokens, and what is refused."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoray.cli.data import main
from nanoray.data import documents, prepare_shards
from nanoray.data.documents import Files
from nanoray.data.headers import LLMC_HEADER_BYTES
from nanoray.data.tokenizer import ByteTokenizer

BYTE = ByteTokenizer()


DOCUMENTS = [f"document {n}: {'é ' * (n % 5)}\n\nend" for n in range(23)] + ["", "ends\n"]


def tokens_of(out: Path, split: str, dtype: str = "uint16") -> list[int]:
    """The tokens of a split's shards, which must be numbered without a gap."""
    files = sorted(out.glob(f"{split}_*.bin"))
    assert [file.name for file in files] == [f"{split}_{i:06d}.bin" for i in range(len(files))]
    parts = [np.fromfile(file, dtype, offset=LLMC_HEADER_BYTES) for file in files]
    for file, part in zip(files, parts, strict=True):
        header = np.fromfile(file, np.int32, 256)
        assert header[:3].tolist() == [20240520, 1, len(part)]
        assert not header[3:].any()
    return np.concatenate([np.empty(0, dtype), *parts]).tolist()


# Formats.


def write_jsonl(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text("\n".join(json.dumps({"id": 1, "text": text}) for text in DOCUMENTS))
    return path


def write_gzip(folder: Path) -> Path:
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(folder).read_bytes()))
    return path


FORMATS: dict[str, Callable[[Path], Path]] = {
    "jsonl": write_jsonl,
    "jsonl.gz": write_gzip,
}


def right_tokens(split: str) -> list[int]:
    """The bytes of the documents of a split: the first of every five is for validation."""
    found = b""
    filled = [text for text in DOCUMENTS if text]
    for number, text in enumerate(filled):
        if (number % 5 == 0) == (split == "val"):
            found += text.encode() if text.endswith("\n") else text.encode() + b"\n"
    return list(found)


@pytest.mark.parametrize("name", FORMATS)
def test_documents_become_the_tokens_of_their_split(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_shards, "BATCH", 40)
    path = FORMATS[name](tmp_path)
    out = tmp_path / "out"
    source = Files([path], "text", 0.2)
    meta = prepare_shards.prepare_shards(source, BYTE, out, 100, lambda line: None)
    for split in ("train", "val"):
        assert tokens_of(out, split) == right_tokens(split)
        assert meta[f"{split}_tokens"] == len(right_tokens(split))
    assert json.loads((out / "meta.json").read_text()) == meta
    assert [path.name for path in tmp_path.glob(".*")] == []


class Merging(ByteTokenizer):
    """GPT-2's way to cut a text, with merges of what is cut: tokens depend on what stands around."""

    kind = "gpt2"
    end_of_text = 300

    def __init__(self) -> None:
        import tiktoken

        pattern = (
            r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
        )
        ranks = {bytes([i]): i for i in range(256)}
        for pair in (b"\n\n", b"  ", b" \n", b" a", b"ab", b"\n ", b"\n\n\n"):
            ranks[pair] = len(ranks)
        self._encoding = tiktoken.Encoding(
            "toy", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), np.uint16)


@given(text=st.text(alphabet="ab1.' \n\té\u3000", max_size=60), size=st.integers(1, 12))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_pieces_of_a_text_have_the_tokens_of_the_whole(
    tmp_path: Path, text: str, size: int
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    tokenizer = Merging()
    found: list[int] = []
    at = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(documents, "PIECE", size)
        while at < len(text.encode()):
            piece, at = documents.read_piece(path, at, len(text.encode()))
            assert piece
            found += tokenizer.encode(piece).tolist()
    assert found == tokenizer.encode(text).tolist()


def test_a_text_is_one_document_whose_end_is_for_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE", 7)
    texts = ["\ufeffab  ab\n\n ab\nab\nlast line", "ab"]
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    source = Files([tmp_path / "a.txt", tmp_path / "b.txt"], "text", 0.3)
    prepare_shards.prepare_shards(source, Merging(), tmp_path / "out", 9, lambda line: None)

    encode = Merging().encode
    train = [*encode("ab  ab\n\n ab\nab\n").tolist(), 300, *encode("ab").tolist(), 300]
    assert tokens_of(tmp_path / "out", "train") == train
    assert tokens_of(tmp_path / "out", "val") == [*encode("last line").tolist(), 300]


# What is refused.


def make_wrong_files(folder: Path) -> None:
    (folder / "a.txt").write_text("text " * 9)
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    (folder / "utf16.txt").write_bytes("text".encode("utf-16"))
    (folder / "a.csv").write_text("text")
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"text"))
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"text')
    (folder / "list.jsonl").write_text("[1]")
    (folder / "other.jsonl").write_text('{"content": "a"}')
    (folder / "number.jsonl").write_text('{"text": 3}')
    (folder / "empty.jsonl").write_text('{"text": ""}')
    (folder / "file").write_text("x")


REFUSED: dict[str, tuple[str, str]] = {
    "no file": ("x.txt", "no file .*x.txt; check the path"),
    "unknown": ("a.csv", "a.csv ends in none of .txt, .*; name it by what it holds, or unpack it"),
    "text in gzip": ("a.txt.gz", "a.txt.gz ends in none of .txt"),
    "latin": ("latin.txt", r"latin.txt is not UTF-8: byte 0xe9 at offset 3 \(invalid"),
    "utf-16": ("utf16.txt", r"utf16.txt is not UTF-8 text \(NUL byte at offset 3\)"),
    "bad json": ("bad.jsonl", "line 2 of .*bad.jsonl is no JSON: "),
    "a list": ("list.jsonl", "line 1 of .*list.jsonl has no text under text; it must be an object"),
    "no field": ("other.jsonl", "has no text under text; it must be an object with one: choose"),
    "a number": ("number.jsonl", "has no text under text"),
    "no text": ("empty.jsonl", "no tokens for training, and 0 for validation; give more text"),
    "what exists": ("a.txt --out file", "file already exists; give --out another name"),
    "no folder": ("a.txt --out no/out", "cannot write .*no/out .*; choose another folder"),
    "tokenizer": ("a.txt --tokenizer llama", "tokenizer = llama is none of gpt2, byte; choose"),
    "shard_tokens": ("a.txt --shard_tokens 0", "shard_tokens = 0 is not above 0"),
    "val_fraction": ("a.txt --val_fraction 1", "val_fraction = 1 is not between 0 and 0.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_prepared_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wrong_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    words, message = REFUSED[name]
    defaults = ["--tokenizer", "byte", "--out", "out"]
    assert main(["tokenize", *defaults, *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
