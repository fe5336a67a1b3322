"""Recognise what a path of `--init_from` is, and what its weights fix of the configuration."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.config.weights import gpt2
from nanoray.config.weights.outlines import Outline, Places, outline_of, read_json
from nanoray.errors import ConfigError

_STEP = re.compile(r"step_(\d{8,})")
# Files of a Hugging Face folder, in the order in which they are looked for
_ONE_FILE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"  # of several files
_GPT2_ROWS = (50257, 50304)  # the vocabulary of GPT-2, and as nanoGPT pads it

# Words that other tools take in the place of a path
_NOT_PATHS = {
    "scratch": "drop --init_from: without it the weights are random",
    "resume": "a run continues with --resume auto, or --resume RUN",
}
HUGGINGFACE = "Hugging Face GPT-2"
NANOGPT = "nanoGPT"
EXPORT = "nanoray's export"
CHECKPOINT = "nanoray's checkpoint"


@dataclass(frozen=True)
class Source:
    """Weights on disk, described without reading them."""

    path: Path  # of the folder or file, absolute; of a run: of its newest checkpoint
    kind: str
    keys: dict[str, Any]  # of the configuration, which the weights fix
    vocab_size: int
    rows: int  # of the token embedding
    tokenizer: dict[str, Any] = field(default_factory=dict)  # of nanoray's own; {}: not known
    # The names of our parameters in the files; of nanoray's own formats they are ours
    names: dict[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    places: Places = field(default_factory=dict)  # of the index of several files

    @property
    def conv1d(self) -> bool:
        """Whether matrices are kept as (inputs, outputs)."""
        return self.kind == HUGGINGFACE

    @property
    def tokenizer_kind(self) -> str:
        """The value of the key tokenizer that made the ids of these weights; "" if unknown."""
        if self.tokenizer:
            kind = str(self.tokenizer.get("kind"))
            return kind if kind in ("char", "byte", "gpt2") else ""
        return "gpt2" if self.vocab_size in _GPT2_ROWS else ""


def is_foreign(path: Path) -> bool:
    """Return whether a path is a file of weights, or a folder of another tool, and no run of ours."""
    if path.is_file():
        return True
    has_config = (path / "config.json").is_file() and not (path / "run.json").is_file()
    return has_config or (path / "ckpt.pt").is_file() or (path / "snapshots").is_dir()


def find(text: str) -> Source:
    """Return what the value of init_from names. Nothing is downloaded. Raises ConfigError."""
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if path.is_dir():
        return _of_folder(path)
    if path.is_file():
        return _of_file(path)
    raise ConfigError(_missing(text))


def _missing(text: str) -> str:
    """Return the message for a value that is no path: it may be a word or a name of another tool."""
    if text in _NOT_PATHS:
        return f"init_from = {text} is no file or folder; {_NOT_PATHS[text]}"
    missing = f"init_from = {text}: there is no such file or folder"
    if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", text) or text.endswith((".pt", ".safetensors")):
        return f"{missing}; check the path"
    # Names of the hub, such as gpt2 and openai-community/gpt2-xl, look like relative paths.
    name = text.rpartition("/")[2]
    hub = text if "/" in text else f"openai-community/{text}"
    for known in (hub, text):
        cached = _hub_cache() / f"models--{known.replace('/', '--')}"
        if (cached / "snapshots").is_dir():
            return f"{missing}, but Hugging Face's cache has it; give --init_from {cached}"
    return (
        f"{missing}, and nanoray downloads nothing; where there is internet, `hf download {hub} "
        f"--local-dir {name}` (of pip install huggingface_hub) makes the folder; then give "
        f"--init_from {name}"
    )


def _hub_cache() -> Path:
    """Return the folder in which Hugging Face's libraries keep what they have downloaded."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    folder = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expanduser(folder))


# ---- which kind ----------------------------------------------------------------------------------


def _of_folder(folder: Path) -> Source:
    # Nanoray's own. A step folder without a manifest was never finished.
    if (folder / "manifest.json").is_file():
        return _of_checkpoint(folder)
    for inner in (folder / "checkpoints", folder):
        steps = _steps_in(inner)
        if steps:
            return _of_checkpoint(steps[-1])
    if (folder / "run.json").is_file() or _STEP.fullmatch(folder.name):
        raise ConfigError(f"init_from: {folder} has no complete checkpoint; give another run")

    # Other tools'.
    if (folder / "snapshots").is_dir():
        return _of_folder(_snapshot(folder))
    if (folder / "config.json").is_file():
        return _of_huggingface(folder)
    if (folder / "ckpt.pt").is_file():
        return _of_nanogpt(folder / "ckpt.pt")
    exported = sorted(folder.glob("*.safetensors"))
    if len(exported) == 1:
        return _of_safetensors(exported[0])
    raise ConfigError(
        f"init_from: {folder} contains no weights: looked for checkpoints/step_*, config.json (a "
        "Hugging Face folder), ckpt.pt (nanoGPT) and one .safetensors file; give another folder"
    )


def _snapshot(folder: Path) -> Path:
    """Return the files of a model in Hugging Face's cache: of its main branch, or the only ones."""
    snapshots = sorted((folder / "snapshots").iterdir())
    main = folder / "refs" / "main"
    if main.is_file():
        commit = main.read_text(encoding="utf-8").strip()
        if (folder / "snapshots" / commit).is_dir():
            return folder / "snapshots" / commit
    if len(snapshots) != 1:
        raise ConfigError(
            f"init_from: {folder} has {len(snapshots)} versions in snapshots/; give one of them"
        )
    return snapshots[0]


