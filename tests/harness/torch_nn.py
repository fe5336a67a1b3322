"""Every class of torch.nn with each of its options, one at a time: models to compare with plain torch.

`SPECIMENS` has for each class the arguments to make it, values for its options, and how it is
called. What a class gets is a piece of h (B, FEATURES), the output of a trained layer, so that its
gradient counts. Add a class: one `add` with its options; `unvaried` tells what is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 64
VOCABULARY = 7

Call = Callable[[Any, Tensor, Tensor], Any]  # (module, h, inputs) -> output

# Modules that compute nothing of their own, or that other rules are about
NO_SPECIMEN = {
    "Module": "the base of all",
    "Container": "an old name of Module",
    "RNNBase": "has no forward",
    "RNNCellBase": "has no forward",
    "DataParallel": "refused by its name (wrong_inputs.py)",
}
# Options that do not change what a module computes or keeps, and deprecated ones
NO_OPTION = {
    *("self", "device", "dtype", "args", "kwargs"),
    *("size_average", "reduce", "min_value", "max_value"),
    *("_weight", "_random_samples"),
}


@dataclass(frozen=True)
class Specimen:
    """A module of torch.nn with one choice of its options."""

    kind: str  # the class
    options: dict[str, Any]  # those that are not at their defaults, or the arguments that must be
    call: Call
    refused: dict[str, str] = field(default_factory=dict)  # mode -> words of the refusal
    over_all_ranks: bool = False  # normalises by all ranks' samples together

    @property
    def key(self) -> str:
        """The name without dots, for a ModuleDict."""
        return self.name.replace(".", "_")

    @property
    def name(self) -> str:
        shown = []
        for key, value in self.options.items():
            text = value
            if isinstance(value, Tensor):
                text = "tensor"
            elif callable(value):
                text = value.__name__
            shown.append(f"{key}={text}")
        return f"{self.kind}({', '.join(shown)})"

    def build(self) -> nn.Module:
        """Return the module with the same initial weights each time."""
        torch.manual_seed(0)
        options = dict(self.options)
        for key, value in options.items():
            if isinstance(value, Made):
                options[key] = value.make()
        made: nn.Module = getattr(nn, self.kind)(**options)
        return made


class Made:
    """An option that is a new module for each specimen."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return self.make.__name__


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


def unvaried() -> list[str]:
    """Return the classes of torch.nn without a specimen, and options that no specimen changes."""
    lines = []
    for name, kind in sorted(vars(nn).items()):
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or name in NO_SPECIMEN:
            continue
        of_kind = [specimen for specimen in SPECIMENS if specimen.kind == name]
        if not of_kind:
            lines.append(f"nn.{name}: no specimen")
            continue
        varied = {key for specimen in of_kind for key in specimen.options}
        # A recurrent module's own arguments are those of its base.
        names = {*inspect.signature(kind.__init__).parameters}
        if issubclass(kind, nn.RNNBase):
            names |= {*inspect.signature(nn.RNNBase.__init__).parameters} - {"mode"}
            names -= set() if name == "LSTM" else {"proj_size"}
        for option in sorted(names - varied - NO_OPTION):
            lines.append(f"nn.{name}: no specimen changes {option}")
    return lines


SPECIMENS: list[Specimen] = []


def add(
    kind: str,
    call: Call,
    base: Mapping[str, Any] | None = None,
    refused: Mapping[str, dict[str, str]] | None = None,
    over_all_ranks: bool = False,
    **options: list[Any],
) -> None:
    """Add a class as it is, and with each value of each option alone.

    A value may be a dict: options that belong together. `refused`: by the option that is refused.
    An option, or a class, that this torch does not have is left out.
    """
    made = getattr(nn, kind, None)
    if made is None:
        return
    known = {*inspect.signature(made.__init__).parameters}
    base = dict(base or {})
    choices: list[tuple[str, dict[str, Any]]] = [("", {})]
    for option, values in options.items():
        for value in values:
            choice = value if isinstance(value, dict) else {option: value}
            if "kwargs" in known or known >= choice.keys():
                choices.append((option, choice))
    for option, choice in choices:
        why = (refused or {}).get(option, {})
        SPECIMENS.append(Specimen(kind, base | choice, call, why, over_all_ranks))


# --- how a module is called ---


def flat(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h)


