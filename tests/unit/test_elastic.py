"""The outer loop without processes: groups that break at any point, in every order of two faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.config import Batch, make_config
from nanoray.data.tokens import MicroBatches
from nanoray.errors import (
    ConfigError,
    MemoryExhausted,
    OutOfMemory,
    RendezvousError,
    TrainingDiverged,
)
from nanoray.models.precision import LossScaler
from nanoray.observe.watch.observers import Observers
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.rendezvous import Rendezvous
from nanoray.train.elastic import TrainingGroup, furthest, train_in_groups
from nanoray.train.engine import Regroup
from nanoray.train.guard.guards import Guards
from nanoray.train.out_of_memory import recorded, shortage_of
from tests.harness.ranks import make_spec

CPU = torch.device("cpu")
PEER = RuntimeError("[gloo] Connection closed by peer")
ABSENT = RendezvousError("rank 0 waited for rank 1 of 2")


@pytest.fixture
def spec(text: Path, tmp_path: Path) -> RunSpec:
    return make_spec(text, tmp_path, precision="fp32")


class Groups:
    """Plays a run's groups: what goes wrong where in each, and in which order things happened.

    `script` holds, for each group in turn, {"meet" | "build" | "fit": what it raises}.
    """

    def __init__(self, spec: RunSpec, *script: dict[str, BaseException]) -> None:
        self.spec, self._script = spec, iter(script)
        self._now: dict[str, BaseException] = {}
        self.events: list[str] = []
        self.micro = 6
        self.limits: list[int] = []  # of the groups that trained to their end
        model, config = torch.nn.Linear(1, 1), make_config({"micro_batch_size": 1})
        guards = Guards(config, Batch(1, 1, 1), CPU)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.state = TrainState(model, optimizer, LossScaler(CPU, False), guards)

    def __call__(
        self, whole: bool = True, rejoin: Callable[[str, bool], Any] | None = None
    ) -> dict[str, Any]:
        self.state.whole = whole
        self._now = next(self._script)
        first = TrainingGroup(self.spec, self._mesh())
        return train_in_groups(first, self.state, self.build, self.meet, rejoin or self.rejoin)

    def _mesh(self) -> Mesh:
        groups = self

        class Alone(Mesh):
            def all_gather(self, value: Any) -> list[Any]:
                return [value, (0, "") if isinstance(value, tuple) else None]

            def barrier(self) -> None:
                groups.happen("barrier")

            def leave(self) -> None:
                groups.events.append("leave")

        return Alone(0, 2, 0, CPU, "gloo", "")

    def happen(self, what: str) -> None:
        self.events.append(what)
        if what in self._now:
            raise self._now[what]

    def meet(self, spec: RunSpec, rendezvous: Rendezvous) -> Mesh:
        self._now = next(self._script)
        self.happen("meet")
        return self._mesh()

    def build(self, group: TrainingGroup) -> Any:
        self.happen("build")
        return Engine(self, group)

    def rejoin(self, lost: str, is_short: bool) -> tuple[RunSpec, Rendezvous]:
        assert not any(p.grad is not None for p in self.state.model.parameters())
        self.events.append(f"{'short' if is_short else 'rejoin'}: {lost}")
        return self.spec.next_attempt(), Rendezvous(rank=0, world_size=2)


class Engine:
    """Stands where the loop stands; `writer` and `par` note what is asked of them."""

    def __init__(self, groups: Groups, group: TrainingGroup) -> None:
        self._groups, self.group = groups, group
        self.writer = self.par = self
        self.checks = [self]
        self.is_copied = False
        self.batches = MicroBatches(None, Batch(groups.micro, 1, 2), 0)  # type: ignore[arg-type]

    def fit(self) -> dict[str, Any]:
        self._groups.state.model(torch.ones(1, 1)).sum().backward()  # a step is in flight
        self._groups.happen("fit")
        group = self.group
        self._groups.limits.append(group.memory.limit)
        return {"attempt": group.spec.attempt, "source": group.source}

    def finish_copy(self) -> None:
        """Nothing may change a state that a checkpoint is still copied from."""
        self.is_copied = True

    def hold(self) -> None:
        assert self.is_copied
        self._groups.events.append("hold")

    def forget(self) -> None:
        """An audit in progress is broken off."""

    def undo(self) -> None:
        """A step in progress leaves no trace in the model's buffers."""

    def close(self) -> None:
        self._groups.events.append("close")


def test_without_a_fault_there_is_one_group(spec: RunSpec) -> None:
    run = Groups(spec, {})
    assert run() == {"attempt": 0, "source": None}
    assert run.events == ["build", "fit", "barrier", "close"]


PLACES = [
    ("fit", PEER),
    ("build", PEER),
    ("barrier", PEER),
    ("meet", PEER),
    ("meet", ABSENT),
    ("fit", Regroup()),
]


