"""Object storage without a server: which URLs are accepted, what may be shown, and file:// stores."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from nanoray.checkpoint.manifest import MANIFEST, manifest_json, parse_manifest
from nanoray.checkpoint.upload.fetch import fetch_run
from nanoray.checkpoint.upload.process import Upload
from nanoray.checkpoint.upload.send import RunCopy, is_record
from nanoray.cli import parse_args
from nanoray.config import Config, make_config
from nanoray.errors import CheckpointError, ConfigError
from nanoray.machine.storage.store import Store
from nanoray.machine.storage.url import is_secret, scrub

SECRET = "wJalrXUtnFEMI/K7MDENG"


# URLs.


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("runs/here", "is no URL; write s3://BUCKET/FOLDER"),
        (f"s3://AKIA:{SECRET}@bucket/x", "s3://bucket/x contains more than a bucket"),
        (f"s3://AKIA:{SECRET}/x", "s3://.../... contains more than a bucket"),
        (f"ftp://me:{SECRET}@host/x", "ftp://host/x: unknown protocol"),
        ("s3://bucket/runs", "names no run; write URL/RUN, or --resume auto --upload URL"),
    ],
)
@pytest.mark.parametrize("key", ["upload", "resume"])
def test_others_are_refused_without_what_may_be_a_secret(key: str, url: str, words: str) -> None:
    if key == "resume" and "://" not in url:
        pytest.skip("a path")
    if key == "upload" and "names no run" in words:
        pytest.skip("a folder of runs")
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


# A store in a folder.


# Manifests.


# Sending.


def make_step(run: Path, step: int, fill: bytes = b"x") -> str:
    """Make a checkpoint as others see it: files, and a manifest with their sums."""
    name = f"step_{step:08d}"
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    sums = {}
    for file in ("model-00000.safetensors", "state.json"):
        data = fill * 1000
        (folder / file).write_bytes(data)
        sums[file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_bytes(manifest_json(sums))
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


@pytest.fixture
def there(run_folder: Path, tmp_path: Path) -> Store:
    """The store of the run's copy."""
    return Store(f"file://{tmp_path}/there/{run_folder.name}")


def copy_of(run: Path, there: Store) -> RunCopy:
    return RunCopy(run, there.url.rpartition("/")[0])


class Looks:
    """Calls `look` before each object that a store gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look: Callable[[str], None]) -> None:
        put, write = Store.put, Store.write

        def put_later(store: Store, source: Path, name: str) -> None:
            look(name)
            put(store, source, name)

        def write_later(store: Store, name: str, data: bytes) -> None:
            look(name)
            write(store, name, data)

        monkeypatch.setattr(Store, "put", put_later)
        monkeypatch.setattr(Store, "write", write_later)


def test_the_newest_checkpoint_goes_first_and_its_manifest_last(
    run_folder: Path, there: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_step(run_folder, 20)
    make_step(run_folder, 40)
    order: list[str] = []
    Looks(monkeypatch, order.append)
    copy_of(run_folder, there).update()
    newest = order[: order.index(f"checkpoints/step_00000040/{MANIFEST}")]
    assert sorted(newest) == [
        "checkpoints/step_00000040/model-00000.safetensors",
        "checkpoints/step_00000040/state.json",
        "config.json",
        "metrics.jsonl",
    ]
    assert order[-1] == f"checkpoints/step_00000020/{MANIFEST}"

    # Another process sees what is there, and sends the rest alone. Logs come at the end.
    del order[:]
    copy_of(run_folder, there).update()
    assert order == []
    copy_of(run_folder, there).update(is_last=True)
    assert sorted(order) == ["config.json", "logs/rank0.log", "metrics.jsonl"]


def test_a_step_that_was_saved_again_looks_complete_at_no_moment(
    run_folder: Path, there: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_step(run_folder, 20)
    copy_of(run_folder, there).update()
    shutil.rmtree(run_folder / "checkpoints")
    make_step(run_folder, 20, b"z")
    seen = []

    def look(sent: str) -> None:
        manifest = there.read(f"checkpoints/{name}/{MANIFEST}")
        content = there.read(f"checkpoints/{name}/model-00000.safetensors") or b""
        seen.append((bool(manifest), content[:1]))

    Looks(monkeypatch, look)
    copy_of(run_folder, there).update()
    assert (True, b"z") not in seen
    assert (False, b"z") in seen
    assert there.read(f"checkpoints/{name}/{MANIFEST}")


def test_a_step_that_is_saved_again_while_it_is_sent_is_not_mixed(
    run_folder: Path, there: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_step(run_folder, 20)
    copies = []

    def save_again(sent: str) -> None:
        if not copies:
            copies.append(sent)
            shutil.rmtree(run_folder / "checkpoints" / name)
            make_step(run_folder, 20, b"z")

    Looks(monkeypatch, save_again)
    copy_of(run_folder, there).update()
    sums = parse_manifest(there.read(f"checkpoints/{name}/{MANIFEST}") or b"")
    for file, entry in sums.items():
        data = there.read(f"checkpoints/{name}/{file}") or b""
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]


def wait_until(is_true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_process_sends_survives_its_own_death_and_ends_with_the_run(
    run_folder: Path,
    tmp_path: Path,
    there: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("nanoray.checkpoint.upload.process.RESTART_S", 0.0)
    steps = tmp_path / "there" / run_folder.name / "checkpoints"
    with Upload(f"file://{tmp_path}/there", 60.0) as upload:
        upload.check()
        make_step(run_folder, 20)
        upload.follow(run_folder)
        wait_until((steps / "step_00000020" / MANIFEST).exists)
        assert upload._process
        first = upload._process.pid
        assert os.getpriority(os.PRIO_PROCESS, first) == 19
        os.kill(first, 9)
        wait_until(lambda: upload._process and upload._process.pid != first)
        make_step(run_folder, 40)
        second = upload._process.pid
    out = capsys.readouterr().out
    assert "warning  upload: its process ended with -9; another one goes on" in out
    assert f"upload   {there.url}: all is there, newest step_00000040" in out
    assert (steps / "step_00000040" / MANIFEST).exists()
    assert not Path(f"/proc/{second}").exists()


def test_a_process_that_is_frozen_delays_no_call_and_ends_no_run(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As slow as storage can be: the run goes on beside it, and its end waits for no more than
    `upload_timeout`.
    """
    url = f"file://{tmp_path}/there"
    began = time.monotonic()
    with Upload(url, 1.0) as upload:
        upload.check()
        upload.follow(run_folder)
        assert upload._process
        frozen = upload._process.pid
        os.kill(frozen, signal.SIGSTOP)
        make_step(run_folder, 20)
    assert time.monotonic() - began < 10.0
    out = capsys.readouterr().out
    assert (
        f"warning  upload: not all is at {url}/{run_folder.name} yet; nanoray checkpoint upload '"
        in out
    )
    assert f"'{run_folder}' {url} sends the rest" in out
    assert not Path(f"/proc/{frozen}").exists()


