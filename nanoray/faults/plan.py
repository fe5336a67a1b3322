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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.atomic import append_line, read_json_lines
from nanoray.errors import ConfigError
from nanoray.faults.progress import PHASES
from nanoray.points import DRIVER_POINTS, POINTS, watch

if TYPE_CHECKING:
    from torch import Tensor, nn


log = logging.getLogger("nanoray")
KINDS = (
    "kill",
    "stop",
    "exit",
    "raise",
    "hang",
    "slow",
    "oom",
    "disk-full",
    "nan",
    "bitflip",
    "gradflip",
)
DRIVER = -1  # its "rank"
_SPARE_BYTES = 64 << 10  # logs and metrics may still grow by this while the disk is "full"


class InjectedFault(RuntimeError):
    """The exception of a `raise` fault."""


@dataclass(frozen=True)
class Fault:
    """One fault to inject: its kind, and the rank (or DRIVER), step (being computed) and phase at
    which it fires.

    Without an attempt it fires once per run, even if the step is repeated; with one, in that
    attempt only. `phase` may also be one of POINTS: it fires when that is next reached at this step
    or later, or in this attempt.
    """

    kind: str
    rank: int
    step: int
    phase: str
    attempt: int | None = None
    seconds: float = 1.0  # slow: how long to sleep; disk-full: until there is space again
    mib: int = 0  # oom: how much to allocate (0 = until the process is killed)
    # Nan, gradflip: of how many forward passes of this rank, replays and audits included
    times: int = 1
    # Bitflip, gradflip: bit of a float32; 0 is the lowest of the mantissa, 31 the sign
    bit: int = 20

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What identifies this fault within its plan."""
        return self.kind, self.rank, self.step, self.phase

    def fire(self, record_in: Path, gpt: nn.Module | None, started: float = 0.0) -> None:
        """Record that this fault fires, in the command that was `started` then (Unix s), and inject
        it.
        """
        append_event(record_in, "injected", asdict(self) | {"command": started})
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            # To this thread, which then goes no further. A process may be frozen by another thread,
            # a moment later.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif self.kind == "exit":
            os._exit(3)
        elif self.kind == "hang":
            time.sleep(3600.0)
        elif self.kind == "slow":
            time.sleep(self.seconds)
        elif self.kind == "oom":
            _fill_memory(self.mib)
        elif self.kind == "disk-full":
            _fill_disk(record_in.parent, self.seconds)
        elif self.kind == "nan":
            _spoil(gpt, self.times, lambda output: output * float("nan"))
        elif self.kind == "bitflip":
            _flip_bit(gpt, self.bit)
        elif self.kind == "gradflip":
            _spoil(gpt, self.times, partial(_spoil_gradient, bit=self.bit))
        else:
            raise InjectedFault(
                f"fault plan: raise on rank {self.rank} at step {self.step} in {self.phase}"
            )


def append_event(path: Path, event: str, values: dict[str, object]) -> None:
    """Append one line to faults.jsonl and sync it to disk: the writer may be killed right after."""
    now = {"event": event, "time": round(time.time(), 4), "monotonic": time.monotonic()}
    append_line(path, json.dumps(now | values), sync=True)


def _fill_memory(mib: int) -> None:
    """Allocate and touch memory until this process is killed, or `mib` is reached; then raise
    MemoryError.
    """
    taken: list[bytearray] = []
    while not mib or len(taken) * 64 < mib:
        taken.append(bytearray(os.urandom(1 << 20) * 64))
    time.sleep(60.0)  # give Ray's memory monitor and the kernel time to notice
    raise MemoryError(f"fault plan: {mib} MiB allocated, and the process was not killed")


def _fill_disk(run: Path, seconds: float) -> None:
    """For some seconds, fail every write that makes a file larger than the logs are now, as on a
    full disk.
    """
    logs = [path for path in run.glob("**/*") if path.is_file() and "checkpoints" not in path.parts]
    largest = max(path.stat().st_size for path in logs)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + _SPARE_BYTES, hard))
    undo = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, (soft, hard)))
    undo.daemon = True
    undo.start()


def _spoil(gpt: nn.Module | None, times: int, spoil: Callable[[Tensor], Tensor]) -> None:
    """Let `spoil` replace the middle block's output in its next `times` forward passes."""
    block, left = _middle_block(gpt), [times]
    # Compiled code would not see the hook
    compiled, block._compiled_call_impl = block._compiled_call_impl, None

    def hook(
        module: object, args: object, output: Tensor | tuple[Tensor, Tensor]
    ) -> Tensor | tuple[Tensor, Tensor]:
        left[0] -= 1
        if not left[0]:
            handle.remove()
            block._compiled_call_impl = compiled
        if isinstance(output, tuple):  # with experts, a block also tells of its routing
            return spoil(output[0]), output[1]
        return spoil(output)

    handle = block.register_forward_hook(hook)


