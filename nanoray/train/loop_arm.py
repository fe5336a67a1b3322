"""An arm: one way to train a run, in blocks of steps of the loop itself, which are thrown away.

    LoopArm(spec, mesh, task)   model, optimizer and plan of its configuration, as a run makes them
    arm.block(...)              warm-up, steps that do not count, steps that do  ─► BlockCost
    arm.close()                 leaves its groups; frees its memory

`nanoray tune` compares arms on ranks that stay alive. The steps are those of engine.fit, with guards,
instruments and records, so an arm takes as long as a run. It evaluates, saves and reports nothing.
"""

from __future__ import annotations

import gc
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config.layout import Layout
from nanoray.faults.inject import Injector
from nanoray.machine.compat import compiled_for_one_size
from nanoray.machine.host import (
    available_memory_bytes,
    forget_peak_memory,
    keep_freed_memory,
    resident_bytes,
    trim_freed_memory,
)
from nanoray.parallel import cp
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.rendezvous import Order
from nanoray.train.agree import agree_on_precision, resolve_precision, resolved
from nanoray.train.elastic import TrainingGroup
from nanoray.train.model import settings_put_back, use_products
from nanoray.train.recipe import Recipe
from nanoray.train.tasks import ConfiguredTask, Task

FOLDER = "arms"  # of what the instruments of arms write, in the run's folder
# An arm reads, reports, saves and repeats nothing but its steps. It ends when its caller ends it
QUIET = {
    "max_steps": 10**6,
    "stop_at": 0,
    "target_loss": 0.0,
    "eval_every": 0,
    "checkpoint_every": 0,
    "on_nan": "stop",  # there is no checkpoint to go back to
    "sample_tokens": 0,
    "tensorboard": False,
    "track": "none",
    "faults": "",
    "comm_trace": "off",
    "profile": "",
    "upload": "",
    "resume": "none",
    # The first steps alone have shorter sequences: neither the time nor the memory of the others
    "seq_warmup_steps": 0,
}
# How far the losses of two ways to train the same may be apart, relative: the order of sums differs
SAME_LOSS = {"fp32": 1e-3, "tf32": 5e-3, "fp8": 5e-2}
SAME_LOSS_16 = 2e-2  # of bf16 and fp16
SETTLING = 2  # steps of a block that do not count: DDP regroups its buckets, kernels are chosen


class BlockCost(NamedTuple):
    """What a block of steps took."""

    step_s: float  # of the slowest rank
    peak_bytes: int  # of the rank that held most, beside what its process held before the arm
    loss: float  # the mean of all ranks, in the last step that does not count


class BlockEnded(Exception):
    """The loop has done the steps of a block. Raised on all ranks before the same step."""


class LoopArm:
    """One way to train on this rank."""

    def __init__(self, spec: RunSpec, mesh: Mesh, task: Task) -> None:
        """Make model, optimizer and data of `spec`, and divide the ranks of `mesh` by it. (all ranks)

        Raises a NanorayError for a configuration that cannot be trained.
        """
        self._device = mesh.device
        self._before = _held_bytes(mesh.device)
        self._left = 0
        self._counted = 0
        self._begun = 0.0
        self._loss = torch.zeros(())
        self._threads = torch.get_num_threads()

        # The configuration is completed as that of a run is (rank.train).
        precision, _ = agree_on_precision(mesh, resolve_precision(spec.config, mesh))
        config = resolved(spec.config, mesh, precision, task.settings())
        self._precision = precision
        config = config.model_copy(update=QUIET)
        if config.cpus_per_worker and mesh.device.type == "cpu":
            self._threads = max(1, int(config.cpus_per_worker))
        spec = replace(spec, config=config, folder=spec.folder / FOLDER, resume="", attempt=0)
        if isinstance(task, ConfiguredTask):
            task.config = config
        (spec.folder / "logs").mkdir(parents=True, exist_ok=True)
        layout = Layout.of(config, mesh.world_size, mesh.slots)
        self.mesh = replace(mesh, layout=layout)
        group = TrainingGroup(spec, self.mesh)
        injector = Injector(spec.folder / "faults.jsonl")
        self._recipe = Recipe(group, (), self._next_step, injector, task)
        self.engine = self._recipe.build(group)

    def block(self, steps: int, settling: int = SETTLING) -> BlockCost:
        """Train `settling` steps and then `steps` that count. (all ranks)

        Raises what a step raises.
        """
        self._left = settling + steps
        self._counted = steps
        with settings_put_back(), self._own_sizes(), suppress(BlockEnded):
            torch.set_num_threads(self._threads)
            use_products(self._device, self._precision)
            self.engine.fit()
        seconds = time.perf_counter() - self._begun
        peak = _peak_bytes(self._device) - self._before
        # A step takes as long as on the slowest rank.
        everyone = self.mesh.all_gather((seconds / steps, peak, self._loss.item()))
        times, peaks, losses = zip(*everyone, strict=True)
        return BlockCost(max(times), max(peaks), sum(losses) / len(losses))

    def _next_step(self) -> Order:
        """Return GO_ON, as the loop's vote of this rank; end the loop where the block ends."""
        if self._left == self._counted:
            self._loss = self._newest_loss()
            self._wait()
            self._begun = time.perf_counter()
        if self._left == 0:
            self._wait()
            raise BlockEnded
        self._left -= 1
        return Order.GO_ON

    def _own_sizes(self) -> AbstractContextManager[None]:
        """Let layers be compiled for the sizes of this arm alone, as in a run, which has no others."""
        return compiled_for_one_size() if self.engine.cfg.compile else nullcontext()

    def _newest_loss(self) -> torch.Tensor:
        """Return this rank's loss of the newest step; 0 before the first one."""
        losses = self.engine.par.own_losses
        if not losses:
            return torch.zeros((), device=self._device)
        return losses[0].detach().float().clone()

    def _wait(self) -> None:
        """Wait until the device has done what it was asked for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Leave the groups of this arm, and free what it holds. (all ranks)"""
        self.engine.par.close()
        self._recipe.close()
        cp.release(self.engine.state.model)
        if self.engine.cfg.compile:  # the code of earlier arms would count as versions of a layer
            torch.compiler.reset()
        del self.engine, self._recipe
        free_memory(self._device)


def same_loss(precision: str) -> float:
    """Return how far losses in this precision may be apart, relative, for the same run."""
    return SAME_LOSS.get(precision.partition(":")[0], SAME_LOSS_16)


def memory_of_rank(mesh: Mesh) -> int:
    """Return the bytes that an arm of the rank with the least memory may take. (all ranks)"""
    free_memory(mesh.device)
    if mesh.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(mesh.device)
        own = free + torch.cuda.memory_reserved(mesh.device)
    else:
        # Ranks of one host share it.
        beside = mesh.hosts.count(mesh.hosts[mesh.rank]) if mesh.hosts else 1
        own = available_memory_bytes() // beside
    return min(mesh.all_gather(own))


def free_memory(device: torch.device) -> None:
    """Return what is not used any more to the device and to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_freed_memory()


def _held_bytes(device: torch.device) -> int:
    """Return what this process holds now, and forget its peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    keep_freed_memory()
    forget_peak_memory()
    return resident_bytes("VmRSS")


def _peak_bytes(device: torch.device) -> int:
    """Return the most that this process has held since `_held_bytes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_bytes("VmHWM")
