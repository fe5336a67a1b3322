"""Read the weights of other tools, or of an export, into a GPT. Nothing is unpickled but tensors."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoray.checkpoint.files import Damage, load_checked
from nanoray.config.weights.outlines import in_place
from nanoray.config.weights.source import CHECKPOINT, Source, find
from nanoray.errors import ConfigError, NanorayError
from nanoray.mesh.mesh import Mesh
from nanoray.models.gpt import GPT, ModelShape

_ROWS = "tok_emb.weight"
_POSITIONS = "pos_emb.weight"


def begin_with(model: GPT, path: str, mesh: Mesh) -> None:
    """Give rank 0's model the weights of `path`, which the ranks receive from it later. (all ranks)

    Raises ConfigError on all ranks when rank 0 cannot read them: the others would wait for it.
    """
    problem = ""
    if mesh.rank == 0:
        try:
            load_weights(model, find(path))
        except NanorayError as error:
            problem = str(error)
            if not Path(path).exists():
                problem = (
                    f"rank 0 on {platform.node()} does not see init_from = {path}, which the run "
                    "was started with; put it on storage that all nodes share"
                )
    problem = mesh.broadcast(problem)
    if problem:
        raise ConfigError(problem)


@torch.no_grad()
def load_weights(model: GPT, source: Source) -> None:
    """Copy the weights of a source into a whole model of its shape, one tensor at a time.

    The model may have fewer positions, and more rows of tokens, which become zeros. Raises
    ConfigError for a tensor that is missing, has another shape or is not finite.
    """
    _require_same_model(model.shape, source)
    with ExitStack() as files:
        tensors = _Tensors(source, files)
        head = source.names.get("lm_head.weight")
        if head and not torch.equal(tensors[head], tensors[source.names[_ROWS]]):
            raise ConfigError(
                f"init_from: {source.path} has an output layer that is not its embedding, and "
                "nanoray's GPT ties them; give a model with tied embeddings"
            )
        for name, p in model.named_parameters():
            theirs = source.names.get(name, name)
            if theirs not in tensors:
                raise ConfigError(f"init_from: {source.path} has no tensor {theirs}; copy it again")
            tensor = tensors[theirs]
            is_linear = name.startswith("blocks.") and p.dim() == 2
            if source.conv1d and is_linear:
                tensor = tensor.t()
            _copy(p, tensor, name, source.path)


def _require_same_model(shape: ModelShape, source: Source) -> None:
    """Raise ConfigError when the weights are of another model, also where all shapes are equal.

    The number of heads and the form of GELU change no shape, but what is computed. A configuration
    that `load_config` has made agrees with the weights; others may not.
    """
    here = asdict(shape) | {"positions": "rotary" if shape.rotary else "learned"}
    for key, value in source.keys.items():
        if key != "block_size" and here[key] != value:
            raise ConfigError(
                f"init_from: {source.path} has {key} {value}, and here {key} = {here[key]}; use "
                f"{key} {value}"
            )


def _copy(p: Tensor, tensor: Tensor, name: str, path: Path) -> None:
    """Copy a tensor into a parameter; of positions the first ones, of tokens all there are."""
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(
            f"init_from: {name} of {path} has the type {kind}; give weights that are not quantized"
        )
    if not tensor.isfinite().all():
        raise ConfigError(
            f"init_from: {name} of {path} is not finite; give weights of a run that has not diverged"
        )
    if name == _POSITIONS:
        tensor = tensor[: len(p)]
    if name == _ROWS and len(tensor) < len(p):
        # Rows that are no tokens get no probability and no gradient.
        p[len(tensor) :] = 0.0
        p = p[: len(tensor)]
    if tensor.shape != p.shape:
        raise ConfigError(
            f"init_from: {name} of {path} has the shape {list(tensor.shape)}, and here "
            f"{list(p.shape)}; give the values of that model"
        )
    p.copy_(tensor)


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a source by name; each is read when it is asked for, where the format allows."""

    def __init__(self, source: Source, files: ExitStack) -> None:
        self._readers: dict[str, Any] = {}  # by name: what has a tensor of this name
        self._whole: dict[str, Tensor] = {}
        if source.kind == CHECKPOINT:
            self._whole = _read_checkpoint(source.path)
            return
        for path in source.files:
            if path.suffix == ".safetensors":
                readers = _open_safetensors(path, files)
                self._readers |= in_place(readers, path, source.places)
            else:
                self._whole |= in_place(_read_torch_file(path), path, source.places)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._whole:
            return self._whole[name]
        tensor: Tensor = self._readers[name].get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._whole or name in self._readers

    def __iter__(self) -> Iterator[str]:
        yield from self._whole
        yield from self._readers

    def __len__(self) -> int:
        return len(self._whole) + len(self._readers)


def _open_safetensors(path: Path, files: ExitStack) -> dict[str, Any]:
    """Return the reader of a file for each of its tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        reader = files.enter_context(safe_open(path, "pt"))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"init_from: cannot read {path} ({error}); copy it again") from None
    return dict.fromkeys(reader.keys(), reader)


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Return the model of a checkpoint, whole, whatever ranks wrote it; its sums are compared."""
    try:
        return load_checked(path, pieces={}).model
    except Damage as damage:
        raise ConfigError(
            f"init_from: checkpoint {path} is damaged ({damage}); give an older one of its run"
        ) from None


def _read_torch_file(path: Path) -> dict[str, Tensor]:
    """Return the model's tensors in a file of torch.save, mapped and not copied where possible."""
    try:
        # Only a zip file can be mapped; the optimizer that nanoGPT also saves is then never read.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except Exception as error:  # torch raises RuntimeError, UnpicklingError and others
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"init_from: torch.load(weights_only=True) refuses {path} ({reason}); save only tensors"
        ) from None
    model = content.get("model", content)
    return {name: value for name, value in model.items() if isinstance(value, Tensor)}


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"
