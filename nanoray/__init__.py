"""Train PyTorch models on many accelerators with a hand-written loop on Ray, nothing hidden.

    import nanoray

    def main(run: nanoray.Run) -> None:
        engine = nanoray.RuntimeEngine(model, optimizer, run, loss_fn=loss_fn)
        engine.fit(train_data, val_data, steps=1000)

    nanoray.launch(main, {"global_batch_size": 96, "workers": 2})

launch          call a function on every rank of a new run: on Ray, under torchrun, or alone
tune            find the fastest settings for such a function
RuntimeEngine   train a module: its `fit` is the loop
Run             one rank's part of a run, as the function receives it
Config          the configuration; each key is a flag of `python -m nanoray.launch`, too
Counted         a batch with its number of samples, which its tensors do not show
Weighted        a loss as a sum and its weight, in place of a mean
Callback        hooks that a script overrides
NanorayError    the base class of what nanoray raises on purpose; nanoray.errors has the others

`import nanoray` imports neither torch nor Ray: a name is imported when it is first used. Types are
in __init__.pyi. docs/api.md is the reference.
"""

from typing import Any

__version__ = "0.1.0"

# The public names, and the modules that define them. Most of those import torch.
_EXPORTED = {
    "Callback": "nanoray.script.callbacks",
    "Config": "nanoray.config",
    "Counted": "nanoray.script.data.batch",
    "NanorayError": "nanoray.errors",
    "Run": "nanoray.script.run",
    "RuntimeEngine": "nanoray.script.engine",
    "Weighted": "nanoray.models.weighted",
    "tune": "nanoray.lab.tune.command",
}

# A literal, so that editors and type checkers can read it; `launch` is a package that is also
# a function.
__all__ = [
    "Callback",
    "Config",
    "Counted",
    "NanorayError",
    "Run",
    "RuntimeEngine",
    "Weighted",
    "__version__",
    "launch",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    from importlib import import_module

    if name == "launch":
        return import_module("nanoray.launch")
    if name not in _EXPORTED:
        raise AttributeError(f"module 'nanoray' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTED[name]), name)
    # The next use does not come here again.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names also before their first use, for editors and `help`."""
    return sorted({*globals(), *__all__})
