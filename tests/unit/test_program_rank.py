"""A rank of `nanoray run` outside of an actor: its process, its output, and the report of its error."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from nanoray.faults.cause import Failure, reason_to_give_up
from nanoray.launch.placement import Placement
from nanoray.launch.program.driver import ProgramDriver, RankProgram
from nanoray.launch.program.ends import error_of, failure_of_program
from nanoray.launch.program.files import write_program
from nanoray.launch.program.forked import ForkServer, program_variables
from nanoray.launch.program.rank import MOST_BYTES, OUTPUT_S, TAIL_BYTES, ProgramRank
from nanoray.launch.signals import Stop
from nanoray.machine.environment import environment
from tests.harness.cluster import alive
from tests.harness.commands import wait_for


@pytest.fixture(scope="module", autouse=True)
def own_ray() -> Iterator[None]:
    """Start the Ray that an actor asks for its devices; without a token Ray writes one into the home."""
    with environment({"RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        with environment({"RAY_ADDRESS": ray.get_runtime_context().gcs_address}):
            yield
        ray.shutdown()


def test_a_program_has_ended_when_all_of_its_output_was_read(tmp_path: Path) -> None:
    rank = ProgramRank(str(tmp_path / "logs" / "rank0.log"), 1, warm=False)
    count = 2 * MOST_BYTES + 5
    words = [sys.executable, "-c", f"print('x' * {count - 1}); raise SystemExit(3)"]
    rank.start({"kind": "command", "words": words, "folder": str(tmp_path)}, dict(os.environ))
    end = rank.wait_for_end()
    read, answers = 0, 0
    while read < end["size"]:
        answer = rank.wait_for_output(read)
        read += len(answer["output"])
        answers += 1
    rank.close()
    assert (read, end["code"]) == (count, 3)
    assert answers == 3  # parts that fit into a message


def test_output_is_awaited_and_comes_in_one_answer_for_a_while(tmp_path: Path) -> None:
    """However often the program prints: each answer takes time of the CPUs that compute."""
    rank = ProgramRank(str(tmp_path / "logs" / "rank0.log"), 1, warm=False)
    words = ["sh", "-c", "for i in $(seq 100); do printf '%d\\r' $i; sleep 0.01; done"]
    rank.start({"kind": "command", "words": words, "folder": str(tmp_path)}, dict(os.environ))
    begun = time.monotonic()
    read, answers = b"", 0
    while not read.endswith(b"\r100\r"):
        answer = rank.wait_for_output(len(read))
        assert answer["output"]
        read += answer["output"]
        answers += 1
    assert 2 <= answers <= 2 + (time.monotonic() - begun) / OUTPUT_S
    assert rank.wait_for_output(len(read))["output"] == b""  # at the end it waits no longer
    rank.close()


def test_it_is_known_when_the_program_begins(tmp_path: Path) -> None:
    """Its process first imports torch, which takes a while."""
    rank = ProgramRank(str(tmp_path / "logs" / "rank0.log"), 1, warm=True)
    script = tmp_path / "script.py"
    script.write_text("import pathlib, time; pathlib.Path('begun').touch(); time.sleep(1000)")
    order = {"kind": "script", "words": [str(script)], "folder": str(tmp_path), "trace": []}
    rank.start(order, dict(os.environ))
    pid = rank.wait_for_begin(60)
    # The process has left its imports, and is at most some milliseconds from the script.
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    wait_for((tmp_path / "begun").exists, 60)
    assert alive(pid)
    rank.close()


# It ignores SIGTERM, and so does what it has started.
LEAVES = "trap '' TERM; sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait"
HOST = """
import os, sys, time
from nanoray.launch.program.rank import ProgramRank
rank = ProgramRank(sys.argv[1] + "/rank0.log", 1, warm=False)
words = ["sh", "-c", sys.argv[2]]
rank.start({"kind": "command", "words": words, "folder": sys.argv[1]}, dict(os.environ))
time.sleep(1000)
"""


def test_what_a_program_has_started_ends_with_its_rank(tmp_path: Path) -> None:
    """The kernel ends the program when its rank's actor is killed, but not the program's children."""
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", HOST, str(tmp_path), LEAVES.format(pid)]
    with subprocess.Popen(command) as host:
        wait_for(pid.exists, 60)
        host.kill()
    wait_for(lambda: not alive(int(pid.read_text())), 60)


def test_what_a_program_has_left_ends_before_the_next_attempt(tmp_path: Path) -> None:
    rank = ProgramRank(str(tmp_path / "logs" / "rank0.log"), 1, warm=False)
    pid = tmp_path / "pid"
    words = ["sh", "-c", LEAVES.format(pid)]
    order = {"kind": "command", "words": words, "folder": str(tmp_path)}
    rank.start(order, dict(os.environ))
    wait_for(pid.exists, 60)
    rank.start(order | {"words": ["true"]}, dict(os.environ))
    wait_for(lambda: not alive(int(pid.read_text())), 60)
    rank.close()


def test_a_rank_whose_server_is_gone_starts_another(tmp_path: Path) -> None:
    server = ForkServer((), program_variables(1, {}))
    rank = ProgramRank(str(tmp_path / "rank0.log"), 1, warm=False, shared=server.shared)
    order = {"kind": "command", "words": ["sh", "-c", "exit 3"], "folder": str(tmp_path)}
    shares = []
    for own in (False, True, True):
        rank.start(order, dict(os.environ))
        assert rank.wait_for_end()["code"] == 3
        shares.append(rank.describe("", str(tmp_path), "")["shares_server"])
        used = rank._server if own else server
        assert used
        used.close()
    rank.close()
    assert shares == [True, False, False]


def test_output_that_is_not_shown_is_read_from_its_end(tmp_path: Path) -> None:
    rank = ProgramRank(str(tmp_path / "logs" / "rank1.log"), 1, warm=False)
    words = ["sh", "-c", "head -c 50000000 /dev/zero; echo the end; exit 3"]
    rank.start({"kind": "command", "words": words, "folder": str(tmp_path)}, dict(os.environ))
    assert rank.wait_for_end()["code"] == 3
    answer = rank.read(0, shown=False)
    assert answer["output"].endswith(b"the end\n")
    assert len(answer["output"]) <= TAIL_BYTES
    assert answer["to"] == 50_000_008
    rank.close()


FACTS = {"pid": 7, "ip": "10.0.0.1", "devices": []}


def test_an_error_that_a_program_has_caught_is_not_why_it_ended(tmp_path: Path) -> None:
    output = b"Traceback (most recent call last):\n  File ...\nImportError: no flash\n"
    end = {"code": 3, "at": 0.0, "oom": False}
    failure = failure_of_program(0, end, output, tmp_path / "none", FACTS)
    assert (failure.signature, failure.retry) == ("exited with code 3", True)
    failure = failure_of_program(0, end | {"code": 1}, output, tmp_path / "none", FACTS)
    assert (failure.signature, failure.retry) == ("ImportError: no flash", False)


@pytest.mark.parametrize(
    ("code", "oom", "gives_up"),
    [
        (-signal.SIGKILL, False, False),
        (-signal.SIGKILL, True, True),
        (-signal.SIGSEGV, False, True),
    ],
)
def test_a_signal_from_outside_may_come_any_number_of_times(
    tmp_path: Path, code: int, oom: bool, gives_up: bool
) -> None:
    """What the program, or its want of memory, does three times at once, it does again."""
    end = {"code": code, "at": 0.0, "oom": oom}
    ends = [failure_of_program(0, end, b"", tmp_path / "none", FACTS) for _ in range(3)]
    assert bool(reason_to_give_up(ends[-1], ends, max_failures=9)) == gives_up


def test_a_script_with_an_error_in_its_syntax_is_not_tried_again(tmp_path: Path) -> None:
    """Python shows no traceback of it."""
    script = tmp_path / "broken.py"
    script.write_text("print('a'\n")
    rank = ProgramRank(str(tmp_path / "logs" / "rank0.log"), 1, warm=True)
    order = {"kind": "script", "words": [str(script)], "folder": str(tmp_path), "trace": []}
    rank.start(order, dict(os.environ))
    end = rank.wait_for_end()
    output = rank.read(0)["output"]
    rank.close()
    failure = failure_of_program(0, end, output, tmp_path / "none", FACTS)
    assert (failure.signature, failure.retry) == ("SyntaxError: '(' was never closed", False)


def test_an_attempt_that_took_a_while_is_no_progress(tmp_path: Path) -> None:
    """Without --trace faults.jsonl has seconds in place of steps; max_failures counts all failures."""
    group: Any = None
    place = Placement(group, "cpu", {"CPU": 1.0}, (0, 1))
    program = RankProgram("script", ["x.py"], tmp_path, max_failures=2)
    driver = ProgramDriver(program, place, Stop())
    reasons = []
    for _ in range(3):
        cause = Failure(0, "exception", "rank 0 failed: ValueError", phase="")
        driver.failures.append(cause)
        driver.observer._begun -= 100  # seconds that this attempt took
        reasons.append(reason_to_give_up(cause, driver.failures, program.max_failures))
        driver._report([cause], reasons[-1])
    assert reasons == [None, None, "max_failures = 2 is exceeded"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "faults.jsonl").open()]
    assert steps == [100, 200, 300]


def test_the_report_of_an_earlier_attempt_names_no_later_failure(tmp_path: Path) -> None:
    nothing: Any = None
    driver = ProgramDriver(RankProgram("script", ["x.py"], tmp_path), nothing, nothing)
    output = b"Traceback (most recent call last):\n  File ...\nKeyError: 'later'\n"
    earlier = "Traceback (most recent call last):\n  File ...\nValueError: earlier\n"
    (tmp_path / "logs").mkdir()
    report = {"message": {"extraInfo": {"py_callstack": earlier}}}
    driver._error_file(0).write_text(json.dumps(report))
    assert error_of(1, output, driver._error_file(0)) == ("ValueError", "earlier")
    driver.failures.append(Failure(0, "exception", "failed: ValueError: earlier"))
    assert error_of(1, output, driver._error_file(0)) == ("KeyError", "'later'")


def test_no_value_of_a_variable_is_in_the_files_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = {"TOKEN": "hunter2"}
    monkeypatch.setattr("sys.argv", ["nanoray", "run", "--env", "TOKEN=hunter2", "x.py"])
    write_program(RankProgram("script", ["x.py"], tmp_path, secret), {"env": secret})
    assert "TOKEN" in (tmp_path / "program.json").read_text()
    assert "hunter2" not in (tmp_path / "program.json").read_text()
