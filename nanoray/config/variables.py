"""Environment variables of the ranks: the key `env`, and the values that a shell has for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nanoray.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Each rank's own, which its launcher or its placement decides
OF_THE_RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
)
# Prefixes of variables that a process reads when it starts, and never again
READ_AT_START = ("LD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES")
THREADS = "OMP_NUM_THREADS"  # takes the place of a rank's share of CPUs as the number of threads


def parse_variables(value: Any) -> Any:
    """Return a mapping for `KEY=VALUE` or `KEY`, or a list of such; other values as they are.

    None as a value: that of the driver's shell. Raises ValueError.
    """
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        variables: dict[str, str | None] = {}
        for text in value:
            key, given, word = str(text).partition("=")
            variables[key] = word if given else None
        value = variables
    if not isinstance(value, Mapping):
        return value

    texts: dict[str, str | None] = {}
    for key, word in value.items():
        _require_name(str(key))
        texts[str(key)] = None if word is None else str(word)
    return texts


def _require_name(key: str) -> None:
    """Raise ValueError for what cannot be, or must not be, a variable of the user's."""
    if not NAME.fullmatch(key):
        raise ValueError(f"{key!r} is no name of a variable; write KEY=VALUE, or KEY alone")
    if key in OF_THE_RANK:
        raise ValueError(
            f"{key} differs from rank to rank, and nanoray sets it; drop it (device, workers and "
            "ray_address decide where ranks run)"
        )


def values_of(
    variables: Mapping[str, str | None], shell: Mapping[str, str], started: bool
) -> dict[str, str]:
    """Return the values of variables, those without one from the shell's environment.

    started: the ranks' processes have started already, as without Ray. Raises ConfigError.
    """
    values = {}
    for key, value in variables.items():
        if value is None and key not in shell:
            raise ConfigError(
                f"env {key} takes its value from the shell of this command, where it is not set; "
                f"export {key}, give {key}=VALUE, or drop it"
            )
        # Ray starts a process with the values that the configuration has, and its dashboard shows
        # them. Those of the shell are set a moment later.
        read_at_start = key.startswith(READ_AT_START)
        if started and read_at_start and value not in (None, shell.get(key)):
            raise ConfigError(
                f"env {key} would be ignored: a process reads it when it starts, and this one has "
                f"started; give it in the shell: {key}=... before the command"
            )
        if not started and read_at_start and value is None:
            raise ConfigError(
                f"env {key} without a value would be ignored: a process reads it when it starts; "
                f"give {key}=VALUE (the value is then in config.json and on Ray's dashboard)"
            )
        values[key] = shell[key] if value is None else value

    threads = values.get(THREADS, "1")
    if not threads.isdigit() or int(threads) < 1:
        raise ConfigError(f"env {THREADS} = {threads!r} is not a whole number above 0")
    return values


def explicit(variables: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables whose value is in the configuration, and so no secret."""
    return {key: value for key, value in variables.items() if value is not None}
