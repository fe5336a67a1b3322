"""The options that belong to one kind of model: contradictions among them, and other spellings in
YAML files.

config.py is built on this file and offers its functions to the other rooms.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from nanoray.errors import ConfigError
from nanoray.kernel_options import refuse_kernels

# Nested keys that other programs' configuration files use, and ours for them. The first word is the
# outer key.
NESTED = {
    "model.name": "model",
    "model.num_layers": "",  # resnet_depth or n_layer, by the model
    "training.batch_size": "global_batch_size",
    "training.num_epochs": "num_epochs",
    "training.learning_rate": "lr",
    "training.optimizer": "optimizer",
}
LAYERS = {"resnet": "resnet_depth", "gpt": "n_layer"}  # what model.num_layers means
IMAGES = ("cifar10", "cifar10-generated")
RESNET_ONLY = ("resnet_depth", "resnet_width", "sync_batchnorm", "label_smoothing")
EXPERTS_ONLY = (
    "experts_per_token",
    "expert_hidden",
    "shared_experts",
    "expert_capacity",
    "balance_loss",
    "z_loss",
    "ep",
)
KERNELS = ("positions", "attention", "loss_chunk")
GPT_ONLY = (
    *(
        "tokenizer",
        "val_fraction",
        "dropout",
        "bias",
        "scaling",
        "activation_checkpointing",
        "experts",
    ),
    *EXPERTS_ONLY,
    *KERNELS,
)
NOT_OWN = (
    *RESNET_ONLY,
    "dropout",
    "bias",
    "scaling",
    "activation_checkpointing",
    "experts",
    *EXPERTS_ONLY,
    *KERNELS,
)  # the script decides them
BY_HAND = ("ddp_by_hand", "zero1", "zero2")  # values of dp_mode


def _field(default: Any, group: str, **limits: Any) -> Any:
    return Field(default, json_schema_extra={"group": group}, **limits)


class ExpertOptions(BaseModel):
    """The keys of a mixture of experts, a part of Config. Each attribute's docstring is the help
    text of its flag.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    experts: int = _field(0, "model", ge=0)
    """gpt: experts in place of each block's MLP, of which a router chooses some for each token (0 =
    one MLP)"""
    experts_per_token: int = _field(2, "model", gt=0)
    """experts that each token goes to (top k)"""
    expert_hidden: int = _field(0, "model", ge=0)
    """hidden units of an expert (0 = 4 x n_embd, as an MLP has)"""
    shared_experts: int = _field(0, "model", ge=0)
    """experts that every token goes to, beside those chosen for it"""
    expert_capacity: float = _field(0.0, "model", ge=0)
    """while training an expert takes at most this factor x the mean number of a sequence's tokens;
    those after them are dropped: the block passes them on as they are (0 = dropless)"""
    balance_loss: float = _field(0.01, "model", ge=0)
    """factor of the loss that spreads the tokens of each sequence over the experts; no logged loss
    contains it"""
    z_loss: float = _field(0.001, "model", ge=0)
    """factor of the loss that keeps the router's logits small; no logged loss contains it"""
    ep: int = _field(1, "dist", gt=0)
    """expert parallelism: data ranks that share the experts of a layer, experts/ep each, and send
    each other tokens; ep divides the data ranks, and dp/ep of them hold the same experts; with
    dp_mode ddp_by_hand, zero1 or zero2, and with tp and pp or without"""


class AxisOptions(ExpertOptions):
    """The keys of the mesh that concern one kind of model, a part of Config as well."""

    sequence_parallel: bool = _field(False, "dist")
    """tp: between layers each of its ranks works on its own part of every sequence: norms, dropouts
    and sums, with 1/tp of their activations; the same bytes travel, in two collectives for one"""