def volume(h: Tensor, dims: int) -> Tensor:
    """Return h as (B, C, ...) with so many dims of space."""
    shapes = {1: (4, 16), 2: (4, 4, 4), 3: (2, 2, 4, 4)}
    return h.view(len(h), *shapes[dims])


CHANNELS = {1: 4, 2: 4, 3: 2}


def in_space(dims: int) -> Call:
    def call(core: Any, h: Tensor, x: Tensor) -> Any:
        return core(volume(h, dims))

    return call


def ids(x: Tensor, columns: int, count: int = VOCABULARY) -> Tensor:
    """Return whole numbers (B, columns) below `count`, of the inputs."""
    return (x[:, :columns] * 100).long().abs() % count


def sequence(core: Any, h: Tensor, x: Tensor) -> Any:
    """Call with (B, 8, 8), or (8, B, 8) where the batch is not the first dim."""
    steps = h.view(len(h), 8, 8)
    if core.batch_first:
        return core(steps)
    out = core(steps.transpose(0, 1))
    return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


def pair(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h[:, :32], h[:, 32:])


# --- activations and other functions of single elements ---

inplace = [True]
for name in ("Hardsigmoid", "Hardswish", "Mish", "ReLU", "ReLU6", "SELU", "SiLU"):
    add(name, flat, inplace=inplace)
for name in ("LogSigmoid", "Sigmoid", "Softsign", "Tanh", "Tanhshrink", "Identity"):
    add(name, flat)
add("CELU", flat, alpha=[0.5], inplace=inplace)
add("ELU", flat, alpha=[0.5], inplace=inplace)
add("GELU", flat, approximate=["tanh"])
add("GLU", flat, dim=[1])
add("Hardshrink", flat, lambd=[0.1])
add("Hardtanh", flat, min_val=[-0.5], max_val=[0.3], inplace=inplace)
add("LeakyReLU", flat, negative_slope=[0.3], inplace=inplace)
add("LogSoftmax", flat, dim=[1])
add("PReLU", flat, num_parameters=[FEATURES], init=[0.1])
add("RReLU", flat, lower=[0.2], upper=[0.5], inplace=inplace)
add("Softmax", flat, dim=[1])
add("Softmin", flat, dim=[1])
add("Softmax2d", in_space(2))
add("Softplus", flat, beta=[2.0], threshold=[0.5])
add("Softshrink", flat, lambd=[0.1])
add("Threshold", flat, {"threshold": 0.1, "value": 0.5}, inplace=inplace)

# --- dropout ---

for name in ("Dropout", "AlphaDropout"):
    add(name, flat, p=[0.2, 0.0], inplace=inplace)
for dims in (1, 2, 3):
    add(f"Dropout{dims}d", in_space(dims), p=[0.2], inplace=inplace)
add("FeatureAlphaDropout", in_space(2), p=[0.2], inplace=inplace)

# --- layers with weights ---

add("Linear", flat, {"in_features": FEATURES, "out_features": 8}, bias=[False])
add("LazyLinear", flat, {"out_features": 8}, bias=[False])
add(
    "Bilinear",
    pair,
    {"in1_features": 32, "in2_features": 32, "out_features": 4},
    bias=[False],
)
for dims in (1, 2, 3):
    for lazy in ("", "Lazy"):
        channels = {} if lazy else {"in_channels": CHANNELS[dims]}
        add(
            f"{lazy}Conv{dims}d",
            in_space(dims),
            channels | {"out_channels": 4, "kernel_size": 2},
            stride=[2],
            padding=[1, "same", "valid"],
            dilation=[{"dilation": 2, "padding": 1}],
            groups=[2],
            bias=[False],
            padding_mode=[
                {"padding_mode": mode, "padding": 1}
                for mode in ("reflect", "replicate", "circular")
            ],
        )
        add(
            f"{lazy}ConvTranspose{dims}d",
            in_space(dims),
            channels | {"out_channels": 4, "kernel_size": 2},
            stride=[2],
            padding=[1],
            output_padding=[{"output_padding": 1, "stride": 2}],
            dilation=[2],
            groups=[2],
            bias=[False],
            padding_mode=["zeros"],
        )


