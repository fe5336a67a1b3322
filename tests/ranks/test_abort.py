"""Groups that are aborted by order: a frozen rank keeps its connections open, so the others see no
error.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.faults.cause import is_collective_error
from nanoray.parallel.ddp import apply_ddp
from nanoray.parallel.mesh import Mesh, abandon_groups, abort_groups
from nanoray.parallel.plan import Plan
from nanoray.parallel.wire import SealedStore
from tests.harness.elastic import run_elastic
from tests.harness.ranks import make_spec
from tests.ranks.test_mirror import RECIPE, Clean, clean, ended_well, fired

__all__ = ["clean"]  # the fixture

# Of the collectives: the run would last longer than that
PATIENT = {"timeout_s": 300, "init_timeout_s": 60}


def obeys(events: Path) -> None:
    """Let a thread of this process abort its groups a moment after the planned fault, as
    `Worker.abort` does.
    """

    def wait_and_abort() -> None:
        while not events.exists():
            time.sleep(0.05)
        time.sleep(0.5)  # by now this rank waits for the frozen one
        abort_groups()
        abort_groups()  # twice is as once

    threading.Thread(target=wait_and_abort, daemon=True).start()


def left_after(spec: RunSpec, rank: int) -> float:
    """Seconds from the fault until a rank left its group."""
    (event,) = map(json.loads, (spec.folder / "faults.jsonl").read_text().splitlines())
    (line,) = [
        line for line in spec.log(rank).read_text().splitlines() if "leaving the group" in line
    ]
    at, _, milliseconds = line[:23].partition(",")
    return (
        time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S"))
        + int(milliseconds) / 1000
        - float(event["time"])
    )


def ends_with_wrong_sums(step: int) -> None:
    """In this process the sums of one step are wrong and no error says so, as after an abort over
    NCCL.
    """
    whole, calls = Plan.grad_norm, []

    def aborted(self: Plan) -> Tensor:
        norm = whole(self)
        calls.append(step)
        if len(calls) == step:
            self._mesh.sealed.aborted = True
            for gradient in self.gradients:
                gradient.neg_()
        return norm

    Plan.grad_norm = aborted  # type: ignore[method-assign]


def test_sums_of_an_aborted_group_are_not_used(text: Path, tmp_path: Path, clean: Clean) -> None:
    spec = make_spec(text, tmp_path, **RECIPE)
    outcome = run_elastic(
        spec, 2, patches=dict.fromkeys(range(2), partial(ends_with_wrong_sums, 5))
    )
    ended_well(spec, outcome, clean(2), 1)
    assert all("the driver has ordered to abort the group" in why for why in outcome.left[0])


@pytest.mark.parametrize("what", ["loss", "state"])
def test_what_an_aborted_group_has_sent_is_not_used(tmp_path: Path, what: str) -> None:
    """Also what is not checked by the loop: a mean loss, or the state that a new rank receives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = Mesh(
            0, 2, 0, torch.device("cpu"), "gloo", "", sealed=SealedStore(dist.HashStore(), "key")
        )
        use = partial(mesh.all_reduce, torch.ones(1), "loss")
        use = partial(mesh.broadcast_tensor, torch.ones(1), 0) if what == "state" else use
        use()
        mesh.sealed.abort()
        with pytest.raises(
            RuntimeError, match="gloo: a peer is lost, and the driver has ordered to abort"
        ) as error:
            use()
        assert is_collective_error(error.value)
    finally:
        abandon_groups()


def test_a_group_that_never_came_to_be_does_not_count() -> None:
    """torch numbers groups, and ranks meet under that number: who failed to meet must not be one
    ahead.
    """
    soon = timedelta(seconds=0.1)
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=soon)
    abandon_groups()
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == "0"
    finally:
        abandon_groups()


