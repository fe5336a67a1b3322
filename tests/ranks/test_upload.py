"""Runs that send themselves to a server that speaks S3, and continue from there."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nanoray.checkpoint.files import load, peek
from nanoray.checkpoint.manifest import MANIFEST
from nanoray.checkpoint.upload.process import Upload
from nanoray.errors import ConfigError
from nanoray.machine.storage.store import Store
from tests.harness.commands import Command, run
from tests.harness.packages import needs
from tests.ranks.s3 import (
    BUCKET,
    S3Server,
    proxy_before,
    records_of,
    s3_server,
    secrets_in,
    shell,
    variables,
)

pytestmark = needs("s3fs", "moto")

URL = f"s3://{BUCKET}/my runs"
# The run waits in step 13, so that what was saved before is sent meanwhile
WAITS = "slow@rank=0,step=13,seconds={0}"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


@pytest.fixture(autouse=True)
def _credentials(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the server, for what this process does itself."""
    for name, value in variables(server.url).items():
        monkeypatch.setenv(name, value)


def train(recipe: Path, out: Path, *flags: str, endpoint: str) -> tuple[Path, str]:
    """Run `nanoray train`; return the run's folder and the output."""
    command = ["nanoray.train", "--config", str(recipe), "--out_dir", str(out), *flags]
    done = run(*command, env=shell(endpoint), cwd=out.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = out.iterdir()
    return folder, done.stdout + done.stderr


def start(recipe: Path, out: Path, *flags: str, endpoint: str) -> Command:
    command = ["nanoray.train", "--config", str(recipe), "--out_dir", str(out), *flags]
    return Command(*command, env=shell(endpoint), cwd=out.parent)


def wait_until(is_true: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def whole_there(store: Store, run_name: str) -> list[str]:
    """Return the checkpoints of a run that have a manifest in the store."""
    names = store.sizes(f"{run_name}/checkpoints")
    return sorted(name.partition("/")[0] for name in names if name.endswith(MANIFEST))


def uploaders(url: str) -> set[int]:
    """Return the pids of processes that send runs to a URL."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if b"nanoray.checkpoint.upload.send" in words and url.encode() in words:
                found.add(int(process.name))
    return found


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["train/loss"], r["train/grad_norm"]) for r in records_of(folder)]


@pytest.fixture(scope="module")
def sent(server: S3Server, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps whose checkpoints of steps 4, 8 and 12 are at the URL; its folder."""
    flags = ["--stop_at", "12", "--checkpoint_every", "4", "--upload", URL]
    folder, output = train(
        recipe, tmp_path_factory.mktemp("sent") / "here", *flags, endpoint=server.url
    )
    assert "warning" not in output, output
    assert f"upload   {URL}/{folder.name}: " in output, output
    return folder


@pytest.fixture(scope="module")
def undisturbed(server: S3Server, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 20 steps without any of this."""
    out = tmp_path_factory.mktemp("undisturbed") / "here"
    folder, _ = train(recipe, out, "--stop_at", "20", "--checkpoint_every", "4", endpoint="")
    return folder


def test_a_resume_from_there_changes_no_bit_and_no_credentials_are_anywhere(
    sent: Path, undisturbed: Path, server: S3Server, tmp_path: Path
) -> None:
    """On a machine that has nothing of the run: also its recipe comes from there."""
    out = tmp_path / "other machine"
    out.mkdir()
    url = f"{URL}/{sent.name}"
    done = run(
        *("nanoray.train", "--resume", url, "--out_dir", str(out), "--stop_at", "20"),
        env=shell(server.url),
        cwd=tmp_path,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert f"resume  step_00000012 fetched from {url}" in output
    folder = out / sent.name
    assert losses(folder) == losses(undisturbed)
    mine = load(folder / "checkpoints" / "step_00000020")
    theirs = load(undisturbed / "checkpoints" / "step_00000020")
    for name, tensor in theirs.model.items():
        assert mine.model[name].equal(tensor), name

    # It went on with the upload, into the same run; a plain download is a run as well.
    store = Store(f"{URL}/{sent.name}")
    copy = tmp_path / "download" / sent.name
    for name in store.sizes(""):
        store.get(name, copy / name)
    peek(copy / "checkpoints" / "step_00000020")
    assert losses(copy) == losses(undisturbed)
    assert (copy / "summary.json").is_file()

    for written in (sent, folder, copy):
        assert secrets_in(written) == []
    for text in (output, done.args):
        assert not [word for word in variables("").values() if word and word in str(text)]


def test_a_key_that_lacks_a_right_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With rights that the server checks. Deleting is not needed."""
    verbs = {"s3:PutObject": "write", "s3:GetObject": "read", "s3:ListBucket": "list"}
    rights = list(verbs)
    lacking = [[right for right in rights if right != missing] for missing in rights]
    with s3_server() as server:
        enough, *others = server.keys_with(rights, *lacking)
        monkeypatch.delenv("AWS_SESSION_TOKEN")
        for name, value in enough.items():
            monkeypatch.setenv(name, value)
        Upload(URL, 1.0).check()
        for key, verb in zip(others, verbs.values(), strict=True):
            for name, value in key.items():
                monkeypatch.setenv(name, value)
            with pytest.raises(ConfigError, match=f"cannot be used: cannot {verb} .*PermissionE"):
                Upload(URL, 1.0).check()


@pytest.mark.full
def test_auto_finds_the_run_there_but_takes_what_is_newer_here(
    server: S3Server, undisturbed: Path, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    url = f"s3://{BUCKET}/auto"
    flags = ["--checkpoint_every", "4", "--upload", url, "--resume", "auto"]
    first, output = train(recipe, out, "--stop_at", "8", *flags, endpoint=server.url)
    assert f"nothing to resume in {out}" in output
    shutil.rmtree(out)
    second, output = train(recipe, out, "--stop_at", "16", *flags, endpoint=server.url)
    assert second == first
    assert f"step_00000008 fetched from {url}/{first.name}" in output

    # The upload of the newest step is not complete: what is here counts.
    Store(f"{url}/{first.name}").write(f"checkpoints/step_00000016/{MANIFEST}", b"")
    third, output = train(recipe, out, "--stop_at", "20", *flags, endpoint=server.url)
    assert third == first
    assert "fetched from" not in output
    assert "from step 16 of" in output
    assert losses(third) == losses(undisturbed)

    # Another recipe begins anew, and says why.
    done = run(
        *("nanoray.train", "--config", str(recipe), "--out_dir", str(tmp_path / "other")),
        *(*flags, "--stop_at", "2", "--lr", "0.5"),
        env=shell(server.url),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing to resume in" in done.stdout
    assert "is another experiment" in done.stdout


@pytest.mark.full
def test_rank_0_of_a_launcher_killed_during_an_upload_leaves_nothing_and_a_resume_sends_the_rest(
    recipe: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/rank0-{os.getpid()}"  # no other test run has it
    with s3_server() as server, proxy_before(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        there = Store(url)
        proxy.bytes_per_s = 60e3
        flags = ["--checkpoint_every", "12", "--upload", url, "--stop_at", "20"]
        command = start(
            recipe, tmp_path / "a", *flags, "--faults", WAITS.format(30), endpoint=proxy.url
        )
        wait_until(lambda: any("step_00000012/" in name for name in there.sizes("")))
        assert len(uploaders(url)) == 1
        os.kill(command.pid, signal.SIGKILL)
        command.wait(30)
        wait_until(lambda: not uploaders(url), 10)
        (folder,) = (tmp_path / "a").iterdir()
        assert not whole_there(there, folder.name)
        proxy.bytes_per_s = float("inf")
        done = run(
            *("nanoray.train", "--resume", str(folder), "--stop_at", "20"),
            env=shell(server.url),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert whole_there(there, folder.name) == ["step_00000012", "step_00000020"]
        assert losses(folder) == losses(undisturbed)
