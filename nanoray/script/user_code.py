"""One wrapper around what a script has written: an error of its code ends the run in one line.

    the forward of Net, called with a float32 tensor of shape (12, 4), failed before step 1:
    ValueError: this model is unhappy; mend it, or the data
      File "train.py", line 12, in forward
        raise ValueError("this model is unhappy")

So what Python or torch refuses by itself needs no check: the line names the part of the script, the
error speaks for itself, and the script's own frames follow. As a ConfigError it is not tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nanoray.errors import ConfigError, DataError, NanorayError
from nanoray.faults.cause import is_collective_error, is_out_of_memory
from nanoray.machine.script_errors import shown


@contextmanager
def user_code(what: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError for whatever the script's code inside raises. `what`: its part, in words."""
    try:
        yield
    except (ConfigError, DataError):
        raise  # it says all
    except KeyboardInterrupt:
        raise  # the user has pressed Ctrl-C twice
    except BaseException as error:  # also sys.exit(), or asyncio.CancelledError
        line, newline, frames = shown(error).partition("\n")
        text = f"{what} failed before step 1: {line}; {remedy}{newline}{frames}"
        raise ConfigError(text) from error


@contextmanager
def first_batch(name: str) -> Iterator[None]:
    """Raise ConfigError where the model `name` of a script fails in the warm-up, which no retry mends.

    A lack of memory, and the loss of another rank, stay what they are.
    """
    try:
        yield
    except Exception as error:
        known = isinstance(error, NanorayError)
        if known or is_out_of_memory(error) or is_collective_error(error):
            raise
        line, newline, frames = shown(error).partition("\n")
        raise ConfigError(
            f"{name} fails on its first batch: {line}; mend what the traceback names{newline}{frames}"
        ) from error


def type_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def describe(value: Any) -> str:
    """Return what a value is, in a few words: its type, and the shape or what is in it."""
    if isinstance(value, Tensor):
        return f"a {type_name(value.dtype)} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        parts = ", ".join(describe(each) for each in value[:3])
        return f"a {type(value).__name__} of {parts or 'nothing'}"
    return f"a {type(value).__name__}"
