"""Keys that name a run and place it on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import ValidationInfo, WithJsonSchema, field_validator

from nanoray.config.fields import Group, Integer, field, path
from nanoray.config.variables import parse_variables
from nanoray.errors import ConfigError
from nanoray.machine.storage.url import is_url, problem_of

# A file system takes names of 255 bytes. A run's folder has the time before its name, and a number
# after it where several runs begin in one second
LONGEST_NAME = 255 - len("2026-11-21_101500_") - len("_999")


def name_of_file(path: str) -> str:
    """Return the name of a run that has that of a file, in the characters that a name may have."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).strip("-")
    return plain[:LONGEST_NAME] or "run"


class RunKeys(Group):
    """The run: its name, its folder, what it continues, and the seed of all its random numbers."""

    # Where the run is written
    name: str = field("run", "run", pattern=r"^[A-Za-z0-9._-]+$", max_length=LONGEST_NAME)
    """name of the run, which ends its folder's name (default: the preset's or file's name)"""

    out_dir: str = path("runs", "run", min_length=1)
    """parent of the run folders; with several nodes it must be shared storage. A run that --resume
    PATH names stays where it is, unless this is given"""

    resume: str = path("none", "run", min_length=1)
    """none | auto (the newest run with this name and recipe in out_dir, or at --upload) | PATH or
    URL of a run or of one checkpoint"""

    # A copy in object storage
    upload: str = path("", "run")
    """URL below which a process of its own copies each checkpoint and the run's records:
    s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER. Its failures end no run; credentials
    come from the environment or the machine's role"""

    upload_timeout: float = field(300.0, "run", ge=0)
    """seconds that the end of a run waits for the rest of --upload; Ctrl-C ends the wait. Then a
    line has the command that sends it"""

    # What the processes of the ranks find in their environment
    env: Annotated[
        dict[str, str | None],
        # A number of YAML is a text here; of flags and in a list the texts are KEY=VALUE
        WithJsonSchema(
            {
                "type": ["object", "array"],
                "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
                "items": {"type": "string"},
            }
        ),
    ] = field({}, "run")
    """environment variable of every rank, KEY=VALUE or KEY, as often as needed; in YAML a mapping.
    KEY alone takes this shell's value, for tokens: it is written nowhere"""

    # One seed for all random numbers: a resume repeats them from seed and step
    seed: Integer = field(1337, "run", ge=0, lt=2**63)
    """seed of the initial weights, of the sample order and of dropout"""

    @field_validator("upload", "resume", mode="before")
    @classmethod
    def _refuse_urls(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ConfigError for what is no URL of object storage.

        No ValueError: pydantic would print the value, which may contain credentials.
        """
        text = str(value)
        is_checked = is_url(text) or (info.field_name == "upload" and text)
        problem = problem_of(str(info.field_name), text) if is_checked else ""
        if problem:
            raise ConfigError(problem)
        return value

    @field_validator("env", mode="before")
    @classmethod
    def _parse_env(cls, value: Any) -> Any:
        """Turn the texts of flags into a mapping."""
        return parse_variables(value)
