"""Send what trains a script's model to the ranks: it is pickled before any device is taken.

cloudpickle sends a function of the script itself, of a notebook or of `python -c` by value, with
what it refers to; a function of an imported module is sent by name, and each rank imports it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray import cloudpickle

from nanoray.base.script_errors import one_line
from nanoray.errors import ConfigError
from nanoray.train.program import Trains


@dataclass(frozen=True)
class PackedScript:
    """A user's function that trains, as bytes of its program."""

    name: str
    module: str  # of the program's class: a process that waits for its task imports it beforehand
    pickled: bytes

    @classmethod
    def pack(cls, program: Trains) -> PackedScript:
        """Pickle a program. Raises ConfigError for a function that cannot leave this process."""
        name = program.name
        try:
            return cls(name, type(program).__module__, cloudpickle.dumps(program))
        except Exception as error:  # whatever the objects raise that it refers to
            raise ConfigError(
                f"{name} cannot be sent to the ranks ({one_line(error)}): it refers to an object of "
                "this process; make that object inside the function, or call nanoray.launch(..., "
                "ray=False)"
            ) from None

    def unpack(self) -> Trains:
        """Return the program, in a rank's process. Raises ConfigError if it cannot be imported."""
        try:
            program: Trains = cloudpickle.loads(self.pickled)
        except Exception as error:
            raise ConfigError(
                f"{self.name} cannot be loaded on this rank's node ({one_line(error)}): it is sent "
                "by the name of its module; put the module on storage that all nodes have in their "
                "PYTHONPATH, or give Ray a runtime_env with working_dir"
            ) from None
        return program
