"""Inject faults on purpose.

A plan is data: `kill@rank=1,step=30,phase=backward;slow@rank=0,step=5,phase=data,seconds=0.2`.
Before a fault fires it is written to the run's `faults.jsonl`, so that a test can prove that it
did.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.errors import ConfigError
from nanoray.faults.progress import LEFT, PHASES, SCRIPT
from nanoray.machine.atomic import append_line, read_json_lines
from nanoray.machine.fault_points import DRIVER_POINTS, POINTS, watch

if TYPE_CHECKING:
    from torch import Tensor, nn


log = logging.getLogger("nanoray.rank")
DRIVER = -1  # its "rank"
_SPARE_BYTES = 64 << 10  # logs and metrics may still grow by this while the disk is "full"


class InjectedFault(RuntimeError):
    """The exception of a `raise` fault."""


@dataclass(frozen=True)
class Fault:
    """One fault to inject: its kind, and the rank (or DRIVER), step and phase at which it fires.

    The step is the one being computed. Without an attempt the fault fires once per run, even if the
    step is repeated; with one, in that attempt only. `phase` may also be one of POINTS: the fault
    then fires when that point is next reached at this step or later, or in this attempt.
    """

    kind: str
    rank: int
    step: int
    phase: str
    attempt: int | None = None
    seconds: float = 1.0  # slow: how long to sleep; disk-full: until there is space again
    mib: int = 0  # oom: how much to allocate (0 = until the process is killed)
    # nan, gradflip: the number of forward passes of this rank, replays and audits included.
    # no-memory: the number of times that the step is tried and fails
    times: int = 1
    micro: int = 0  # the micro batch, from 0 on, in whose phase the fault fires
    # bitflip, gradflip: bit of a float32; 0 is the lowest of the mantissa, 31 the sign
    bit: int = 20

    def __str__(self) -> str:
        """Return it as --faults spells it."""
        return f"{self.kind}@rank={self.rank},step={self.step},phase={self.phase}"

    @property
    def tries(self) -> int:
        """How often it fires in a run."""
        return self.times if self.kind == "no-memory" else 1

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Identifies this fault within its plan."""
        return self.kind, self.rank, self.step, self.phase

    def fire(self, record_in: Path, gpt: nn.Module | None, started: float = 0.0) -> None:
        """Record that this fault fires, and inject it. `started`: Unix s of the command."""
        # First the record: the process may not survive the next line.
        append_event(record_in, "injected", asdict(self) | {"command": started})
        _ACTIONS[self.kind](self, record_in.parent, gpt)


def append_event(path: Path, event: str, values: dict[str, object]) -> None:
    """Append one line to faults.jsonl and sync it to disk: the writer may be killed right after."""
    now = {"event": event, "time": round(time.time(), 4), "monotonic": time.monotonic()}
    append_line(path, json.dumps(now | values), sync=True)


def _fill_memory(mib: int) -> None:
    """Allocate and touch memory until this process is killed, or `mib` is reached.

    Raises MemoryError in the second case.
    """
    allocated: list[bytearray] = []  # of 64 MiB each
    while not mib or len(allocated) * 64 < mib:
        allocated.append(bytearray(os.urandom(1 << 20) * 64))
    time.sleep(60.0)  # give Ray's memory monitor and the kernel time to notice
    raise MemoryError(f"fault plan: {mib} MiB allocated, and the process was not killed")


def _raise_out_of_memory(fault: Fault) -> None:
    """Raise what torch raises where a GPU has no memory left."""
    import torch

    raise torch.OutOfMemoryError(
        f"fault plan: out of memory on rank {fault.rank} at step {fault.step} in {fault.phase}"
    )


def _fill_disk(run: Path, seconds: float) -> None:
    """Simulate a full disk for `seconds`: no file can become larger than the logs are now."""
    logs = [path for path in run.glob("**/*") if path.is_file() and "checkpoints" not in path.parts]
    largest = max(path.stat().st_size for path in logs)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + _SPARE_BYTES, hard))
    undo = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, (soft, hard)))
    undo.daemon = True
    undo.start()