def looked_up(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(ids(x, 6)).flatten(1) + h[:, :1]


WRITES = dict.fromkeys(
    ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"), "as max_norm of nn.Embedding does"
)
SPARSE = dict.fromkeys(
    ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"), "is sparse, and nanoray sums, clips"
)
add(
    "Embedding",
    looked_up,
    {"num_embeddings": VOCABULARY, "embedding_dim": 4},
    {"max_norm": WRITES, "norm_type": WRITES, "sparse": SPARSE},
    padding_idx=[0],
    max_norm=[0.5],
    norm_type=[{"max_norm": 0.5, "norm_type": 1.0}],
    scale_grad_by_freq=[True],
    sparse=[True],
    _freeze=[True],
)


def bagged(core: Any, h: Tensor, x: Tensor) -> Any:
    numbers = ids(x, 6)
    if not core.include_last_offset:
        return core(numbers) + h[:, :1]
    return core(numbers.flatten(), torch.arange(len(x) + 1) * 6) + h[:, :1]


add(
    "EmbeddingBag",
    bagged,
    {"num_embeddings": VOCABULARY, "embedding_dim": 4},
    {"max_norm": WRITES, "norm_type": WRITES, "sparse": SPARSE},
    max_norm=[0.5],
    norm_type=[{"max_norm": 0.5, "norm_type": 1.0}],
    scale_grad_by_freq=[True],
    mode=["sum", "max"],
    sparse=[True],
    include_last_offset=[True],
    padding_idx=[0],
)

# --- norms ---

for dims in (1, 2, 3):
    for lazy in ("", "Lazy"):
        features = {} if lazy else {"num_features": CHANNELS[dims]}
        add(
            f"{lazy}BatchNorm{dims}d",
            in_space(dims),
            features,
            eps=[1e-2],
            momentum=[None, 0.0, 0.9],
            affine=[False, {"affine": False, "track_running_stats": False}],
            track_running_stats=[False],
            bias=[False],
        )
        add(
            f"{lazy}InstanceNorm{dims}d",
            in_space(dims),
            features,
            eps=[1e-2],
            momentum=[{"momentum": 0.9, "track_running_stats": True}],
            affine=[True, False, {"affine": True, "track_running_stats": True}],
            track_running_stats=[True, False],
            bias=[{"affine": True, "bias": False}],
        )
for features_in, call in ((FEATURES, flat), (4, in_space(1)), (2, in_space(3))):
    add(
        "SyncBatchNorm",
        call,
        {"num_features": features_in},
        over_all_ranks=True,
        eps=[1e-2],
        momentum=[None],
        affine=[False],
        track_running_stats=[False],
        process_group=[None],
        bias=[False],
    )
add("BatchNorm1d", flat, {"num_features": FEATURES}, affine=[False])  # (B, C)
add(
    "GroupNorm",
    in_space(2),
    {"num_groups": 2, "num_channels": 4},
    eps=[1e-2],
    affine=[False],
    bias=[False],
)
add(
    "LayerNorm",
    flat,
    {"normalized_shape": FEATURES},
    eps=[1e-2],
    elementwise_affine=[False],
    bias=[False],
)
add("RMSNorm", flat, {"normalized_shape": FEATURES}, eps=[1e-2], elementwise_affine=[False])
for name in ("LocalResponseNorm", "CrossMapLRN2d"):
    add(name, in_space(2), {"size": 2}, alpha=[0.1], beta=[0.5], k=[2.0])

# --- pooling, padding, shapes ---

for dims in (1, 2, 3):
    add(f"AdaptiveAvgPool{dims}d", in_space(dims), {"output_size": 2})
    add(f"AdaptiveMaxPool{dims}d", in_space(dims), {"output_size": 2}, return_indices=[True])
    add(
        f"AvgPool{dims}d",
        in_space(dims),
        {"kernel_size": 2},
        stride=[1],
        padding=[1],
        ceil_mode=[True],
        count_include_pad=[{"count_include_pad": False, "padding": 1}],
        divisor_override=[3],
    )
    add(
        f"MaxPool{dims}d",
        in_space(dims),
        {"kernel_size": 2},
        stride=[1],
        padding=[1],
        dilation=[{"dilation": 2, "padding": 1}],
        return_indices=[True],
        ceil_mode=[True],
    )
    add(
        f"LPPool{dims}d",
        in_space(dims),
        {"norm_type": 2.0, "kernel_size": 2},
        stride=[1],
        ceil_mode=[True],
    )
    for name in ("Circular", "Reflection", "Replication", "Zero"):
        add(f"{name}Pad{dims}d", in_space(dims), {"padding": 1})
    add(f"ConstantPad{dims}d", in_space(dims), {"padding": 1, "value": 0.5})


def unpooled(dims: int) -> Call:
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]

    def call(core: Any, h: Tensor, x: Tensor) -> Any:
        pooled, where = pool(volume(h, dims), 2, return_indices=True)
        return core(pooled, where)

    return call


