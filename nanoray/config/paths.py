"""`~`, `$NAME` and `${NAME}` in the paths of a configuration.

A shell expands them in a word of its own, but not in a YAML file, in a script's dict, or in
`--out_dir=~/x`. So the command that opens the run expands them, once and in its own environment: the
driver on Ray, rank 0 under torchrun. Everything after that, config.json too, has the plain path.

What else looks like a variable (`${oc.env:NAME}`, `$(command)`) is refused by name, because a folder
of that very name would be made. `$$` is a dollar sign.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from nanoray.base.storage.url import without_credentials
from nanoray.config.keys import Keys
from nanoray.config.variables import NAME
from nanoray.errors import ConfigError


def _path_keys() -> tuple[str, ...]:
    """Return the keys that fields.py's `path` has made."""
    keys = []
    for key, info in Keys.model_fields.items():
        extra = info.json_schema_extra
        if isinstance(extra, dict) and extra.get("path"):
            keys.append(key)
    return tuple(keys)


PATH_KEYS = _path_keys()

# In this order: a dollar sign, ${...}, what a shell would run, and a name
_MARK = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<braces>[^}]*)(?P<end>\}?)|\(.*|(?P<name>[A-Za-z_][A-Za-z0-9_]*))"
)
# A name within ${...} of another program: ${oc.env:NAME,default}, ${env:NAME}, ${NAME:-default}
_OF_OTHERS = re.compile(r"(?:(?:oc\.)?env:)?([A-Za-z_][A-Za-z0-9_]*)(?:$|,|:[-=?+])")


def expand_paths(
    values: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return values of keys with `~` and variables of each path expanded.

    environment: None for paths of another machine, which are only looked at and stay as they are.
    Raises ConfigError.
    """
    expanded = dict(values)
    for key in PATH_KEYS:
        value = values.get(key)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str):
            expanded[key] = expand(key, value, environment)
    return expanded


def expand(key: str, text: str, environment: Mapping[str, str] | None) -> str:
    """Return the value of one key with `~` and variables expanded; see expand_paths."""
    shown = f"{key} = {without_credentials(text)}"

    def replace(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        name = match["name"] or match["braces"]
        if not name or not NAME.fullmatch(name) or match["end"] == "":
            raise ConfigError(_refusal(shown, match))
        if environment is not None and not environment.get(name):
            state = "empty" if name in environment else "not set"
            raise ConfigError(
                f"{shown}: the variable {name} is {state} in the environment of this command; "
                f"export {name}, or write the path itself"
            )
        return (environment or {}).get(name, "")

    expanded = _MARK.sub(replace, text)
    if environment is None:
        return text
    # Only a ~ that stands in the text: one in a variable's value is a name, as in a shell
    if text.startswith("~"):
        expanded = _from_home(key, expanded)
    if "://" not in expanded:
        _require_possible(key, expanded)
    return expanded


def _require_possible(key: str, path: str) -> None:
    """Raise ConfigError for a text that no file of this machine can have as its name."""
    if "\0" in path:
        raise ConfigError(f"{key} = {path!r}: no path has a NUL character; drop it")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{key} = {path!a}: a file name in this locale's encoding, {error.encoding}, cannot have "
            f"{path[error.start]!a}; set LC_ALL=C.UTF-8 or PYTHONUTF8=1, or give another path"
        ) from None


def _from_home(key: str, path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded == path:
        user = path.partition("/")[0]
        reason = f"there is no user {user[1:]} here" if user[1:] else "this user has no home folder"
        raise ConfigError(
            f"{key} = {path}: {reason}; write the path itself, or ./{user} for a folder of that name"
        )
    return expanded


def _refusal(shown: str, match: re.Match[str]) -> str:
    """Return the message for what looks like a variable and is none."""
    mark = match[0]
    meant = _OF_OTHERS.match(match["braces"] or "")
    remedy = "write the path itself"
    if meant:
        remedy = f"write ${{{meant[1]}}}, or the path itself"
    return (
        f"{shown}: {mark} is not expanded here, only ~, $NAME and ${{NAME}} are; {remedy} ($$ "
        "is a dollar sign)"
    )
