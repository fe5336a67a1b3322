"""What training costs in each of several ways: the one engine of the benchmarks that compare arms.

An arm is a configuration of one model (arm.py). `time_rank` holds all arms and runs a few steps of
each in turn, round by round, so that a slow minute of the machine hits all of them. `memory_rank`
measures one arm on fresh ranks, because what another arm has freed would hide what this one takes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nanoray.bench.arm import Arm, alone_on, gpt
from nanoray.bench.harness.report import Emit, Record, Report, say
from nanoray.bench.harness.trainings import rotated
from nanoray.config import Config
from nanoray.machine.host import forget_peak_memory, resident_bytes

if TYPE_CHECKING:
    from nanoray.parallel.mesh import Mesh

TIME_ENTRY = "nanoray.bench.engine:time_rank"
MEMORY_ENTRY = "nanoray.bench.engine:memory_rank"
# What `time_rank` measures beside times and losses
COMMUNICATION = "communication"  # of one more step of each round, traced
WAITING = "waiting"  # of a pipeline's stages, in the timed steps
BITS = "bits"  # a number of each rank's weights
MEMORY_STEPS = 5

STEP = "step"
BUSY = "collectives busy"
EXPOSED = "exposed"

Found = dict[str, list[Record]]  # the events of each arm, one per round


# The driver's side.


def order_of(
    configs: Mapping[str, Config],
    rounds: int = 1,
    steps: int = 1,
    measures: Iterable[str] = (),
    mirrored: Iterable[str] = (),
    alone: Iterable[str] = (),
) -> Record:
    """Return the order of `time_rank` and `memory_rank`: arms by name, and what to do with them.

    mirrored: the arms whose shards another rank keeps as well.
    alone: the arms in which each rank trains by itself, without the others.
    """
    arms = {}
    for name, config in configs.items():
        how = {"mirrored": name in mirrored, "alone": name in alone}
        arms[name] = {"config": config.model_dump(), **how}
    counts = {"rounds": rounds, "steps": steps}
    return {"arms": arms, "measures": list(measures), **counts}


def collect(events: Iterable[Record], report: Report, found: Found, more: str = "") -> None:
    """Sort the events of `time_rank` by arm as they come; the recipe, and `more`, is a condition."""
    for event in events:
        if "recipe" in event:
            report.conditions["recipe"] = ", ".join(filter(None, (event["recipe"], more)))
            continue
        found[event["arm"]].append(event)
        waits = f", waits {event['wait']:.1f} %" if "wait" in event else ""
        times = f"{event['step_ms']:.1f} ms{waits}, loss {event['losses'][-1]:.3f}"
        say(f"round {event['round']}  {event['arm']:<24} {times}")


def each(events: Iterable[Record], key: str) -> list[float]:
    """Return what each event says under `key`: a value per round."""
    return [event[key] for event in events]


def note_of_sent(collectives: Mapping[str, tuple[int, int]]) -> str:
    """Write what a step sends: the bytes of each collective, and in how many calls."""
    return " · ".join(
        f"{name} {size / 1e6:.3g} MB in {n}" for name, (n, size) in collectives.items()
    )


# On every rank.


def _arms_of(mesh: Mesh, order: Record, traced: bool) -> dict[str, Arm]:
    arms = {}
    for name, own in order["arms"].items():
        ranks = alone_on(mesh) if own["alone"] else mesh
        arms[name] = Arm(ranks, Config(**own["config"]), gpt, traced, own["mirrored"])
    return arms


def time_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Run the rounds; emit one event per arm and round, times of the slowest rank. (all ranks)"""
    import torch

    from nanoray.machine.host import keep_freed_memory
    from nanoray.observe.trace.comm_log import idle_fraction
    from nanoray.observe.trace.recorder import Clock, wait_for

    if mesh.device.type == "cpu":
        keep_freed_memory()  # as in a run; `memory_rank` returns it instead

    def worst(ms: list[float]) -> list[float]:
        return list(mesh.all_reduce(torch.tensor(ms, device=mesh.device), op="max").tolist())

    measures = order["measures"]
    arms = _arms_of(mesh, order, traced=COMMUNICATION in measures)
    clock = Clock(mesh.device)
    first = next(iter(arms.values()))
    emit({"recipe": first.case.what if WAITING in measures else first.recipe})
    for turn in range(order["rounds"]):
        for name in rotated(list(arms), turn):
            arm = arms[name]
            phases: list[Any] = []
            losses = []

            # The clocks' marks cost no wait; the device is waited for once, at the end
            mesh.barrier()
            start = time.perf_counter()
            marks = [clock.now()]
            for _ in range(order["arms"][name].get("steps", order["steps"])):
                if WAITING in measures:
                    phases += arm.step_by_phases()
                else:
                    arm.step()
                losses.append(arm.loss)
                arm.plan.zero_grad()
                marks.append(clock.now())
            arm.plan.settle()
            wait_for(mesh.device)
            step_ms = 1e3 * (time.perf_counter() - start) / len(losses)

            # A step takes as long as on the slowest rank
            clock.anchor()
            moments = [clock.seconds(mark) for mark in marks]
            times = [1e3 * (end - begin) for begin, end in pairwise(moments)]
            step_ms, *times = worst([step_ms, *times])
            event: Record = {
                "arm": name,
                "round": turn,
                "step_ms": step_ms,
                "times_ms": times,
                "losses": mesh.all_reduce_mean(torch.stack(losses)).tolist(),
            }

            # One more step, traced, shows the communication
            if COMMUNICATION in measures:
                event |= arm.traced_step()
                both = worst([event["busy_ms"], event["exposed_ms"]])
                event["busy_ms"], event["exposed_ms"] = both
            if WAITING in measures:
                wait = torch.tensor(100 * idle_fraction(phases), device=mesh.device)
                event["wait"] = mesh.all_reduce_mean(wait).item()
                event["theory"] = 100 * arm.plan.flow.bubble
            if BITS in measures:
                event["digests"] = arm.digests()
            event["norm"] = float(arm.norm)
            event["precision"] = arm.config.precision
            event["samples"] = arm.case.samples * arm.accum * arm.dp
            event["tokens"] = event["samples"] * arm.case.tokens
            event["trained"] = arm.trained
            emit(event)
    for arm in arms.values():
        arm.plan.close()


