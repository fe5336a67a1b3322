"""Break things on purpose, know where a rank was when it died, and tell a cause from its consequences.

A plan is data: `kill:rank=1,step=30,phase=backward;slow:rank=0,step=5,phase=data,seconds=0.2`. Every fault that fires
is first written to the run's `faults.jsonl`, so that a test can prove that it did.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from nanoray.errors import ConfigError

PHASES = ("init", "data", "forward", "backward", "optimizer", "log", "eval", "checkpoint", "done")
KINDS = ("kill", "stop", "exit", "raise", "hang", "slow")


class InjectedFault(RuntimeError):
    """The exception of a `raise` fault."""


@dataclass(frozen=True)
class Fault:
    """One thing to break: what, on which rank, at which step (the one being computed) and phase, in which attempt."""

    kind: str
    rank: int
    step: int
    phase: str
    attempt: int = 0
    seconds: float = 1.0

    def fire(self, record_in: Path) -> None:
        """Write down that this fault fires, then do it."""
        fd = os.open(record_in, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, (json.dumps(self.__dict__) + "\n").encode())
        os.fsync(fd)
        os.close(fd)
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
        else:
            raise InjectedFault(f"fault plan: raise on rank {self.rank} at step {self.step} in {self.phase}")


def parse_plan(text: str) -> tuple[Fault, ...]:
    """Parse `KIND:key=value,...;...`. Raises ConfigError that shows the part it cannot read."""
    faults = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        kind, _, rest = part.partition(":")
        try:
            values = dict(item.split("=", 1) for item in rest.split(",") if item)
            fault = Fault(
                kind=kind.strip(),
                rank=int(values.pop("rank")),
                step=int(values.pop("step")),
                phase=values.pop("phase", "forward"),
                attempt=int(values.pop("attempt", 0)),
                seconds=float(values.pop("seconds", 1.0)),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"fault = {part!r} is not KIND:rank=R,step=S[,phase=P][,attempt=A][,seconds=T] ({error})"
            ) from None
        if kind not in KINDS or fault.phase not in PHASES or values:
            raise ConfigError(
                f"fault = {part!r}: KIND is one of {', '.join(KINDS)}, phase one of {', '.join(PHASES)}"
                + (f", and there is no key {', '.join(values)}" if values else "")
            )
        faults.append(fault)
    return tuple(faults)


class ProgressStamp:
    """Where this rank is, in 24 bytes of a mapped file that outlive a SIGKILL. Writing costs well under 1 µs."""

    _FORMAT = struct.Struct("<qqd")  # step, phase, monotonic seconds

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(self._FORMAT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._FORMAT.size)

    def set(self, step: int, phase: str) -> None:
        """Write the step being computed and its phase."""
        self._FORMAT.pack_into(self._map, 0, step, PHASES.index(phase), time.monotonic())

    @classmethod
    def read(cls, path: Path) -> tuple[int, str] | None:
        """Return (step, phase) as last written, or None when there is no stamp."""
        found = cls.read_all(path)
        return found[:2] if found else None

    @classmethod
    def read_all(cls, path: Path) -> tuple[int, str, float] | None:
        """Return (step, phase, the writer's monotonic seconds) as last written, or None when there is no stamp."""
        try:
            step, phase, seconds = cls._FORMAT.unpack(path.read_bytes())
            return step, PHASES[phase], seconds
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
