"""Compressed gradients on real ranks: near the exact mean, equal on all ranks, nothing lost for
good, resumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.config import make_config
from nanoray.mesh.mesh import Mesh
from nanoray.models.precision import LossScaler
from nanoray.parallel.compress import SendingBucket, orthonormal
from nanoray.parallel.plan import Plan
from nanoray.train.saving import MEMORY
from tests.harness.axes import Runs, equal, final
from tests.harness.elastic import run_elastic
from tests.harness.ranks import records, series
from tests.ranks.conftest import Pools

HERE = "tests.ranks.test_compress"
KINDS = ("bf16", "fp16", "int8", "powersgd")
# The third goes as (16, 24); rank 2 pays for all of these
SHAPES = ((64, 48), (77,), (16, 8, 3), (200, 30), (3,))
RANK = 2
BIG = 40_000.0  # of two of these the sum is too much for fp16


# What runs on the ranks.


def gradient(kind: str, step: int, rank: int) -> list[Tensor]:
    """A rank's gradients of a step: noise; the same in each step; of rank 1 with one row space;
    large and equal.
    """
    draws = torch.Generator().manual_seed(1000 * (step if kind == "noise" else 0) + rank)
    if kind == "large":
        return [torch.full(shape, BIG) for shape in SHAPES]
    found = [torch.randn(shape, generator=draws) * 0.1 for shape in SHAPES]
    if kind == "thin":
        shared = torch.Generator().manual_seed(7)
        rows = [torch.randn(g[0].numel(), generator=shared) for g in found]
        return [
            torch.outer(g.reshape(len(g), -1)[:, 0], row).view_as(g) if g.dim() > 1 else g
            for g, row in zip(found, rows, strict=True)
        ]
    return found


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
    sent = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    true = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(1, order["steps"] + 1):
        assert plan.compressor
        errors = plan.compressor._error
        if order.get("forgetful"):
            for error in errors.values():
                error.zero_()
        model.scale = 4.0 ** (step % 3) if order.get("scaled") else 1.0
        batch: Iterator[tuple[Tensor, Tensor]] = iter([(torch.tensor(step), torch.tensor(0))])
        plan.forward_backward(batch, lambda name: None, lambda micro: None)
        found = [w.grad / model.scale for w in model.weights if w.grad is not None]
        norm = plan.grad_norm()
        plan.spread()
        plan.zero_grad()
        everyone = [gradient(order["gradient"], step, rank) for rank in range(mesh.world_size)]
        exact = [torch.stack(parts).double().mean(0) for parts in zip(*everyone, strict=True)]
        sizes = [torch.stack(parts).double().abs().mean(0) for parts in zip(*everyone, strict=True)]
        for total, part in zip([*sent, *true], [*found, *exact], strict=True):
            total += part
        digests = mesh.all_gather(digest(found))
        off = [(f - e).abs() for f, e in zip(found, exact, strict=True)]
        event = {
            "step": step,
            "bits": len(set(digests)),
            "norm": norm.item(),
            "off": [o.max().item() for o in off],
        }
        event["share"] = [
            (o / s.clamp_min(1e-3)).max().item() for o, s in zip(off, sizes, strict=True)
        ]
        event["largest"] = max(s.max().item() for s in sizes) * mesh.world_size
        event["behind"] = [(s - t).abs().max().item() for s, t in zip(sent, true, strict=True)]
        emit(event)
    emit(
        {
            "left": digest([plan.memory]) if plan.memory is not None else "",
            "names": sorted(plan.bucket_names),
        }
    )
    if plan.memory is not None:  # what was sent and what is left are all there was
        own = [errors[w] if w in errors else torch.zeros(w.numel()) for w in model.weights]
        left = mesh.all_reduce(torch.cat(own)).split([w.numel() for w in model.weights])
        missing = [
            (s + kept.view_as(s) - t).abs().max().item()
            for s, kept, t in zip(sent, left, true, strict=True)
        ]
        emit({"missing": max(missing), "sent": max(t.abs().max().item() for t in true)})
    plan.close()


def run(pools: Pools, ranks: int, kind: str, mode: str, **order: Any) -> list[dict[str, Any]]:
    settings = {"grad_compress": kind, "dp_mode": mode} | (
        {"powersgd_rank": RANK} if kind == "powersgd" else {}
    )
    order = {"gradient": "noise", "steps": 3, "settings": settings, **order}
    return [*pools(ranks).run(f"{HERE}:sum_rank", order)]


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        (2, "ddp"),
        (3, "ddp_by_hand"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((3, "ddp"), (2, "ddp_by_hand"))),
    ],
)
def test_a_mean_is_within_the_bound_of_its_kind_and_equal_on_all_ranks(
    pools: Pools, ranks: int, mode: str
) -> None:
    for kind in KINDS:
        steps = [e for e in run(pools, ranks, kind, mode, gradient="thin") if "step" in e]
        assert [e["bits"] for e in steps] == [1, 1, 1], kind
        first = steps[0]
        # Two roundings to nearest, each of at most half a unit in the last place
        if kind in ("bf16", "fp16"):
            assert max(first["share"]) < 2.1 * 2.0 ** {"bf16": -9, "fp16": -12}[kind] * 2, kind
        elif kind == "int8":
            # Half a step of 1/127 of a block's largest number, on each rank and once more for the
            # sum
            assert max(first["off"]) < 2.01 * first["largest"] / 254
        else:  # a mean of rank 1 is sent exactly
            assert max(first["off"]) < 1e-5
        assert max(first["off"]) > 0, "it was rounded"


@pytest.mark.parametrize(("kind", "mode"), [("int8", "ddp"), ("powersgd", "ddp_by_hand")])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_was_sent_follows_what_was_meant(
    pools: Pools, ranks: int, kind: str, mode: str
) -> None:
    """Sent and left over are all there was, in each step; without feedback the distance grows step
    by step.
    """
    steps = 12 if kind == "int8" else 60  # of a matrix with 30 columns each step sends two
    *with_it, _, left = run(pools, ranks, kind, mode, gradient="same", steps=steps)
    assert left["missing"] < 1e-5 * left["sent"]
    *without, _, _ = run(pools, ranks, kind, mode, gradient="same", steps=steps, forgetful=True)
    near, far = ([max(step["behind"]) for step in each] for each in (with_it, without))
    assert near[-1] < 0.5 * far[-1]
    assert near[-1] < 1.3 * max(near[: steps // 2]), "it does not grow"
    if kind == "int8":  # the same rounding every time
        assert far[-1] == pytest.approx(steps * far[0], rel=1e-3)


def test_the_memory_is_in_units_without_the_loss_scale(pools: Pools) -> None:
    """A scale that changes from step to step, as fp16's does when gradients overflow, by powers of
    two.
    """
    for kind in ("int8", "powersgd"):
        plain, scaled = (run(pools, 2, kind, "ddp", scaled=how, steps=6) for how in (False, True))
        assert scaled[-1]["missing"] < 1e-5 * scaled[-1]["sent"]
        for a, b in zip(plain[:6], scaled[:6], strict=True):
            assert a["off"] == pytest.approx(b["off"], rel=1e-2), kind


def reference(steps: int, ranks: int) -> list[list[Tensor]]:
    """PowerSGD of the mean gradient in one process: P, Q and the error depend on nothing but sums
    over ranks.
    """
    draws = torch.Generator().manual_seed(0)
    q = {i: torch.randn(torch.Size([torch.Size(s[1:]).numel(), RANK]), generator=draws)
         for i, s in enumerate(SHAPES) if len(s) > 1}  # fmt: skip
    errors = {i: torch.zeros(SHAPES[i][0], q[i].shape[0]) for i in q}
    found = []
    for step in range(1, steps + 1):
        everyone = zip(*(gradient("noise", step, rank) for rank in range(ranks)), strict=True)
        out = [torch.stack(parts).mean(0) for parts in everyone]
        for i in q:
            m = out[i].view(len(out[i]), -1) + errors[i]
            p = torch.linalg.qr(m @ q[i]).Q
            q[i] = m.mT @ p
            out[i] = (p @ q[i].mT).view(SHAPES[i])
            errors[i] = m - out[i].view(m.shape)
        found.append(out)
    return found


def powersgd_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Tell how far each step's sums are from those of the reference."""
    plan, model = plan_of(mesh, order)
    for step, expected in enumerate(reference(order["steps"], mesh.world_size), 1):
        plan.forward_backward(
            iter([(torch.tensor(step), torch.tensor(0))]), lambda name: None, lambda micro: None
        )
        pairs = zip(model.weights, expected, strict=True)
        emit(max((w.grad - e).abs().max().item() for w, e in pairs if w.grad is not None))
        plan.grad_norm()
        plan.spread()
        plan.zero_grad()
    plan.close()


