"""From files to keys and values, and from those to a Config. layers.py merges several of them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nanoray.config.kube import Kube
from nanoray.config.neighbours import answer, normalise, table, translate_value
from nanoray.config.schema import Config
from nanoray.config.spellings import refuse_old
from nanoray.config.strict_yaml import YamlError, read_texts
from nanoray.errors import ConfigError

# Nested keys that other programs' configuration files use, and ours for them. The first word is the
# outer key.
NESTED = {
    "model.name": "model",
    "model.num_layers": "",  # resnet_depth or n_layer, by the model
    "training.batch_size": "micro_batch_size",  # of each rank, and a step has one of them
    "training.num_epochs": "num_epochs",
    "training.learning_rate": "lr",
    "training.optimizer": "optimizer",
}
OUTER = ("model", "training")
MAPPINGS = ("env", "kube", "expected_val_loss")  # keys of ours whose value is a mapping
LAYERS = {"resnet": "resnet_depth", "gpt": "n_layer"}  # what model.num_layers means


# ---- names ---------------------------------------------------------------------------------------

ALMOST = 0.75  # similarity of two keys above which one is taken for a typo of the other


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known one, or all of them."""
    # Of flags the dashes would count as letters in common
    names = {key.lstrip("-"): key for key in known}
    cutoff = ALMOST if name.startswith("-") else 0.6
    close = difflib.get_close_matches(name.lstrip("-"), names, n=1, cutoff=cutoff)
    if close:
        return f"did you mean {names[close[0]]}?"
    return f"known: {', '.join(names.values())}"


def refuse_unknown(name: str, known: Iterable[str], kind: str) -> None:
    """Raise ConfigError for an unknown name, with the closest known one."""
    raise ConfigError(f"unknown {kind} {name}; {did_you_mean(name, known)}")


def refuse_unknown_key(
    name: str, value: Any = None, known: Iterable[str] = Config.model_fields, mark: str = ""
) -> None:
    """Raise ConfigError for an unknown key, with ours if it is another program's name.

    mark: what stands before a key, `--` on a command line. value: what the user gave.
    """
    kind = "flag" if mark else "key"
    written = mark + name.removeprefix(mark)
    foreign = answer(name, value, mark)
    if foreign:
        raise ConfigError(f"unknown {kind} {written}; {foreign}")

    # A typo may be one of another program's name, which leads to ours, too
    ours = list(known)
    theirs = [row.theirs for row in table() if "." not in row.theirs]
    close = difflib.get_close_matches(normalise(name), [*ours, *theirs], 1, ALMOST)
    if close and close[0] not in ours:
        foreign = answer(close[0], value, mark)
        raise ConfigError(f"unknown {kind} {written}; did you mean {close[0]}? {foreign}")
    if close:
        raise ConfigError(f"unknown {kind} {written}; did you mean {mark}{close[0]}?")
    where = "those that --help all prints"
    if not mark:
        where = "the flags that `python -m nanoray.train --help all` prints, without their dashes"
    raise ConfigError(f"unknown {kind} {written}; known: {where}")


