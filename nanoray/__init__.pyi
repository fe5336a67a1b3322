"""The types of the public names, which `__init__.py` imports on their first use."""

from collections.abc import Callable, Mapping
from typing import Any

from nanoray.config import Config as Config
from nanoray.errors import NanorayError as NanorayError
from nanoray.lab.tune.command import tune as tune
from nanoray.models.weighted import Weighted as Weighted
from nanoray.script.callbacks import Callback as Callback
from nanoray.script.data.batch import Counted as Counted
from nanoray.script.engine import RuntimeEngine as RuntimeEngine
from nanoray.script.run import Run as Run

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

__version__: str

def launch(
    main: Callable[[Run], Any], config: Mapping[str, Any] | None = None, ray: bool = True
) -> int:
    """Call `main(run)` on every rank of a new run, and return the exit code.

    The ranks are actors on Ray. Under torchrun, srun or mpirun this process is one rank, and
    with `ray=False` it trains alone. `config` has keys of the configuration (`python -m nanoray.launch
    --help`), such as workers, global_batch_size, dp_mode or resume, and besides them
    dry_run and quiet. An error of nanoray is printed as one line, and its exit code returned.
    A Ray that the program is connected to is used, and stays connected.
    """
