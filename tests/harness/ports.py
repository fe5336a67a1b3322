"""TCP ports of 127.0.0.1 for tests: one that stays free until used, one that refuses."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

_LOWEST = 20000  # Ray gives its workers the ports from 10002 to 19999


def free_port() -> int:
    """Return a free port that the kernel assigns to no other process until it is used."""
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(_LOWEST, highest)
    for port in random.SystemRandom().sample(ports, min(len(ports), 100)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:  # a kernel that gives away almost all ports
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Hold a port without a listener: connections are refused, and no other process gets it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
