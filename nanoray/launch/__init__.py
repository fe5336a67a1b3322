"""Train on Ray. The package is also a function: `nanoray.launch(main, config)` runs a script."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


# A module object cannot be called, but one of a subclass of ModuleType can.
class _Package(types.ModuleType):
    def __call__(
        self, main: Callable[[Any], Any], config: Mapping[str, Any] | None = None, ray: bool = True
    ) -> int:
        """Call `main(run)` on every rank of a new run; return the exit code. See launch.own."""
        from nanoray.launch.own import launch_own

        return launch_own(main, config or {}, ray)


sys.modules[__name__].__class__ = _Package
