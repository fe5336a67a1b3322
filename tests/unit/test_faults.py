"""Fault plans, progress files, and which exceptions are collective errors."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanoray.config import make_config
from nanoray.errors import ConfigError
from nanoray.faults.cause import is_collective_error
from nanoray.faults.inject import DRIVER, Fault, InjectedFault, Injector, append_event, parse_plan
from nanoray.faults.progress import UNKNOWN, ProgressFile
from nanoray.machine.atomic import read_json_lines
from nanoray.machine.fault_points import reached, watch
from nanoray.models.gpt import GPT, ModelShape
from nanoray.train.guard import state_hashes


def a_gpt() -> GPT:
    return GPT(
        ModelShape(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=8, bias=False),
        dropout=0.0,
    )


def test_a_plan_is_data() -> None:
    plan = parse_plan(
        "kill@rank=1,step=30,phase=backward; slow@rank=0,step=5,seconds=0.2,attempt=2"
    )
    assert plan == (Fault("kill", 1, 30, "backward"), Fault("slow", 0, 5, "forward", 2, 0.2))
    assert parse_plan("") == ()


def fired(record: Path) -> list[str]:
    return (
        [json.loads(line)["phase"] for line in record.read_text().splitlines()]
        if record.exists()
        else []
    )


def test_a_fault_at_a_point_fires_once_from_its_step_on(tmp_path: Path) -> None:
    """A new process knows from the record which step made it necessary."""
    record = tmp_path / "faults.jsonl"
    text = "slow@rank=0,step=5,phase=shared,seconds=0;slow@rank=0,step=5,phase=meet,seconds=0;"
    text += "slow@rank=1,step=5,phase=meet,seconds=0"
    injector = Injector(record)
    injector.plan(text, 0, 0, 0.0)
    try:
        for step, expected in ((4, []), (6, ["shared"]), (7, ["shared"])):
            injector.phase(step, "forward")
            reached("shared")
            assert fired(record) == expected
        new = Injector(record)
        new.plan(text, 1, 1, 0.0)
        reached("meet")
        assert fired(record) == ["shared", "meet"], "of the new process only: one watches"
        injector.plan(text, 0, 1, 0.0)
        reached("shared")
        reached("meet")
        assert fired(record) == ["shared", "meet", "meet"], "each once in a run"
    finally:
        watch(None)


def test_the_driver_is_no_rank() -> None:
    assert parse_plan("kill@rank=driver,step=0,phase=orders") == (
        Fault("kill", DRIVER, 0, "orders"),
    )


def test_in_yaml_a_plan_may_be_a_list() -> None:
    listed = make_config(
        {
            "micro_batch_size": 1,
            "faults": [
                "kill@rank=1,step=30",
                {"kind": "slow", "rank": 0, "step": 5, "seconds": 0.2},
            ],
        }
    )
    assert listed.faults == "kill@rank=1,step=30;slow@rank=0,step=5,seconds=0.2"
    assert [fault.kind for fault in parse_plan(listed.faults)] == ["kill", "slow"]


def test_a_full_disk_gets_space_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank0.log").write_text("log")
    timers: list[threading.Timer] = []  # this test says when their time is over
    monkeypatch.setattr(threading.Timer, "start", lambda timer: timers.append(timer))
    Fault("disk-full", 0, 1, "forward", seconds=0.3).fire(tmp_path / "faults.jsonl", a_gpt())
    (timer,) = timers
    try:
        assert timer.interval == 0.3
        with pytest.raises(OSError, match="too large"):
            (tmp_path / "checkpoint").write_bytes(bytes(1 << 20))
    finally:
        timer.function(*timer.args)
    (tmp_path / "checkpoint").write_bytes(bytes(1 << 20))


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: a write that crosses them is cut short,
    as on a full disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def append_fault(folder: Path, values: dict[str, Any]) -> None:
    append_event(folder / "faults.jsonl", "fault", values)


@pytest.mark.parametrize(
    ("append", "name"), [(append_fault, "faults.jsonl"), (state_hashes.append, state_hashes.NAME)]
)
def test_a_torn_line_swallows_no_other(
    append: Callable[[Path, dict[str, Any]], None], name: str, tmp_path: Path
) -> None:
    """Neither one of a full disk, of which no part stays, nor one of a process that was killed in
    it.
    """
    path = tmp_path / name
    append(tmp_path, {"step": 1})
    whole = path.read_bytes()
    with room_for(len(whole) + 50), suppress(OSError):
        append(tmp_path, {"step": 2, "pad": "x" * 99})
    assert path.read_bytes() == whole
    path.write_bytes(whole + b'{"step": 3, "pa')
    append(tmp_path, {"step": 4})
    assert [line["step"] for line in read_json_lines(path)] == [1, 4]


def test_a_fault_fires_beside_a_torn_line(tmp_path: Path) -> None:
    record = tmp_path / "faults.jsonl"
    record.write_text('{"event": "fau')
    injector = Injector(record)
    injector.plan("slow@rank=0,step=5,seconds=0", 0, 0, 0.0)
    injector.phase(5, "forward")
    assert [event["event"] for event in read_json_lines(record)] == ["injected"]


@pytest.mark.parametrize("times", [1, 3])
def test_nan_appears_as_often_as_planned(tmp_path: Path, times: int) -> None:
    gpt, tokens = a_gpt(), torch.zeros(1, 4, dtype=torch.long)
    Fault("nan", 0, 1, "forward", times=times).fire(tmp_path / "faults.jsonl", gpt)
    losses = [gpt(tokens, tokens).item() for _ in range(5)]
    assert [math.isnan(loss) for loss in losses] == [True] * times + [False] * (5 - times)


@pytest.mark.parametrize("bit", [0, 20, 31])
def test_a_flipped_bit_is_one_bit_of_one_weight(tmp_path: Path, bit: int) -> None:
    gpt = a_gpt()
    before = [p.detach().clone().view(torch.int32) for p in gpt.parameters()]
    fault = Fault("bitflip", 0, 1, "forward", bit=bit)
    fault.fire(tmp_path / "faults.jsonl", gpt)
    changed = [
        a ^ p.detach().view(torch.int32) for a, p in zip(before, gpt.parameters(), strict=True)
    ]
    flips = [value % 2**32 for tensor in changed for value in tensor.flatten().tolist() if value]
    assert flips == [1 << bit]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "explode@rank=0,step=1",
            "one of kill, stop, exit, raise, hang, slow, oom, no-memory, disk-full, nan, bitflip, gradflip",
        ),
        ("kill@rank=0", "is not KIND@rank=R,step=S"),
        ("kill@rank=x,step=1", "is not KIND@rank=R,step=S"),
        ("kill@rank=0,step=1,phase=lunch", "phase one of init, data, forward"),
        ("kill@rank=0,step=1,color=red", "[,bit=B] ('color')"),
        ("nan@rank=0,step=1,phase=meet", "nan of 0 cannot fire at meet; see fault_points.py"),
        ("kill@rank=0,step=1,phase=orders", "kill of 0 cannot fire at orders"),
        ("kill@rank=driver,step=1,phase=forward", "kill of driver cannot fire at forward"),
        ("nan@rank=0,step=1,times=0", "times is at least 1"),
        ("bitflip@rank=0,step=1,bit=32", "bit 0 to 31"),
    ],
)
def test_an_unreadable_plan_shows_its_part(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_plan(text)
    assert message in str(error.value)


def test_a_fault_is_recorded_before_it_fires(tmp_path: Path) -> None:
    with pytest.raises(InjectedFault, match="raise on rank 2 at step 7 in eval"):
        Fault("raise", 2, 7, "eval").fire(tmp_path / "faults.jsonl", a_gpt())
    event = json.loads((tmp_path / "faults.jsonl").read_text())
    assert (event["event"], event["kind"], event["step"]) == ("injected", "raise", 7)


def test_a_progress_file_tells_where_a_rank_was(tmp_path: Path) -> None:
    path = tmp_path / "rank0.progress"
    ProgressFile(path)
    assert ProgressFile.read_all(path) == (0, "init", UNKNOWN, 0.0), (
        "its group has not been built yet"
    )
    ProgressFile(path).set(812, "backward")
    assert (ProgressFile.read_all(path) or ())[:2] == (812, "backward")
    assert ProgressFile.read_all(tmp_path / "none") is None
    path.write_bytes(b"short")
    assert ProgressFile.read_all(path) is None


@pytest.mark.parametrize(
    ("error", "collective"),
    [
        (RuntimeError("[../gloo/pair.cc:42] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 60000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_consequences_are_told_from_causes(error: Exception, collective: bool) -> None:
    assert is_collective_error(error) is collective


STOPS = """
import os, sys, threading
from pathlib import Path
from nanoray.faults.inject import Fault

def rank():
    ready.wait()
    Fault("stop", 0, 5, "backward").fire(Path(sys.argv[1]), None)
    os.write(1, b"went on")

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
ready, thread = threading.Event(), threading.Thread(target=rank)
thread.start()
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
ready.set()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="SCHED_IDLE is Linux's")
def test_a_rank_that_stops_goes_no_further(tmp_path: Path) -> None:
    """Its thread is not the process's first one, which would be slow to hear a signal to the
    process here.
    """
    with subprocess.Popen(
        [sys.executable, "-c", STOPS, str(tmp_path / "f")], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.set_blocking(process.stdout.fileno(), False)
        said = process.stdout.read()
        process.kill()
    assert not said
    assert json.loads((tmp_path / "f").read_text())["kind"] == "stop"
