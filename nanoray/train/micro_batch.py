"""`micro_batch_size auto`: the fastest micro batch that fits, measured on the ranks before step 1.

    sizes that divide a rank's share    1 ─► 2 ─► 4 ─► ...   an arm of each: seconds, peak memory
                                        │    └─ the next one is tried if it fits, by the line
                                        │       through what the last two took
    the three fastest                   two more turns each; the fastest, within 2 % the smallest

What is found is a limit, as after a lack of memory (out_of_memory.py): the most sequences of a micro
batch. So the global batch stays, a resume begins with it, and a step that runs out of memory later
lowers it. A file beside the cached datasets keeps it for the next start.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from nanoray import __version__
from nanoray.base.atomic import one_at_a_time, read_json, replace_bytes
from nanoray.base.compat import tree_leaves
from nanoray.checkpoint.run import RunSpec
from nanoray.config import Config, micro_batches
from nanoray.config.schema import field_group
from nanoray.data.dataset import cache_dir
from nanoray.data.seeding import generators_kept
from nanoray.data.tokens import Samples
from nanoray.errors import ConfigError, OutOfMemory
from nanoray.faults.cause import is_out_of_memory
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.rendezvous import Order
from nanoray.models.precision import MeanLoss
from nanoray.models.weighted import Weighted, weight_of
from nanoray.parallel.statistics import has_statistics
from nanoray.state.modules import Undisturbed
from nanoray.train.agree import describe_group
from nanoray.train.arm import FOLDER, SETTLING, BlockCost, LoopArm, memory_of_rank
from nanoray.train.guard.certificate import read
from nanoray.train.out_of_memory import (
    Shortage,
    asked_of,
    come_in_batches,
    describe,
    record,
    recorded,
    remedies,
)
from nanoray.train.recipe import Recipe
from nanoray.train.tasks import Task

FILE = "micro-batches.json"  # in the folder of cached datasets
GB = 1e9
MARGIN = 0.1  # of the memory that is free before, and stays so: the allocator's pieces do not fit
FINALISTS = 3
TURNS = 3
TIE = 0.02  # of two sizes whose speeds differ by less, the smaller one
SLOWER = 1.1  # two sizes in a row that take so much longer than the best: larger ones are not tried
FEW_STEPS = 2  # of a block that count; more where a step is short, so that they take about BLOCK_S
MOST_STEPS = 20
BLOCK_S = 0.5
STOPPED = "the run shall stop"
BUDGET_S = 120.0  # of steps; then what the first turn found is taken
# Keys that change neither the speed nor the memory of a step: another value is measured anew for
# nothing
WITHOUT_EFFECT = frozenset(
    {
        "lr",
        "min_lr",
        "muon_lr",
        "schedule",
        "warmup_steps",
        "decay_fraction",
        "weight_decay",
        "beta1",
        "beta2",
        "max_steps",
        "num_epochs",
        "scaling",
        "tokens_per_param",
        "init_from",
        "workers",
        "ray_address",
        "placement",
        "timeout_s",
        "init_timeout_s",
        "head_timeout_s",
        "placement_timeout_s",
    }
)
RELATED = tuple(
    key
    for key in Config.model_fields
    if field_group(key) in ("model", "batch", "optim", "dist") and key not in WITHOUT_EFFECT
)


class FoundSize(NamedTuple):
    """The micro batch that was found, and why it is this one, for people."""

    micro: int
    why: str


def find(spec: RunSpec, mesh: Mesh, recipe: Recipe, wanted: Callable[[], Order]) -> FoundSize:
    """Return the micro batch of a command that begins. (all ranks)

    `wanted`: where any rank shall stop, the search ends with what is known, which is not kept.
    Raises ConfigError where the micro batch decides the result, or none fits; OutOfMemory where a
    rank has too little memory, and all must begin again.
    """
    share = spec.config.global_batch_size // mesh.layout.dp
    if recipe.task.script and share > 1:
        refuse_loss_of_batch(spec.config, mesh, recipe)

    # (all ranks) What rank 0 reads counts: the folders may not be shared. Memory may have run out,
    # while it was measured or later.
    path = cache_dir(spec.config) / FILE
    facts = facts_of(spec, mesh, recipe)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    known = FoundSize(0, "")
    most = share
    if mesh.rank == 0:
        known = of_run(spec, facts) or of_file(path, key) or known
        most = recorded(spec.folder, asked_of(spec.config, mesh)) or share
    micro, why, most = mesh.broadcast((*known, most))
    sizes = [size for size in micro_batches(spec.config, share) if size <= most]
    if micro:
        return FoundSize(min(micro, most), why)
    if len(sizes) == 1:
        return FoundSize(sizes[0], "the only one that is possible")

    found = measured(spec, mesh, recipe, sizes, wanted)
    if mesh.rank == 0 and STOPPED not in found.why:
        remember(path, key, found, facts)
    return found


# Where the micro batch decides the result.


CHANGES = "micro_batch_size = auto would change the result"


def refuse(recipe: Recipe) -> None:
    """Raise ConfigError where another micro batch of this model or data is another training."""
    if has_statistics(recipe.model):
        raise ConfigError(
            f"{CHANGES}: batch norms take mean and variance of a micro batch; give a number"
        )
    if come_in_batches(recipe.data):
        raise ConfigError(
            f"{CHANGES}: the train data come in batches, which only the script could cut; give a "
            "number, or a dataset with len() and []"
        )


def refuse_loss_of_batch(config: Config, mesh: Mesh, recipe: Recipe) -> None:
    """Raise ConfigError for a script's loss that compares the samples of a batch. (all ranks)"""
    task = recipe.task
    of_batch = loss_is_of_batch(task, recipe.model, recipe.data, mesh.device, config.precision)
    # A script may decide by its rank.
    if any(mesh.all_gather(of_batch)):
        raise ConfigError(
            f"{CHANGES}: the loss of two samples is not the mean of their own, as if it compared "
            "the samples of a batch; give a number, or return nanoray.Weighted where it is a mean "
            "over targets"
        )


