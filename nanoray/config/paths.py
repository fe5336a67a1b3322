"""`~`, `$NAME` and `${NAME}` in the paths of a configuration.

A shell expands them in a word of its own, but not in a YAML file, in a script's dict, or in
`--out_dir=~/x`. So the command that opens the run expands them, once and in its own environment: the
driver on Ray, rank 0 under torchrun. Everything after that, config.json too, has the plain path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nanoray.config.keys import Keys
from nanoray.errors import ConfigError
from nanoray.machine.storage.url import without_credentials


def _path_keys() -> tuple[str, ...]:
    """Return the keys that fields.py's `path` has made."""
    keys = []
    for key, info in Keys.model_fields.items():
        extra = info.json_schema_extra
        if isinstance(extra, dict) and extra.get("path"):
            keys.append(key)
    return tuple(keys)


PATH_KEYS = _path_keys()


def expand_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of keys with `~` and variables of each path expanded. Raises ConfigError."""
    expanded = dict(values)
    for key in PATH_KEYS:
        if isinstance(values.get(key), (str, os.PathLike)):
            expanded[key] = expand(key, os.fspath(values[key]))
    return expanded


def expand(key: str, text: str) -> str:
    """Return the value of one key with `~` and variables expanded. Raises ConfigError."""
    path = os.path.expandvars(os.path.expanduser(text))
    # What is not expanded would become a folder of that very name
    if "$" in path or path.startswith("~"):
        raise ConfigError(
            f"{key} = {without_credentials(text)}: there is no such variable or user in the "
            "environment of this command (~, $NAME and ${NAME} are expanded); export it, or write "
            "the path itself"
        )
    return path
