"""Link models against closed forms, topologies, and simulated steps against schedules worked by
hand.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nanoray.bench.fit import fit
from nanoray.cli.forecast.links import (
    MODELS,
    Cost,
    Link,
    Topology,
    all_reduce,
    best,
    load_topology,
)
from nanoray.cli.forecast.simulate import Event, SimulatedBucket, SimulatedStep, Step, simulate
from nanoray.errors import ConfigError
from nanoray.parallel.algorithms import ALGORITHMS

MB = 1_000_000
ALPHA_S, BETA = 50e-6, 1 / 2e9
NODES = Topology(
    ranks_per_node=4,
    intra=Link(alpha_us=1, bandwidth_gb_per_s=100),
    inter=Link(alpha_us=10, bandwidth_gb_per_s=25),
)


# Fits


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("algorithm", ["backend", *ALGORITHMS])
def test_a_fit_finds_the_constants_that_made_the_times(algorithm: str, ranks: int) -> None:
    """Ring's times from the formula as it is printed; those of the others from a fit of their own."""
    made = fit([(1, 2 * (ranks - 1) * ALPHA_S), (MB, MB * BETA)], algorithm, ranks)
    points = [(n, made.seconds(ranks, n)) for n in (1000, 30_000, MB, 64 * MB)]
    found = fit(points, algorithm, ranks)
    assert (found.alpha_s, found.beta_s_per_byte) == pytest.approx(
        (made.alpha_s, made.beta_s_per_byte), rel=1e-6
    )
    assert max(map(abs, found.residuals)) < 1e-9


def test_the_backend_is_fitted_as_a_ring() -> None:
    n = 4
    points = [(s, 2 * (n - 1) * ALPHA_S + 2 * (n - 1) / n * s * BETA) for s in (1000, MB, 10 * MB)]
    found = fit(points, "backend", n)
    assert (found.alpha_s, found.beta_s_per_byte) == pytest.approx((ALPHA_S, BETA))
    assert found.seconds(8, MB) == pytest.approx(14 * ALPHA_S + 1.75 * MB * BETA)
    assert (found.link.alpha_us, found.link.bandwidth_gb_per_s) == pytest.approx((50, 2))
    assert found.outside(1000) is found.outside(10 * MB) is None
    assert found.outside(999) == "999 bytes are outside the measured 1000 .. 10000000"


def test_relative_errors_are_what_is_minimised() -> None:
    """A latency that is 10 % too long counts as much as a transfer that is: residuals balance, not
    seconds.
    """
    points = [(1000, 1e-3), (1000, 1.2e-3), (100 * MB, 1.0), (100 * MB, 1.2)]
    found = fit(points, "ring", 2)
    assert found.residuals[0] == pytest.approx(found.residuals[2], rel=1e-3)
    weights = [1 / s for _, s in points[:2]]
    assert found.seconds(2, 1000) == pytest.approx(
        sum(weights) / sum(w * w for w in weights), rel=1e-3
    )


# Topologies


def test_two_levels_by_hand() -> None:
    """12 ranks on 3 nodes: ring in the node of 4; among 3 nodes ring has 4 messages, and so has the
    double tree.
    """
    found = all_reduce(NODES, "two_level", 12, MB)
    assert found == pytest.approx((6e-6 + 4 * 10e-6, 1.5 * MB / 100e9 + 4 / 3 * MB / 25e9, 0))
    assert all_reduce(NODES, "two_level", 4, MB) == all_reduce(NODES, "ring", 4, MB)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 100, 16384])
def test_best_is_the_minimum_and_one_rank_is_free(ranks: int) -> None:
    times = [all_reduce(NODES, name, ranks, MB).seconds for name in MODELS]
    assert all_reduce(NODES, "best", ranks, MB).seconds == min(times)
    assert times[MODELS.index(best(NODES, ranks, MB))] == min(times)
    assert (min(times) == 0) == (ranks == 1)


@pytest.mark.parametrize(
    ("ranks", "ring_us", "tree_us"), [(8, 173, 242), (256, 899, 306), (4096, 10212, 374)]
)
def test_the_nvlink_preset_comes_near_nccls_own_model(
    ranks: int, ring_us: float, tree_us: float
) -> None:
    """A 25 MB bucket by the constants of NCCL's tuner for Hopper; its tree is a double binary one."""
    preset = load_topology("nvlink-400g")
    assert 1e6 * all_reduce(preset, "ring", ranks, 25 * MB).seconds == pytest.approx(
        ring_us, rel=0.25
    )
    assert 1e6 * all_reduce(preset, "double_tree", ranks, 25 * MB).seconds == pytest.approx(
        tree_us, rel=0.25
    )


def test_an_unknown_preset_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown topology nvlink-400; did you mean nvlink-400g"):
        load_topology("nvlink-400")
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        load_topology(str(tmp_path / "absent.yaml"))