def _spoil(gpt: nn.Module | None, times: int, spoil: Callable[[Tensor], Tensor]) -> None:
    """Let `spoil` replace the middle block's output in its next `times` forward passes."""
    block = _middle_block(gpt)
    # Compiled code does not run hooks.
    compiled = block._compiled_call_impl
    block._compiled_call_impl = None

    def hook(
        module: object, args: object, output: Tensor | tuple[Tensor, Tensor]
    ) -> Tensor | tuple[Tensor, Tensor]:
        nonlocal times
        times -= 1
        if times == 0:
            handle.remove()
            block._compiled_call_impl = compiled
        if isinstance(output, tuple):  # with experts, a block also returns routing statistics
            stream, statistics = output
            return spoil(stream), statistics
        return spoil(output)

    handle = block.register_forward_hook(hook)


def _middle_block(gpt: nn.Module | None) -> Any:
    assert gpt is not None, "parse_plan wants a phase for such a fault"
    blocks: Any = getattr(gpt, "blocks", None) or list(gpt.children()) or [gpt]
    # A stage of a pipeline has only some of the blocks; the others are empty.
    own = [block for block in blocks if next(block.parameters(), None) is not None] or [gpt]
    return own[len(own) // 2]


def _flip_bit(gpt: nn.Module | None, bit: int) -> None:
    """Flip one bit of one weight in the middle block."""
    parameters = dict(_middle_block(gpt).named_parameters())
    name = "attn.proj.weight" if "attn.proj.weight" in parameters else "conv1.weight"
    weight = parameters[name].data
    if hasattr(weight, "to_local"):  # with fsdp this rank has some of the rows
        weight = weight.to_local()
    _flip(weight.view(-1)[:1], bit)


def _spoil_gradient(output: Tensor, bit: int) -> Tensor:
    """Flip a bit of the largest element of the gradient of a block's output, in backward."""

    def flip_largest(gradient: Tensor) -> Tensor:
        flat = gradient.float().flatten().clone()
        largest = int(flat.abs().argmax())
        _flip(flat[largest : largest + 1], bit)
        return flat.view_as(gradient).to(gradient.dtype)

    if output.requires_grad:
        output.register_hook(flip_largest)
    return output


def _flip(element: Tensor, bit: int) -> None:
    """Flip a bit of one float32, (1,), in place."""
    import torch

    mask = 1 << bit
    if bit == 31:
        mask = -mask  # 1 << 31 does not fit into an int32
    element.view(torch.int32).bitwise_xor_(
        torch.tensor(mask, dtype=torch.int32, device=element.device)
    )


def _raise(fault: Fault) -> None:
    raise InjectedFault(
        f"fault plan: raise on rank {fault.rank} at step {fault.step} in {fault.phase}"
    )


# What each kind of fault does: to the fault itself, the run's folder, and the model.
_ACTIONS: dict[str, Callable[[Fault, Path, Any], None]] = {
    "kill": lambda fault, run, gpt: os.kill(os.getpid(), signal.SIGKILL),
    # To this thread, which then stops here. A signal to the process may be delivered to another
    # thread, a moment later.
    "stop": lambda fault, run, gpt: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
    "exit": lambda fault, run, gpt: os._exit(3),
    "raise": lambda fault, run, gpt: _raise(fault),
    "hang": lambda fault, run, gpt: time.sleep(3600.0),
    "slow": lambda fault, run, gpt: time.sleep(fault.seconds),
    "oom": lambda fault, run, gpt: _fill_memory(fault.mib),
    "no-memory": lambda fault, run, gpt: _raise_out_of_memory(fault),
    "disk-full": lambda fault, run, gpt: _fill_disk(run, fault.seconds),
    "nan": lambda fault, run, gpt: _spoil(gpt, fault.times, lambda output: output * float("nan")),
    "bitflip": lambda fault, run, gpt: _flip_bit(gpt, fault.bit),
    "gradflip": lambda fault, run, gpt: _spoil(
        gpt, fault.times, partial(_spoil_gradient, bit=fault.bit)
    ),
}
KINDS = tuple(_ACTIONS)


# The keys of a fault in a plan, and what reads their values
_KEYS: dict[str, Callable[[str], Any]] = {
    "rank": lambda text: DRIVER if text == "driver" else int(text),
    "step": int,
    "phase": str,
    "attempt": int,
    "seconds": float,
    "mib": int,
    "times": int,
    "micro": int,
    "bit": int,
}


def parse_plan(text: str) -> tuple[Fault, ...]:
    """Parse `KIND@key=value,...;...`. Raises ConfigError with the part that is invalid."""
    parts = [part.strip() for part in text.split(";")]
    return tuple(_parse_fault(part) for part in parts if part)


def _parse_fault(part: str) -> Fault:
    kind, _, rest = part.partition("@")
    try:
        texts = dict(item.strip().split("=", 1) for item in rest.split(",") if item.strip())
        values = {key: _KEYS[key](text) for key, text in texts.items()}
        fault = Fault(kind.strip(), **({"phase": "forward"} | values))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"faults = {part!r} is not KIND@rank=R,step=S[,phase=P][,attempt=A][,seconds=T]"
            f"[,mib=M][,times=N][,micro=M][,bit=B] ({error})"
        ) from None

    places = [phase for phase in PHASES if phase not in (*LEFT, SCRIPT)] + list(POINTS)
    if fault.kind not in KINDS or fault.phase not in places:
        raise ConfigError(
            f"faults = {part!r}: KIND is one of {', '.join(KINDS)}, phase one of "
            f"{', '.join(places)}"
        )

    # A point has no model to spoil, and the driver has points only.
    needs_phase = fault.phase in POINTS and fault.kind in ("nan", "bitflip", "gradflip")
    if needs_phase or (fault.rank == DRIVER) != (fault.phase in DRIVER_POINTS):
        raise ConfigError(
            f"faults = {part!r}: {fault.kind} of {texts['rank']} cannot fire at {fault.phase}; see fault_points.py"
        )
    if fault.times < 1 or not 0 <= fault.bit <= 31:
        raise ConfigError(f"faults = {part!r}: times is at least 1, bit 0 to 31 of a float32")
    return fault


