"""Send what trains a script's model to the ranks: it is pickled before any device is taken.

cloudpickle sends a function of the script itself, of a notebook or of `python -c` by value, with
what it refers to; a function of an imported module is sent by name, and each rank imports it.

A function is not yet its script. So a rank first runs the script's file, as multiprocessing's spawn
does, under another name than `__main__`: what stands at its top takes effect, and processes that the
rank spawns find the script's classes by name. A notebook has no file.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ray import cloudpickle

from nanoray.errors import ConfigError
from nanoray.machine.script_errors import one_line
from nanoray.script.settings import BY_RANK, ReachedRun
from nanoray.train.program import Trains


@dataclass(frozen=True)
class ScriptFile:
    """The file of a running script, with its text: a node may not have it."""

    path: str
    text: bytes
    package: str | None  # of `python -m PACKAGE.SCRIPT`
    argv: list[str]

    @classmethod
    def of(cls, main: Callable[[Any], Any] | None) -> ScriptFile | None:
        """Return the file of the script that this process runs, if the function `main` is its own."""
        script = sys.modules["__main__"]
        path = getattr(script, "__file__", None)
        if _globals_of(main) is not vars(script) or path is None or not os.path.isfile(path):
            return None
        path = os.path.abspath(path)
        return cls(path, Path(path).read_bytes(), script.__package__, sys.argv)

    def run(self) -> str:
        """Run it in this process, but for its `__main__` block; return why it stopped, if it did."""
        module = ModuleType("__mp_main__")
        module.__file__ = self.path
        module.__package__ = self.package
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        sys.argv = self.argv
        process: Any = multiprocessing.current_process()
        process._inheriting = BY_RANK  # a run that it comes to is not started
        try:
            exec(compile(self.text, self.path, "exec"), vars(module))
        except ReachedRun:
            pass  # without a `__main__` block
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == self.path]
            where = f"{self.path}:{lines[-1]}" if lines else self.path
            return f"{where}: {one_line(error)}"
        finally:
            del process._inheriting
        return ""


def _globals_of(main: Any) -> dict[str, Any] | None:
    """Return the names of the module of a function, or of a partial one."""
    function = main.func if isinstance(main, partial) else main
    return getattr(function, "__globals__", None)


@dataclass(frozen=True)
class PickledScript:
    """A user's function that trains, as bytes of its program."""

    name: str
    module: str  # of the program's class: a process that waits for its task imports it beforehand
    pickled: bytes
    file: ScriptFile | None = None

    @classmethod
    def pack(cls, program: Trains) -> PickledScript:
        """Pickle a program. Raises ConfigError for a function that cannot leave this process."""
        name = program.name
        try:
            pickled = cloudpickle.dumps(program)
        except Exception as error:  # whatever the objects raise that it refers to
            raise ConfigError(
                f"{name} cannot be sent to the ranks ({one_line(error)}): it refers to an object of "
                "this process; make that object inside the function, or call nanoray.launch(..., "
                "ray=False)"
            ) from None
        return cls(name, type(program).__module__, pickled, ScriptFile.of(program.main))

    def unpack(self, note: Callable[[str], None]) -> Trains:
        """Return the program, in a rank's process. Raises ConfigError if it cannot be imported.

        note: shows a line where the script's file has not run to its end.
        """
        stopped = self.file.run() if self.file else ""
        if stopped:
            note(f"note    on {platform.node()} what stands below has not run: {stopped}")
        try:
            program: Trains = cloudpickle.loads(self.pickled)
        except Exception as error:
            raise ConfigError(
                f"{self.name} cannot be loaded on this rank's node ({one_line(error)}): it is sent "
                "by the name of its module; put the module on storage that all nodes have in their "
                "PYTHONPATH, or give Ray a runtime_env with working_dir"
            ) from None
        if self.file:
            # Pickle refuses a class or a function that is not the one of its name
            names = _globals_of(program.main) or {}
            own = {name: value for name, value in names.items() if not name.startswith("__")}
            vars(sys.modules["__main__"]).update(own)
        return program
