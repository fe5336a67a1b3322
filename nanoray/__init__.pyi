"""The types of the public names, which `__init__.py` imports on their first use."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanoray.config import Config as Config
from nanoray.data.stream import ShardStream as ShardStream
from nanoray.errors import NanorayError as NanorayError
from nanoray.models.weighted import Weighted as Weighted
from nanoray.own.callbacks import Callback as Callback
from nanoray.own.data.batch import Counted as Counted
from nanoray.own.engine import RuntimeEngine as RuntimeEngine
from nanoray.own.run import Run as Run
from nanoray.tune.command import Tuned as Tuned

__all__ = [
    "Callback",
    "Config",
    "Counted",
    "NanorayError",
    "Run",
    "RuntimeEngine",
    "ShardStream",
    "Tuned",
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

def tune(
    main: Callable[[Run], Any],
    config: Mapping[str, Any] | None = None,
    budget_s: float = 300.0,
    may: Sequence[str] = (),
    ray: bool = True,
) -> Tuned:
    """Find the fastest settings for the model of `main(run)`, with the same result.

    `main`, `config` and `ray` are those of nanoray.launch. `main` is called up to its `fit` for
    each block of steps that is measured. `budget_s`: the seconds after which the best one so
    far counts. `may`: what else may change, of masks, norms, precision and compression. Returns
    a Tuned: its `settings` go into the configuration of nanoray.launch. Raises NanorayError.
    """