@pytest.mark.parametrize(
    ("world", "phase", "settings"),
    [
        (3, "backward", {}),
        pytest.param(4, "forward", {"tp": 2}, marks=pytest.mark.full),
        pytest.param(3, "exchange_norm", {"dp_mode": "zero1"}, marks=pytest.mark.full),
        pytest.param(
            4,
            "backward",
            {"pp": 2, "dp_mode": "ddp_by_hand", "grad_accum_steps": 2},
            marks=pytest.mark.full,
        ),
        pytest.param(3, "eval", {}, marks=pytest.mark.full),
        pytest.param(3, "checkpoint", {}, marks=pytest.mark.full),
    ],
)
def test_the_others_leave_a_frozen_rank(
    text: Path, tmp_path: Path, clean: Clean, world: int, phase: str, settings: dict[str, Any]
) -> None:
    """SIGSTOP, and it stays so until the run is over: no step is repeated, and no bit differs."""
    step = 4 if phase in ("eval", "checkpoint") else 5
    faults = f"stop@rank=1,step={step},phase={phase}"
    spec = make_spec(text, tmp_path, **RECIPE | PATIENT | settings | {"faults": faults})
    others = [slot for slot in range(world) if slot != 1]
    patches = dict.fromkeys(others, partial(obeys, spec.folder / "faults.jsonl"))
    outcome = run_elastic(spec, world, patches=patches, frozen=1, timeout_s=100)
    assert fired(spec) == [phase]
    ended_well(spec, outcome, clean(world, **settings), 1)
    assert max(left_after(spec, slot) for slot in others) < 30, (
        "a second, on a machine that is not busy"
    )


class Alone(SealedStore):
    """A meeting in which rank 0 says where it listens, and is lost before it connects to rank 1."""

    def set(self, name: str, value: str | bytes) -> None:
        super().set(name, value)
        value = bytes(value) if not isinstance(value, str) else value.encode()
        if name.endswith("/1"):  # of two ranks the one with the higher address connects
            at = value.index(bytes([127, 0, 0, 1]))
            super().set(f"{name[:-1]}0", value[: at - 2] + b"\xff\xff" + value[at:])


def join(meeting: Alone) -> None:
    """Be rank 1. On a busy machine gloo sees in the first collective only that the other one has
    left again.
    """
    dist.ProcessGroupGloo(meeting, 1, 2, timedelta(seconds=60)).allreduce([torch.ones(1)]).wait()


def test_a_rank_that_is_lost_before_it_connects_is_not_waited_for() -> None:
    """gloo would wait for five times the timeout."""
    meeting = Alone(dist.PrefixStore("here", dist.HashStore()), "key")
    order = threading.Timer(0.5, meeting.abort)
    order.start()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"onnection (closed|reset) by peer") as error:
        join(meeting)
    assert order.finished.is_set(), "it waited for the order"
    assert time.monotonic() - begun < 30
    assert is_collective_error(error.value)


def test_a_value_that_a_lost_rank_would_have_stored_is_not_waited_for() -> None:
    meeting = SealedStore(dist.PrefixStore("here", dist.HashStore()), "key")
    with pytest.raises(dist.DistStoreError, match="imeout"):
        meeting.wait(["its address"], timedelta(seconds=0.1))
    threading.Timer(0.5, meeting.abort).start()
    begun = time.monotonic()
    with pytest.raises(
        dist.DistStoreError,
        match="a peer is lost, and the driver has ordered to abort: no its address",
    ):
        meeting.wait(["its address"], timedelta(seconds=120))
    assert 0.4 < time.monotonic() - begun < 60
    meeting.set("its address", "here")
    meeting.wait(["its address"])


def test_the_wrapper_of_ddp_is_not_the_last_owner_of_its_group() -> None:
    """Its C++ part would destroy the group with Python's lock held, and a thread of gloo may want it:
    in one of some two thousand rehearsals on a busy machine a new actor never became ready.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh: Any = SimpleNamespace(device=torch.device("cpu"))
        axis: Any = SimpleNamespace(size=2, group=dist.group.WORLD, mesh=mesh)
        wrapped = apply_ddp(nn.Linear(2, 2), axis, 8.0)
        attributes = vars(wrapped)
        released = list(attributes)
        assert attributes["released_last"] is attributes["process_group"]
        for owner in ("reducer", "logger"):
            assert released.index(owner) < released.index("released_last")
    finally:
        abandon_groups()
