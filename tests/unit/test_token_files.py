"""Files of tokens that other tools have written: recognised by what they say, or refused."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoray.bench.compute import plain_loop
from nanoray.bench.peers.nanogpt import NanoGPT
from nanoray.cli import parse_args
from nanoray.config import make_config
from nanoray.data import meta_pickle
from nanoray.data.dataset import DatasetInfo, read_tokens
from nanoray.data.headers import Stated, read_header
from nanoray.data.prepare import prepare
from nanoray.data.splits import find_splits, match_splits
from nanoray.data.tokenizer import tokenizer_from_json
from nanoray.data.tokens import JoinedFiles, TokenData, open_tokens
from nanoray.data.verify import sampled_hash, verify
from nanoray.errors import DataError
from tests.harness.token_files import (
    write_bare,
    write_llmc,
    write_meta_pickle,
    write_nanogpt_chars,
    write_npy,
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
    "llm.c, as tiny_shakespeare": (both(write_llmc, "tiny_shakespeare_{}.bin"), "uint16", "gpt2"),
    "llm.c for Llama 3": (both(write_llmc, "{}.bin", "uint32"), "uint32", "ids"),
    "llm.c with another vocabulary": (
        both(write_llmc, "{}.bin", vocab_size=60_000),
        "uint16",
        "ids",
    ),
    "llm.c, and meta.json agrees": (both(write_llmc, "{}.bin", dtype="uint16"), "uint16", "gpt2"),
    "numpy": (both(write_npy, "{}.npy"), "uint16", "gpt2"),
    "numpy, as edufineweb": (both(write_npy, "edufineweb_{}_000000.npy"), "uint16", "gpt2"),
    "numpy's own default": (both(write_npy, "{}.npy", "int64"), "int64", "gpt2"),
    "numpy, 32 bits": (both(write_npy, "{}.npy", "int32", vocab_size=50_257), "int32", "ids"),
    "numpy, named .bin": (
        both(lambda path, ids: path.write_bytes(_npy(ids)), "{}.bin"),
        "uint16",
        "gpt2",
    ),
    "bare, as nanoGPT's openwebtext": (both(write_bare, "{}.bin"), "uint16", "gpt2"),
    "bare uint32 by meta.json": (
        both(write_bare, "{}.bin", "uint32", vocab_size=100_000, dtype="uint32"),
        "uint32",
        "ids",
    ),
    "bare int64 by meta.json": (
        both(write_bare, "{}.bin", "int64", vocab_size=50_257, dtype="int64"),
        "int64",
        "ids",
    ),
    "bare bytes by meta.json": (
        both(write_bare, "{}.bin", "uint8", small=True, vocab_size=65, dtype="uint8"),
        "uint8",
        "ids",
    ),
    "bare ids of a tiny alphabet": (
        both(lambda path, ids: write_bare(path, ids % 13), "{}.bin", small=True, vocab_size=13),
        "uint16",
        "ids",
    ),
    "bare ids of a tiny alphabet, and nothing beside them": (
        both(lambda path, ids: write_bare(path, ids % 13), "{}.bin"),
        "uint16",
        "gpt2",
    ),
    "bare characters, vocab_size only": (
        both(write_bare, "{}.bin", small=True, vocab_size=65),
        "uint16",
        "ids",
    ),
}


def _npy(ids: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(ids, "uint16"))
    return file.getvalue()


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

    # Batches are those of the same tokens in nanoGPT's files.
    (tmp_path / "other").mkdir()
    both(write_bare, "{}.bin", "int64", vocab_size=1 << 17, dtype="int64")(tmp_path / "other")
    if ids is IDS:
        x, y = TokenData(info, 8, 7).train_batch(3, 5)
        u, v = TokenData(prepare(config(tmp_path / "other")), 8, 7).train_batch(3, 5)
        assert torch.equal(x, u)
        assert torch.equal(y, v)


def big_endian(path: Path, ids: Any) -> None:
    np.save(path, np.asarray(ids, ">u2"))


def floats(path: Path, ids: Any) -> None:
    np.save(path, np.asarray(ids, "float32"))


def table(path: Path, ids: Any) -> None:
    np.save(path, np.asarray(ids, "uint16").reshape(-1, 4))


def objects(path: Path, ids: Any) -> None:
    np.save(path, np.array([1, "a", None], dtype=object), allow_pickle=True)


def cut_off(write: Callable[..., None]) -> Callable[..., None]:
    def write_less(path: Path, ids: Any) -> None:
        write(path, ids)
        path.write_bytes(path.read_bytes()[:-6])

    return write_less


def llmc_of(**others: int) -> Callable[..., None]:
    return lambda path, ids: write_llmc(path, ids, **others)


def llmc_before(dtype: str) -> Callable[..., None]:
    """Return a writer of llm.c's header before tokens of another type."""

    def write(path: Path, ids: Any) -> None:
        write_llmc(path, ids)
        path.write_bytes(path.read_bytes()[:1024] + np.asarray(ids, dtype).tobytes())

    return write


