"""From files to keys and values, and from those to a Config. merge.py merges several of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from nanoray.config.schema import Config
from nanoray.config.strict_yaml import read_file
from nanoray.errors import ConfigError

# Keys of files that other programs read, too, and ours for them. training.batch_size is that of each
# rank
NESTED = {
    "model.name": "model",
    "model.num_layers": "n_layer",  # resnet_depth of a resnet
    "training.batch_size": "micro_batch_size",
    "training.num_epochs": "num_epochs",
    "training.learning_rate": "lr",
    "training.optimizer": "optimizer",
}
MAPPINGS = ("env", "kube", "expected_val_loss")  # keys of ours whose value is a mapping
NAMES = Path(__file__).with_name("names")


# ---- names ---------------------------------------------------------------------------------------

ALMOST = 0.75  # similarity of two names above which one is taken for a typo of the other


@cache
def read_names(file: str) -> dict[str, Any]:
    """Return what a file of names/ contains. It is read when a name is asked for."""
    content: dict[str, Any] = yaml.safe_load((NAMES / file).read_text(encoding="utf-8"))
    return content


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known one, or all of them."""
    # Of flags the dashes would count as letters in common
    names = {key.lstrip("-"): key for key in known}
    close = difflib.get_close_matches(name.lstrip("-"), names, 1, ALMOST)
    if close:
        return f"did you mean {names[close[0]]}?"
    return f"known: {', '.join(names.values())}"


def refuse_unknown(name: str, known: Iterable[str], kind: str) -> None:
    """Raise ConfigError for an unknown name, with the closest known one."""
    raise ConfigError(f"unknown {kind} {name}; {did_you_mean(name, known)}")


def refuse_unknown_key(
    name: str,
    known: Collection[str] = Config.model_fields,
    page: str = "nanoray train --help all",
) -> None:
    """Raise ConfigError for an unknown key, or an unknown flag if the name begins with dashes.

    The hint is the closest of our keys and of the names that other programs have for them.
    """
    kind, mark = ("flag", "--") if name.startswith("-") else ("key", "")
    # Without the section that it has in a file of torchtitan
    word = name.lstrip("-").replace("-", "_").lower().rpartition(".")[2]
    others = read_names("others.yaml").items()
    ours = {theirs: key for theirs, key in others if key.split()[0] in known}
    ours |= {key: key for key in known}
    close = difflib.get_close_matches(word, ours, 1, ALMOST)
    hint = f"`{page}` prints those that exist"
    if close:
        hint = f"did you mean {mark}{ours[close[0]]}?"
    raise ConfigError(f"unknown {kind} {name}; {hint}")


# ---- files ---------------------------------------------------------------------------------------


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys of a configuration's file, with nested ones translated. Raises ConfigError."""
    return flatten(read_mapping(path))


def read_mapping(path: Path) -> dict[str, Any]:
    """Return a YAML or JSON file's mapping as it is; {} for an empty file.

    The values of YAML are text, lists, mappings and None. Raises ConfigError for a file that cannot
    be read, that is no mapping, or that has a key twice.
    """
    values = read_file(path)
    # An empty file is a mapping without keys
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(
            f"config file {path} must contain `key: value` lines, not a {type(values).__name__}"
        )
    return values


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate nested keys to our flat ones: `model: {name}` and `training: {batch_size, ...}`.

    Other nested keys stay, as `outer.inner`, which no key of ours is. Raises ConfigError for two
    keys that mean the same one of ours.
    """
    named = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value and key not in MAPPINGS:
            named.update({f"{key}.{inner}": inner_value for inner, inner_value in value.items()})
        else:
            named[key] = value

    flat: dict[str, Any] = {}
    is_resnet = "resnet" in (named.get("model"), named.get("model.name"))
    for name, value in named.items():
        key = NESTED.get(name, name)
        if name == "model.num_layers" and is_resnet:
            key = "resnet_depth"
        # Both spellings in one file could contradict each other
        if key in flat:
            raise ConfigError(
                f"{name} = {value} and {key} = {flat[key]} are the same key; drop one of them"
            )
        flat[key] = value

    # A step has one batch per rank, unless a flat key says otherwise
    if "training.batch_size" in named and "global_batch_size" not in flat:
        flat.setdefault("grad_accum_steps", 1)
    return flat


# ---- validation ----------------------------------------------------------------------------------


def run_folder_of(resume: str) -> Path | None:
    """Return the folder of the run that a value of `resume` names; None for a word, or no run.

    The value is the path of the run's folder, or of one of its checkpoints.
    """
    if resume in ("none", "auto"):
        return None
    path = Path(resume).expanduser().resolve()
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.json").is_file():
            return folder
    return None


def make_config(values: dict[str, Any]) -> Config:
    """Validate `values` into a Config.

    A run that is resumed stays beside the runs where it is, unless `values` have an out_dir. Raises
    ConfigError, in one line with key and value, where pydantic reports an error.
    """
    require_known(values)
    resumed = run_folder_of(str(values.get("resume", "none")))
    if resumed and "out_dir" not in values:
        values = values | {"out_dir": str(resumed.parent)}
    try:
        return Config(**values)
    except ValidationError as error:
        # One line for all wrong keys, so that a user mends them in one go
        problems = [_problem(item) for item in error.errors()]
        raise ConfigError("; ".join(dict.fromkeys(problems))) from None


def _problem(item: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors as a line: the key, its value, and what is wrong."""
    # Our own checks raise ValueError, and pydantic puts these words before it
    message = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return message
    key = str(item["loc"][0])
    # Values of variables may be secrets
    if key == "env":
        return f"env: {message}"
    if key == "kube":
        key = ".".join(str(part) for part in item["loc"])
    return f"{key} = {item['input']!r}: {message}"


def require_known(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key that the configuration does not have."""
    for key in values:
        if key not in Config.model_fields:
            refuse_unknown_key(key)
