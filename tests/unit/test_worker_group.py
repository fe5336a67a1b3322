"""The group of actors on a scripted Ray: slots, ranks, spares, events, and how an end is described."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError

from nanoray.checkpoint.run_folder import recovers_in_place
from nanoray.faults import exit_record
from nanoray.faults.cause import FailureCollector
from nanoray.faults.hang import Position, Watchdog
from nanoray.faults.progress import ProgressFile
from nanoray.launch.recovery.actors import SPARES_LOOK_S, ActorPool
from nanoray.launch.recovery.rank_end import end_hung, read_result
from nanoray.launch.recovery.situation import Why
from nanoray.launch.recovery.worker_group import WorkerGroup
from nanoray.parallel.rendezvous import BackendChoice
from tests.harness.scripted_ray import Actor, Ref, Run, node_id


def started(folder: Path, workers: int = 3, **config: Any) -> tuple[Run, WorkerGroup]:
    """A group whose ranks train."""
    run = Run(folder, workers, **config)
    run.group.create()
    run.group.begin()
    return run, run.group


def dead(error: Exception) -> Ref:
    return Ref(error, True)


ASKED = {"abort_nccl": True}


@pytest.mark.parametrize(
    ("backend", "ranks", "config", "expected"),
    [
        ("gloo", 2, {}, True),
        ("nccl", 2, {}, False),
        ("nccl", 2, ASKED, True),
        ("nccl", 1, ASKED, False),
        ("nccl", 2, ASKED | {"recovery": "restart"}, False),
        ("nccl", 2, ASKED | {"allreduce": "ring"}, False),
        ("gloo", 2, {"dp_mode": "zero1"}, True),
        ("nccl", 2, ASKED | {"dp_mode": "zero1"}, False),
        ("gloo", 4, {"tp": 2}, True),
        ("nccl", 4, ASKED | {"tp": 2}, False),
    ],
)
def test_where_a_lost_rank_is_replaced_alone(
    tmp_path: Path, backend: str, ranks: int, config: dict[str, Any], expected: bool
) -> None:
    """Ranks that the driver may order to abort are told so when they meet."""
    run, group = started(tmp_path, ranks, **config)
    group.meeting.choice = BackendChoice(backend, "", {})
    assert recovers_in_place(run.spec.config, backend, ranks) is group.in_place is expected
    assert {r.abortable for r in group._rendezvous()} == {expected}


# Slots and ranks.


def test_every_actor_has_a_slot_and_a_name_of_its_own(tmp_path: Path) -> None:
    run, group = started(tmp_path / "run")
    assert group.members == group.pool.ready == [0, 1, 2]
    group.pool.fill(1)
    group.pool.fill(1)
    names = [actor.name for actor in run.ray.actors.values()]
    assert names == ["run-rank0", "run-rank1.0-2", "run-rank2"]
    assert group.pool.ready == [0, 2], "the new one has not answered yet"
    assert run.ray.orders[-4:] == ["kill 1", "start 1", "kill 1", "start 1"]


def test_actors_that_die_while_starting_are_an_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ray.on_describe = lambda actor, ref: actor.fail_pending(ActorDiedError())  # type: ignore[method-assign]
    with pytest.raises(RayError):
        run.group.create()


def regroup(run: Run, attempt: int, slots: list[int]) -> None:
    """Form a group of these slots as the given attempt."""
    group = run.group
    spec = replace(run.spec, attempt=attempt)
    group.regroup(spec, group.of(Why.LOST, slots), group.open_store(slots))


def test_ranks_follow_the_slots_that_are_taken(tmp_path: Path) -> None:
    """Slot 0 is lost and the group is smaller: slots 1 and 2 are ranks 0 and 1, and one of them
    serves the store.
    """
    run, group = started(tmp_path)
    group.runs.pop(0)
    regroup(run, 1, [1, 2])
    assert run.ray.orders[-2:] == ["go_on 1 as 0/2 attempt 1", "go_on 2 as 1/2 attempt 1"]
    regroup(run, 2, [0, 1, 2])
    assert run.ray.orders[-3:] == [
        *("run 0 as 0/3 attempt 2", "go_on 1 as 1/3 attempt 2", "go_on 2 as 2/3 attempt 2")
    ], "an actor without the run's state begins, the others go on"


@pytest.mark.parametrize("mute", [{0}, {0, 1}, {0, 1, 2}])
def test_any_rank_with_the_state_may_serve_the_store(tmp_path: Path, mute: set[int]) -> None:
    run, group = started(tmp_path)
    answer = run.ray.on_open_store

    def on_open_store(actor: Actor, ref: Ref, *args: Any) -> None:
        if actor.slot not in mute:
            answer(actor, ref, *args)

    run.ray.on_open_store = on_open_store  # type: ignore[method-assign]
    if len(mute) < 3:
        assert group.open_store([0, 1, 2]) == ("10.0.0.1", 4711)
    else:
        with pytest.raises(
            RayError, match="none of the ranks 0, 1, 2, which hold the state, answers"
        ):
            group.open_store([0, 1, 2])


@pytest.mark.parametrize(
    ("workers", "training", "ready", "slots"),
    [
        (3, [0, 2], [0, 1, 2], [0, 1, 2]),
        (6, [0, 1, 2, 3, 5], [0, 1, 2, 3, 5], [0, 1, 2, 3]),  # 12 samples cannot be divided among 5
        (6, [5], [0, 1, 2, 3, 5], [0, 1, 2, 5]),  # a rank with the state is never left out
        (4, [], [], []),
    ],
)
def test_a_group_is_as_large_as_the_batch_allows(
    tmp_path: Path, workers: int, training: list[int], ready: list[int], slots: list[int]
) -> None:
    group = Run(tmp_path, workers).group
    group.runs = dict.fromkeys(training)
    assert group.divisible(ready) == slots


CUT = {"tp": 2, "n_head": 2, "n_embd": 32}


@pytest.mark.parametrize(
    ("left", "slots"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([0, 2, 3], [0, 3]),  # 0 and 2 hold the same part
        ([1, 2], [1, 2]),
        ([1], []),
    ],
)
def test_a_group_of_replicas_has_every_part(
    tmp_path: Path, left: list[int], slots: list[int]
) -> None:
    """dp 2 x tp 2: ranks 0 and 2 have one half of each layer, 1 and 3 the other."""
    _, group = started(tmp_path, 4, **CUT)
    group.runs = dict.fromkeys(left)
    assert group.divisible(left) == slots


def test_variables_of_the_user_decide_threads_and_outrank_those_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    run = Run(tmp_path)
    variables = {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO"}
    pool = ActorPool(run.spec, run.place, api=run.ray, clock=run.ray.time, variables=variables)
    group = WorkerGroup(pool)
    group.create()
    group.members = sorted(pool.actors)
    for rank in group._rendezvous():
        assert rank.threads == 3
        assert dict(rank.env) == {"NCCL_ALGO": "Ring"}


def test_the_rank_that_has_done_most_steps_goes_on(tmp_path: Path) -> None:
    """Ranks 1 and 3 hold the same part, and rank 3 has completed a step more."""
    run, group = started(tmp_path, 4, **CUT)
    group.runs.pop(0)
    for slot, step in ((1, 5), (2, 5), (3, 6)):
        ProgressFile(run.spec.progress(slot)).set(step, "regroup")
    assert group.divisible([1, 2, 3]) == [2, 3]


def test_a_part_is_lost_with_all_its_replicas(tmp_path: Path) -> None:
    _, group = started(tmp_path, 4, **CUT)
    group.runs.pop(2)
    assert group.lost_share() is None
    assert (
        group.lost_share([0]) == "shares of the state are lost with all that held them: ranks 0, 2"
    )
    group.runs.pop(0)
    assert group.lost_share() == "shares of the state are lost with all that held them: ranks 0, 2"


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_a_slots_part_follows_from_the_group_and_not_from_its_number(
    tmp_path: Path, mode: str
) -> None:
    """dp 3 x tp 2 loses slot 0: the five that are left make dp 2, in which slot 2 has the part that
    slot 1 had.
    """
    run, group = started(tmp_path, 6, dp_mode=mode, recovery="shrink", **CUT)
    group.runs.pop(0)
    slots = group.divisible([1, 2, 3, 4, 5])
    assert slots == [1, 2, 3, 4]
    regroup(run, 1, slots)
    assert run.ray.orders[-6:-2] == [f"go_on {slot} as {slot - 1}/4 attempt 1" for slot in slots]
    assert run.ray.orders[-2:] == ["kill 5", "start 5"], "it holds nothing that the others do not"
    assert sorted(group.runs) == slots
    assert group.lost_share([1, 2]) is group.lost_share([3, 4]) is None
    assert {"ddp": "all that held them: ranks 2, 4", "zero1": "that of rank 2 with rank 4"}[
        mode
    ] in group.lost_share([2, 4])
    group.runs = dict.fromkeys([1, 2])
    assert group.divisible([1, 2]) == [1, 2]
    regroup(run, 2, [1, 2])
    assert group.lost_share([2]).endswith(
        {"ddp": "held them: rank 2", "zero1": "its mirror: that of rank 2"}[mode]
    )


# New actors and spares.


def test_a_spare_takes_a_slot_once_it_is_ready(tmp_path: Path) -> None:
    run, group = started(tmp_path, spares=1)
    group.pool.fill(1)
    assert (run.ray.orders[-1], group.pool.promoted) == ("start 1", set()), (
        "the spare has not rehearsed yet"
    )
    run.ray.time.sleep(5.0)
    group.pool.fill(2)
    assert (run.ray.orders[-1], group.pool.promoted) == ("spare takes 2", {2})
    assert group.pool.spares == []
    group.add_spares()
    assert (run.ray.orders[-1], len(group.pool.spares)) == ("start spare", 1)


def test_each_spare_that_takes_a_slot_has_its_devices(tmp_path: Path) -> None:
    """The second one gets them from the first."""
    run, group = started(tmp_path, spares=1)
    group.facts[1]["devices"] = ["GPU-a"]
    for _ in range(2):
        run.ray.time.sleep(5.0)
        group.pool.fill(1)
        assert run.ray.orders[-1] == "spare takes 1"
        assert group.pool.take_facts(1) is None
        assert group.facts[1]["devices"] == ["GPU-a"]
        group.add_spares()


def test_a_spare_that_dies_in_its_imports_costs_nothing_and_is_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path, spares=1)
    run.ray.failing_starts[-1] = 1
    group = run.group
    group.create()
    group.begin()
    run.ray.time.sleep(5.0)
    group.pool.fill(2)
    assert run.ray.orders[-1] == "start 2"
    group.add_spares()
    run.ray.time.sleep(5.0)
    group.pool.fill(1)
    assert (run.ray.orders[-1], group.pool.promoted) == ("spare takes 1", {1})


def look_at_spares(run: Run, group: WorkerGroup) -> None:
    for _ in range(9):
        run.ray.time.sleep(SPARES_LOOK_S + 0.1)
        group.pool.add_spares(1)


def test_a_node_without_the_memory_of_a_rank_gets_no_spare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel would end one of the processes there, and not always the spare."""
    run, group = started(tmp_path)
    run.ray.memory = (300 << 20, 299 << 20)
    look_at_spares(run, group)
    assert "start spare" not in run.ray.orders
    assert capsys.readouterr().out == (
        f"spare    3 could not start, and no more are started: node {node_id(2)[:8]} has 299 MiB "
        "free, and a rank takes 300\n"
    )