for dims in (1, 2, 3):
    add(
        f"MaxUnpool{dims}d",
        unpooled(dims),
        {"kernel_size": 2},
        stride=[2],
        padding=[0],
    )
for dims in (2, 3):
    add(
        f"FractionalMaxPool{dims}d",
        in_space(dims),
        {"kernel_size": 1, "output_size": (1, 2, 2)[3 - dims :]},
        output_ratio=[{"output_ratio": 0.5, "output_size": None}],
        return_indices=[True],
    )
add("ChannelShuffle", in_space(2), {"groups": 2})
add("Flatten", in_space(2), start_dim=[2], end_dim=[2])
add("Unflatten", flat, {"dim": 1, "unflattened_size": (4, 16)})
add("PixelShuffle", in_space(2), {"upscale_factor": 2})
add("PixelUnshuffle", in_space(2), {"downscale_factor": 2})
add(
    "Fold",
    in_space(1),
    {"output_size": (5, 5), "kernel_size": 2},
    dilation=[{"dilation": 2, "output_size": (6, 6)}],
    padding=[{"padding": 1, "output_size": (3, 3)}],
    stride=[{"stride": 2, "output_size": (8, 8)}],
)
add("Unfold", in_space(2), {"kernel_size": 2}, dilation=[2], padding=[1], stride=[2])
add(
    "Upsample",
    in_space(2),
    {"scale_factor": 2.0},
    size=[{"size": 6, "scale_factor": None}],
    mode=["bilinear", "bicubic"],
    align_corners=[{"align_corners": True, "mode": "bilinear"}],
    recompute_scale_factor=[True],
)
for name in ("UpsamplingBilinear2d", "UpsamplingNearest2d"):
    add(name, in_space(2), {"scale_factor": 2.0}, size=[{"size": 6, "scale_factor": None}])

# --- recurrent layers, attention ---

for name in ("RNN", "LSTM", "GRU"):
    more = {"nonlinearity": ["relu"]} if name == "RNN" else {}
    if name == "LSTM":
        more = {"proj_size": [4]}
    add(
        name,
        sequence,
        {"input_size": 8, "hidden_size": 8, "batch_first": True},
        num_layers=[2],
        bias=[False],
        batch_first=[False],
        dropout=[{"dropout": 0.2, "num_layers": 2}],
        bidirectional=[True],
        **more,
    )
    more.pop("proj_size", None)
    add(f"{name}Cell", flat, {"input_size": FEATURES, "hidden_size": 4}, bias=[False], **more)


def attended(core: Any, h: Tensor, x: Tensor) -> Any:
    q = h.view(len(h), 8, 8)
    k = q[:, :, : core.kdim]
    v = q[:, :, : core.vdim]
    if core.batch_first:
        return core(q, k, v)
    out, _ = core(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    return out.transpose(0, 1)


add(
    "MultiheadAttention",
    attended,
    {"embed_dim": 8, "num_heads": 2, "batch_first": True},
    dropout=[0.2],
    bias=[False],
    add_bias_kv=[True],
    add_zero_attn=[True],
    kdim=[4],
    vdim=[4],
    batch_first=[False],
)


def translated(core: Any, h: Tensor, x: Tensor) -> Any:
    """Call a transformer, or its decoder, with (source, target) of 8 steps."""
    first = h.view(len(h), 8, 8)
    second = torch.tanh(first)
    if batch_first(core):
        return core(first, second)
    return core(first.transpose(0, 1), second.transpose(0, 1)).transpose(0, 1)


def encoded(core: Any, h: Tensor, x: Tensor) -> Any:
    steps = h.view(len(h), 8, 8)
    if batch_first(core):
        return core(steps)
    return core(steps.transpose(0, 1)).transpose(0, 1)


def batch_first(core: nn.Module) -> bool:
    """Return whether the attention in a module has the batch as its first dim."""
    found = [m for m in core.modules() if isinstance(m, nn.MultiheadAttention)]
    return bool(found[0].batch_first) if found else True


LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
LAYER_OPTIONS: dict[str, list[Any]] = {
    "dropout": [0.2],
    "activation": ["gelu"],
    "layer_norm_eps": [1e-2],
    "batch_first": [False],
    "norm_first": [True],
    "bias": [False],
}


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 8, 0.0, batch_first=True)