class PrecisionOptions(BaseModel):
    """The keys of the number formats that a run computes in and keeps, a part of Config."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "bf16_pure", "fp16_pure", "fp8"] = (
        _field("auto", "optim")
    )
    """auto (the fastest one that is safe on this device, printed with its reason) | fp32 | tf32 (GPUs: products of
    float32 with 10 bits) | bf16 | fp16 (with a loss scaler); weights and optimizer state are float32 in all of these |
    bf16_pure | fp16_pure (weights, gradients and optimizer state in 16 bits, for a gpt; see docs/precision.md) | fp8
    (bf16, with products of 8-bit floats in a gpt's blocks; an emulation where the hardware has none)
    """
    fp8_scaling: Literal["tensor", "row"] = _field("tensor", "optim")
    """fp8: one scale for each tensor | one for each row"""
    master_weights: Literal["none", "fp32"] = _field("none", "optim")
    """bf16_pure and fp16_pure: none | fp32 (the optimizer keeps a float32 copy of each weight, and
    its moments in float32, so that no small update is lost)"""
    rounding: Literal["nearest", "stochastic"] = _field("nearest", "optim")
    """bf16_pure without master weights: how an update is rounded to bf16: nearest | stochastic (up
    or down at random, right on average, so that small updates add up; its random bits follow from
    seed, step and weight)"""

    precision_stats: str = _field("off", "log", pattern=r"^(off|every=[1-9]\d*)$")
    """count in each layer the gradients that are zero or subnormal, and the weights that an update
    leaves as they were: off | every=K (in every K-th step, which is logged)"""

    @property
    def stats_every(self) -> int:
        """K of precision_stats every=K; 0 for off."""
        return int(self.precision_stats.removeprefix("every=").replace("off", "0"))

    @property
    def pure(self) -> bool:
        """Whether weights and gradients have 16 bits."""
        return self.precision.endswith("_pure")


def refuse_precision(config: Any) -> None:
    """Raise ValueError when the number formats of a Config contradict each other, or what else it
    asks for.
    """
    precision = config.precision
    if precision == "tf32" and config.device == "cpu":
        raise ValueError(
            "precision = tf32 is a format of GPUs, but device = cpu; use precision fp32"
        )
    if precision == "fp8":
        refuse_fp8(config)
    elif config.fp8_scaling != "tensor":
        raise ValueError(
            f"fp8_scaling = {config.fp8_scaling} would be ignored: precision = {precision}; use "
            "precision fp8, or drop "
            "fp8_scaling"
        )
    if not config.pure:
        for key, idle in (("master_weights", "none"), ("rounding", "nearest")):
            if (value := getattr(config, key)) != idle:
                raise ValueError(
                    f"{key} = {value} would be ignored: precision = {precision} keeps float32 "
                    "weights; use precision "
                    f"bf16_pure, or drop {key}"
                )
        return
    if config.rounding == "stochastic" and (
        precision != "bf16_pure" or config.master_weights != "none"
    ):
        have = f"precision = {precision} with master_weights = {config.master_weights}"
        raise ValueError(
            "rounding = stochastic is for updates of bf16 weights without a float32 copy, but "
            f"{have}; use precision "
            "bf16_pure with master_weights none, or drop rounding"
        )
    if config.model != "gpt" or config.experts:
        what = f"experts = {config.experts}" if config.model == "gpt" else f"model = {config.model}"
        raise ValueError(
            f"precision = {precision} stores the weights of a gpt without experts in 16 bits, but "
            f"{what}; use "
            f"precision {precision.removesuffix('_pure')}"
        )
    for key in ("tp", "pp"):
        if (size := getattr(config, key)) > 1:
            raise ValueError(
                f"precision = {precision} with {key} = {size}: parts of a model have float32 "
                f"weights; drop {key}, or "
                f"use precision {precision.removesuffix('_pure')}"
            )
    if config.momentum or config.optimizer == "muon":
        what = "optimizer = muon" if config.optimizer == "muon" else f"momentum = {config.momentum}"
        raise ValueError(
            f"precision = {precision} with {what}: only adamw and plain sgd round to 16 bits; use "
            "optimizer adamw, or "
            f"precision {precision.removesuffix('_pure')}"
        )
    if config.dp_mode == "fsdp":
        raise ValueError(
            f"precision = {precision} with dp_mode = fsdp: it shards float32 weights; use dp_mode "
            "zero2, or fsdp with "
            "fsdp_gather bf16"
        )


def refuse_fp8(config: Any) -> None:
    """Raise ValueError when a Config asks for something that linear layers with 8-bit products do
    not do.
    """
    if config.model != "gpt" or config.experts:
        what = f"experts = {config.experts}" if config.model == "gpt" else f"model = {config.model}"
        raise ValueError(
            f"precision = fp8 is for the linear layers of a gpt without experts, but {what}; use "
            "precision bf16"
        )
    idle = {"tp": 1, "pp": 1, "compile": False, "activation_checkpointing": "none"}
    asked = {
        key: getattr(config, key) for key, value in idle.items() if getattr(config, key) != value
    }
    if config.dp_mode == "fsdp":
        asked["dp_mode"] = "fsdp"
    for key, value in asked.items():
        raise ValueError(
            f"precision = fp8 with {key} = {value} is not supported; drop {key}, or use precision "
            "bf16"
        )


class StepOptions(PrecisionOptions, AxisOptions):
    """The keys of how a GPT's step is computed, a part of Config. Each attribute's docstring is a
    flag's help text.
    """

    positions: Literal["learned", "rotary"] = _field("learned", "model")
    """gpt: learned (an embedding of each position) | rotary (queries and keys are turned by their
    positions)"""
    attention: Literal["auto", "flash", "cudnn", "plain"] = _field("auto", "optim")
    """gpt: flash (torch's fused kernel) | cudnn (cuDNN's, on GPUs and in 16 bits) | plain (two products and a softmax;
    keeps block_size numbers per token and head for backward) | auto (plain where it was measured to win, on CPUs: with
    dropout, or in bf16 if they multiply bf16 and block_size is at most 256; on GPUs with audits; else flash)
    """
    loss_chunk: int = _field(0, "optim", ge=0)
    """gpt: tokens whose logits are in memory at a time while the loss is computed (0 = all of a
    micro batch); 1024 saves most of the logits' memory where the vocabulary is large"""
    muon_lr: float = _field(0.02, "optim", gt=0)
    """optimizer muon: peak learning rate of the blocks' matrices; lr is that of all else, and both
    follow the same schedule"""


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file's mapping, with nested keys translated; {} for an empty file. Raises
    ConfigError.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {path}: {error.strerror}; check the path"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config file {path} is not YAML: {' '.join(str(error).split())}"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(k, str) for k in values):
        raise ConfigError(
            f"config file {path} must hold `key: value` lines, not a {type(values).__name__}"
        )
    return flatten(values)


