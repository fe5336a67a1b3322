"""Faults on a real Ray cluster: the cause is named, the run goes on, and the losses are those of a
run without them.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from nanoray.observe.faults import story
from nanoray.observe.trace.__main__ import read_steps
from nanoray.observe.trace.accounts import accounts_of
from tests.harness.cluster import (
    Cluster,
    alive,
    assert_same_losses,
    assert_same_run,
    finish,
    fired,
    in_driver,
    injected,
    launch,
    losses,
    no_actors_left,
    only_report,
    pid_of,
    reports,
    start,
    summary,
    thaw,
    undisturbed,
)
from tests.harness.commands import no_watchers_left, wait_for
from tests.harness.ranks import only_run

EVERY_FIVE = ("--eval_every", "5", "--checkpoint_every", "5")
PATIENT = ("--hang_timeout", "0", "--timeout_s", "300")  # where a test holds a rank itself


@pytest.fixture(scope="module")
def clean(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs without faults at 2 and 3 ranks, the latter with dropout: masks follow from step and
    rank.
    """
    folders = {}
    for ranks in (2, 3):
        folders[ranks] = tmp_path_factory.mktemp(f"clean{ranks}")
        undisturbed(recipe, folders[ranks], *EVERY_FIVE, *of(ranks))
    return folders


def of(ranks: int) -> tuple[str, ...]:
    return (
        "--workers",
        str(ranks),
        "--cpus_per_worker",
        "0.5",
        "--dropout",
        "0" if ranks == 2 else "0.1",
    )


# Every phase of a step, both ranks, by signal, exit code and exception, in one run.
PLAN = [
    ("exit", 0, 4, "data"),
    ("kill", 1, 6, "forward"),
    ("kill", 0, 9, "backward"),
    ("raise", 1, 12, "backward"),
    ("exit", 1, 14, "optimizer"),
    ("kill", 0, 17, "log"),
    ("kill", 0, 20, "eval"),
    ("kill", 1, 25, "checkpoint"),
]
CAUSES = {"kill": "killed", "exit": "killed", "raise": "exception"}
HOW = {"kill": "killed by SIGKILL", "exit": "exited with code 3", "raise": "InjectedFault"}