# Events.


def test_events_of_one_moment_come_together(tmp_path: Path) -> None:
    run, group = started(tmp_path)
    for slot in group.members:
        group.request_heartbeat(slot)
    assert list(group.events(0.0)) == []
    for slot in (0, 1, 2):
        run.ray.at(0.1, run.ray.die, slot)
    found = list(group.events(0.25))
    assert [(kind, slot) for kind, slot, _ in found] == [("ended", 0), ("ended", 1), ("ended", 2)]
    assert group.runs == group.heartbeats == {}, "the heartbeat of a dead rank is no event"


# How a rank ended.


@pytest.mark.parametrize(
    ("record", "cause", "how"),
    [
        ({"signal": "SIGKILL", "oom": False}, "killed", "killed by SIGKILL"),
        ({"signal": "SIGBUS", "oom": False}, "killed", "killed by SIGBUS"),
        (
            {"signal": "SIGKILL", "oom": True},
            "out_of_memory",
            "killed by the kernel, which was out of memory",
        ),
        (
            {"exit_code": 3, "oom": False},
            "killed",
            "exited with code 3 and without a Python exception",
        ),
        (
            {"pid": 1, "signal": "SIGSEGV"},
            "killed",
            "killed, or crashed without a Python exception",
        ),  # an earlier process
        (None, "killed", "killed, or crashed without a Python exception"),
    ],
)
def test_how_a_process_died(
    tmp_path: Path, record: dict[str, Any] | None, cause: str, how: str
) -> None:
    run, group = started(tmp_path)
    ProgressFile(run.spec.progress(1)).set(7, "optimizer")
    if record is not None:
        record = {
            "pid": run.ray.actors[1].pid,
            "boot": exit_record.boot_id(),
            "monotonic": 1.0,
        } | record
        exit_record.write(run.spec.progress(1), record)
    group.event_at = run.ray.time.now
    result, failure = read_result(group, dead(ActorDiedError()), 1)
    assert result is None
    assert failure
    assert (failure.cause, failure.signature) == (cause, how)
    assert failure.title == f"rank 1 (pid 1001, node 10.0.0.1) died in optimizer of step 7: {how}"


