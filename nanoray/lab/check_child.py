"""The processes of `nanoray check SCRIPT.py`: plain PyTorch, or one rank of a run of the script.

    check_script.py ─► python -m nanoray.lab.check_child, one for each rank
                         └─► for each job a fork, in which the script is __main__:
                             its nanoray.launch(main, config) trains here, and ends the script

A fork costs no second import of torch. And like ranks on different nodes the processes have different
hash seeds, so that the order of a set differs between them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoray.config import Config, resolve_batch
from nanoray.config.variables import values_of
from nanoray.data.seeding import generators_kept, seed_host_generators
from nanoray.errors import ConfigError, DataError, NanorayError
from nanoray.lab.check_script import CheckJob
from nanoray.lab.script_file import NotLaunched, run_until_launch
from nanoray.machine.compat import tree_leaves, tree_map
from nanoray.machine.script_errors import shown
from nanoray.machine.tensor_memory import bytes_of, has_plain_memory
from nanoray.models.batch_norm import BatchNorm
from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.models.modules import EXTRA, Undisturbed, has_extra_state
from nanoray.models.precision import MeanLoss
from nanoray.models.weighted import Weighted, weight_of
from nanoray.script.data.source import CountedTargets, NamedBatch, ScriptData
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program, call_until_fit
from nanoray.script.settings import loaded_of
from nanoray.script.task import ScriptTask
from nanoray.train.__main__ import train_here
from nanoray.train.loop_arm import QUIET
from nanoray.train.optim.modes import set_mode

CPU = torch.device("cpu")
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
# What a script's run does otherwise here. Of the script's own keys those of batch, optimizer and
# schedule stay: max_steps, too, because the rates depend on it.
SETTINGS: dict[str, Any] = {key: QUIET[key] for key in QUIET if key != "max_steps"} | {
    "device": "cpu",
    "backend": "gloo",
    "precision": "fp32",
    "compile": False,
    "grad_compress": "none",
    "mirror": "auto",
    "eval_every": 10**9,  # a scheduler that follows the validation loss wants it above 0
    "hash_every": 1,
    "log_every": 1,
    "timeout_s": 60.0,
}


def serve() -> None:
    """Fork a process for each job, a line of JSON on stdin; print its exit code."""
    for line in sys.stdin:
        job = CheckJob(**json.loads(line))
        child = os.fork()
        if not child:
            do(job)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def do(job: CheckJob) -> None:
    """Do a job, write its result, and end this process."""
    output = os.open(f"{job.result}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(job.environment)
    result = run_script(job)
    Path(job.result).write_text(json.dumps(result), encoding="utf-8")
    # Without the end of Python, which would wait for gloo's threads
    os._exit(0)


def run_script(job: CheckJob) -> dict[str, Any]:
    """Run the script up to the end of its nanoray.launch; return what came of that."""
    result: dict[str, Any] = {}

    def train_at_launch(main: Callable[..., Any], config: Any) -> None:
        try:
            result.update(train(job, main, config))
        except BaseException as error:
            result.update(fault_of(error))

    # Callbacks only observe, and a tracker would report runs that are none.
    engine: Any = RuntimeEngine
    engine.callbacks = property(lambda self: [], lambda self, given: None)
    try:
        run_until_launch(job.script, job.arguments, train_at_launch)
    except NotLaunched as error:
        return {"unusable": str(error)}
    except BaseException as error:
        return fault_of(error)
    return result


def fault_of(error: BaseException) -> dict[str, Any]:
    """Return what has ended a script: a refusal of nanoray, or an error and its place."""
    traceback.print_exception(error)
    cause = error.__cause__
    if isinstance(error, NanorayError):
        if cause is None or isinstance(cause, NanorayError):
            text = str(error).partition("\n")[0]
            is_refusal = isinstance(error, (ConfigError, DataError))
            return {"fault": text, "kind": "refused" if is_refusal else "lost"}
        error = cause  # the script's own
    return {"fault": shown(error), "kind": "failed"}


def train(job: CheckJob, main: Callable[..., Any], given: Any) -> dict[str, Any]:
    """Train as the job says, with the script's function and configuration."""
    loaded = loaded_of(given)
    stop_at = min(job.settings["stop_at"], loaded.config.scheduled_steps)
    settings = SETTINGS | job.settings | {"stop_at": stop_at}
    loaded = replace(loaded.set(settings, "nanoray check"), dry_run=False, quiet=True)
    config = loaded.config
    if not job.plain:
        train_here(loaded, time.time(), Program(main, loaded.given))
        return {"trained": True}

    result: dict[str, Any] = {}
    os.environ.update(values_of(config.env, os.environ, started=True))
    torch.set_num_threads(int(config.cpus_per_worker))  # as a rank has: both round in the same way
    on_fit = partial(train_plainly, result, job, config)
    call_until_fit(main, config, loaded.given, int(config.workers), on_fit)
    return result


