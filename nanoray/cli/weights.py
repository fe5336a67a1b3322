"""`nanoray checkpoint import`: make a file that a run can begin with of another tool's weights.

It takes a folder of a GPT-2 of Hugging Face (config.json with model.safetensors or
         pytorch_model.bin, or the several files of an index), or nanoGPT's ckpt.pt

    nanoray checkpoint import gpt2 --out gpt2.safetensors
    nanoray train --init_from gpt2.safetensors

Nothing is downloaded: `hf download openai-community/gpt2 --local-dir gpt2` makes such a folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nanoray.checkpoint.export import weights_file
from nanoray.checkpoint.gpt2 import (
    HEAD,
    PREFIX,
    TOKENS,
    keys_of_huggingface,
    keys_of_nanogpt,
    weights_of,
)
from nanoray.cli import exit_code_of, name_program, tool_parser, writing
from nanoray.data.tokenizer import GPT2_VOCAB_SIZE
from nanoray.errors import ConfigError
from nanoray.machine.atomic import replace_bytes
from nanoray.machine.text import parameters
from nanoray.models.gpt import ModelShape

_ONE_FILE = ("model.safetensors", "pytorch_model.bin")
_COMPILED = "_orig_mod."  # what torch.compile puts before names
# The causal mask of the attention, which older versions saved
_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_PADDED_GPT2 = 50304  # nanoGPT's number of rows for GPT-2's vocabulary


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray checkpoint import` and return its exit code."""
    return exit_code_of(lambda: _import(argv))


def _import(argv: list[str] | None) -> int:
    parser = tool_parser(name_program("checkpoint import"), __doc__)
    parser.add_argument(
        "path", type=Path, help="a Hugging Face folder of a GPT-2, or nanoGPT's ckpt.pt"
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FILE.safetensors", help="what to write"
    )
    args = parser.parse_args(argv)
    shape, tensors = read_weights(args.path)
    # The two sizes of GPT-2's vocabulary belong to no other tokenizer
    tokenizer = {"kind": "gpt2"} if shape.vocab_size == GPT2_VOCAB_SIZE else {}
    with writing(args.out, "give --out another path"):
        replace_bytes(args.out, weights_file(tensors, shape.to_dict(), tokenizer))
    numbers = sum(tensor.numel() for tensor in tensors.values())
    print(f"{args.out}  {len(tensors)} tensors, {parameters(numbers)}; {shape.to_dict()}")
    return 0


def read_weights(path: Path) -> tuple[ModelShape, dict[str, Tensor]]:
    """Return the shape of another tool's model, and its tensors under our names.

    Raises ConfigError for what is no plain GPT-2.
    """
    if path.is_dir():
        config = json.loads((path / "config.json").read_bytes())
        return _renamed(path, keys_of_huggingface(config), _read_folder(path), conv1d=True)
    content = _read_file(path)
    if not isinstance(content.get("model_args"), dict):
        raise ConfigError(f"{path} has no model_args; give nanoGPT's ckpt.pt")
    keys = keys_of_nanogpt(content["model_args"])
    return _renamed(path, keys, content["model"], conv1d=False)


def _read_folder(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face folder."""
    for name in _ONE_FILE:
        if (folder / name).is_file():
            return _read_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            files = {file: _read_file(folder / file) for file in set(places.values())}
            return {tensor: files[file][tensor] for tensor, file in places.items()}
    raise ConfigError(f"{folder} has neither {' nor '.join(_ONE_FILE)}; download it again")


def _read_file(path: Path) -> dict[str, Any]:
    """Return what a file contains. No code of it is run. Raises ConfigError."""
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return content
    except OSError:
        raise
    except Exception as error:  # torch raises RuntimeError, UnpicklingError and others
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"cannot read {path} ({reason}); copy it again") from None


def _renamed(
    path: Path, keys: dict[str, Any], found: Mapping[str, Tensor], conv1d: bool
) -> tuple[ModelShape, dict[str, Tensor]]:
    """Return the shape and the tensors of a GPT-2 under our names. Raises ConfigError."""
    left = {}
    for name, tensor in found.items():
        left[name.removeprefix(_COMPILED).removeprefix(PREFIX)] = tensor

    # The output layer is the embedding
    head = left.pop(HEAD, None)
    if head is not None and TOKENS in left and not torch.equal(head, left[TOKENS]):
        raise ConfigError(
            f"{path} has an output layer that is not its embedding, and nanoray's GPT ties them; give "
            "a model with tied embeddings"
        )

    tensors = {}
    for weight in weights_of(keys, keys["vocab_size"], conv1d):
        taken = left.pop(weight.theirs, None)
        if taken is None or taken.shape != weight.shape or not taken.is_floating_point():
            has = "nothing" if taken is None else f"{taken.dtype} of shape {list(taken.shape)}"
            raise ConfigError(
                f"{path} has {has} for {weight.theirs}, and a GPT-2 of its sizes has floats of shape "
                f"{list(weight.shape)}; give the weights of a plain GPT-2"
            )
        tensors[weight.ours] = taken.t() if weight.transposed else taken
    others = [name for name in left if not _MASK.fullmatch(name)]
    if others:
        raise ConfigError(
            f"{path} has {len(others)} tensor(s) that a GPT-2 has not, such as {min(others)}; give "
            "the weights of a plain GPT-2"
        )

    # Rows of the embedding that are no tokens are zeros
    if keys["vocab_size"] == _PADDED_GPT2:
        keys = keys | {"vocab_size": GPT2_VOCAB_SIZE}
    shape = ModelShape(**keys)
    rows = tensors["tok_emb.weight"][: shape.vocab_size]
    tensors["tok_emb.weight"] = pad(rows, (0, 0, 0, shape.padded_vocab - shape.vocab_size))
    return shape, tensors


if __name__ == "__main__":
    raise SystemExit(main())