def own_header(path: Path, ids: Any) -> None:
    """A header of another tool: a magic number, a count, and zeros."""
    header = np.zeros(256, np.int32)
    header[:2] = (12345, len(ids))
    path.write_bytes(header.tobytes() + np.asarray(ids, "uint16").tobytes())


def short_header(path: Path, ids: Any) -> None:
    header = np.array([0xFFFE, 0xFFFD, 1, 0], "uint16")
    path.write_bytes(header.tobytes() + np.asarray(ids, "uint16").tobytes())


def text(path: Path, ids: Any) -> None:
    path.write_text("To be, or not to be, that is the question. " * 20)


# The text of a meta.json, and what is said of it
WRONG_META = {
    b"[]": "it is a JSON list and no object",
    b'[{"vocab_size": 50257}]': "it is a JSON list and no object",
    b"null": "it is a JSON null and no object",
    b"50257": "it is a JSON number and no object",
    b"true": "it is a JSON true or false and no object",
    b'"gpt2"': "it is a JSON string and no object",
    b"": "Expecting value",
    b"{": "Expecting property name",
    b'{"vocab_size": 50257': "Expecting ',' delimiter",
    b"\xff": "'utf",
    b"[" * 100_000: "its lists and objects are nested too deeply",
    b'{"vocab_size": "50257"}': "not a tokenizer",
    b'{"vocab_size": 50257.0}': "not a tokenizer",
    b'{"vocab_size": 1e999}': "not a tokenizer",
    b'{"vocab_size": -1}': "not a tokenizer",
    b'{"vocab_size": true}': "not a tokenizer",
    b'{"vocab_size": [50257]}': "not a tokenizer",
    b'{"vocab_size": 1' + b"0" * 5000 + b"}": "Exceeds the limit",
    b'{"vocab_size": 1' + b"0" * 400 + b"}": "not a tokenizer",
    b'{"tokenizer": "gpt2"}': "not a tokenizer",
    b'{"tokenizer": null}': "not a tokenizer",
    b'{"tokenizer": {"kind": ["gpt2"]}}': "not a tokenizer",
    b'{"tokenizer": {"kind": "gpt2"}, "vocab_size": [1]}': "vocab_size = [1], but its tokenizer has",
    b'{"vocab_size": 50257, "dtype": 16}': "dtype = 16 is none of uint8",
    b'{"vocab_size": 50257, "dtype": ["uint16"]}': "dtype = ['uint16'] is none of uint8",
    b'{"vocab_size": 50257, "dtype": {}}': "dtype = {} is none of uint8",
}
REFUSED: dict[str, tuple[Write, str]] = {
    "llm.c, another version": (
        both(llmc_of(version=2), "{}.bin"),
        "llm.c's magic 20240520 with version 2, but nanoray reads version 1",
    ),
    "llm.c, cut off": (
        both(cut_off(write_llmc), "{}.bin"),
        "train.bin has 2018 bytes, but its header counts 500 tokens of uint16, which are 2024",
    ),
    "llm.c, wrong count": (both(llmc_of(count=3), "{}.bin"), "its header counts 3 tokens"),
    "llm.c's header before uint32": (
        both(llmc_before("uint32"), "{}.bin"),
        "its tokens are of another type",
    ),
    "llm.c's header before bytes": (
        both(llmc_before("uint8"), "{}.bin"),
        "its tokens are of another type",
    ),
    "llm.c's HellaSwag": (
        both(llmc_of(magic=20240522), "{}.bin"),
        "is questions of an evaluation of llm.c (magic 20240522), not tokens",
    ),
    "llm.c's model": (both(llmc_of(magic=20240326), "{}.bin"), "is a model of llm.c"),
    "llm.c's tokenizer": (both(llmc_of(magic=20240328), "{}.bin"), "is a tokenizer of llm.c"),
    "llm.c, meta.json contradicts": (
        both(write_llmc, "{}.bin", dtype="uint32", vocab_size=128_256),
        "has uint16 by its own header (llm.c), but meta.json says uint32; drop dtype",
    ),
    "a header of another tool": (
        both(own_header, "{}.bin"),
        "begins with 1024 bytes that are almost all 0, like a header of a kind that nanoray does",
    ),
    "a header of another tool, with meta.json": (
        both(own_header, "{}.bin", vocab_size=50_257, dtype="uint16"),
        "begins with 1024 bytes that are almost all 0",
    ),
    "a short header": (
        both(short_header, "{}.bin"),
        "token 0 is 65534, but vocab_size is 50257",
    ),
    "numpy, big-endian": (both(big_endian, "{}.npy"), "is an array of >u2, and tokens are"),
    "numpy, float": (both(floats, "{}.npy"), "is an array of <f4, and tokens are uint8, uint16"),
    "numpy, two dimensions": (both(table, "{}.npy"), "is an array of shape (125, 4)"),
    "numpy, objects": (both(objects, "{}.npy"), "is an array of |O"),
    "numpy, cut off": (both(cut_off(write_npy), "{}.npy"), "it is cut off: copy it again"),
    "numpy, damaged header": (
        both(lambda path, ids: path.write_bytes(b"\x93NUMPY\1\0\x08\0{'descr'"), "{}.npy"),
        "has a damaged header of numpy",
    ),
    "bare, named .npy": (
        both(write_bare, "{}.npy"),
        "has no header of numpy, in spite of its name",
    ),
    "bare uint32": (
        both(write_bare, "{}.bin", "uint32"),
        'train.bin looks like numbers of 32 bits, and nothing says so; write {"vocab_size": V, '
        '"dtype": "uint32"} into',
    ),
    "bare uint32 of characters": (
        both(write_bare, "{}.bin", "uint32", small=True, vocab_size=65),
        'looks like numbers of 32 bits, and nothing says so; add "dtype": "uint32" to',
    ),
    "bare int64": (
        both(write_bare, "{}.bin", "int64"),
        'looks like numbers of 64 bits, and nothing says so; write {"vocab_size": V, "dtype": "int64"}',
    ),
    "a vocabulary too large for 16 bits": (
        both(write_bare, "{}.bin", vocab_size=100_000),
        "a vocabulary of 100000 does not fit into 16",
    ),
    "bare bytes": (
        both(write_bare, "{}.bin", "uint8", small=True),
        "looks like text, or like one byte for each token",
    ),
    "text": (both(text, "{}.bin"), "looks like text, or like one byte for each token"),
    "bare, not GPT-2's": (
        both(lambda path, ids: write_bare(path, [*ids, 65_000]), "{}.bin"),
        "token 500 is 65000, but vocab_size is 50257; nothing says what these tokens are",
    ),
    "negative ids": (
        both(lambda path, ids: write_npy(path, [*ids, -1], "int32"), "{}.npy"),
        "token 500 is -1, but vocab_size is 50257; this is probably the mark of padding and no token",
    ),
    "labels": (
        both(lambda path, ids: write_npy(path, [*ids, -100], "int64"), "{}.npy"),
        "vocab_size is 50257; this is probably the mark of a label that does not count and no token",
    ),
    "labels in 16 bits": (
        both(lambda path, ids: write_npy(path, [*ids, 65_536 - 100], "uint16"), "{}.npy"),
        "token 500 is 65436, but vocab_size is 50257; this, -100 in 16 bits, is probably the mark",
    ),
    "labels in 32 bits, with meta.json": (
        both(
            lambda path, ids: write_bare(path, [*ids, (1 << 32) - 100], "uint32"),
            *("{}.bin",),
            dtype="uint32",
            vocab_size=50_257,
        ),
        "vocab_size is 50257; this, -100 in 32 bits, is probably the mark of a label",
    ),
    "another negative id": (
        both(lambda path, ids: write_npy(path, [*ids, -7], "int32"), "{}.npy"),
        "token 500 is -7, but vocab_size is 50257; no id is negative: write the ids of the tokens",
    ),
    "big-endian after a magic": (
        both(lambda path, ids: write_llmc(path, np.array(ids, "<u2").byteswap()), "{}.bin"),
        "vocab_size is 50257; with the bytes of each number swapped all of them would fit, so the "
        "file is probably "
        'big-endian: write it again with ids.astype("<u2")',
    ),
    "bare, big-endian": (
        both(
            lambda path, ids: write_bare(path, np.array(ids, "<u4").byteswap(), "uint32"),
            *("{}.bin",),
            dtype="uint32",
            vocab_size=50_257,
        ),
        "vocab_size is 50257; with the bytes of each number swapped all of them would fit, so the "
        'file is probably big-endian: write it again with ids.astype("<u4")',
    ),
    "uint32, stated as uint16": (
        both(write_bare, "{}.bin", "uint32", dtype="uint16", vocab_size=50_257),
        "train.bin: every second number of uint16 is 0, so its numbers have 32 bits; correct dtype",
    ),
    "uint16 of characters, stated as uint8": (
        both(write_bare, "{}.bin", small=True, dtype="uint8", vocab_size=65),
        "every second number of uint8 is 0, so its numbers have 16 bits; correct dtype in",
    ),
    "llm.c, not GPT-2's": (
        both(lambda path, ids: write_llmc(path, [*ids, 60_000]), "{}.bin"),
        "token 500 is 60000, but vocab_size is 50257; write the true vocab_size into",
    ),
    "meta.json without a vocabulary": (
        both(write_bare, "{}.bin", dtype="uint16"),
        "does not say what the tokens are; it must hold at least vocab_size, or tokenizer",
    ),
}


