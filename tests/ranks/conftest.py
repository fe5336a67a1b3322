"""Ranks that the tests of a file share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

import tests.stress.__main__ as stress
from nanoray.bench.harness import benchmark
from nanoray.bench.harness.rank_pool import RankPool, Where
from tests.stress import equivalence

Pools = Callable[[int], RankPool]
# Arm -> the metrics in which it is wrong; an arm that is right has none
Wrong = dict[str, set[str]]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """A pool of so many CPU ranks, started at its first use, for all tests of a file that leave its
    ranks alive.

    Not for all files: each gloo group has a thread that wakes every 10 ms, and pools that nobody
    used took an eighth of the suite's CPU time. Forked ranks start within a second.
    """
    started: dict[int, RankPool] = {}
    with ExitStack() as stack:

        def pool(ranks: int) -> RankPool:
            if ranks not in started:
                started[ranks] = stack.enter_context(
                    RankPool(Where(ranks, device="cpu", timeout_s=300))
                )
            return started[ranks]

        yield pool


@pytest.fixture
def shared_ranks(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let a benchmark's module use the shared pools in place of ranks of its own."""

    def share(bench: Any) -> None:
        def pool(where: Where) -> Any:
            return nullcontext(pools(where.workers))

        monkeypatch.setattr(benchmark, "RankPool", pool)
        monkeypatch.setattr(stress, "RankPool", pool, raising=False)

    return share


@pytest.fixture
def planted(
    shared_ranks: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Wrong]:
    """Run `tests.stress equivalence` in one case with a bug of tests/harness/planted.py; it must fail.
    Return what is wrong.

    arms: those of the benchmark, or others.
    """

    def run(bug: str, ranks: int, arms: dict[str, Any] | None = None, case: str = "SGD") -> Wrong:
        shared_ranks(equivalence)
        monkeypatch.setattr(equivalence, "ENTRY", f"tests.harness.planted:measure_with_{bug}")
        monkeypatch.setattr(equivalence, "CASES", {case: equivalence.CASES[case]})
        if arms:
            monkeypatch.setattr(equivalence, "arms_for", lambda *_, **__: arms)
        flags = [
            "equivalence",
            "--device",
            "cpu",
            "--workers",
            str(ranks),
            "--quick",
            f"--json={tmp_path / 'e.json'}",
        ]
        assert stress.main(flags) == 1
        wrong: Wrong = {}
        for row in json.loads((tmp_path / "e.json").read_text())["rows"]:
            wrong.setdefault(row["arm"], set()).update({row["metric"]} if row["wrong"] else ())
        return wrong

    return run
