"""The instrument that traces collectives: which steps, through which wrapper, at which cost.

trace/recorder.py and trace/log.py measure. This file connects them with the loop: a traced step runs
through the plan's second wrapper, and now and then one backward without communication is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from nanoray.checkpoint.run import RunSpec
from nanoray.data.seeding import rng_state, set_rng_state
from nanoray.data.tokens import MicroBatches
from nanoray.mesh.mesh import Mesh
from nanoray.parallel.plan import Plan
from nanoray.state.train_state import TrainState
from nanoray.trace.log import CommLog, CommTrace
from nanoray.trace.recorder import CommRecorder


class Tracing:
    """Measures the collectives of the steps that are due."""

    def __init__(
        self,
        trace: CommTrace,
        plan: Plan,
        batches: MicroBatches,
        state: TrainState,
        mesh: Mesh,
        note: Callable[[str], None],
        pause: Callable[[float], None],
    ) -> None:
        """`note` shows a line to the user; `pause` takes seconds out of the training time."""
        self._trace = trace
        self._plan = plan
        self._batches = batches
        self._state = state
        self._mesh = mesh
        self._note = note
        self._pause = pause

    def begin_run(self) -> None:
        """Compare clocks and measure memory. (all ranks)"""
        self._trace.prepare()

    def begin_step(self, step: int) -> None:
        """Send a traced step through the wrapper that notes its collectives. (all ranks)"""
        self._plan.trace(self._trace.begin(step))

    def phase(self, step: int, name: str) -> None:
        """Note the phase, if the step is traced."""
        self._trace.phase(step, name)

    def end_step(self) -> None:
        """End a traced step; now and then time a backward without communication. (all ranks)"""
        # Sharded weights are gathered in every forward, and attention to other parts of a sequence
        # needs their keys: then no backward can do without communication.
        unsynced = None
        if self._state.weights is None and self._plan.part is None:
            unsynced = self._backward_alone
        self._pause(self._trace.end(unsynced))

    def _backward_alone(self, timed: AbstractContextManager[None]) -> None:
        # The extra forward draws dropout masks, which the next step must not notice.
        generators = rng_state(self._mesh.device)
        x, y = self._batches.get(self._state.samples, 0)
        self._plan.no_sync_backward(x, y, timed)
        set_rng_state(generators, self._mesh.device)

    def measured(self) -> dict[str, Any]:
        """Return the metrics of the steps traced since the last record. (all ranks)"""
        return self._trace.read(self._note)

    def summary(self) -> dict[str, Any]:
        """Return the summary of all traced steps, on rank 0; elsewhere None. (all ranks)"""
        return {"comm": self._trace.finish(self._note)}


def comm_trace(spec: RunSpec, mesh: Mesh, plan: Plan, resume_step: int) -> CommTrace | None:
    """Return the tracer of the run's collectives, or None where tracing is off. (all ranks)

    Records of steps after `resume_step` are void: those steps run again.
    """
    config = spec.config
    if not config.trace_every or mesh.world_size == 1:
        return None

    recorder = CommRecorder(mesh, config.trace_every, plan.reduce, plan.data)

    # torch's DDP chooses its buckets itself; its hook sees them.
    twin = plan.add_twin(recorder.hook)
    names: Callable[[], dict[int, list[str]]]
    if twin:
        names = partial(recorder.buckets, twin)
    else:
        names = lambda: plan.bucket_names  # noqa: E731

    log_of_all = None
    if mesh.rank == 0:
        layout = mesh.layout
        sizes = {axis: layout.size_of(axis) for axis in layout.steps}
        bubble = plan.flow.bubble if config.pp > 1 else None
        log_of_all = CommLog(
            spec.folder / "comm", resume_step, spec.attempt, sizes, bubble, spec.started
        )
    return CommTrace(mesh, recorder, names, log_of_all)