def _middle_block(gpt: nn.Module | None) -> Any:
    assert gpt is not None, "parse_plan wants a phase for such a fault"
    blocks: Any = getattr(gpt, "blocks", None) or [*gpt.children()] or [gpt]
    # A stage has some of them
    own = [block for block in blocks if any(True for _ in block.parameters())] or [gpt]
    return own[len(own) // 2]


def _flip_bit(gpt: nn.Module | None, bit: int) -> None:
    """Flip one bit of one weight in the middle block."""
    named = dict(_middle_block(gpt).named_parameters())
    weight = named["attn.proj.weight" if "attn.proj.weight" in named else "conv1.weight"].data
    # With fsdp this rank has some rows
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    _flip(local.view(-1)[:1], bit)


def _spoil_gradient(output: Tensor, bit: int) -> Tensor:
    """Flip a bit of the largest element of the gradient of a block's output, when backward comes
    there.
    """

    def flipped(gradient: Tensor) -> Tensor:
        flat = gradient.float().flatten().clone()
        at = int(flat.abs().argmax())
        _flip(flat[at : at + 1], bit)
        return flat.view_as(gradient).to(gradient.dtype)

    if output.requires_grad:
        output.register_hook(flipped)
    return output


def _flip(element: Tensor, bit: int) -> None:
    """Flip a bit of one float32, (1,), in place."""
    import torch

    mask = torch.tensor(
        1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32, device=element.device
    )
    element.view(torch.int32).bitwise_xor_(mask)


def parse_plan(text: str) -> tuple[Fault, ...]:
    """Parse `KIND@key=value,...;...`. Raises ConfigError with the part that is invalid."""
    faults = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        kind, _, rest = part.partition("@")
        try:
            values = dict(item.strip().split("=", 1) for item in rest.split(",") if item.strip())
            fault = Fault(
                kind=kind.strip(),
                rank=DRIVER if (rank := values.pop("rank")) == "driver" else int(rank),
                step=int(values.pop("step")),
                phase=values.pop("phase", "forward"),
                attempt=int(values.pop("attempt")) if "attempt" in values else None,
                seconds=float(values.pop("seconds", 1.0)),
                mib=int(values.pop("mib", 0)),
                times=int(values.pop("times", 1)),
                bit=int(values.pop("bit", 20)),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"faults = {part!r} is not KIND@rank=R,step=S[,phase=P][,attempt=A][,seconds=T][,mib=M][,times=N]"
                f"[,bit=B] ({error})"
            ) from None
        places = [phase for phase in PHASES if phase != "regroup"] + [*POINTS]
        if fault.kind not in KINDS or fault.phase not in places or values:
            raise ConfigError(
                f"faults = {part!r}: KIND is one of {', '.join(KINDS)}, phase one of "
                f"{', '.join(places)}"
                + (f", and there is no key {', '.join(values)}" if values else "")
            )
        needs_phase = fault.phase in POINTS and fault.kind in ("nan", "bitflip", "gradflip")
        if needs_phase or (fault.rank == DRIVER) != (fault.phase in DRIVER_POINTS):
            raise ConfigError(
                f"faults = {part!r}: {fault.kind} of {rank} cannot fire at {fault.phase}; see "
                "points.py"
            )
        if fault.times < 1 or not 0 <= fault.bit <= 31:
            raise ConfigError(f"faults = {part!r}: times is at least 1, bit 0 to 31 of a float32")
        faults.append(fault)
    return tuple(faults)


class Injector:
    """Lets the planned faults of one rank, or of the driver, fire: each once, at its phase or
    point.
    """

    def __init__(self, record: Path) -> None:
        """`record`: the run's faults.jsonl. `model_of` returns what faults of kind nan, bitflip and
        gradflip change.
        """
        self._record = record
        self.model_of: Callable[[], nn.Module | None] = lambda: None
        self._faults: list[Fault] = []
        self._started = 0.0  # of the command; it names it, because clocks of hosts differ
        # The one being computed; in a new process that of the newest fault, which made it necessary
        self._step = 0

    def plan(self, text: str, rank: int, attempt: int, started: float) -> None:
        """Let the plan's faults of this rank and attempt fire that have not, in a run started at
        `started` (Unix s).
        """
        fired, self._started = set(), started
        if text:
            for event in read_json_lines(self._record):
                if event["event"] == "injected" and event.get("command") == started:
                    fired.add((event["kind"], event["rank"], event["step"], event["phase"]))
                    self._step = max(self._step, event["step"])
        mine = [fault for fault in parse_plan(text) if fault.rank == rank]
        once = [fault for fault in mine if fault.attempt is None and fault.key not in fired]
        self._faults = once + [fault for fault in mine if fault.attempt == attempt]
        watch(self.at_point if any(fault.phase in POINTS for fault in self._faults) else None)

    def phase(self, step: int, phase: str) -> None:
        """Fire what is planned for this phase of the step that is being computed."""
        self._step = step
        self._fire(fault for fault in self._faults if (fault.step, fault.phase) == (step, phase))

    def at_point(self, point: str) -> None:
        """Fire what is planned for this point: from its step on, or in its attempt. The driver
        counts no steps.
        """
        here = (fault for fault in self._faults if fault.phase == point)
        self._fire(
            f for f in here if f.attempt is not None or f.rank == DRIVER or f.step <= self._step
        )

    def _fire(self, faults: Iterable[Fault]) -> None:
        for fault in [*faults]:
            self._faults.remove(fault)
            log.warning("fault plan fires: %s", fault)
            fault.fire(self._record, self.model_of(), self._started)
