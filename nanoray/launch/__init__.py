"""The driver on Ray: place, start, watch, name the cause, recover.

nanoray.launch(main, config=None, ray=True) -> int

help(nanoray.launch.__call__) describes it.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


# A module object cannot be called, but one of a subclass of ModuleType can.
class _Package(types.ModuleType):
    def __call__(
        self, main: Callable[[Any], Any], config: Mapping[str, Any] | None = None, ray: bool = True
    ) -> int:
        """Call `main(run)` on every rank of a new run, and return the exit code.

        The ranks are actors on Ray. Under torchrun, srun or mpirun this process is one rank, and
        with `ray=False` it trains alone. `config` has keys of the configuration (`python -m nanoray.launch
        --help`), such as workers, global_batch_size, dp_mode or resume, and besides them
        dry_run and quiet. An error of nanoray is printed as one line, and its exit code returned.
        A Ray that the program is connected to is used, and stays connected.
        """
        from nanoray.launch.from_script import launch_from_script

        return launch_from_script(main, config or {}, ray)

    # A Ray task that calls nanoray.launch is pickled together with this module: by its name.
    def __reduce__(self) -> tuple[Callable[[str], types.ModuleType], tuple[str]]:
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
