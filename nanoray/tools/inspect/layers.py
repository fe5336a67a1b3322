"""FLOPs, activations and state of each layer, by the formulas of dry runs and forecasts.

A GPT's whole formulas are linear in its layers, so a block is the difference of two depths, and the
ends are the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from nanoray.config import Batch, Config
from nanoray.forecast.job import Job, assume_device
from nanoray.forecast.memory import Sizes, state_memory
from nanoray.forecast.predict import flops_of
from nanoray.mesh.layout import DIVISIONS, Coords, Layout
from nanoray.models import resnet_costs
from nanoray.models.build import kernels_of
from nanoray.models.costs import Cut, activation_memory, with_kernels
from nanoray.models.gpt import ModelShape
from nanoray.models.resnet import SIZE, ResNetShape
from nanoray.own.dry_run import kept_per_element
from nanoray.parallel.ep import names_of_experts
from nanoray.tools.inspect.subject import Subject, Unknown

OUTSIDE = "model and loss"  # the layer of parameters of a script's model that no child holds
GPT_ENDS = {"tok_emb": "embedding", "pos_emb": "embedding", "dropout": "embedding"}
Costs = tuple[int, int, int | None]  # FLOPs of forward and of backward; bytes kept for backward


@dataclass(frozen=True)
class Layer:
    """The costs of one layer. None: unknown.

    FLOPs are of a micro batch, on all ranks that share it. Bytes are of one rank.
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
    # Names of layers in a list have two parts, such as blocks.3; all others have one.
    first, _, rest = name.partition(".")
    if rest and first in _numbered(model):
        return f"{first}.{rest.partition('.')[0]}"
    if isinstance(shape, ModelShape):
        return GPT_ENDS.get(first, "norm, head, loss")
    if isinstance(shape, ResNetShape):
        return "stem, head, loss"
    is_child = first in dict(model.named_children())
    if is_child and (rest or first not in _numbered(model)):
        return first
    return OUTSIDE


def _numbered(model: nn.Module) -> set[str]:
    """Return the names of the children that are lists of layers.

    A checkpoint does not store classes, so an unknown child is a list if all its names are numbers.
    """
    names = set()
    for name, child in model.named_children():
        is_list = isinstance(child, nn.ModuleList)
        names_inside = [key for key, _ in child.named_children()]
        if isinstance(child, Unknown) and names_inside:
            is_list = all(key.isdigit() for key in names_inside)
        if is_list:
            names.add(name)
    return names


def layers_of(
    subject: Subject, modules: Sequence[Mapping[str, Any]], cut: bool = True
) -> list[Layer]:
    """Return the layers in the model's order; with `cut` as the run's ranks share them, else in one
    process.

    `modules`: the rows of a trial, if there was one. They replace the formulas, which a script's
    own model does not have.
    """
    config = subject.config
    layout = subject.layout
    shape = subject.shape
    # Data parallelism goes too: a single process shards nothing.
    if not cut:
        uncut = dict.fromkeys(DIVISIONS, 1)
        whole = {**uncut, "sequence_parallel": False, "dp_mode": "ddp"}
        config = config.model_copy(update=whole)
        layout = Layout()

    # Parameters by layer. Modules come first, so that a layer without parameters has its row.
    lists = _numbered(subject.model)
    names = [name for name, _ in subject.model.named_modules() if name and name not in lists]
    parameters = {layer_of(name, subject.model, shape): 0 for name in [*names, ""]}
    for name, p in subject.model.named_parameters():
        parameters[layer_of(name, subject.model, shape)] += p.numel()

    if isinstance(shape, ModelShape):
        block, first, last = _gpt(shape, config, subject.batch)
        ends = {"embedding": first, "norm, head, loss": last}
        costs = {name: ends.get(name, block) for name in parameters}
    elif isinstance(shape, ResNetShape):
        costs = _resnet(shape, config, subject.batch)
    else:
        costs = _seen(modules)

    states = _states(replace(subject, config=config, layout=layout), whole=not cut)
    unknown: Costs | tuple[None, None, None] = (None, None, None)
    nothing = {"weights": 0, "gradients": 0, "optimizer": 0}
    layers = []
    for name, count in parameters.items():
        forward, backward, kept = costs.get(name, unknown)
        state = states.get(name, nothing)
        layers.append(Layer(name, count, forward, backward, kept, **state))
    return layers


def _seen(modules: Sequence[Mapping[str, Any]]) -> dict[str, Costs]:
    """Return the counts of a trial by layer; nothing without a trial."""
    costs: dict[str, Costs] = {}
    if not any(row["calls"] for row in modules):
        return costs
    for row in modules:
        # Several modules of a trial belong to one layer, so their counts add up.
        forward, backward, kept = costs.get(row["layer"], (0, 0, 0))
        costs[row["layer"]] = (
            forward + row["forward_flops"],
            backward + row["backward_flops"],
            (kept or 0) + row["kept"],
        )
    return costs