def loss_is_of_batch(
    task: Task, model: nn.Module, data: Samples, device: torch.device, precision: str
) -> bool:
    """Return whether a script's loss of two samples depends on more than the losses of each.

    Where the model draws random numbers this cannot be known, and is False.
    """
    loss_on = MeanLoss(device.type, precision, task.loss)
    undisturbed = Undisturbed(model)
    drew = False

    def sum_and_weight(first: int, count: int) -> tuple[float, float]:
        nonlocal drew
        x, y = data.train_batch(first, count)
        before = _generators(device)
        loss = loss_on(model, x, y)
        undisturbed.restore()  # a forward may count in a buffer
        drew = drew or before != _generators(device)
        if isinstance(loss, Weighted):
            return loss.sum.item(), weight_of(loss).item()
        return loss.item() * count, count

    with generators_kept(device), undisturbed:
        of_both, weight_of_both = sum_and_weight(0, 2)
        sums, weights = zip(sum_and_weight(0, 1), sum_and_weight(1, 1), strict=True)
    if drew or not weight_of_both or not sum(weights):
        return False
    mean = sum(sums) / sum(weights)
    rounding = 1e-4 if precision == "fp32" else 2e-2
    return abs(of_both / weight_of_both - mean) > rounding * abs(mean) + 1e-6


def _generators(device: torch.device) -> tuple[bytes, ...]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(state.numpy().tobytes() for state in states)


# What is known already.


def facts_of(spec: RunSpec, mesh: Mesh, recipe: Recipe) -> dict[str, Any]:
    """Return what a measurement holds for. (all ranks)"""
    group = describe_group(spec, mesh, 0)
    x, y = recipe.data.train_batch(0, 1)
    sample = [str((tuple(leaf.shape), leaf.dtype)) for leaf in tensors_of((x, y))]
    parameters = [str((name, tuple(p.shape))) for name, p in recipe.model.named_parameters()]
    # Without the addresses of objects in a process
    layers = re.sub(r" at 0x[0-9a-f]+", "", repr(recipe.model))
    model = hashlib.sha256(json.dumps([layers, *parameters]).encode())
    return {
        "config": related(group["config"]),
        "hardware": sorted(set(mesh.all_gather(group["hardware"]))),
        "model": model.hexdigest()[:16],
        "sample": sample,
        "nanoray": __version__,
        **{key: group[key] for key in ("ranks", "backend", "threads", "kernels", "torch", "code")},
    }


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, which may be nested."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def related(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration that change the speed or the memory of a step."""
    return {key: config.get(key) for key in RELATED}


