"""Where a rank's memory goes in one step, by category and module: `--memory_at STEP` writes
memory/rank0.json.

    weights      the parameters that the rank has
    gradients    what its optimizer updates with; with ddp they lie in the buckets that travel
    optimizer    the tensors of the optimizer's state
    activations  made in a forward and there when a backward begins; of a repeated forward, there when it ends
    buckets      made by the code that exchanges gradients and weights: what is in flight, gathered weights
    other        the rest: temporary results, gradients of activations, buffers, batches, a mirror

A dispatch mode sees the storage of each tensor that an operation reads or makes on the rank's
device: once, however many views it has. A weak reference tells when it is freed. What an operation
reads that none has made was there when the step began. What is allocated below the dispatcher is
not seen: workspaces of kernels, and buffers of NCCL and gloo.
"""

from __future__ import annotations

import json
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoray.atomic import replace_text
from nanoray.config import Batch, Config
from nanoray.faults.progress import OUTSIDE
from nanoray.forecast.memory import local_of, model_memory, peak_memory
from nanoray.forecast.rank_memory import stage_activations
from nanoray.mesh.layout import Layout
from nanoray.mesh.mesh import Mesh
from nanoray.models import resnet_costs
from nanoray.models.build import OwnShape, shape_of
from nanoray.models.gpt import ModelShape
from nanoray.parallel import buckets, compress, fsdp
from nanoray.parallel.ddp import default_bucket_mb
from nanoray.parallel.plan import Plan
from nanoray.run import RunSpec
from nanoray.state import TrainState

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buckets", "other")
FORWARD = "forward"  # of a storage: made in a forward; once backward begins it is an activation
POINTS = 300  # of a file: the highest of each stretch of operations
EXCHANGE = tuple(str(module.__file__) for module in (buckets, compress, fsdp))
EXCHANGE += (str(Path(torch.distributed.fsdp.__file__).parent),)
# The parts of the formula -> categories.
PARTS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "in_flight": "buckets",
}
PARTS |= {"compression": "buckets", "mirror": "other"}


class Storages(TorchDispatchMode):
    """The storages on one device that operations inside read, make and free, and where each change
    happened.
    """

    def __init__(
        self, device: torch.device, where: Callable[[], str], kind: Callable[[], str]
    ) -> None:
        """`where` names the place of the present operation, `kind` what it makes."""
        super().__init__()
        self._device, self._where, self._kind, self._began = (
            device,
            where,
            kind,
            time.perf_counter(),
        )
        # (ms, place); the first is the beginning
        self.operations: list[tuple[float, str]] = [(0.0, "")]
        self.changes: list[tuple[int, int, int]] = []  # (operation, storage, bytes more)
        self.kinds: list[str] = []  # of each storage
        self.allocated = 0  # the most that a CUDA allocator had given out after an operation
        self._sizes: list[int] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by address
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Storages:
        """Begin to watch. fully_shard frees and allocates by resizing storages, which is no
        operation.
        """
        original, itself = self._resize, self

        def resize_(storage: Any, size: int) -> Any:
            known = storage.device == itself._device and itself.number(
                storage, itself._kind(), before=True
            )
            result = original(storage, size)
            if known is not False:
                itself._change(known, storage.nbytes())
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
            return NotImplemented  # it calls operations on its local tensor, which come here
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
        """Take notice of the tensors among `values`: with `always` they are of this kind, else
        those that are new.
        """
        for value in values:
            tensor = local_of(value)
            if (
                not isinstance(tensor, Tensor)
                or tensor.device != self._device
                or tensor.layout != torch.strided
            ):
                continue
            number = self.number(tensor.untyped_storage(), kind, before)
            if always:
                self.kinds[number] = kind

    def number(self, storage: Any, kind: str, before: bool) -> int:
        """Return the number of a storage; a new one was there when the step began, or appears now."""
        address = storage._cdata
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
        at = len(self.operations) - 1 if operation is None else operation
        self.changes.append((at, number, size - self._sizes[number]))
        self._sizes[number] = size

    def keep(self) -> None:
        """Count what a forward has made, and what is there, as activations from its beginning."""
        for number, _ in self._alive.values():
            if self.kinds[number] == FORWARD:
                self.kinds[number] = "activations"

    def totals(self) -> Tensor:
        """Return the bytes after each operation by category, (operations, categories)."""
        columns = {kind: i for i, kind in enumerate(CATEGORIES)}
        at, numbers, sizes = (torch.tensor(column) for column in zip(*self.changes, strict=True))
        kinds = torch.tensor([columns.get(kind, len(CATEGORIES) - 1) for kind in self.kinds])[
            numbers
        ]
        table = torch.zeros(len(self.operations), len(CATEGORIES), dtype=torch.int64)
        return table.index_put_((at, kinds), sizes, accumulate=True).cumsum(0)


