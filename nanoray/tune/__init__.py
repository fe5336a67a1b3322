"""Find the fastest way to train a model here, by measuring. The package is also a function:

    nanoray.tune(main, config=None, budget_s=300.0, may=(), ray=True) -> Tuned

help(nanoray.tune.__call__) describes it.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


# As nanoray.launch: a module object cannot be called, but one of a subclass of ModuleType can.
class _TunePackage(types.ModuleType):
    def __call__(
        self,
        main: Callable[[Any], Any],
        config: Mapping[str, Any] | None = None,
        budget_s: float = 300.0,
        may: Sequence[str] = (),
        ray: bool = True,
    ) -> Any:
        """Find the fastest settings for the model of `main(run)`, with the same result.

        `main`, `config` and `ray` are those of nanoray.launch. `main` is called up to its `fit` for
        each block of steps that is measured. `budget_s`: the seconds after which the best one so
        far counts. `may`: what else may change, of masks, norms, precision and compression. Returns
        a Tuned: its `settings` go into the configuration of nanoray.launch. Raises NanorayError.
        """
        from nanoray.tune.command import tune_own

        return tune_own(main, config or {}, budget_s, may, ray)

    # A Ray task that calls nanoray.tune is pickled together with this module: by its name.
    def __reduce__(self) -> tuple[Callable[[str], types.ModuleType], tuple[str]]:
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _TunePackage
