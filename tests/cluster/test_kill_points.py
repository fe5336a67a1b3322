"""Ranks and drivers end at every point where the run's state changes hands: nothing is lost, no bit
differs.

A few of them are tried by default; all of them, ended and frozen, and pairs with
NANORAY_TEST_POINTS=all.
"""

from __future__ import annotations

import ast
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from nanoray.faults.inject import parse_plan
from nanoray.machine.fault_points import (
    DRIVER_POINTS,
    EXCHANGES,
    MEETING,
    POINTS,
    RANK_POINTS,
    SAVING,
)
from tests.harness.cluster import (
    Cluster,
    assert_same_run,
    finish,
    injected,
    launch,
    no_actors_left,
    reports,
    start,
    undisturbed,
)
from tests.harness.parsing import parse

PACKAGE = Path(__file__).resolve().parents[2] / "nanoray"
ALL = os.environ.get("NANORAY_TEST_POINTS") == "all"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if ALL else 600)]
FLAGS = (
    "--workers",
    "3",
    "--cpus_per_worker",
    "0.5",
    "--dropout",
    "0.1",
    "--log_every",
    "1",
    "--eval_every",
    "4",
)
FLAGS += (
    "--checkpoint_every",
    "4",
    "--keep_checkpoints",
    "3",
    "--sample_tokens",
    "0",
    "--spares",
    "0",
)
LIMIT_S = 3000 if ALL else 500
EVERY = 4  # steps from one fault to the next
# Only one of two precisions reaches one of these, and only a step that is saved again the other.
# Reached where a state is sharded.
SHARDED = {"exchange_finite", "exchange_gradients", "exchange_norm", "exchange_weights", "part"}
MIRRORED = {"exchange_mirror", "caught_up"}  # and where it is mirrored
GROUPS = {"across_groups"}  # with --replicas
IMAGES = {"exchange_statistics", "exchange_batchnorm"}  # reached by a resnet: test_images.py
TENSOR = {"exchange_activations", "exchange_logits"}  # with --tp
EXPERTS = {"exchange_tokens"}  # with --ep: the same
CONTEXT = {"exchange_keys_values", "exchange_keys_values_grad"}  # with --cp
OWN = {"exchange_absent"}  # of a script's own model: tests/ranks/test_absent.py
ELSEWHERE = {"exchange_overflow", "aside"}
ELSEWHERE |= {*SHARDED, *MIRRORED, *GROUPS, *IMAGES, *TENSOR, *EXPERTS, *CONTEXT, *OWN}
IN_RECOVERY = {*MEETING, "exchange_state"} - {"last"}


def test_the_points_in_the_code_are_those_that_are_listed() -> None:
    found, built = set(), set()
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    for source in [text for text in sources if "reached(" in text]:
        for node in ast.walk(parse(source)):
            match node:
                case ast.Call(func=ast.Name(id="reached"), args=[ast.Constant(value=name)]):
                    found.add(str(name))
                case ast.Call(func=ast.Name(id="reached"), args=[ast.JoinedStr() as name]):
                    built.add(ast.unparse(name))
    assert built == {"f'exchange_{what}'"}
    assert found | EXCHANGES.keys() == POINTS.keys()
    assert not set(DRIVER_POINTS) & set(RANK_POINTS)


def plan_of(points: list[str], kind: str, newcomer: bool) -> tuple[str, int]:
    """Return a plan with these points, each some steps after the one before, and the number of
    steps that it takes.

    A point of a recovery needs a first fault; it is then reached by a survivor, or by the newcomer.
    A point of a save is reached beside training, on a busy machine many steps later, and the next
    fault must not come before that.
    """
    plan, step = [], 0
    for i, point in enumerate(points):
        step += EVERY if i == 0 or points[i - 1] not in SAVING else 10 * EVERY
        if point in IN_RECOVERY or point == "caught_up":
            lost = i % 3
            plan.append(f"kill@rank={lost},step={step},phase=backward")
            plan.append(
                f"{kind}@rank={lost if newcomer else (lost + 1) % 3},step={step},phase={point}"
            )
        else:
            plan.append(f"{kind}@rank={0 if point in SAVING else i % 3},step={step},phase={point}")
    return ";".join(plan), step + EVERY


def clean(recipe: Path, out: Path, steps: int, *more: str) -> Path:
    undisturbed(recipe, out, *FLAGS, *more, "--max_steps", str(steps))
    return out


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "stop"] if ALL else ["kill"])
@pytest.mark.parametrize("newcomer", [False, pytest.param(True, marks=pytest.mark.full)])
def test_ranks_end_at_every_point(
    cluster: Cluster, recipe: Path, tmp_path: Path, kind: str, newcomer: bool
) -> None:
    """Of three ranks one or two are lost at a time, so the third holds the state, and no step is
    repeated.
    """
    possible = (
        IN_RECOVERY - {"leave", "wait"} if newcomer else RANK_POINTS.keys() - ELSEWHERE - {"last"}
    )
    points = sorted(possible) if ALL else ["shared"] if newcomer else ["groups", "renamed"]
    plan, steps = plan_of([*points, "last"], kind, newcomer)
    output = survive(cluster, recipe, tmp_path, plan, steps)
    assert {report["recovery"] for report in reports(tmp_path / "out")} <= {"", "in_place"}, output
    titles = [
        title
        for report in reports(tmp_path / "out")
        for title in (report["title"], *report["consequences"])
    ]
    meeting = [
        point
        for point in points
        if point in ("meet", "roll_call", "groups", "met") and not newcomer
    ]
    assert sum("in regroup of step" in title for title in titles) >= len(meeting) * (kind == "kill")
    note(kind, [*points, "last"], "newcomer" if newcomer else "rank")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "stop"] if ALL else ["kill"])