@pytest.mark.parametrize("text", WRONG_META)
def test_a_meta_json_of_another_shape_is_named_and_says_what_it_must_hold(
    tmp_path: Path, text: bytes
) -> None:
    write_bare(tmp_path / "train.bin", IDS)
    write_bare(tmp_path / "val.bin", IDS)
    (tmp_path / "meta.json").write_bytes(text)
    said = refused(lambda: prepare(config(tmp_path)))
    assert f"{tmp_path / 'meta.json'}: {WRONG_META[text]}" in said
    assert said.endswith("; it must hold at least vocab_size, or tokenizer")
    assert "object has no attribute" not in said


def test_a_dtype_that_cannot_hold_the_vocabulary_is_named(tmp_path: Path) -> None:
    """The ids above its largest one were cut when the file was written, and nothing shows it."""
    for split in ("train", "val"):
        write_npy(tmp_path / f"{split}.npy", IDS, "uint16")
    meta(tmp_path, vocab_size=128_256)
    assert (
        "warning: uint16 has no room for ids above 65535, and the vocabulary has 128256: where the "
        "tokenizer made such ids, others stand in their place"
    ) in prepare(config(tmp_path)).note
    meta(tmp_path, vocab_size=65_536)
    assert "warning" not in prepare(config(tmp_path)).note


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_for_certain_is_refused(tmp_path: Path, name: str) -> None:
    write, message = REFUSED[name]
    write(tmp_path)
    said = refused(lambda: prepare(config(tmp_path)))
    assert message in said
    assert "; " in said  # and its remedy