def layer_norm() -> nn.Module:
    return nn.LayerNorm(8)


def own_encoder() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(), 1)


def own_decoder() -> nn.Module:
    return nn.TransformerDecoder(decoder_layer(), 1)


add("TransformerEncoderLayer", encoded, LAYER, **LAYER_OPTIONS)
add("TransformerDecoderLayer", translated, LAYER, **LAYER_OPTIONS)
add(
    "TransformerEncoder",
    encoded,
    {"encoder_layer": Made(encoder_layer), "num_layers": 2},
    norm=[Made(layer_norm)],
    enable_nested_tensor=[False],
    mask_check=[False],
)
add(
    "TransformerDecoder",
    translated,
    {"decoder_layer": Made(decoder_layer), "num_layers": 2},
    norm=[Made(layer_norm)],
)
add(
    "Transformer",
    translated,
    LAYER | {"num_encoder_layers": 1, "num_decoder_layers": 1},
    custom_encoder=[Made(own_encoder)],
    custom_decoder=[Made(own_decoder)],
    **LAYER_OPTIONS,
)

# --- losses ---

REDUCTIONS = ["sum", "none"]


def to_targets(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h, x)


def of_classes(core: Any, h: Tensor, x: Tensor) -> Any:
    """Call with log probabilities (B, 7), which are scores as well, and classes."""
    return core(h[:, :VOCABULARY].log_softmax(1), ids(x, 1)[:, 0])


def of_bits(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h.sigmoid(), (x > 0).to(h.dtype))


def of_signs(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h, x.sign())


def pair_of_signs(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h[:, :32], h[:, 32:], x[:, :32].sign())


def pair_of_one_sign(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h[:, :32], h[:, 32:], x[:, 0].sign())


def of_several_classes(core: Any, h: Tensor, x: Tensor) -> Any:
    labels = torch.full((len(x), VOCABULARY), -1)
    labels[:, 0] = ids(x, 1)[:, 0]
    return core(h[:, :VOCABULARY], labels)


def of_distributions(core: Any, h: Tensor, x: Tensor) -> Any:
    target = x.log_softmax(1) if core.log_target else x.softmax(1)
    return core(h.log_softmax(1), target)


def with_variance(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h[:, :32], x[:, :32], 1 + h[:, 32:].square())


def of_counts(core: Any, h: Tensor, x: Tensor) -> Any:
    rates = h.tanh()
    return core(rates if core.log_input else rates.exp(), ids(x, FEATURES).to(h.dtype))


def of_triplets(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h[:, :20], h[:, 20:40], h[:, 40:60])


def aligned(core: Any, h: Tensor, x: Tensor) -> Any:
    scores = h.view(len(h), 8, 8).log_softmax(-1).transpose(0, 1)
    targets = ids(x, 3) + 1 if core.blank == 0 else ids(x, 3)
    count = len(x)
    return core(scores, targets, torch.full((count,), 8), torch.full((count,), 3))


def in_clusters(core: Any, h: Tensor, x: Tensor) -> Any:
    return core(h, ids(x, 1, 12)[:, 0]).loss


def of_features(core: Any, h: Tensor, x: Tensor) -> Any:
    several = bool(core.out_features)
    return core(h, ids(x, 2) if several else ids(x, 1)[:, 0])


def distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1)