def did_you_mean(name: str, known: list[str]) -> str:
    """Return a hint for an unknown name: the closest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def refuse_unknown(name: str, known: list[str], kind: str) -> None:
    """Raise ConfigError for an unknown name, with the closest known one."""
    raise ConfigError(f"unknown {kind} {name}; {did_you_mean(name, known)}")


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `model: {name, num_layers}` and `training: {batch_size, ...}` of a YAML file to our
    flat keys.

    training.batch_size is that of all ranks together, so that results do not depend on their
    number. Raises ConfigError for a nested key that is unknown, or given a second time as a flat
    one.
    """
    flat = {
        key: value
        for key, value in values.items()
        if not isinstance(value, Mapping) or key not in _OUTER
    }
    model = (
        str(dict(values.get("model") or {}).get("name", "gpt"))
        if isinstance(values.get("model"), Mapping)
        else ""
    )
    for outer in _OUTER:
        inner = values.get(outer)
        for key, value in inner.items() if isinstance(inner, Mapping) else ():
            name = f"{outer}.{key}"
            if name not in NESTED:
                known = ", ".join(k for k in NESTED if k.startswith(outer))
                raise ConfigError(
                    f"unknown key {name}; known: {known}; write others as flat keys, e.g. "
                    "momentum: 0.9"
                )
            ours = NESTED[name] or LAYERS.get(model, "n_layer")
            if ours in flat:
                raise ConfigError(
                    f"{name} = {value} and {ours} = {flat[ours]} say the same thing; drop one of "
                    "them"
                )
            flat[ours] = value
    return flat