def of_run(spec: RunSpec, facts: Mapping[str, Any]) -> FoundSize | None:
    """Return what the run has trained with, on such a device. (rank 0 only)"""
    for group in reversed(read(spec.folder).groups):
        same = related(group["config"]) == facts["config"]
        if same and [group["hardware"]] == facts["hardware"] and group.get("limit"):
            return FoundSize(group["limit"], "with which the run has trained")
    return None


def of_file(path: Path, key: str) -> FoundSize | None:
    """Return what was measured for another run. (rank 0 only)"""
    entry = read_json(path).get(key)
    if not isinstance(entry, dict):
        return None
    return FoundSize(
        entry["micro"], f"as measured on {entry['at']}; remove {path} to measure again"
    )


def remember(path: Path, key: str, found: FoundSize, facts: Mapping[str, Any]) -> None:
    """Keep a measurement for the next start. (rank 0 only) Where the folder is full, it is not."""
    at = time.strftime("%Y-%m-%d")
    with suppress(OSError), one_at_a_time(path.with_suffix(".lock")):
        entry = {"micro": found.micro, "at": at, "why": found.why, "facts": facts}
        entries = read_json(path) | {key: entry}
        replace_bytes(path, json.dumps(entries, indent=1).encode())


# The measurement.


class DoesNotFit(Exception):
    """A micro batch that this process alone has tried does not fit."""


def measured(
    spec: RunSpec, mesh: Mesh, recipe: Recipe, sizes: Sequence[int], wanted: Callable[[], Order]
) -> FoundSize:
    """Measure these sizes on these ranks. (all ranks)

    Raises ConfigError where none fits; OutOfMemory where one of several ranks has too little memory.
    """
    recipe.observers.note(f"auto    measuring micro batches of {sizes[0]} to {sizes[-1]}")

    def stops() -> bool:
        return any(order >= Order.STOP for order in mesh.all_gather(int(wanted())))

    # The weights of the run wait on the host: each arm has its own.
    recipe.model.to("cpu")
    try:
        room = (1 - MARGIN) * memory_of_rank(mesh)
        try_size = partial(measure, spec, mesh, recipe.task, sizes)
        found = search(sizes, try_size, room, spec.config.global_batch_size, stops)
    finally:
        recipe.model.to(mesh.device)

    mesh.barrier()  # (all ranks) the last one has left its arm
    if mesh.rank == 0:
        shutil.rmtree(spec.folder / FOLDER, ignore_errors=True)
    free = f"{MARGIN:.0%} of {room / (1 - MARGIN) / GB:.1f} GB stay free"
    return FoundSize(found.micro, f"{found.why}; {free}")


def measure(spec: RunSpec, mesh: Mesh, task: Task, sizes: Sequence[int], micro: int) -> BlockCost:
    """Train an arm with this micro batch for some steps. (all ranks)

    Raises DoesNotFit, OutOfMemory or ConfigError where memory runs out: in one process, on several
    ranks, with the smallest size.
    """
    values = {
        "micro_batch_size": micro,
        "micro_batch_search": False,
        "cpus_per_worker": 0.0,  # the threads are those of the run already
    }
    arm_spec = replace(spec, config=spec.config.model_copy(update=values))
    arm = None
    try:
        # Ranks that are missing now have no part in it.
        arm = LoopArm(arm_spec, replace(mesh, slots=mesh.world_size), task.apart())
        block = arm.block(FEW_STEPS)
        steps = min(MOST_STEPS, int(BLOCK_S / block.step_s))
        if steps > FEW_STEPS:
            block = arm.block(steps)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        why = f"ran out of memory ({describe(error, mesh.device)})"
    else:
        arm.close()
        return block

    # Here, where the error's frames keep no tensor any more.
    smaller = [size for size in sizes if size < micro]
    where = f"rank {mesh.rank} {why} while micro batches of {micro} were measured"
    if not smaller:
        raise ConfigError(f"{where}; {remedies(spec.config, mesh)}")
    if mesh.world_size == 1:
        if arm is not None:
            arm.close()
        raise DoesNotFit(why)
    # The others wait in a collective of the arm. This rank ends, which frees them.
    record(spec, 1, mesh, Shortage(smaller[-1], why))
    raise OutOfMemory(f"{where}; after a restart at most {smaller[-1]} are tried")