def test_powersgd_is_that_of_the_mean_gradient_in_one_process(pools: Pools) -> None:
    """With another orthogonalisation, over steps: warm start and error feedback are right."""
    settings = {"grad_compress": "powersgd", "powersgd_rank": RANK, "dp_mode": "ddp"}
    off = [
        *pools(2).run(
            f"{HERE}:powersgd_rank", {"gradient": "noise", "steps": 5, "settings": settings}
        )
    ]
    assert len(off) == 5
    assert max(off) < 1e-4


def overflow_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Sum large equal gradients as a run does, and once more without the division that comes
    before.
    """
    plan, model = plan_of(mesh, order)
    plan.forward_backward(
        iter([(torch.tensor(1), torch.tensor(0))]), lambda name: None, lambda micro: None
    )
    emit([w.grad.unique().tolist() for w in model.weights if w.grad is not None])
    compressor, flat = plan.compressor, torch.full((48 * 64,), BIG)
    assert compressor
    compressor.send(SendingBucket(flat, [model.weights[0]], [0], 0, True))
    compressor.drain()
    emit(flat.unique().tolist())
    plan.close()


@pytest.mark.parametrize("mode", ["ddp", "ddp_by_hand"])
def test_fp16_sums_what_would_overflow_without_the_division(pools: Pools, mode: str) -> None:
    order = {"gradient": "large", "settings": {"grad_compress": "fp16", "dp_mode": mode}}
    with_it, without = pools(2).run(f"{HERE}:overflow_rank", order)
    assert with_it == [[BIG]] * len(SHAPES)
    assert without == [float("inf")]


def poisoned_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """On rank 1 one element of the first matrix is not finite; tell what the ranks see, and what
    they remember.
    """
    plan, model = plan_of(mesh, order)
    for bad in (float("nan"), float("inf"), -float("inf"), 0.0):
        before = plan.memory.clone() if plan.memory is not None else torch.zeros(0)
        hook = model.weights[0].register_hook(partial(_poison, rank=mesh.rank, bad=bad))
        plan.forward_backward(
            iter([(torch.tensor(1), torch.tensor(0))]), lambda name: None, lambda micro: None
        )
        hook.remove()
        norm = plan.grad_norm()
        norms = mesh.all_gather(norm.item())
        plan.spread(1.0 - norm.isfinite().float())
        plan.zero_grad()
        kept = plan.memory is None or torch.equal(plan.memory, before)
        emit({"norms": norms, "kept": mesh.all_gather(kept)})
    plan.close()


def _poison(grad: Tensor, rank: int, bad: float) -> Tensor:
    grad = grad.clone()
    grad[3, 5] = bad if rank == 1 else grad[3, 5]
    return grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_is_seen_on_all_ranks_and_not_remembered(
    pools: Pools, kind: str
) -> None:
    order = {"gradient": "noise", "settings": {"grad_compress": kind, "dp_mode": "ddp"}}
    *bad, good = pools(2).run(f"{HERE}:poisoned_rank", order)
    for each in bad:
        assert not any(torch.isfinite(torch.tensor(each["norms"]))), each
        assert all(each["kept"])
    assert all(torch.isfinite(torch.tensor(good["norms"])))
    assert not any(good["kept"]) or kind in ("bf16", "fp16")


# Whole runs.

RECIPE: dict[str, Any] = {
    "dropout": 0.1,
    "lr": 3e-3,
    "max_steps": 8,
    "bucket_mb": 0.02,
    "hash_every": 1,
}
CASES = [
    (2, {"grad_compress": "int8", "dp_mode": "ddp"}),
    (2, {"grad_compress": "powersgd", "powersgd_rank": 2, "dp_mode": "ddp_by_hand"}),
    (2, {"grad_compress": "bf16", "dp_mode": "ddp_by_hand"}),
    (2, {"grad_compress": "fp16", "dp_mode": "ddp"}),
    (3, {"grad_compress": "int8", "dp_mode": "ddp_by_hand", "comm_trace": "every=3"}),
    (3, {"grad_compress": "powersgd", "dp_mode": "ddp", "comm_trace": "every=3"}),
    (2, {"grad_compress": "int8", "precision": "fp16"}),
    (
        2,
        {
            "grad_compress": "powersgd",
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
    _, rest = runs.resumed(world, 5, **settings)
    left = [rank.get(MEMORY) for rank in final(rest).rng]
    if settings["grad_compress"] in ("bf16", "fp16"):
        assert left == [None] * world
        return
    assert all(kept is not None and kept.any() for kept in left)
    assert not torch.equal(left[0], left[1]), "each rank's own"  # type: ignore[arg-type]


@pytest.mark.full
def test_a_lost_rank_is_replaced_and_the_memory_begins_anew(runs: Runs) -> None:
    """In backward, where a bucket's collective breaks. No step is repeated, and all ranks go on
    with equal bits.
    """
    how = {"grad_compress": "int8", "recovery": "in_place"}
    whole = runs.trained("whole", 2, **how)
    spec = runs.spec("lost", faults="kill@rank=1,step=3,phase=exchange_gradients", **how)
    outcome = run_elastic(spec, 2)
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == 1
    fired = [
        json.loads(line)["event"]
        for line in (spec.folder / "faults.jsonl").read_text().splitlines()
    ]
    assert "injected" in fired
    assert [record["step"] for record in records(spec)] == [*range(1, 9)]
    mine, its = series(spec), series(whole)
    assert [mine[step] for step in (1, 2, 3)] == [its[step] for step in (1, 2, 3)], (
        "before the memory was lost"
    )
    assert mine == pytest.approx(its, abs=2e-3)
    assert "rejoin  the residue of compressed gradients is lost" in _notes(spec.folder)


@pytest.mark.parametrize(
    ("before", "after", "world"),
    [
        ("none", "powersgd", 2),
        pytest.param("int8", "int8", 3, marks=pytest.mark.full),
        pytest.param("powersgd", "powersgd", 3, marks=pytest.mark.full),
        pytest.param("int8", "none", 2, marks=pytest.mark.full),
    ],
)
def test_a_memory_that_does_not_fit_begins_anew(
    runs: Runs, before: str, after: str, world: int
) -> None:
    """PowerSGD's Q as well, from the numbers that it has in a new run: from zeros it would send
    nothing, for ever.
    """
    start = runs.trained("run", 2, stop_at=4, grad_compress=before)
    spec = runs.trained("on", world, resume=str(start.folder), grad_compress=after)
    assert "residue of compressed gradients of" in _notes(spec.folder)
    left = [rank.get(MEMORY) for rank in final(spec).rng]
    assert len(left) == world
    if after == "none":
        assert left == [None] * world
        return
    assert all(kept is not None and kept[-8:].all() for kept in left), (
        "the end of it is the last Q, where there is one"
    )


def _notes(folder: Path) -> str:
    return "".join(
        path.read_text() for path in sorted((folder / "logs").iterdir()) if path.suffix == ".log"
    )


@pytest.mark.full
def test_a_rollback_takes_the_memory_back(runs: Runs) -> None:
    how = {"grad_compress": "int8", "on_nan": "rollback", "checkpoint_every": 2}
    first, second = (runs.trained(n, 2, faults="nan@rank=0,step=6", **how) for n in ("a", "b"))
    assert equal(final(first), final(second))


# The arithmetic, in this process.


def test_columns_become_orthonormal_and_those_that_are_spanned_zero() -> None:
    draws = torch.Generator().manual_seed(3)
    p = torch.randn(50, 4, generator=draws)
    done = orthonormal(p)
    assert torch.allclose(done.mT @ done, torch.eye(4), atol=1e-6)
    assert torch.allclose(done @ (done.mT @ p), p, atol=1e-5), "the same span"
    p[:, 2] = 2 * p[:, 0] - p[:, 1]
    assert orthonormal(p)[:, 2].count_nonzero() == 0
    assert orthonormal(torch.zeros(5, 2)).count_nonzero() == 0
    for bad in (float("nan"), float("inf")):
        p[1, 1] = bad
        assert not torch.isfinite(orthonormal(p)).all()
