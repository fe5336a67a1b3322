"""Modules of the kinds that people train, small enough for a test: the public part of the zoo.

Each is written as its paper or the common library has it, with a loss of its own where it needs one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.harness.zoo import IN_FSDP, WIDTH, Exhibit, vectors

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
    note: str = ""
    everyday: bool = False  # part of the tests that run with each change
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = one_optimizer


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- samples ---


def images(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return images (count, 3, 8, 8) and classes (count,)."""
    x = torch.randn(count, 3, 8, 8, generator=seeded(seed))
    return x, torch.arange(count) % 4


def same_images(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return images (count, 3, 8, 8), which are their own targets."""
    x, _ = images(seed, count)
    return x, x.clone()


def tokens(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return tokens (count, LENGTH), and the tokens after them. Token 0 is padding."""
    x = torch.randint(1, VOCABULARY, (count, LENGTH + 1), generator=seeded(seed))
    x[::3, -2:] = 0
    return x[:, :-1], x[:, 1:].clamp(min=1)


def sequences(seed: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return padded sequences (count, LENGTH, WIDTH) with lengths (count,), and a number each."""
    x = torch.randn(count, LENGTH, WIDTH, generator=seeded(seed))
    lengths = torch.arange(count) % LENGTH + 1
    return {"x": x, "lengths": lengths}, x.mean((1, 2))[:, None]


def waves(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return waves (count, 1, 32), which are their own targets."""
    x = torch.randn(count, 1, 32, generator=seeded(seed))
    return x, x.roll(1, -1)


def pairs(seed: int, count: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return pairs of vectors, and whether they belong together."""
    x, _ = vectors(seed, count)
    other = x + 0.1 * torch.randn(count, WIDTH, generator=seeded(seed + 1))
    return (x, other), (torch.arange(count) % 2).float()


def graphs(seed: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return graphs of 5 nodes: features, edges (from, to), and a number each."""
    features = torch.randn(count, 5, WIDTH, generator=seeded(seed))
    edges = torch.randint(0, 5, (count, 8, 2), generator=seeded(seed + 1))
    return {"nodes": features, "edges": edges}, features.mean((1, 2))[:, None]


def classes(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return vectors and classes (count,)."""
    x, _ = vectors(seed, count)
    return x, torch.arange(count) % 4


def halves(dtype: torch.dtype) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Return a function of samples in 16 bits."""

    def batch(seed: int, count: int) -> tuple[Tensor, Tensor]:
        x, y = vectors(seed, count)
        return x.to(dtype), y.to(dtype)

    return batch


def doubles(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return vectors and targets in float64."""
    x, y = vectors(seed, count)
    return x.double(), y.double()


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


class ViT(nn.Module):
    """A vision transformer: patches, a class token, learned positions, nn.TransformerEncoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (B, 4, 16)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.encoder(x)[:, 0])


class UNet(nn.Module):
    """Down and up again with a skip connection, and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        y = self.up(self.middle(F.avg_pool2d(skip, 2)))
        return self.out(torch.cat([skip, y], 1))


class Denoiser(nn.Module):
    """A diffusion model: draws a time and noise in forward, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet()
        self.time = nn.Embedding(10, 3)
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 10), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        t = torch.randint(0, 10, (len(x),), device=x.device)
        noise = torch.randn_like(x)
        a = self.alphas[t].view(-1, 1, 1, 1)  # type: ignore[index]
        mixed = a.sqrt() * x + (1 - a).sqrt() * noise + self.time(t)[:, :, None, None]
        return F.mse_loss(self.net(mixed), noise)


class Radiance(nn.Module):
    """A NeRF-like network: Fourier features of a position, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(3))
        wide = WIDTH * 7
        self.first = nn.ModuleList([nn.Linear(wide, 16), nn.Linear(16, 16)])
        self.second = nn.ModuleList([nn.Linear(16 + wide, 16)])
        self.color = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        angles = x[..., None] * self.bands  # type: ignore[operator]
        features = torch.cat([x, angles.sin().flatten(1), angles.cos().flatten(1)], 1)
        h = features
        for layer in self.first:
            h = F.relu(layer(h))
        h = torch.cat([h, features], 1)
        for layer in self.second:
            h = F.relu(layer(h))
        return torch.sigmoid(self.color(h))


# --- text and sequences ---


class Lstm(nn.Module):
    """A language model around nn.LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.embed(x))
        return self.head(h).transpose(1, 2)  # (B, C, T), as cross_entropy takes it


class PackedGru(nn.Module):
    """A bidirectional GRU over packed sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        packed = pack_padded_sequence(
            batch["x"], batch["lengths"].cpu(), batch_first=True, enforce_sorted=False
        )
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=LENGTH)
        return self.head(h.mean(1))


class Attention(nn.Module):
    """nn.MultiheadAttention with a mask of padding, between norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        y, _ = self.attention(h, h, h, key_padding_mask=x == 0, need_weights=False)
        return self.head(h + y).transpose(1, 2)


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


class Bag(nn.Module):
    """nn.EmbeddingBag, as classifiers of text and recommenders have it."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 8, mode="mean", padding_idx=0)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


def first_token(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of the first token alone."""
    return F.cross_entropy(output, y[:, 0])


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


class Vae(nn.Module):
    """A variational autoencoder: two losses, of the reconstruction and of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 8)
        self.decoder = nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def vae_loss(output: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    """Return the sum of both losses, each a mean over the batch."""
    decoded, mean, log_var = output
    code = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
    return F.mse_loss(decoded, y.expand(-1, WIDTH)) + 0.1 * code


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


class Siamese(nn.Module):
    """One tower for both parts of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, pair: Any) -> Tensor:
        first, second = pair
        return (self.tower(first) - self.tower(second)).square().sum(1)


def margin(distance: Tensor, same: Tensor) -> Tensor:
    return (same * distance + (1 - same) * F.relu(1 - distance)).mean()


# --- weights made of others ---


class Audio(nn.Module):
    """Weight norm and spectral norm, as parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv1d(1, 4, 3, padding=1))
        self.second = parametrizations.weight_norm(nn.Conv1d(4, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.leaky_relu(self.first(x), 0.1))


class OldWeightNorm(nn.Module):
    """The older weight norm, which writes the weight in a hook before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Conv1d(1, 4, 3, padding=1))  # type: ignore[no-untyped-call]
        self.second = nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.leaky_relu(self.first(x), 0.1))