def test_a_storage_that_fails_ends_no_run_and_says_why(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    with Upload(f"file://{there}", 5.0) as upload:
        upload.check()
        shutil.rmtree(there)
        there.write_text("no folder any more")
        make_step(run_folder, 20)
        upload.follow(run_folder)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert f"warning  upload: cannot read file://{there}/{run_folder.name}/checkpoints" in first
    assert first.endswith("; it is tried again")
    assert "sends the rest" in last


# Fetching.


def test_a_store_does_not_choose_where_a_resume_writes() -> None:
    """Names that lead out of the folder, and the run's lock, are not fetched."""
    for name in (
        "/x",
        "../outside",
        "",
        "x/",
        "a//b",
        "x/./y",
        "x/../y",
        "lock",
        "attempt",
        ".room",
    ):
        assert not is_record(name), name
    for name in ("metrics.jsonl", "tb/events.1", "logs/rank0.log"):
        assert is_record(name), name


def test_a_checkpoint_that_is_torn_there_is_named_and_the_one_before_is_used(
    run_folder: Path, tmp_path: Path, there: Store
) -> None:
    for step in (20, 40, 60, 80, 100):
        make_step(run_folder, step)
    copy_of(run_folder, there).update(is_last=True)
    folder = tmp_path / "there" / run_folder.name / "checkpoints"
    (folder / "step_00000100" / MANIFEST).write_bytes(b"")  # its upload is not complete
    (folder / "step_00000080" / MANIFEST).write_bytes(b"{}")
    (folder / "step_00000060" / "model-00000.safetensors").write_bytes(b"y" * 1000)
    (folder / "step_00000040" / "state.json").unlink()
    notes: list[str] = []
    path = fetch_run(there.url, "", tmp_path / "out", notes)
    assert [step.name for step in (path / "checkpoints").iterdir()] == ["step_00000020"]
    assert (path / "metrics.jsonl").read_text() == (run_folder / "metrics.jsonl").read_text()
    assert not (path / "logs").exists()
    assert path.stat().st_mode & 0o777 == 0o700
    for note, words in zip(
        notes,
        (
            "step_00000080 at {} is damaged (manifest.json: not as nanoray writes it); using step_0",
            "step_00000060 at {} is damaged (model-00000.safetensors: sha256 differs); using step_0",
            "step_00000040 at {} is damaged (state.json: missing); using step_00000020",
            "step_00000020 fetched from {}: 0.0 MB",
        ),
        strict=True,
    ):
        assert words.format(there.url) in note

    # What is here is not fetched again, and its records stay.
    (path / "metrics.jsonl").write_text("newer")
    assert fetch_run(there.url, "step_00000020", tmp_path / "out", notes).name == "step_00000020"
    assert "step_00000020 of" in notes[-1]
    assert (path / "metrics.jsonl").read_text() == "newer"
    with pytest.raises(CheckpointError, match=r"is complete: checkpoint step_00000060"):
        fetch_run(there.url, "step_00000060", tmp_path / "out", notes)
    with pytest.raises(CheckpointError, match=r"is complete: looked for checkpoints/step_"):
        fetch_run(f"{there.url}_none", "", tmp_path / "out", notes)
