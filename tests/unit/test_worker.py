"""The actor of one rank, called as an object: heartbeats, orders, and what becomes of an exception."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.errors import CheckpointError, ConfigError, RendezvousError, StateDiverged
from nanoray.faults import exit_record
from nanoray.faults.cause import CAUSES
from nanoray.faults.progress import ProgressFile
from nanoray.launch.recovery.pickled_script import PickledScript
from nanoray.launch.recovery.worker import LostPeer, Worker
from nanoray.parallel.mesh import _MEETINGS
from nanoray.parallel.rendezvous import Order, Rendezvous
from nanoray.parallel.wire import SealedStore
from nanoray.script.program import Program
from tests.harness.commands import no_watchers_left
from tests.harness.scripted_ray import make_spec

Train = Callable[..., dict[str, Any]]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """A run of two ranks. Workers in it change CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return make_spec(tmp_path / "run", workers=2)


def worker(
    train: Train | None = None,
    rank: int | None = 1,
    gpus: tuple[str, ...] = (),
    script: PickledScript | None = None,
) -> Worker:
    context = SimpleNamespace(get_node_id=lambda: "node1", get_actor_id=lambda: "actor1")
    api = SimpleNamespace(
        get_gpu_ids=lambda: list(gpus),
        get_runtime_context=lambda: context,
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    return Worker("a-run", rank, train=train, script=script, api=api)


R = Rendezvous(rank=1, world_size=2, backend="gloo")


def test_what_a_script_needs_is_imported_before_its_task_comes(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a rank that replaces a lost one: the others wait for it."""
    (tmp_path / "module_of_a_program.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    waiting = worker(script=PickledScript("main", "module_of_a_program", b""))
    waiting._importing.join(60)
    assert sys.modules.pop("module_of_a_program", None)


# Orders to abort.


def test_only_an_order_for_the_groups_that_stand_is_obeyed(spec: RunSpec) -> None:
    """One that comes before the first attempt, for an older one, or when this rank waits, aborts
    nothing.
    """

    def train(
        run: RunSpec, r: Rendezvous, observers: Any, wanted: Any, store: Any, rejoin: Any
    ) -> dict[str, Any]:
        in_group.set()
        gate.wait(30)
        rejoin("connection closed")
        return {}

    in_group, gate, rank = threading.Event(), threading.Event(), worker(train)
    meeting = SealedStore(HashStore(), "key")
    _MEETINGS.add(meeting)
    second = spec.next_attempt()
    rank.abort(second.attempt)
    thread, _ = in_thread(rank, second)
    assert in_group.wait(60)
    rank.abort(spec.attempt)
    rank.abort(second.next_attempt().attempt)
    assert not meeting.aborted
    gate.set()
    assert rank._waiting.wait(60)
    rank.abort(second.attempt)
    assert not meeting.aborted
    rank.go_on(second.next_attempt().to_dict(), R)
    thread.join(30)
    rank.abort(second.next_attempt().attempt)
    assert meeting.aborted
    _MEETINGS.clear()


# Exceptions.


@pytest.mark.parametrize(
    ("error", "live", "kind", "exit_code"),
    [
        (ValueError("x"), False, "exception", 1),
        (ConfigError("x"), False, "refused", 2),
        (CheckpointError("x"), True, "refused", 4),
        (StateDiverged("x"), False, "diverged", 1),
        (RuntimeError("Connection closed by peer [10.0.0.1]:4711"), False, "peer_lost", 1),
        (LostPeer("x"), False, "peer_lost", 1),
        (RendezvousError("x"), False, "refused", 3),
        (RendezvousError("x"), True, "peer_lost", 3),  # a new rank that did not meet the survivors
    ],
)
def test_an_exception_becomes_data(
    spec: RunSpec, error: Exception, live: bool, kind: str, exit_code: int
) -> None:
    def train(run: RunSpec, *_: Any) -> dict[str, Any]:
        ProgressFile(run.progress(1)).set(7, "backward")
        raise error

    found = worker(train).run(
        spec.to_dict(), Rendezvous(rank=1, world_size=2, backend="gloo", live=live)
    )
    assert (found["ok"], found["kind"], found["exit_code"]) == (False, kind, exit_code)
    assert kind in CAUSES
    assert (found["step"], found["phase"]) == (7, "backward")
    assert (found["error"], found["message"]) == (type(error).__name__, str(error))
    assert "raise error" in found["traceback"]


def test_a_script_that_exits_is_an_error_or_at_its_end_none(spec: RunSpec) -> None:
    """SystemExit would end the process as if it had been killed."""

    def main(run: Any, code: int | None, trained: bool) -> None:
        run.leave_loop()  # as an engine does when it begins
        run.outcome = {"exit_reason": "finished"} if trained else None
        sys.exit(code)

    def end(code: int | None, trained: bool) -> dict[str, Any]:
        program = Program(partial(main, code=code, trained=trained), frozenset())
        return worker(program).run(spec.to_dict(), R)

    for code in (0, None):
        assert end(code, trained=True) == {"ok": True, "exit_reason": "finished"}
        loop = worker(Program(lambda _, code=code: sys.exit(code), frozenset()))
        assert loop.run(spec.to_dict(), R)["exit_reason"] == "finished"
    for code, trained in ((5, True), (5, False), (0, False)):
        found = end(code, trained)
        assert (found["ok"], found["kind"]) == (False, "refused")
        assert found["message"].startswith(f"sys.exit({code}) was called in {__file__}, line ")
        assert found["exit_code"] == (code or 1)
        assert "sys.exit(code)" in found["traceback"]


class OwnEnding(BaseException):
    """A script's own way to end."""


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (KeyboardInterrupt(), 130),
        (SystemExit("enough"), 1),
        (GeneratorExit(), 1),
        (asyncio.CancelledError(), 1),
        (OwnEnding("enough"), 1),
    ],
)
def test_what_a_script_ends_itself_with_is_not_tried_again(
    spec: RunSpec, error: BaseException, exit_code: int
) -> None:
    """Ray would take it for a cancelled task or a killed process, and the driver would replace it."""

    def train(*_: Any) -> dict[str, Any]:
        raise error

    found = worker(train).run(spec.to_dict(), R)
    assert (found["ok"], found["kind"], found["exit_code"]) == (False, "refused", exit_code)
    assert found["error"] == type(error).__name__
    assert "in " + __file__ in found["message"]


