"""A rank's memory in one step, by category and module: `--memory_at STEP` writes memory/rank0.json.

    weights      the parameters that the rank has
    gradients    the tensors that its optimizer reads; with ddp they lie in the buckets
    optimizer    the tensors of the optimizer's state
    activations  made in a forward, and still there when a backward begins (or when a repeated
                 forward ends)
    buckets      made by the code that exchanges gradients and weights, such as gathered weights
    other        the rest: temporary results, gradients of activations, buffers, batches, a mirror

A dispatch mode sees the storage of each tensor that an operation reads or makes on the rank's
device: once, however many views it has. A weak reference calls back when it is freed. A storage that
an operation reads, and none has made, existed when the step began. Allocations below the dispatcher
are not seen: workspaces of kernels, and buffers of NCCL and gloo.
"""

from __future__ import annotations

import json
import math
import sys
import time
import weakref
from bisect import bisect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nanoray.base.atomic import replace_text
from nanoray.base.compat import (
    TorchDispatchMode,
    autograd_sequence,
    current_node,
    node_sequence,
    storage_key,
    tree_leaves,
)
from nanoray.checkpoint.run import RunSpec
from nanoray.config import Batch, Config
from nanoray.faults.progress import OUTSIDE
from nanoray.forecast.memory import model_memory, peak_memory
from nanoray.forecast.rank_memory import stage_activations
from nanoray.mesh.memory import local_of
from nanoray.mesh.mesh import Mesh
from nanoray.models import resnet_costs
from nanoray.models.build import OwnShape, shape_of
from nanoray.models.gpt import ModelShape
from nanoray.parallel import buckets, compress, fsdp
from nanoray.parallel.ddp import default_bucket_mb
from nanoray.parallel.plan import Plan
from nanoray.state.train_state import TrainState

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buckets", "other")
# The kind of a storage made in a forward; if it is still there in backward it is an activation
FORWARD = "forward"
POINTS = 300  # of a file: the highest of each stretch of operations
# Files whose code makes "buckets"
EXCHANGE = (
    *(str(module.__file__) for module in (buckets, compress, fsdp)),
    str(Path(torch.distributed.fsdp.__file__).parent),
)
# The parts of the formula in forecast/memory.py -> categories
PARTS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "in_flight": "buckets",
    "compression": "buckets",
    "mirror": "other",
}


