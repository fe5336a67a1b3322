"""Call a script's function: on every rank of a run, or up to `fit` only.

The driver on Ray makes the Program, too, and sends it to the ranks. So torch is imported late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Config
from nanoray.data.dataset import script_data
from nanoray.errors import ConfigError
from nanoray.machine.environment import environment
from nanoray.parallel.rendezvous import Order, Rendezvous
from nanoray.script.run import DryRunEnded, Run

if TYPE_CHECKING:
    from nanoray.script.task import ScriptTask


class Program:
    """A script's function in the place of rank.train (train.program.Trains)."""

    def __init__(
        self, main: Callable[[Run], Any], given: frozenset[str], may_loop: bool = True
    ) -> None:
        """`given`: the keys of the configuration that the script has set.

        may_loop: the function may have a loop of its own; else it calls `fit` at once.
        """
        self.main = main
        self._given = given
        self._may_loop = may_loop

    @property
    def name(self) -> str:
        return getattr(self.main, "__qualname__", type(self.main).__name__)

    def __call__(
        self,
        spec: RunSpec,
        rendezvous: Rendezvous,
        observers: Sequence[Any] = (),
        wanted: Callable[[], Order] = lambda: Order.GO_ON,
        store: Any = None,
        rejoin: Any = None,
    ) -> dict[str, Any]:
        import torch

        run = Run(spec, rendezvous, self._given, observers, wanted, store, rejoin)
        torch.manual_seed(spec.config.seed)  # the same new weights on all ranks
        if not self._may_loop:
            self.main(run)
            assert run.outcome
            return run.outcome
        return self._main_or_loop(run)

    def _main_or_loop(self, run: Run) -> dict[str, Any]:
        """Call the function, which trains with an engine or has a loop of its own; return the outcome."""
        from nanoray.script.loop import ScriptLoop, variables_of

        run.loop = ScriptLoop(run)
        try:
            with environment(variables_of(run)):
                self.main(run)
        except SystemExit as ended:
            # A script may end by sys.exit(), after its training or its own loop.
            is_over = run.outcome or run.loop
            if ended.code or not is_over:
                run.leave_loop(ended)
                raise
        except BaseException as error:
            run.leave_loop(error)
            raise
        if run.outcome is None and run.loop is not None:
            run.outcome = run.loop.ended()
            run.leave_loop()
        if run.outcome is None:  # it has caught what `fit` raised
            raise ConfigError(_untrained(self.main))
        return run.outcome

    def dry_run(self, config: Config, ranks: int, placement: str) -> None:
        """Call the function up to `fit`, which prints mesh, batch and memory.

        The model is made in this process; no rank is started, no device taken and no run folder
        made.
        """

        def print_lines(task: ScriptTask) -> None:
            print("\n".join(task.dry_run_lines(placement)))

        call_until_fit(self.main, config, self._given, ranks, print_lines)


def call_until_fit(
    main: Callable[[Run], Any],
    config: Config,
    given: frozenset[str],
    ranks: int,
    on_fit: Callable[[ScriptTask], None],
) -> None:
    """Call a script's function up to `fit`, which calls `on_fit` and ends the function."""
    import torch

    spec = RunSpec(config, script_data(), Path(config.out_dir), time.time())
    torch.manual_seed(config.seed)
    try:
        main(Run(spec, Rendezvous(world_size=ranks), given, on_fit=on_fit))
    except DryRunEnded:
        return
    raise ConfigError(_untrained(main))


def _untrained(main: Callable[[Run], Any]) -> str:
    name = getattr(main, "__name__", "the function")
    return (
        f"{name} returned without RuntimeEngine(model, optimizer, run).fit(...), and what is read "
        "here is the model of an engine; a loop of its own can only be launched"
    )