def test_the_position_of_an_earlier_process_in_the_slot_is_forgotten(spec: RunSpec) -> None:
    ProgressFile(spec.progress(1)).set(99, "eval")
    exit_record.write(spec.progress(1), {"pid": 1})

    def train(*_: Any) -> dict[str, Any]:
        raise ValueError("before the first step")

    found = worker(train).run(spec.to_dict(), R)
    assert (found["step"], found["phase"]) == (0, "init")
    assert exit_record.read(spec.progress(1)) == {}


def test_without_the_runs_folder_a_rank_is_refused_before_its_script_runs(spec: RunSpec) -> None:
    """As on a node without the shared storage. Nothing of the run's is opened there before."""

    def train(*_: Any) -> dict[str, Any]:
        raise AssertionError("it ran")

    rank = worker(train)
    rank._captures = True  # as on Ray
    (spec.folder / "run.json").unlink(missing_ok=True)
    shutil.rmtree(spec.log(1).parent, ignore_errors=True)
    found = rank.run(spec.to_dict(), R)
    assert (found["error"], found["kind"], found["exit_code"]) == ("ConfigError", "refused", 2)
    assert "does not see the run's folder" in found["message"]


def test_an_outcome_is_returned_and_messages_wait_for_a_poll(spec: RunSpec) -> None:
    def train(run: RunSpec, r: Rendezvous, observers: list[Any], *_: Any) -> dict[str, Any]:
        observers[0].on_note("first")
        observers[0].on_note("second")
        return {"step": 30}

    rank = worker(train)
    assert rank.run(spec.to_dict(), R) == {"ok": True, "step": 30}
    assert rank.poll() == [("note", "first"), ("note", "second")]
    assert rank.poll() == []