_OUTER = sorted({name.partition(".")[0] for name in NESTED})


def lay_over(lower: Mapping[str, Any], upper: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Let a layer of values replace those below it; max_steps and num_epochs replace each other.

    Raises ConfigError when one layer, which is called `where`, has both.
    """
    epochs = str(upper.get("num_epochs") or 0) != "0"
    if epochs and "max_steps" in upper:
        raise ConfigError(
            f"num_epochs = {upper['num_epochs']} and max_steps = {upper['max_steps']} in {where} "
            "contradict each "
            "other; drop one of them"
        )
    replaced = "max_steps" if epochs else "num_epochs" if "max_steps" in upper else ""
    return {key: value for key, value in lower.items() if key != replaced} | dict(upper)


def require_divisible(
    tp: int, n_head: int, n_embd: int, padded_vocab: int | None = None, expert_hidden: int = 0
) -> None:
    """Raise ConfigError unless a GPT can be cut over `tp` ranks; the vocabulary is left out where
    it is not known.
    """
    sizes = {f"n_head = {n_head}": n_head, f"4*n_embd = 4*{n_embd} = {4 * n_embd}": 4 * n_embd}
    if padded_vocab is not None:
        sizes[f"the padded vocabulary = {padded_vocab}"] = padded_vocab
    if expert_hidden:
        sizes[f"expert_hidden = {expert_hidden}"] = expert_hidden
    if wrong := [name for name, size in sizes.items() if size % tp]:
        fits = [
            str(n) for n in range(1, n_head + 1) if not any(size % n for size in sizes.values())
        ]
        raise ConfigError(
            f"tp = {tp} must divide {', '.join(sizes)}, but it does not divide "
            f"{' and '.join(wrong)}; "
            f"use a tp of {', '.join(fits)}"
        )


def require_stages(pp: int, chunks: int, n_layer: int) -> None:
    """Raise ConfigError unless a GPT's layers can be split into `pp` stages of as many chunks each."""
    parts = pp * chunks
    if n_layer % parts:
        what = f"pp*pp_chunks = {pp}*{chunks} = {parts}" if chunks > 1 else f"pp = {pp}"
        near = max(parts, round(n_layer / parts) * parts)
        raise ConfigError(
            f"{what} does not divide n_layer = {n_layer}; use n_layer {near}, or another pp"
        )


def require_groups(kind: str, pp: int, accum: int) -> None:
    """Raise ConfigError unless a step's micro batches fit the schedule."""
    if kind == "interleaved" and accum % pp:
        raise ConfigError(
            f"pp_schedule = interleaved takes micro batches in groups of pp = {pp}, but a step has "
            f"{accum}; set "
            f"grad_accum_steps {-(-accum // pp) * pp}, or use pp_schedule 1f1b"
        )


def refuse_parallelism(config: Any) -> None:
    """Raise ValueError or ConfigError where ways to share the work contradict each other, or the
    precision.
    """
    if config.allreduce != "backend" and config.dp_mode != "ddp":
        raise ValueError(
            f"allreduce = {config.allreduce} would be ignored: dp_mode = {config.dp_mode} sums by "
            "its own exchange; "
            "drop one of the two"
        )
    if config.tp > 1:
        refuse_tensor_parallelism(config)
    elif config.sequence_parallel:
        raise ValueError(
            f"sequence_parallel = True would be ignored: tp = {config.tp}, and its ranks share "
            "sequences; use tp 2, "
            "or drop sequence_parallel"
        )
    refuse_pipeline(config)
    if config.mirror == "off" and config.dp_mode not in ("zero1", "zero2", "fsdp"):
        raise ValueError(
            f"mirror = off would be ignored: dp_mode = {config.dp_mode} mirrors nothing; use "
            "dp_mode zero1, zero2 or "
            "fsdp, or drop mirror"
        )
    for key, default in (("fsdp_reshard", "full"), ("fsdp_gather", "fp32")):
        if getattr(config, key) != default and config.dp_mode != "fsdp":
            raise ValueError(
                f"{key} = {getattr(config, key)} would be ignored: dp_mode = {config.dp_mode}; use "
                "dp_mode fsdp, or "
                f"drop {key}"
            )
    if config.fsdp_gather == "bf16" and (config.precision == "fp16" or config.model == "resnet"):
        key = "precision" if config.precision == "fp16" else "model"
        raise ValueError(
            f"fsdp_gather = bf16 with {key} = {getattr(config, key)}: its layers cannot take "
            "weights of bf16; use "
            "fsdp_gather fp32"
        )
    refuse_precision(config)


def refuse_pipeline(config: Any) -> None:
    """Raise ValueError or ConfigError when the pipeline of a Config cannot be."""
    pp, kind = config.pp, config.pp_schedule
    if config.pp_chunks and kind != "interleaved":
        raise ValueError(
            f"pp_chunks = {config.pp_chunks} would be ignored: pp_schedule = {kind} has one chunk "
            "per rank; use "
            "pp_schedule interleaved, or drop pp_chunks"
        )
    if pp == 1:
        if kind != "1f1b":
            raise ValueError(
                f"pp_schedule = {kind} would be ignored: pp = 1 is no pipeline; raise pp, or drop "
                "it"
            )
        return
    if config.pp_chunks == 1:
        raise ValueError(
            "pp_chunks = 1 is the schedule 1f1b; use pp_schedule 1f1b, or at least 2 chunks"
        )
    if config.model != "gpt":
        raise ValueError(f"pp = {pp} splits a gpt, but model = {config.model}; drop pp")
    if config.allreduce != "backend":
        raise ValueError(
            f"allreduce = {config.allreduce} sums over all ranks, but pp = {pp}; drop one of the "
            "two"
        )
    if config.dp_mode == "fsdp":
        raise ValueError(
            f"dp_mode = fsdp with pp = {pp}: each turn of a micro batch would gather a stage's "
            "weights anew; use "
            "dp_mode zero2, which shards all but the weights, or drop pp"
        )
    if kind == "zero_bubble":
        refuse_halves(config)
    require_stages(pp, config.chunks, config.n_layer)
    if config.grad_accum_steps and not config.global_batch_size:
        require_groups(kind, pp, config.grad_accum_steps)


def refuse_halves(config: Any) -> None:
    """Raise ValueError where a backward cannot be divided into the two halves of zero_bubble."""
    found = config.activation_checkpointing
    for given, key, why in (
        (config.compile, "compile", "a compiled block computes both halves at once"),
        (
            found != "none",
            f"activation_checkpointing {found}",
            "each half would compute the forward again",
        ),
        (
            config.dp_mode == "zero2",
            "dp_mode zero2",
            "it sums after each backward, and there are two",
        ),
    ):
        if given:
            raise ValueError(
                f"pp_schedule = zero_bubble with {key}: {why}; use pp_schedule 1f1b, or drop {key}"
            )


def refuse_tensor_parallelism(config: Any) -> None:
    """Raise ValueError or ConfigError when the tp of a Config, which is above 1, cannot be."""
    if config.model != "gpt":
        raise ValueError(f"tp = {config.tp} cuts a gpt, but model = {config.model}; drop tp")
    if config.allreduce != "backend":
        raise ValueError(
            f"allreduce = {config.allreduce} sums over all ranks, but tp = {config.tp}; drop one "
            "of the two"
        )
    hidden = (config.expert_hidden or 4 * config.n_embd) if config.experts else 0
    require_divisible(config.tp, config.n_head, config.n_embd, expert_hidden=hidden)
    if config.sequence_parallel and config.block_size % config.tp:
        near = -(-config.block_size // config.tp) * config.tp
        raise ValueError(
            f"sequence_parallel cuts sequences over tp = {config.tp} ranks, which does not divide "
            "block_size = "
            f"{config.block_size}; use block_size {near}, or drop sequence_parallel"
        )


def refuse_experts(config: Any, defaults: Mapping[str, Any]) -> None:
    """Raise ValueError when the options of a mixture of experts contradict each other, or those of
    the mesh.
    """
    experts, ep = config.experts, config.ep
    if not experts:
        for key in EXPERTS_ONLY:
            if (value := getattr(config, key)) != defaults[key]:
                raise ValueError(
                    f"{key} = {value} would be ignored: experts = 0; give experts 8, or drop {key}"
                )
        return
    if config.experts_per_token > experts:
        raise ValueError(
            f"experts_per_token = {config.experts_per_token} is above experts = {experts}; lower "
            "it, or raise experts"
        )
    if config.scaling != "none":
        raise ValueError(
            f"scaling = {config.scaling} knows models without experts, but experts = {experts}; "
            "use scaling none"
        )
    if ep == 1:
        return
    if experts % ep:
        fits = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ValueError(f"ep = {ep} does not divide experts = {experts}; use an ep of {fits}")
    if config.dp_mode not in BY_HAND:
        raise ValueError(
            f"ep = {ep} sums the gradients of experts over other ranks than the rest, which "
            f"dp_mode = {config.dp_mode} "
            f"cannot; use dp_mode {', '.join(BY_HAND[:-1])} or {BY_HAND[-1]}"
        )


def refuse_contradictions(config: Any, defaults: Mapping[str, Any]) -> None:
    """Raise ValueError when an option of a Config has no effect with its model or optimizer."""
    images, model = config.dataset in IMAGES, config.model
    for key in {"resnet": GPT_ONLY, "own": NOT_OWN, "gpt": RESNET_ONLY}[model]:
        if (value := getattr(config, key)) != defaults[key]:
            other = "resnet" if key in RESNET_ONLY else "gpt"
            raise ValueError(
                f"{key} = {value} would be ignored: model = {model} has no such option; drop it, "
                f"or use model {other}"
            )
    refuse_experts(config, defaults)
    refuse_kernels(config, defaults)
    if model == "resnet" and not images and config.dataset != "auto":
        raise ValueError(
            f"dataset = {config.dataset} is text, but model = resnet learns from images; "
            f"use dataset auto, {' or '.join(IMAGES)}"
        )
    if model == "gpt" and images:
        raise ValueError(
            f"dataset = {config.dataset} has images, but model = gpt learns from text; use model "
            "resnet"
        )
    depth = config.resnet_depth
    if depth < 8 or (depth - 2) % 6:
        near = max(8, round((depth - 2) / 6) * 6 + 2)
        raise ValueError(
            f"resnet_depth = {depth} is not 6n + 2 (8, 14, 20, 32, 44, 50, ...); try {near}"
        )
    if config.momentum and config.optimizer != "sgd":
        raise ValueError(
            f"momentum = {config.momentum} would be ignored: optimizer = {config.optimizer} has "
            "its own; "
            "use optimizer sgd, or drop it"
        )
    if config.nesterov and not config.momentum:
        raise ValueError("nesterov needs momentum; give momentum 0.9, or drop nesterov")
    if config.num_epochs and config.scaling != "none":
        raise ValueError(
            f"num_epochs = {config.num_epochs} would be ignored: scaling = {config.scaling} "
            "derives "
            "max_steps from the model; drop one of them"
        )