class Spectral(nn.Module):
    """Spectral norm: each forward improves an estimate in two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(WIDTH, 8))
        self.second = parametrizations.spectral_norm(nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.leaky_relu(self.first(x), 0.1))


class Symmetric(nn.Module):
    """Makes a matrix symmetric."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Parametrized(nn.Module):
    """A parametrization of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.layer, "weight", Symmetric())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)))


class Containers(nn.Module):
    """nn.ParameterList and nn.ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(3)])
        self.more = nn.ParameterDict(
            {"scale": torch.ones(WIDTH), "out": torch.randn(WIDTH, 1) * 0.3}
        )

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return (x * self.more["scale"]) @ self.more["out"]


class Functional(nn.Module):
    """Calls a template with weights that another network computes (functional_call)."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.template = nn.Linear(WIDTH, 1)
        self.shift = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = {
            "weight": self.template.weight + torch.tanh(self.shift),
            "bias": self.template.bias,
        }
        return torch.func.functional_call(self.template, weights, (torch.tanh(self.into(x)),))


class FakeQuant(nn.Module):
    """Quantisation-aware training: fake quantisers with observers of their range."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        observer = {"observer": MovingAverageMinMaxObserver, "quant_min": 0, "quant_max": 255}
        self.into = FakeQuantize(**observer)
        self.first = nn.Linear(WIDTH, 8)
        self.between = FakeQuantize(**observer)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(F.relu(self.first(self.into(x)))))


# --- others ---


class Hooked(nn.Module):
    """Forward hooks change what layers return, and backward hooks scale gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.second = nn.Linear(8, 1)
        self.first.register_forward_hook(lambda module, args, output: torch.tanh(output))
        self.second.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.second.register_full_backward_hook(
            lambda module, into, out: tuple(None if g is None else g * 0.5 for g in into)
        )
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Graph(nn.Module):
    """Passes messages along edges by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(WIDTH, WIDTH)
        self.update = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        count, nodes, width = batch["nodes"].shape
        h = batch["nodes"].reshape(-1, width)
        first = torch.arange(count, device=h.device)[:, None] * nodes
        source = (batch["edges"][..., 0] + first).flatten()
        target = (batch["edges"][..., 1] + first).flatten()
        for _ in range(2):
            messages = torch.zeros_like(h).index_add(0, target, self.message(h[source]))
            h = self.update(messages, h)
        return self.head(h.view(count, nodes, width).mean(1))


class Router(nn.Module):
    """A mixture of experts: each sample goes to the two that the gate rates best."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.into(x))
        best, choice = torch.softmax(self.gate(x), 1).topk(2, 1)
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows, column = (choice == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, best[rows, column, None] * expert(x[rows]))
        return out


class Fourier(nn.Module):
    """Multiplies frequencies by complex weights, which are kept as pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 17, 2) * 0.1)
        self.mix = nn.Conv1d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(self.weight)
        return self.mix(torch.fft.irfft(spectrum, n=x.shape[-1], dim=-1))


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


