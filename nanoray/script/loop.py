"""A script's own loop in `main(run)`: what it finds in the environment, and where its records go.

    variables_of(run)    RANK, WORLD_SIZE, MASTER_ADDR and the rest, as under torchrun, so that
                         dist.init_process_group() works as it stands
    ScriptLoop.record       run.log({...}, step=n) ─► metrics.jsonl, TensorBoard, a tracker
                                                ─► the place that the driver sees

nanoray makes no process group before an engine trains, so a loop of its own makes the first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nanoray.errors import ConfigError
from nanoray.faults.progress import SCRIPT, ProgressFile
from nanoray.machine.interfaces import LOOPBACK, free_port
from nanoray.machine.launchers import torchrun_variables
from nanoray.observe.track.observer import Observer
from nanoray.observe.watch.observers import Observers, now
from nanoray.parallel.rendezvous import Order

if TYPE_CHECKING:
    from nanoray.script.run import Run


def variables_of(run: Run) -> dict[str, str]:
    """Return what torchrun would give this rank, and where the ranks meet; {} if torchrun did.

    They meet in the store that one of them serves already, so no port is looked for that another
    program could take meanwhile. A rank that is alone serves its own.
    """
    r = run.rendezvous
    if r.run_id and r.agent_store:
        return {}
    local_rank, local_world_size = r.local_rank, r.local_world_size
    group, groups = r.node_rank, r.nodes or -(-r.world_size // r.local_world_size)
    # LOCAL_RANK is taken for the number of a device. On Ray each rank sees its own device alone, so
    # it is the only one of its host.
    if r.device != "cpu" and torch.cuda.device_count() < local_world_size:
        local_rank, local_world_size = 0, 1
        group, groups = r.rank, r.world_size
    variables = torchrun_variables(
        rank=r.rank,
        world_size=r.world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        group_rank=group,
        group_world_size=groups,
        run_id=run.folder.name,
        restarts=run.restarts,
        max_restarts=run.config.max_failures,
        error_file=run.folder / "logs" / f"rank{r.slot}.error{run.restarts}.json",
    )
    has_store = r.world_size > 1
    variables["MASTER_ADDR"] = r.master_addr if has_store else LOOPBACK
    variables["MASTER_PORT"] = str(r.master_port if has_store else free_port())
    variables["TORCHELASTIC_USE_AGENT_STORE"] = str(has_store)
    return dict(r.env) | variables


class ScriptLoop:
    """One rank's loop of its own: its records, on rank 0, and its place."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._observers = Observers(run.spec, [_Logged(run)])
        self._step = -1  # of the newest record
        self._progress = ProgressFile(run.spec.progress(run.rendezvous.slot))
        self._progress.set(0, SCRIPT)

    def require_in_order(self, step: int) -> None:
        """Raise ConfigError for a step before the newest one."""
        if step < self._step:
            raise ConfigError(
                f"run.log: step = {step} comes after step = {self._step}; log steps in their order"
            )

    def record(self, step: int) -> None:
        """Record the values that the script has logged. (rank 0; others only note their place)"""
        newest, self._step = self._step, step
        self._progress.set(step, SCRIPT)
        if self._run.rank > 0:
            self._run.take_logged()
            return
        # Records of this step and of later ones are of an earlier attempt: they are written anew.
        if newest < 0:
            self._observers.open(0, step - 1)
            problem = self._observers.problem()
            if problem:
                raise ConfigError(problem)
        if step == newest:
            self._observers.complete_newest()
        else:
            self._observers.record({"step": step, "attempt": self._run.restarts, "time": now()})

    def ended(self) -> dict[str, Any]:
        """Leave the script's process group, if it has not, and return the outcome of the run."""
        if dist.is_initialized():
            dist.destroy_process_group()
        reason = "stopped" if self._run.wanted() is Order.STOP else "finished"
        outcome = {
            "exit_reason": reason,
            "own_loop": True,
            "world_size": self._run.world_size,
            "device": self._run.device,
            "torch": torch.__version__,
            "lines": [f"{reason:<8} main(run) has returned, on all ranks"],
        }
        self._observers.ended(outcome)
        lost = self._run.take_logged()
        if lost and self._run.rank == 0:
            names = ", ".join(lost)
            _Logged(self._run).on_note(
                f"warning  run.log: {names} came without a step and is in no file"
            )
        return outcome

    def close(self, error: BaseException | None = None) -> None:
        """Close the files; `error` has ended the loop."""
        if error is not None:
            self._observers.failed(error)
        self._observers.close()


class _Logged(Observer):
    """Adds to a record what the script has logged, and shows notes where the launcher does.

    The launcher does not receive the records: what a loop of its own prints is for it to decide.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_note(self, text: str) -> None:
        for observer in self._run.observers:
            observer.on_note(text)

    def added(self) -> dict[str, Any]:
        return self._run.take_logged()
