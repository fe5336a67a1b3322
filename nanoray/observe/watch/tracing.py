"""The instrument that traces collectives: which steps, through which wrapper, at which cost.

observe/trace/recorder.py notes the collectives of this rank, and comm_log.py beside it merges the notes of all ranks.
A traced step runs through the plan's second wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.observe.trace.comm_log import CommLog
from nanoray.observe.trace.costs import ClockOffset
from nanoray.observe.trace.recorder import (
    CommRecorder,
    measure_offsets,
    wait_for,
)
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import Plan

OFFSETS_EVERY = 500  # steps between two comparisons of several hosts' clocks


class Tracing:
    """Measures the collectives of the steps that are due."""

    def __init__(
        self,
        recorder: CommRecorder,
        buckets: Callable[[], dict[int, list[str]]],
        log: CommLog | None,
        plan: Plan,
        mesh: Mesh,
        note: Callable[[str], None],
    ) -> None:
        """`buckets` returns the names of the parameters in each bucket; only rank 0 has a `log`.

        `note` shows a line to the user.
        """
        self._recorder = recorder
        self._buckets = buckets
        self._log = log
        self._plan = plan
        self._mesh = mesh
        self._note = note
        self._offsets: list[ClockOffset] = []
        self._next_offsets = 0  # step of the next comparison of clocks

    def begin_run(self) -> None:
        """Compare clocks. (all ranks)"""
        self._recorder.prepare()
        self._offsets = measure_offsets(self._mesh)

    def begin_step(self, step: int) -> None:
        """Send a traced step through the wrapper that notes its collectives. (all ranks)"""
        # Collectives outside of traced steps cost one test of `listener`.
        traced = self._recorder.begin(step)
        self._mesh.listener = self._recorder if traced else None
        self._plan.trace(traced)

    def phase(self, step: int, name: str) -> None:
        """Note the phase, if the step is traced."""
        self._recorder.phase(name)

    def end_step(self) -> None:
        """End a traced step. (all ranks)"""
        self._mesh.listener = None
        self._recorder.end()

    def measured(self) -> dict[str, Any]:
        """Return the metrics of the steps traced since the last record. (all ranks)

        Call it after a value was fetched.
        """
        # The collectives of this function are not part of a step.
        listener = self._mesh.listener
        self._mesh.listener = None

        self._recorder.clock.anchor()
        own_notes = self._recorder.read()
        metrics: dict[str, Any] = {}
        if own_notes:
            # Clocks of different hosts drift apart.
            several_hosts = any(offset.uncertainty for offset in self._offsets)
            newest_step = own_notes[-1]["step"]
            if several_hosts and newest_step >= self._next_offsets:
                self._offsets = measure_offsets(self._mesh)
                self._next_offsets = newest_step + OFFSETS_EVERY

            notes = self._mesh.gather(own_notes)
            if self._log is not None and notes is not None:
                metrics, messages = self._log.add(notes, self._offsets, self._buckets())
                for message in messages:
                    self._note(message)

        self._mesh.listener = listener
        return metrics

    def summary(self) -> dict[str, Any]:
        """Return the summary of all traced steps, on rank 0; elsewhere None. (all ranks)"""
        wait_for(self._mesh.device)
        self.measured()
        return {"comm": self._log.finish(self._offsets) if self._log else None}


def tracing(
    spec: RunSpec,
    mesh: Mesh,
    plan: Plan,
    state: TrainState,
    note: Callable[[str], None],
) -> Tracing | None:
    """Return the instrument of the run, or None where tracing is off. (all ranks)

    Records of steps after the newest reported one are void: those steps run again.
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

    log = None
    if mesh.rank == 0:
        layout = mesh.layout
        sizes = {axis: layout.size_of(axis) for axis in layout.steps}
        bubble = plan.flow.bubble if config.pp > 1 else None
        log = CommLog(
            spec.folder / "comm", state.reported_step, spec.attempt, sizes, bubble, spec.started
        )
    return Tracing(recorder, names, log, plan, mesh, note)
