"""What replicas that rarely communicate send, keep and wait for, by formulas and by hand."""

from __future__ import annotations

import pytest

from nanoray.cli import parse_args
from nanoray.forecast.layouts import candidates
from nanoray.forecast.links import Link, Topology
from nanoray.forecast.memory import RankSizes, Sizes, exchanged, state_memory
from nanoray.forecast.parallelisms.record import Talk
from nanoray.forecast.predict import OnTopology, predict
from nanoray.forecast.traffic import talks_of
from nanoray.mesh.layout import Layout
from nanoray.models.costs import count_parameters
from nanoray.start.plan import forecast_at
from tests.unit.test_predict import SHAPE, SPEED, job

P = count_parameters(SHAPE)
FOUR = Layout(dp=4, replicas=4)


def lines(*argv: str) -> list[str]:
    loaded = parse_args(["--dry_run", *argv], "x", "y")
    assert loaded.scale is not None
    return forecast_at(loaded, loaded.scale)


def sent(talks: list[Talk], layout: Layout) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by axis."""
    found: dict[str, float] = {}
    for talk in talks:
        nbytes = talk.sent(layout.size_of(talk.axis))
        found[talk.axis] = found.get(talk.axis, 0.0) + nbytes
    return found


def test_bytes_of_a_step_are_those_of_a_round_over_its_steps() -> None:
    talks = talks_of(job(sync_every=50), FOUR, 1, 0)
    assert {(t.axis, t.op, t.every, t.when) for t in talks} == {
        ("replica", "all_to_all", 50, "once"),
        ("replica", "all_gather", 50, "once"),
    }
    # Each of two passes over all weights sends 3/4 of them.
    assert sent(talks, FOUR) == {"replica": pytest.approx(2 * 4 * P * 3 / 4 / 50)}
    once = talks_of(job(sync_every=1), FOUR, 1, 0)
    ddp = talks_of(job(), Layout(dp=4), 1, 0)
    assert sent(once, FOUR)["replica"] == pytest.approx(sent(ddp, Layout(dp=4))["dp"])


def test_fragments_change_no_byte_and_eight_bits_a_quarter() -> None:
    whole = sent(talks_of(job(sync_every=50), FOUR, 1, 0), FOUR)["replica"]
    fragments = talks_of(job(sync_every=50, sync_fragments=4), FOUR, 1, 0)
    assert {t.when for t in fragments} == {"travels"}
    assert sent(fragments, FOUR)["replica"] == pytest.approx(whole)
    eight = talks_of(job(sync_every=50, sync_bits=8), FOUR, 1, 0)
    # A byte for each number, and 4 for the scale of 1,024 of them
    assert sent(eight, FOUR)["replica"] == pytest.approx(whole * (1 + 4 / 1024) / 4)


def test_a_rank_of_a_group_averages_what_it_updates() -> None:
    layout = Layout(dp=4, replicas=2)
    found = sent(talks_of(job(dp_mode="zero1", sync_every=10, replicas=2), layout, 1, 0), layout)
    # Inside of a group in each step as in zero1; between the groups half of the weights in a round
    assert found["shard"] == pytest.approx(2 * 4 * P / 2)
    assert found["replica"] == pytest.approx(2 * 4 * P / 2 / 2 / 10)


@pytest.mark.parametrize(
    ("settings", "ranks", "tensors"),
    [
        ({}, 1, 2),  # anchor and momentum
        ({"outer_lr": 1.0, "outer_momentum": 0.0}, 1, 1),
        ({"sync_fragments": 4}, 1, 2 + 5 / 4),
        ({"dp_mode": "fsdp", "replicas": 2}, 2, 2 / 2),
    ],
)
def test_memory_of_rounds(settings: dict[str, object], ranks: int, tensors: float) -> None:
    config = job(sync_every=50, **settings).config
    sizes = Sizes(params=1000, outside=400, layer=300, tensor=200, trained=1000)
    assert state_memory(config, sizes, ranks, 1, 8.0)["rounds"] == 4 * 1000 * tensors
    # Whole moves are there four times while they are exchanged.
    more = exchanged(config, RankSizes(sizes), ranks, bucket_mb=0.0)
    assert more == (0 if "sync_fragments" in settings else 16 * 1000 // ranks)


def test_without_rounds_there_is_no_such_memory() -> None:
    sizes = Sizes(params=1000, outside=400, layer=300, tensor=200, trained=1000)
    assert "rounds" not in state_memory(job().config, sizes, 4, 1, 8.0)
    assert exchanged(job().config, RankSizes(sizes), 4, 8.0) == 0


def link_for(exchange_s: float) -> OnTopology:
    """Return a network on which the four ranks exchange all weights in `exchange_s`."""
    # Three quarters go to the others, and three quarters come back as means.
    link = Link(alpha_us=0, bandwidth_gb_per_s=1.5 * 4 * P / 1e9 / exchange_s)
    return OnTopology(Topology(ranks_per_node=1, intra=link, inter=link))


def test_seconds_of_a_round_are_shared_by_its_steps() -> None:
    """A link that needs a second for an exchange delays each of 50 steps by 20 ms."""
    step = predict(job(sync_every=50), FOUR, 1, link_for(1.0), SPEED)
    assert step.parts["dp"] == pytest.approx(1 / 50, rel=1e-3)
    ddp = predict(job(), Layout(dp=4), 1, link_for(1.0), SPEED)
    assert ddp.parts["dp"] > 0.9


def test_fragments_travel_beside_two_steps() -> None:
    """What takes no longer than two steps delays none; of the rest each step gets its share."""
    compute_s = predict(job(sync_every=50), FOUR, 1, link_for(1.0), SPEED).parts["compute"]

    def exposed_steps(exchange_steps: float) -> float:
        fragments = job(sync_every=50, sync_fragments=4)
        network = link_for(exchange_steps * compute_s)
        return predict(fragments, FOUR, 1, network, SPEED).parts["dp"] / compute_s

    assert exposed_steps(7.9) == 0.0  # a quarter of it takes less than two steps
    # A fragment takes 20 steps and has 2 of them; there are 4 in a round.
    assert exposed_steps(80.0) == pytest.approx(4 / 50 * (20 - 2), rel=1e-3)


def test_the_search_offers_replicas_only() -> None:
    tried = list(candidates(job(sync_every=50), 8))
    assert tried
    assert {(each.dp, each.replicas) for each in tried} == {(2, 2), (4, 4), (8, 8)}
    groups = candidates(job(sync_every=50, dp_mode="fsdp", replicas=2), 8, ranks_per_node=2)
    assert Layout(dp=8, replicas=4) in set(groups)


def test_a_dry_run_of_any_size_answers() -> None:
    found = "\n".join(lines("--preset", "gpt2-124m", "--world_size", "4096", "--sync_every", "50"))
    assert "4,096 ranks = dp 4096 (4096 replicas)" in found
    assert "rounds 0.99" in found
    assert "MB every 50 steps  a rank sends 9.9 MB" in found
    assert (
        "between nodes a step (nodes of 1, a group each); with gradients averaged in each" in found
    )


def test_a_topology_prices_the_mean_of_a_round() -> None:
    command = ["--preset", "gpt2-124m", "--world_size", "64", "--topology", "ethernet-25g"]
    ms = {}
    for every in (1, 50):
        found = lines(*command, "--sync_every", str(every))
        (step,) = [line for line in found if line.startswith("step ")]
        ms[every] = float(step.split("exposed dp ")[1])
    assert ms[50] == pytest.approx(ms[1] / 50, rel=0.02)