def test_a_flood_does_not_fill_the_memory_of_rank_0_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver polls no more while its console is blocked, as by a pager."""
    monkeypatch.setattr("nanoray.launch.recovery.worker.MOST_WAITING", 100)
    rank = worker(rank=0)
    rank._script = PickledScript.__new__(PickledScript)
    for _ in range(2):
        for number in range(50):
            rank._send_line("stdout", f"line {number}")
        sent = rank.poll()
        assert 10 < len(sent) < 20
        assert sent[:2] == [("stdout", "line 0"), ("stdout", "line 1")]
        assert [line for stream, line in sent if stream == "stderr"] == [sent[-1][1]]
        assert "lines are left out here, and logs/rank0.log" in sent[-1][1]


# Orders.


@pytest.mark.parametrize(
    ("calls", "order"),
    [
        ([], Order.GO_ON),
        (["pause"], Order.REGROUP),
        (["stop"], Order.STOP),
        (["pause", "stop"], Order.STOP),
    ],
)
@pytest.mark.parametrize("direction", [1, -1])
def test_a_stop_outranks_a_pause(
    spec: RunSpec, calls: list[str], order: int, direction: int
) -> None:
    def train(
        run: RunSpec, r: Rendezvous, observers: Any, wanted: Callable[[], int], *_: Any
    ) -> dict[str, Any]:
        for name in calls[::direction]:
            rank.stop() if name == "stop" else rank.pause(spec.attempt)
        return {"order": wanted()}

    rank = worker(train)
    assert rank.run(spec.to_dict(), R)["order"] == order


def in_thread(rank: Worker, spec: RunSpec) -> tuple[threading.Thread, dict[str, Any]]:
    found: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: found.update(rank.run(spec.to_dict(), R)), daemon=True)
    thread.start()
    return thread, found


def test_a_survivor_waits_for_the_newest_attempt(spec: RunSpec) -> None:
    """The driver may have tried twice: only its last attempt counts, and an old pause is over."""

    def train(
        run: RunSpec,
        r: Rendezvous,
        observers: Any,
        wanted: Callable[[], int],
        store: Any,
        rejoin: Any,
    ) -> dict[str, Any]:
        ProgressFile(run.progress(1)).set(7, "backward")
        rank.pause(run.attempt)
        gate.wait(10)
        run, r = rejoin("connection closed")
        return {"attempt": run.attempt, "world_size": r.world_size, "order": wanted()}

    gate, rank = threading.Event(), worker(train)
    second = spec.next_attempt().next_attempt()
    rank.go_on(spec.next_attempt().to_dict(), R)
    rank.go_on(second.to_dict(), Rendezvous(rank=0, world_size=1))
    gate.set()
    thread, found = in_thread(rank, spec)
    thread.join(30)
    assert found == {"ok": True, "attempt": 2, "world_size": 1, "order": Order.GO_ON}
    heartbeat = rank.heartbeat(0.0, False, None)
    assert (heartbeat.attempt, heartbeat.waiting) == (2, False)


def test_a_pause_counts_for_the_attempt_that_it_names(spec: RunSpec) -> None:
    """It may arrive before a rank that waits has taken the orders of that attempt, or after it has
    left it.
    """

    def train(
        run: RunSpec, r: Rendezvous, observers: Any, wanted: Any, store: Any, rejoin: Any
    ) -> dict[str, Any]:
        orders = [wanted()]
        for _ in range(2):
            rejoin("connection closed")
            orders.append(wanted())
        return {"orders": orders}

    rank, second = worker(train), spec.next_attempt()
    rank.pause(1)
    thread, found = in_thread(rank, spec)
    for attempt in (second, second.next_attempt()):
        assert rank._waiting.wait(60)
        rank.go_on(attempt.to_dict(), R)
        while rank._spec and rank._spec.attempt < attempt.attempt:
            time.sleep(0.01)
    thread.join(30)
    assert found["orders"] == [Order.GO_ON, Order.REGROUP, Order.GO_ON]


def test_of_the_ranks_that_wait_for_a_driver_that_is_gone_one_saves(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on alone, and only to save. Another one ends. One that the driver still calls waits
    for its orders.
    """
    monkeypatch.setattr("nanoray.launch.recovery.worker.ORPHAN_S", 3.0)
    monkeypatch.setattr("nanoray.launch.recovery.worker.DRIVER_SILENT_S", 1000.0)

    def train(
        run: RunSpec, r: Rendezvous, observers: Any, wanted: Any, store: Any, rejoin: Any
    ) -> dict[str, Any]:
        run, r = rejoin("connection closed")
        return {
            "attempt": run.attempt,
            "group": (r.rank, r.world_size, r.live, r.slot, r.slots),
            "order": wanted(),
        }

    ranks = [worker(train) for _ in range(3)]
    began, waits = time.monotonic(), [in_thread(rank, spec) for rank in ranks]
    while any(thread.is_alive() for thread, _ in waits[:2]) and time.monotonic() - began < 60:
        ranks[2].heartbeat(0.0, True, None)  # the driver still calls this one
        time.sleep(0.05)
    saved, ended = sorted((found for _, found in waits[:2]), key=lambda found: not found["ok"])
    assert saved == {"ok": True, "attempt": 0, "group": (0, 1, True, 1, 2), "order": Order.STOP}
    assert (ended["ok"], ended["error"], ended["kind"]) == (False, "LostPeer", "peer_lost")
    assert waits[2][0].is_alive()
    ranks[2].go_on(spec.next_attempt().to_dict(), R)
    waits[2][0].join(30)
    assert (waits[2][1]["attempt"], waits[2][1]["order"]) == (1, Order.GO_ON)


