"""Link models against closed forms, and topologies."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoray.bench.fit import fit
from nanoray.cli.forecast.links import (
    MODELS,
    Link,
    Topology,
    all_reduce,
    best,
    load_topology,
)
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
    assert found == pytest.approx(6e-6 + 4 * 10e-6 + 1.5 * MB / 100e9 + 4 / 3 * MB / 25e9)
    assert all_reduce(NODES, "two_level", 4, MB) == all_reduce(NODES, "ring", 4, MB)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 100, 16384])
def test_best_is_the_minimum_and_one_rank_is_free(ranks: int) -> None:
    times = [all_reduce(NODES, name, ranks, MB) for name in MODELS]
    assert all_reduce(NODES, "best", ranks, MB) == min(times)
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
    assert 1e6 * all_reduce(preset, "ring", ranks, 25 * MB) == pytest.approx(ring_us, rel=0.25)
    assert 1e6 * all_reduce(preset, "double_tree", ranks, 25 * MB) == pytest.approx(
        tree_us, rel=0.25
    )


def test_an_unknown_preset_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown topology nvlink-400; did you mean nvlink-400g"):
        load_topology("nvlink-400")
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        load_topology(str(tmp_path / "absent.yaml"))
