"""A process that is ended for certain: the one that is meant, also if it is frozen, and no other
one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nanoray.launch.recovery.rank_end import end_process
from nanoray.machine.proc import start_time


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait(10)


def test_a_frozen_process_ends(sleeper: subprocess.Popen[bytes]) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    end_process(sleeper.pid, start_time(sleeper.pid))
    assert sleeper.wait(10) == -signal.SIGKILL
    end_process(sleeper.pid, "1")  # it is gone


@pytest.mark.parametrize("start", ["", "1"], ids=["unknown", "of an earlier process"])
def test_another_process_under_the_same_pid_lives_on(
    sleeper: subprocess.Popen[bytes], start: str
) -> None:
    end_process(sleeper.pid, start)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.2)
