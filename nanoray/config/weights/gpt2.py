"""GPT-2 in the words of Hugging Face and of nanoGPT: names of tensors, and what their files say.

    nanoray                     GPT-2, below `transformer.`
    tok_emb.weight              wte.weight
    pos_emb.weight              wpe.weight
    blocks.N.norm1              h.N.ln_1
    blocks.N.attn.qkv           h.N.attn.c_attn      rows of queries, keys, values in all three
    blocks.N.attn.proj          h.N.attn.c_proj
    blocks.N.norm2              h.N.ln_2
    blocks.N.mlp.up             h.N.mlp.c_fc
    blocks.N.mlp.down           h.N.mlp.c_proj
    norm                        ln_f

Hugging Face keeps the matrix of a linear layer as (inputs, outputs), in a class named Conv1D; nanoGPT
keeps it as torch does, (outputs, inputs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoray.config.load import read_names
from nanoray.errors import ConfigError

PREFIX = "transformer."
TOKENS = "wte.weight"
HEAD = "lm_head.weight"

# Constants that older versions saved: the causal mask, and what stands behind it; the counter of
# torch's AveragedModel
_CONSTANTS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|n_averaged")

NAMES = "gpt2.yaml"  # of layers, wrappers and activations


class Weight(NamedTuple):
    """A parameter: its name here and in GPT-2's files, and its shape there."""

    ours: str
    theirs: str  # without PREFIX
    shape: tuple[int, ...]
    transposed: bool = False


def weights_of(keys: Mapping[str, Any], rows: int, conv1d: bool) -> list[Weight]:
    """Return the parameters of a GPT-2 with these keys and `rows` of tokens.

    conv1d: matrices are (inputs, outputs), as Hugging Face keeps them.
    """
    C = keys["n_embd"]
    weights = [
        Weight("tok_emb.weight", TOKENS, (rows, C)),
        Weight("pos_emb.weight", "wpe.weight", (keys["block_size"], C)),
    ]
    layers = [("norm", "ln_f", 1, 0)]
    for n in range(keys["n_layer"]):
        for ours, theirs, outputs, inputs in read_names(NAMES)["layers"]:
            layers.append((f"blocks.{n}.{ours}", f"h.{n}.{theirs}", outputs, inputs))

    for ours, theirs, outputs, inputs in layers:
        shape: tuple[int, ...] = (outputs * C,)
        if inputs and conv1d:
            shape = (inputs * C, outputs * C)
        elif inputs:
            shape = (outputs * C, inputs * C)
        weights.append(Weight(f"{ours}.weight", f"{theirs}.weight", shape, conv1d and inputs > 0))
        if keys["bias"]:
            weights.append(Weight(f"{ours}.bias", f"{theirs}.bias", (outputs * C,)))
    return weights


def plain_name(name: str) -> str:
    """Return a tensor's name without what wrappers and the class of the model put into it."""
    names = read_names(NAMES)
    parts = [part for part in name.split(".") if part not in names["wrappers"]]
    while parts[:-1] and parts[0] in names["outer"]:
        del parts[0]
    return ".".join(parts)


def _around(name: str) -> str:
    """Return the words of DDP or of a class that a tensor's name has before GPT-2's own."""
    wrappers = read_names(NAMES)["wrappers"]
    parts = [part for part in name.split(".") if part not in wrappers]
    words = parts[: len(parts) - len(plain_name(name).split("."))]
    return "".join(f"{word}." for word in words if f"{word}." != PREFIX)


def is_constant(name: str) -> bool:
    """Return whether a tensor of a file is no weight but a mask of the attention, or a counter."""
    return bool(_CONSTANTS.fullmatch(plain_name(name)))


def describe_names(names: Mapping[str, str]) -> list[str]:
    """Say which names of a file stand for ours where that is not plain. `names`: of check_tensors."""
    texts = []
    removed: dict[str, None] = {}  # in order
    for name in names.values():
        kept = plain_name(name).split(".")
        removed |= dict.fromkeys(part for part in name.split(".") if part not in kept)
    removed.pop(PREFIX.removesuffix("."), None)
    if removed:
        texts.append(f"names without {' and '.join(f'{part}.' for part in removed)}")
    embedding = names.get("tok_emb.weight", "")
    if plain_name(embedding) == HEAD:
        texts.append(f"{TOKENS} from {embedding}, which is tied to it")
    return texts


