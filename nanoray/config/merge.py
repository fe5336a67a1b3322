"""From presets, YAML files and flags to settings.

Later layers win: field defaults, then the preset (`--preset`, or the key `preset` of FILE), then the
weights of `--init_from`, then `--config FILE`, then flags. The values of flags and of YAML files
arrive as text; pydantic converts them to the declared types or says why it cannot. So a word means
the same in a file and on a command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nanoray.config.conflicts import EXPERT_KEYS
from nanoray.config.load import read_yaml, refuse_unknown, require_known, run_folder_of
from nanoray.config.paths import expand_paths
from nanoray.config.run import name_of_file
from nanoray.config.schema import Config, changes_recipe
from nanoray.config.settings import FLAG, Settings
from nanoray.config.variables import parse_variables
from nanoray.config.weights import find
from nanoray.errors import ConfigError

PRESET_DIR = Path(__file__).resolve().parent / "presets"
DEFAULT_PRESET = "shakespeare-cpu"


def preset_names() -> list[str]:
    """Return the names of the presets, sorted."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.yaml"))


def _read_preset(preset: str) -> dict[str, Any]:
    if preset not in preset_names():
        refuse_unknown(preset, preset_names(), f"preset (in {PRESET_DIR})")
    return read_yaml(PRESET_DIR / f"{preset}.yaml")


# ---- layers --------------------------------------------------------------------------------------