# Steps, worked by hand. Seconds are small whole numbers; `price` makes a collective of that many
# seconds.

# Buckets ready at 4, 6 and 8; "bytes" are seconds
STEP = Step(2, 6, 1, (SimulatedBucket(2, 3), SimulatedBucket(4, 3), SimulatedBucket(6, 1)))


def price(nbytes: int) -> Cost:
    return Cost(0.0, nbytes)


def comm(plan: SimulatedStep) -> list[tuple[str, str, float, float]]:
    return [tuple(e) for e in plan.events if e.track != "compute"]  # type: ignore[misc]


def test_one_lane_queues_in_order() -> None:
    """
    compute  F F B B B B B B . . . O
    lane 0   . . . . 0 0 0 1 1 1 2      the third is ready at 8 and waits until 10
    """
    plan = simulate(STEP, price)
    assert comm(plan) == [
        ("lane 0", "bucket 0", 4, 7),
        ("lane 0", "bucket 1", 7, 10),
        ("lane 0", "bucket 2", 10, 11),
    ]
    assert (plan.step_s, plan.busy_s, plan.exposed_s) == (12, 7, 3)
    assert plan.events[-1] == Event("compute", "optimizer", 11, 12)


def test_two_lanes_share_the_link() -> None:
    """Bucket 0 has the link from 4 to 6 (2 of 3 done); then 0 and 1 at half speed: 0 ends at 8, 1
    has 2 left.

    At 8 bucket 2 (1 second) joins: 1 and 2 at half speed, 2 ends at 10, 1 has 1 left and ends at
    11.
    """
    plan = simulate(STEP, price, lanes=2)
    assert comm(plan) == [
        ("lane 0", "bucket 0", 4, 8),
        ("lane 0", "bucket 2", 8, 10),
        ("lane 1", "bucket 1", 6, 11),
    ]
    assert (plan.step_s, plan.busy_s, plan.exposed_s) == (12, 7, 3)


def test_communication_takes_cores_from_compute() -> None:
    """One core, and a collective that wants all of it: from 4 on both run at half speed.

    At 8 backward has done 2 more seconds (bucket 1 is ready), bucket 0 has 1 left, done at 10 with
    backward 3 ahead of the mark; bucket 1 takes 10 to 16 (backward ends at 16: 3 seconds at half
    speed); bucket 2 runs alone, 16 to 17.
    """
    step = Step(2, 8, 1, (SimulatedBucket(2, 3), SimulatedBucket(4, 3), SimulatedBucket(8, 1)))
    plan = simulate(step, lambda nbytes: Cost(0.0, nbytes, cpu=1.0), cores=1)
    assert comm(plan) == [
        ("lane 0", "bucket 0", 4, 10),
        ("lane 0", "bucket 1", 10, 16),
        ("lane 0", "bucket 2", 16, 17),
    ]
    assert (plan.step_s, plan.exposed_s) == (18, 1)
    # Processor sharing hides nothing: the step is its CPU work
    assert plan.step_s == step.compute_s + 7


def test_invariants_of_random_steps() -> None:
    """Every bucket once, in order, none before it is ready; exposed + hidden = busy; no step beats
    its CPU work.
    """
    source = random.Random(1)
    for _ in range(200):
        backward = source.uniform(0, 5)
        ready = sorted(source.uniform(0, backward) for _ in range(source.randrange(6)))
        buckets = tuple(SimulatedBucket(r, source.randrange(1, 5)) for r in ready)
        step = Step(source.uniform(0, 3), backward, source.uniform(0, 1), buckets)
        cpu, cores, lanes = source.uniform(0, 2), source.uniform(0.3, 3), source.randrange(1, 4)
        plan = simulate(step, lambda n, cpu=cpu: Cost(0.3 * n, 0.2 * n, cpu), lanes, cores)  # type: ignore[misc]
        runs = sorted(
            (e for e in plan.events if e.track != "compute"), key=lambda e: int(e.name.split()[1])
        )
        assert [e.name for e in runs] == [f"bucket {i}" for i in range(len(buckets))]
        assert [e.start_s for e in runs] == sorted(e.start_s for e in runs)
        assert all(
            e.start_s >= step.forward_s + b.ready_s - 1e-9
            for e, b in zip(runs, buckets, strict=True)
        )
        assert 0 <= plan.exposed_s <= plan.busy_s + 1e-9
        assert plan.step_s >= step.compute_s - 1e-9
        cpu_s = step.compute_s + sum(0.3 * n + 0.2 * n for _, n in buckets) * cpu
        assert plan.step_s >= cpu_s / max(cores, 1 + lanes * cpu) - 1e-9
        if cores <= 1:
            assert plan.step_s >= step.compute_s / cores - 1e-9