class Injector:
    """Fires the planned faults of one rank, or of the driver: each once, at its phase or point."""

    def __init__(self, record: Path) -> None:
        """Record faults in `record`, the run's faults.jsonl.

        `model_of` returns the model that faults of kind nan, bitflip and gradflip change.
        """
        self._record = record
        self.model_of: Callable[[], nn.Module | None] = lambda: None
        self._faults: list[Fault] = []
        # Unix s of the command. It identifies the command, because clocks of hosts differ
        self._started = 0.0
        # The step being computed; in a new process the step of the newest fault, after which the
        # process was started
        self._step = 0
        # How often each phase has begun since this step, or this group, has
        self._begun = Counter[str]()

    def plan(self, text: str, rank: int, attempt: int, started: float) -> None:
        """Schedule the plan's faults of this rank and attempt that have not fired yet.

        `started`: Unix s of the command.
        """
        self._started = started
        fired = Counter[tuple[str, int, int, str]]()
        if text:
            for event in read_json_lines(self._record):
                if event["event"] == "injected" and event.get("command") == started:
                    fired[event["kind"], event["rank"], event["step"], event["phase"]] += 1
                    self._step = max(self._step, event["step"])
        own = [fault for fault in parse_plan(text) if fault.rank == rank]
        once = [fault for fault in own if fault.attempt is None and fired[fault.key] < fault.tries]
        self._faults = once + [fault for fault in own if fault.attempt == attempt]
        has_points = any(fault.phase in POINTS for fault in self._faults)
        watch(self.at_point if has_points else None)

    def phase(self, step: int, phase: str) -> None:
        """Fire the faults that are planned for this phase of the step that is being computed."""
        if step != self._step or phase == "init":
            self._begun.clear()
        self._step = step
        micro = self._begun[phase]
        self._begun[phase] += 1
        for fault in list(self._faults):
            if (fault.step, fault.phase) == (step, phase) and fault.micro in (0, micro):
                self._fire(fault)

    def at_point(self, point: str) -> None:
        """Fire the faults planned for this point, from their step on, or in their attempt."""
        for fault in list(self._faults):
            if fault.phase != point:
                continue
            # The driver counts no steps.
            if fault.attempt is not None or fault.rank == DRIVER or fault.step <= self._step:
                self._fire(fault)

    def _fire(self, fault: Fault) -> None:
        # First, because firing may raise.
        self._faults.remove(fault)
        if fault.tries > 1:
            self._faults.append(replace(fault, times=fault.times - 1))
        log.warning("fault plan fires: %s", fault)
        fault.fire(self._record, self.model_of(), self._started)