# Plain PyTorch.


def train_plainly(result: dict[str, Any], job: CheckJob, config: Config, task: ScriptTask) -> None:
    """Train in this process, as a loop of plain PyTorch would; save the weights.

    A step's samples are computed in the pieces that the ranks would read, because a forward may draw
    random numbers, or normalise by its batch. As under torch's DDP, all ranks begin a step with the
    buffers of rank 0.
    """
    ranks = int(config.workers)
    config = config.model_copy(update=task.settings())
    batch = resolve_batch(config, ranks)
    steps = min(config.stop_at, config.max_steps)
    model = task.model()
    optimizer = task.optimizer(model, None)
    schedule = task.schedule
    data: Any = task.data(CPU)
    data.divide(batch, 0)
    require_one_process(model, config)
    begin = fingerprint(model.state_dict(), 0)
    if job.plain == "nudged":
        nudge(model)
    read = 0
    attributes: list[dict[str, Any]] = []  # after the first step, and after the newest
    set_mode([optimizer], "train")

    for step in range(steps):
        before = Undisturbed(model)
        of_rank_0 = before
        gradients: dict[nn.Parameter, Tensor] = {}
        weight = 0.0
        for rank in range(ranks):
            before.restore()
            for micro in range(batch.accum):
                place = step * batch.global_size + (micro * ranks + rank) * batch.micro
                x, y = data.train_batch(place, batch.micro)
                read = fingerprint({"x": x, "y": y}, read)
                seed = derive_seed(config.seed, step, micro, rank)
                seed_generators(seed, CPU)
                seed_host_generators(seed)
                loss = task.loss(model, x, y)
                if isinstance(loss, Weighted):
                    weight += weight_of(loss).item()
                    loss.sum.backward()
                else:
                    (loss / (batch.accum * ranks)).backward()
            if rank == 0:
                of_rank_0 = Undisturbed(model)
            # Rank by rank, in the order in which an all-reduce of two adds up
            for p in model.parameters():
                if p.grad is not None:
                    gradients[p] = gradients[p] + p.grad if p in gradients else p.grad
                    p.grad = None
        of_rank_0.restore()

        # A sum over targets is divided by the weight of all of them.
        for p, gradient in gradients.items():
            p.grad = gradient / (weight or 1.0)
        if config.grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        schedule.step([optimizer])
        optimizer.zero_grad()
        attributes = [*attributes[:1], dict(attributes_of(model, task.loss_fn))]

    set_mode([optimizer], "eval")
    torch.save(weights_of(model), f"{job.result}.pt")
    changed = [name for name, value in attributes[0].items() if attributes[-1].get(name) != value]
    result |= {
        "about": f"{type(model).__name__}: {steps} steps of {batch.global_size} samples",
        "steps": steps,
        "begin": begin,
        "read": read,
        "attributes": changed,
        # An attribute that a forward changes would change each of the losses that this compares.
        "loss": not changed and loss_is_no_mean(task, model, data, batch.micro),
    }
    data.close()


def fingerprint(values: Mapping[str, Any], start: int) -> int:
    """Return a hash of the tensors in some values, their order and their names."""
    code = start
    for name, value in values.items():
        leaves = tree_leaves(dict(value) if isinstance(value, NamedBatch) else value)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                code = zlib.crc32(f"{name} {tuple(leaf.shape)}".encode(), code)
                code = zlib.crc32(bytes_of(leaf.detach()).numpy().tobytes(), code)
    return code


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Change weights by about their last bit, as another order of sums would.

    What this becomes within some steps is the part of a difference that rounding explains: Adam, for
    instance, makes whole steps of gradients that are zero but for rounding.
    """
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.dtype == torch.float32:
            p.mul_(1 + 2**-23 * torch.randn(p.shape, generator=generator))


def require_one_process(model: nn.Module, config: Config) -> None:
    """Raise ConfigError for what one process cannot compute in the place of several ranks."""
    shared = ""
    for module in model.modules():
        if isinstance(module, BatchNorm) and (module.always_synchronised or config.sync_batchnorm):
            shared = "the batch norms of all ranks normalise together"
    if config.workers != 1 and shared:
        raise ConfigError(f"{shared}, which one process cannot repeat; give --ranks 1")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, without the statistics of batch norms.

    Those are means over ranks, which a loop of one process does not have.
    """
    statistics = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BatchNorm):
            statistics |= {f"{prefix}.{key}" if prefix else key for key in module._buffers}
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and name not in statistics and not name.endswith(EXTRA)
    }