class Storages(TorchDispatchMode):
    """A context that records the storages on one device which operations read, make and free."""

    def __init__(
        self, device: torch.device, where: Callable[[], str], kind: Callable[[], str]
    ) -> None:
        """`where` returns the place of the present operation, `kind` the category of its results."""
        super().__init__()
        self._device = device
        self._where = where
        self._kind = kind
        self._began = time.perf_counter()
        # (ms, place); the first is the beginning
        self.operations: list[tuple[float, str]] = [(0.0, "")]
        self.changes: list[tuple[int, int, int]] = []  # (operation, storage, bytes more)
        self.kinds: list[str] = []  # of each storage
        self.allocated = 0  # the most that a CUDA allocator had given out after an operation
        self._sizes: list[int] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by address
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Storages:
        """Begin to watch operations, and the resizing of storages.

        fully_shard frees and allocates weights by resizing, which is no operation.
        """
        original = self._resize
        itself = self

        def resize_(storage: Any, size: int) -> Any:
            if storage.device != itself._device:
                return original(storage, size)
            number = itself.number(storage, itself._kind(), before=True)
            result = original(storage, size)
            itself._change(number, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End; what is freed from now on is not seen."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)
        self._alive.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on the local tensor come here, too
        self.note(tree_leaves((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        self.operations.append((1e3 * (time.perf_counter() - self._began), self._where()))
        self.note(tree_leaves(out), self._kind(), before=False)
        if self._device.type == "cuda":
            self.allocated = max(self.allocated, torch.cuda.memory_allocated(self._device))
        return out

    def note(
        self, values: Iterable[Any], kind: str = "", before: bool = True, always: bool = False
    ) -> None:
        """Record the tensors among `values`: new ones get this kind, with `always` all of them."""
        for value in values:
            tensor = local_of(value)
            if not isinstance(tensor, Tensor):
                continue
            if tensor.device != self._device or tensor.layout != torch.strided:
                continue
            number = self.number(tensor.untyped_storage(), kind, before)
            if always:
                self.kinds[number] = kind

    def number(self, storage: Any, kind: str, before: bool) -> int:
        """Return a storage's number; a new one existed `before` the step, or is made now."""
        address = storage_key(storage)
        if address in self._alive:
            return self._alive[address][0]
        number = len(self.kinds)
        self.kinds.append(kind)
        self._sizes.append(0)
        self._alive[address] = number, weakref.ref(storage, partial(self._freed, address))
        self._change(number, storage.nbytes(), 0 if before else None)
        return number

    def _freed(self, address: int, _: Any) -> None:
        number, _ = self._alive.pop(address, (None, None))
        if number is not None:
            self._change(number, 0)

    def _change(self, number: int, size: int, operation: int | None = None) -> None:
        if operation is None:
            operation = len(self.operations) - 1
        self.changes.append((operation, number, size - self._sizes[number]))
        self._sizes[number] = size

    def keep(self) -> None:
        """Count storages of a forward that are still there as activations, since they were made."""
        for number, _ in self._alive.values():
            if self.kinds[number] == FORWARD:
                self.kinds[number] = "activations"

    def totals(self) -> Tensor:
        """Return the bytes after each operation by category, (operations, categories)."""
        columns = {kind: i for i, kind in enumerate(CATEGORIES)}
        other = len(CATEGORIES) - 1
        column_of_storage = torch.tensor([columns.get(kind, other) for kind in self.kinds])

        # Put each change into the row of its operation and the column of its storage; then sum up.
        operations, storages, sizes = (
            torch.tensor(values) for values in zip(*self.changes, strict=True)
        )
        place = (operations, column_of_storage[storages])
        table = torch.zeros(len(self.operations), len(CATEGORIES), dtype=torch.int64)
        return table.index_put_(place, sizes, accumulate=True).cumsum(0)


class MemoryTimeline:
    """The instrument that watches one step on each rank, and writes its file."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        self._at = config.memory_at  # the step to watch; 0: none
        self._note = note
        self._storages: Storages | None = None  # while the step is watched
        self._handles: list[Any] = []

    def begin(self, spec: RunSpec, mesh: Mesh, par: Plan, state: TrainState, batch: Batch) -> bool:
        """Begin in a group of ranks, and drop an unfinished step of the group before.

        Returns whether a step of this command is to be watched.
        """
        self._drop()
        if not self._at:
            return False
        if state.step >= self._at:
            self._note(f"note    memory_at = {self._at} records nothing: step {state.step} is done")
            return False
        self._spec = spec
        self._mesh = mesh
        self._par = par
        self._state = state
        self._batch = batch
        return True

    def phase(self, step: int, phase: str) -> None:
        """Watch the step where it is due."""
        inside = step == self._at and phase not in OUTSIDE
        if self._storages is None:
            if not inside:
                return
            self._start()
        elif not inside:
            self._finish()
            return
        self._phase = phase
        assert self._storages
        if phase == "backward":
            self._storages.keep()
        elif phase == "optimizer":
            self._storages.note(self._grads(), "gradients", always=True)

    def _start(self) -> None:
        self._inside: list[str] = []  # modules that run, the innermost last
        self._turns = [(0, "")]  # autograd's sequence number at each change of the innermost module
        storages = Storages(self._mesh.device, self._where, self._kind)
        self._storages = storages

        # Tensors that exist before the step.
        storages.note(self._par.model.parameters(), "weights", always=True)
        storages.note(self._optimizer(), "optimizer", always=True)

        # Hooks keep track of the innermost module.
        for name, module in self._par.model.named_modules():
            enter = partial(self._enter, name or "(model)")
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        storages.__enter__()

    def _drop(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self._storages is not None:
            self._storages.__exit__(None, None, None)
        self._storages = None

    def _finish(self) -> None:
        storages = self._storages
        assert storages
        # The optimizer makes its state in the first step.
        storages.note(self._optimizer(), "optimizer", always=True)
        self._drop()
        self._at = 0
        record = {
            "step": self._state.step,
            "rank": self._mesh.rank,
            "device": str(self._mesh.device),
            **summary(storages),
            "formula": predicted(self._spec, self._mesh, self._par, self._batch),
        }
        folder = self._spec.folder / "memory"
        try:
            folder.mkdir(exist_ok=True)
            replace_text(folder / f"rank{self._mesh.rank}.json", json.dumps(record) + "\n")
        except OSError as error:
            self._note(
                f"warning  the memory of step {record['step']} cannot be written ({error.strerror})"
            )

    def _grads(self) -> list[Tensor]:
        own = [p.grad for p in self._par.model.parameters() if p.grad is not None]
        return [local_of(grad) for grad in (*own, *self._par.gradients)]

    def _optimizer(self) -> list[Any]:
        tensors = []
        for kept in self._state.optimizer.state.values():
            tensors += [value for value in kept.values() if isinstance(value, Tensor)]
        return tensors

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._inside.append(name)
        self._turn()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave a module; a repeated forward ends early, by an exception."""
        self._inside.pop()
        self._turn()
        if self._phase == "backward" and not self._inside and self._storages:
            self._storages.keep()  # activation checkpointing has repeated a forward

    def _turn(self) -> None:
        number = autograd_sequence()
        # A thread of autograd, which may repeat a forward, has numbers of its own
        if number >= self._turns[-1][0]:
            self._turns.append((number, self._inside[-1] if self._inside else ""))

    def _where(self) -> str:
        """Return phase and module of the present operation.

        In backward it is the module whose forward made the node that runs now.
        """
        module = self._inside[-1] if self._inside else ""
        node = current_node()
        if not module and node is not None:
            later = bisect(self._turns, node_sequence(node), key=lambda turn: turn[0])
            _, module = self._turns[max(0, later - 1)]
        return f"{self._phase} {module}".strip()

    def _kind(self) -> str:
        """Return the category of the present operation's results, by the code that called it."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.startswith(EXCHANGE):
                return "buckets"
            frame = frame.f_back  # type: ignore[assignment]
        return FORWARD if self._phase == "forward" or self._inside else "other"


def summary(storages: Storages) -> dict[str, Any]:
    """Return points, peak and the largest value of each category, in bytes.

    A point is [ms since the step began, index in `places`, bytes of each category]. `allocator` is
    the largest allocation of CUDA's allocator, None on a CPU.
    """
    table = storages.totals()  # (operations, categories)
    operations = storages.operations
    totals = table.sum(1)

    # The highest operation of each of POINTS stretches, the first operation, and the last one.
    width = math.ceil(len(operations) / POINTS)
    chosen = {0, len(totals) - 1}
    for number, stretch in enumerate(totals.split(width)):
        chosen.add(number * width + int(stretch.argmax()))

    # Places are written once, and points contain their indices.
    index_of: dict[str, int] = {}
    points = []
    for operation in sorted(chosen):
        ms, place = operations[operation]
        index = index_of.setdefault(place, len(index_of))
        points.append([round(ms, 3), index, *table[operation].tolist()])

    peak = int(totals.argmax())
    ms, place = operations[peak]
    return {
        "categories": CATEGORIES,
        "places": list(index_of),
        "points": points,
        "peak": {
            "ms": round(ms, 3),
            "place": place,
            "bytes": int(totals[peak]),
            **named(table[peak]),
        },
        "most": named(table.amax(0)),
        "operations": len(operations) - 1,
        "allocator": storages.allocated or None,
    }


def named(sizes: Tensor) -> dict[str, int]:
    """Return bytes by the names of the categories."""
    return dict(zip(CATEGORIES, sizes.tolist(), strict=True))


def predicted(spec: RunSpec, mesh: Mesh, par: Plan, batch: Batch) -> dict[str, int]:
    """Return the prediction of forecast/memory.py and models/costs.py, by category, and its `peak`.

    Empty for a script's own model, which has no formula.
    """
    cfg = spec.config
    shape = shape_of(cfg, spec.dataset.vocab_size)
    if isinstance(shape, OwnShape):
        return {}
    bucket_mb = cfg.bucket_mb or default_bucket_mb(mesh.device)
    # A group that has shrunk has fewer groups of replicas than its configuration.
    layout = mesh.layout
    cfg = cfg.model_copy(update={"replicas": layout.replicas})
    shared_by = layout.shard_size
    parts = model_memory(
        cfg, par.model, shared_by, batch.accum, bucket_mb, par.mirror_shards is not None
    )
    if isinstance(shape, ModelShape):
        stage = layout.coords(mesh.rank).pp
        kept = stage_activations(cfg, shape, batch, cfg.precision, stage)
    else:
        kept = resnet_costs.activation_memory(shape, batch.micro, cfg.precision)
    by_category = dict.fromkeys(CATEGORIES, 0)
    by_category["activations"] = sum(kept.values())
    for part, size in parts.items():
        by_category[PARTS[part]] += size
    peak = peak_memory(cfg, par.model, shared_by, parts, kept, bucket_mb, batch.accum)
    return by_category | {"peak": peak}
