"""Ranks that several test files share: a process takes seconds to import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

from nanoray.bench.harness.rank_pool import RankPool, Where

Pools = Callable[[int], RankPool]


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """A pool of so many CPU ranks, started at its first use, for all tests that leave its ranks alive."""
    started: dict[int, RankPool] = {}
    with ExitStack() as stack:

        def pool(ranks: int) -> RankPool:
            if ranks not in started:
                started[ranks] = stack.enter_context(RankPool(Where(ranks, device="cpu", timeout_s=300)))
            return started[ranks]

        yield pool


@pytest.fixture
def shared_ranks(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let a benchmark's module use the shared pools in place of ranks of its own."""

    def share(bench: Any) -> None:
        monkeypatch.setattr(bench, "RankPool", lambda where: nullcontext(pools(where.workers)))

    return share
