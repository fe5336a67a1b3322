"""What replicas that rarely communicate keep and send, counted on real ranks, beside the formulas."""

from __future__ import annotations

import pytest

from nanoray.forecast.memory import (
    RankSizes,
    Sizes,
    exchanged,
    exchanged_bytes,
    state_memory,
)
from tests.ranks.conftest import Pools
from tests.unit.test_predict import job


def test_a_round_keeps_and_sends_what_the_formulas_say(pools: Pools) -> None:
    for momentum, bits in ((0.9, 32), (0.0, 32), (0.9, 8)):
        order = {"momentum": momentum > 0, "bits": bits, "bucket_mb": 8.0}
        (found,) = pools(2).run("tests.harness.rounds:count_rank", order)
        weights = found["weights"]
        count = weights // 4
        sizes = Sizes(params=count, outside=0, layer=count, tensor=count, trained=count)
        config = job(sync_every=10, sync_bits=bits, outer_momentum=momentum).config

        parts = state_memory(config, sizes, 1, 1, 8.0)
        assert found["kept"] == parts["rounds"], "anchor, and momentum where there is any"
        # A thread of gloo may let go of a bucket's copy before or after the count.
        least = exchanged(config, RankSizes(sizes), 1, bucket_mb=0.0)
        most = exchanged(config, RankSizes(sizes), 1, bucket_mb=8.0)
        assert 0.98 * least <= found["travelling"] <= 1.02 * most

        assert found["left"] == 0, "an exchange that is over keeps nothing"

        # Two exchanges: a byte or four for each number, there and back; and a few bytes that say who takes part.
        each = exchanged_bytes(config)
        assert found["sent"] == {
            "all_to_all": pytest.approx(2 * each * count, abs=64),
            "all_gather": pytest.approx(2 * each * count, abs=64),
        }
