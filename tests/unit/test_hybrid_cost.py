"""What hybrid sharding costs: bytes, memory, the search, by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from nanoray.cli.forecast.job import Job
from nanoray.cli.forecast.layouts import candidates, refusal, search
from nanoray.cli.forecast.links import Link, Topology
from nanoray.cli.forecast.memory import Sizes, state_memory
from nanoray.cli.forecast.parallelisms.record import Talk
from nanoray.cli.forecast.predict import OnTopology, Speed
from nanoray.cli.forecast.rank_memory import memory_of
from nanoray.cli.forecast.traffic import talks_of
from nanoray.config import make_config
from nanoray.config.layout import Layout
from nanoray.models.costs import count_parameters
from nanoray.models.gpt import ModelShape
from tests.harness.factorizations import factorizations
from tests.harness.talks import sent as bytes_sent

SHAPE = ModelShape(n_layer=4, n_head=8, n_embd=64, block_size=16, bias=True, vocab_size=250)
P = count_parameters(SHAPE)
OUTSIDE = (256 + 16 + 2) * 64  # tokens with padding, positions, and the last norm
NODES = Topology(
    ranks_per_node=4,
    intra=Link(alpha_us=1, bandwidth_gb_per_s=100),
    inter=Link(alpha_us=10, bandwidth_gb_per_s=1),
    peak_tflops=100,
    mfu=0.5,
)


def job(sequences: int = 64, bucket_mb: float = 0.05, **settings: Any) -> Job:
    sizes = {"n_layer": 4, "n_head": 8, "n_embd": 64, "block_size": 16, "bias": True}
    config = make_config({**sizes, "micro_batch_size": 1, **settings})
    return Job(SHAPE, config, sequences, "fp32", bucket_mb)


def sent_per_axis(talks: list[Talk], layout: Layout) -> dict[str, float]:
    """Return the bytes that a rank sends, by axis."""
    sent = Counter[str]()
    for talk in talks:
        sent[talk.axis] += bytes_sent(talk, layout.size_of(talk.axis))
    return dict(sent)


# Bytes


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("mode", ["zero1", "zero2", "fsdp", "fsdp grad_op"])
def test_a_rank_sends_whole_tensors_within_its_group_and_its_slice_across(
    mode: str, accum: int
) -> None:
    """dp 8 in 2 groups of 4: 4P·3/4 for each pass within a group; across groups one all-reduce of
    P/4 a step, however many micro batches there are.
    """
    layout = Layout(dp=8, replicas=2)
    dp_mode, _, reshard = mode.partition(" ")
    keys = {"dp_mode": dp_mode, "fsdp_reshard": reshard or "full"}
    sent = sent_per_axis(talks_of(job(8 * accum, **keys), layout, 1, 0), layout)
    passes = {
        "zero1": 1 + 1,
        "zero2": accum + 1,
        "fsdp": 1 + 2 * accum,
        "fsdp grad_op": 1 + accum,
    }[mode]
    # Backward of fsdp does not gather again what lies outside of blocks.
    kept = accum * OUTSIDE if mode == "fsdp" else 0
    assert sent == {
        "shard": pytest.approx(4 * (P * passes - kept) * 3 / 4),
        "replica": pytest.approx(2 * 4 * (P / 4) * 1 / 2),
    }
    # Within a group it is what the mode sends on that many ranks alone.
    alone = Layout(dp=4)
    alone_sent = sent_per_axis(talks_of(job(4 * accum, **keys), alone, 1, 0), alone)
    assert alone_sent["dp"] == pytest.approx(sent["shard"])


# Links


# Memory


@pytest.mark.parametrize("mode", ["zero1", "zero2", "fsdp"])
def test_a_rank_keeps_its_share_of_a_group(mode: str) -> None:
    """On 8 ranks in 2 groups a rank keeps what it keeps on 4 ranks; slices of others arrive."""
    grouped = job(8, dp_mode=mode, replicas=2)
    alone = job(4, dp_mode=mode, mirror="off")
    found = memory_of(grouped, Layout(dp=8, replicas=2), 1)
    expected = memory_of(alone, Layout(dp=4), 1)
    arriving = found.pop("in_flight") - expected.pop("in_flight")
    assert found == expected
    sizes = Sizes(P, 0, 0, 4 * 64**2, P)
    state = [
        state_memory(one.config, sizes, 4, 1, one.bucket_mb)["in_flight"]
        for one in (grouped, alone)
    ]
    if mode != "fsdp":
        assert arriving == state[0] - state[1] == 2 * 4 * 4 * 64**2 // 4, "two slices of a bucket"
    assert arriving > 0


# Seconds, and the search


def test_the_search_offers_groups_that_fill_nodes() -> None:
    # Long enough for cp: a rank keeps 128 tokens of a sequence or more.
    long = replace(SHAPE, block_size=512)
    some = replace(job(64, dp_mode="zero1", block_size=512), shape=long)
    offered = {one for one in candidates(some, 16, 4) if one.replicas > 1}
    assert Layout(dp=16, replicas=4) in offered
    assert Layout(dp=16, replicas=2) in offered, "two nodes each"
    assert Layout(dp=8, tp=2, replicas=4) in offered
    assert Layout(dp=8, cp=2, replicas=4) in offered
    assert Layout(dp=16, replicas=8) not in offered, "half a node"
    assert all(one.shard_size > 1 for one in offered)
    # Where nothing is sharded, and where no node is known, there are none.
    plain = factorizations(16, tokens=long.block_size)
    for found in (
        [*candidates(replace(job(64), shape=long), 16, 4)],
        [*candidates(some, 16)],
    ):
        assert set(found) == plain
        assert len(found) == len(plain), "each once"

    steps = search(some, 16, 1, OnTopology(NODES), Speed(1e12, 1e12), None, 4)
    possible = {one for one in candidates(some, 16, 4) if not refusal(some, one)}
    assert {one.layout for one in steps} == possible
    fastest = next(one for one in steps if one.layout.dp == 16)
    assert fastest.layout.replicas == 4, "a group in each node"