def first_place() -> Iterator[tuple[str, BaseException]]:
    return (place for place in PLACES if place[0] != "meet")  # the first group has met


@pytest.mark.parametrize(("one", "two"), list(product(first_place(), PLACES)), ids=str)
def test_every_order_of_two_faults(
    spec: RunSpec, one: tuple[str, Any], two: tuple[str, Any]
) -> None:
    """A rank is lost, and another one while the group meets, is built, trains, or ends."""
    run = Groups(spec, dict([one]), dict([two]), {})
    assert run() == {"attempt": 1, "source": 0}, (
        "it goes on in the third group, from its own memory"
    )
    assert [event.split(":")[0] for event in run.events].count("rejoin") == 2
    assert run.events.count("leave") == 2
    built = [i for i, event in enumerate(run.events) if event == "hold"]
    assert len(built) == sum(where in ("fit", "barrier") for where, _ in (one, two)), (
        "commits wait for the new attempt"
    )
    assert run.events[-4:] == ["build", "fit", "barrier", "close"]
    told = [event for event in run.events if event.startswith("rejoin")]
    for event, (_, error) in zip(told, (one, two), strict=True):
        assert ("the driver ordered" in event) is isinstance(error, Regroup)
        assert isinstance(error, Regroup) or f"{type(error).__name__}: {error}" in event


@pytest.mark.parametrize(
    "error", [TrainingDiverged("nan"), ValueError("bug"), ConfigError("no"), KeyboardInterrupt()]
)
def test_what_is_no_lost_peer_ends_the_run(spec: RunSpec, error: BaseException) -> None:
    run = Groups(spec, {"fit": error})
    with pytest.raises(type(error)) as raised:
        run()
    assert raised.value is error
    assert run.events == ["build", "fit"]


def test_a_rank_without_the_state_cannot_serve_others(spec: RunSpec) -> None:
    """A newcomer whose first group breaks before it has the state ends, and is replaced itself."""
    with pytest.raises(RuntimeError, match="Connection closed"):
        Groups(spec, {"build": PEER})(whole=False)


def test_without_a_driver_a_lost_peer_is_the_end(spec: RunSpec) -> None:
    """Under torchrun the group's end is the process' end."""
    run = Groups(spec, {"fit": PEER})
    run.state.whole = True
    with pytest.raises(RuntimeError, match="Connection closed"):
        train_in_groups(
            TrainingGroup(spec, run._mesh()), run.state, lambda group: _broken(), run.meet, None
        )


def _broken() -> Any:
    raise PEER


def test_a_driver_that_gives_no_orders_ends_the_wait(spec: RunSpec) -> None:
    """The error says why it waited; it must not be taken for another lost peer."""

    def rejoin(lost: str, is_short: bool) -> Any:
        raise RuntimeError(f"no rank took its place: {lost}")

    run = Groups(spec, {"fit": PEER})
    with pytest.raises(
        RuntimeError, match=r"took its place: RuntimeError: \[gloo\] Connection closed"
    ):
        run(rejoin=rejoin)
    assert run.events == ["build", "fit", "hold", "leave"]


