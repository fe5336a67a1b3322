"""The ResNet: its sizes in closed form, its layers against torch's own, its running statistics, and
that it learns.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nanoray.models.batch_norm import BatchNorm
from nanoray.models.resnet import ResNet, ResNetShape
from nanoray.models.resnet_costs import count_parameters, flops_per_image
from nanoray.parallel.axis import data_axis
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.running_statistics import RunningStatistics

ALONE = data_axis(Mesh(0, 1, 0, torch.device("cpu"), "none", "alone"))


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("depth", [8, 14, 20, 32, 44, 50])
def test_parameters_in_closed_form(depth: int, width: int) -> None:
    """Per stage of c channels: one convolution from the stage before, 2n - 1 within, two numbers
    per normed channel.
    """
    shape, n = ResNetShape(depth, width, 10), (depth - 2) // 6
    c = [16 * width, 16 * width, 32 * width, 64 * width]
    stages = sum(
        9 * c[i] * c[i + 1] + (2 * n - 1) * 9 * c[i + 1] ** 2 + 2 * n * 2 * c[i + 1]
        for i in range(3)
    )
    expected = 27 * c[0] + 2 * c[0] + stages + 64 * width * 10 + 10
    model = ResNet(shape)
    assert sum(p.numel() for p in model.parameters()) == expected == count_parameters(shape)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


class Reference(nn.Module):
    """The same network from torch's layers, written without sharing a line with it."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        n, a = (depth - 2) // 6, 16 * width
        self.first = nn.Sequential(nn.Conv2d(3, a, 3, padding=1, bias=False), nn.BatchNorm2d(a))
        self.pairs = nn.ModuleList()
        for c in (16 * width, 32 * width, 64 * width):
            for _ in range(n):
                one = nn.Conv2d(a, c, 3, stride=c // a, padding=1, bias=False)
                two = nn.Conv2d(c, c, 3, padding=1, bias=False)
                self.pairs.append(
                    nn.Sequential(one, nn.BatchNorm2d(c), nn.ReLU(), two, nn.BatchNorm2d(c))
                )
                a = c
        self.last = nn.Linear(a, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for pair in self.pairs:
            y = pair(x)
            if y.shape != x.shape:
                B, C, H, W = y.shape
                shortcut = torch.zeros(B, C, H, W)
                shortcut[:, C // 4 : C // 4 + C // 2] = F.max_pool2d(x, 1, stride=2)
                x = shortcut
            x = torch.relu(x + y)
        return self.last(F.adaptive_avg_pool2d(x, 1)[:, :, 0, 0])


def test_it_computes_what_torchs_layers_compute() -> None:
    """Logits and gradients in training, running statistics after it, logits in evaluation."""
    torch.manual_seed(0)
    ours, theirs = ResNet(ResNetShape(14, 1, 10)), Reference(14, 1)
    with torch.no_grad():
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.add_(torch.randn_like(a) * 0.05)
            b.copy_(a)
    statistics = RunningStatistics(ours, ALONE, False)
    x, y = torch.randn(6, 3, 32, 32), torch.arange(6)
    statistics.begin()
    for model in (ours, theirs):
        F.cross_entropy(model(x), y).backward()
    statistics.add_up()
    statistics.commit()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=5e-5), name
    norms = [m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm, torchs in zip(
        (m for m in ours.modules() if isinstance(m, BatchNorm)), norms, strict=True
    ):
        assert torch.allclose(norm.running_mean, torchs.running_mean, atol=1e-6)
        assert torch.allclose(norm.running_var, torchs.running_var, atol=1e-6)
    ours.eval(), theirs.eval()
    assert torch.allclose(ours(x), theirs(x), atol=5e-5)
    assert ours(x, y).item() == pytest.approx(F.cross_entropy(theirs(x), y).item(), abs=1e-5)


def test_a_forward_changes_no_running_statistic() -> None:
    """A warm-up, a replay or a step that breaks goes forward, too; only the update after a step
    counts, once.
    """
    model = ResNet(ResNetShape(8, 1, 10))
    statistics = RunningStatistics(model, ALONE, False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = torch.randn(2, 4, 3, 32, 32)
    model(first)
    model(first)  # these belong to no step
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    statistics.begin()
    model(first)
    model(second)
    statistics.add_up()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    statistics.commit()
    outputs = [model.stem(batch) for batch in (first, second)]
    mean = torch.stack([out.mean((0, 2, 3)) for out in outputs]).mean(0)
    assert torch.allclose(model.stem_norm.running_mean, 0.1 * mean, atol=1e-6)
    var = torch.stack([out.var((0, 2, 3)) for out in outputs]).mean(0)
    assert torch.allclose(model.stem_norm.running_var, 0.9 + 0.1 * var, atol=1e-6)


def test_flops_are_three_times_those_of_a_forward_as_torch_counts_them() -> None:
    shape = ResNetShape(14, 2, 10)
    with FlopCounterMode(display=False) as counter:
        ResNet(shape)(torch.randn(2, 3, 32, 32))
    assert 2 * flops_per_image(shape) == 3 * counter.get_total_flops()
