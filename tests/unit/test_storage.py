"""Object storage without a server: which URLs are accepted, what may be shown, and file:// stores."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nanoray.base.storage.remote_run import RunUrl, is_run_name
from nanoray.base.storage.store import MOST_PARTS, PART, StorageError, Store, part_size
from nanoray.base.storage.url import is_secret, problem_of, scrub
from nanoray.checkpoint.manifest import MANIFEST, Damage, manifest_json, parse_manifest
from nanoray.checkpoint.upload import fetch, process
from nanoray.checkpoint.upload.__main__ import main as upload_by_hand
from nanoray.checkpoint.upload.process import Upload
from nanoray.checkpoint.upload.records import pause_s, record_files, version_of
from nanoray.checkpoint.upload.sender import NotAllowed, Removed, RunSender
from nanoray.checkpoint.upload.worker import fence
from nanoray.cli import parse_args
from nanoray.config import Config, load_config, make_config
from nanoray.errors import ConfigError

SECRET = "wJalrXUtnFEMI/K7MDENG"


# URLs.


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a folder/b",
        "s3://bucket",
        "gs://bucket.example.org/runs",
        "file:///mnt/a b",
        "s3://bucket/user@host/runs",
        "s3://bucket/",
        "s3://bucket//",
        "s3://bucket/runs//",
        "s3://Bucket/runs",
        "s3://bucket/a%2Fb/ü#1/.../a::b/*[",
        "file:///mnt/runs/",
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/runs",
    ],
)
def test_these_urls_are_accepted(url: str) -> None:
    assert problem_of("upload", url) is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("runs/here", "is no URL; write s3://BUCKET/FOLDER"),
        ("ftp://host/x", "unknown protocol ftp; use one of s3, gs, file"),
        ("file://relative/x", "write three slashes, as in file:///mnt/runs"),
        ("s3:///x", "names no bucket; write s3://BUCKET/FOLDER"),
        (f"s3://AKIA:{SECRET}@bucket/x", "s3://bucket/x contains more than a bucket"),
        (f"s3://AKIA:{SECRET}/x", "s3://.../... contains more than a bucket"),
        (f"s3://bucket/x?X-Amz-Signature={SECRET}", "s3://bucket/x contains more than a bucket"),
        (f"ftp://me:{SECRET}@host/x", "ftp://host/x: unknown protocol"),
        ("S3://bucket/x", "unknown protocol S3; use one of s3, gs, file"),
        (" s3://bucket/x", "unknown protocol  s3; use one of s3, gs, file"),
        (
            "s3://bucket//runs",
            "has an empty segment, . or .., which name no folder there; write s3://bu",
        ),
        (
            "gs://bucket/a//b/",
            "has an empty segment, . or .., which name no folder there; write gs://bu",
        ),
        ("s3://bucket/./runs", "; write s3://bucket/runs"),
        ("s3://bucket/../runs", "; write s3://bucket/runs"),
        ("s3://bucket/a/..//b", "; write s3://bucket/b"),
        ("file:////mnt//runs/.", "; write file:///mnt/runs"),
        ("s3://bucket/a\nb", "has a character that cannot be seen"),
        ("s3://bucket/a\u200bb", "has a character that cannot be seen"),
    ],
)
@pytest.mark.parametrize("key", ["upload", "resume"])
def test_others_are_refused_without_what_may_be_a_secret(key: str, url: str, words: str) -> None:
    if key == "resume" and "://" not in url:
        pytest.skip("a path")
    for make in (
        lambda: make_config({key: url}),
        lambda: parse_args([f"--{key}", url], "nanoray train", "", None),
        lambda: Config(**{key: url}),
    ):
        with pytest.raises((ConfigError, ValidationError)) as raised:
            make()
        assert words in str(raised.value)
        assert SECRET not in str(raised.value)


def test_a_variable_of_the_cloud_is_scrubbed_from_messages() -> None:
    assert is_secret("AWS_SECRET_ACCESS_KEY")
    assert is_secret("AWS_SESSION_TOKEN")
    assert not is_secret("AWS_WEB_IDENTITY_TOKEN_FILE")
    assert not is_secret("AWS_ENDPOINT_URL")
    text = scrub(f"bad {SECRET} at http://me:you@host/x", {"AWS_SECRET_ACCESS_KEY": SECRET})
    assert text == "bad *** at http://host/x"


@pytest.mark.parametrize(
    ("url", "run", "step"),
    [
        ("s3://b/x/RUN", "s3://b/x/RUN", ""),
        ("s3://b/x/RUN/", "s3://b/x/RUN", ""),
        ("s3://b/RUN/checkpoints", "s3://b/RUN", ""),
        ("s3://b/RUN/checkpoints/step_00000020", "s3://b/RUN", "step_00000020"),
    ],
)
def test_a_url_names_a_run_or_a_checkpoint(url: str, run: str, step: str) -> None:
    assert RunUrl.of(url) == RunUrl(run, step)
    assert RunUrl.of(url).name == "RUN"
    assert is_run_name("2026-11-26_125419_tiny")
    assert not is_run_name("RUN")


def test_a_package_that_is_missing_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither test environment has all packages; without its finder this Python has none."""
    monkeypatch.setattr(sys, "meta_path", [])
    for name in ("s3fs", "gcsfs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    words = r"needs the package {0}, .*run: pip install 'nanoray\[{1}\]'"
    with pytest.raises(ConfigError, match="upload = s3://b " + words.format("s3fs", "s3")):
        Upload("s3://b", 1.0).begin()
    with pytest.raises(StorageError, match=words.format("gcsfs", "gcs")):
        Store("gs://b")


# A store in a folder.


@pytest.mark.parametrize("folder", ["a b", "a%2Fb", "ü#1", "a*b[1]?", "a::b", "~x", "$HOME", "{x}"])
def test_a_folder_with_any_name_has_its_objects_under_it(tmp_path: Path, folder: str) -> None:
    assert problem_of("upload", f"file://{tmp_path}/{folder}") is None
    store = Store(f"file://{tmp_path}/{folder}/")
    store.probe()
    store.put("RUN/m", b"12")
    assert (tmp_path / folder / "RUN" / "m").read_bytes() == b"12"
    assert store.sizes("RUN") == {"m": 2}
    assert store.folders() == ["RUN"]


def test_the_probe_finds_out_what_an_upload_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each right by itself, of servers that say 403; and a store that lists what it was not sent."""
    store = Store(f"file://{tmp_path}/there")
    store.probe()
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"], "the probe leaves nothing"

    def deny(*_: Any, **__: Any) -> Any:
        raise PermissionError("Access Denied")

    for verb, method, right in (
        ("write", "open", "s3:PutObject"),
        ("read", "cat_file", "s3:GetObject"),
        ("list", "find", "s3:ListBucket"),
    ):
        store = Store(f"file://{tmp_path}/there")
        store.url = "s3://bucket/there"
        monkeypatch.setattr(store._files, method, deny)
        with pytest.raises(
            StorageError, match=f"cannot {verb} .* needs the right {right}"
        ) as raised:
            store.probe()
        assert raised.value.refused
    # As gcsfs says it
    store = Store(f"file://{tmp_path}/there")
    store.url = "gs://bucket/there"
    assert store._problem("list", "", OSError("Forbidden: b/o\nno")).refused
    assert "storage.objects.list" in str(store._problem("list", "", OSError("Forbidden: b/o\nno")))

    store = Store(f"file://{tmp_path}/there")
    monkeypatch.setattr("nanoray.base.storage.store.PROBE_LISTED_S", 0.0)
    monkeypatch.setattr(store, "sizes", lambda folder: {"": 0})
    with pytest.raises(StorageError, match="72 bytes were written, 72 are read and None listed"):
        store.probe()


def test_objects_come_back_and_are_listed(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/a folder/x")
    store.probe()
    assert store.sizes("") == {}
    data = os.urandom(PART + 17)
    digest = store.put("run/checkpoints/m.bin", data)
    assert digest == hashlib.sha256(data).hexdigest()
    store.put("run/empty", b"")
    assert store.sizes("run") == {"checkpoints/m.bin": len(data), "empty": 0}
    assert store.folders() == ["run"]
    assert store.get("run/checkpoints/m.bin", tmp_path / "copy") == (len(data), digest)
    assert (tmp_path / "copy").read_bytes() == data
    assert store.read("run/empty") == b""
    with pytest.raises(StorageError, match=r"cannot read file://.*/none \(FileNotFoundError") as e:
        store.read("none")
    assert e.value.missing


class Torn(io.BytesIO):
    """A file whose disk fails after the first part."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell():
            raise OSError(5, "the disk fails")
        return super().read(size)


def test_what_is_not_complete_does_not_appear(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    store.put("a", b"before")
    with pytest.raises(StorageError, match=r"cannot write file://.*/a \(OSError: .*disk fails"):
        store.put("a", Torn(bytes(2 * PART)), 2 * PART)
    assert store.read("a") == b"before"
    assert os.listdir(tmp_path) == ["a"]


def test_a_place_that_refuses_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        Store(f"file://{tmp_path}/file/x").probe()
    with pytest.raises(StorageError, match="cannot remove"):
        Store(f"file://{tmp_path}").remove("none")


def test_parts_are_few_enough() -> None:
    assert part_size(100) == PART
    assert -(-(10**12) // part_size(10**12)) <= MOST_PARTS


# Manifests.


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b'{"format": 1}',
        manifest_json({"../x": {"bytes": 1, "sha256": "a"}}, 1),
        manifest_json({"x": {"bytes": 1, "sha256": "a"}}, 1) + b" ",
    ],
)
def test_a_manifest_that_nanoray_did_not_write_is_damage(raw: bytes) -> None:
    with pytest.raises(Damage, match=r"manifest.json: not as nanoray writes it"):
        parse_manifest(raw)


# Sending.


def make_step(run: Path, step: int, fill: bytes = b"x") -> str:
    """Make a checkpoint as others see it: files, and a manifest with their sums."""
    name = f"step_{step:08d}"
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    sums = {}
    for file in ("model.safetensors", "state.json"):
        data = fill * 1000
        (folder / file).write_bytes(data)
        sums[file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_bytes(manifest_json(sums, 1))
    return name


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    run = tmp_path / "my runs" / "2026-11-26_125419_tiny"
    (run / "logs").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "attempt").write_text("0 1.5\n")
    (run / "lock").write_text("")
    (run / "logs" / "rank0.progress").write_text("")
    (run / "logs" / "rank0.log").write_text("hello\n")
    return run


def sender_of(run: Path, where: Path, **more: Any) -> tuple[RunSender, Store]:
    store = Store(f"file://{where}/{run.name}")
    return RunSender(run, store, run / ".upload-1", **more), store


def test_the_newest_checkpoint_goes_first_and_its_manifest_last(
    run_folder: Path, tmp_path: Path
) -> None:
    make_step(run_folder, 20)
    newest = make_step(run_folder, 40)
    order: list[str] = []
    there = tmp_path / "there" / run_folder.name

    def look() -> None:
        order[:] = sorted(str(p.relative_to(there)) for p in there.rglob("*") if p.is_file())

    sender, store = sender_of(run_folder, tmp_path / "there", allowed=look)
    sender.find_sent()
    assert sender.pending() == [newest, "step_00000020"]
    sender.send_checkpoint(newest)
    # When the manifest was about to be written: all else was there, and the records, too.
    assert order == [
        f"checkpoints/{newest}/model.safetensors",
        f"checkpoints/{newest}/state.json",
        "config.json",
        "logs/rank0.log",
        "metrics.jsonl",
    ]
    assert store.read(f"checkpoints/{newest}/{MANIFEST}")
    assert sender.pending() == ["step_00000020"]
    assert sender.sent() == [newest]
    assert not (run_folder / ".upload-1").exists()

    # Another process sees what is there, and sends the rest alone.
    again, _ = sender_of(run_folder, tmp_path / "there")
    again.find_sent()
    assert again.pending() == ["step_00000020"]


def test_a_checkpoint_that_is_removed_meanwhile_arrives_whole(
    run_folder: Path, tmp_path: Path
) -> None:
    name = make_step(run_folder, 20)

    def prune() -> None:
        shutil.rmtree(run_folder / "checkpoints" / name, ignore_errors=True)

    sender, store = sender_of(run_folder, tmp_path / "there", allowed=prune)
    sender.send_checkpoint(name)
    sums, _ = parse_manifest(store.read(f"checkpoints/{name}/{MANIFEST}"))
    assert store.sizes(f"checkpoints/{name}").keys() == {MANIFEST, *sums}


def test_without_hard_links_a_removed_one_is_left_out_by_name(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    name = make_step(run_folder, 20)

    def prune() -> None:
        shutil.rmtree(run_folder / "checkpoints" / name, ignore_errors=True)

    sender, store = sender_of(run_folder, tmp_path / "there", allowed=prune)
    with pytest.raises(Removed, match="step_00000020 was removed before it was sent"):
        sender.send_checkpoint(name)
    assert sender.pending() == []
    with pytest.raises(Removed, match="was removed before"):
        sender.send_checkpoint("step_00000099")
    assert MANIFEST not in store.sizes(f"checkpoints/{name}")


@pytest.mark.parametrize("how", ["changed", "short", "missing"])
def test_a_damaged_checkpoint_gets_no_manifest(run_folder: Path, tmp_path: Path, how: str) -> None:
    name = make_step(run_folder, 20)
    model = run_folder / "checkpoints" / name / "model.safetensors"
    if how == "missing":
        model.unlink()
    else:
        model.write_bytes(b"y" * (1000 if how == "changed" else 10))
    sender, store = sender_of(run_folder, tmp_path / "there")
    with pytest.raises(Damage, match="step_00000020 is damaged"):
        sender.send_checkpoint(name)
    assert MANIFEST not in store.sizes(f"checkpoints/{name}")
    # It is left out, until it is saved again.
    assert sender.pending() == []
    shutil.rmtree(run_folder / "checkpoints")
    make_step(run_folder, 20)
    assert sender.pending() == [name]


def test_a_step_that_was_saved_again_looks_whole_at_no_moment(
    run_folder: Path, tmp_path: Path
) -> None:
    name = make_step(run_folder, 20)
    sender_of(run_folder, tmp_path / "there")[0].send_checkpoint(name)
    shutil.rmtree(run_folder / "checkpoints")
    make_step(run_folder, 20, b"z")
    seen = []

    def look() -> None:
        there = store.sizes(f"checkpoints/{name}")
        content = store.read(f"checkpoints/{name}/model.safetensors")[:1]
        seen.append((MANIFEST in there, content))

    sender, store = sender_of(run_folder, tmp_path / "there", allowed=look)
    sender.find_sent()
    assert sender.pending() == [name]
    sender.send_checkpoint(name)
    assert (True, b"z") not in seen
    assert (False, b"z") in seen
    assert sender.pending() == []


def test_objects_that_got_lost_there_are_sent_again(run_folder: Path, tmp_path: Path) -> None:
    name = make_step(run_folder, 20)
    lost = tmp_path / "there" / run_folder.name / "checkpoints" / name / "model.safetensors"
    calls = []

    def lose() -> None:
        calls.append(1)
        if len(calls) == 3:  # a record is due: the checkpoint's files are there
            lost.unlink()

    sender, store = sender_of(run_folder, tmp_path / "there", allowed=lose)
    with pytest.raises(StorageError, match=r"model.safetensors has no bytes there instead of 1000"):
        sender.send_checkpoint(name)
    assert MANIFEST not in store.sizes(f"checkpoints/{name}")
    sender.send_checkpoint(name)
    assert store.sizes(f"checkpoints/{name}")["model.safetensors"] == 1000


def test_records_are_sent_when_they_have_changed(run_folder: Path, tmp_path: Path) -> None:
    names = [name for name, _ in record_files(run_folder)]
    assert names == ["config.json", "metrics.jsonl", "logs/rank0.log"]
    sender, store = sender_of(run_folder, tmp_path / "there")
    sender.send_records()
    assert sorted(store.sizes("")) == sorted(names)
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    assert sender.records_due() == []
    assert [name for name, _ in sender.records_due(at_once=True)] == ["metrics.jsonl"]
    sender.send_records(at_once=True)
    assert b'"step": 2' in store.read("metrics.jsonl")
    assert version_of(tmp_path / "none") is None
    assert version_of(tmp_path) is None
    # A file that takes ten seconds is sent every two hundred; logs of ranks less often.
    assert pause_s("metrics.jsonl", 10.0) == 200.0
    assert pause_s("logs/rank0.log", 0.1) > pause_s("metrics.jsonl", 0.1)


# Who may send.


def test_only_the_present_command_and_attempt_may_send(run_folder: Path) -> None:
    fence(run_folder, 1.5, None)()
    fence(run_folder, 1.5, 0)()
    with pytest.raises(NotAllowed, match="another command continues the run"):
        fence(run_folder, 1.0, None)()
    (run_folder / "attempt").write_text("3 1.5\n")
    fence(run_folder, 1.5, None)()
    with pytest.raises(NotAllowed, match="attempt 2 is over: attempt 3 sends the run"):
        fence(run_folder, 1.5, 2)()
    (run_folder / "attempt").write_text("torn")
    with pytest.raises(StorageError, match=r"cannot tell from .*attempt"):
        fence(run_folder, 1.5, None)()
    (run_folder / "attempt").unlink()
    with pytest.raises(StorageError, match="attempt is missing, so nothing says who may send"):
        fence(run_folder, 1.5, None)()


def test_an_older_command_writes_no_object_over_a_newer_ones(
    run_folder: Path, tmp_path: Path
) -> None:
    """Also where it is overtaken in the middle of a checkpoint."""
    name = make_step(run_folder, 20)
    check = fence(run_folder, 1.5, 0)

    def take_over() -> None:
        check()
        (run_folder / "attempt").write_text("1 1.5\n")

    sender, store = sender_of(run_folder, tmp_path / "there", allowed=take_over)
    with pytest.raises(NotAllowed):
        sender.send_checkpoint(name)
    assert store.sizes("") == {f"checkpoints/{name}/model.safetensors": 1000}
    assert not (run_folder / ".upload-1").exists()


# The process beside the training.


def wait_until(is_true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Spec:
    """What `follow` reads of a RunSpec."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = 1.5


def test_the_process_sends_survives_its_own_death_and_ends_with_the_run(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there" / run_folder.name
    with Upload(f"file://{tmp_path}/there", 60.0) as upload:
        upload.begin()
        make_step(run_folder, 20)
        upload.follow(Spec(run_folder), 0)  # type: ignore[arg-type]
        wait_until((there / "checkpoints" / "step_00000020" / MANIFEST).exists)
        assert upload._process
        first = upload._process.pid
        assert os.getpriority(os.PRIO_PROCESS, first) == 19
        os.kill(first, 9)
        upload._process.wait()
        upload.say_news()
        assert upload._process.pid != first
        make_step(run_folder, 40)
        second = upload._process.pid
    out = capsys.readouterr().out
    assert "warning  upload: its process ended with -9; another one goes on" in out
    assert f"upload   file://{tmp_path}/there/{run_folder.name}: 2 checkpoint(s), newest " in out
    assert (there / "checkpoints" / "step_00000040" / MANIFEST).exists()
    assert not Path(f"/proc/{second}").exists()
    assert not list(run_folder.glob(".upload-*"))


def test_a_process_that_is_frozen_delays_no_call_and_ends_no_run(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As slow as storage can be: the run goes on beside it, and its end waits for no more than
    `upload_timeout`.
    """
    url = f"file://{tmp_path}/there"
    with Upload(url, 1.0) as upload:
        upload.begin()
        assert upload._process
        frozen = upload._process.pid
        os.kill(frozen, signal.SIGSTOP)
        began = time.monotonic()
        upload.follow(Spec(run_folder), 0)  # type: ignore[arg-type]
        make_step(run_folder, 20)
        for _ in range(1000):  # steps of a run
            upload.say_news()
        assert time.monotonic() - began < 1.0
    out = capsys.readouterr().out
    assert f"not yet at {url}/{run_folder.name}: step_00000020, records" in out
    assert "NOTHING IS SAFE THERE" in out
    assert not Path(f"/proc/{frozen}").exists()


def test_a_storage_that_refuses_ends_the_command_before_it_begins(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.write_text("")
    upload = Upload(f"file://{closed}/x", 1.0)
    with pytest.raises(ConfigError, match=r"cannot be used: cannot write .*correct the URL"):
        upload.begin()
    assert upload._process
    assert upload._process.returncode is not None


@pytest.mark.full
def test_a_process_that_is_overtaken_says_so_and_ends(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Upload(f"file://{tmp_path}/there", 60.0) as upload:
        upload.begin()
        (run_folder / "attempt").write_text("0 99.0\n")
        make_step(run_folder, 20)
        upload.follow(Spec(run_folder))  # type: ignore[arg-type]
        assert upload._process
        upload._process.wait(60)
    out = capsys.readouterr().out
    assert "upload   ends here: another command continues the run, and sends it" in out
    assert "not yet at" not in out
    assert not (tmp_path / "there" / run_folder.name).exists()


def test_the_last_line_says_that_nothing_is_safe_there_and_why(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    with Upload(f"file://{there}", 3.0) as upload:
        upload.begin()
        there.rmdir()
        there.write_text("no folder any more")
        make_step(run_folder, 20)
        upload.follow(Spec(run_folder))  # type: ignore[arg-type]
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"not yet at file://{there}/{run_folder.name}: step_00000020, records (no check" in last
    assert "no checkpoint is complete there: NOTHING IS SAFE THERE); the last error: cannot" in last
    assert f"'{run_folder}' file://{there} sends the rest" in last


def test_a_run_is_not_sent_into_itself(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own files would count as the copy, and be replaced while they are written."""
    before = (run_folder / "metrics.jsonl").stat().st_ino
    make_step(run_folder, 20)
    (tmp_path / "link").symlink_to(run_folder.parent)
    for url in (run_folder.parent, run_folder, run_folder / "copy", tmp_path / "link"):
        assert upload_by_hand([str(run_folder), f"file://{url}"]) == 2
        assert "is in the run's own folder, so no copy" in capsys.readouterr().err
    assert (run_folder / "metrics.jsonl").stat().st_ino == before


def test_without_an_answer_the_run_starts_with_a_warning(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PROBE_S", 0.0)
    upload = Upload(f"file://{tmp_path}/there", 1.0)
    upload.begin()
    (line,) = upload.news()
    assert "does not answer: no answer within 0 s; the run starts, and what it writes is" in line
    upload.end()


def test_config_json_is_written_with_the_url(tmp_path: Path) -> None:
    config = load_config(preset="tiny", overrides={"upload": "s3://bucket/x"})
    assert json.loads(config.to_json())["upload"] == "s3://bucket/x"


def test_a_store_does_not_choose_where_a_resume_writes(run_folder: Path, tmp_path: Path) -> None:
    """Names that lead out of the folder, and the run's lock, are not fetched."""
    store = Store(f"file://{tmp_path}/there")
    for name in ("metrics.jsonl", "lock", "attempt", "logs/rank0.log", ".hidden", "a/.b"):
        store.put(name, b"from there")
    (run_folder / "lock").write_text("mine")
    fetch._fetch_records(store, run_folder, replace=True)
    assert (run_folder / "metrics.jsonl").read_text() == "from there"
    assert (run_folder / "lock").read_text() == "mine"
    assert (run_folder / "logs" / "rank0.log").read_text() == "hello\n"
    assert not list(run_folder.glob(".*"))
    assert not (run_folder / "a").exists()

    class Strange:
        """What a server may list."""

        url = "s3://b/RUN"

        def sizes(self, folder: str) -> dict[str, int]:
            absolute = str(tmp_path / "absolute")
            names = [absolute, "../outside", "", "x/", "//x", "a//b", "x/./y", "a\nb"]
            return dict.fromkeys([*names, "note", "note/of", "metrics.jsonl/part", "n" * 300], 1)

        def get(self, name: str, target: Path) -> None:
            assert name == "note"
            target.write_text("of a user")

    problems = fetch._fetch_records(Strange(), run_folder, replace=True)  # type: ignore[arg-type]
    assert (run_folder / "note").read_text() == "of a user"
    assert problems == [
        "s3://b/RUN/metrics.jsonl/part cannot be a file here",
        f"s3://b/RUN/{'n' * 300} cannot be a file here",
        "s3://b/RUN/note/of cannot be a file here",
    ]


def test_a_record_that_is_refused_keeps_no_other_back(run_folder: Path, tmp_path: Path) -> None:
    where = tmp_path / "there" / run_folder.name
    (where / "config.json").mkdir(parents=True)  # a file cannot be written there
    name = make_step(run_folder, 20)
    sender, store = sender_of(run_folder, tmp_path / "there")
    with pytest.raises(StorageError, match=r"cannot write .*config.json"):
        sender.send_records()
    assert {"metrics.jsonl", "logs/rank0.log"} <= store.sizes("").keys()
    sender.send_checkpoint(name)
    assert sender.sent() == [name]
