"""Write the model of a checkpoint for other tools: `nanoray checkpoint export --format`.

huggingface    a folder for transformers' GPT2LMHeadModel.from_pretrained: config.json and
               model.safetensors, with matrices as (inputs, outputs)
safetensors    one file under nanoray's names, with the model's shape and tokenizer in its header
torch          one file of torch.save under nanoray's names, which also holds extra states
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoray.checkpoint import gpt2
from nanoray.checkpoint.state.state_dict import StateDict, entries_of
from nanoray.errors import ConfigError
from nanoray.machine.atomic import new_folder, replace_bytes, write_json
from nanoray.models.gpt import ModelShape

FORMATS = ("huggingface", "safetensors", "torch")
HF_ACTIVATION = {"tanh": "gelu_new", "exact": "gelu"}
END_OF_TEXT = 50256  # in GPT-2's vocabulary
CPU = torch.device("cpu")


class Export(NamedTuple):
    """What an export has written."""

    tensors: int
    notes: tuple[str, ...] = ()


def write_model(state: StateDict, kind: str, out: Path) -> Export:
    """Write the model of a checkpoint as `out`, whole or not at all.

    Raises ConfigError for a model that the format cannot express.
    """
    if kind == "huggingface":
        return _write_huggingface(state, out)
    if kind == "torch":
        replace_bytes(out, _torch_file(state))
    else:
        replace_bytes(out, _safetensors_file(state, out))
    return Export(len(state.model))


# ---- GPT-2 ---------------------------------------------------------------------------------------


def _shape_for_gpt2(state: StateDict) -> ModelShape:
    """Return the shape of a model that GPT-2 can express. Raises ConfigError."""
    dataset = state.meta.get("dataset") or {}
    if dataset.get("kind", "tokens") != "tokens":
        raise ConfigError(
            "--format huggingface is for a gpt, and this checkpoint is of another model; use --format "
            "safetensors"
        )
    shape = ModelShape(**state.meta["model_shape"])
    missing = ""
    if shape.experts:
        missing = f"experts = {shape.experts}"
    elif shape.rotary:
        missing = "positions = rotary"
    if missing:
        raise ConfigError(
            f"{missing}: GPT-2 has nothing like it, and would compute another function of these "
            "weights; use --format safetensors"
        )
    return shape


def _renamed(state: StateDict, shape: ModelShape) -> dict[str, Tensor]:
    """Return a GPT's tensors under GPT-2's names, without the padding of the vocabulary."""
    keys: dict[str, Any] = {
        "n_layer": shape.n_layer,
        "n_embd": shape.n_embd,
        "block_size": shape.block_size,
        "bias": shape.bias,
    }
    tensors = {}
    for weight in gpt2.weights_of(keys, shape.vocab_size, conv1d=True):
        tensor = state.model[weight.ours]
        if weight.transposed:
            tensor = tensor.t()
        if weight.theirs == gpt2.TOKENS:
            tensor = tensor[: shape.vocab_size]
        # A clone, because the tensors of a checkpoint share one buffer
        tensors[f"{gpt2.PREFIX}{weight.theirs}"] = tensor.clone(
            memory_format=torch.contiguous_format
        )
    return tensors


def _write_huggingface(state: StateDict, out: Path) -> Export:
    from safetensors.torch import save

    shape = _shape_for_gpt2(state)
    tensors = _renamed(state, shape)
    notes: tuple[str, ...] = ()
    if not shape.bias:
        _add_zero_biases(tensors)
        notes = ("GPT-2 always has biases: they are zeros",)
    config = _huggingface_config(shape, state.meta, tensors)
    with new_folder(out) as folder:
        write_json(folder / "config.json", config)
        replace_bytes(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    return Export(len(tensors), notes)


def _add_zero_biases(tensors: dict[str, Tensor]) -> None:
    for name, tensor in list(tensors.items()):
        is_layer = ".h." in name or ".ln_f." in name
        if is_layer and name.endswith(".weight"):
            # Of a matrix (inputs, outputs), and of a norm, the last size is that of the result
            bias = tensor.new_zeros(tensor.shape[-1])
            tensors[f"{name.removesuffix('weight')}bias"] = bias


def _huggingface_config(
    shape: ModelShape, meta: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return config.json. Values that are not here have transformers' defaults, which are GPT-2's."""
    config = meta.get("config") or {}
    dropout = config.get("dropout", 0.0)
    tokenizer = (meta.get("dataset") or {}).get("tokenizer") or {}
    end_of_text = END_OF_TEXT if tokenizer.get("kind") == "gpt2" else None
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": HF_ACTIVATION[shape.gelu],
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_positions": shape.block_size,
        "n_ctx": shape.block_size,
        "vocab_size": shape.vocab_size,
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": dropout,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }


# ---- nanoray's own -------------------------------------------------------------------------------


def _torch_file(state: StateDict) -> bytes:
    """Return the model's state_dict as torch.save writes it; torch.load needs no pickled code."""
    tensors, values = entries_of(state, CPU)
    file = io.BytesIO()
    # Clones, because torch.save would write the checkpoint's whole buffer for each tensor.
    torch.save({name: tensor.clone() for name, tensor in tensors.items()} | values, file)
    return file.getvalue()


def _safetensors_file(state: StateDict, out: Path) -> bytes:
    """Return the model's tensors as a safetensors file. Raises ConfigError where it cannot hold all."""
    tensors, values = entries_of(state, CPU)
    if values:
        raise ConfigError(
            f"{min(values)} is no tensor, and a safetensors file holds tensors only; give "
            f"--out {out.with_suffix('.pt')}"
        )
    tokenizer = (state.meta.get("dataset") or {}).get("tokenizer") or {}
    return weights_file(tensors, state.meta["model_shape"], tokenizer)


def weights_file(
    tensors: dict[str, Tensor], shape: dict[str, Any], tokenizer: dict[str, Any]
) -> bytes:
    """Return a file that a run can begin with. Its header has the shape and the tokenizer."""
    from safetensors.torch import save

    # Metadata of a safetensors file are strings.
    header = {
        "format": "pt",
        "model_shape": json.dumps(shape),
        "tokenizer": json.dumps(tokenizer),
    }
    # Clones, because safetensors refuses tensors that share memory, as tied weights do.
    copies = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return save(copies, header)