def test_no_refusal_advises_to_train_on_a_header(tmp_path: Path) -> None:
    """What a user may do next about a file with a header: state a wide vocabulary and a dtype."""
    for name, (write, _) in REFUSED.items():
        if "llm.c" not in name and "header" not in name:
            continue
        folder = tmp_path / name
        folder.mkdir()
        write(folder)
        said = refused(lambda where=folder: prepare(config(where)))
        if name == "a short header":  # nothing shows it, so the message names the danger
            assert said.endswith(". If the file begins with a header, remove that instead")
            continue
        for dtype in ("uint16", "uint32"):
            meta(folder, vocab_size=1 << 32, dtype=dtype)
            if name == "llm.c, not GPT-2's" and dtype == "uint16":
                assert tokens_of(prepare(config(folder)), "train")[:3] == IDS[:3].tolist()
            elif name != "llm.c, meta.json contradicts" or dtype == "uint32":
                refused(lambda where=folder: prepare(config(where)))


def test_one_token_file_is_no_text(tmp_path: Path) -> None:
    write_llmc(tmp_path / "train.bin", IDS)
    said = refused(lambda: prepare(config(tmp_path / "train.bin")))
    assert "train.bin is one file of tokens; name its folder" in said
    (tmp_path / "play.bin").write_text("a play " * 50)
    assert prepare(config(tmp_path / "play.bin")).train_tokens == 315


@quick
@given(
    data=st.binary(max_size=80),
    start=st.sampled_from([b"", b"\x93NUMPY\1\0", b"\x93NUMPY\2\0", np.int32(20240520).tobytes()]),
    name=st.sampled_from(["x.bin", "x.npy"]),
)
def test_any_bytes_have_a_header_or_are_refused(
    tmp_path: Path, data: bytes, start: bytes, name: str
) -> None:
    (tmp_path / name).write_bytes(start + data)
    try:
        header = read_header(tmp_path / name, Stated())
    except DataError:
        return
    itemsize = np.dtype(header.dtype).itemsize
    assert header.offset + header.tokens * itemsize == len(start + data)


# ---- several files for each split -----------------------------------------------------------------------------------


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


FOUND: dict[str, tuple[str, str]] = {  # files of a folder -> train files | val files, in order
    "val.bin train.bin input.txt prepare.py meta.pkl": ("train.bin", "val.bin"),
    "train_2.bin train_10.bin train_9.bin train_1.bin train_3.bin train_4.bin train_5.bin "
    "train_6.bin train_7.bin train_8.bin val.bin": (
        "train_1.bin train_2.bin train_3.bin train_4.bin train_5.bin train_6.bin train_7.bin "
        "train_8.bin train_9.bin train_10.bin",
        "val.bin",
    ),
    "fineweb_train_000002.bin fineweb_train_000001.bin fineweb_val_000000.bin": (
        "fineweb_train_000001.bin fineweb_train_000002.bin",
        "fineweb_val_000000.bin",
    ),
    "edu-train-00000-of-00002.npy edu-train-00001-of-00002.npy edu-validation.npy": (
        "edu-train-00000-of-00002.npy edu-train-00001-of-00002.npy",
        "edu-validation.npy",
    ),
    "train.bin val.bin old_train.bin": ("train.bin", "val.bin"),
    "train.bin valid.bin": ("train.bin", "valid.bin"),
}