@pytest.mark.parametrize("mirror", ["auto", "off"])
def test_ranks_of_a_sharded_run_end_at_every_point(
    cluster: Cluster, recipe: Path, tmp_path: Path, kind: str, mirror: str
) -> None:
    """Without a mirror a lost shard is on disk only: all ranks start again from there, and repeat
    up to 3 steps.

    With it a rank is replaced in place, and so is its replacement that is lost before it has the
    state.
    """
    if mirror == "auto":
        points = (
            sorted(SHARDED | MIRRORED | IN_RECOVERY - {"leave", "wait"})
            if ALL
            else ["committed", "part", "caught_up"]
        )
    else:
        points = sorted(SHARDED) if ALL else ["exchange_weights"]
    plan, steps = plan_of(points, kind, newcomer=True)
    survive(cluster, recipe, tmp_path, plan, steps, "--dp_mode", "zero1", "--mirror", mirror)
    found = {report["recovery"] for report in reports(tmp_path / "out")}
    assert found == {"restart"} if mirror == "off" else found <= {"", "in_place"}
    note(kind, points, "rank of a sharded run")


# How four ranks share a model -> its points, and the flags. Another rank holds what a lost one had: its
# twin in the other group, or its mirror.
WAYS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "groups that hold the same": (GROUPS | SHARDED, ("--replicas", "2")),
    "layers": (TENSOR, ("--tp", "2")),
    "experts": (EXPERTS, ("--experts", "4", "--ep", "2")),
    "sequences": (CONTEXT, ("--cp", "2", "--dropout", "0")),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "stop"] if ALL else ["kill"])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_share_a_model_end_at_every_point(
    cluster: Cluster, recipe: Path, tmp_path: Path, kind: str, way: str
) -> None:
    """The others wait in the exchange of that way."""
    of_way, flags = WAYS[way]
    points = sorted(of_way) if ALL else sorted(of_way)[:1]
    plan, steps = plan_of(points, kind, newcomer=False)
    more = ("--workers", "4", "--dp_mode", "zero1", *flags)
    survive(cluster, recipe, tmp_path, plan, steps, *more)
    assert {report["recovery"] for report in reports(tmp_path / "out")} <= {"", "in_place"}
    note(kind, points, f"rank that shares {way}")


@pytest.mark.skipif(not ALL, reason="opt-in: NANORAY_TEST_POINTS=all takes 20 minutes")
def test_both_survivors_end_in_one_recovery(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    """Pairs of points, a sample of them. When nobody is left who holds the state, all start from
    the checkpoint.
    """
    source, plan, pairs = random.Random(0), [], []
    for step in range(EVERY, 9 * EVERY, EVERY):
        pairs.append([source.choice(sorted(IN_RECOVERY)) for _ in range(2)])
        ranks = source.sample(range(3), 3)
        plan.append(f"kill@rank={ranks[0]},step={step},phase=backward")
        plan += [
            f"kill@rank={r},step={step},phase={point}"
            for r, point in zip(ranks[1:], pairs[-1], strict=True)
        ]
    survive(cluster, recipe, tmp_path, ";".join(plan), 10 * EVERY)
    note("kill", ["+".join(pair) for pair in pairs], "both survivors")


def survive(
    cluster: Cluster, recipe: Path, tmp_path: Path, plan: str, steps: int, *more: str
) -> str:
    """Train with a plan of faults: each fires, and the run ends as one without them. Return its
    output.
    """
    flags = (
        *FLAGS,
        *more,
        "--max_steps",
        str(steps),
        "--max_failures",
        "99",
        "--hang_timeout",
        "6" if "stop@" in plan else "60",
    )
    expected = clean(recipe, tmp_path / "clean", steps, *more)
    code, output = finish(
        start(cluster, recipe, tmp_path / "out", *flags, "--faults", plan), LIMIT_S
    )
    assert code == 0, output
    fired = Counter(
        (event["kind"], event["rank"], event["phase"]) for event in injected(tmp_path / "out")
    )
    assert fired == Counter((fault.kind, fault.rank, fault.phase) for fault in parse_plan(plan)), (
        output
    )
    assert_same_run(tmp_path / "out", expected)
    assert no_actors_left(cluster)
    return output


@pytest.mark.full
def test_drivers_end_at_every_point(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    """The next command goes on from what is on disk."""
    expected = clean(recipe, tmp_path / "clean", 16)
    points = sorted(DRIVER_POINTS) if ALL else ["orders"]
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
        assert_same_run(out, expected)
        assert no_actors_left(cluster)
    note("kill", points, "driver")


def note(kind: str, points: list[str], who: str) -> None:
    """Add to the record of what was tried, if one is wanted."""
    if path := os.environ.get("NANORAY_POINTS_JSON"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "who": who, "points": points}) + "\n")
