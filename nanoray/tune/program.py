"""The program of `nanoray tune`: what each rank runs in the place of rank.train.

    nanoray tune ─► launch, or train_here ─► Tuning(spec, rendezvous, ...) ─► Search ─► tuned.yaml

So a search has what a run has: placement on Ray, torchrun, a RayJob, logs, a restart after a lost
rank. After a restart it goes on from the blocks in tune.jsonl.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run import RunSpec
from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.mesh.rendezvous import Order, Rendezvous


@dataclass(frozen=True)
class Tuning:
    """A search in the place of a training run (train.program.Trains)."""

    label: str  # of the run that is tuned
    budget_s: float
    may: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()  # names of knobs (space.py)
    earlier: str = ""  # the folder of a search to go on from
    if_same: bool = False  # only if that was for the same run, at the same place
    main: Callable[[Any], Any] | None = None  # of a script that brings its own model
    given: frozenset[str] = frozenset()  # keys that the script has set
    # Where this process has searched: only rank 0 could find it by the time of its command
    folders: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "nanoray tune"

    def __call__(
        self,
        spec: RunSpec,
        rendezvous: Rendezvous,
        observers: Sequence[Any] = (),
        wanted: Callable[[], Order] = lambda: Order.GO_ON,
        store: Any = None,
        rejoin: Any = None,
    ) -> dict[str, Any]:
        """Search as one rank, and return the outcome. (all ranks)"""
        from nanoray.faults.plan import Injector
        from nanoray.mesh.mesh import join
        from nanoray.train.arm import FOLDER, memory_of_rank
        from nanoray.train.hardware import describe_place
        from nanoray.train.rank import meet_group, prepare_process
        from nanoray.tune.expect import expected_of
        from nanoray.tune.here import here_of
        from nanoray.tune.result import (
            closing_lines,
            rows_of,
            write_results,
        )
        from nanoray.tune.search import Search
        from nanoray.tune.subject import subject_of
        from nanoray.tune.trials import STOPPED, Trials, files_of

        # micro_batch_size auto asks for what a search finds: it begins with a rank's whole share.
        config = spec.config.model_copy(update={"micro_batch_search": False})
        spec = replace(spec, config=config)
        prepare_process(spec, rendezvous)
        mesh = meet_group(Injector(spec.folder / "faults.jsonl"), join, spec, rendezvous, store)

        def say(line: str) -> None:
            for observer in observers if mesh.rank == 0 else ():
                observer.on_note(line)

        subject = subject_of(spec, rendezvous, self.main, self.given)
        facts = here_of(spec, mesh, rendezvous, subject)
        here = facts.here
        say(facts.line)
        trials = Trials(
            replace(spec, config=here.config), mesh, subject, here, self.budget_s, wanted, say
        )
        place = describe_place(mesh)
        earlier = files_of(Path(self.earlier)) if self.earlier else []
        try:
            trials.read([*files_of(spec.folder), *earlier], place)
        except ConfigError as error:
            if not self.if_same:
                raise
            say(f"resume  {error}: this is one")
            trials.read(files_of(spec.folder), place)
        expected = expected_of(here, mesh)
        search = Search(trials, here, self.may, memory_of_rank(mesh), expected, self.leave)
        try:
            search.run()
        finally:
            if mesh.rank == 0:
                shutil.rmtree(spec.folder / FOLDER, ignore_errors=True)

        rows = rows_of(search, facts.flops, facts.peak_flops)
        lines = closing_lines(search, rows, self.may)
        if mesh.rank == 0:
            write_results(spec.folder, spec.config, self.label, search, rows, place, lines)
        mesh.barrier()
        self.folders.append(spec.folder)
        return {
            "exit_reason": "stopped" if search.ended == STOPPED else "finished",
            "world_size": mesh.world_size,
            "backend": mesh.backend,
            "device": str(mesh.device),
            "lines": lines,
        }

    def dry_run(self, config: Config, ranks: int, placement: str) -> None:
        """Print the plan of the run that would be tuned."""
        raise ConfigError("a search has no dry run; leave --dry_run to the run itself")
