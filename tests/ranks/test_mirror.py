"""Mirrors: a rank of a sharded run is lost anywhere in a step; the run ends with the bits of one
without a fault.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.parallel.axis import Axis
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import Plan
from tests.harness.axes import equal, final
from tests.harness.elastic import Outcome, run_elastic
from tests.harness.ranks import make_spec, records, run_ranks, series

RECIPE: dict[str, Any] = {
    "dropout": 0.1,
    "max_steps": 8,
    "global_batch_size": 24,
    "precision": "fp32",
}
RECIPE |= {"bucket_mb": 0.02, "eval_every": 4, "checkpoint_every": 4, "hash_every": 3, "lr": 0.01}


class Clean:
    """Runs without faults or mirrors, each made once."""

    def __init__(self, text: Path, folder: Path) -> None:
        self._text, self._folder, self._runs = text, folder, dict[str, RunSpec]()

    def __call__(self, world: int, **settings: Any) -> RunSpec:
        key = json.dumps([world, settings])
        if key not in self._runs:
            self._runs[key] = make_spec(
                self._text, self._folder / str(len(self._runs)), **RECIPE | settings
            )
            outcomes = run_ranks(self._runs[key], world)
            assert not [o for o in outcomes if "error" in o], outcomes
        return self._runs[key]


@pytest.fixture(scope="module")
def clean(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return Clean(text, tmp_path_factory.mktemp("clean"))


def ended_well(spec: RunSpec, outcome: Outcome, clean_run: RunSpec, recoveries: int) -> None:
    """No rank failed in the end, no completed step was repeated, and no bit differs."""
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == recoveries, outcome.left
    assert series(spec) == series(clean_run)
    assert [record["step"] for record in records(spec)] == [*range(1, RECIPE["max_steps"] + 1)]
    assert equal(final(spec), final(clean_run))


def fired(spec: RunSpec) -> list[str]:
    lines = (spec.folder / "faults.jsonl").read_text().splitlines()
    return [event["phase"] for event in map(json.loads, lines) if event["event"] == "injected"]


PLAN = [
    "forward",
    "backward",
    "exchange_mirror",
    "exchange_norm",
    "committed",
    "exchange_weights",
    "eval",
    "checkpoint",
]


# Where the updated weights of a step begin to be sent; fsdp's are gathered by the next forward.
SPREAD = {"zero1": "exchange_weights", "zero2": "exchange_weights", "fsdp": "log"}
ROWS, KEPT = {"dp_mode": "fsdp"}, {"dp_mode": "fsdp", "fsdp_reshard": "grad_op"}


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(2, {"dp_mode": "zero1"}, marks=pytest.mark.full),
        (3, {"dp_mode": "zero2"}),
        pytest.param(4, {"dp_mode": "zero1"}, marks=pytest.mark.full),
        pytest.param(2, ROWS, marks=pytest.mark.full),
        pytest.param(3, KEPT | {"grad_accum_steps": 2}, marks=pytest.mark.full),
        pytest.param(
            4, ROWS | {"optimizer": "sgd", "momentum": 0.9, "lr": 0.05}, marks=pytest.mark.full
        ),
    ],
)
def test_a_rank_is_lost_anywhere_in_a_step(
    text: Path, tmp_path: Path, clean: Clean, world: int, settings: dict[str, Any]
) -> None:
    """A fault in each of eight places of a run: the norm is the commit point, and faults come on
    both of its sides.
    """
    steps = [2, 3, 3, 4, 5, 6, 8, 8]
    phases = [SPREAD[settings["dp_mode"]] if at == "exchange_weights" else at for at in PLAN]
    places = zip(range(8), steps, phases, strict=True)
    plan = ";".join(f"kill@rank={i % world},step={step},phase={place}" for i, step, place in places)
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": plan})
    outcome = run_elastic(spec, world)
    assert fired(spec) == phases, "each, once"
    ended_well(spec, outcome, clean(world, **settings), len(PLAN))


# Who knows the norm has done the step; who does not finishes it from the gradients that were kept.


def deaf(kind: type, method: str, what: str, step: int) -> None:
    """In this process one step's result of a collective is lost after all have taken part, as if
    the group had broken.

    It is a method of Axis or Mesh that names its purpose, `what`.
    """
    whole, calls = getattr(kind, method), []

    def losing(self: Any, tensor: torch.Tensor, purpose: str, **flags: Any) -> torch.Tensor:
        result: torch.Tensor = whole(self, tensor, purpose, **flags)
        calls.extend([purpose] if purpose == what else [])
        if purpose == what and len(calls) == step:
            calls.append(what)  # once
            raise RuntimeError("Connection closed by peer")
        return result

    setattr(kind, method, losing)


NORM, OVERFLOW = (Axis, "sum", "norm"), (Mesh, "all_reduce", "overflow")


@pytest.mark.parametrize(
    ("world", "missed", "settings"),
    [
        (3, NORM, {"dp_mode": "zero1", "grad_accum_steps": 2}),
        pytest.param(
            4,
            NORM,
            {"dp_mode": "zero2", "optimizer": "sgd", "momentum": 0.9, "lr": 0.05},
            marks=pytest.mark.full,
        ),
        pytest.param(
            4, OVERFLOW, {"dp_mode": "zero2", "precision": "fp16"}, marks=pytest.mark.full
        ),
        pytest.param(3, NORM, KEPT, marks=pytest.mark.full),
        pytest.param(4, OVERFLOW, ROWS | {"precision": "fp16"}, marks=pytest.mark.full),
    ],
)
def test_a_step_that_one_rank_has_done_is_finished_by_the_others(
    text: Path, tmp_path: Path, clean: Clean, world: int, missed: Any, settings: dict[str, Any]
) -> None:
    """Rank 0 dies in the spread of step 5's weights; of the others only the last one has heard the
    norm.
    """
    plan = f"kill@rank=0,step=5,phase={SPREAD[settings['dp_mode']]}"
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": plan})
    patches = {rank: partial(deaf, *missed, 5) for rank in range(1, world - 1)}
    outcome = run_elastic(spec, world, patches=patches)
    ended_well(spec, outcome, clean(world, **settings), 1)
    logs = [spec.log(rank).read_text() for rank in range(world)]
    assert [f"finished step 5, which rank {world - 1} had done" in log for log in logs] == [
        r in patches for r in range(world)
    ]


@pytest.mark.parametrize("mode", [pytest.param("zero2", marks=pytest.mark.full), "fsdp"])
def test_a_step_that_nobody_left_has_done_is_repeated(
    text: Path, tmp_path: Path, clean: Clean, mode: str
) -> None:
    """Rank 0 heard the norm and died; rank 1 did not hear it. Both steps 5 are the same one."""
    spec = make_spec(
        text, tmp_path, **RECIPE | {"dp_mode": mode, "faults": "kill@rank=0,step=5,phase=committed"}
    )
    outcome = run_elastic(spec, 2, patches={1: partial(deaf, *NORM, 5)})
    ended_well(spec, outcome, clean(2, dp_mode=mode), 1)
    assert "finished step" not in spec.log(1).read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "settings"), [(2, ROWS), (4, {"tp": 2, "dp_mode": "zero1"}), (4, ROWS | {"tp": 2})]
)
def test_a_new_rank_is_lost_before_it_has_the_state(
    text: Path, tmp_path: Path, clean: Clean, world: int, settings: dict[str, Any]
) -> None:
    """The others leave a group twice more: with a model that it has not cut yet, and with one that
    holds nothing.
    """
    plan = ";".join(f"kill@rank=1,step=3,phase={at}" for at in ("backward", "met", "caught_up"))
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": plan})
    outcome = run_elastic(spec, world)
    assert fired(spec) == ["backward", "met", "caught_up"]
    ended_well(spec, outcome, clean(world, **settings), 3)


def breaks_in_the_spread(step: int) -> None:
    """In this process the group breaks when one step's weights begin to be sent."""
    whole, calls = Plan.spread, []

    def breaking(self: Plan, *left_out: Any) -> None:
        calls.append(step)
        if len(calls) == step:
            raise RuntimeError("Connection closed by peer")
        whole(self, *left_out)

    Plan.spread = breaking  # type: ignore[method-assign]


