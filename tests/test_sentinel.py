"""Death records: how a process ended, told without being its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoray import sentinel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="death records need Linux")

DYING = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from nanoray import sentinel
sentinel.attend(Path(sys.argv[1]))
for _ in range(4):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
held = bytearray(os.urandom(1 << 20) * 64)  # a rank has memory to give back
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
def test_a_death_is_on_record(tmp_path: Path, how: str, says: dict[str, object]) -> None:
    record = tmp_path / "rank0.death"
    began = time.monotonic()
    died = subprocess.run([sys.executable, "-c", DYING.format(how=how), str(record)], check=False, timeout=60)
    ended = time.monotonic()
    assert died.returncode == (says.get("exit_code") if "exit_code" in says else -signal.Signals[str(says["signal"])])
    while not record.exists() and time.monotonic() < ended + 5:
        time.sleep(0.01)
    death = sentinel.read(record)
    assert {key: death[key] for key in says} == says
    assert began < float(death["monotonic"] or 0) < ended
    assert death["boot"] == sentinel.boot_id()
    assert death["oom"] is False
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.death"]
    assert not _sentinels(record), "it ends with the process that it attends"


def test_no_record_is_no_news(tmp_path: Path) -> None:
    assert sentinel.read(tmp_path / "none") == {}
    (tmp_path / "torn").write_text('{"pid": 1')
    assert sentinel.read(tmp_path / "torn") == {}


def _sentinels(record: Path) -> list[str]:
    time.sleep(0.2)
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"sentinel.py" in command and str(record).encode() in command:
            found.append(pid)
    return found