CLASS_WEIGHTS = torch.linspace(0.5, 2.0, VOCABULARY)
ELEMENT_WEIGHTS = torch.linspace(0.5, 2.0, FEATURES)
add("L1Loss", to_targets, reduction=REDUCTIONS)
add("MSELoss", to_targets, reduction=REDUCTIONS)
add("HuberLoss", to_targets, reduction=REDUCTIONS, delta=[0.3])
add("SmoothL1Loss", to_targets, reduction=REDUCTIONS, beta=[0.3])
add("SoftMarginLoss", of_signs, reduction=REDUCTIONS)
add("HingeEmbeddingLoss", of_signs, reduction=REDUCTIONS, margin=[0.5])
add("MarginRankingLoss", pair_of_signs, reduction=REDUCTIONS, margin=[0.5])
add("CosineEmbeddingLoss", pair_of_one_sign, reduction=REDUCTIONS, margin=[0.5])
add("BCELoss", of_bits, reduction=REDUCTIONS, weight=[ELEMENT_WEIGHTS])
add(
    "BCEWithLogitsLoss",
    of_bits,
    reduction=REDUCTIONS,
    weight=[ELEMENT_WEIGHTS],
    pos_weight=[ELEMENT_WEIGHTS],
)
add(
    "CrossEntropyLoss",
    of_classes,
    reduction=REDUCTIONS,
    weight=[CLASS_WEIGHTS],
    ignore_index=[0],
    label_smoothing=[0.1],
)
for name in ("NLLLoss", "NLLLoss2d"):
    add(name, of_classes, reduction=REDUCTIONS, weight=[CLASS_WEIGHTS], ignore_index=[0])
add(
    "MultiMarginLoss",
    of_classes,
    reduction=REDUCTIONS,
    p=[2],
    margin=[0.5],
    weight=[CLASS_WEIGHTS],
)
add("MultiLabelMarginLoss", of_several_classes, reduction=REDUCTIONS)
add("MultiLabelSoftMarginLoss", of_bits, reduction=REDUCTIONS, weight=[ELEMENT_WEIGHTS])
add("KLDivLoss", of_distributions, reduction=[*REDUCTIONS, "batchmean"], log_target=[True])
add("GaussianNLLLoss", with_variance, full=[True], eps=[1e-2], reduction=REDUCTIONS)
add(
    "PoissonNLLLoss",
    of_counts,
    log_input=[False],
    full=[True],
    eps=[1e-4],
    reduction=REDUCTIONS,
)
add(
    "TripletMarginLoss",
    of_triplets,
    margin=[0.5],
    p=[1.0],
    eps=[1e-3],
    swap=[True],
    reduction=REDUCTIONS,
)
add(
    "TripletMarginWithDistanceLoss",
    of_triplets,
    distance_function=[distance],
    margin=[0.5],
    swap=[True],
    reduction=REDUCTIONS,
)
add("CTCLoss", aligned, blank=[7], reduction=REDUCTIONS, zero_infinity=[True])
add(
    "AdaptiveLogSoftmaxWithLoss",
    in_clusters,
    {"in_features": FEATURES, "n_classes": 12, "cutoffs": [4, 8]},
    div_value=[2.0],
    head_bias=[True],
)
add(
    "LinearCrossEntropyLoss",
    of_features,
    {"in_features": FEATURES, "num_classes": VOCABULARY},
    out_features=[(2,)],
    bias=[True],
    options=[Made(lambda: nn.LinearCrossEntropyOptions())],  # type: ignore[attr-defined]
    reduction=["sum"],
    weight=[CLASS_WEIGHTS],
    ignore_index=[0],
    label_smoothing=[0.1],
)
add("CosineSimilarity", pair, dim=[-1], eps=[1e-2])
add("PairwiseDistance", pair, p=[1.0], eps=[1e-2], keepdim=[True])

# --- containers ---


def scaled(core: Any, h: Tensor, x: Tensor) -> Any:
    values = core.values() if isinstance(core, nn.ParameterDict) else core
    for value in values:
        h = torch.tanh(h * value)
    return h


def chained(core: Any, h: Tensor, x: Tensor) -> Any:
    layers = core.values() if isinstance(core, nn.ModuleDict) else core
    for layer in layers:
        h = torch.tanh(layer(h))
    return h


def layers() -> list[nn.Module]:
    return [nn.Linear(FEATURES, FEATURES) for _ in range(2)]


def named_layers() -> dict[str, nn.Module]:
    return dict(zip("ab", layers(), strict=True))


add("ModuleList", chained, {"modules": Made(layers)})
add("ModuleDict", chained, {"modules": Made(named_layers)})
add("ParameterList", scaled, {"values": Made(lambda: [torch.ones(FEATURES), torch.ones(FEATURES)])})
add("ParameterDict", scaled, {"parameters": Made(lambda: {"a": torch.ones(FEATURES)})})
add("Sequential", flat)