def search(
    sizes: Sequence[int],
    measure: Callable[[int], BlockCost],
    room: float,
    samples: int,
    stops: Callable[[], bool] = lambda: False,
) -> FoundSize:
    """Return the fastest of these sizes that fits in `room` bytes.

    samples: of a step, on all ranks. `stops` is asked before each size but the first.
    """
    seconds: dict[int, list[float]] = {}  # of a step, in each turn
    peaks: dict[int, int] = {}
    spent_s = 0.0

    def turn(micro: int) -> None:
        nonlocal spent_s
        block = measure(micro)
        seconds.setdefault(micro, []).append(block.step_s)
        peaks[micro] = block.peak_bytes
        spent_s += block.step_s * (SETTLING + block.steps)

    # The first arm of a process loads code and takes memory for it, which later ones have.
    micro = sizes[0]
    measure(micro)

    # Upwards, as far as memory reaches and larger ones are not slower.
    why_end = ""
    while not why_end:
        try:
            turn(micro)
        except DoesNotFit as error:
            why_end = f"{micro} {error}"
            break
        larger = next_size(sizes, peaks, room)
        if micro == sizes[-1]:
            why_end = f"{micro} is all that a rank has"
        elif larger is None:
            above = next(size for size in sizes if size > micro)
            needs = predicted(peaks, above)
            why_end = f"{above} would take {needs / GB:.2f} of {room / GB:.2f} GB"
        elif gets_slower(seconds):
            why_end = "larger ones are slower"
        elif stops():
            why_end = STOPPED
        elif spent_s > BUDGET_S:
            why_end = f"{BUDGET_S:g} s of steps are spent"
        else:
            micro = larger

    # The fastest ones once more, in turns: a machine's speed changes with time.
    best = sorted(seconds, key=lambda size: seconds[size][0])[:FINALISTS]
    turns = 1
    while turns < TURNS and len(best) > 1 and spent_s <= BUDGET_S and why_end != STOPPED:
        for size in best:
            turn(size)
        turns += 1
        if stops():
            why_end = STOPPED

    chosen = fastest({size: seconds[size] for size in best})
    tried = [
        f"{size}: {samples / median(seconds[size]):,.0f}/s {peaks[size] / GB:.2f} GB"
        for size in sorted(seconds)
    ]
    return FoundSize(
        chosen,
        f"fastest of {len(best)} in {turns} turn(s), within {TIE:.0%} the smallest "
        f"({', '.join(tried)}; {why_end})",
    )


def next_size(sizes: Sequence[int], peaks: Mapping[int, int], room: float) -> int | None:
    """Return the size to try next: twice the largest one that was measured, or what fits above it.

    None: no larger one fits, or there is none.
    """
    done = max(peaks)
    larger = [size for size in sizes if size > done]
    fitting = [size for size in larger if predicted(peaks, size) <= room]
    # One measurement is no line: the next size is the second one.
    if len(peaks) == 1 and larger and larger[0] <= 2 * done and not fitting:
        return larger[0]
    doubled = [size for size in fitting if size >= 2 * done]
    if doubled:
        return doubled[0]
    return fitting[-1] if fitting else None


def predicted(peaks: Mapping[int, int], micro: int) -> float:
    """Return the bytes that a size takes, by the line through the two largest that were measured.

    One alone gives a bound: as if nothing of it were there for every size, such as the weights.
    """
    known = sorted(peaks)[-2:]
    if len(known) == 1:
        return peaks[known[0]] * micro / known[0]
    below, above = known
    slope = max(0.0, (peaks[above] - peaks[below]) / (above - below))
    return peaks[above] + slope * (micro - above)


def gets_slower(seconds: Mapping[int, Sequence[float]]) -> bool:
    """Return whether the two largest sizes are both slower than the best one, by more than noise."""
    best = min(each[0] for each in seconds.values())
    newest = [seconds[size][0] for size in sorted(seconds)[-2:]]
    return len(seconds) > 2 and min(newest) > SLOWER * best


def fastest(seconds: Mapping[int, Sequence[float]]) -> int:
    """Return the size with the smallest median; of those that are as fast, the smallest size."""
    medians = {size: median(each) for size, each in seconds.items()}
    limit = (1 + TIE) * min(medians.values())
    return min(size for size in medians if medians[size] <= limit)