FROZEN = """
import time
from nanoray.launch.recovery import silence
silence.FROZEN_S = 0.4
own = silence.UnfrozenClock()
for _ in range(2):
    print(own.monotonic(), time.monotonic(), flush=True)
    input()
"""


def test_a_rank_that_was_frozen_does_not_take_its_driver_for_silent() -> None:
    """The first thing that it does afterwards is to look at the time: no other thread has run
    before.
    """
    with subprocess.Popen(
        [sys.executable, "-c", FROZEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin
        assert process.stdout
        own, clock = map(float, process.stdout.readline().split())
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.stdin.write("\n")
        process.send_signal(signal.SIGCONT)
        own_then, clock_then = map(float, process.stdout.readline().split())
        process.stdin.write("\n")
    assert clock_then - clock >= 1.5
    assert own_then - own <= clock_then - clock - 1.0


KILLED_IN_IMPORTS = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from nanoray.launch.recovery import worker

class Kills:
    def find_spec(self, name, path=None, target=None):
        if name == "nanoray.train.rank":
            os.kill(os.getpid(), signal.SIGKILL)

sys.meta_path.insert(0, Kills())
api = SimpleNamespace(get_gpu_ids=list)
worker.Worker("a-run", 0, record=Path(sys.argv[1]), api=api)._importing.join()
"""


def test_a_rank_that_is_killed_in_its_imports_leaves_a_record(spec: RunSpec) -> None:
    """The kernel may end it there for want of memory, and the record says so."""
    command = [sys.executable, "-c", KILLED_IN_IMPORTS, str(spec.progress(0))]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    assert no_watchers_left(spec.progress(0))
    assert exit_record.read(spec.progress(0))["signal"] == "SIGKILL"


# Heartbeats.


def test_a_heartbeat_without_a_change_comes_late(spec: RunSpec) -> None:
    rank, began = worker(), time.monotonic()
    assert rank.heartbeat(0.05, False, None)[:3] == (0, "init", -1)
    assert time.monotonic() - began >= 0.05


def test_a_heartbeat_is_answered_at_once_when_something_changes(spec: RunSpec) -> None:
    """The step that it waits for has passed; the rank begins to wait; the rank goes on."""

    def train(
        run: RunSpec, r: Rendezvous, observers: Any, wanted: Any, store: Any, rejoin: Any
    ) -> dict[str, Any]:
        file = ProgressFile(run.progress(1))
        file.set(7, "backward")
        ready.set()
        gate.wait(10)
        rejoin("connection closed")
        over.wait(10)
        return {}

    ready, gate, over, rank = threading.Event(), threading.Event(), threading.Event(), worker(train)
    thread, _ = in_thread(rank, spec)
    assert ready.wait(30)
    assert rank.heartbeat(30.0, False, after=6).step == 7
    threading.Timer(0.05, gate.set).start()
    heartbeat = rank.heartbeat(30.0, False, None)
    assert (heartbeat.waiting, heartbeat.attempt, heartbeat.step, heartbeat.phase) == (
        True,
        0,
        7,
        "backward",
    )
    threading.Timer(0.05, rank.go_on, (spec.next_attempt().to_dict(), R)).start()
    assert not rank.heartbeat(30.0, True, None).waiting
    over.set()
    thread.join(30)


# Devices.


def test_an_actor_without_a_device_sees_none(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    facts = worker().ready()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert (facts["pid"], facts["node"], facts["devices"]) == (
        os.getpid(),
        "node1",
        [],
    )


def test_a_spare_takes_the_devices_of_its_slot(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the process for its exit record stands, which takes a while: others ask meanwhile."""
    seen = []

    def watch(record: Path) -> None:
        seen.append((record, repr(spare), os.environ["CUDA_VISIBLE_DEVICES"], spare.describe()))

    monkeypatch.setattr(exit_record, "watch", watch)
    spare = worker(rank=None)
    assert repr(spare) == "a-run spare"
    facts = spare.take_slot(2, ["MIG-a"], spec.progress(2))
    assert facts["devices"] == ["MIG-a"]
    assert seen == [(spec.progress(2), "a-run rank 2", "MIG-a", facts)]