def keys_of_huggingface(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], int]:
    """Return our keys for a config.json, and its vocabulary. Raises ConfigError with the reason."""
    kind = config.get("model_type")
    if kind != "gpt2":
        raise ConfigError(
            f"init_from: {where} has model_type {kind}, and nanoray's GPT is a gpt2; give the "
            "folder of a GPT-2"
        )
    for key, value in read_names(NAMES)["fixed"].items():
        if config.get(key, value) != value:
            raise ConfigError(
                f"init_from: {where} has {key} {config[key]}, and nanoray's GPT computes {value}; "
                "give the weights of a plain GPT-2"
            )
    activation = config.get("activation_function", "gelu_new")
    activations = read_names(NAMES)["activations"]
    if activation not in activations:
        raise ConfigError(
            f"init_from: {where} has activation_function {activation}, and nanoray's GPT has "
            f"{', '.join(activations)}; give the weights of a plain GPT-2"
        )

    # The defaults are those of transformers' GPT2Config; older files have n_ctx for n_positions.
    keys = {
        "n_layer": config.get("n_layer", 12),
        "n_head": config.get("n_head", 12),
        "n_embd": config.get("n_embd", 768),
        "block_size": config.get("n_positions", config.get("n_ctx", 1024)),
        "bias": True,
    }
    vocab_size = config.get("vocab_size", 50257)
    _require_sizes(keys | {"vocab_size": vocab_size}, where)
    hidden = config.get("n_inner")
    if hidden not in (None, 4 * keys["n_embd"]):
        raise ConfigError(
            f"init_from: {where} has n_inner {hidden}, and nanoray's GPT has 4 * n_embd = "
            f"{4 * keys['n_embd']}; give the weights of a plain GPT-2"
        )
    return keys | {"gelu": activations[activation]}, vocab_size


def keys_of_nanogpt(model_args: Any, where: str) -> tuple[dict[str, Any], int]:
    """Return our keys for the model_args of a ckpt.pt, and its vocabulary. Raises ConfigError."""
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias")
    if not isinstance(model_args, Mapping):
        raise ConfigError(
            f"init_from: {where} has no model_args, which say n_head; give nanoGPT's ckpt.pt, or a "
            ".safetensors file of `nanoray checkpoint export`"
        )
    # Forks add switches, such as another activation, under which the same names compute otherwise.
    for name, value in model_args.items():
        shown = repr(value)[:60]
        if value and name not in (*names, "vocab_size", "dropout"):
            raise ConfigError(
                f"init_from: {where} has model_args {name} = {shown}, which nanoGPT has not, so its "
                "model may compute another function of the weights; give a checkpoint of nanoGPT"
            )
    # The first nanoGPT had no key for biases, and always had them.
    keys = {name: model_args.get(name) for name in names} | {"bias": model_args.get("bias", True)}
    _require_sizes(keys | {"vocab_size": model_args.get("vocab_size")}, where)
    return keys | {"gelu": "exact"}, model_args["vocab_size"]


def _require_sizes(keys: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a size that is no whole number above 0, or a bias that is no bool."""
    for key, value in keys.items():
        if key == "bias":
            fits = isinstance(value, bool)
        else:
            fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not fits:
            raise ConfigError(
                f"init_from: {where} has {key} {value!r}, which is no size of a GPT; copy it again"
            )


def _some_of(found: Mapping[str, Any]) -> str:
    """Return a few names of a file, and how many it has."""
    if not found:
        return "no tensors"
    return f"{len(found)} others, such as {', '.join(sorted(found)[:2])}"


def check_tensors(
    found: Mapping[str, tuple[int, ...]], weights: list[Weight], where: str
) -> dict[str, str]:
    """Return the name in the file of each of our parameters. Raises ConfigError.

    The file must have all of them in these shapes, and nothing else but the tied output layer and
    constants. Of the embedding and the output layer, which are one tensor, it may have either.
    """
    by_name: dict[str, str] = {}
    for name in found:
        plain = plain_name(name)
        if plain in by_name:
            raise ConfigError(
                f"init_from: {where} has {by_name[plain]} and {name}, which may both be {plain}; "
                "save the tensors of one model"
            )
        by_name[plain] = name
    # safetensors' save_model keeps one name of a tensor that has two.
    if TOKENS not in by_name and HEAD in by_name:
        by_name[TOKENS] = by_name.pop(HEAD)

    remedy = "copy it again"
    if not any(weight.theirs in by_name for weight in weights):
        remedy = (
            f"it has {_some_of(found)}, which are no names of a GPT-2: give names as Hugging Face or "
            "nanoGPT writes them"
        )
    names = {}
    for weight in weights:
        if weight.theirs not in by_name:
            raise ConfigError(f"init_from: {where} has no tensor {weight.theirs}; {remedy}")
        name = by_name.pop(weight.theirs)
        if found[name] != weight.shape:
            raise ConfigError(
                f"init_from: {where} has {name} of shape {list(found[name])}, and by its "
                f"configuration it is {list(weight.shape)}; give the two that belong together"
            )
        names[weight.ours] = name

    # Else some tensors may be of the model, and others of its average.
    around = sorted({_around(name) for name in names.values()})
    if len(around) > 1:
        raise ConfigError(
            f"init_from: {where} has names with {around[1]} and with {around[0] or 'nothing'} before "
            "them; save the tensors of one model"
        )

    head = by_name.pop(HEAD, None)
    if head is not None:
        names["lm_head.weight"] = head
    others = [name for plain, name in by_name.items() if not is_constant(plain)]
    if others:
        raise ConfigError(
            f"init_from: {where} has {len(others)} tensor(s) that a GPT-2 has not, such as "
            f"{min(others)}; give the weights of a plain GPT-2"
        )
    return names
