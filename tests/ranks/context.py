"""What ranks under context parallelism do, for tests: orders of a RankPool.

A bug can be planted beside each of them: `bugs` has them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoray.data.sequence_part import SequencePart
from nanoray.machine.compat import CPU_ATTENTION, CPU_ATTENTION_BACKWARD
from nanoray.parallel import cp, cp_blocks
from nanoray.parallel.axis import Axis
from nanoray.parallel.mesh import Mesh
from tests.stress import equivalence

Emit = Callable[[Any], None]


def mask(patch: Any) -> None:
    """Own queries see the late half of an earlier rank's block, too: one chunk too many."""
    right = cp.work_with

    def work_with(own: int, other: int, positions: int) -> Any:
        work = right(own, other, positions)
        return work._replace(keys=slice(0, positions)) if other < own else work

    patch.setattr(cp, "work_with", work_with)


def rescale(patch: Any) -> None:
    """The running softmax adds a block's result without giving less weight to what it has."""

    def combine(y: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.logaddexp(sums, more_sums)
        return y + more * (more_sums - total).exp().unsqueeze(-1), total

    patch.setattr(cp_blocks, "combine", combine)


def twice(patch: Any) -> None:
    """A rank takes its early chunk and the one after it, which another rank has as well."""
    patch.setattr(SequencePart, "chunks", property(lambda self: (self.index, self.index + 1)))


def home(patch: Any) -> None:
    """dk and dv go the other way round, so they come home to other ranks."""
    right = Axis.start_pass_on

    def start_pass_on(self: Axis, tensor: Tensor, distance: int, what: str) -> Any:
        return right(self, tensor, -distance if what == cp.BACKWARD else distance, what)

    patch.setattr(Axis, "start_pass_on", start_pass_on)


def restart(patch: Any) -> None:
    """Learned positions begin at 0 on every rank."""
    patch.setattr(cp.ContextPositions, "forward", lambda self, start, end: self.weight[start:end])


def turn(patch: Any) -> None:
    """Rotary positions begin at 0 on every rank."""
    patch.setattr(cp, "rotate_own", lambda x, part: cp.rotate(x))


WRONG_ATTENTION = ("mask", "rescale", "twice", "home")  # the others change what goes in
BUGS = {each.__name__: each for each in (mask, rescale, twice, home, restart, turn)}


@contextmanager
def planted(bug: str) -> Any:
    """Run with a bug; "" for none."""
    with pytest.MonkeyPatch.context() as patch:
        if bug:
            BUGS[bug](patch)
        yield


def measure_rank(mesh: Mesh, order: dict[str, Any], emit: Emit) -> None:
    """Run the function of `tests.stress equivalence` with the order's bug, and remove the bug. (all ranks)"""
    with planted(order.get("bug", "")):
        equivalence.measure_rank(mesh, order, emit)


def attention(mesh: Mesh, order: dict[str, Any], emit: Emit) -> None:
    """Attend over parts of sequences on all ranks, beside torch's attention of the whole sequence.

    (all ranks) Emits for each of the order's cases the largest difference of results, dq, dk and dv
    on any rank. The way "torch" is torch's own ring, where this torch has one.
    """
    axis = Axis("cp", tuple(range(mesh.world_size)), mesh.rank, None, mesh)
    for case in order["cases"]:
        with planted(case.get("bug", "")):
            emit(case | {"off": max(mesh.all_gather(_distances(axis, **case)))})


def _distances(axis: Axis, way: str, kernel: str, dtype: str, chunk: int, bug: str = "") -> float:
    """Return the largest difference on this rank."""
    T = 2 * axis.size * chunk
    source = torch.Generator().manual_seed(1)
    kind = getattr(torch, dtype)

    # Large scores: a running softmax that is wrong shows in them.
    q, k, v, grad = (
        (3 * torch.randn(2, 3, T, 8, generator=source, dtype=torch.float64)).to(kind)
        for _ in range(4)
    )
    wholes = [each.double().requires_grad_() for each in (q, k, v)]
    y = F.scaled_dot_product_attention(*wholes, is_causal=True)
    expected = [y.detach(), *torch.autograd.grad(y, wholes, grad.double())]

    part = SequencePart(axis.index, axis.size)
    owns = [part.own(each, 2).requires_grad_() for each in (q, k, v)]
    own_grad = part.own(grad, 2)
    if way == "torch":
        found = _torchs_ring([each.detach() for each in owns], own_grad)
    else:
        own_y = cp.ring_attention(*owns, axis, kernel)
        found = [own_y.detach(), *torch.autograd.grad(own_y, owns, own_grad)]
    differences = []
    for own, whole in zip(found, expected, strict=True):
        differences.append((own.double() - part.own(whole, 2)).abs().max().item())
    return max(differences)


def _torchs_ring(owns: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return result, dq, dk and dv of torch's experimental ring with its kernel for CPUs.

    It has the same chunks on each rank, so a rank's results can be compared one by one.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    group = torch.distributed.group.WORLD
    ring = _attention._templated_ring_attention
    y, sums, *_ = ring(group, 2, CPU_ATTENTION.default, *owns, is_causal=True)
    backward = _attention._templated_ring_attention_backward
    gradients = backward(
        group,
        2,
        CPU_ATTENTION_BACKWARD.default,
        grad,
        "grad_out",
        *owns,
        y,
        sums,
        True,
        dropout_p=0.0,
    )
    return [y, *gradients[:3]]