@pytest.mark.parametrize("names", FOUND)
def test_files_of_a_folder(tmp_path: Path, names: str) -> None:
    touch(tmp_path, *names.split())
    train, val = find_splits(tmp_path)
    assert (" ".join(train), " ".join(val)) == FOUND[names]


NOT_FOUND = {
    "": "has no train.bin and no val.bin",
    "train.bin": "has no val.bin; name a folder that has both, under names such as train.bin, ",
    "training.bin validate.bin": "has no train.bin and no val.bin",
    "a_train.bin a_val.bin b_train.bin b_val.bin": "has more than one data set (a_train* and b_train*)",
    "train.bin val.bin b_train.bin b_val.bin": "has more than one data set (train* and b_train*); move",
    "a_train.bin b_val.bin": "has files of different data sets: a_train.bin and b_val.bin",
    "train.bin train_0.bin val.bin": "has train.bin and train_0.bin; keep one of them",
    "train_0.bin train_00.bin val.bin": "has train_0.bin and train_00.bin of one number",
    "train_0.bin train_0.npy val.bin": "has train_0.bin and train_0.npy of one number",
    "train_0.bin train_2.bin val.bin": "train files up to number 0 and from 2, but none between",
    "train-0-of-3.bin train-1-of-3.bin val.bin": "has 2 train files of 3 by their names",
}


@pytest.mark.parametrize("names", NOT_FOUND)
def test_folders_that_are_not_clear(tmp_path: Path, names: str) -> None:
    touch(tmp_path, *names.split())
    assert NOT_FOUND[names] in refused(lambda: find_splits(tmp_path))


def test_a_pattern_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a_train.bin", "a_val.bin", "b_train.bin", "x_train_1.bin", "x_train_3.bin")
    touch(tmp_path, "x_val_0.bin", "notes.bin")
    assert match_splits(f"{tmp_path}/a_*.bin") == (tmp_path, (["a_train.bin"], ["a_val.bin"]))
    _, splits = match_splits(f"{tmp_path}/x_*_[0123].bin")
    assert splits == (["x_train_1.bin", "x_train_3.bin"], ["x_val_0.bin"])
    _, splits = match_splits(f"{tmp_path}/[ab]_*.bin")
    assert splits == (["a_train.bin", "b_train.bin"], ["a_val.bin"])

    for pattern, message in {
        "c_*.bin": "matches no file; correct the pattern",
        "x_train_*.bin": f"none of them is for val; write a pattern that matches both splits, for "
        f"example '{tmp_path}/x_*_*.bin'",
        "*.bin": "matches notes.bin, whose name does not say whether it is for training",
    }.items():
        assert message in refused(lambda p=pattern: match_splits(f"{tmp_path}/{p}"))
    assert "in the name of a folder" in refused(lambda: match_splits(f"{tmp_path}*/a_*.bin"))

    # As users write it: from their working folder, and with a folder that looks like a pattern.
    monkeypatch.chdir(tmp_path)
    assert "matches no file" in refused(lambda: prepare(config("none_*.bin")))
    odd = tmp_path / "run[1]"
    odd.mkdir()
    both(write_llmc, "{}.bin")(odd)
    assert prepare(config("run[1]")).train_tokens == 500


def test_a_resume_from_another_folder_finds_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was started in the folder of the data, with a pattern that is relative to it."""
    touch(tmp_path, "a_train.bin", "a_val.bin")
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    saved = config("a_*.bin").model_dump()
    (run / "config.json").write_text(json.dumps(saved))
    (run / "run.json").write_text(json.dumps({"cwd": str(tmp_path)}))
    monkeypatch.chdir(run)
    flags = ["--resume", str(run)]
    assert parse_args(flags, "train", "").config.dataset == f"{tmp_path}/a_*.bin"
    monkeypatch.chdir(tmp_path)
    assert parse_args(flags, "train", "").config.dataset == "a_*.bin"


def shards(folder: Path, write: Callable[..., None], name: str, parts: int = 7) -> Path:
    """Write IDS in files of different sizes: 500 tokens to train, 200 in two files to val."""
    folder.mkdir(exist_ok=True)
    borders = np.linspace(0, 500, parts + 1).astype(int) + np.array([0, *[3] * (parts - 1), 0])
    for number in range(parts):
        ids = IDS[borders[number] : borders[number + 1]]
        write(folder / name.format("train", number + 1), ids)
    write(folder / name.format("val", 0), IDS[500:530])
    write(folder / name.format("val", 1), IDS[530:])
    return folder


KINDS = {
    "llm.c": (write_llmc, "fineweb_{}_{:06d}.bin"),
    "numpy": (write_npy, "edufineweb_{}_{:06d}.npy"),
    "bare": (write_bare, "{}_{:03d}.bin"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_several_files_are_one_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Every sample, and the hash, is that of one file with the same tokens."""
    monkeypatch.setattr(JoinedFiles, "OPEN_FILES", 2)
    folder = shards(tmp_path / "many", *KINDS[kind])
    many = prepare(config(folder))
    (tmp_path / "one").mkdir()
    both(write_bare, "{}.bin")(tmp_path / "one")
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
    file = joined._files["train"]
    assert isinstance(file, JoinedFiles)
    assert len(file._open) == 2


