"""What a collective costs: the formulas against closed forms, the notebook against bytes counted by
hand.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoray.bench.harness.rank_pool import RankPool, Where
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.models.costs import count_parameters
from nanoray.models.gpt import ModelShape
from nanoray.observe.trace.costs import Collective, account, queue_starts
from nanoray.observe.trace.recorder import Clock, measure_offsets
from nanoray.parallel.algorithms import ALGORITHMS
from nanoray.parallel.mesh import Mesh
from nanoray.train.report import comm_lines
from tests.harness.ranks import make_spec, run_ranks, series


def bucket(enqueue: float, start: float, end: float, last: bool = False) -> Collective:
    return Collective(
        "all_reduce",
        "gradients",
        "default",
        "backward",
        "float32",
        4,
        enqueue,
        start,
        end,
        "",
        0,
        last,
    )


def call(start: float, end: float) -> Collective:
    return Collective(
        "all_reduce", "loss", "default", "log", "float32", 4, start, start, end, "call"
    )


def test_a_queue_of_one_lane_starts_when_the_one_before_ends() -> None:
    assert queue_starts([0, 1, 9], [4, 6, 12], lanes=1) == [0, 4, 9]


def test_a_queue_of_two_lanes_runs_two_at_a_time() -> None:
    assert queue_starts([0, 1, 2, 3], [5, 4, 8, 9], lanes=2) == [0, 1, 4, 5]


times = st.floats(0, 100, allow_nan=False)


@given(
    st.lists(st.tuples(times, times, times, st.booleans()), max_size=8),
    st.lists(st.tuples(times, times), max_size=4),
)
def test_busy_is_exposed_plus_hidden(
    buckets: list[tuple[float, float, float, bool]], calls: list[Any]
) -> None:
    seen = [bucket(*sorted((a, b, c)), last) for a, b, c, last in buckets] + [
        call(*sorted(c)) for c in calls
    ]
    cost = account(seen)
    assert cost.busy == pytest.approx(cost.exposed + cost.hidden)
    assert min(cost.busy, cost.exposed) >= 0
    assert cost.hidden >= -1e-9
    if seen:
        assert cost.busy <= max(c.end for c in seen) - min(c.enqueue for c in seen) + 1e-9


# Real ranks.


def traced(spec: RunSpec) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (spec.folder / "comm" / "steps.jsonl").read_text().splitlines()
    ]


def parameter_bytes(spec: RunSpec) -> int:
    return 4 * count_parameters(ModelShape.of(spec.config, spec.dataset.vocab_size))


@pytest.fixture(scope="module")
def untraced(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    spec = make_spec(text, tmp_path_factory.mktemp("plain"), dropout=0.1, eval_every=4)
    assert all("error" not in r for r in run_ranks(spec, 3))
    return spec


@pytest.fixture(scope="module")
def outcome(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("traced")
    spec = make_spec(text, folder, dropout=0.1, eval_every=4, comm_trace="always", bucket_mb=0.03)
    results = run_ranks(spec, 3)
    assert all("error" not in r for r in results)
    return spec, results[0]


@pytest.fixture(scope="module")
def always(outcome: tuple[RunSpec, dict[str, Any]]) -> RunSpec:
    return outcome[0]


def test_tracing_changes_no_bit(untraced: RunSpec, text: Path, tmp_path: Path) -> None:
    """Three ranks, dropout, windows with and without the hook."""
    spec = make_spec(text, tmp_path, dropout=0.1, eval_every=4, comm_trace="every=3")
    assert all("error" not in r for r in run_ranks(spec, 3))
    assert [s["step"] for s in traced(spec)] == [2, 3, 5, 6, 8]
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert series(spec, key) == series(untraced, key)


def test_every_byte_is_accounted_for(always: RunSpec) -> None:
    """Each step moves every gradient once, the loss (4 bytes), a vote (1); evaluation two float64."""
    steps = traced(always)
    assert [s["step"] for s in steps] == list(range(1, 9))
    for step in steps:
        found = step["collectives"]
        gradients = [c for c in found if c["what"] == "gradients"]
        assert sum(c["bytes"] for c in gradients) == parameter_bytes(always)
        assert len(gradients) > 2
        assert sum(c["last"] for c in gradients) == 1
        assert [(c["bytes"], c["op"], c["phase"]) for c in found if c["what"] == "loss"] == [
            (4, "all_reduce", "optimizer")
        ]
        assert [c["bytes"] for c in found if c["what"] == "vote"] == [1]
        assert [c["bytes"] for c in found if c["what"] == "eval"] == (
            [16] if step["step"] % 4 == 0 else []
        )
        assert {c["ranks"] for c in found} == {3}


def test_the_order_of_the_queue_says_when_gloo_began(always: RunSpec) -> None:
    for step in traced(always):
        gradients = [c for c in step["collectives"] if c["what"] == "gradients"]
        assert {c["timing"] for c in gradients} == {"queue"}


def test_buckets_are_named_by_their_parameters(always: RunSpec) -> None:
    buckets = json.loads((always.folder / "comm" / "buckets.json").read_text())
    names = [name for bucket in buckets.values() for name in bucket]
    assert len(names) == len(set(names))
    assert "tok_emb.weight" in names
    sizes = [c["bucket"] for c in traced(always)[-1]["collectives"] if c["bucket"] is not None]
    assert sorted(map(int, buckets)) == sorted(sizes)


def test_the_run_ends_with_what_communication_came_to(
    outcome: tuple[RunSpec, dict[str, Any]],
) -> None:
    spec, result = outcome
    comm, figures = result["comm"], [s["figures"] for s in traced(spec)]
    assert comm["traced_steps"] == 8
    assert comm["exposed_ms"] == pytest.approx(sum(f["exposed_ms"] for f in figures) / 8)
    assert comm["exposed_share"] == pytest.approx(100 * comm["exposed_ms"] / comm["step_ms"])
    gradients = [c for s in traced(spec) for c in s["collectives"] if c["what"] == "gradients"]
    assert comm["slowest"]["time_us"] == max(c["time_us"] for c in gradients)
    assert comm["clock"] == "one host, one clock"
    assert comm_lines(comm, "runs/x")[1].endswith(" GB/s")
    # A record tells of the steps before it
    assert sorted(series(spec, "comm/exposed_ms")) == list(range(2, 9))


class FakeEvent:
    """A CUDA event on a device whose clock is 1000 ms at its first event and advances 10 ms with
    each one.
    """

    made = 0

    def __init__(self, **_: Any) -> None:
        self.ms, self.through = 0.0, False

    def record(self, stream: Any) -> None:
        FakeEvent.made += 1
        self.ms = 1000.0 + 10.0 * FakeEvent.made

    def synchronize(self) -> None:
        self.through = True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert other.through  # as torch demands
        assert other.ms >= self.ms
        return other.ms - self.ms


def test_moments_of_a_device_become_seconds_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: the arithmetic only. An event 20 ms before the anchor was 0.02 s before it."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr("nanoray.observe.trace.recorder.time.perf_counter", lambda: 77.0)
    clock = Clock(torch.device("cuda:0"))
    first, second = clock.now(), clock.now()
    clock.anchor()
    assert (clock.seconds(first), clock.seconds(second)) == (
        pytest.approx(76.98),
        pytest.approx(76.99),
    )
    assert clock.seconds(12.5) == 12.5  # gloo's ends are the host's already


@pytest.mark.parametrize(
    "name",
    [n if n == "ring" else pytest.param(n, marks=pytest.mark.full) for n in sorted(ALGORITHMS)],
)
def test_training_with_each_all_reduce_written_by_hand(
    name: str, untraced: RunSpec, text: Path, tmp_path: Path
) -> None:
    """The same losses up to the order of sums; with tracing the same bits as without."""
    specs = [
        make_spec(text, tmp_path, dropout=0.1, eval_every=4, allreduce=name, comm_trace=trace)
        for trace in ("off", "every=2")
    ]
    for spec in specs:
        assert all("error" not in r for r in run_ranks(spec, 3))
    expected = series(untraced)
    assert series(specs[0]) == pytest.approx(expected, abs=2e-5)
    assert series(specs[1]) == series(specs[0])
    gradients = [c for s in traced(specs[1]) for c in s["collectives"] if c["what"] == "gradients"]
    assert {c["group"] for c in gradients} == {"gradients"}


def offset_rank(mesh: Mesh, order: dict[str, Any], emit: Any) -> None:
    """Rank 1's clock is ahead by 123.25 s; on request as processes of one host, or as if they were
    two.
    """
    module = "nanoray.observe.trace.recorder"
    host = f"host{mesh.rank}" if order["apart"] else "host"
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 123.25 * mesh.rank)
    with patch(f"{module}.clock_domain", lambda: host), patch(f"{module}.time", clock):
        found = measure_offsets(mesh)
    emit(
        {
            "offset": found[1].offset,
            "uncertainty": found[1].uncertainty,
        }
    )


def test_clocks_of_two_hosts_are_compared() -> None:
    with RankPool(Where(workers=2, device="cpu")) as pool:
        (apart,) = pool.run("tests.ranks.test_comm:offset_rank", {"apart": True})
        (together,) = pool.run("tests.ranks.test_comm:offset_rank", {"apart": False})
    assert abs(apart["offset"] - 123.25) <= apart["uncertainty"]
    assert 0 < apart["uncertainty"] < 0.1
    assert (together["offset"], together["uncertainty"]) == (0.0, 0.0)
