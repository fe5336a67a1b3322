"""Slow links between ranks on one machine: real TCP, over interfaces that this process relays.

    node 0 in a network namespace                    node 1 in another one
    gloo ─► TCP ─► link0 10.77.0.1                   link0 10.77.0.2 ◄─ TCP ◄─ gloo
                     │ packets      ┌──────────┐        ▲
                     └─────────────►│ relay    │────────┘
                                    └──────────┘
                                      up-link of the sender:     one packet after the other, at `mbit_per_s`
                                      on its way:                `delay_ms`
                                      down-link of the receiver: one packet after the other, at `mbit_per_s`

Each node has a full-duplex link to one switch, as a node of a cluster or a house on the internet
has; its ranks reach each other through its loopback. No packet is lost. The interfaces are tun
devices, which any program may open and own: the kernel hands it what is sent there as packets, so
the relay needs neither root nor the kernel's traffic control, only user namespaces and
/dev/net/tun. It counts the bytes, with all headers.
"""

from __future__ import annotations

import fcntl
import heapq
import math
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nanoray.bench.harness.processes import ChildFailed
from nanoray.errors import ConfigError

DEVICE = "link0"
TUN = "/dev/net/tun"
MTU = 9000  # jumbo frames: fewer packets for the relay
LONGEST_WAIT_S = 0.05
LINK_S = 60.0  # for a process to start, and to make its end of a link
# Linux: if_tun.h, sockios.h, if.h
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_SIOCSIFADDR = 0x8916
_SIOCSIFNETMASK = 0x891C
_SIOCSIFMTU = 0x8922
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_DESTINATION = slice(16, 20)  # of an IPv4 packet


@dataclass(frozen=True)
class LinkSpeed:
    """The link of each node: what it carries in each direction, and how long a packet travels."""

    delay_ms: float
    mbit_per_s: float

    def __str__(self) -> str:
        return f"{self.delay_ms:g} ms / {self.mbit_per_s:g} Mbit/s"

    @property
    def bytes_per_s(self) -> float:
        return 1e6 * self.mbit_per_s / 8


def parse_links(text: str, example: str) -> list[LinkSpeed | None]:
    """Return the links of a flag --links, MS/MBIT,...; "none" is no link. Raises ConfigError."""
    links: list[LinkSpeed | None] = []
    for part in text.split(","):
        if part == "none":
            links.append(None)
            continue
        try:
            delay_ms, mbit_per_s = map(float, part.split("/"))
        except ValueError:
            raise ConfigError(
                f"links = {text}: {part} is no MS/MBIT; write for example {example}"
            ) from None
        if not (0 <= delay_ms < math.inf and 0 < mbit_per_s < math.inf):
            raise ConfigError(
                f"links = {text}: {part} is no link; a delay is at least 0 ms, and a speed above 0"
            )
        links.append(LinkSpeed(delay_ms, mbit_per_s))
    return links


def why_not() -> str | None:
    """Return why this machine cannot have such links; None if it can."""
    for program in ("unshare", "nsenter"):
        if not shutil.which(program):
            return f"there is no `{program}` (util-linux)"
    probe = f"open({TUN!r}, 'r+b', buffering=0)"
    done = subprocess.run(
        [*_in_namespace(), sys.executable, "-c", probe], capture_output=True, text=True
    )
    if done.returncode == 0:
        return None
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return f"no network namespace with a {TUN} ({last[0]})"


def address_of(node: int) -> str:
    """Return the address of a node on its link."""
    return f"10.77.0.{node + 1}"