def _of_file(path: Path) -> Source:
    # A file of a folder that says more than the file does stands for the folder.
    if path.suffix == ".json":
        return _of_folder(path.parent)
    if path.suffix == ".safetensors":
        return _of_safetensors(path)
    if path.suffix == ".bin" and (path.parent / "config.json").is_file():
        return _of_huggingface(path.parent)
    return _of_nanogpt(path)


def _of_safetensors(path: Path) -> Source:
    outline = outline_of(path)
    if "model_shape" in outline.rest:
        return _of_export(path, outline)
    if (path.parent / "manifest.json").is_file():
        return _of_checkpoint(path.parent)
    if (path.parent / "config.json").is_file():
        return _of_huggingface(path.parent)
    raise ConfigError(
        f"init_from: {path} does not say what its model is: no model_shape in its header, as "
        "`nanoray checkpoint export` writes it, and no config.json beside it; put it beside one"
    )


def _steps_in(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, the newest last."""
    steps = {}
    try:
        for path in folder.iterdir():
            match = _STEP.fullmatch(path.name)
            if match and (path / "manifest.json").is_file():
                steps[path] = int(match[1])
    except OSError:
        return []
    return sorted(steps, key=lambda path: steps[path])


# ---- GPT-2 of other tools ------------------------------------------------------------------------


def _of_huggingface(folder: Path) -> Source:
    config = folder / "config.json"
    keys, vocab_size = gpt2.keys_of_huggingface(read_json(config), str(config))
    files, places = _files_of(folder)
    found = outline_of(*files, places=places).tensors
    weights = gpt2.weights_of(keys, vocab_size, conv1d=True)
    names = gpt2.check_tensors(found, weights, str(folder))
    whole = _complete(keys)
    return Source(folder, HUGGINGFACE, whole, vocab_size, vocab_size, {}, names, files, places)


def _files_of(folder: Path) -> tuple[tuple[Path, ...], Places]:
    """Return the files of weights in a Hugging Face folder, and which tensors are in which."""
    for name in _ONE_FILE:
        if (folder / name).is_file():
            return (folder / name,), {}
        if (folder / f"{name}{_INDEX}").is_file():
            places = _places_of(folder, folder / f"{name}{_INDEX}")
            return tuple(folder / file for file in sorted(set(places.values()))), places
    raise ConfigError(
        f"init_from: {folder} has neither {' nor '.join(_ONE_FILE)}; download the folder again, "
        "with its weights"
    )


def _places_of(folder: Path, index: Path) -> Places:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ConfigError(f"init_from: {index} has no weight_map; download it again")
    # A name with a folder in it could lead out of this one.
    places = {tensor: Path(str(file)).name for tensor, file in places.items()}
    missing = [file for file in sorted(set(places.values())) if not (folder / file).is_file()]
    if missing:
        raise ConfigError(
            f"init_from: {folder} has no {missing[0]}, which its index lists; download the folder "
            "again"
        )
    return places


def _of_nanogpt(path: Path) -> Source:
    outline = outline_of(path)
    keys, vocab_size = gpt2.keys_of_nanogpt(outline.rest.get("model_args"), str(path))
    weights = gpt2.weights_of(keys, vocab_size, conv1d=False)
    names = gpt2.check_tensors(outline.tensors, weights, str(path))
    return Source(path, NANOGPT, _complete(keys), vocab_size, vocab_size, {}, names, (path,))


def _complete(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a plain GPT-2: those that its files say, and what it has not."""
    return {**keys, "positions": "learned", "experts": 0}


# ---- nanoray's own -------------------------------------------------------------------------------


def _of_checkpoint(folder: Path) -> Source:
    meta = _mapping(read_json(folder / "state.json").get("meta"))
    dataset = _mapping(meta.get("dataset"))
    if dataset.get("kind", "tokens") != "tokens":
        raise ConfigError(
            f"init_from: {folder} is a checkpoint of another model than a gpt; give one of a gpt"
        )
    tokenizer = _mapping(dataset.get("tokenizer"))
    return _own(folder, CHECKPOINT, meta.get("model_shape"), tokenizer, ())


def _of_export(path: Path, outline: Outline) -> Source:
    try:
        shape = json.loads(outline.rest["model_shape"])
        tokenizer = json.loads(outline.rest.get("tokenizer", "{}"))
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"init_from: the header of {path} is not as nanoray writes it; export it again"
        ) from None
    return _own(path, EXPORT, shape, _mapping(tokenizer), (path,))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _own(
    path: Path, kind: str, shape: Any, tokenizer: dict[str, Any], files: tuple[Path, ...]
) -> Source:
    """Return a source of nanoray's own format, from the shape that it contains."""
    try:
        keys = {key: shape[key] for key in ("n_layer", "n_head", "n_embd", "block_size", "bias")}
        vocab_size = int(shape["vocab_size"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"init_from: {path} has no model_shape of a gpt; give the weights of a gpt"
        ) from None
    keys["gelu"] = shape.get("gelu", "exact")
    keys["positions"] = "rotary" if shape.get("rotary") else "learned"
    keys["experts"] = shape.get("experts", 0)
    if keys["experts"]:
        for key in ("experts_per_token", "expert_hidden", "shared_experts"):
            keys[key] = shape[key]
    return Source(path, kind, keys, vocab_size, vocab_size, tokenizer, {}, files)