# A rank runs out of memory.

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
NO_MEMORY = [
    FULL,
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("CUDA driver error: cudaErrorMemoryAllocation"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_the_same_ranks_meet_again_and_take_half(spec: RunSpec, error: Exception) -> None:
    run = Groups(spec, {"fit": error}, {})
    assert run() == {"attempt": 1, "source": 0}
    assert [event.split(":")[0] for event in run.events[:5]] == [
        "build", "fit", "hold", "leave", "short",
    ]  # fmt: skip
    assert run.limits == [3]


@pytest.mark.parametrize("place", ["meet", "build", "fit"])
def test_a_peer_that_is_lost_meanwhile_does_not_make_it_forget(spec: RunSpec, place: str) -> None:
    run = Groups(spec, {"fit": FULL}, {place: PEER}, {})
    run()
    assert run.limits == [3]


def test_a_process_alone_meets_nobody(spec: RunSpec) -> None:
    run = Groups(spec, {"fit": FULL})
    run.state.whole = True
    first = TrainingGroup(spec, Mesh(0, 1, 0, CPU, "none", ""))
    run._now = next(run._script)
    fails = iter([FULL, None])

    def build(group: TrainingGroup) -> Any:
        error = next(fails)
        run._now = {} if error is None else {"fit": error}
        return run.build(group)

    assert train_in_groups(first, run.state, build, run.meet, None)["source"] is None
    assert run.limits == [3]
    assert "leave" not in run.events, "process groups of the program around it stay"


@pytest.mark.parametrize(
    ("settings", "micro", "message"),
    [
        ({"on_oom": "stop"}, 6, r"rank 0 ran out of memory while it warmed up \(CUDA out of memory. "
         r"Tried to allocate 2 GiB; [\d.]+ GiB of the host are free\); halve --micro_batch_size"),
        ({}, 1, "with 1 sequence at a time; to need less memory, in the order of what it costs: "
         "--activation_checkpointing selective or block, --dp_mode zero1, zero2 or fsdp"),
    ],
)  # fmt: skip
def test_where_no_smaller_one_is_taken_the_error_says_what_helps(
    text: Path, tmp_path: Path, settings: dict[str, Any], micro: int, message: str
) -> None:
    run = Groups(make_spec(text, tmp_path, **settings), {"fit": FULL})
    run.micro = micro
    with pytest.raises(ConfigError, match=message):
        run()


@pytest.mark.parametrize("error", [NO_MEMORY[1], NO_MEMORY[2], NO_MEMORY[3]])
def test_memory_of_the_host_is_not_freed_by_half_a_micro_batch_of_a_gpu(
    spec: RunSpec, error: Exception
) -> None:
    """As where a token file is read, or a batch is copied into pinned memory."""
    mesh = Mesh(0, 1, 0, torch.device("cuda:0"), "none", "")
    batches: Any = SimpleNamespace(batch=SimpleNamespace(micro=6), data=None)
    ends = shortage_of(error, spec.config, mesh, (3, "data"), batches).ends
    assert re.search(r"in data of step 3 .* GiB of the host are free\); a smal", ends)
    on_cpu = Mesh(0, 1, 0, CPU, "none", "")
    assert shortage_of(error, spec.config, on_cpu, (3, "data"), batches).limit == 3


def test_an_update_that_is_done_in_part_is_not_repeated(spec: RunSpec) -> None:
    run = Groups(spec, {"fit": FULL})
    run.state.is_updating = True
    with pytest.raises(ConfigError, match=r"in the update of step .* Some weights have changed"):
        run()
    later = Groups(spec, {"fit": FULL})
    later.state.is_updating = True
    later.state.step = 5
    with pytest.raises(MemoryExhausted, match="Some weights have changed"):
        later()


def test_ranks_that_cannot_meet_again_begin_smaller_after_a_restart(spec: RunSpec) -> None:
    run = Groups(spec, {})
    run.state.whole = True
    run._now = {"fit": FULL}
    first = TrainingGroup(spec, run._mesh())
    with pytest.raises(OutOfMemory, match="has at most 3 instead of 6"):
        train_in_groups(first, run.state, run.build, run.meet, None)
    assert recorded(spec.folder, asked=6) == 3
    assert recorded(spec.folder, asked=12) == 0, "another size is tried anew"


class Standing(Mesh):
    def __init__(self, standing: list[tuple[int, str]]) -> None:
        super().__init__(0, len(standing), 0, CPU, "gloo", "")
        self._standing = standing

    def all_gather(self, value: Any) -> list[Any]:
        return [
            value,
            *(self._standing[1:] if isinstance(value, tuple) else [None] * (self.world_size - 1)),
        ]


def test_the_furthest_rank_serves_the_others(spec: RunSpec) -> None:
    state = Groups(spec).state
    state.whole = True
    state.step = 7
    assert furthest(Standing([(0, ""), (8, "fp32"), (-1, "")]), state, "fp32", False) == (
        1,
        "fp32",
        8,
        (),
    )
    first = furthest(Standing([(0, ""), (7, "fp32"), (-1, "")]), state, "fp32", False)
    assert first == (0, "fp32", 7, ()), "the first of equals"
    newcomer = furthest(Standing([(0, ""), (5, "bf16")]), None, "", False)
    assert newcomer == (1, "bf16", 5, ()), "a newcomer learns the precision"
    state.whole = False
    with pytest.raises(RuntimeError, match="no rank holds the run's state"):
        furthest(Standing([(0, ""), (-1, "")]), state, "fp32", False)


# What a new rank 0 writes down first.


@pytest.mark.parametrize(
    ("newest", "reported", "expected"), [(5, 5, [3, 4, 5]), (5, 4, [3, 4]), (4, 4, [3, 4])]
)
def test_the_record_that_a_lost_rank_0_did_not_write(
    spec: RunSpec, newest: int, reported: int, expected: list[int]
) -> None:
    """Also where rank 0 lives, but broke off before it wrote what another rank says has been
    reported.
    """
    observers = Observers(spec, ())
    observers.open(0, 10)
    for step in (3, 4):
        observers.record({"step": step})
    observers.catch_up({"step": newest}, reported)
    observers.close()
    lines = (spec.folder / "metrics.jsonl").read_text().splitlines()
    assert [int(line.split(":")[1].strip(" }")) for line in lines] == expected


def test_ranks_other_than_0_write_nothing(spec: RunSpec) -> None:
    observers = Observers(spec, ())
    observers.open(1, 0)
    observers.catch_up({"step": 5}, 5)
    observers.record({"step": 6})
    assert not (spec.folder / "metrics.jsonl").exists()
    observers.open(0, 5)
    assert len(observers.opened) == 1
    observers.open(1, 5)
    assert observers.opened == [], "another rank writes now"
