"""What observes a process of a run: made once, and connected anew to each group of ranks.

observers     notes and records, on rank 0
progress      the place of this rank, which the driver reads
ledger        where this rank's time goes
instruments   what follows the phases of a step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.data.tokens import MicroBatches
from nanoray.faults.inject import Injector
from nanoray.faults.progress import UNKNOWN, ProgressFile
from nanoray.machine.fault_points import reached
from nanoray.models.workload import Workload
from nanoray.observe.trace.ledger import Ledger
from nanoray.observe.track.observer import Observer
from nanoray.observe.watch.instruments import Instruments
from nanoray.observe.watch.observers import Observers
from nanoray.observe.watch.profile import Profile
from nanoray.observe.watch.routing import RoutingMeans
from nanoray.observe.watch.statistics import Statistics
from nanoray.observe.watch.throughput import Throughput
from nanoray.observe.watch.tracing import tracing
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import Plan


class Watch:
    """The observers, files and instruments of this process."""

    def __init__(
        self,
        spec: RunSpec,
        slot: int,
        observers: Sequence[Observer],
        model: nn.Module,
        scale: Callable[[Tensor], Tensor],
        takes_over: bool,
    ) -> None:
        """`scale`: of the loss; `takes_over`: this process goes on with what another one began."""
        self.observers = Observers(spec, observers)
        self._statistics = Statistics(spec.config, model, scale, self.observers.note)
        self._profile = Profile(spec.config, self.observers.note)
        self._progress = ProgressFile(spec.progress(slot))
        self._ledger = Ledger(spec.ledger(slot), spec.started, takes_over)

    def begin_at(self, step: int) -> None:
        """Let the driver see where this rank begins in a group; from now on it can serve others."""
        self._progress.base = step
        reached("shared")

    def instruments(
        self,
        spec: RunSpec,
        mesh: Mesh,
        par: Plan,
        state: TrainState,
        batches: MicroBatches,
        workload: Workload,
        injector: Injector,
    ) -> Instruments:
        """List the instruments of a group; those that are off are left out. (all ranks)"""
        config = spec.config
        note = self.observers.note
        throughput = Throughput(workload, batches, state)

        # Progress and ledger come first: the driver finds a hang by them, also in an instrument.
        instruments: list[object] = [self._progress, self._ledger]
        trace = tracing(spec, mesh, par, state, note)
        if trace:
            instruments.append(trace)
        # Rank 0 measures the statistics of layers.
        if mesh.rank == 0 and self._statistics.begin(spec.folder, state.step):
            instruments.append(self._statistics)
        if self._profile.begin(spec.folder, mesh, state.step):
            instruments.append(self._profile)
        # It averages over all ranks, so it is listed on every rank or on none.
        routing = getattr(state.model, "routing", None)  # of a model with experts
        if routing:
            instruments.append(RoutingMeans(routing, mesh))
        # Planned faults fire after the others have noted the phase.
        if config.faults:
            instruments.append(injector)
        # Throughput ends its window last, so that it contains the other measurements.
        instruments.append(throughput)
        return Instruments(instruments)

    def group_lost(self, step: int, is_short: bool) -> None:
        """Note that this rank waits for the next group in a step, for want of memory or of a rank."""
        self._progress.base = UNKNOWN  # until the next group is built
        self._progress.set(step, "out_of_memory" if is_short else "regroup")
        self._ledger.group_lost()

    def close(self) -> None:
        """Close this process' files."""
        self.observers.close()
        self._ledger.close()
