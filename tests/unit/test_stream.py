"""Streams over shards: the order, the index, each kind of file, and what is refused."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import nanoray
from nanoray.data.headers import llmc_header
from nanoray.data.line_index import FOLDER, starts_of
from nanoray.data.stream import ShardOrder, ShardStream
from nanoray.errors import DataError
from nanoray.own.data.source import OwnData

CPU = torch.device("cpu")


# The order.


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 2**63),
    window=st.integers(1, 40),
    epoch=st.integers(0, 3),
    cut=st.integers(0, 60),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_each_sample_once_and_any_part_of_it_is_the_same(
    counts: list[int], seed: int, window: int, epoch: int, cut: int
) -> None:
    order = ShardOrder(counts, seed, window).epoch(epoch)
    everything = list(order[0 : len(order)])
    assert sorted(everything) == list(range(sum(counts)))
    again = ShardOrder(counts, seed, window).epoch(epoch)
    assert [*again[cut : len(order)], *again[0:cut]] == everything[cut:] + everything[:cut]

    # A window has the samples of a stretch of the shards, read one after the other.
    in_sequence = list(ShardOrder(counts, seed, 1).epoch(epoch)[0 : len(order)])
    for first in range(0, len(order), window):
        end = first + window
        assert sorted(everything[first:end]) == sorted(in_sequence[first:end])
    ends = np.cumsum(counts).tolist()
    jumps = [a for a, b in itertools.pairwise(in_sequence) if b != a + 1]
    assert {record + 1 for record in jumps} <= set(ends), "a shard is read to its end"


# Kinds of files: (write records 0 ... n - 1, read the number of a record).

Write = Callable[[Path, list[int]], None]


def write_jsonl(path: Path, numbers: list[int]) -> None:
    path.write_text("".join(json.dumps({"n": n, "text": "é" * n}) + "\n" for n in numbers))


def write_text(path: Path, numbers: list[int]) -> None:
    path.write_text("\r\n".join(f"line\t{n}" for n in numbers))


def write_tokens(path: Path, numbers: list[int]) -> None:
    """Records of 4 tokens + 1: the first of each is its number."""
    tokens = np.repeat(np.array([*numbers, 0], np.uint16), 4)[: 4 * len(numbers) + 1]
    path.write_bytes(llmc_header("uint16", len(tokens)) + tokens.tobytes())


KINDS: dict[str, tuple[Write, dict[str, Any], Callable[[Any], int]]] = {
    "jsonl": (write_jsonl, {}, lambda record: record["n"]),
    "txt": (write_text, {}, lambda record: int(record.split("\t")[1])),
    "bin": (write_tokens, {"block_size": 4}, lambda record: int(record[0])),
}


def write_shards(folder: Path, ending: str, counts: list[int]) -> None:
    folder.mkdir(exist_ok=True)
    first = 0
    for shard, count in enumerate(counts):
        KINDS[ending][0](folder / f"part-{shard}.{ending}", list(range(first, first + count)))
        first += count


@pytest.mark.parametrize("ending", KINDS)
def test_each_kind_of_file_is_read_record_by_record(tmp_path: Path, ending: str) -> None:
    write_shards(tmp_path, ending, [5, 0, 8, 1])
    _, options, number_of = KINDS[ending]
    stream = ShardStream(tmp_path, number_of, **options)
    assert stream.counts == [5, 0, 8, 1]
    assert [stream[i] for i in (13, 5, 0, 4, 12)] == [13, 5, 0, 4, 12]
    assert list(stream) == list(range(14))
    copy = pickle.loads(pickle.dumps(ShardStream(tmp_path, str, **options)))
    assert copy[7] == str(ShardStream(tmp_path, **options)._shards[2].read(2))
    # In plain torch the workers of a loader share the samples.
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(loader) == list(range(14))


def test_tokens_are_pairs_without_a_transform(tmp_path: Path) -> None:
    write_shards(tmp_path, "bin", [2, 1])
    inputs, targets = ShardStream(tmp_path / "part-0.bin", block_size=4)[1]
    assert inputs.tolist() == [1, 1, 1, 1]
    assert targets.tolist() == [1, 1, 1, 0]
    assert inputs.dtype == torch.int64

    # Without a header meta.json says what the numbers are; the last tokens fill no sample.
    np.arange(10, dtype=np.uint32).tofile(tmp_path / "plain.bin")
    with pytest.raises(DataError, match=r"nothing says what the numbers of .*plain.bin are; write"):
        ShardStream(tmp_path / "plain.bin", block_size=4)
    (tmp_path / "meta.json").write_text('{"dtype": "uint32"}')
    plain = ShardStream(tmp_path / "plain.bin", block_size=4)
    assert [inputs.tolist() for inputs, _ in plain] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# The index of lines.


def test_an_index_is_written_once_and_made_anew_for_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [1, 2, 3])
    assert len(starts_of(path)) == 3

    def refuse(path: Path) -> np.ndarray:
        raise AssertionError("the file is read again")

    with monkeypatch.context() as patched:
        patched.setattr("nanoray.data.line_index.find_starts", refuse)
        assert len(starts_of(path)) == 3
        write_jsonl(path, [1, 2])
        with pytest.raises(AssertionError, match="read again"):
            starts_of(path)
    assert len(starts_of(path)) == 2
    for file in (tmp_path / FOLDER).iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert len(starts_of(path)) == 2


# What is refused.


def make_wrong_files(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", [1, 2])
    write_text(folder / "a.txt", [1, 2])
    write_tokens(folder / "a.bin", [1, 2])
    (folder / "a.jsonl.gz").write_bytes(b"x")
    (folder / "a.csv").write_text("x")
    (folder / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    (folder / "utf16.txt").write_bytes("text".encode("utf-16"))
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "cut.bin").write_bytes((folder / "a.bin").read_bytes()[:-2])
    (folder / "empty").mkdir()
    (folder / "none.jsonl").write_text("\n")
    (folder / "splits").mkdir()
    for name in ("train_000000.bin", "train_000001.bin", "val_000000.bin"):
        write_tokens(folder / "splits" / name, [1, 2])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an empty folder": ("empty", {}, "the folder .*empty has no file that ends in .jsonl"),
    "twice": (["a.jsonl", "*a.jsonl"], {}, "a.jsonl is named twice, so its samples"),
    "two kinds": (["a.jsonl", "a.txt"], {}, "files of one kind, but .* is jsonl and .* is text"),
    "unknown": ("a.csv", {}, "a.csv has no known ending .*; say what it is with kind="),
    "utf-16": ("utf16.txt", {}, r"utf16.txt is not UTF-8 text \(NUL byte at offset 3\)"),
    "cut tokens": ("cut.bin", {"block_size": 4}, "cut.bin has 1040 bytes, but its header"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_at_once(tmp_path: Path, name: str) -> None:
    make_wrong_files(tmp_path)
    files, options, message = REFUSED[name]
    paths = [tmp_path / file for file in files] if isinstance(files, list) else tmp_path / files
    with pytest.raises(DataError, match=message):
        ShardStream(paths, **options)


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    make_wrong_files(tmp_path)
    with pytest.raises(DataError, match=r"bad.jsonl: record 1 \(at byte 9\) is no JSON: "):
        ShardStream(tmp_path / "bad.jsonl")[1]
    with pytest.raises(DataError, match=r"latin.txt: record 0 \(at byte 0\) is no UTF-8 text: "):
        ShardStream(tmp_path / "latin.txt")[0]
    with pytest.raises(DataError, match=r"returned None for record 1 of .*a.txt, but a stream has"):
        ShardStream(tmp_path / "a.txt", lambda line: None)[1]
    with pytest.raises(DataError, match="the train data are empty; give at least one sample"):
        OwnData(ShardStream(tmp_path / "none.jsonl"), None, 0, 1, CPU)


@pytest.mark.parametrize("ending", KINDS)
def test_a_file_that_changes_is_noticed(tmp_path: Path, ending: str) -> None:
    """Also one that is shorter than the place of the record, which would end the process."""
    write_shards(tmp_path, ending, [6])
    path = tmp_path / f"part-0.{ending}"
    stream = ShardStream(path, **KINDS[ending][1])
    stream[0]
    with path.open("r+b") as file:
        file.truncate(3)
    with pytest.raises(DataError, match=r"has 3 bytes, but had \d+ when the stream was opened"):
        stream[5]


# As the data of a run.


def test_a_run_reads_the_order_and_resumes_by_a_number(tmp_path: Path) -> None:
    write_shards(tmp_path, "jsonl", [5, 4])

    def make() -> ShardStream:
        return nanoray.ShardStream(tmp_path, lambda r: (float(r["n"]), r["n"]), window=4)

    expected = []
    for epoch in range(3):
        expected += make().order(7).epoch(epoch)[0:9].tolist()
    data = OwnData(make(), make(), 7, 3, CPU)
    read = []
    for first in range(0, 27, 3):
        read += data.train_batch(first, 3)[1].tolist()
    assert read == expected
    later = OwnData(make(), None, 7, 2, CPU)
    assert later.train_batch(13, 2)[1].tolist() == expected[13:15]

    # Validation data stay in the order of the files.
    assert data.val_windows(4).tolist() == [0, 2, 5, 8]
    assert data.val_batch(np.array([2, 5]))[1].tolist() == [2, 5]


def test_another_stream_is_refused_by_what_differs(tmp_path: Path) -> None:
    write_shards(tmp_path, "jsonl", [5, 4])
    (saved,) = OwnData(ShardStream(tmp_path), None, 7, 3, CPU).state_at(0).values()
    OwnData(ShardStream(tmp_path), None, 8, 1, CPU).require_same_order(saved)
    with pytest.raises(DataError, match="have window = 5, but the checkpoint was saved with 10000"):
        OwnData(ShardStream(tmp_path, window=5), None, 7, 3, CPU).require_same_order(saved)
    with pytest.raises(DataError, match="have files = 1, but the checkpoint was saved with 2"):
        OwnData(ShardStream(tmp_path / "part-0.jsonl"), None, 7, 3, CPU).require_same_order(saved)
    # Of the same size, with another content.
    path = tmp_path / "part-1.jsonl"
    path.write_bytes(path.read_bytes().replace(b"text", b"TEXT"))
    with pytest.raises(DataError, match=r"have content = .*; give the data of then, or start a"):
        OwnData(ShardStream(tmp_path), None, 7, 3, CPU).require_same_order(saved)
