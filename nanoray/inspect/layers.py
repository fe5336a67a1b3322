"""What each layer costs by the formulas that a dry run and a forecast use: FLOPs, activations,
state of one rank.

A GPT's whole formulas are linear in its layers, so a block is the difference of two depths, and the
ends are the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from nanoray.config import Batch, Config
from nanoray.forecast.dry_run import buckets_of
from nanoray.forecast.memory import Sizes, state_memory
from nanoray.forecast.own_models import kept_per_element
from nanoray.forecast.predict import Experts, Job, flops_of
from nanoray.inspect.subject import Subject, Unknown
from nanoray.mesh.layout import Coords, Layout
from nanoray.models import resnet_costs
from nanoray.models.build import kernels_of
from nanoray.models.costs import Cut, activation_memory, with_kernels
from nanoray.models.gpt import ModelShape
from nanoray.models.resnet import SIZE, ResNetShape
from nanoray.parallel.ep import names_of_experts

OUTSIDE = "model and loss"  # of a script's model: what is in none of its children
GPT_ENDS = {"tok_emb": "embedding", "pos_emb": "embedding", "dropout": "embedding"}
Costs = tuple[int, int, int | None]  # FLOPs of forward and of backward; bytes kept for backward


@dataclass(frozen=True)
class Layer:
    """One layer's costs. FLOPs are of a micro batch on the ranks that share it; bytes are one
    rank's. None: unknown.
    """

    name: str
    parameters: int  # of the whole model
    forward_flops: int | None
    backward_flops: int | None
    kept: int | None  # of one micro batch, for backward
    weights: int
    gradients: int
    optimizer: int


def layer_of(name: str, model: nn.Module, shape: object) -> str:
    """Return the layer that a module or tensor of this name belongs to."""
    first, _, rest = name.partition(".")
    if rest and first in _numbered(model):
        return f"{first}.{rest.partition('.')[0]}"
    if isinstance(shape, ModelShape):
        return GPT_ENDS.get(first, "norm, head, loss")
    if isinstance(shape, ResNetShape):
        return "stem, head, loss"
    return (
        first
        if first in dict(model.named_children()) and (rest or first not in _numbered(model))
        else OUTSIDE
    )


def _numbered(model: nn.Module) -> set[str]:
    """Return the lists of layers among a model's children; without their classes, by the numbers in
    names.
    """
    return {
        name
        for name, child in model.named_children()
        if isinstance(child, nn.ModuleList)
        or (
            isinstance(child, Unknown)
            and child._modules
            and all(key.isdigit() for key in child._modules)
        )
    }


def layers_of(
    subject: Subject, modules: Sequence[Mapping[str, Any]], cut: bool = True
) -> list[Layer]:
    """Return the layers in the model's order; with `cut` as the run's ranks share them, else in one
    process.

    `modules`: what a trial has seen, if any; it takes the place of the formulas that a script's own
    model lacks.
    """
    config, batch, layout, shape = subject.config, subject.batch, subject.layout, subject.shape
    if not cut:
        config = config.model_copy(
            update={"tp": 1, "pp": 1, "ep": 1, "sequence_parallel": False, "dp_mode": "ddp"}
        )
        layout = Layout()
    lists = _numbered(subject.model)
    names = [name for name, _ in subject.model.named_modules() if name and name not in lists]
    numbers = {layer_of(name, subject.model, shape): 0 for name in [*names, ""]}
    for name, p in subject.model.named_parameters():
        numbers[layer_of(name, subject.model, shape)] += p.numel()
    if isinstance(shape, ModelShape):
        block, first, last = _gpt(shape, config, batch)
        ends = {"embedding": first, "norm, head, loss": last}
        costs = {name: ends.get(name, block) for name in numbers}
    elif isinstance(shape, ResNetShape):
        costs = _resnet(shape, config, batch)
    else:
        costs = _seen(modules)
    states = _states(replace(subject, config=config, layout=layout), whole=not cut)
    none = {"weights": 0, "gradients": 0, "optimizer": 0}
    return [
        Layer(name, n, *costs.get(name, (None, None, None)), **states.get(name, none))
        for name, n in numbers.items()
    ]


def _seen(modules: Sequence[Mapping[str, Any]]) -> dict[str, Costs]:
    """Return what a trial has counted, by layer; nothing without a trial."""
    found: dict[str, Costs] = {}
    for row in modules if any(row["calls"] for row in modules) else ():
        have = found.get(row["layer"], (0, 0, 0))
        forward, backward, kept = (row[key] for key in ("forward_flops", "backward_flops", "kept"))
        found[row["layer"]] = have[0] + forward, have[1] + backward, (have[2] or 0) + kept
    return found


def _gpt(shape: ModelShape, config: Config, batch: Batch) -> tuple[Costs, Costs, Costs]:
    """Return the costs of a block, of the embedding, and of the norm, head and loss."""
    precision, how, tokens = (
        config.precision,
        config.activation_checkpointing,
        batch.micro * shape.block_size,
    )
    cut, kernels = Cut(config.tp, config.ep, config.sequence_parallel), kernels_of(config)

    def flops(layers: int) -> tuple[int, int]:
        deep = replace(shape, n_layer=layers)
        job = Job(deep, config, batch.micro, precision, 1.0, experts=Experts.of(shape))
        forward, backward = flops_of(job, Layout(), 0)
        return round(tokens * forward), round(tokens * backward)

    def memory(layers: int, ends: tuple[bool, bool] = (False, False)) -> int:
        deep = replace(shape, n_layer=layers)
        parts = activation_memory(deep, batch.micro, precision, how, cut, 1, ends)
        parts = with_kernels(parts, deep, batch.micro, precision, kernels, how, cut.tp)
        return parts["activations"] + (0 if how == "block" else parts["copies"])

    one, two = flops(1), flops(2)
    block = two[0] - one[0], two[1] - one[1], memory(2) - memory(1)
    first, last = (memory(1, ends) - memory(1) for ends in ((True, False), (False, True)))
    columns = shape.logit_columns if cut.tp == 1 else shape.padded_vocab // cut.tp
    # dW, or log-softmax
    last += 4 * (shape.padded_vocab * shape.n_embd if kernels.loss_chunk else tokens * columns)
    head = one[0] - block[0], 2 * (one[0] - block[0]), last
    return block, (0, 0, first), head


def _resnet(shape: ResNetShape, config: Config, batch: Batch) -> dict[str, Costs]:
    """Return the costs of each block, and of the rest."""
    size, convolutions = 4 if config.precision == "fp32" else 2, resnet_costs.convolutions(shape)

    def cost(some: list[tuple[int, int, int]], flops: int = 0, kept: int = 0) -> Costs:
        flops += sum(resnet_costs.convolution_flops(*one) for one in some)
        kept += sum(resnet_costs.convolution_kept(c_out, rows) for _, c_out, rows in some)
        return batch.micro * flops, 2 * batch.micro * flops, batch.micro * size * kept

    ends = cost(convolutions[:1], 2 * shape.channels[-1] * shape.classes, 3 * SIZE**2)
    blocks = {
        f"blocks.{n}": cost(convolutions[1 + 2 * n : 3 + 2 * n])
        for n in range(3 * shape.blocks_per_stage)
    }
    return blocks | {"stem, head, loss": ends}


def _states(subject: Subject, whole: bool) -> dict[str, dict[str, int]]:
    """Return by layer the bytes of weights, gradients and optimizer state that a rank has: the
    first that has them.
    """
    config, layout, found = subject.config, subject.layout, dict[str, dict[str, int]]()
    moments = kept_per_element(subject.optimizer) if subject.optimizer else None
    for stage in range(layout.pp):
        model = subject.model if whole else subject.at(Coords(0, 0, stage, 0))
        experts = names_of_experts(model) if layout.ep > 1 else set()
        layers: dict[str, set[str]] = {}
        for name, _ in model.named_parameters():
            layers.setdefault(layer_of(name, subject.model, subject.shape), set()).add(name)
        for layer, names in layers.items():
            if layer not in found:
                of_some = [(names - experts, layout.dp), (names & experts, layout.dp // layout.ep)]
                parts = [
                    _state(config, model, some, ranks, moments) for some, ranks in of_some if some
                ]
                found[layer] = {key: sum(part[key] for part in parts) for key in parts[0]}
    return found


def _state(
    config: Config, model: nn.Module, names: Collection[str], ranks: int, moments: float | None
) -> dict[str, int]:
    sizes, named = Sizes.of_some(model, names), dict(model.named_parameters())
    some = [named[name] for name in names]
    trained = sum(p.numel() for p in some if p.requires_grad)
    sizes = replace(sizes, trained=trained, each=sum(p.nbytes for p in some) / max(1, sizes.params))
    # Adamw has the embeddings, and what is no matrix
    if config.optimizer == "muon" and moments is None:
        matrices = sum(
            p.numel()
            for name, p in named.items()
            if name in names and p.dim() == 2 and "emb" not in name
        )
        moments = (matrices + 2 * (sizes.params - matrices)) / max(1, sizes.params)
    parts = state_memory(config, sizes, ranks, 1, buckets_of(config)[0], moments=moments)
    return {
        "weights": parts["parameters"],
        "gradients": parts["gradients"],
        "optimizer": parts["optimizer"],
    }


def totals(layers: list[Layer]) -> dict[str, int | None]:
    """Return the sums over layers; None where one of them is unknown."""
    keys = [key for key in asdict(layers[0]) if key != "name"]
    columns = {key: [getattr(layer, key) for layer in layers] for key in keys}
    return {key: None if None in values else sum(values) for key, values in columns.items()}