class BufferedTeacher(nn.Module):
    """A student, and a teacher that is its moving average (BYOL, MoCo), kept in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, 4)
        self.register_buffer("weight", self.student.weight.detach().clone())
        self.register_buffer("bias", self.student.bias.detach().clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        average = {"weight": self.weight, "bias": self.bias}
        with torch.no_grad():
            if self.training:
                for name, p in self.student.named_parameters():
                    average[name].mul_(0.9).add_(p, alpha=0.1)
            target = F.linear(x.flip(1), average["weight"], average["bias"]) + y
        return F.mse_loss(self.student(x), target)


class Contrast(nn.Module):
    """A loss over all pairs of the batch: a micro batch has fewer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(WIDTH, 4)
        self.text = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.full((1,), math.log(5.0)))

    def forward(self, pair: Any, y: Tensor) -> Tensor:
        first, second = pair
        a = F.normalize(self.image(first), dim=1)
        b = F.normalize(self.text(second), dim=1)
        logits = self.scale.exp() * a @ b.T
        labels = torch.arange(len(logits), device=logits.device)
        return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels))


def groups(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def compiled() -> nn.Module:
    return torch.compile(Scripted(), backend="aot_eager")  # type: ignore[return-value]


def double() -> nn.Module:
    return Scripted().double()


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


DRAWS = "draws anew for each (seed, step, micro batch, rank): a resume draws the same"

PUBLIC: list[Kind] = [
    Kind(
        "CNN with BatchNorm",
        lambda: ConvNet(nn.BatchNorm2d),
        images,
        F.cross_entropy,
        apart=True,
        note="normalises by the rank's micro batch, as under torch's DDP; "
        "`sync_batchnorm` by that of all ranks",
        everyday=True,
    ),
    Kind("CNN with GroupNorm", lambda: ConvNet(groups), images, F.cross_entropy),
    Kind("ViT", ViT, images, F.cross_entropy),
    Kind("U-Net", UNet, same_images),
    Kind("diffusion denoiser", Denoiser, same_images, None, apart=True, note=DRAWS, everyday=True),
    Kind("NeRF", Radiance, vectors),
    Kind("LSTM", Lstm, tokens, F.cross_entropy, everyday=True),
    Kind("GRU over packed sequences", PackedGru, sequences),
    Kind("nn.MultiheadAttention, padding_idx", Attention, tokens, F.cross_entropy),
    Kind("nn.Transformer, tied embedding", Translator, tokens, F.cross_entropy, everyday=True),
    Kind("nn.EmbeddingBag", Bag, tokens, first_token, note="with sparse=False"),
    Kind(
        "LoRA around a frozen GPT",
        adapted,
        tokens,
        F.cross_entropy,
        note="the frozen weights are in every checkpoint",
        everyday=True,
    ),
    Kind("frozen base in 16 bits", bf16_base, vectors),
    Kind("VAE, two losses", Vae, vectors, vae_loss, apart=True, note=DRAWS),
    Kind(
        "GAN, two optimizers",
        Gan,
        vectors,
        None,
        apart=True,
        note="one forward with the losses of both, each detached from the other's weights",
        everyday=True,
        optimizers=two_optimizers,
        tolerance=1e-4,
    ),
    Kind("several heads, dict output", TwoHeads, vectors, two_tasks),
    Kind("siamese, shared towers", Siamese, pairs, margin),
    Kind("weight norm", Audio, waves),
    Kind("weight norm, torch.nn.utils.weight_norm", OldWeightNorm, waves),
    Kind(
        "spectral norm",
        Spectral,
        vectors,
        note="each forward improves the estimate in its buffers",
    ),
    Kind("parametrization", Parametrized, vectors),
    Kind("nn.ParameterList, nn.ParameterDict", Containers, vectors),
    Kind("functional_call", Functional, vectors),
    Kind(
        "fake quantisation (torch.ao)",
        FakeQuant,
        vectors,
        apart=True,
        note="observers see the samples of their rank, and those of rank 0 are kept",
    ),
    Kind(
        "forward and backward hooks",
        Hooked,
        vectors,
        note="a hook sees its rank's part of a gradient: a clamp in it differs from one process",
        refused={"fsdp": "has a hook on its gradient"},
    ),
    Kind("graph network, index_add", Graph, graphs),
    Kind(
        "mixture of experts of one's own",
        Router,
        classes,
        F.cross_entropy,
        refused=IN_FSDP,
    ),
    Kind("Fourier layer", Fourier, waves),
    Kind("dropout, stochastic depth", Drops, vectors, apart=True, note=DRAWS),
    Kind(
        "contrastive loss over the batch",
        Contrast,
        pairs,
        None,
        apart=True,
        note="compares within a micro batch: ranks and `grad_accum_steps` change it",
        everyday=True,
    ),
    Kind("moving average in buffers", BufferedTeacher, vectors, None),
    Kind("torch.compile", compiled, vectors),
    Kind("float64", double, doubles),
    Kind("bfloat16", lambda: in_16_bits(torch.bfloat16), halves(torch.bfloat16), tolerance=0.02),
    Kind("float16", lambda: in_16_bits(torch.float16), halves(torch.float16), tolerance=0.004),
]
