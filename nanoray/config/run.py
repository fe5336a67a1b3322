"""Keys that name a run and place it on disk."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from nanoray.config.fields import Group, Integer, field
from nanoray.config.variables import parse_variables


class Run(Group):
    """The run: its name, its folder, what it continues, and the seed of all its random numbers."""

    # Where the run is written
    name: str = field("run", "run", pattern=r"^[A-Za-z0-9._-]+$")
    """name of the run, which ends its folder's name (default: the preset's or file's name)"""

    out_dir: str = field("runs", "run", min_length=1)
    """parent of the run folders; with several nodes it must be shared storage. A run that --resume
    PATH names stays where it is, unless this is given"""

    resume: str = field("none", "run", min_length=1)
    """none | auto (the newest run in out_dir with this name and recipe) | PATH of a run folder or
    of one checkpoint"""

    # What the processes of the ranks find in their environment
    env: dict[str, str | None] = field({}, "run")
    """environment variable of every rank, KEY=VALUE or KEY, as often as needed; in YAML a mapping.
    KEY alone has the value of this command's shell, which is written nowhere (for tokens and keys);
    a resume takes it from its own shell again"""

    # One seed for all random numbers: a resume repeats them from seed and step
    seed: Integer = field(1337, "run", ge=0, lt=2**63)
    """seed of the initial weights, of the sample order and of dropout"""

    @field_validator("env", mode="before")
    @classmethod
    def _parse_env(cls, value: Any) -> Any:
        """Turn the texts of flags into a mapping."""
        return parse_variables(value)
