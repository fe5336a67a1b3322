"""The classes of torch.nn in which ranks could differ from one process: models to compare with it.

Those are the ones with weights or buffers, those that draw random numbers, and those that look at
other samples of the batch. What a function of single samples gives is the same on any rank, so
activations, poolings, paddings and plain losses have no specimen here. What a class gets is a piece
of h (B, FEATURES), the output of a trained layer, so that its gradient counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 64
VOCABULARY = 7
CHANNELS = 4
MODES = ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp")

Call = Callable[[Any, Tensor, Tensor], Any]  # (module, h, inputs) -> output


@dataclass(frozen=True)
class Specimen:
    """A module of torch.nn with one choice of its options."""

    kind: str  # the class
    options: dict[str, Any]  # those that are not at their defaults, or the arguments that must be
    call: Call
    over_all_ranks: bool = False  # normalises by all ranks' samples together

    @property
    def key(self) -> str:
        """The name without dots, for a ModuleDict."""
        return self.name.replace(".", "_")

    @property
    def name(self) -> str:
        shown = [
            f"{key}={value}"
            for key, value in self.options.items()
            if key not in ("values", "parameters")
        ]
        return f"{self.kind}({', '.join(shown)})"

    def build(self) -> nn.Module:
        """Return the module with the same initial weights each time."""
        torch.manual_seed(0)
        made: nn.Module = getattr(nn, self.kind)(**copy.deepcopy(self.options))
        return made


class Around(nn.Module):
    """For each specimen a trained layer, the specimen on its output, and the loss of that."""

    def __init__(self, specimens: Iterable[Specimen]) -> None:
        super().__init__()
        self.specimens = [*specimens]
        torch.manual_seed(1)
        self.into = nn.ModuleDict()
        self.cores = nn.ModuleDict()
        for specimen in self.specimens:
            self.into[specimen.key] = nn.Linear(FEATURES, FEATURES)
            self.cores[specimen.key] = specimen.build()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for specimen in self.specimens:
            h = self.into[specimen.key](x)
            out = specimen.call(self.cores[specimen.key], h, x)
            if isinstance(out, tuple):
                out = out[0]
            losses.append(self.loss_of(out, y))
        return torch.stack(losses).sum()

    @staticmethod
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        """Return a loss as it is, and of anything else (B, ...) that of a weighted sum."""
        if not out.dim():
            return out
        rows = out.flatten(1) if out.dim() > 1 else out[:, None]
        weights = torch.arange(rows.shape[1], dtype=rows.dtype).add(1).cos()
        return F.mse_loss((rows * weights).mean(1), y)


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Return inputs (count, FEATURES) and targets (count,)."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(3))
    return x, x.sum(1).sin()


SPECIMENS: list[Specimen] = []


def add(
    kind: str,
    call: Call,
    base: Mapping[str, Any] | None = None,
    *variants: Mapping[str, Any],
    over_all_ranks: bool = False,
) -> None:
    """Add a class as it is, and once with each of the variants of its options."""
    for variant in ({}, *variants):
        options = {**(base or {}), **variant}
        SPECIMENS.append(Specimen(kind, options, call, over_all_ranks))


# --- how a module is called ---


def flat(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h)


def in_space(core: Any, h: Tensor, x: Tensor) -> Any:
    """Call with (B, C, height, width)."""
    return core(h.view(len(h), CHANNELS, 4, 4))


def ids(x: Tensor, columns: int, count: int = VOCABULARY) -> Tensor:
    """Return whole numbers (B, columns) below `count`, of the inputs."""
    return (x[:, :columns] * 100).long().abs() % count


def sequence(core: Any, h: Tensor, x: Tensor) -> Any:
    """Call with (B, 8, 8)."""
    return core(h.view(len(h), 8, 8))


def pair(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h[:, :32], h[:, 32:])


def looked_up(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(ids(x, 6)).flatten(1) + h[:, :1]


def attended(core: Any, h: Tensor, x: Tensor) -> Any:
    q = h.view(len(h), 8, 8)
    return core(q, q[:, :, : core.kdim], q[:, :, : core.vdim])


def translated(core: Any, h: Tensor, x: Tensor) -> Any:
    """Call a transformer, or its decoder, with (source, target) of 8 steps."""
    first = h.view(len(h), 8, 8)
    return core(first, torch.tanh(first))


def in_clusters(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h, ids(x, 1, 12)[:, 0]).loss


def scaled(core: Any, h: Tensor, x: Tensor) -> Any:
    values = core.values() if isinstance(core, nn.ParameterDict) else core
    for value in values:
        h = torch.tanh(h * value)
    return h


# --- layers with weights ---

SAMPLE = {"in_channels": CHANNELS, "out_channels": 4, "kernel_size": 2}
add("PReLU", flat)
add("Linear", flat, {"in_features": FEATURES, "out_features": 8}, {"bias": False})
add("Bilinear", pair, {"in1_features": 32, "in2_features": 32, "out_features": 4})
add("Conv2d", in_space, SAMPLE, {"groups": 2, "bias": False})
add("ConvTranspose2d", in_space, SAMPLE)
TABLE = {"num_embeddings": VOCABULARY, "embedding_dim": 4}
for name in ("Embedding", "EmbeddingBag"):
    add(name, looked_up, TABLE, {"padding_idx": 0}, {"scale_grad_by_freq": True})
add("Embedding", looked_up, TABLE | {"_freeze": True})

# --- norms ---

NO_STATISTICS = {"track_running_stats": False}
NOT_AFFINE = {"affine": False}
OF_BATCHES = ({"momentum": None}, {"momentum": 0.0}, NOT_AFFINE, NO_STATISTICS)
add("BatchNorm1d", flat, {"num_features": FEATURES}, *OF_BATCHES)  # (B, C)
add("BatchNorm2d", in_space, {"num_features": CHANNELS}, NOT_AFFINE | NO_STATISTICS)
add("SyncBatchNorm", in_space, {"num_features": CHANNELS}, *OF_BATCHES[:1], over_all_ranks=True)
add("InstanceNorm2d", in_space, {"num_features": CHANNELS}, {"track_running_stats": True})
add("GroupNorm", in_space, {"num_groups": 2, "num_channels": CHANNELS})
add("LayerNorm", flat, {"normalized_shape": FEATURES}, {"elementwise_affine": False})
add("RMSNorm", flat, {"normalized_shape": FEATURES})

# --- random numbers ---

add("Dropout", flat, {"p": 0.2})
add("AlphaDropout", flat, {"p": 0.2})
add("Dropout2d", in_space, {"p": 0.2})
add("FeatureAlphaDropout", in_space, {"p": 0.2})
add("RReLU", flat)
add("FractionalMaxPool2d", in_space, {"kernel_size": 1, "output_size": (2, 2)})

# --- recurrent layers, attention ---

RECURRENT = {"input_size": 8, "hidden_size": 8, "batch_first": True}
for name in ("RNN", "LSTM", "GRU"):
    add(name, sequence, RECURRENT | {"num_layers": 2, "dropout": 0.2, "bidirectional": True})
    add(f"{name}Cell", flat, {"input_size": FEATURES, "hidden_size": 4})
add(
    "MultiheadAttention",
    attended,
    {"embed_dim": 8, "num_heads": 2, "batch_first": True},
    {"dropout": 0.2},
    {"add_bias_kv": True},
    {"kdim": 4, "vdim": 4},
)
LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, "dropout": 0.2, "batch_first": True}
add("TransformerEncoderLayer", sequence, LAYER)
add("TransformerDecoderLayer", translated, LAYER)
add("Transformer", translated, LAYER | {"num_encoder_layers": 2, "num_decoder_layers": 2})

# --- losses with weights, containers ---

CLUSTERS = {"in_features": FEATURES, "n_classes": 12, "cutoffs": [4, 8]}
add("AdaptiveLogSoftmaxWithLoss", in_clusters, CLUSTERS)
add("ParameterList", scaled, {"values": [torch.ones(FEATURES), torch.ones(FEATURES)]})
add("ParameterDict", scaled, {"parameters": {"a": torch.ones(FEATURES)}})
