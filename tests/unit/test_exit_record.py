"""Exit records: how a process ended, written by a process that is not its parent."""

from __future__ import annotations

import errno
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoray.faults import exit_record
from nanoray.faults.progress import ProgressFile
from tests.harness.commands import no_watchers_left, watchers_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="exit records need Linux")

DYING = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from nanoray.faults import exit_record
exit_record.watch(Path(sys.argv[1]))
for _ in range(4):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
held = bytearray(os.urandom(1 << 20) * 64)  # a rank has memory that the kernel must free
{how}
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", {"signal": "SIGKILL"}),
        ("ctypes.string_at(0)", {"signal": "SIGSEGV"}),
        ("os.abort()", {"signal": "SIGABRT"}),
        ("os._exit(3)", {"exit_code": 3}),
        ("sys.exit(0)", {"exit_code": 0}),
    ],
)
def test_the_end_of_a_process_is_recorded(
    tmp_path: Path, how: str, says: dict[str, object]
) -> None:
    record = tmp_path / "rank0.progress"
    began = time.monotonic()
    died = subprocess.run(
        [sys.executable, "-c", DYING.format(how=how), str(record)], check=False, timeout=200
    )
    ended = time.monotonic()
    assert died.returncode == (
        says.get("exit_code") if "exit_code" in says else -signal.Signals[str(says["signal"])]
    )
    while not exit_record.read(record) and time.monotonic() < ended + 60:
        time.sleep(0.01)
    seen = time.monotonic()  # on a busy machine its watcher notices the end after us
    found = exit_record.read(record)
    assert {key: found[key] for key in says} == says
    assert began < float(found["monotonic"] or 0) < seen
    assert found["boot"] == exit_record.boot_id()
    assert found["oom"] is False
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.progress"]
    assert no_watchers_left(record), "it ends after the process that it watches"


def test_a_parent_that_is_quicker_than_the_watcher(tmp_path: Path) -> None:
    """On a busy machine the parent may reap the process before its watcher runs; a pidfd still has
    the status.
    """
    record = tmp_path / "rank0.progress"
    script = DYING.format(how="print('ready', flush=True); time.sleep(60)")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(record)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        [watcher] = watchers_of(record)
        os.kill(watcher, signal.SIGSTOP)
        process.kill()
        process.wait(10)
        os.kill(watcher, signal.SIGCONT)
    assert no_watchers_left(record)
    found = exit_record.read(record)
    assert found["pid"] == process.pid
    release = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
    assert found.get("signal") == ("SIGKILL" if release >= (6, 15) else None)


@pytest.mark.parametrize(
    ("cgroup", "events"),
    [
        ("0::/", "sys/fs/cgroup/memory.events"),  # in a namespace of its own
        ("0::/kubepods.slice/pod7/c1", "sys/fs/cgroup/kubepods.slice/pod7/c1/memory.events"),
        ("4:memory:/docker/c1\n3:cpu:/x", "sys/fs/cgroup/memory/docker/c1/memory.oom_control"),
    ],
)
def test_ooms_are_counted_in_the_cgroup_of_the_process(
    tmp_path: Path, cgroup: str, events: str
) -> None:
    """A host's own count, at the top, is of all its processes."""
    for name, kills in (("sys/fs/cgroup/memory.events", 9), (events, 3)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"oom 1\noom_kill {kills}\n")
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(cgroup + "\n")
    assert exit_record.oom_kills(7, tmp_path) == 3
    assert exit_record.oom_kills(8, tmp_path / "nothing") == 0


@pytest.mark.parametrize(
    ("looks_since", "oom"), [(0, True), (1, True), (exit_record.OOM_LOOKS + 1, False)]
)
def test_an_old_oom_kill_is_not_this_death(
    monkeypatch: pytest.MonkeyPatch, looks_since: int, oom: bool
) -> None:
    """The count goes up once, and the process dies so many looks later."""
    seen = iter([0, *[1] * looks_since])
    last = 1

    class Libc:
        def pthread_mutex_timedlock(self, mutex: object, until: object) -> int:
            return errno.ETIMEDOUT if next(left, False) else 0

    left = iter([True] * looks_since)
    monkeypatch.setattr(exit_record.ctypes, "CDLL", lambda _: Libc())
    monkeypatch.setattr(exit_record, "oom_kills", lambda *_: next(seen, last))
    before = exit_record._wait_for_end(None, 1)  # type: ignore[arg-type]
    assert exit_record._was_oom({"signal": "SIGKILL"}, before) is oom
    assert not exit_record._was_oom({"signal": "SIGTERM"}, before)


def test_position_and_end_stand_in_one_file(tmp_path: Path) -> None:
    """Whichever is written last leaves the other as it is."""
    path = tmp_path / "rank0.progress"
    position = ProgressFile(path)
    position.set(7, "backward")
    exit_record.write(path, {"pid": 1, "signal": "SIGKILL"})
    position.set(8, "data")
    assert (ProgressFile.read_all(path) or ())[:2] == (8, "data")
    assert exit_record.read(path) == {"pid": 1, "signal": "SIGKILL"}
    exit_record.write(path, {"pid": 2})
    assert exit_record.read(path) == {"pid": 2}, "a shorter one"
    ProgressFile(path)
    assert exit_record.read(path) == {}, "another process has begun"


def test_a_missing_or_torn_record_is_empty(tmp_path: Path) -> None:
    assert exit_record.read(tmp_path / "none") == {}
    (tmp_path / "torn").write_text(" " * exit_record.POSITION.size + '{"pid": 1')
    assert exit_record.read(tmp_path / "torn") == {}