def _gpt(shape: ModelShape, config: Config, batch: Batch) -> tuple[Costs, Costs, Costs]:
    """Return the costs of a block, of the embedding, and of the norm, head and loss."""
    precision = config.precision
    checkpointing = config.activation_checkpointing
    tokens = batch.micro * shape.block_size
    cut = Cut.of(config)
    kernels = kernels_of(config)

    def flops(layers: int) -> tuple[int, int]:
        job = Job(replace(shape, n_layer=layers), config, batch.micro, precision, bucket_mb=1.0)
        forward, backward = flops_of(job, Layout(), 0)
        return round(tokens * forward), round(tokens * backward)

    def memory(layers: int, ends: tuple[bool, bool] = (False, False)) -> int:
        deep = replace(shape, n_layer=layers)
        parts = activation_memory(deep, batch.micro, precision, checkpointing, cut, 1, ends)
        parts = with_kernels(parts, deep, batch.micro, precision, kernels, checkpointing, cut)
        # A block that is computed again does not keep its copies until then.
        if checkpointing == "block":
            return parts["activations"]
        return parts["activations"] + parts["copies"]

    # A block is the difference of two depths; what one layer has beside its block is the head.
    forward_of_one, backward_of_one = flops(1)
    forward_of_two, backward_of_two = flops(2)
    forward = forward_of_two - forward_of_one
    backward = backward_of_two - backward_of_one
    block = (forward, backward, memory(2) - memory(1))

    # The ends, each as the difference of a model with it and one without.
    embedding_kept = memory(1, (True, False)) - memory(1)
    head_kept = memory(1, (False, True)) - memory(1)
    columns = shape.logit_columns if cut.tp == 1 else shape.padded_vocab // cut.tp
    # The chunked loss never holds all logits, but it computes the weight gradient in forward.
    if kernels.loss_chunk:
        head_kept += 4 * shape.padded_vocab * shape.n_embd  # the gradient of the head's weight
    else:
        head_kept += 4 * cut.tokens(shape, batch.micro) * columns  # log-softmax
    head_forward = forward_of_one - forward
    # A lookup has no FLOPs; a matrix product costs twice its forward in backward.
    return block, (0, 0, embedding_kept), (head_forward, 2 * head_forward, head_kept)


def _resnet(shape: ResNetShape, config: Config, batch: Batch) -> dict[str, Costs]:
    """Return the costs of each block, and of the rest."""
    size = 4 if config.precision == "fp32" else 2
    convolutions = resnet_costs.convolutions(shape)

    def cost(some: list[tuple[int, int, int]], flops: int = 0, kept: int = 0) -> Costs:
        flops += sum(resnet_costs.convolution_flops(*one) for one in some)
        kept += sum(resnet_costs.convolution_kept(c_out, rows) for _, c_out, rows in some)
        # Backward of a convolution is two of them: by its input and by its weight.
        return batch.micro * flops, 2 * batch.micro * flops, batch.micro * size * kept

    # The first convolution is the stem; two follow for each block.
    costs = {}
    for number in range(3 * shape.blocks_per_stage):
        first = 1 + 2 * number
        costs[f"blocks.{number}"] = cost(convolutions[first : first + 2])
    head_flops = 2 * shape.channels[-1] * shape.classes
    costs["stem, head, loss"] = cost(convolutions[:1], head_flops, 3 * SIZE**2)
    return costs


def _states(subject: Subject, whole: bool) -> dict[str, dict[str, int]]:
    """Return the bytes of weights, gradients and optimizer state by layer.

    They are those of the first rank that holds the layer.
    """
    config = subject.config
    layout = subject.layout
    bucket_mb = assume_device(config).bucket_mb
    moments = kept_per_element(subject.optimizer) if subject.optimizer else None
    states: dict[str, dict[str, int]] = {}
    for stage in range(layout.pp):
        # Every rank of a stage holds the same layers, so rank 0 of each stage is enough.
        model = subject.model if whole else subject.at(Coords(pp=stage))
        experts = names_of_experts(model) if layout.ep > 1 else set()
        layers: dict[str, set[str]] = {}
        for name, _ in model.named_parameters():
            layers.setdefault(layer_of(name, subject.model, subject.shape), set()).add(name)

        for layer, names in layers.items():
            if layer in states:
                continue  # an earlier stage holds it, such as the tied embedding
            state = {"weights": 0, "gradients": 0, "optimizer": 0}
            # Fewer ranks share an expert than the rest of a layer.
            for some, ranks in (
                (names - experts, layout.shard_size),
                (names & experts, layout.dp // layout.ep),
            ):
                if some:
                    parts = _state(config, model, some, ranks, bucket_mb, moments)
                    state = {key: state[key] + parts[key] for key in state}
            states[layer] = state
    return states


def _state(
    config: Config,
    model: nn.Module,
    names: Collection[str],
    ranks: int,
    bucket_mb: float,
    moments: float | None,
) -> dict[str, int]:
    """Return the state of these parameters on one of the `ranks` that share them."""
    sizes = Sizes.of_some(model, names)
    parameters = {name: p for name, p in model.named_parameters() if name in names}
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    nbytes = sum(p.nbytes for p in parameters.values())
    sizes = replace(sizes, trained=trained, each=nbytes / max(1, sizes.params))

    # Muon keeps one number per element of a matrix; adamw, for all else, two.
    if config.optimizer == "muon" and moments is None:
        matrices = 0
        for name, p in parameters.items():
            if p.dim() == 2 and "emb" not in name:
                matrices += p.numel()
        moments = (matrices + 2 * (sizes.params - matrices)) / max(1, sizes.params)
    parts = state_memory(config, sizes, ranks, 1, bucket_mb, moments=moments)
    return {
        "weights": parts["parameters"],
        "gradients": parts["gradients"],
        "optimizer": parts["optimizer"],
    }


def totals(layers: list[Layer]) -> dict[str, int | None]:
    """Return the sums over layers; None where one of them is unknown."""
    keys = [key for key in asdict(layers[0]) if key != "name"]
    columns = {key: [getattr(layer, key) for layer in layers] for key in keys}
    # A sum without the unknown part would look complete, and would be too small.
    return {key: None if None in values else sum(values) for key, values in columns.items()}