# ---- files ---------------------------------------------------------------------------------------


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys of a configuration's file, with nested ones translated.

    Raises ConfigError for a file that cannot be read, and for a nested key that is unknown.
    """
    # As in a file of Compose, a key x-NAME is the user's: it holds anchors, or notes
    values = {key: value for key, value in read_mapping(path).items() if key[:2] != "x-"}
    # A config.json has the fields of a Config, also one that an older version wrote
    if path.suffix != ".json":
        refuse_old(values)
    return flatten(values)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return a YAML or JSON file's mapping as it is; {} for an empty file.

    The values of YAML are text, lists, mappings and None. Raises ConfigError for a file that cannot
    be read, that is no mapping, or that has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_json = path.suffix == ".json"
        values = _parse_json(text) if is_json else read_texts(text, (*Config.model_fields, *OUTER))
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {path}: {error.strerror}; check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config file {path} is not text in UTF-8 (byte {error.start}); save it in that encoding"
        ) from None
    except YamlError as error:
        raise ConfigError(f"config file {path} {error}") from None

    # An empty file is a mapping without keys
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(
            f"config file {path} must hold `key: value` lines, not a {type(values).__name__}"
        )
    return values


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises YamlError, whose message names no file."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise YamlError("is not JSON: its lists and mappings are nested too deeply") from None
    except YamlError:  # a key that is there twice
        raise
    except ValueError as error:  # also of a number with thousands of digits
        raise YamlError(f"is not JSON: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise YamlError(
                f"has the key {key} twice, as {values[key]} and as {value}; drop one of the two"
            )
        values[key] = value
    return values


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate nested keys of a YAML file to our flat ones.

    They are `model: {name, num_layers}` and `training: {batch_size, ...}`. training.batch_size is
    that of each rank: a step has batch_size x ranks samples. Raises ConfigError for a nested key
    that is unknown, or given a second time as a flat one.
    """
    nested = {}
    flat = {}
    for key, value in values.items():
        if key in OUTER and isinstance(value, Mapping):
            nested[key] = value
        elif isinstance(value, Mapping) and value and key not in MAPPINGS:
            inner = str(next(iter(value)))
            _refuse_nested(key, inner, value[inner])
        else:
            flat[key] = value

    # The name of the model decides what its num_layers means
    model = str(nested.get("model", {}).get("name", "gpt"))

    for outer in OUTER:
        for inner, value in nested.get(outer, {}).items():
            name = f"{outer}.{inner}"
            if name not in NESTED:
                _refuse_nested(outer, str(inner), value)
            # Both spellings in one file could contradict each other
            ours = NESTED[name] or LAYERS.get(model, "n_layer")
            if ours in flat:
                raise ConfigError(
                    f"{name} = {value} and {ours} = {flat[ours]} say the same thing; drop one of "
                    "them"
                )
            flat[ours] = value

    # A step has one batch per rank, unless a flat key says otherwise
    per_rank = "batch_size" in nested.get("training", {})
    if per_rank and "global_batch_size" not in flat:
        flat.setdefault("grad_accum_steps", 1)
    return flat


def _refuse_nested(outer: str, inner: str, value: Any) -> None:
    """Raise ConfigError for a nested key that is none of ours."""
    name = f"{outer}.{inner}"
    is_ours = inner in Config.model_fields
    foreign = answer(name, value, "")
    if not foreign and not is_ours:
        foreign = answer(inner, value, "")
    if foreign:
        raise ConfigError(f"unknown key {name}; {foreign}, as a flat key")

    example = "momentum: 0.9"
    if is_ours:
        example = f"{inner}: {value}"
    known = [key for key in NESTED if key.startswith(f"{outer}.")]
    if known:
        raise ConfigError(
            f"unknown key {name}; known: {', '.join(known)}; write others as flat keys, e.g. "
            f"{example}"
        )
    if is_ours:
        raise ConfigError(f"unknown key {name}; write it as a flat key: {example}")
    if outer in Config.model_fields:
        raise ConfigError(f"unknown key {name}; {outer} has one value, without keys below it")
    refuse_unknown_key(outer)


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
        problems = []
        for item in error.errors():
            # Our own checks raise ValueError, and pydantic puts these words before it
            message = item["msg"].removeprefix("Value error, ")
            key = str(item["loc"][0]) if item["loc"] else ""
            value = values.get(key)
            if key == "kube" and len(item["loc"]) > 1:
                inner = str(item["loc"][1])
                key = f"kube.{inner}"
                value = item["input"]
                if item["type"] == "extra_forbidden":
                    message = f"unknown key; {did_you_mean(inner, Kube.model_fields)}"
            if item["type"] == "string_type":
                message += "; write it in quotes"
            here = translate_value(key, value)
            # AdamW is adamw
            if item["type"] == "literal_error" and f"'{str(value).lower()}'" in message:
                here = str(value).lower()
            if here:
                message += f"; write {here}"
            problems.append(f"{key} = {value!r}: {message}" if key else message)
        raise ConfigError("; ".join(dict.fromkeys(problems))) from None


def require_known(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key that the configuration does not have."""
    for key in values:
        if key not in Config.model_fields:
            refuse_unknown_key(key, values[key])