@pytest.mark.full
@pytest.mark.parametrize(
    "mode", ["zero2", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("zero1", "fsdp"))]
)
def test_an_update_is_not_done_twice(text: Path, tmp_path: Path, clean: Clean, mode: str) -> None:
    """Rank 1 has updated its share when the group breaks, and has not sent it: the step counts as
    done.
    """
    spec = make_spec(text, tmp_path, **RECIPE | {"dp_mode": mode})
    outcome = run_elastic(spec, 2, patches={1: partial(breaks_in_the_spread, 5)})
    ended_well(spec, outcome, clean(2, dp_mode=mode), 1)
    assert "finished step" not in spec.log(1).read_text()


def test_a_rank_and_its_mirror_are_lost_together(text: Path, tmp_path: Path) -> None:
    """Ranks 1 and 2 of three: rank 2 mirrors rank 1. Two ranks of four that are no neighbours cost
    nothing.
    """
    plan = "kill@rank=1,step=5,phase=forward;kill@rank=2,step=5,phase=forward"
    spec = make_spec(text, tmp_path, **RECIPE | {"dp_mode": "zero1", "faults": plan})
    outcome = run_elastic(spec, 3)
    assert {rank["error"] for rank in outcome.ranks.values()} == {"StateLost"}
    assert (
        "the rank that owned them is gone, and so is each that mirrored"
        in outcome.ranks[0]["message"]
    )