def lay_over(lower: Mapping[str, Any], upper: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace values of `lower` by those of `upper`; max_steps and num_epochs replace each other.

    Raises ConfigError when `upper` has both; `where` names it in the message.
    """
    counts_epochs = str(upper.get("num_epochs") or 0) != "0"
    if counts_epochs and "max_steps" in upper:
        raise ConfigError(
            f"num_epochs = {upper['num_epochs']} and max_steps = {upper['max_steps']} in {where} "
            "contradict each other; drop one of them"
        )

    # The length of a schedule has two keys, of which the upper layer's one counts
    merged = dict(lower)
    if counts_epochs:
        merged.pop("max_steps", None)
    elif "max_steps" in upper:
        merged.pop("num_epochs", None)

    # A size of a micro batch replaces the search for one
    if "micro_batch_size" in upper:
        merged.pop("micro_batch_search", None)
    merged.update(upper)
    if "env" in lower and "env" in upper:
        merged["env"] = _merge_variables(lower["env"], upper["env"])
    return merged


def _merge_variables(lower: Any, upper: Any) -> Any:
    """Add the upper layer's variables to those of the lower one, which it may replace."""
    try:
        return {**parse_variables(lower), **parse_variables(upper)}
    except (TypeError, ValueError):
        return upper  # the validation of the configuration reports what is wrong


def load_config(
    file: str | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration of load_settings, for those who do not ask where it comes from."""
    return load_settings(file, preset, overrides).config


def load_settings(
    file: str | None = None,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    elsewhere: bool = False,
) -> Settings:
    """Merge preset, file and overrides. Without file and preset: the default preset.

    Variables in paths of the file are expanded; in `overrides` they have been.

    elsewhere: paths are those of another machine, which loads what comes out of this once more. So
    the weights of init_from are not looked at; sizes of a preset, which they replace, are left out.
    """
    flags = dict(overrides or {})
    of_preset: dict[str, Any] = {}
    of_file: dict[str, Any] = {}

    # A file alone replaces the default preset; it is laid over one that it names, or --preset
    if file:
        keys = read_yaml(Path(file))
        named = keys.pop("preset", None)
        preset = preset or named
        paths = keys if elsewhere else expand_paths(keys)
        of_file = {"name": name_of_file(file), **paths}
    if preset or not file:
        preset = str(preset or DEFAULT_PRESET)
        of_preset = {"name": preset, **_read_preset(preset)}

    # Weights fix sizes. They replace a preset's, and must agree with what the user gives
    merged = dict(of_preset)
    user = of_file | flags
    model = user.get("model", merged.get("model", "gpt"))
    if user.get("init_from") and elsewhere:
        merged = {
            key: value for key, value in merged.items() if key not in WEIGHT_KEYS + EXPERT_KEYS
        }
    elif user.get("init_from") and model == "gpt":
        merged, init_from = _lay_weights(merged, user)
        layer = flags if "init_from" in flags else of_file
        layer["init_from"] = init_from
    of_weights = {key: value for key, value in merged.items() if of_preset.get(key) != value}
    if file:
        merged = lay_over(_without_other_batch(merged, of_file), of_file, file)
    require_known(merged)

    merged = _without_other_batch(merged, flags)
    # The preset's loss is what its complete recipe reaches
    if any(changes_recipe(key) for key in flags):
        merged.pop("expected_val_loss", None)
    layers = [
        (f"preset {preset}", of_preset),
        (f"weights {user.get('init_from')}", of_weights),
        (f"file {file}", of_file),
        (FLAG, flags),
    ]
    return Settings.of(lay_over(merged, flags, "the flags"), layers, frozenset(flags))


def _without_other_batch(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return `lower` without the sizes of a batch that `upper` gives in another way.

    A batch per rank replaces a global one, and with it the recipe. A global one replaces
    accumulation.
    """
    kept = dict(lower)
    per_rank = "micro_batch_size" in upper and "grad_accum_steps" in upper
    if "global_batch_size" in upper:
        kept.pop("grad_accum_steps", None)
    elif per_rank:
        kept.pop("global_batch_size", None)
        kept.pop("expected_val_loss", None)
    return kept


# ---- weights -------------------------------------------------------------------------------------

# Keys that weights fix
WEIGHT_KEYS = (
    "n_layer",
    "n_head",
    "n_embd",
    "bias",
    "block_size",
    "gelu",
    "positions",
    "experts",
    "experts_per_token",
    "expert_hidden",
    "shared_experts",
)


def _lay_weights(lower: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return `lower` with the keys that the weights of init_from fix, and their absolute path.

    `given`: what the user gave, in a file or as flags. Raises ConfigError for a key in it that
    contradicts the weights.
    """
    run = run_folder_of(str(given.get("resume", "none")))
    if run is not None:
        # The run has its own weights by now, and its sizes are those that it began with
        began = read_yaml(run / "config.json")
        path = keep_init_from(began, given, run)
        return {**lower, **{key: began[key] for key in WEIGHT_KEYS if key in began}}, path

    weights = find(str(given["init_from"]))
    _refuse_contradictions(weights.keys, given, str(weights.path))
    merged = dict(lower)
    if not weights.keys["experts"]:
        for key in EXPERT_KEYS:
            merged.pop(key, None)
    merged.update(weights.keys)

    # Text becomes the ids that the weights were trained on. A folder of tokens has its own
    dataset = given.get("dataset", lower.get("dataset", "auto"))
    is_folder = Path(str(dataset)).expanduser().is_dir()
    kind = weights.tokenizer.get("kind")
    if kind in ("char", "byte", "gpt2") and not is_folder:
        merged["tokenizer"] = kind
    merged.pop("expected_val_loss", None)
    return merged, str(weights.path)


def keep_init_from(began: Mapping[str, Any], given: Mapping[str, Any], run: Path) -> str:
    """Return the init_from that a resumed run began with.

    began: its config.json. Raises ConfigError when `given` has another one: its weights would have
    no effect.
    """
    first = str(began.get("init_from") or "")
    if first != os.path.abspath(os.path.expanduser(str(given["init_from"]))):
        origin = f"began with those of {first}" if first else "began with random ones"
        raise ConfigError(
            f"init_from = {given['init_from']} would be ignored: the run {run} is resumed, which "
            f"has its own weights and {origin}; drop init_from, or drop resume"
        )
    return first


def _refuse_contradictions(keys: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a key that was given another value than the weights have."""
    for key, value in keys.items():
        if key not in given:
            continue
        try:
            wanted = _value_of(key, given[key])
        except ValidationError:
            continue  # the validation of the configuration reports it
        if key == "expert_hidden" and wanted == 0:
            wanted = 4 * keys["n_embd"]
        if wanted == value:
            continue

        # Positions can be left out, and rotary ones have no weights
        if key == "block_size":
            if wanted < value or keys["positions"] == "rotary":
                continue
            raise ConfigError(
                f"block_size = {wanted}, but the weights of init_from = {where} have {value} "
                f"positions; use {value} or less"
            )
        raise ConfigError(
            f"{key} = {wanted}, but the weights of init_from = {where} have {key} {value}; drop "
            f"{key}: it comes from the weights"
        )


def _value_of(key: str, given: Any) -> Any:
    """Return the value of a key for what a flag or a file gives. Raises ValidationError."""
    kind: Any = Config.model_fields[key].annotation
    return TypeAdapter(kind).validate_python(given)
