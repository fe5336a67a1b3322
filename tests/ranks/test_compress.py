"""Gradients in 16 bits on real ranks: near the exact mean, equal on all ranks, resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.config import make_config
from nanoray.models.precision import LossScaler
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import Plan
from tests.harness.axes import Runs
from tests.ranks.conftest import Pools

HERE = "tests.ranks.test_compress"
KINDS = ("bf16", "fp16")
SHAPES = ((64, 48), (77,), (16, 8, 3), (200, 30), (3,))
BIG = 40_000.0  # of two of these the sum is too much for fp16


# What runs on the ranks.


def gradient(kind: str, step: int, rank: int) -> list[Tensor]:
    """A rank's gradients of a step: noise; or large and equal."""
    if kind == "large":
        return [torch.full(shape, BIG) for shape in SHAPES]
    draws = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=draws) * 0.1 for shape in SHAPES]


class Toy(nn.Module):
    """A model whose gradients are what the test says."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
        self.kind, self.rank, self.scale = kind, rank, 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        given = gradient(self.kind, int(x), self.rank)
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, given, strict=True)]).sum()


def plan_of(mesh: Mesh, order: dict[str, Any]) -> tuple[Plan, Toy]:
    settings = {"micro_batch_size": 1, "bucket_mb": 0.015, "device": "cpu", **order["settings"]}
    model = Toy(order["gradient"], mesh.rank)

    class Scaler(LossScaler):
        """The scale of the model, which a test changes."""

        def scale(self, loss: Tensor) -> Tensor:
            return loss * model.scale if self.enabled else loss

    scaler = Scaler(mesh.device, enabled=bool(order.get("scaled")))
    plan = Plan(model, mesh, make_config(settings), 1, lambda m, x, y: m(x, y), scaler)
    plan.warm_up(torch.tensor(0), torch.tensor(0))
    return plan, model


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def sum_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Sum some steps' gradients; tell how far they are from their exact means, and which bits every
    rank has.
    """
    plan, model = plan_of(mesh, order)
    for step in range(1, order["steps"] + 1):
        batch: Iterator[tuple[Tensor, Tensor]] = iter([(torch.tensor(step), torch.tensor(0))])
        plan.forward_backward(batch, lambda name: None, lambda micro: None)
        found = [w.grad.clone() for w in model.weights if w.grad is not None]
        plan.spread()
        plan.zero_grad()

        everyone = [gradient(order["gradient"], step, rank) for rank in range(mesh.world_size)]
        exact = [torch.stack(parts).double().mean(0) for parts in zip(*everyone, strict=True)]
        sizes = [torch.stack(parts).double().abs().mean(0) for parts in zip(*everyone, strict=True)]
        off = [(f - e).abs() for f, e in zip(found, exact, strict=True)]
        shares = [(o / s.clamp_min(1e-3)).max().item() for o, s in zip(off, sizes, strict=True)]
        emit({"bits": len(set(mesh.all_gather(digest(found)))), "share": max(shares)})
    plan.close()


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.full)])
def test_a_mean_is_within_the_bound_of_its_kind_and_equal_on_all_ranks(
    pools: Pools, ranks: int
) -> None:
    for kind in KINDS:
        settings = {"grad_compress": kind, "dp_mode": "ddp_by_hand"}
        order = {"gradient": "noise", "steps": 3, "settings": settings}
        steps = [*pools(ranks).run(f"{HERE}:sum_rank", order)]
        assert [step["bits"] for step in steps] == [1, 1, 1], kind
        # Two roundings to nearest, each of at most half a unit in the last place
        bound = 2.1 * 2.0 ** {"bf16": -9, "fp16": -12}[kind] * 2
        assert all(0 < step["share"] < bound for step in steps), kind


def poisoned_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """On rank 1 one element of the first matrix is not finite; tell what the ranks see."""
    plan, model = plan_of(mesh, order)
    for bad in (float("nan"), float("inf"), -float("inf"), 0.0):
        hook = model.weights[0].register_hook(partial(_poison, rank=mesh.rank, bad=bad))
        plan.forward_backward(
            iter([(torch.tensor(1), torch.tensor(0))]), lambda name: None, lambda micro: None
        )
        hook.remove()
        norm = plan.grad_norm()
        norms = mesh.all_gather(norm.item())
        plan.spread(1.0 - norm.isfinite().float())
        plan.zero_grad()
        emit({"norms": norms})
    plan.close()


def _poison(grad: Tensor, rank: int, bad: float) -> Tensor:
    grad = grad.clone()
    grad[3, 5] = bad if rank == 1 else grad[3, 5]
    return grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_is_seen_on_all_ranks(pools: Pools, kind: str) -> None:
    order = {"gradient": "noise", "settings": {"grad_compress": kind, "dp_mode": "ddp_by_hand"}}
    *bad, good = pools(2).run(f"{HERE}:poisoned_rank", order)
    for each in bad:
        assert not any(torch.isfinite(torch.tensor(each["norms"]))), each
    assert all(torch.isfinite(torch.tensor(good["norms"])))


# Whole runs.

RECIPE: dict[str, Any] = {
    "dropout": 0.1,
    "lr": 3e-3,
    "max_steps": 8,
    "bucket_mb": 0.02,
    "hash_every": 1,
    "dp_mode": "ddp_by_hand",
}
CASES = [
    (2, {"grad_compress": "bf16"}),
    (2, {"grad_compress": "fp16"}),
    (3, {"grad_compress": "bf16", "comm_trace": "every=3"}),
    (2, {"grad_compress": "bf16", "precision": "fp16"}),
    (
        2,
        {
            "grad_compress": "bf16",
            "model": "resnet",
            "resnet_depth": 8,
            "dataset": "cifar10-generated",
        },
    ),
]


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(text, tmp_path, RECIPE | {"precision": "fp32"})


@pytest.mark.parametrize(
    ("world", "settings"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.full) for case in CASES[1:])],
)
def test_a_compressed_run_resumes_to_the_bit(
    runs: Runs, world: int, settings: dict[str, Any]
) -> None:
    """Cut after step 4, between two checkpoints. All ranks compare their state after each step."""
    if settings.get("model") == "resnet":
        runs = Runs(
            runs.text, runs.folder, {k: v for k, v in runs.recipe.items() if k != "dropout"}
        )
    runs.resumed(world, 5, **settings)
