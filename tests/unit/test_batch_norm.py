"""torch's batch norms with nanoray's statistics: the same results, and the same objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.config import make_config
from nanoray.errors import ConfigError
from nanoray.models.batch_norm import BatchNorm, adopt_norms
from nanoray.parallel.axis import Axis
from nanoray.parallel.running_statistics import RunningStatistics
from nanoray.script.checks import require_sharable
from nanoray.script.settings import DEFAULTS, loaded_of

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


class WithActivation(nn.BatchNorm2d):
    """As libraries of image models have it: norm and activation in one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def test_statistics_that_a_script_switches_off_stay_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(CHANNELS))
    adopt_norms(model)
    norm: Any = model[0]
    statistics = statistics_of(model)
    norm.track_running_stats = False
    before = copy.deepcopy(norm.state_dict())
    statistics.begin()
    model(samples((8, CHANNELS), 1))
    statistics.add_up()
    statistics.commit()
    assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())

    # Without them an evaluation normalises by its own batch, as torch does.
    norm.running_mean = None
    norm.running_var = None
    model.eval()
    x = samples((8, CHANNELS), 1)
    assert torch.equal(model(x), nn.BatchNorm1d(CHANNELS, track_running_stats=False)(x))
    statistics.add_up()
    statistics.commit()


def test_a_norm_that_cannot_be_synchronised_as_asked_is_refused() -> None:
    config = loaded_of({"sync_batchnorm": True}).config
    with pytest.raises(ConfigError, match="would be ignored: Sequential has no batch norm"):
        require_sharable(nn.Sequential(nn.Linear(3, 3)), config, 2)
    own = nn.Sequential(nn.Linear(3, 3), WithActivation(3))
    adopt_norms(own)
    with pytest.raises(ConfigError, match="by 1, a WithActivation with a forward of its own; drop"):
        require_sharable(own, config, 2)

    graphs = make_config(DEFAULTS | {"compile": "cuda_graphs"})
    synchronised = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    adopt_norms(synchronised)
    with pytest.raises(ConfigError, match="cuda_graphs with a SyncBatchNorm, 1: its ranks"):
        require_sharable(synchronised, graphs, 2)

    group: Any = object()
    with pytest.raises(ConfigError, match="0 is a SyncBatchNorm with a process_group of its own"):
        adopt_norms(nn.Sequential(nn.SyncBatchNorm(3, process_group=group)))