# What trains wrongly without a word.


def attributes_of(model: nn.Module, loss_fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each attribute of a module that no checkpoint has.

    Only plain values, tensors without a graph (others are of one step) and generators.
    """
    modules = {name or type(model).__name__: module for name, module in model.named_modules()}
    if isinstance(loss_fn, nn.Module):
        modules[type(loss_fn).__name__] = loss_fn
    of_torch = vars(nn.Module())
    for name, module in modules.items():
        if has_extra_state(module) or isinstance(module, torch.jit.ScriptModule):
            continue
        for key, value in vars(module).items():
            if key in of_torch:
                continue
            if isinstance(value, Tensor) and value.grad_fn is None and has_plain_memory(value):
                yield f"{name}.{key}", bytes_of(value.detach()).numpy().tobytes()
            elif isinstance(value, GENERATORS):
                yield f"{name}.{key} (a generator)", state_of(value)
            elif isinstance(value, (bool, int, float, complex, str)):
                yield f"{name}.{key}", repr(value)


def state_of(generator: Any) -> str:
    """Return the state of a random generator, as far as one draw changes it."""
    if isinstance(generator, torch.Generator):
        return repr(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.get_state())  # not all of a long array, but the place in it


def loss_is_no_mean(task: ScriptTask, model: nn.Module, data: ScriptData, micro: int) -> bool:
    """Return whether a script's loss is no mean over samples, as far as the first batch shows it."""
    x, y = data.train_batch(0, micro)
    if isinstance(y, CountedTargets):
        y = y.targets
    is_named = isinstance(x, NamedBatch)
    whole = dict(x) if is_named else (x, y)

    # Its samples can be read alone where all that it has are tensors (samples, ...).
    if micro < 2:
        return False
    for leaf in tree_leaves(whole):
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (micro,):
            return False

    def train_batch(first: int, count: int) -> tuple[Any, Any]:
        some = tree_map(lambda leaf: leaf[first : first + count], whole)
        return (NamedBatch(some), NamedBatch(some)) if is_named else some

    # Dropout and batch norms are no matter of the loss.
    model.eval()
    try:
        return loss_is_of_batch(task, model, train_batch)
    except Exception:  # of a model that returns no loss in eval mode
        return False


def loss_is_of_batch(
    task: ScriptTask, model: nn.Module, train_batch: Callable[[int, int], tuple[Any, Any]]
) -> bool:
    """Return whether a script's loss of two samples depends on more than the losses of each.

    `train_batch` returns samples: from which one on, and how many. Where the model draws random
    numbers this cannot be known, and is False.
    """
    loss_on = MeanLoss("cpu", "fp32", task.loss)
    undisturbed = Undisturbed(model)

    def sum_and_weight(first: int, count: int) -> tuple[float, float]:
        loss = loss_on(model, *train_batch(first, count))
        undisturbed.restore()  # a forward may count in a buffer
        if isinstance(loss, Weighted):
            return loss.sum.item(), weight_of(loss).item()
        return loss.item() * count, count

    with generators_kept(CPU), undisturbed:
        before = torch.get_rng_state()
        of_both, weight_of_both = sum_and_weight(0, 2)
        sums, weights = zip(sum_and_weight(0, 1), sum_and_weight(1, 1), strict=True)
        drew = not torch.equal(before, torch.get_rng_state())
    if drew or not weight_of_both or not sum(weights):
        return False
    mean = sum(sums) / sum(weights)
    return abs(of_both / weight_of_both - mean) > 1e-4 * abs(mean) + 1e-6


if __name__ == "__main__":
    serve()