@pytest.mark.parametrize(
    ("kind", "retry", "detail"), [("exception", True, "Traceback"), ("refused", False, "")]
)
def test_an_error_that_was_returned(tmp_path: Path, kind: str, retry: bool, detail: str) -> None:
    _, group = started(tmp_path)
    error = {
        "ok": False,
        "kind": kind,
        "exit_code": 4,
        "error": "ValueError",
        "message": "x",
        "traceback": "Traceback",
    }
    _, failure = read_result(group, Ref(error | {"step": 3, "phase": "eval"}, True), 2)
    assert failure
    assert (failure.cause, failure.retry, failure.exit_code, failure.detail) == (
        kind,
        retry,
        4,
        detail,
    )
    assert (
        failure.title == "rank 2 (pid 1002, node 10.0.0.2) failed in eval of step 3: ValueError: x"
    )


@pytest.mark.parametrize(
    ("positions", "collectives", "frozen", "ended"),
    [
        ([(5, "backward"), (5, "forward"), (5, "backward")], [9, 9, 9], [], [1]),
        ([(5, "backward"), (5, "backward"), (5, "backward")], [9, 9, 9], [], [2]),  # one of equals
        # It left one out
        ([(5, "backward"), (5, "backward"), (5, "backward")], [9, 8, 9], [], [1]),
        # Does not answer: that is certain
        ([(5, "forward"), (5, "backward"), (5, "backward")], [9, 9, 9], [2], [2]),
        ([(5, "forward"), (5, "forward"), (6, "forward")], [9, 9, 9], [], [0, 1]),
    ],
)
def test_which_rank_hangs(
    tmp_path: Path,
    positions: list[tuple[int, str]],
    collectives: list[int],
    frozen: list[int],
    ended: list[int],
) -> None:
    run, group = started(tmp_path)
    watchdog = Watchdog(group.members, 60.0, run.ray.time.monotonic)
    collector = FailureCollector(group.members, True, 60.0, 1.5)
    for slot, position in enumerate(positions):
        ProgressFile(run.spec.progress(slot)).set(*position)
        watchdog.update(slot, Position(1, "init"), 0.0)  # the file is newer
        run.ray.actors[slot].frozen, run.ray.actors[slot].collectives = (
            slot in frozen,
            collectives[slot],
        )
    end_hung(group, watchdog, collector)
    for failure in collector.failures:
        said = "" if failure.rank in frozen else f" after {collectives[failure.rank]} collectives"
        assert f"in {failure.phase} of step 5{said} and " in failure.title
    assert [failure.rank for failure in collector.failures] == ended
    assert run.ray.orders[-len(ended) :] == [f"kill {slot}" for slot in ended]
    assert sorted(group.runs) == [slot for slot in range(3) if slot not in ended]