@pytest.mark.parametrize(
    ("mode", "ranks", "flags"),
    [
        ("in_place", 2, ("--spares", "0")),
        pytest.param("in_place", 3, ("--spares", "0"), marks=pytest.mark.full),
        pytest.param("spare", 2, ("--spares", "1"), marks=pytest.mark.full),
        pytest.param(
            "restart",
            2,
            ("--recovery", "restart", "--checkpoint_mode", "sync", "--comm_trace", "every=4"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_every_phase_of_a_step(
    cluster: Cluster,
    recipe: Path,
    clean: dict[int, Path],
    tmp_path: Path,
    mode: str,
    ranks: int,
    flags: tuple[str, ...],
) -> None:
    """Eight faults in one run of 30 steps: each is named, and the run ends with the weights of a
    run without any.

    The restarted run is traced, the clean one is not; the steps that were done again stand in the
    trace once.
    """
    plan = ";".join(
        f"{kind}@rank={rank},step={step},phase={phase}" for kind, rank, step, phase in PLAN
    )
    flags += (*EVERY_FIVE, *of(ranks), "--max_failures", "9", "--faults", plan)
    code, output = finish(start(cluster, recipe, tmp_path, *flags), 500)
    assert code == 0, output
    assert fired(tmp_path) == [kind for kind, *_ in PLAN], "each fired, once"
    found = reports(tmp_path)
    assert [(r["rank"], r["step"], r["phase"]) for r in found] == [
        tuple(place) for _, *place in PLAN
    ]
    for (kind, *_), report in zip(PLAN, found, strict=True):
        assert report["cause"] == CAUSES[kind]
        assert HOW[kind] in report["title"]
        assert (report["signal"], report["exit_code"]) == {
            "kill": ("SIGKILL", None), "exit": (None, 3), "raise": (None, None)
        }[kind]  # fmt: skip
        assert (report["detect_s"] is None) == (kind == "raise")
        assert report["recover_s"] > 0
        # The next spare may still be starting
        expected = {"spare": {"spare", "in_place"}}.get(mode, {mode})
        assert report["recovery"] in expected, report
    again = [repeated(step, phase) if mode == "restart" else 0 for _, _, step, phase in PLAN]
    assert [r["steps_repeated"] for r in found] == again
    if mode != "restart":
        # What rank 0 had printed comes before the cause of the next fault, not after its recovery
        assert output.index("step  5/30") < output.index("died in forward of step 6")
        assert f" · {len(PLAN)} ranks replaced" in output
    assert "A worker died or was killed" not in output, "Ray's own sentence stands in Ray's logs"
    if mode == "spare":
        assert [r["recovery"] for r in found].count("spare") >= 1
    if mode == "restart":
        assert re.search(
            r"failure  rank 1 \(pid \d+, node [\d.]+\) died in forward of step 6: killed", output
        )
        fired_as = "fault plan fires: kill@rank=1,step=6,phase=forward"
        assert fired_as in found[1]["log_tail"][-1], "the dead rank's last log lines"
        assert "fault plan fires" not in output, "they stand in its log"
        assert output.count("/9 from the newest checkpoint") == len(PLAN)
        traced = {s["step"]: s["attempt"] for s in read_steps(only_run(tmp_path))}
        assert list(traced) == [step for step in range(1, 31) if step % 4 in (3, 0)]
        by_step = attempts(tmp_path)
        assert traced == {step: by_step[step] for step in traced}
        last = [attempt for attempt in traced.values() if attempt == len(PLAN)]
        assert summary(tmp_path)["comm"]["traced_steps"] == len(last) > 0, "of the last attempt"
    assert_same_run(tmp_path, clean[ranks])
    assert summary(tmp_path)["restarts"] == len(PLAN)
    assert f"total     {len(PLAN)} fault(s)" in story(only_run(tmp_path))[-1]
    ledger = accounts_of(only_run(tmp_path))
    assert ledger.total == pytest.approx(ledger.slots * ledger.wall_s, rel=0.01), ledger
    assert ledger.slots == ranks
    # Until a new step is done: a restart starts processes and repeats some steps before it
    still = ranks * sum(r["recover_s"] for r in found)
    assert ledger.seconds["recovery"] >= 0.75 * still, "all ranks stood still"
    assert (ledger.seconds["repeated"] > 0) == (mode == "restart")
    assert no_actors_left(cluster)
    assert no_watchers_left(only_run(tmp_path))


@pytest.mark.full  # test_mirror has the same faults without Ray
@pytest.mark.parametrize(
    ("mode", "ranks", "spares"), [("zero1", 3, "0"), ("zero2", 2, "1"), ("fsdp", 3, "1")]
)
def test_every_phase_of_a_step_with_a_sharded_state(
    cluster: Cluster, recipe: Path, tmp_path: Path, mode: str, ranks: int, spares: str
) -> None:
    """A lost rank's share is in the memory of its mirror. Two faults are on either side of the
    norm, which commits.
    """
    flags = (*EVERY_FIVE, *of(ranks), "--dp_mode", mode)
    undisturbed(recipe, tmp_path / "clean", *flags)
    places = [
        ("kill", 1, 6, "forward"),
        ("kill", 0, 9, "backward"),
        ("exit", 1, 12, "exchange_norm"),
    ]
    places += [
        ("kill", 0, 14, "committed"),
        ("kill", 1, 17, "log" if mode == "fsdp" else "exchange_weights"),
    ]
    places += [("kill", 0, 20, "eval"), ("kill", 1, 25, "checkpoint")]
    plan = ";".join(
        f"{kind}@rank={rank},step={step},phase={place}" for kind, rank, step, place in places
    )
    flags += ("--spares", spares, "--max_failures", "9", "--faults", plan)
    code, output = finish(start(cluster, recipe, tmp_path / "out", *flags), 500)
    assert code == 0, output
    out = tmp_path / "out"
    assert fired(out) == [kind for kind, *_ in places], "each fired, once"
    assert {r["recovery"] for r in reports(out)} <= {"in_place", "spare"}, output
    assert [r["steps_repeated"] for r in reports(out)] == [0] * len(places)
    assert_same_run(out, tmp_path / "clean")
    assert no_actors_left(cluster)


@pytest.mark.full
def test_the_group_shrinks_and_grows_back(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path
) -> None:
    """Rank 0 of three is lost, so another one writes the metrics until it is back; then rank 2.

    A frozen rank gives the new process the time that it needs; the faults come in a group of three
    again.
    """
    plan = "kill@rank=0,step=6,phase=backward;stop@rank=1,step=8,phase=data;"
    plan += "kill@rank=2,step=16,phase=optimizer;stop@rank=1,step=18,phase=data"
    flags = (
        *EVERY_FIVE,
        *of(3),
        "--dropout",
        "0",
        "--recovery",
        "shrink",
        "--replace_timeout",
        "0",
        "--faults",
        plan,
    )
    # A slow machine takes more than 30 s until the second loss. A spare would be there by then, and
    # fill the slot.
    driver = start(cluster, recipe, tmp_path, *flags, *PATIENT, "--spares", "0")
    for kill, freeze in ((0, 1), (2, 3)):
        wait_for(lambda freeze=freeze: len(injected(tmp_path)) > freeze, process=driver)  # type: ignore[misc]
        thaw(driver, tmp_path, 1, "pause", since=injected(tmp_path)[kill]["time"])
    code, output = finish(driver)
    assert code == 0, output
    assert fired(tmp_path) == ["kill", "stop", "kill", "stop"]
    assert [(r["rank"], r["recovery"], r["steps_repeated"]) for r in reports(tmp_path)] == [
        (0, "shrink", 0),
        (2, "shrink", 0),
    ]
    assert "shrink   1/3 3 -> 2 rank(s) with the same global batch, until rank 0 is back" in output
    assert output.count("grow     2 -> 3 ranks; no step is repeated") == 2
    assert losses(tmp_path) == pytest.approx(losses(clean[2]), rel=1e-4), (
        "sums in another order, and no more"
    )
    assert summary(tmp_path)["world_size"] == 3
    assert no_actors_left(cluster)


@pytest.mark.full
def test_a_whole_replica_trains_alone_until_there_are_two(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    """dp 2 x tp 2 loses rank 1 in step 6; ranks 0 and 3 go on. A frozen one gives new processes
    time.

    While they are one replica the losses are, to the bit, those of one that began at the checkpoint
    of step 5.
    """
    mesh = (
        "--cpus_per_worker",
        "0.5",
        "--dropout",
        "0.1",
        "--tp",
        "2",
        "--checkpoint_mode",
        "sync",
    )
    flags = (
        *EVERY_FIVE,
        *mesh,
        "--keep_checkpoints",
        "9",
        "--log_every",
        "1",
        "--recovery",
        "shrink",
    )
    plan = "kill@rank=1,step=6,phase=backward;stop@rank=0,step=9,phase=data"
    out = tmp_path / "out"
    shrinks = (
        *flags,
        "--workers",
        "4",
        "--replace_timeout",
        "0",
        "--faults",
        plan,
        *PATIENT,
        "--spares",
        "0",
    )
    driver = start(cluster, recipe, out, *shrinks)
    wait_for(lambda: len(injected(out)) > 1, process=driver)
    thaw(driver, out, 0, "pause", since=injected(out)[0]["time"])
    code, output = finish(driver)
    assert code == 0, output
    assert fired(out) == ["kill", "stop"]
    (report,) = reports(out)
    assert (report["rank"], report["recovery"], report["steps_repeated"]) == (1, "shrink", 0)
    told = (
        "4 -> 2 rank(s) = dp 1 × tp 2 with the same global batch, until rank 1, 2 is back; rank 2 "
        "has no part in that"
    )
    assert told in output
    assert "grow     2 -> 4 ranks; no step is repeated" in output
    assert summary(out)["world_size"] == 4
    assert no_actors_left(cluster)
    micro = str(json.loads((only_run(out) / "config.json").read_text())["global_batch_size"] // 2)
    small = (
        *flags,
        "--workers",
        "2",
        "--micro_batch_size",
        micro,
        "--stop_at",
        "9",
        "--spares",
        "0",
    )
    resume = ("--resume", str(only_run(out) / "checkpoints" / "step_00000005"))
    undisturbed(recipe, tmp_path / "small", *small, *resume)
    alone = losses(tmp_path / "small")
    assert {step: loss for step, loss in losses(out).items() if 5 < step < 9} == {
        s: alone[s] for s in (6, 7, 8)
    }


def repeated(step: int, phase: str) -> int:
    """Steps that a restart from the checkpoints at 5, 10, ... does again."""
    done = step if phase in ("log", "eval", "checkpoint") else step - 1
    saved = (step - 1) // 5 * 5
    return done - saved


def attempts(out: Path) -> dict[int, int]:
    """In which attempt each step's record was written."""
    lines = (only_run(out) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["attempt"] for record in map(json.loads, lines)}


@pytest.mark.full
def test_the_survivor_keeps_its_process_and_the_trace_its_order(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path
) -> None:
    """SIGKILL of rank 0 while it saves step 15: only what follows the step's update is done again."""
    code, output = launch(
        cluster,
        recipe,
        tmp_path,
        *EVERY_FIVE,
        "--faults",
        "kill@rank=0,step=15,phase=checkpoint",
        "--comm_trace",
        "every=4",
    )
    assert code == 0, output
    assert fired(tmp_path) == ["kill"], "the fault did not fire"
    assert re.search(
        r"failure  rank 0 \(pid \d+, node [\d.]+\) died in checkpoint of step 15: killed by "
        r"SIGKILL",
        output,
    )
    assert re.search(
        r"replace  1/3 rank 0 \(pid \d+\) joins in [\d.]+ s; no step is repeated", output
    )
    assert re.search(
        r"recover  detected in 0.\d+ s, training again after [\d.]+ s, no steps repeated", output
    )
    assert_same_losses(tmp_path, clean[2])
    assert next(step for step, attempt in attempts(tmp_path).items() if attempt) == 16
    survivor = (only_run(tmp_path) / "logs" / "rank1.log").read_text()
    assert "rejoin  from step" in survivor
    assert len(set(re.findall(r"attempt \d, pid (\d+)", survivor))) == 1, "the same process went on"
    traced = [s["step"] for s in read_steps(only_run(tmp_path))]
    wanted = [step for step in range(1, 31) if step % 4 in (3, 0)]
    assert traced == sorted(set(traced)), "each once, in order"
    assert set(wanted) - set(traced) <= {15, 16}, "but for notes that the lost group took with it"


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        pytest.param(
            "hang@rank=1,step=15,phase=forward",
            r"rank 1 .* in forward of step 15 after \d+ collectives and is behind \(rank 0 in "
            r"backward of",
            marks=pytest.mark.full,
        ),
        (
            "stop@rank=0,step=15,phase=backward",
            r"rank 0 .* in backward of step 15 and does not answer \(rank 1 in",
        ),
    ],
)
def test_a_hung_rank_is_named_and_replaced(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path, fault: str, says: str
) -> None:
    """A rank that sleeps, and one that SIGSTOP froze: the others would wait for the collective's
    timeout.
    """
    flags = (
        "--eval_every",
        "5",
        "--checkpoint_every",
        "0",
        "--spares",
        "0",
        "--hang_timeout",
        "8",
        "--faults",
        fault,
    )
    code, output = launch(cluster, recipe, tmp_path, *flags)
    assert code == 0, output
    assert fired(tmp_path) == [fault.partition("@")[0]], "the fault did not fire"
    silent = re.search(r"made no progress for (\d+) s", output)
    assert silent, output
    assert int(silent[1]) >= 8
    assert re.search(says, output), output
    assert "replace  1/3" in output
    assert_same_losses(tmp_path, clean[2])
    rank = int(fault[fault.index("rank=") + 5])
    stacks = (
        only_run(tmp_path) / "logs" / f"rank{rank if fault.startswith('hang') else 1 - rank}.log"
    ).read_text()
    report = only_report(tmp_path, output)
    assert (report["cause"], report["recovery"], report["steps_repeated"]) == (
        "hung",
        "in_place",
        0,
    )
    assert "no rank makes progress" in stacks
    assert 'faults.py", line' in stacks or "engine.py" in stacks, "where it is"
    assert no_actors_left(cluster)


# At the start of each process. Rank 1 is killed a while after all have begun to import torch.
KILLED_IN_IMPORTS = """
import os, signal, sys, time

class Kills:
    def find_spec(self, name, path=None, target=None):
        if name != "nanoray.train.rank":
            return
        frame = sys._getframe()
        while frame and frame.f_code.co_name != "_prepare":
            frame = frame.f_back
        mark = os.environ["NANORAY_TEST_KILLED"]
        if frame and frame.f_locals["self"]._rank == 1 and not os.path.exists(mark):
            time.sleep(1)
            open(mark, "w").write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

sys.meta_path.insert(0, Kills())
"""


@pytest.mark.full
def test_a_rank_that_is_killed_in_its_imports_is_named(recipe: Path, tmp_path: Path) -> None:
    """On a Ray of its own, whose processes all import what they need by themselves."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(KILLED_IN_IMPORTS)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
        "NANORAY_TEST_KILLED": str(tmp_path / "killed"),
    }
    out = tmp_path / "out"
    code, output = finish(start(None, recipe, out, *of(2), "--max_steps", "5", **variables))
    assert code == 0, output
    pid = (tmp_path / "killed").read_text()
    named = rf"failure  rank 1 \(pid {pid}, node .*\) died in init of step 0: killed by SIGKILL"
    assert re.search(named, output), output
    report = only_report(out, output)
    assert (report["rank"], report["cause"]) == (1, "killed")


FROZEN = """
import signal
from nanoray.launch.recovery.rank_end import end_for_certain
from nanoray.launch.recovery.worker import Worker

actor = ray.remote(concurrency_groups={"control": 1, "heartbeat": 1})(Worker).remote("run", 0)
facts = ray.get(actor.ready.remote())
os.kill(facts["pid"], signal.SIGSTOP)
end_for_certain(facts)
try:
    ray.get(actor.ready.remote(), timeout=60)
except ray.exceptions.RayError as error:
    print()  # Ray's own messages may end without a new line
    print(json.dumps([facts["pid"], type(error).__name__]))
"""


@pytest.mark.full  # so is the frozen rank of test_a_hung_rank_is_named_and_replaced
def test_a_frozen_process_is_ended_by_a_task_on_its_node(cluster: Cluster) -> None:
    pid, error = in_driver(cluster, FROZEN)
    assert error == "ActorDiedError"
    assert not alive(pid)


@pytest.mark.full
def test_an_exception_is_the_cause_and_twice_is_enough(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    plan = "raise@rank=1,step=5,phase=forward;raise@rank=1,step=5,phase=forward,attempt=1"
    code, output = launch(cluster, recipe, tmp_path, "--faults", plan)
    assert code == 1
    assert "InjectedFault: fault plan: raise on rank 1 at step 5 in forward" in output
    assert "deterministic: it failed 2 times in the same way at the same step" in output
    assert summary(tmp_path)["exit_reason"].startswith("failed: rank 1")


@pytest.mark.full
def test_divergence_is_not_retried_and_keeps_its_exit_code(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    flags = ("--optimizer", "sgd", "--grad_clip", "0", "--lr", "1e30", "--warmup_steps", "0")
    code, output = launch(cluster, recipe, tmp_path, *flags)
    assert code == 5, output
    assert "TrainingDiverged: at step 2 the loss is nan" in output
    assert "Gave up: restarting cannot cure this" in output
    result = summary(tmp_path)
    assert result["exit_code"] == 5
    assert result["exit_reason"].startswith("failed: rank ")


@pytest.mark.full
def test_a_rank_that_is_lost_during_a_stop_does_not_cost_the_checkpoint(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    """SIGTERM, as before a node is taken away, and then one of the ranks is gone: the other one
    still saves.

    It does not wait for the patience that a rank in a collective gets: here 300 s.
    """
    plan = "stop@rank=0,step=10,phase=data;kill@rank=1,step=11,phase=backward"
    driver = start(cluster, recipe, tmp_path, "--checkpoint_every", "0", "--faults", plan, *PATIENT)
    wait_for(lambda: injected(tmp_path), process=driver)
    driver.terminate()
    thaw(driver, tmp_path, 0, "stop", since=injected(tmp_path)[0]["time"])
    code, output = finish(driver, 200)
    assert fired(tmp_path) == ["stop", "kill"]
    assert code == 143, output
    assert "save     1 rank(s) are left and hold the run's state; they save it, and end" in output
    result = summary(tmp_path)
    assert (result["exit_reason"], result["world_size"]) == ("stopped", 1)
    assert (
        only_run(tmp_path) / "checkpoints" / f"step_{result['steps']:08d}" / "manifest.json"
    ).exists()
    assert result["steps"] == 10, "a rank that only saves does not begin the interrupted step again"
    assert no_actors_left(cluster)


def test_a_driver_that_is_killed_leaves_nothing_and_the_run_goes_on(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path
) -> None:
    """SIGKILL of the driver: Ray ends its actors, also one that sleeps; `--resume auto` continues
    the run.
    """
    driver = start(
        cluster,
        recipe,
        tmp_path,
        *EVERY_FIVE,
        "--faults",
        "slow@rank=0,step=12,phase=data,seconds=600",
    )
    wait_for(lambda: any(tmp_path.glob("*/faults.jsonl")), process=driver)
    pids = [pid_of(tmp_path, rank, driver) for rank in (0, 1)]
    os.kill(driver.pid, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids), 60)
    driver.communicate()
    assert no_watchers_left(only_run(tmp_path))
    code, output = launch(cluster, recipe, tmp_path, *EVERY_FIVE, "--resume", "auto")
    assert code == 0, output
    assert_same_losses(tmp_path, clean[2])
    assert no_actors_left(cluster)
