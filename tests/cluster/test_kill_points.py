"""Ranks and drivers end at every point where the run's state changes hands: nothing is lost, no bit differs.

Two of the points, chosen by a seed, are tried by default; all of them, ended and frozen, with NANORAY_TEST_POINTS=all.
"""

from __future__ import annotations

import ast
import json
import os
import random
from pathlib import Path

import pytest
import torch

from nanoray.checkpoint.find import newest_valid
from nanoray.points import DRIVER_POINTS, EXCHANGES, MEETING, POINTS, RANK_POINTS, SAVING
from tests.harness.cluster import Cluster, finish, injected, launch, losses, no_actors_left, only_run, reports, start

PACKAGE = Path(__file__).resolve().parents[2] / "nanoray"
ALL = os.environ.get("NANORAY_TEST_POINTS") == "all"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if ALL else 600)]
FLAGS = ("--workers", "3", "--cpus_per_worker", "0.5", "--dropout", "0.1", "--log_every", "1", "--eval_every", "4")
FLAGS += ("--checkpoint_every", "4", "--keep_checkpoints", "3", "--sample_tokens", "0", "--spares", "0")
LIMIT_S = 3000 if ALL else 500
EVERY = 4  # steps from one fault to the next
# Only one of two precisions reaches one of these, and only a step that is saved again the other.
ELSEWHERE = {"exchange_overflow", "aside"}
IN_RECOVERY = {*MEETING, "exchange_state"} - {"last"}


def test_the_points_in_the_code_are_those_that_are_listed() -> None:
    found, built = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="reached"), args=[ast.Constant(value=name)]):
                    found.add(str(name))
                case ast.Call(func=ast.Name(id="reached"), args=[ast.JoinedStr() as name]):
                    built.add(ast.unparse(name))
    assert built == {"f'exchange_{what}'"}
    assert found | EXCHANGES.keys() == POINTS.keys()
    assert not set(DRIVER_POINTS) & set(RANK_POINTS)


def plan_of(points: list[str], kind: str, newcomer: bool) -> tuple[str, int]:
    """Return a plan with these points, each some steps after the one before, and the number of steps that it takes.

    A point of a recovery needs a first fault; it is then reached by a survivor, or by the newcomer.
    """
    plan, step = [], 0
    for i, point in enumerate(points):
        step += EVERY
        if point in IN_RECOVERY:
            lost = i % 3
            plan.append(f"kill@rank={lost},step={step},phase=backward")
            plan.append(f"{kind}@rank={lost if newcomer else (lost + 1) % 3},step={step},phase={point}")
        else:
            plan.append(f"{kind}@rank={0 if point in SAVING else i % 3},step={step},phase={point}")
    return ";".join(plan), step + EVERY


def clean(cluster: Cluster, recipe: Path, out: Path, steps: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    code, output = launch(cluster, recipe, out, *FLAGS, "--max_steps", str(steps))
    assert code == 0, output
    return losses(out), weights(out)


def weights(out: Path) -> dict[str, torch.Tensor]:
    newest, _ = newest_valid(only_run(out) / "checkpoints")
    assert newest
    return newest.state.model


def chosen(points: set[str], n: int) -> list[str]:
    """All of these points, or some."""
    return sorted(points) if ALL else random.Random(len(POINTS)).sample(sorted(points), n)


@pytest.mark.parametrize("kind", ["kill", "stop"] if ALL else ["kill"])
@pytest.mark.parametrize("newcomer", [False, True])
def test_ranks_end_at_every_point(cluster: Cluster, recipe: Path, tmp_path: Path, kind: str, newcomer: bool) -> None:
    """Of three ranks one or two are lost at a time, so the third holds the state, and no step is repeated."""
    points = IN_RECOVERY - {"leave", "wait"} if newcomer else RANK_POINTS.keys() - ELSEWHERE - {"last"}
    points = chosen(set(points), 2)
    plan, steps = plan_of([*points, "last"], kind, newcomer)
    flags = (
        *FLAGS,
        "--max_steps",
        str(steps),
        "--max_failures",
        "99",
        "--hang_timeout",
        "6" if kind == "stop" else "60",
    )
    expected, theirs = clean(cluster, recipe, tmp_path / "clean", steps)
    code, output = finish(start(cluster, recipe, tmp_path / "out", *flags, "--faults", plan), LIMIT_S)
    assert code == 0, output
    fired = [(event["kind"], event["rank"], event["phase"]) for event in injected(tmp_path / "out")]
    assert sorted(f"{kind}@rank={rank},phase={phase}" for kind, rank, phase in fired) == sorted(
        fault.replace(f",step={fault.split('step=')[1].split(',')[0]}", "") for fault in plan.split(";")
    )
    assert {report["recovery"] for report in reports(tmp_path / "out")} <= {"", "in_place"}, output
    assert losses(tmp_path / "out") == expected, "bit for bit"
    ours = weights(tmp_path / "out")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert no_actors_left(cluster)
    note(kind, points, "newcomer" if newcomer else "rank")


def test_drivers_end_at_every_point(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    """The next command goes on from what is on disk."""
    expected, theirs = clean(cluster, recipe, tmp_path / "clean", 16)
    points = chosen(set(DRIVER_POINTS), 2)
    for point in points:
        out = tmp_path / point
        recovery = "restart" if point == "restarting" else "in_place"
        plan = f"kill@rank=1,step=10,phase=backward;kill@rank=driver,step=0,phase={point}"
        flags = (*FLAGS, "--max_steps", "16", "--recovery", recovery)
        code, output = launch(cluster, recipe, out, *flags, "--faults", plan)
        assert code == -9, output
        assert [event["phase"] for event in injected(out)] == ["backward", point]
        code, output = launch(cluster, recipe, out, *flags, "--resume", "auto")
        assert code == 0, output
        assert losses(out) == expected, f"{point}: bit for bit"
        ours = weights(out)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), point
        assert no_actors_left(cluster)
    note("kill", points, "driver")


def note(kind: str, points: list[str], who: str) -> None:
    """Add to the record of what was tried, if one is wanted."""
    if path := os.environ.get("NANORAY_POINTS_JSON"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "who": who, "points": points}) + "\n")
