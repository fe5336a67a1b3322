"""Small GPT-2s of other tools: random weights, in each form in which they come. No download."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nanoray.checkpoint.export import weights_file
from nanoray.checkpoint.gpt2 import PREFIX, weights_of
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.models.gpt import GPT, ModelShape
from tests.harness.saving import save

# Before transformers is imported: no test asks the hub for anything
os.environ["HF_HUB_OFFLINE"] = "1"

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32}
VOCAB = 256  # that of bytes
POSITIONS = 24
BYTES = {"kind": "byte"}


def transformers_gpt2(activation: str = "gelu_new", seed: int = 0, **more: Any) -> nn.Module:
    """Return a GPT2LMHeadModel of transformers with random weights and biases.

    Skips the test where transformers is not installed: it needs Python 3.11.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        **{**SIZES, "n_positions": POSITIONS, "vocab_size": VOCAB, **more},
        activation_function=activation,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            # Large enough that the two forms of GELU differ
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    model.eval()
    return model


def written_gpt2(folder: Path, vocab_size: int = VOCAB, positions: int = POSITIONS) -> Path:
    """Write a Hugging Face folder without transformers, which a test may not have."""
    keys = {**SIZES, "block_size": positions, "bias": True}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for weight in weights_of(keys, vocab_size, conv1d=True):
        tensors[f"{PREFIX}{weight.theirs}"] = 0.1 * torch.randn(weight.shape, generator=generator)
    folder.mkdir(parents=True)
    values = {**SIZES, "model_type": "gpt2", "n_positions": positions, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a GPT2LMHeadModel without the tied output layer, as its files have."""
    state = model.state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if name != "lm_head.weight"}


def write_config(folder: Path, model: Any, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {**model.config.to_dict(), **changes}
    (folder / "config.json").write_text(json.dumps(values))


def one_file(folder: Path, model: nn.Module) -> Path:
    """As save_pretrained writes it."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def hub_folder(folder: Path, model: nn.Module) -> Path:
    """As the hub's first files are: names without a prefix, and the attention's masks."""
    write_config(folder, model)
    tensors = {}
    for name, tensor in tensors_of(model).items():
        tensors[name.removeprefix("transformer.")] = tensor
    for n in range(SIZES["n_layer"]):
        tensors[f"h.{n}.attn.bias"] = torch.ones(1, 1, POSITIONS, POSITIONS)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def bin_files(folder: Path, model: nn.Module) -> Path:
    """As torch.save wrote large models before there was safetensors: several files and an index."""
    write_config(folder, model)
    places = {}
    for number, name in enumerate(tensors_of(model)):
        file = f"pytorch_model-0000{number % 2 + 1}-of-00002.bin"
        places[name] = file
    for file in set(places.values()):
        part = {name: t for name, t in tensors_of(model).items() if places[name] == file}
        torch.save(part, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def nanogpt_checkpoint(path: Path, model: nn.Module, compiled: bool = False, **more: Any) -> Path:
    """As nanoGPT's train.py writes ckpt.pt; `compiled`: with torch.compile's names."""
    tensors = {}
    for name, tensor in tensors_of(model).items():
        is_linear = ".h." in name and tensor.dim() == 2
        tensors[name] = tensor.t().contiguous() if is_linear else tensor
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    args: dict[str, Any] = {**SIZES, "block_size": POSITIONS, "vocab_size": VOCAB, "dropout": 0.0}
    args["bias"] = True
    if compiled:
        tensors = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}

    # An optimizer with a state, as train.py's has
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones(3)
    optimizer.step()
    checkpoint = {
        "model": tensors,
        "optimizer": optimizer.state_dict(),
        "model_args": args | more,
        "iter_num": 7,
        "best_val_loss": torch.tensor(3.0),
        "config": {"dataset": "shakespeare_char", "learning_rate": 6e-4, "compile": True},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, path)
    return path


def own_weights(
    path: Path, shape: ModelShape, tokenizer: dict[str, Any] = BYTES, std: float = 0.3
) -> Path:
    """A file of random weights of a GPT, as `nanoray checkpoint export` writes it."""
    state = random_gpt(shape, std).state_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(weights_file(state, shape.to_dict(), tokenizer))
    return path


def gpt2_weights(path: Path, vocab_size: int = VOCAB, positions: int = POSITIONS) -> Path:
    """A file of small random weights that belong to GPT-2's tokens, of the form of GPT-2."""
    shape = ModelShape(**SIZES, block_size=positions, bias=True, vocab_size=vocab_size, gelu="tanh")
    return own_weights(path, shape, {"kind": "gpt2"}, std=0.1)


def random_gpt(shape: ModelShape, std: float) -> GPT:
    torch.manual_seed(3)
    gpt = GPT(shape)
    with torch.no_grad():
        for p in gpt.parameters():
            p.normal_(std=std)
    return gpt


def own_checkpoint(
    folder: Path, shape: ModelShape, tokenizer: dict[str, Any] = BYTES, std: float = 0.3
) -> Path:
    """A step folder of a GPT of nanoray with random weights."""
    gpt = random_gpt(shape, std)
    meta = {
        "step": 5,
        "model_shape": shape.to_dict(),
        "dataset": {"name": "words", "kind": "tokens", "tokenizer": tokenizer},
        "world_size": 1,
        "attempt": 0,
        "val_loss": 2.0,
        "best_val_loss": 2.0,
        "config": {"dropout": 0.0},
    }
    model = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}
    return save(folder, StateDict(model, {}, [], {}, meta), keep=9)


@torch.no_grad()
def logits_of(model: nn.Module, idx: Tensor) -> Tensor:
    """Return the last position's logits (B, V), of a GPT of either kind."""
    out = model(idx)
    if isinstance(out, Tensor):
        return out
    last: Tensor = out.logits[:, -1]
    return last


Maker = Callable[[Path, nn.Module], Path]
