"""Break things on purpose, know where a rank was when it died, and tell a cause from its consequences.

A plan is data: `kill@rank=1,step=30,phase=backward;slow@rank=0,step=5,phase=data,seconds=0.2`. Every fault that fires
is first written to the run's `faults.jsonl`, so that a test can prove that it did.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import struct
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanoray.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from nanoray.model import GPT

PHASES = ("init", "data", "forward", "backward", "optimizer", "log", "eval", "checkpoint", "done")
KINDS = ("kill", "stop", "exit", "raise", "hang", "slow", "oom", "disk-full", "nan", "bitflip")
_SPARED = 64 << 10  # bytes that logs and metrics may still grow by while the disk is "full"


class InjectedFault(RuntimeError):
    """The exception of a `raise` fault."""


@dataclass(frozen=True)
class Fault:
    """One thing to break: what, on which rank, at which step (the one being computed) and phase.

    Without an attempt it fires once in a run, however often the step is done; with one, in that attempt.
    """

    kind: str
    rank: int
    step: int
    phase: str
    attempt: int | None = None
    seconds: float = 1.0  # slow: how long; disk-full: until there is space again
    mib: int = 0  # oom: how much to take (0 = until somebody ends it)
    times: int = 1  # nan: how many forward passes of this rank, replays included
    bit: int = 20  # bitflip: which of a float32's bits, 0 the least of the mantissa, 31 the sign

    @property
    def place(self) -> tuple[str, int, int, str]:
        """What tells this fault from others of its plan."""
        return self.kind, self.rank, self.step, self.phase

    def fire(self, record_in: Path, gpt: GPT) -> None:
        """Write down that this fault fires, then do it."""
        append_event(record_in, "injected", asdict(self))
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
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
            _poison(gpt, self.times)
        elif self.kind == "bitflip":
            _flip_bit(gpt, self.bit)
        else:
            raise InjectedFault(f"fault plan: raise on rank {self.rank} at step {self.step} in {self.phase}")


def append_event(path: Path, event: str, values: dict[str, object]) -> None:
    """Append one line to faults.jsonl, on disk before this returns: whoever wrote it may die in the next moment."""
    now = {"event": event, "time": round(time.time(), 4), "monotonic": time.monotonic()}
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, (json.dumps(now | values) + "\n").encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _fill_memory(mib: int) -> None:
    """Take memory and touch it until somebody ends this process, or `mib` is reached; then raise MemoryError."""
    taken: list[bytearray] = []
    while not mib or len(taken) * 64 < mib:
        taken.append(bytearray(os.urandom(1 << 20) * 64))
    time.sleep(60.0)  # Ray's memory monitor and the kernel look now and then
    raise MemoryError(f"fault plan: {mib} MiB taken, and nobody minded")


def _fill_disk(run: Path, seconds: float) -> None:
    """Let every file that grows beyond today's logs fail to, as on a full disk, for some seconds."""
    logs = [path for path in run.glob("**/*") if path.is_file() and "checkpoints" not in path.parts]
    largest = max(path.stat().st_size for path in logs)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + _SPARED, hard))
    again = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, (soft, hard)))
    again.daemon = True
    again.start()


def _poison(gpt: GPT, times: int) -> None:
    """Let the middle block put out NaN in its next `times` forward passes."""
    block, left = gpt.blocks[len(gpt.blocks) // 2], [times]
    compiled, block._compiled_call_impl = block._compiled_call_impl, None  # compiled code would not see the hook

    def hook(module: object, args: object, output: Tensor) -> Tensor:
        left[0] -= 1
        if not left[0]:
            handle.remove()
            block._compiled_call_impl = compiled
        return output * float("nan")

    handle = block.register_forward_hook(hook)


def _flip_bit(gpt: GPT, bit: int) -> None:
    """Flip one bit of one weight in the middle block, and say nothing."""
    import torch

    weight = gpt.blocks[len(gpt.blocks) // 2].get_parameter("attn.proj.weight")
    first = weight.data.view(-1).view(torch.int32)[:1]
    first.bitwise_xor_(torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32, device=first.device))


def parse_plan(text: str) -> tuple[Fault, ...]:
    """Parse `KIND@key=value,...;...`. Raises ConfigError that shows the part it cannot read."""
    faults = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        kind, _, rest = part.partition("@")
        try:
            values = dict(item.strip().split("=", 1) for item in rest.split(",") if item.strip())
            fault = Fault(
                kind=kind.strip(),
                rank=int(values.pop("rank")),
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
        if fault.kind not in KINDS or fault.phase not in PHASES or values:
            raise ConfigError(
                f"faults = {part!r}: KIND is one of {', '.join(KINDS)}, phase one of {', '.join(PHASES)}"
                + (f", and there is no key {', '.join(values)}" if values else "")
            )
        if fault.times < 1 or not 0 <= fault.bit <= 31:
            raise ConfigError(f"faults = {part!r}: times is at least 1, bit 0 to 31 of a float32 weight")
        faults.append(fault)
    return tuple(faults)


def faults_of(plan: str, rank: int, attempt: int, record: Path, started: float) -> list[Fault]:
    """Return the faults that this rank has in this attempt of a run that started at `started` (Unix seconds)."""
    fired = set()
    if plan and record.exists():
        for event in map(json.loads, record.read_text(encoding="utf-8").splitlines()):
            if event["event"] == "injected" and event["time"] >= started:
                fired.add((event["kind"], event["rank"], event["step"], event["phase"]))
    return [
        fault
        for fault in parse_plan(plan)
        if fault.rank == rank and (fault.attempt == attempt if fault.attempt is not None else fault.place not in fired)
    ]


class ProgressStamp:
    """Where this rank is, in 32 bytes of a mapped file that outlive a SIGKILL. Writing costs well under 1 µs."""

    _FORMAT = struct.Struct("<qqqd")  # step, phase, the completed step from which this attempt began, monotonic seconds

    def __init__(self, path: Path) -> None:
        self.base = 0
        path.write_bytes(bytes(self._FORMAT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._FORMAT.size)

    def set(self, step: int, phase: str) -> None:
        """Write the step being computed and its phase."""
        self._FORMAT.pack_into(self._map, 0, step, PHASES.index(phase), self.base, time.monotonic())

    @classmethod
    def read(cls, path: Path) -> tuple[int, str] | None:
        """Return (step, phase) as last written, or None when there is no stamp."""
        found = cls.read_all(path)
        return found[:2] if found else None

    @classmethod
    def read_all(cls, path: Path) -> tuple[int, str, int, float] | None:
        """Return (step, phase, base, the writer's monotonic seconds) as last written, or None without a stamp."""
        try:
            step, phase, base, seconds = cls._FORMAT.unpack(path.read_bytes())
            return step, PHASES[phase], base, seconds
        except (OSError, struct.error, IndexError):
            return None


_COLLECTIVE_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "timed out waiting",
    "broken pipe",
    "application timeout caused pair closure",
    "nccl",
    "gloo",
)


def is_collective_error(error: BaseException) -> bool:
    """Say whether `error` is how a process group reports that a peer is gone: a consequence, never the cause."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _COLLECTIVE_SIGNS)
