"""Modules of the kinds that people train, small enough for a test: the public part of the zoo.

Each is written as its paper or the common library has it, with a loss of its own where it needs one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.harness.zoo import WIDTH, Exhibit, vectors

VOCABULARY = 11
LENGTH = 6
MODES = ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp")


def one_optimizer(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return SGD of all that is trained: it shows a wrong factor, and a gradient of zeros."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.1)]


def two_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each of the networks of a GAN."""
    return [
        torch.optim.SGD(model.critic.parameters(), lr=0.05, momentum=0.5),
        torch.optim.AdamW(model.generator.parameters(), lr=0.01, weight_decay=0.1),
    ]


@dataclass(frozen=True)
class Kind(Exhibit):
    """A kind of module, with what a user should know of it."""

    # One process gives the same result only if it computes the ranks' micro batches apart: the
    # forward draws random numbers, or a sample's result depends on the others of its micro batch
    apart: bool = False
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = one_optimizer


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- samples ---


def images(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return images (count, 3, 8, 8) and classes (count,)."""
    x = torch.randn(count, 3, 8, 8, generator=seeded(seed))
    return x, torch.arange(count) % 4


def tokens(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return tokens (count, LENGTH), and the tokens after them. Token 0 is padding."""
    x = torch.randint(1, VOCABULARY, (count, LENGTH + 1), generator=seeded(seed))
    x[::3, -2:] = 0
    return x[:, :-1], x[:, 1:].clamp(min=1)


def halves(dtype: torch.dtype) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Return a function of samples in 16 bits."""

    def batch(seed: int, count: int) -> tuple[Tensor, Tensor]:
        x, y = vectors(seed, count)
        return x.to(dtype), y.to(dtype)

    return batch


# --- vision ---


class Residual(nn.Module):
    """A block as timm has it: convolution, norm, activation, squeeze and excite."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.act = nn.SiLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=2, bias=False)
        self.bn2 = norm(channels)
        self.gate = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        return self.act(x + y)


class ConvNet(nn.Module):
    """A small convolutional network with the norm that is given."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU())
        self.stages = nn.Sequential(Residual(8, norm), nn.MaxPool2d(2), Residual(8, norm))
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.stages(self.stem(x)).mean((2, 3)))


# --- text and sequences ---


class Translator(nn.Module):
    """nn.Transformer, encoder and decoder, with one embedding for both and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.transformer(h, h, tgt_mask=mask)).transpose(1, 2)


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class SmallGpt(nn.Module):
    """A small GPT, which LoRA below adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h).transpose(1, 2)


class Lora(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def adapted() -> nn.Module:
    """Return a frozen GPT with adapters, as peft makes it."""
    model = SmallGpt().requires_grad_(False)
    for block in model.blocks:
        block.qkv = Lora(block.qkv)  # type: ignore[arg-type]
    return model


# --- several losses ---


class Gan(nn.Module):
    """A generator and a critic, each with a loss of its own in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.generator(torch.randn(len(x), 4, device=x.device))
        of_critic = F.softplus(-self.critic(x)) + F.softplus(self.critic(made.detach()))
        # The generator's loss passes through the critic, and leaves its weights alone.
        fixed = {name: p.detach() for name, p in self.critic.named_parameters()}
        rated = torch.func.functional_call(self.critic, fixed, (made,))
        return of_critic.mean() + F.softplus(-rated).mean()


class TwoHeads(nn.Module):
    """Returns a dict, as models of several tasks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 8)
        self.heads = nn.ModuleDict({"mean": nn.Linear(8, 1), "sign": nn.Linear(8, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {name: head(h) for name, head in self.heads.items()}


def two_tasks(output: dict[str, Tensor], y: Tensor) -> Tensor:
    sign = F.binary_cross_entropy_with_logits(output["sign"], (y > 0).float())
    return F.mse_loss(output["mean"], y) + 0.3 * sign


# --- weights made of others ---


class Spectral(nn.Module):
    """Spectral norm: each forward improves an estimate in two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(WIDTH, 8))
        self.second = parametrizations.spectral_norm(nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.leaky_relu(self.first(x), 0.1))


# --- others ---


class Scripted(nn.Module):
    """A module for torch.jit.script."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h)


class Drops(nn.Module):
    """Dropout of several kinds, and a stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.alpha = nn.AlphaDropout(0.1)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            keep = (torch.rand(len(x), 1, device=x.device) > 0.3).to(x.dtype)
            x = x + keep * self.drop(torch.tanh(layer(x)))
        return self.head(self.alpha(x))


def in_16_bits(dtype: torch.dtype) -> nn.Module:
    return Scripted().to(dtype)


def bf16_base() -> nn.Module:
    """Return adapters in float32 around a frozen base in 16 bits."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, 8).bfloat16().requires_grad_(False)
            self.adapter = nn.Linear(8, 8)
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.base(x.bfloat16()).float())
            return self.head(torch.tanh(self.adapter(h)))

    return Mixed()


PUBLIC: list[Kind] = [
    Kind(
        "CNN with BatchNorm",
        lambda: ConvNet(nn.BatchNorm2d),
        images,
        F.cross_entropy,
        apart=True,
    ),
    Kind("nn.Transformer, tied embedding", Translator, tokens, F.cross_entropy),
    Kind(
        "LoRA around a frozen GPT",
        adapted,
        tokens,
        F.cross_entropy,
    ),
    Kind("frozen base in 16 bits", bf16_base, vectors),
    Kind(
        "GAN, two optimizers",
        Gan,
        vectors,
        None,
        apart=True,
        optimizers=two_optimizers,
        tolerance=1e-4,
    ),
    Kind("several heads, dict output", TwoHeads, vectors, two_tasks),
    Kind(
        "spectral norm",
        Spectral,
        vectors,
    ),
    Kind("dropout, stochastic depth", Drops, vectors, apart=True),
    Kind("bfloat16", lambda: in_16_bits(torch.bfloat16), halves(torch.bfloat16), tolerance=0.02),
]