class MemoryTimeline:
    """The instrument that watches one step on each rank, and writes its file."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        self._at, self._note = config.memory_at, note
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
        storages = self._storages = Storages(self._mesh.device, self._where, self._kind)
        storages.note(self._par.model.parameters(), "weights", always=True)
        storages.note(self._optimizer(), "optimizer", always=True)
        storages.note([self._par.memory], "buckets", always=True)
        for name, module in self._par.model.named_modules():
            self._handles.append(
                module.register_forward_pre_hook(partial(self._enter, name or "(model)"))
            )
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
        storages.note(self._optimizer(), "optimizer", always=True)  # of the first step, it is new
        self._drop()
        self._at = 0
        found = {
            "step": self._state.step,
            "rank": self._mesh.rank,
            "device": str(self._mesh.device),
        }
        found |= summary(storages) | {
            "formula": predicted(self._spec, self._mesh, self._par, self._batch)
        }
        folder = self._spec.folder / "memory"
        try:
            folder.mkdir(exist_ok=True)
            replace_text(folder / f"rank{self._mesh.rank}.json", json.dumps(found) + "\n")
        except OSError as error:
            self._note(
                f"warning  the memory of step {found['step']} cannot be written ({error.strerror})"
            )

    def _grads(self) -> list[Tensor]:
        own = [p.grad for p in self._par.model.parameters() if p.grad is not None]
        return [local_of(grad) for grad in (*own, *self._par.gradients)]

    def _optimizer(self) -> list[Any]:
        return [value for kept in self._state.optimizer.state.values() for value in kept.values()]

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._inside.append(name)
        self._turn()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave a module, also by the exception with which a repeated forward ends early."""
        self._inside.pop()
        self._turn()
        if self._phase == "backward" and not self._inside and self._storages:
            self._storages.keep()  # activation checkpointing has repeated a forward

    def _turn(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        # A thread of autograd, which may repeat a forward, has numbers of its own
        if number >= self._turns[-1][0]:
            self._turns.append((number, self._inside[-1] if self._inside else ""))

    def _where(self) -> str:
        """Return phase and module of the present operation; in backward, the module whose forward
        made its node.
        """
        module, node = self._inside[-1] if self._inside else "", torch._C._current_autograd_node()
        if not module and node is not None:
            module = self._turns[
                max(0, bisect(self._turns, node._sequence_nr(), key=lambda turn: turn[0]) - 1)
            ][1]
        return f"{self._phase} {module}".strip()

    def _kind(self) -> str:
        """Return what the present operation makes, by the code that called it."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.startswith(EXCHANGE):
                return "buckets"
            frame = frame.f_back  # type: ignore[assignment]
        return FORWARD if self._phase == "forward" or self._inside else "other"


def summary(storages: Storages) -> dict[str, Any]:
    """Return points, peak and the most of each category, in bytes.

    A point is [ms since the step began, index in `places`, bytes of each category]. `allocator` is
    the most that CUDA's allocator had given out, None on a CPU.
    """
    table, operations = storages.totals(), storages.operations
    totals = table.sum(1)
    width = -(-len(operations) // POINTS)
    highest = [i * width + int(part.argmax()) for i, part in enumerate(totals.split(width))]
    chosen = sorted({0, *highest, len(totals) - 1})
    places = list(dict.fromkeys(operations[i][1] for i in chosen))
    numbers, peak = {place: i for i, place in enumerate(places)}, int(totals.argmax())
    ms, place = operations[peak]
    return {
        "categories": CATEGORIES,
        "places": places,
        "points": [
            [round(operations[i][0], 3), numbers[operations[i][1]], *table[i].tolist()]
            for i in chosen
        ],
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
    """Return what forecast/memory.py and models/costs.py say of this rank, by category, and of its
    `peak`.

    Empty for a script's own model, of which there are no formulas.
    """
    cfg = spec.config
    shape = shape_of(cfg, spec.dataset.vocab_size)
    if isinstance(shape, OwnShape):
        return {}
    bucket_mb = cfg.bucket_mb or default_bucket_mb(mesh.device)
    parts = model_memory(
        cfg, par.model, par.data.size, batch.accum, bucket_mb, par.mirror_shards is not None
    )
    if isinstance(shape, ModelShape):
        stage = Layout.of(cfg, mesh.world_size).coords(mesh.rank).pp
        kept = stage_activations(cfg, shape, batch, cfg.precision, stage)
    else:
        kept = resnet_costs.activation_memory(shape, batch.micro, cfg.precision)
    found = dict.fromkeys(CATEGORIES, 0) | {"activations": sum(kept.values())}
    for part, size in parts.items():
        found[PARTS[part]] += size
    return found | {
        "peak": peak_memory(cfg, par.model, par.data.size, parts, kept, bucket_mb, batch.accum)
    }
