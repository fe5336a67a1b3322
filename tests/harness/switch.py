"""A network switch in user space, whose links have delay, jitter, rate, loss and a cut.

    host a ── eth0 (TAP) ── link a ─┐
    host b ── eth0 (TAP) ── link b ─┼── switch ── frames go where their MAC address was last seen
    host c ── eth0 (TAP) ── link c ─┘

Each link has two directions with a shape of their own: `up` from the host into the switch, `down`
to it. So it needs neither netem nor a traffic shaper in the kernel, but /dev/net/tun and root. The
switch is a process of its own, because a test's interpreter would make frames late. It reads
commands from stdin, one JSON object a line, and answers each with a line.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
# A frame of Ethernet with a packet of 1500 bytes, and a tag
_FRAME = 1522
# What waits at a slow link before it: a tenth of a second of a 100 Mbit/s link
_QUEUE_BYTES = 1_250_000


@dataclass
class Direction:
    """One direction of a link: its shape, and the time when its last frame will have left."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  # added, from 0 to this; order is kept
    mbit_per_s: float = 0.0  # 0: without a limit
    loss: float = 0.0  # share of the frames
    cut: bool = False
    free_at: float = 0.0
    last_arrival: float = 0.0
    lost: int = 0
    passed: int = 0

    def arrival(self, now: float, nbytes: int, chance: random.Random) -> float | None:
        """Return when a frame that comes now gets to the other end; None if it is lost."""
        if self.cut or (self.loss and chance.random() < self.loss):
            self.lost += 1
            return None

        # It waits until those before it have left, unless too many wait already.
        left = max(now, self.free_at)
        if self.mbit_per_s:
            bytes_per_s = self.mbit_per_s * 1e6 / 8
            if (left - now) * bytes_per_s > _QUEUE_BYTES:
                self.lost += 1
                return None
            left += nbytes / bytes_per_s
        self.free_at = left

        self.passed += 1
        arrival = left + self.delay_s + self.jitter_s * chance.random()
        self.last_arrival = max(arrival, self.last_arrival)
        return self.last_arrival


@dataclass
class Port:
    """A host's TAP device and the two directions of its link."""

    tap: int
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)


class Switch:
    """Frames between ports, and what is on its way."""

    def __init__(self) -> None:
        self._ports: dict[str, Port] = {}
        self._seen: dict[bytes, str] = {}  # MAC address -> host
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._chance = random.Random(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        self._commands = b""

    def run(self) -> None:
        """Forward frames and obey commands until stdin closes."""
        while True:
            wait = None
            if self._on_the_way:
                wait = max(0.0, self._on_the_way[0][0] - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.data is None:
                    if not self._read_commands():
                        return
                else:
                    self._receive(key.data)
            self._deliver()

    def _read_commands(self) -> bool:
        """Obey what stdin has; return whether it is still open."""
        data = os.read(sys.stdin.fileno(), 65536)
        if not data:
            return False
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            answer = getattr(self, f"_do_{command.pop('do')}")(**command)
            print(json.dumps(answer), flush=True)
        return True

    def _do_connect(self, host: str, netns: str) -> bool:
        tap = _tap_in(netns, "eth0")
        self._ports[host] = Port(tap)
        self._selector.register(tap, selectors.EVENT_READ, host)
        return True

    def _do_disconnect(self, host: str) -> bool:
        port = self._ports.pop(host, None)
        if port:
            self._selector.unregister(port.tap)
            os.close(port.tap)
            self._seen = {mac: name for mac, name in self._seen.items() if name != host}
        return True

    def _do_shape(self, host: str, direction: str, **shape: Any) -> bool:
        link = getattr(self._ports[host], direction)
        for name, value in shape.items():
            setattr(link, name, value)
        return True

    def _do_counts(self, host: str) -> dict[str, int]:
        port = self._ports[host]
        return {
            "sent": port.up.passed,
            "sent_lost": port.up.lost,
            "received": port.down.passed,
            "received_lost": port.down.lost,
        }

    def _receive(self, host: str) -> None:
        """Take the frames that a host has sent and enter when each arrives where."""
        port = self._ports.get(host)
        if not port:
            return
        for _ in range(64):  # then other hosts have their turn
            try:
                frame = os.read(port.tap, _FRAME)
            except BlockingIOError:
                return
            except OSError:  # its host is gone
                self._do_disconnect(host)
                return
            now = time.monotonic()
            self._seen[frame[6:12]] = host
            at_switch = port.up.arrival(now, len(frame), self._chance)
            if at_switch is None:
                continue
            for other in self._receivers(host, frame[:6]):
                arrival = other.down.arrival(at_switch, len(frame), self._chance)
                if arrival is not None:
                    self._count += 1
                    entry = (arrival, self._count, other.tap, frame)
                    heapq.heappush(self._on_the_way, entry)

    def _receivers(self, sender: str, mac: bytes) -> list[Port]:
        known = self._seen.get(mac)
        if known in self._ports:
            return [self._ports[known]]
        return [port for name, port in self._ports.items() if name != sender]

    def _deliver(self) -> None:
        """Hand over the frames whose time has come."""
        now = time.monotonic()
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, _, tap, frame = heapq.heappop(self._on_the_way)
            try:
                os.write(tap, frame)
            except OSError:  # the host is gone, or its device is down: a lost frame
                continue


def _tap_in(netns: str, name: str) -> int:
    """Make a TAP device in a network namespace; return its file descriptor, which does not block.

    The descriptor belongs to the namespace in which it was opened, also after this process has
    left that.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if libc.setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {path}")
        finally:
            os.close(descriptor)

    own = f"/proc/{os.getpid()}/ns/net"
    home = os.open(own, os.O_RDONLY)
    try:
        enter(f"/run/netns/{netns}")
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(tap, _TUNSETIFF, request)
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(home)
    return tap


# ---- in the test's process -----------------------------------------------------------------------


class SwitchProcess:
    """The switch, as the test commands it; a context manager that ends it."""

    def __enter__(self) -> SwitchProcess:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        assert self._process.stdout
        self._process.stdout.close()

    def connect(self, host: str, netns: str) -> None:
        """Give a network namespace a device `eth0` that ends in this switch."""
        self._ask(do="connect", host=host, netns=netns)

    def disconnect(self, host: str) -> None:
        """Take the host's device away."""
        self._ask(do="disconnect", host=host)

    def shape(self, host: str, *directions: str, **shape: float | bool) -> None:
        """Set what a link's directions ("up", "down"; both by default) do: see `Direction`."""
        for direction in directions or ("up", "down"):
            self._ask(do="shape", host=host, direction=direction, **shape)

    def cut(self, host: str) -> None:
        """Lose each frame of this host, in both directions."""
        self.shape(host, cut=True)

    def heal(self, host: str) -> None:
        """End a cut."""
        self.shape(host, cut=False)

    def counts(self, host: str) -> dict[str, int]:
        """Return how many frames a host has sent and received, and how many were lost."""
        return self._ask(do="counts", host=host)

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the switch has ended with {self._process.poll()}"
        return json.loads(answer)


def missing() -> str:
    """Return why there can be no switch here; empty when there can."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"a network between hosts needs /dev/net/tun: {error.strerror}"
    return ""


if __name__ == "__main__":
    Switch().run()
