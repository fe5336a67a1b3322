"""Files of tokens: read in place by what they say, refused, or imported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoray.cli.data import main
from nanoray.config import make_config
from nanoray.data.dataset import DatasetInfo
from nanoray.data.headers import read_header
from nanoray.data.prepare import prepare
from nanoray.data.tokens import JoinedFiles, TokenData, open_tokens
from nanoray.data.verify import verify
from nanoray.errors import DataError
from tests.harness.token_files import (
    write_bare,
    write_llmc,
)

quick = settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
IDS = np.random.default_rng(0).integers(0, 50_257, 700)  # as GPT-2's
SMALL = np.random.default_rng(1).integers(0, 65, 700)  # as those of characters
Write = Callable[[Path], None]


def config(dataset: object, **keys: object) -> Any:
    return make_config({"dataset": str(dataset), "global_batch_size": 12, "block_size": 8, **keys})


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    return message


def tokens_of(info: DatasetInfo, split: str) -> list[int]:
    numbers = open_tokens(info, split).numbers
    return [int(token) for token in numbers[np.arange(len(numbers))]]


# ---- one file for each split ----------------------------------------------------------------------------------------


def meta(folder: Path, **values: Any) -> None:
    (folder / "meta.json").write_text(json.dumps(values))


def both(
    write: Callable[..., None], name: str, *args: Any, small: bool = False, **values: Any
) -> Write:
    """Return a function that writes both splits with `write`, and meta.json with `values`."""

    def write_both(folder: Path) -> None:
        ids = SMALL if small else IDS
        write(folder / name.format("train"), ids[:500], *args)
        write(folder / name.format("val"), ids[500:], *args)
        if values:
            meta(folder, **values)

    return write_both


READ: dict[str, tuple[Write, str, str]] = {  # what is written -> dtype, kind of tokenizer
    "llm.c": (both(write_llmc, "{}.bin"), "uint16", "gpt2"),
    "llm.c for Llama 3": (both(write_llmc, "{}.bin", "uint32"), "uint32", "ids"),
    "llm.c with another vocabulary": (
        both(write_llmc, "{}.bin", vocab_size=60_000),
        "uint16",
        "ids",
    ),
    "llm.c, and meta.json agrees": (both(write_llmc, "{}.bin", dtype="uint16"), "uint16", "gpt2"),
    "bare, as nanoGPT's openwebtext": (
        both(write_bare, "{}.bin", tokenizer={"kind": "gpt2"}, dtype="uint16"),
        "uint16",
        "gpt2",
    ),
    "bare int64 by meta.json": (
        both(write_bare, "{}.bin", "int64", vocab_size=50_257, dtype="int64"),
        "int64",
        "ids",
    ),
    "bare ids of a tiny alphabet": (
        both(
            lambda path, ids: write_bare(path, ids % 13),
            *("{}.bin",),
            small=True,
            vocab_size=13,
            dtype="uint16",
        ),
        "uint16",
        "ids",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_other_tools_write_is_read(tmp_path: Path, name: str) -> None:
    write, dtype, kind = READ[name]
    write(tmp_path)
    info = prepare(config(tmp_path))
    assert (info.dtype, info.tokenizer["kind"]) == (dtype, kind)
    ids = SMALL if info.vocab_size <= 65 else IDS
    if "alphabet" in name:
        ids = ids % 13
    assert tokens_of(info, "train") == ids[:500].tolist()
    assert tokens_of(info, "val") == ids[500:].tolist()
    assert (info.train_tokens, info.val_tokens) == (500, 200)
    assert DatasetInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info
    verify(info)

    # Batches are those of the same tokens in bare numbers.
    (tmp_path / "other").mkdir()
    both(write_bare, "{}.bin", "int64", vocab_size=1 << 17, dtype="int64")(tmp_path / "other")
    if ids is IDS:
        x, y = TokenData(info, 8, 7).train_batch(3, 5)
        u, v = TokenData(prepare(config(tmp_path / "other")), 8, 7).train_batch(3, 5)
        assert torch.equal(x, u)
        assert torch.equal(y, v)


def cut_off(write: Callable[..., None]) -> Callable[..., None]:
    def write_less(path: Path, ids: Any) -> None:
        write(path, ids)
        path.write_bytes(path.read_bytes()[:-6])

    return write_less


def llmc_of(**others: int) -> Callable[..., None]:
    return lambda path, ids: write_llmc(path, ids, **others)


REFUSED: dict[str, tuple[Write, str]] = {
    "llm.c, another version": (
        both(llmc_of(version=2), "{}.bin"),
        "has llm.c's magic 20240520 with version 2, which nanoray does not read",
    ),
    "llm.c, cut off": (
        both(cut_off(write_llmc), "{}.bin"),
        "train.bin has 2018 bytes, but its header counts 500 tokens of uint16, which are 2024",
    ),
    "bare, nothing beside them": (
        both(write_bare, "{}.bin"),
        'nothing says what the numbers of {}/train.bin are; write {}/meta.json, for example {"dtype"',
    ),
    "negative ids": (
        both(
            lambda path, ids: write_bare(path, [*ids, -1], "int32"),
            *("{}.bin",),
            dtype="int32",
            vocab_size=50_257,
        ),
        "token 500 is -1, but vocab_size is 50257; correct vocab_size or dtype in",
    ),
    "uint32, stated as uint16": (
        both(write_bare, "{}.bin", "uint32", dtype="uint16", vocab_size=50_257),
        "train.bin: every second number of uint16 is 0, so its numbers are wider; correct dtype",
    ),
    "llm.c, not GPT-2's": (
        both(lambda path, ids: write_llmc(path, [*ids, 60_000]), "{}.bin"),
        "token 500 is 60000, but vocab_size is 50257; correct vocab_size or dtype in",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_for_certain_is_refused(tmp_path: Path, name: str) -> None:
    write, message = REFUSED[name]
    write(tmp_path)
    said = refused(lambda: prepare(config(tmp_path)))
    assert message.replace("{}", str(tmp_path)) in said
    assert "; " in said  # and its remedy


@quick
@given(data=st.binary(max_size=80), start=st.sampled_from([b"", np.int32([20240520, 1]).tobytes()]))
def test_any_bytes_have_a_header_or_are_refused(tmp_path: Path, data: bytes, start: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(start + data)
    try:
        header = read_header(tmp_path / "x.bin", "uint16")
    except DataError:
        return
    itemsize = np.dtype(header.dtype).itemsize
    assert header.offset + header.tokens * itemsize == len(start + data)


# ---- several files for each split -----------------------------------------------------------------------------------


def shards(folder: Path, write: Callable[..., None], name: str, parts: int = 7) -> Path:
    """Write IDS in files of different sizes: 500 tokens to train, 200 in two files to val."""
    folder.mkdir(exist_ok=True)
    if write is write_bare:
        meta(folder, dtype="uint16", tokenizer={"kind": "gpt2"})
    borders = np.linspace(0, 500, parts + 1).astype(int) + np.array([0, *[3] * (parts - 1), 0])
    for number in range(parts):
        ids = IDS[borders[number] : borders[number + 1]]
        write(folder / name.format("train", number + 1), ids)
    write(folder / name.format("val", 0), IDS[500:530])
    write(folder / name.format("val", 1), IDS[530:])
    return folder


KINDS = {
    "llm.c": (write_llmc, "fineweb_{}_{:06d}.bin"),
    "bare": (write_bare, "{}_{:03d}.bin"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_several_files_are_one_stream(tmp_path: Path, kind: str) -> None:
    """Every sample, and the hash, is that of one file with the same tokens."""
    folder = shards(tmp_path / "many", *KINDS[kind])
    many = prepare(config(folder))
    (tmp_path / "one").mkdir()
    both(write_llmc, "{}.bin")(tmp_path / "one")
    one = prepare(config(tmp_path / "one"))
    assert many.tokens_sha256 == one.tokens_sha256
    assert (many.train_tokens, many.val_tokens) == (one.train_tokens, one.val_tokens)
    assert len(many.files("train")) == 7
    assert DatasetInfo.from_dict(json.loads(json.dumps(many.to_dict()))) == many

    # A window of 101 tokens crosses a border in every sample, and some of them two.
    joined = TokenData(many, 100, 1337)
    whole = TokenData(one, 100, 1337)
    for first in range(0, 60, 12):
        for a, b in zip(joined.train_batch(first, 12), whole.train_batch(first, 12), strict=True):
            assert torch.equal(a, b)
    windows = joined.val_windows(9)
    assert windows.tolist() == whole.val_windows(9).tolist()
    for a, b in zip(joined.val_batch(windows), whole.val_batch(windows), strict=True):
        assert torch.equal(a, b)
    assert isinstance(joined._files["train"], JoinedFiles)


@pytest.mark.parametrize("victim", range(9))
def test_a_change_in_any_file_is_noticed(tmp_path: Path, victim: int) -> None:
    folder = shards(tmp_path / "many", *KINDS["llm.c"])
    info = prepare(config(folder))
    verify(info)
    names = [file.name for file in (*info.files("train"), *info.files("val"))]
    path = folder / names[victim]
    data = bytearray(path.read_bytes())
    data[1024 + 8] ^= 1
    path.write_bytes(data)
    said = refused(lambda: verify(info))
    assert "fineweb_train_000001.bin to fineweb_val_000001.bin (9 files)" in said
    assert prepare(config(folder)).tokens_sha256 != info.tokens_sha256

    path.write_bytes(data[:-2])
    assert "dataset changed" in refused(lambda: TokenData(info, 8, 0))
    path.unlink()
    assert f"dataset changed: cannot open {path}: No such file" in refused(
        lambda: TokenData(info, 8, 0)
    )


def test_a_file_that_changes_during_training_is_an_error_and_no_signal(tmp_path: Path) -> None:
    folder = shards(tmp_path / "many", *KINDS["llm.c"], parts=2)
    info = prepare(config(folder))
    file = open_tokens(info, "train")
    places = np.arange(500)
    assert file.numbers[places].tolist() == IDS[:500].tolist()
    path = folder / "fineweb_train_000002.bin"
    data = path.read_bytes()
    path.write_bytes(data[:1030])
    assert "has 1030 bytes, but 1518 were prepared" in refused(lambda: file.numbers[places])

    path.unlink()
    assert "cannot open" in refused(lambda: file.numbers[places])


MIXED: dict[str, tuple[Callable[..., None], str]] = {
    "no header": (
        write_bare,
        "fineweb_train_000001.bin has uint16 gpt2, and fineweb_train_000003.bin has uint16 ; write",
    ),
    "another dtype": (
        lambda path, ids: write_llmc(path, ids, "uint32"),
        "has uint32 llama3; write them all in one way",
    ),
    "empty": (
        lambda path, ids: write_llmc(path, []),
        "fineweb_train_000003.bin has no tokens; copy it again, or leave it out",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_files_of_different_kinds_are_refused(tmp_path: Path, name: str) -> None:
    write, message = MIXED[name]
    folder = shards(tmp_path / "many", *KINDS["llm.c"])
    meta(folder, dtype="uint16", vocab_size=50_257)
    write(folder / "fineweb_train_000003.bin", IDS[:70])
    assert message in refused(lambda: prepare(config(folder)))


# ---- imported -------------------------------------------------------------------------------------------------------


def imported(folder: Path) -> Path:
    out = folder.with_name("imported")
    assert main(["import", str(folder), "--out", str(out)]) == 0
    return out
