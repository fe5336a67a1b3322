"""torch's batch norms with nanoray's statistics: the same results, and the same objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.models.batch_norm import BatchNorm, adopt_norms
from nanoray.parallel.axis import Axis
from nanoray.parallel.running_statistics import RunningStatistics

CHANNELS = 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.0},
    {"momentum": 1.0},
]
KINDS: list[tuple[Callable[..., nn.Module], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (8, CHANNELS)),
    (nn.BatchNorm1d, (8, CHANNELS, 5)),
    (nn.BatchNorm2d, (8, CHANNELS, 2, 3)),
    (nn.BatchNorm3d, (8, CHANNELS, 2, 2, 2)),
    (nn.SyncBatchNorm, (8, CHANNELS, 2)),
]


class Alone:
    """An axis with one rank."""

    size = 1

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        return tensor


class Twins(Alone):
    """An axis with two ranks, of which the other one has the same samples."""

    size = 2

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        return tensor.mul_(2)


def statistics_of(model: nn.Module, axis: Any = None, synchronised: bool = False) -> Any:
    as_axis: Axis = axis or Alone()
    return RunningStatistics(model, as_axis, synchronised)


def samples(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 1
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_results_and_statistics_are_torchs(
    kind: Callable[..., nn.Module],
    shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    theirs = nn.Sequential(kind(CHANNELS, **options)).to(dtype)
    ours = copy.deepcopy(theirs)
    adopt_norms(ours)
    assert isinstance(ours[0], BatchNorm)
    statistics = statistics_of(ours)
    for seed in range(3):
        a = samples(shape, seed, dtype)
        b = samples(shape, seed, dtype)
        statistics.begin()
        out = ours(a)
        expected = theirs(b)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        statistics.add_up()
        statistics.commit()
    kept = ours.state_dict()
    assert kept.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        # Statistics of 16 bits are rounded before they are averaged, and not only after it.
        torch.testing.assert_close(kept[name], tensor, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
        if dtype.itemsize > 2:
            torch.testing.assert_close(kept[name], tensor)
    ours.eval()
    theirs.eval()
    x = samples(shape, 9, dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_synchronised_norms_are_those_of_all_samples(
    kind: Callable[..., nn.Module],
    shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    theirs = nn.Sequential(kind(CHANNELS, **options)).to(dtype)
    ours = copy.deepcopy(theirs)
    adopt_norms(ours)
    is_always = kind is nn.SyncBatchNorm
    statistics = statistics_of(ours, Twins(), synchronised=not is_always)
    a = samples(shape, 1, dtype)
    b = samples(shape, 1, dtype)
    out = ours(a)
    expected = theirs(torch.cat([b, b]))[: len(b)]
    close = {"rtol": 1e-6, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(out, expected, **close)
    out.square().sum().backward()
    theirs(torch.cat([b, b])).square().sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    torch.testing.assert_close(a.grad * 2, b.grad, **close)
    statistics.add_up()
    statistics.commit()
