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

from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoray.errors import ConfigError

PREFIX = "transformer."
TOKENS = "wte.weight"
HEAD = "lm_head.weight"

# Parts of a layer: ours, GPT-2's, outputs and inputs in units of n_embd. A norm has no inputs
_LAYERS = (
    ("norm1", "ln_1", 1, 0),
    ("attn.qkv", "attn.c_attn", 3, 1),
    ("attn.proj", "attn.c_proj", 1, 1),
    ("norm2", "ln_2", 1, 0),
    ("mlp.up", "mlp.c_fc", 4, 1),
    ("mlp.down", "mlp.c_proj", 1, 4),
)
# activation_function of a config.json, and the key gelu
ACTIVATIONS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_accurate": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
}
# What a config.json may say, with the only value that nanoray's GPT computes, which is the default
_FIXED = {
    "model_type": "gpt2",
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_NANOGPT = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")


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
        for ours, theirs, outputs, inputs in _LAYERS:
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


def keys_of_huggingface(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a config.json, named as in ModelShape. Raises ConfigError."""
    # Where a key is absent, it has the default of transformers' GPT2Config
    keys = {
        "n_layer": config.get("n_layer", 12),
        "n_head": config.get("n_head", 12),
        "n_embd": config.get("n_embd", 768),
        "block_size": config.get("n_positions", 1024),
        "vocab_size": config.get("vocab_size", 50257),
        "bias": True,
    }
    # With another value the same weights would compute something else
    for key, value in _FIXED.items():
        allowed = (value, 4 * keys["n_embd"]) if key == "n_inner" else (value,)
        if config.get(key, value) not in allowed:
            raise ConfigError(
                f"config.json has {key} {config[key]}, and nanoray's GPT computes {allowed[-1]}; give "
                "the weights of a plain GPT-2"
            )
    activation = config.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json has activation_function {activation}, and nanoray's GPT has "
            f"{', '.join(ACTIVATIONS)}; give the weights of a plain GPT-2"
        )
    return keys | {"gelu": ACTIVATIONS[activation]}


def keys_of_nanogpt(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the model_args in a ckpt.pt, named as in ModelShape. Raises ConfigError."""
    # Forks add switches, such as another activation, with which the same weights compute otherwise
    for name, value in model_args.items():
        if value and name not in _NANOGPT:
            raise ConfigError(
                f"model_args has {name} = {value!r}, which nanoGPT has not, so its model may compute "
                "another function of the weights; give a checkpoint of nanoGPT"
            )
    keys = {name: model_args[name] for name in _NANOGPT if name not in ("dropout", "bias")}
    # The first nanoGPT had no key for biases, and always had them
    return keys | {"bias": model_args.get("bias", True), "gelu": "exact"}
