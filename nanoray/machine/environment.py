"""This process's environment: variables for a while, and the folder in which it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment, and restore the old values at the end."""
    with restored(*values):
        os.environ.update(values)
        yield


@contextmanager
def restored(*names: str) -> Iterator[None]:
    """Restore these variables at the end, whatever has set them meanwhile."""
    old = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for key, value in old.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


def working_folder() -> str:
    """Return the folder in which this process runs; "" if it was removed.

    Ray removes a job's copy of the code when its driver has ended.
    """
    try:
        return os.getcwd()
    except OSError:
        return ""


def from_here(path: str) -> str:
    """Return a path below the working folder as a relative one."""
    here = working_folder()
    return path.removeprefix(here + os.sep) if here else path