@pytest.mark.parametrize("victim", range(9))
def test_a_change_in_any_file_is_noticed(tmp_path: Path, victim: int) -> None:
    folder = shards(tmp_path / "many", *KINDS["llm.c"])
    info = prepare(config(folder))
    verify(info)
    before = sampled_hash(info)
    names = [file.name for file in (*info.files("train"), *info.files("val"))]
    path = folder / names[victim]
    data = bytearray(path.read_bytes())
    data[1024 + 8] ^= 1
    path.write_bytes(data)
    said = refused(lambda: verify(info))
    assert "fineweb_train_000001.bin to fineweb_val_000001.bin (9 files)" in said
    assert sampled_hash(info) != before
    assert prepare(config(folder)).tokens_sha256 != info.tokens_sha256

    path.write_bytes(data[:-2])
    assert "dataset changed" in refused(lambda: TokenData(info, 8, 0))
    path.unlink()
    assert f"dataset changed: cannot open {path}: No such file" in refused(
        lambda: TokenData(info, 8, 0)
    )


@pytest.mark.parametrize("page", [0, 10, 31, 40, 63])
def test_the_sampled_hash_has_pages_from_end_to_end_of_all_files(tmp_path: Path, page: int) -> None:
    for number in range(3):
        write_bare(tmp_path / f"train_{number}.bin", np.full(200_000, 400))
    write_bare(tmp_path / "val.bin", IDS)
    info = prepare(config(tmp_path))
    before = sampled_hash(info)

    # The page stands in one of three files of 400,000 bytes.
    file, place = divmod((1_200_000 - 4096) * page // 63, 400_000)
    with (tmp_path / f"train_{file}.bin").open("r+b") as changed:
        changed.seek(place)
        changed.write(b"x")
    assert sampled_hash(info) != before


def test_a_file_that_changes_during_training_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "many", *KINDS["llm.c"], parts=2)
    info = prepare(config(folder))
    file = open_tokens(info, "train")
    places = np.arange(500)
    assert file.numbers[places].tolist() == IDS[:500].tolist()
    path = folder / "fineweb_train_000002.bin"
    data = path.read_bytes()
    path.write_bytes(data[:1030])
    assert "has 1030 bytes, but 1518 were prepared" in refused(lambda: file.numbers[places])

    # One that is opened again is the file of before, and no other of its size.
    path.write_bytes(data)
    monkeypatch.setattr(JoinedFiles, "OPEN_FILES", 1)
    file = open_tokens(info, "train")
    path.unlink()
    path.write_bytes(data)
    assert "was replaced during the run" in refused(lambda: file.numbers[places])
    path.unlink()
    assert "cannot open" in refused(lambda: file.numbers[places])