@pytest.mark.full
def test_two_ranks_that_do_not_mirror_each_other_are_lost_together(
    text: Path, tmp_path: Path, clean: Clean
) -> None:
    """With two ranks on each node, a rank's mirror is on the other one: a whole node may be lost."""
    plan = "kill@rank=2,step=5,phase=backward;kill@rank=3,step=5,phase=backward"
    spec = make_spec(text, tmp_path, **RECIPE | {"dp_mode": "zero1", "faults": plan})
    outcome = run_elastic(spec, 4, on_nodes=(0, 1, 0, 1))
    ended_well(spec, outcome, clean(4, dp_mode="zero1"), 1)


@pytest.mark.parametrize(
    "mode", ["zero1", *(pytest.param(m, marks=pytest.mark.full) for m in ("zero2", "fsdp"))]
)
def test_the_group_shrinks_and_grows_and_is_cut_anew(
    text: Path, tmp_path: Path, clean: Clean, mode: str
) -> None:
    """3 -> 2 -> 1 -> 3 ranks: each time the pieces are put together from what the ranks hold, also
    by a single rank.
    """
    settings = {"dp_mode": mode, "dropout": 0.0}
    plan = "kill@rank=1,step=3,phase=backward;kill@rank=0,step=5,phase=committed"
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": plan})
    outcome = run_elastic(spec, 3, groups=[(0, 2), (2,)], grow_at=7)
    assert not [
        rank for rank in outcome.ranks.values() if "error" in rank and rank["error"] != "Died"
    ], outcome
    assert outcome.left[2] == ["the driver ordered a new group"]
    whole = clean(3, **settings)
    assert [record["step"] for record in records(spec)] == [*range(1, 9)]
    assert series(spec) == pytest.approx(series(whole), abs=2e-5), (
        "sums in another order, and no more"
    )
    ours, theirs = final(spec), final(whole)
    for mine, other in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
        assert all(torch.allclose(mine[name], other[name], atol=1e-4) for name in other)


@pytest.mark.full
def test_the_trace_shows_what_the_mirror_costs(text: Path, tmp_path: Path, clean: Clean) -> None:
    spec = make_spec(text, tmp_path, **RECIPE | {"dp_mode": "zero1", "comm_trace": "always"})
    outcome = run_elastic(spec, 3)
    ended_well(spec, outcome, clean(3, dp_mode="zero1"), 0)
    steps = [
        json.loads(line) for line in (spec.folder / "comm" / "steps.jsonl").read_text().splitlines()
    ]
    sent = {
        what: sum(c["bytes"] for c in steps[2]["collectives"] if (c["op"], c["what"]) == what)
        for what in (("send_recv", "mirror"), ("reduce_scatter", "gradients"))
    }
    assert 3 * sent["send_recv", "mirror"] == sent["reduce_scatter", "gradients"] > 0, (
        "each rank sends its share"
    )


@pytest.mark.parametrize("mode", ["zero1", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_mirror_that_differs_from_its_owner_is_found(
    text: Path, tmp_path: Path, mode: str
) -> None:
    spec = make_spec(text, tmp_path, **RECIPE | {"dp_mode": mode})
    outcome = run_elastic(spec, 3, patches={1: spoil_the_mirror})
    assert {rank["error"] for rank in outcome.ranks.values()} == {"StateDiverged"}
    assert "of rank 0 and its mirror on rank 1" in outcome.ranks[2]["message"]


@pytest.mark.parametrize("mode", ["zero1", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_missed_update_of_a_mirror_shows_in_the_weights(
    text: Path, tmp_path: Path, clean: Clean, mode: str
) -> None:
    """The planted bug, and nothing that compares: what the tests above demand is not true by
    itself.
    """
    settings = {"dp_mode": mode, "hash_every": 0}
    spec = make_spec(
        text, tmp_path, **RECIPE | settings | {"faults": "kill@rank=0,step=5,phase=backward"}
    )
    outcome = run_elastic(spec, 2, patches={1: spoil_the_mirror})
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    # With fsdp the mirror's weights are used, and not only its moments
    before = 5 if mode == "zero1" else 4
    assert series(spec)[before] == series(clean(2, **settings))[before]
    assert not equal(final(spec), final(clean(2, **settings)))


def spoil_the_mirror() -> None:
    """In this process the mirror's update of one step is left out: the bug that all of this guards
    against.
    """
    from nanoray.models import precision

    whole, calls = precision.step_unless, []

    def lazy(
        optimizer: torch.optim.Optimizer, leave_out: torch.Tensor | None, scale: torch.Tensor | None
    ) -> None:
        calls.append(1)
        if len(calls) != 4:  # own, mirror, own, mirror
            whole(optimizer, leave_out, scale)

    precision.step_unless = lazy
