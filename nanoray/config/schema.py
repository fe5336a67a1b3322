"""The configuration of a run: `Config` is all keys, checked.

YAML keys, command line flags, help texts and config.json all come from it. A file of this folder
has the keys of one group and what is wrong within it; conflicts.py has what does not go together;
load.py merges preset, file and flags.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import model_validator

from nanoray.config.conflicts import first
from nanoray.config.keys import GROUPS, Keys

# Overriding a key of these groups changes the recipe, so the preset's expected loss is void. The
# keys below them keep it: the same mathematics, computed in other portions or by other kernels.
RECIPE_GROUPS = ("data", "model", "batch", "optim")
KEEPS_RECIPE = frozenset(
    {
        "dataset",
        "data_dir",
        "micro_batch_size",
        "micro_batch_search",
        "grad_accum_steps",
        "compile",
        "attention",
        "loss_chunk",
    }
)


class Config(Keys):
    """The configuration of a run, complete and immutable: each key is a flag of the commands, too.

    `Config(lr=1e-3, ...)` takes the keys by name. Raises pydantic's ValidationError for an unknown
    key or a value out of range, and for two that do not go together.
    """

    @model_validator(mode="before")
    @classmethod
    def _read_auto(cls, values: Any) -> Any:
        """Turn `micro_batch_size: auto` into a field of its own, so that the size is a number."""
        if isinstance(values, dict) and values.get("micro_batch_size") == "auto":
            return {**values, "micro_batch_size": 0, "micro_batch_search": True}
        return values

    @model_validator(mode="after")
    def _check(self) -> Config:
        # By class: each group has a method of this name, and self.check() would find only one
        for group in GROUPS:
            group.check(self)
        problem = first(self)
        if problem:
            raise ValueError(problem)
        return self

    def to_json(self) -> str:
        """Return the configuration as JSON text; `--config` reads it back."""
        return json.dumps(self.model_dump(), indent=2) + "\n"


def field_extra(key: str) -> dict[str, Any]:
    """Return what a key's field declares beside its type: its group, and whether it is a flag."""
    extra = Config.model_fields[key].json_schema_extra
    if not isinstance(extra, dict):
        return {}
    return extra


def changes_recipe(key: str) -> bool:
    """Return whether another value of a key makes another experiment."""
    if key in KEEPS_RECIPE or key not in Config.model_fields:
        return False
    return field_extra(key)["group"] in RECIPE_GROUPS


def recipe_of(config: Config) -> dict[str, Any]:
    """Return the keys and values that make two runs the same experiment.

    The length of a run, logging, devices and the number of ranks are no part of it.
    """
    keys = {key for key in Config.model_fields if changes_recipe(key)}
    keys -= {"max_steps", "num_epochs", "precision"}
    keys |= {"name", "seed"}
    return {key: value for key, value in config.model_dump().items() if key in keys}