class ThinLinks:
    """The links of `nodes` nodes. Leaving the `with` block ends them, and the traffic on them."""

    def __init__(self, nodes: int, speed: LinkSpeed, folder: Path) -> None:
        """Make the relay of links of this speed; `folder` gets a socket, so its path is short."""
        self.speed = speed
        # (Unix seconds, bytes that all nodes have sent by then), one entry per wake of the relay
        self.samples: list[tuple[float, int]] = [(time.time(), 0)]
        self._nodes = nodes
        self._socket = folder / "links.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._tuns: dict[int, int] = {}  # file descriptor by node
        self._over = threading.Event()
        self._relay = threading.Thread(target=self._run, name="thin-links", daemon=True)

    def __enter__(self) -> ThinLinks:
        self._listener.bind(str(self._socket))
        self._listener.listen(self._nodes)
        self._listener.setblocking(False)
        self._relay.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._relay.join()
        # A tun device disappears with its last descriptor.
        for descriptor in self._tuns.values():
            os.close(descriptor)
        self._listener.close()
        self._socket.unlink()

    def command(self, node: int, argv: Sequence[str], first: int | None = None) -> list[str]:
        """Return the command line that runs `argv` at the end of a node's link.

        first: the process that runs there already; None makes the link. Raises ChildFailed where
        that process has not made it in time.
        """
        if first is None:
            module = "nanoray.bench.harness.thin_links"
            own = [sys.executable, "-m", module, str(self._socket), str(node)]
            return [*_in_namespace(), *own, *argv]
        deadline = time.monotonic() + LINK_S
        while node not in self._tuns:
            if time.monotonic() > deadline:
                raise ChildFailed(f"node {node} has no link after {LINK_S:g} s")
            time.sleep(LONGEST_WAIT_S)
        join = ["nsenter", f"--target={first}", "--user", "--net", "--preserve-credentials", "--"]
        return [*join, *argv]

    def sent_between(self, start: float, end: float) -> int:
        """Return the bytes that all nodes together sent between two moments, in Unix seconds."""

        def by(moment: float) -> int:
            """Return the bytes of the last sample until a moment."""
            after = bisect_right(self.samples, moment, key=lambda sample: sample[0])
            return self.samples[after - 1][1] if after else 0

        return by(end) - by(start)

    # On the thread of the relay.

    def _run(self) -> None:
        """Take each packet from its sender, and hand it to its receiver when it has arrived."""
        waiting: list[tuple[float, int, int, bytes]] = []  # (seconds, number, receiver, packet)
        up_free = [0.0] * self._nodes  # when a node's link has carried what was sent so far
        down_free = [0.0] * self._nodes
        number = 0
        sent = 0
        while not self._over.is_set():
            wait_s = LONGEST_WAIT_S
            if waiting:
                wait_s = min(wait_s, max(0.0, waiting[0][0] - time.monotonic()))
            listener = self._listener.fileno()
            ready, _, _ = select.select([listener, *self._tuns.values()], [], [], wait_s)
            if listener in ready:
                self._accept()

            before = sent
            for node, descriptor in list(self._tuns.items()):
                if descriptor not in ready:
                    continue
                for packet in _packets_of(descriptor):
                    receiver = packet[_DESTINATION][3] - 1
                    # Broadcasts and IPv6's greetings have no receiver here.
                    if packet[0] >> 4 != 4 or receiver not in range(self._nodes):
                        continue
                    takes_s = len(packet) / self.speed.bytes_per_s
                    up_free[node] = max(time.monotonic(), up_free[node]) + takes_s
                    # The first byte may arrive before the last one has left, so the two links do
                    # not add up, unless several nodes send to one.
                    arrival = up_free[node] + 1e-3 * self.speed.delay_ms
                    down_free[receiver] = max(arrival, down_free[receiver] + takes_s)
                    number += 1
                    sent += len(packet)
                    heapq.heappush(waiting, (down_free[receiver], number, receiver, packet))
            if sent > before:
                self.samples.append((time.time(), sent))

            while waiting and waiting[0][0] <= time.monotonic():
                _, _, receiver, packet = heapq.heappop(waiting)
                _deliver(self._tuns.get(receiver), packet)

    def _accept(self) -> None:
        """Receive the device of a node that has just started."""
        connection, _ = self._listener.accept()
        with closing(connection):
            connection.setblocking(True)
            node, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
            os.set_blocking(descriptors[0], False)
            self._tuns[int(node)] = descriptors[0]
            # Only now can the node reach the others, so it waits for this byte.
            connection.sendall(b".")


def _packets_of(descriptor: int) -> list[bytes]:
    """Return the packets that wait in a device; at most as many as its queue holds."""
    packets = []
    for _ in range(500):
        try:
            packets.append(os.read(descriptor, MTU + 100))
        except BlockingIOError:
            break
    return packets


def _deliver(descriptor: int | None, packet: bytes) -> None:
    """Hand a packet to the kernel of its receiver, which may be gone."""
    if descriptor is None:
        return
    try:
        os.write(descriptor, packet)
    except OSError:
        return


def _in_namespace() -> list[str]:
    return ["unshare", "--map-root-user", "--net", "--"]


# In the first process of a node, before its program.


def open_link(path: str, node: int) -> None:
    """Make this namespace's end of a link, and hand it to the relay that listens at `path`."""
    tun = os.open(TUN, os.O_RDWR)
    name = DEVICE.encode()
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name, _IFF_TUN | _IFF_NO_PI))
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as control:

        def set_address(order: int, address: str) -> None:
            packed = struct.pack("16sH2x4s16x", name, socket.AF_INET, socket.inet_aton(address))
            fcntl.ioctl(control, order, packed)

        set_address(_SIOCSIFADDR, address_of(node))
        set_address(_SIOCSIFNETMASK, "255.255.255.0")
        fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", name, MTU))
        for device in (name, b"lo"):
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device, _IFF_UP))

    with closing(socket.socket(socket.AF_UNIX)) as relay:
        relay.connect(path)
        socket.send_fds(relay, [str(node).encode()], [tun])
        if not relay.recv(1):
            raise ChildFailed("the relay of the links is gone")
    # The relay has a descriptor of its own.
    os.close(tun)


def main() -> None:
    """Open a link, and become the program of its node."""
    path, node, *argv = sys.argv[1:]
    open_link(path, int(node))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
