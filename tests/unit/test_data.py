"""Where the text comes from, what becomes of it on disk, and which tokens make sample i."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoray.config import make_config
from nanoray.data import cache, tokenizer
from nanoray.data import dataset as dataset_file
from nanoray.data import prepare as data
from nanoray.data.cache import cache_dir
from nanoray.data.dataset import DatasetInfo
from nanoray.data.prepare import prepare
from nanoray.data.tokenizer import (
    CharTokenizer,
    tokenizer_from_json,
)
from nanoray.data.tokens import TokenData
from nanoray.data.verify import verify
from nanoray.errors import DataError
from tests.harness.messages import find_line
from tests.harness.ports import closed_port

TEXT = b"".join(b"%d bottles of beer on the wall, take one down\n" % i for i in range(99))
quick = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def config(dataset: object = "auto", **keys: object) -> Any:
    return make_config({"dataset": str(dataset), "global_batch_size": 12, "block_size": 8, **keys})


@pytest.fixture(autouse=True)
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A closed port. Every proxy is there, 127.0.0.1 is let through."""
    with closed_port() as port:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.delenv("NO_PROXY", raising=False)
        yield port


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Let a short text pass for Shakespeare."""
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", hashlib.sha256(TEXT).hexdigest())
    return TEXT


@pytest.fixture
def sample_file(tmp_path: Path) -> Path:
    path = tmp_path / "beer.txt"
    path.write_bytes(TEXT)
    return path


@contextmanager
def serve(
    *answers: tuple[int, bytes], cut: int = 0, wait: threading.Event | None = None
) -> Iterator[tuple[str, list]]:
    """Serve `answers` in turn, the last one for ever; yields the URL and the list of requested
    paths.
    """
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[min(len(asked), len(answers) - 1)]
            asked.append(self.path)
            if wait:
                wait.wait(5)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) - cut])

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that gave up is no news
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/input.txt", asked
        finally:
            if wait:
                wait.set()
            server.shutdown()
            thread.join()


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as error:
        call()
    return str(error.value)


# ---- tokenizers -----------------------------------------------------------------------------------------------------


@quick
@given(st.text(min_size=1))
def test_char_round_trip(text: str) -> None:
    made = CharTokenizer("".join(sorted(set(text))))
    again = tokenizer_from_json(json.loads(json.dumps(made.to_json())))
    ids = again.encode(text)
    assert ids.tolist() == [sorted(set(text)).index(c) for c in text]  # nanoGPT's stoi
    assert again.decode(ids) == text
    assert again.vocab_size == len(set(text))


def test_gpt2_speaks_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real tiktoken with a toy vocabulary: bytes and one merge. The real one needs a download."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256}
    toy = tiktoken.Encoding("toy", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": toy}[name])
    made = tokenizer_from_json({"kind": "gpt2"})
    assert made.encode("ab é").tolist() == [256, 32, 195, 169]
    assert made.decode(np.array([256, 32, 195, 169, 50300])) == "ab é\ufffd"
    assert made.vocab_size == tokenizer.GPT2_VOCAB_SIZE == 50257


# ---- a text file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "vocab"), [("auto", 256), ("byte", 256), ("char", len(set(TEXT)))]
)
def test_text_file(sample_file: Path, kind: str, vocab: int) -> None:
    info = prepare(config(sample_file, tokenizer=kind, val_fraction=0.2))
    made = tokenizer_from_json(info.tokenizer)
    cut = int(len(TEXT) * 0.8)
    train, val = (np.fromfile(info.path / f"{s}.bin", info.dtype) for s in ("train", "val"))
    assert made.decode(train).encode() == TEXT[:cut]
    assert made.decode(val).encode() == TEXT[cut:]
    assert (info.name, info.vocab_size, info.dtype) == ("beer", vocab, "uint16")
    assert (info.train_tokens, info.val_tokens) == (cut, len(TEXT) - cut)
    assert info.sha256 == hashlib.sha256(TEXT).hexdigest()
    assert info.tokens_sha256 == hashlib.sha256(train.tobytes() + val.tobytes()).hexdigest()
    assert DatasetInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info
    assert files(info.path) == [".verified.json", "meta.json", "train.bin", "val.bin"]


@quick
@given(content=st.binary(max_size=300), kind=st.sampled_from(["byte", "char", "auto"]))
def test_any_bytes_prepare_or_raise_dataerror(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "any"
    path.write_bytes(content)
    try:
        info = prepare(config(path, tokenizer=kind, block_size=2))
    except DataError:
        return
    TokenData(info, 2, 0).train_batch(0, 2)
    assert tokenizer_from_json(info.tokenizer).decode(
        np.fromfile(info.path / "val.bin", info.dtype)
    )


def stamps(info: DatasetInfo) -> list[int]:
    return [p.stat().st_ino for p in sorted(info.path.iterdir())]


def test_cache_is_reused_and_keyed(sample_file: Path) -> None:
    info = prepare(config(sample_file))
    before = stamps(info)
    assert prepare(config(sample_file)) == info
    assert stamps(info) == before
    others = [
        prepare(config(sample_file, tokenizer="char")),
        prepare(config(sample_file, val_fraction=0.3)),
    ]
    sample_file.write_bytes(TEXT + b"!")
    assert len({i.path for i in (info, *others, prepare(config(sample_file)))}) == 4


# ---- the token cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["train.bin", "val.bin", "meta.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", None])
def test_damaged_cache_is_rebuilt(sample_file: Path, victim: str, content: bytes | None) -> None:
    info = prepare(config(sample_file))
    good = {p.name: p.read_bytes() for p in info.path.iterdir()}
    (info.path / victim).unlink() if content is None else (info.path / victim).write_bytes(content)
    again = prepare(config(sample_file))
    assert replace(again, note=info.note) == info
    assert ("damaged token cache was rebuilt" in again.note) == (
        (victim, content) != ("meta.json", None)
    )
    for name in ("train.bin", "val.bin"):
        assert (info.path / name).read_bytes() == good[name]
    assert prepare(config(sample_file)).note == info.note


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    (tmp_path / "f").write_bytes(b"old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    assert "cannot write" in refused(lambda: cache.write(tmp_path / "f", b"new"))
    assert files(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


# ---- Shakespeare, from near and far ---------------------------------------------------------------------------------


# Shakespeare by name is never replaced by stdlib
@pytest.mark.parametrize(
    ("answer", "cut", "reason"),
    [
        ((404, b""), 0, "HTTP Error 404: Not Found"),
        ((200, TEXT), 9, "bytes are another text"),
        ((200, b"<html>log in</html>"), 0, "these 19 bytes are another text"),
    ],
)
def test_failed_download(
    play: bytes,
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[int, bytes],
    cut: int,
    reason: str,
) -> None:
    with serve(answer, cut=cut) as (url, _):
        monkeypatch.setattr(data, "SHAKESPEARE_URL", url)
        text = refused(lambda: prepare(config("shakespeare")))
    assert text.startswith(f"cannot get Shakespeare from {url}: ")
    assert reason in text
    got = "nothing"
    if answer[0] == 200:
        got = hashlib.sha256(answer[1][: len(answer[1]) - cut]).hexdigest()
    assert f"(sha256 expected {hashlib.sha256(play).hexdigest()}, got {got})" in text
    assert text.endswith("name a copy with --dataset PATH, or use --dataset auto")
    assert files(cache_dir(config())) == []


def test_auto_prefers_what_is_cached_or_can_be_had(
    play: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve((200, play)) as (url, asked):
        monkeypatch.setattr(data, "SHAKESPEARE_URL", url)
        assert prepare(config("auto")).name == "shakespeare"
    assert prepare(config("auto")).name == "shakespeare"
    assert len(asked) == 1


# ---- a folder of token files ----------------------------------------------------------------------------------------


def folder(
    path: Path, train: Any, val: Any = range(20), dtype: str = "uint16", **meta: Any
) -> Path:
    path.mkdir(exist_ok=True)
    np.array(train, dtype).tofile(path / "train.bin")
    np.array(val, dtype).tofile(path / "val.bin")
    (path / "meta.json").write_text(json.dumps({"dtype": dtype, **meta}))
    return path


def test_nanogpt_folder(tmp_path: Path) -> None:
    where = folder(tmp_path / "owt", range(50237, 50257), tokenizer={"kind": "gpt2"})
    info = prepare(config(where))
    assert (info.name, info.vocab_size, info.dtype) == ("owt", 50257, "uint16")
    assert (info.train_tokens, info.val_tokens, info.tokenizer) == (20, 20, {"kind": "gpt2"})
    raw = (where / "train.bin").read_bytes() + (where / "val.bin").read_bytes()
    assert info.tokens_sha256 == hashlib.sha256(raw).hexdigest()
    assert files(where) == [
        "meta.json",
        "train.bin",
        "val.bin",
    ]  # theirs, so nothing is written there


def test_folder_with_meta(tmp_path: Path, sample_file: Path) -> None:
    where = folder(tmp_path / "w", [99_999] * 20, dtype="uint32")
    (where / "meta.json").write_text('{"vocab_size": 100000, "dtype": "uint32"}')
    wide = prepare(config(where))
    assert (wide.vocab_size, wide.train_tokens, wide.tokenizer["kind"]) == (100_000, 20, "ids")
    assert TokenData(wide, 8, 0).train_batch(0, 1)[0].tolist() == [[99_999] * 8]
    ours = prepare(config(sample_file, tokenizer="char"))
    copy = prepare(config(ours.path))
    same = {"name": ours.name, "note": ours.note, "train_files": (), "val_files": ()}
    assert replace(copy, **same) == ours


@pytest.mark.parametrize(
    ("train", "val", "file"), [([3, 300, 4], [1] * 9, "train"), ([1] * 9, [7] * 5 + [256], "val")]
)
def test_id_outside_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: list[int], val: list[int], file: str
) -> None:
    monkeypatch.setattr(dataset_file, "CHUNK_BYTES", 4)  # two tokens, so that chunks count
    where = folder(tmp_path / "d", train, val, vocab_size=256)
    text = refused(lambda: prepare(config(where)))
    at, wrong = (1, 300) if file == "train" else (5, 256)
    find_line(text, f"{where}/{file}.bin", f"token {at} is {wrong}", "vocab_size is 256", "correct")


# ---- samples --------------------------------------------------------------------------------------------------------


def tokens(
    path: Path, n: int = 1000, n_val: int = 100, block_size: int = 8, seed: int = 1337
) -> TokenData:
    where = folder(path / "tokens", np.arange(n), np.arange(n_val), vocab_size=65536)
    return TokenData(prepare(config(where, block_size=block_size)), block_size, seed)


def splitmix64(seed: int, index: int) -> int:
    """The published algorithm, one sample at a time, in Python's own integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    return mix(mix(seed) + (index + 1) * 0x9E3779B97F4A7C15 & mask)


