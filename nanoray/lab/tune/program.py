"""The program of `nanoray tune`: what each rank runs in the place of rank.train.

    nanoray tune ─► launch, or train_here ─► Tuning(spec, rendezvous, ...) ─► Search ─► tuned.yaml

So a search has what a run has: placement on Ray, torchrun, a RayJob, logs, a restart after a lost
rank. After a restart it goes on from the blocks in tune.jsonl.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.forecast.job import Job
from nanoray.config import Config, micro_batches, resolve_batch
from nanoray.errors import ConfigError
from nanoray.faults.inject import Injector
from nanoray.lab.tune.knobs import KNOBS, TunedRun, configured, memory_bytes
from nanoray.lab.tune.result import closing_lines, write_results
from nanoray.lab.tune.search import Search
from nanoray.lab.tune.trials import STOPPED, Trials
from nanoray.lab.tune.tuned_model import TunedModel
from nanoray.machine.host import available_cpus
from nanoray.models.build import shape_of
from nanoray.models.gpt import ModelShape
from nanoray.parallel.ddp import default_bucket_mb
from nanoray.parallel.mesh import Mesh, join
from nanoray.parallel.rendezvous import Order, Rendezvous
from nanoray.train.agree import agree_on_precision, resolve_precision, resolved
from nanoray.train.hardware import describe_place
from nanoray.train.loop_arm import FOLDER, memory_of_rank
from nanoray.train.rank import meet_group, prepare_process

NO_DRY_RUN = "a search has no dry run; leave --dry_run to the run itself"
USED = 0.9  # of a rank's memory


@dataclass(frozen=True)
class Tuning:
    """A search in the place of a training run (train.program.Trains)."""

    label: str  # of the run that is tuned
    budget_s: float
    may_differ: bool = False
    only: Collection[str] = tuple(KNOBS)  # knobs that may change
    main: Callable[[Any], Any] | None = None  # of a script that brings its own model
    given: frozenset[str] = frozenset()  # keys that the script has set
    # Where this process has searched: only rank 0 could find it by the time of its command
    folders: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "nanoray tune"

    def dry_run(self, config: Config, ranks: int, placement: str) -> None:
        """Refuse: only real steps tell which setting is fast. Raises ConfigError."""
        raise ConfigError(NO_DRY_RUN)

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
        # micro_batch_size auto asks for the micro batch alone.
        may_differ, only = self.may_differ, self.only
        is_auto = spec.config.micro_batch_search
        if is_auto:
            may_differ, only = True, ("micro_batch",)
            config = spec.config.model_copy(update={"micro_batch_search": False})
            spec = replace(spec, config=config)

        prepare_process(spec, rendezvous)
        mesh = meet_group(Injector(spec.folder / "faults.jsonl"), join, spec, rendezvous, store)

        def say(line: str) -> None:
            for observer in observers if mesh.rank == 0 else ():
                observer.on_note(line)

        subject = TunedModel(self.main, self.given, rendezvous)
        here = here_of(spec, mesh, rendezvous, subject)
        memory = USED * memory_of_rank(mesh)
        if is_auto:
            micro = {"micro_batch_size": safe_micro_batch(here, memory)}
            here = replace(here, config=here.config.model_copy(update=micro))
            spec = replace(spec, config=spec.config.model_copy(update=micro))

        place = describe_place(mesh)
        say(f"tune   {here.layout} of {place}")
        trials = Trials(replace(spec, config=here.config), mesh, subject, here, memory, wanted)
        trials.read()
        search = Search(trials, here, self.budget_s, may_differ, only, say)
        try:
            search.run()
        finally:
            trials.next_turn()  # closes what is open
            if mesh.rank == 0:
                shutil.rmtree(spec.folder / FOLDER, ignore_errors=True)

        lines = closing_lines(search)
        if mesh.rank == 0:
            head = f"Found by `nanoray tune` on {place}"
            write_results(spec.folder, spec.config, self.label, search, [head, *lines])
        mesh.barrier()
        self.folders.append(spec.folder)
        return {
            "exit_reason": "stopped" if search.ended == STOPPED else "finished",
            "world_size": mesh.world_size,
            "backend": mesh.backend,
            "device": str(mesh.device),
            "lines": lines,
        }


def here_of(spec: RunSpec, mesh: Mesh, rendezvous: Rendezvous, subject: TunedModel) -> TunedRun:
    """Look at the model and the ranks of a run. (all ranks)"""
    precision, _ = agree_on_precision(mesh, resolve_precision(spec.config, mesh))
    settings = subject.open(spec, lambda task: task.settings())
    config = resolved(spec.config, mesh, precision, settings)

    # Written out, so that the global batch stays, whatever a choice changes.
    batch = resolve_batch(config, mesh.layout.dp)
    now: dict[str, Any] = {
        "global_batch_size": batch.global_size,
        "micro_batch_size": batch.micro,
        "grad_accum_steps": 0,
    }
    if mesh.device.type == "cpu":
        now["cpus_per_worker"] = float(rendezvous.threads)
    config = config.model_copy(update=now)

    job = None
    shape = shape_of(config, spec.dataset.vocab_size)
    if isinstance(shape, ModelShape) and not config.pure:
        bucket_mb = config.bucket_mb or default_bucket_mb(mesh.device)
        job = Job(shape, config, batch.global_size, precision, bucket_mb)
    return TunedRun(
        config,
        mesh.world_size,
        mesh.device.type,
        max(1, int(available_cpus() / max(1, rendezvous.local_world_size))),
        keeps_micro_batch="micro_batch_size" in settings,
        # A ResNet has batch norms, and a script's model may draw random numbers.
        draws=config.model != "gpt" or config.dropout > 0,
        job=job,
    )


def safe_micro_batch(here: TunedRun, memory: float) -> int:
    """Return the micro batch with which `micro_batch_size auto` begins.

    It is the largest one that needs at most half of a rank's memory, by formula: the search tries
    larger ones, too, but the present setting must fit. Without a formula it is the smallest one.
    """
    batch = resolve_batch(here.config, here.layout.dp)
    sizes = micro_batches(here.config, batch.micro * batch.accum)
    safe = sizes[0]
    for micro in sizes:
        config = configured(here, (("micro_batch_size", micro),))
        if here.job and memory_bytes(here, config) <= memory / 2:
            safe = micro
    return safe
