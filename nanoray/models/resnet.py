"""The ResNet for CIFAR-10 of He et al. 2016 (section 4.2). Nothing here depends on ranks.

    stem           3x3 convolution, BatchNorm, ReLU                          (B, 16w, 32, 32)
    blocks.0 ...   3n blocks of two 3x3 convolutions: n at 32x32 with 16w channels, n at 16x16 with
                   32w, n at 8x8 with 64w; the first block of the 2nd and 3rd stage halves the image
    head           mean over the image, a linear layer                       (B, classes)

These are 6n + 2 layers with weights. The shortcuts are identities; where the size changes they take
every second pixel and add channels of zeros, so they have no parameters (option A of the paper). w
is the factor on the widths 16, 32, 64.

Letters: B images, C channels, H rows, W columns. BatchNorm's running statistics are the only
buffers of the state.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.models.batch_norm import adopt_norms

WIDTHS = (16, 32, 64)  # channels of the stages
SIZE = 32  # rows and columns of an image


@dataclass(frozen=True)
class ResNetShape:
    """All sizes that fix the parameters' shapes; a checkpoint fits a model when these are equal."""

    resnet_depth: int
    resnet_width: int
    classes: int

    @classmethod
    def of(cls, config: Config, classes: int) -> ResNetShape:
        """Return the shape of `config`, which has checked the depth."""
        return cls(config.resnet_depth, config.resnet_width, classes)

    @property
    def blocks_per_stage(self) -> int:
        """n of the paper."""
        return (self.resnet_depth - 2) // 6

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the three stages."""
        return tuple(self.resnet_width * width for width in WIDTHS)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class ResNet(nn.Module):
    """Residual blocks of 3x3 convolutions, for images of 32x32 pixels."""

    def __init__(self, shape: ResNetShape, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.label_smoothing = label_smoothing

        c_in = shape.channels[0]
        self.stem = nn.Conv2d(3, c_in, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(c_in)

        self.blocks = nn.ModuleList()
        # Three stages; the first block of the 2nd and 3rd halves the image.
        for c_out in shape.channels:
            for _ in range(shape.blocks_per_stage):
                self.blocks.append(ResidualBlock(c_in, c_out))
                c_in = c_out

        self.head = nn.Linear(c_in, shape.classes)
        adopt_norms(self)  # their statistics change with the weights
        self.init_weights()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss given targets (B,), else the logits (B, classes).

        The loss is the mean cross entropy, a float32 scalar. Labels are smoothed in training only,
        so an evaluation gives the plain cross entropy.
        """
        x = F.relu(self.stem_norm(self.stem(x)))  # (B, C, H, W)
        for block in self.blocks:
            x = block(x)  # (B, C, H, W)
        logits = self.head(x.mean((2, 3)))  # (B, C) -> (B, classes)
        if targets is None:
            return logits
        # Evaluation compares runs, so its loss must not depend on the smoothing.
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)

    def init_weights(self) -> None:
        """Draw convolutions from N(0, 2 / fan-out) (He et al. 2015), the head as torch does."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; with more channels, rows and columns halve."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.stride = 1 if c_in == c_out else 2
        self.padding = c_out - c_in  # channels of zeros on the shortcut
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor) -> Tensor:
        # The main path: two convolutions.
        y = F.relu(self.norm1(self.conv1(x)))  # (B, C, H, W), the sizes of the output
        y = self.norm2(self.conv2(y))  # (B, C, H, W)
        # The shortcut keeps every second pixel, between channels of zeros.
        if self.stride > 1:
            # F.pad counts from the last axis: columns, rows, then channels.
            half = self.padding // 2
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, self.padding - half))  # (B, C, H, W)
        return F.relu(x + y)  # (B, C, H, W)


@torch.no_grad()
def loss_and_accuracy(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy and the accuracy in [0, 1]."""
    logits = model(x).float()  # (B, classes)
    return F.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()