def test_splitmix64_is_the_published_one() -> None:
    assert [splitmix64(0, i) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@quick
@given(seed=st.integers(0, 2**63 - 1), first=st.integers(0, 2**40), count=st.integers(1, 9))
def test_order_is_splitmix64(tmp_path: Path, seed: int, first: int, count: int) -> None:
    got = tokens(tmp_path, seed=seed).offsets(first, count)
    assert got.dtype == np.int64
    assert got.tolist() == [splitmix64(seed, i) % (1000 - 8) for i in range(first, first + count)]


@quick
@given(
    micro=st.integers(1, 4), dp=st.integers(1, 5), accum=st.integers(1, 3), step=st.integers(0, 99)
)
def test_order_does_not_depend_on_the_ranks(
    tmp_path: Path, micro: int, dp: int, accum: int, step: int
) -> None:
    source, total = tokens(tmp_path), micro * dp * accum
    whole, _ = source.train_batch(step * total, total)
    parts = [
        source.train_batch(step * total + (m * dp + rank) * micro, micro)[0]
        for m in range(accum)
        for rank in range(dp)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_one_integer_resumes(tmp_path: Path) -> None:
    first = tokens(tmp_path)
    straight = [first.train_batch(i, 5) for i in range(0, 50, 5)]
    resumed = [tokens(tmp_path).train_batch(i, 5) for i in range(25, 50, 5)]
    for (x, y), (u, v) in zip(straight[5:], resumed, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    assert not np.array_equal(first.offsets(0, 50), tokens(tmp_path, seed=1338).offsets(0, 50))


def test_batches(tmp_path: Path) -> None:
    source = tokens(tmp_path)
    x, y = source.train_batch(7, 4)
    starts = torch.from_numpy(source.offsets(7, 4))
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert torch.equal(x, starts[:, None] + torch.arange(8))  # token i of the file is i
    assert torch.equal(y, x + 1)
    assert torch.equal(y[:, :-1], x[:, 1:])
    u, v = source.val_batch(np.array([0, 91]))
    assert u.tolist() == [list(range(8)), list(range(91, 99))]
    assert torch.equal(v, u + 1)


@quick
@given(n_val=st.integers(9, 400), limit=st.integers(1, 60))
def test_val_windows(tmp_path: Path, n_val: int, limit: int) -> None:
    starts = tokens(tmp_path, n_val=n_val).val_windows(limit)
    assert len(starts) == min(limit, (n_val - 1) // 8)
    gaps = np.diff(starts)
    assert (gaps >= 8).all()  # inputs never overlap
    assert np.ptp(gaps) <= 1 if len(gaps) else starts.tolist() == [0]  # evenly spaced
    assert starts[0] == 0
    assert starts[-1] + 8 <= n_val - 1  # the last target exists
    assert len(starts) == 1 or starts[-1] + 8 == n_val - 1


def test_dataset_changed(tmp_path: Path) -> None:
    tokens(tmp_path)
    info = prepare(config(tmp_path / "tokens"))
    np.arange(90, dtype=np.uint16).tofile(info.path / "val.bin")
    text = refused(lambda: TokenData(info, 8, 0))
    changed = f"dataset changed: {info.path}/val.bin"
    find_line(text, changed, "180 bytes", "200", "prepare it again")
    (info.path / "val.bin").unlink()
    text = refused(lambda: TokenData(info, 8, 0))
    assert f"dataset changed: cannot open {info.path}/val.bin: No such file or directory" in text
    assert "--data_dir on shared storage" in text


# What is on disk is verified.


def overwrite_half(path: Path) -> None:
    """Put zeros in place of the second half of a file, at the same size."""
    with path.open("r+b") as file:
        half = path.stat().st_size // 2
        file.seek(half)
        file.write(bytes(path.stat().st_size - half))


def test_half_of_a_cached_file_overwritten_is_noticed(sample_file: Path) -> None:
    """The size is right. What made the cache is there, so it is made again; a rank that finds it so
    refuses.
    """
    info = prepare(config(sample_file))
    verify(info)
    good = (info.path / "train.bin").read_bytes()
    overwrite_half(info.path / "train.bin")
    with pytest.raises(
        DataError,
        match=rf"dataset changed: train.bin and val.bin of {info.path} have sha256 \w{{16}}",
    ):
        verify(info)
    assert "its damaged token cache was rebuilt" in prepare(config(sample_file)).note
    assert (info.path / "train.bin").read_bytes() == good
    verify(info)


def test_a_file_that_shrinks_during_training_is_an_error_and_no_signal(sample_file: Path) -> None:
    """To read a mapped page beyond the end of the file would end the process with SIGBUS."""
    info = prepare(config(sample_file))
    data = TokenData(info, 8, 1)
    data.train_batch(0, 4)
    os.truncate(info.path / "train.bin", 10)
    with pytest.raises(
        DataError, match=r"dataset changed: .*train.bin has 10 bytes, but \d+ were prepared"
    ):
        data.train_batch(4, 4)
