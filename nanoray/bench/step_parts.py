"""What the parts of a step take on this machine, and whole steps: for `bench layouts predicted` and `scaling`.

    collectives_rank()  each collective, with compute between two calls   -> seconds and CPU seconds
    compute_rank()      forward, backward, update without communication   -> seconds
    fastest_turns()     real steps, as engine.time_rank has timed them    -> seconds of each arm

Between two calls of a collective each rank computes an MLP, as a step computes between two of them.
Back to back they take less: then gloo's threads are awake, the tensor is in the cache, and no rank
waits for one that still computes.

The fastest of several turns counts, and of a turn the slowest rank: other load on the machine only
adds time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from nanoray.bench.harness.report import Emit, Record
from nanoray.bench.predicted import shape_of
from nanoray.config import load_config
from nanoray.parallel.mesh import Mesh

COLLECTIVES = "nanoray.bench.step_parts:collectives_rank"
COMPUTE = "nanoray.bench.step_parts:compute_rank"
PARTS = ("forward_s", "backward_s", "update_s")
UNCOUNTED = 2  # first steps, which fill caches
# Of the arms whose steps are compared with a prediction: one micro batch, and nothing but the step
PLAIN = {"precision": "fp32", "dropout": 0.0, "grad_clip": 0.0}


def one_micro_batch(size: int) -> Record:
    """Return the settings of an arm in which each replica has `size` sequences a step."""
    return PLAIN | {"micro_batch_size": size, "grad_accum_steps": 1, "global_batch_size": 0}


def fastest_turns(events: Iterable[Record]) -> dict[str, float]:
    """Return the seconds of a step of each arm: the median of its fastest turn."""
    turns: dict[str, list[float]] = {}
    for event in events:
        if "arm" in event:
            turns.setdefault(event["arm"], []).append(statistics.median(event["times_ms"]) / 1e3)
    return {arm: min(seconds) for arm, seconds in turns.items()}


def seconds_of(compute: Record) -> float:
    """Return what forward, backward and update take together."""
    return float(sum(compute[part] for part in PARTS))


# On every rank.


def collectives_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Emit the seconds and CPU seconds of each collective of the order. (all ranks)"""
    import torch

    from nanoray.machine.host import keep_freed_memory
    from nanoray.parallel.axis import data_axis

    keep_freed_memory()
    axis = data_axis(mesh)
    n = mesh.world_size
    work = _make_work(order)
    for nbytes in order["sizes"]:
        # The calls of a training step, on buffers that exist before the clock starts.
        flat = torch.zeros(nbytes // 4)
        own = torch.zeros(nbytes // 4 // n)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda flat=flat: axis.sum(flat, "gradients"),  # type: ignore[misc]
            "reduce_scatter": lambda flat=flat, own=own: axis.start_reduce_scatter(
                flat, "gradients"
            )(own),  # type: ignore[misc]
            "all_gather": lambda flat=flat: axis.start_all_gather(flat, "weights")(),  # type: ignore[misc]
        }
        for op in order["ops"]:
            times = []
            spent = []
            # Compute between two calls keeps the caches as cold as in a step.
            for _ in range(order["turns"]):
                mesh.barrier()
                seconds = cpu_s = 0.0
                for _ in range(order["calls"]):
                    work()
                    start = time.perf_counter()
                    cpu = time.process_time()
                    calls[op]()
                    seconds = seconds + time.perf_counter() - start
                    cpu_s = cpu_s + time.process_time() - cpu
                times.append(seconds / order["calls"])
                spent.append(cpu_s / order["calls"])
            # The fastest turn of each rank, then the mean over ranks: they share the cores.
            everyone = mesh.gather((min(times), min(spent)))
            if everyone is not None:
                seconds, cpu_s = (statistics.fmean(each) for each in zip(*everyone, strict=True))
                emit({"op": op, "nbytes": nbytes, "seconds": seconds, "cpu_s": cpu_s})


def _make_work(order: Record) -> Callable[[], Any]:
    """Return what a rank computes between two collectives: the MLP of a block."""
    import torch

    from nanoray.models.gpt import MLP

    config = load_config(preset=order["preset"])
    mlp = MLP(shape_of(config), 0.0)
    x = torch.randn(order["micro"], config.block_size, config.n_embd)  # (B, T, C)
    return torch.no_grad()(lambda: mlp(x))


def compute_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Emit what compute alone takes, for each (tp, micro batch) of the order. (all ranks)"""
    from nanoray.machine.host import keep_freed_memory

    if mesh.device.type == "cpu":
        keep_freed_memory()

    for tp, micro in order["cases"]:
        own = [_time_compute(mesh, order, tp, micro) for _ in range(order["turns"])]
        everyone = mesh.gather(own)
        if everyone is not None:
            turns = [max(of_turn, key=seconds_of) for of_turn in zip(*everyone, strict=True)]
            emit({"tp": tp, "micro": micro} | min(turns, key=seconds_of))


def _time_compute(mesh: Mesh, order: Record, tp: int, micro: int) -> dict[str, float]:
    """Return the median seconds of forward, backward and update of a model without collectives."""
    import torch
    from torch.nn.utils import get_total_norm

    from nanoray.models.gpt import GPT
    from nanoray.observe.trace.recorder import Clock, wait_for
    from nanoray.parallel.axis import Axis
    from nanoray.parallel.tp import cut

    # The cut model needs an axis, but its sums would bring communication into the time.
    class Silent(Axis):
        """An axis whose sums are the rank's own tensors."""

        def sum(self, tensor: Any, what: str) -> Any:
            return tensor

        def max(self, tensor: Any, what: str) -> Any:
            return tensor

    shape = shape_of(load_config(preset=order["preset"]))
    model = GPT(shape).to(mesh.device)
    if tp > 1:
        cut(model, Silent("tp", tuple(range(tp)), mesh.rank % tp, None, mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = (micro, shape.block_size)
    x = torch.randint(shape.vocab_size, size, device=mesh.device)  # (B, T)
    clock = Clock(mesh.device)
    steps = []
    mesh.barrier()
    for _ in range(order["steps"] + UNCOUNTED):
        marks = [clock.now()]
        loss = model(x, x)
        marks.append(clock.now())
        loss.backward()
        marks.append(clock.now())
        get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()  # buckets keep theirs
        marks.append(clock.now())
        steps.append(marks)
    wait_for(mesh.device)
    clock.anchor()
    spans = [
        [end - begin for begin, end in pairwise(map(clock.seconds, marks))]
        for marks in steps[UNCOUNTED:]
    ]
    medians = [statistics.median(part) for part in zip(*spans, strict=True)]
    return dict(zip(PARTS, medians, strict=True))