MIXED: dict[str, tuple[Callable[..., None], str]] = {
    "no header": (
        write_bare,
        "fineweb_train_000001.bin has uint16, gpt2, llm.c's header, and "
        "fineweb_train_000003.bin has uint16, no header",
    ),
    "another dtype": (
        lambda path, ids: write_llmc(path, ids, "uint32"),
        "has uint32, llama3, llm.c's header",
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
    write(folder / "fineweb_train_000003.bin", IDS[:70])
    assert message in refused(lambda: prepare(config(folder)))


def test_records_of_older_runs_name_no_files(tmp_path: Path) -> None:
    both(write_bare, "{}.bin")(tmp_path)
    info = prepare(config(tmp_path))
    older = info.to_dict()
    assert (older.pop("train_files"), older.pop("val_files")) == ([], [])
    assert DatasetInfo.from_dict(older) == info
    (file,) = info.files("val")
    assert b"".join(read_tokens(info.path, file)) == (tmp_path / "val.bin").read_bytes()
    for wrong in (3, [3], [{"name": "x"}], [{"name": "x", "offset": 0, "tokens": 1, "more": 2}]):
        assert "not the record of a dataset" in refused(
            lambda w=wrong: DatasetInfo.from_dict(info.to_dict() | {"train_files": w})
        )


def test_programs_that_nanoray_is_measured_against_read_the_same_tokens(tmp_path: Path) -> None:
    """A benchmark that gave them the header, too, would compare two trainings."""
    both(write_llmc, "{}.bin")(tmp_path)
    keys = {"n_layer": 1, "n_head": 1, "n_embd": 8}
    info = prepare(config(tmp_path, **keys))
    NanoGPT(tmp_path, config(tmp_path, **keys), info, tmp_path / "peer")
    copied = tmp_path / "peer" / "nanogpt" / "data" / "bench"
    assert np.fromfile(copied / "train.bin", "uint16").tolist() == IDS[:500].tolist()
    assert np.fromfile(copied / "val.bin", "uint16").tolist() == IDS[500:].tolist()

    many = prepare(config(shards(tmp_path / "many", *KINDS["llm.c"]), **keys))
    NanoGPT(tmp_path, config(tmp_path, **keys), many, tmp_path / "peer of many")
    copied = tmp_path / "peer of many" / "nanogpt" / "data" / "bench"
    assert np.fromfile(copied / "train.bin", "uint16").tolist() == IDS[:500].tolist()
    assert "has several train files, and the plain loop reads one" in refused(
        lambda: next(plain_loop(config(tmp_path, **keys), many, 1))
    )

    # uint16 is all that nanoGPT reads, so larger ids would be cut.
    llama = tmp_path / "llama"
    llama.mkdir()
    both(write_llmc, "{}.bin", "uint32")(llama)
    wide = prepare(config(llama, **keys))
    assert "nanoGPT reads uint16" in refused(
        lambda: NanoGPT(tmp_path, config(llama, **keys), wide, tmp_path / "no peer")
    )


# ---- nanoGPT's meta.pkl ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_meta_pkl_is_read(tmp_path: Path, protocol: int) -> None:
    play = "What, ho! Naïve caf\u00e9,\nsays \U0001f37a. " * 40
    write_nanogpt_chars(tmp_path, play)
    write_meta_pickle(tmp_path, "".join(sorted(set(play))), protocol)
    info = prepare(config(tmp_path))
    assert "vocabulary char of meta.pkl" in info.note
    assert info.vocab_size == len(set(play))
    made = tokenizer_from_json(info.tokenizer)
    assert made.decode(tokens_of(info, "train")) == play[: int(len(play) * 0.9)]
    assert made.encode("café").tolist() == [sorted(set(play)).index(char) for char in "café"]


def test_meta_pkl_without_characters_or_in_another_order(tmp_path: Path) -> None:
    both(write_bare, "{}.bin", small=True)(tmp_path)
    # nanoGPT's train.py needs no more than the size.
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    assert prepare(config(tmp_path)).tokenizer == {"kind": "ids", "vocab_size": 65}

    # Words have no text that could be cut in one way only.
    itos = {number: f"w{number}" for number in range(65)}
    stoi = {word: number for number, word in itos.items()}
    (tmp_path / "meta.pkl").write_bytes(
        pickle.dumps({"vocab_size": 65, "itos": itos, "stoi": stoi})
    )
    assert prepare(config(tmp_path)).tokenizer == {"kind": "ids", "vocab_size": 65}

    # An alphabet in the order of a script.
    chars = "".join(chr(40 + (7 * number) % 65) for number in range(65))
    write_meta_pickle(tmp_path, chars)
    info = prepare(config(tmp_path))
    made = tokenizer_from_json(json.loads(json.dumps(info.to_dict()))["tokenizer"])
    assert made.encode(chars[::-1]).tolist() == list(range(65))[::-1]
    assert made.decode(range(65)) == chars
    assert made.to_json() == info.tokenizer

    # meta.json goes first, and a dtype alone leaves the vocabulary to meta.pkl.
    meta(tmp_path, dtype="uint16")
    assert prepare(config(tmp_path)).tokenizer == info.tokenizer
    meta(tmp_path, vocab_size=80)
    assert prepare(config(tmp_path)).tokenizer == {"kind": "ids", "vocab_size": 80}


def test_uint32_beside_meta_pkl_is_refused(tmp_path: Path) -> None:
    write_nanogpt_chars(tmp_path, "abcde fgh\n" * 60)
    ids = np.fromfile(tmp_path / "train.bin", "uint16")
    write_bare(tmp_path / "train.bin", ids, "uint32")
    said = refused(lambda: prepare(config(tmp_path)))
    assert "looks like numbers of 32 bits" in said
    assert 'write {"dtype": "uint32"} into' in said
    write_bare(tmp_path / "train.bin", [*ids, 200], "uint16")
    said = refused(lambda: prepare(config(tmp_path)))
    assert "token 540 is 200, but vocab_size is 10; meta.pkl belongs to other tokens" in said


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


plain = {"vocab_size": 2, "itos": {0: "a", 1: "b"}, "stoi": {"a": 0, "b": 1}}
circle: dict[str, Any] = {"vocab_size": 1}
circle["itos"] = circle["stoi"] = circle
NOT_PLAIN: dict[str, tuple[bytes, str]] = {
    "a list": (pickle.dumps(["a", "b"]), "has the instruction EMPTY_LIST, which is no part of"),
    "a class": (pickle.dumps(OrderedDict(plain)), "has the instruction STACK_GLOBAL"),
    "a class, protocol 0": (pickle.dumps(OrderedDict(plain), 0), "has the instruction GLOBAL"),
    "numpy's numbers": (pickle.dumps({"vocab_size": np.int64(2)}), "has the instruction"),
    "bytes": (pickle.dumps({"vocab_size": b"2"}), "has the instruction SHORT_BINBYTES"),
    "a truth value": (pickle.dumps(plain | {"vocab_size": True}), "has the instruction NEWTRUE"),
    "a truth value, protocol 0": (pickle.dumps({"vocab_size": True}, 0), "has no vocab_size"),
    "no vocab_size": (pickle.dumps({"itos": {}, "stoi": {}}), "has no vocab_size"),
    "a number": (pickle.dumps(7), "has no vocab_size"),
    "another size": (pickle.dumps(plain | {"vocab_size": 3}), "has other ids than 0 to 2"),
    "gaps": (
        pickle.dumps({"vocab_size": 2, "itos": {0: "a", 2: "b"}, "stoi": {"a": 0, "b": 2}}),
        "has other ids than 0 to 1",
    ),
    "tables that disagree": (
        pickle.dumps(plain | {"stoi": {"a": 1, "b": 0}}),
        "has itos and stoi that do not agree",
    ),
    "one table": (
        pickle.dumps({"vocab_size": 2, "itos": {0: "a"}}),
        "itos or stoi that is no table",
    ),
    "a table of tables": (
        pickle.dumps(plain | {"stoi": {"a": {}, "b": 1}}),
        "itos or stoi that is no table",
    ),
    "a circle": (pickle.dumps(circle), "itos or stoi that is no table"),
    "cut off": (pickle.dumps(plain)[:-1], "is no pickle, or a damaged one"),
    "cut in the middle": (pickle.dumps(plain)[:30], "is no pickle, or a damaged one"),
    "empty": (b"", "is no pickle, or a damaged one"),
    "text": (b"vocab_size: 65", "is no pickle, or a damaged one"),
    "too few values": (b"s.", "is no pickle, or a damaged one"),
    "a dictionary as a key": (b"}}I1\ns.", "is no pickle, or a damaged one"),
    "a mark": (b"(.", "has no vocab_size"),
    "an odd list of pairs": (b"(I1\nd.", "is no pickle, or a damaged one"),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_meta_pkl_with_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    data, message = NOT_PLAIN[name]
    both(write_bare, "{}.bin", small=True)(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(data)
    said = refused(lambda: prepare(config(tmp_path)))
    assert said.startswith(f"{tmp_path}/meta.pkl ")
    assert message in said
    assert "unpickling can run any code; write meta.json beside it" in said


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_meta_pkl_runs_nothing(tmp_path: Path, protocol: int) -> None:
    both(write_bare, "{}.bin", small=True)(tmp_path)
    made = tmp_path / "made"
    evil = pickle.dumps(plain | {"more": Evil(made)}, protocol)
    (tmp_path / "meta.pkl").write_bytes(evil)
    assert "has the instruction " in refused(lambda: prepare(config(tmp_path)))
    assert not made.exists()
    pickle.loads(evil)
    assert made.exists()  # so the file was dangerous


values = st.recursive(
    st.integers() | st.text(),
    lambda inner: st.dictionaries(st.integers() | st.text(), inner, max_size=5),
    max_leaves=20,
)


@quick
@given(value=values, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert meta_pickle._build(data) == value
    assert meta_pickle._build(pickletools.optimize(data)) == value


@quick
@given(data=st.binary(max_size=60), at=st.integers(0, 60), protocol=st.integers(0, 5))
def test_any_bytes_are_read_or_refused(data: bytes, at: int, protocol: int) -> None:
    good = pickle.dumps(plain, protocol)
    for damaged in (data, good[:at] + data + good[at:], good[:at] + data + good[at + len(data) :]):
        try:
            meta_pickle._tokenizer_of(meta_pickle._build(damaged))
        except meta_pickle.Refused:
            continue
