"""Send a script's function to the ranks: it is pickled before any device is taken.

cloudpickle sends a function of the script itself, of a notebook or of `python -c` by value, with
what it refers to; a function of an imported module is sent by name, and each rank imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from nanoray.base.script_errors import one_line
from nanoray.errors import ConfigError


@dataclass(frozen=True)
class PackedScript:
    """A user's function that trains, as bytes."""

    name: str
    pickled: bytes
    given: frozenset[str]  # keys of the configuration that the user has set

    @classmethod
    def pack(cls, main: Callable[[Any], Any], given: frozenset[str]) -> PackedScript:
        """Pickle a function. Raises ConfigError for one that cannot leave this process."""
        name = getattr(main, "__qualname__", type(main).__name__)
        try:
            return cls(name, cloudpickle.dumps(main), given)
        except Exception as error:  # whatever the objects raise that it refers to
            raise ConfigError(
                f"{name} cannot be sent to the ranks ({one_line(error)}): it refers to an object of "
                "this process; make that object inside the function, or call nanoray.launch(..., "
                "ray=False)"
            ) from None

    def unpack(self) -> Callable[[Any], Any]:
        """Return the function, in a rank's process. Raises ConfigError if it cannot be imported."""
        try:
            main: Callable[[Any], Any] = cloudpickle.loads(self.pickled)
        except Exception as error:
            raise ConfigError(
                f"{self.name} cannot be loaded on this rank's node ({one_line(error)}): it is sent "
                "by the name of its module; put the module on storage that all nodes have in their "
                "PYTHONPATH, or give Ray a runtime_env with working_dir"
            ) from None
        return main
