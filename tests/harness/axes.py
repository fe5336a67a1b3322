"""Shared by tests of tp, pp and ep: arms beside one process, and runs that resume and fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.bench.harness.rank_pool import RankPool
from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.state.state_dict import StateDict
from tests.harness.ranks import make_spec, run_ranks, series
from tests.stress.equivalence import ENTRY, LIMITS, LOSS, NORM, WEIGHT_LIMIT


def run(
    pools: Callable[[int], RankPool],
    ranks: int,
    arms: dict[str, Any],
    cases: list[dict[str, Any]],
    alone: bool = False,
) -> list[Any]:
    """Train arms of `tests.stress equivalence` on a pool's ranks; `alone`: also the whole batch."""
    return [*pools(ranks).run(ENTRY, {"arms": arms, "cases": cases, "alone": alone})]


def require_one_process(found: list[Any], settings: dict[str, Any]) -> None:
    """Require the weights, losses and norms of one process, within limits, equal on all ranks."""
    far = WEIGHT_LIMIT[settings["optimizer"]]
    assert found, "no arm has run"
    for each in found:
        where = (each["arm"], each["accum"])
        for rank in each["ranks"]:
            assert rank["off"] < far, where
            assert rank["losses"] == pytest.approx(rank["alone"]["losses"], abs=LIMITS[LOSS]), where
            assert rank["norms"] == pytest.approx(rank["alone"]["norms"], rel=LIMITS[NORM]), where
        assert (
            len({(*rank["losses"], *rank["norms"], rank["digest"]) for rank in each["ranks"]}) == 1
        ), where


def final(spec: RunSpec) -> StateDict:
    """The newest checkpoint of a run; none is damaged."""
    found, damaged = newest_valid(spec.checkpoints)
    assert found
    assert not damaged
    return found.state


def equal(a: StateDict, b: StateDict) -> bool:
    """Whether weights and optimizer state are equal to the bit."""
    same = a.model.keys() == b.model.keys() and a.optimizer.keys() == b.optimizer.keys()
    same &= all(torch.equal(a.model[name], tensor) for name, tensor in b.model.items())
    return same and all(
        torch.equal(a.optimizer[name], tensor) for name, tensor in b.optimizer.items()
    )


@dataclass(frozen=True)
class Runs:
    """Whole runs of one recipe, each in its own folder."""

    text: Path
    folder: Path
    recipe: dict[str, Any]

    def spec(self, name: str, **settings: Any) -> RunSpec:
        """Open a run."""
        return make_spec(self.text, self.folder / name, **self.recipe | settings)

    def trained(self, name: str, world: int, **settings: Any) -> RunSpec:
        """Train on so many ranks, all of which succeed."""
        return self.finished(name, world, **settings)[0]

    def finished(
        self, name: str, world: int, **settings: Any
    ) -> tuple[RunSpec, list[dict[str, Any]]]:
        """Train on so many ranks, all of which succeed; return their outcomes as well."""
        spec = self.spec(name, **settings)
        outcomes = run_ranks(spec, world)
        assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
        return spec, outcomes

    def failed(self, world: int, error: str, **settings: Any) -> tuple[RunSpec, str]:
        """Train on ranks that all fail with one error; return its message."""
        spec = self.spec("failed", **settings)
        outcomes = run_ranks(spec, world)
        assert {outcome.get("error") for outcome in outcomes} == {error}, outcomes
        return spec, outcomes[0]["message"]

    def resumed(self, world: int, cut: int, **settings: Any) -> tuple[RunSpec, RunSpec]:
        """Train once, and once from the checkpoint before `cut`, to the same bits; return both."""
        whole = self.trained("whole", world, **settings)
        first = self.trained("cut", world, checkpoint_every=cut - 1, stop_at=cut, **settings)
        shutil.rmtree(first.checkpoints / f"step_{cut:08d}")
        rest = self.trained("cut", world, resume="auto", **settings)
        assert series(rest) == series(whole)
        assert equal(final(rest), final(whole))
        return whole, rest

    def gone_on(self, meshes: list[tuple[int, dict[str, Any]]], far: float) -> None:
        """Train a step on each mesh (workers, settings); compare with one process."""
        alone = self.trained("alone", 1)
        for stop, (world, settings) in enumerate(meshes[:-1], 1):
            self.trained("run", world, stop_at=stop, resume="auto", **settings)
        world, settings = meshes[-1]
        spec = self.trained("run", world, resume="auto", **settings)
        assert len([*spec.folder.parent.iterdir()]) == 1, "all in one run"
        assert series(spec) == pytest.approx(series(alone), abs=2e-5)
        mine, its = final(spec), final(alone)
        assert mine.optimizer.keys() == its.optimizer.keys()
        for name, tensor in its.model.items():
            assert (mine.model[name] - tensor).abs().max() < far, name