def memory_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Train a few steps of one arm; emit predicted and measured memory. (all ranks)

    The measured memory is that of the rank that held the most.
    """
    import torch

    from nanoray.machine.host import return_freed_memory

    if mesh.device.type == "cpu":
        return_freed_memory()
    on_gpu = mesh.device.type == "cuda"
    resident = 0 if on_gpu else resident_bytes("VmRSS")

    # A first step loads code and generates kernels for these shapes, which are not an arm's memory
    (first,) = _arms_of(mesh, order, traced=False).values()
    list(_steps(first, 1, lambda: 0))
    first.plan.close()
    del first
    gc.collect()

    # Reset the peak
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak_memory()
    before = torch.cuda.memory_allocated() if on_gpu else resident_bytes("VmRSS")
    libraries = f"libraries took {(before - resident) / 2**20:.3g} in a first step"

    def peak() -> int:
        highest = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes("VmHWM")
        return highest - before

    # The second arm is the measured one
    (arm,) = _arms_of(mesh, order, traced=False).values()
    held, peaks = zip(*_steps(arm, MEMORY_STEPS, peak), strict=True)
    arm.plan.close()
    memory: Record = {"formula": arm.formula, "at_peak": arm.at_peak}
    memory |= {"held": held, "peak": peaks}
    everyone = mesh.gather(memory)
    if everyone is not None:
        most = max(everyone, key=lambda rank: rank["peak"][-1])
        if on_gpu:
            what = "device memory"
        else:
            what = f"resident memory above that before the model was made; {libraries}"
        emit(most | {"what": what})


def _steps(arm: Arm, count: int, peak: Callable[[], int]) -> Iterator[tuple[dict[str, int], int]]:
    """Train, and yield what is held at the end of each step and the peak until then. (all ranks)"""
    from nanoray.bench.held_memory import held_by_mirror, held_bytes

    for _ in range(count):
        arm.step()
        arm.plan.settle()
        held = held_bytes(arm.case.model, arm.plan.gradients, arm.optimizer)
        if arm.mirror:
            held["mirror"] = held_by_mirror(
                arm.case.model, arm.plan.mirror_shards or (), arm.mirror
            )
        yield held, peak()
        arm.plan.zero_grad()
