"""The links between hosts as the kernel measures them: round trips, and packets that were sent again.

A collective takes equally long on every rank, whichever link is slow, so its time names no host. But
the kernel measures each TCP connection anyway, also in steps that are not traced:

    rank's connections of gloo ── TCP_INFO ──► (hosts, 4) ── gather ──► rank 0: (hosts, hosts, 4)

A host is slow when its best link is slow beside those of the other hosts. With two hosts there is
one link, and nothing to compare its round trips with; only lost packets are named then. NCCL's own
connections are not seen, but each step's vote travels over gloo between the same hosts.
"""

from __future__ import annotations

import platform
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoray.mesh.mesh import Mesh

# Offsets in struct tcp_info (linux/tcp.h); Linux 4.9 has all of them
_RTT_US = 68
_RESENT = 100
_DATA_SEGMENTS = 156
_DELIVERY_RATE = 160
_SIZE = 168

# A link is slow in a window if it is slower than the others by this factor and by this difference
SLOW_TIMES = 4.0
SLOW_MS = 2.0
LOSS_PERCENT = 1.0  # packets sent again; datacenter links lose less than one in a thousand
MIN_RESENT = 4  # fewer in a window may be probes that a slow answer has caused, and no loss
MIN_SEGMENTS = 20  # of a link in a window; fewer say nothing about loss or speed
# It is named when it was slow in 6 of the last 8 windows, and again when in 2 or fewer
WINDOWS = 8
NAMED_AT = 6
OVER_AT = 2


class Segments(NamedTuple):
    """What the kernel has counted for the connections of a rank to one host."""

    rtt_us: float  # the shortest smoothed round trip
    bytes_per_s: float  # the highest rate of delivery
    resent: int
    sent: int  # segments with data, those sent again included


class HostLink(NamedTuple):
    """A link between two hosts in one window of steps."""

    rtt_ms: float
    gbps: float  # 1e9 bytes/s; 0: too little was sent to say
    resent_percent: float
    resent: int  # packets


def read_segments(connections: Sequence[tuple[str, str, bytes]]) -> dict[str, Segments]:
    """Return what was counted per other host; `connections`: (own, other address, tcp_info).

    Of several connections the best one counts: where messages are rare, the other end waits up to
    40 ms before it acknowledges one, and a connection on which that happens seems slow.
    """
    found: dict[str, Segments] = {}
    for own, other, info in connections:
        if own == other or len(info) < _SIZE:  # on this host, or an old kernel
            continue
        (sent,) = struct.unpack_from("I", info, _DATA_SEGMENTS)
        if not sent:  # the round trip of its handshake alone, and no rate
            continue
        (rtt_us,) = struct.unpack_from("I", info, _RTT_US)
        (resent,) = struct.unpack_from("I", info, _RESENT)
        (bytes_per_s,) = struct.unpack_from("Q", info, _DELIVERY_RATE)
        before = found.get(other, Segments(float("inf"), 0.0, 0, 0))
        found[other] = Segments(
            rtt_us=min(float(rtt_us), before.rtt_us),
            bytes_per_s=max(float(bytes_per_s), before.bytes_per_s),
            resent=before.resent + resent,
            sent=before.sent + sent,
        )
    return found


class Links:
    """Measures the links of this rank's host, and on rank 0 names a slow one. (all ranks)"""

    def __init__(self, mesh: Mesh, note: Callable[[str], None]) -> None:
        """`note` shows a line to the user."""
        self._mesh = mesh
        self._note = note
        self._hosts = list(dict.fromkeys(mesh.hosts))
        self._last: dict[str, Segments] = {}
        self._watch: LinkWatch | None = None

    def begin_run(self) -> None:
        """Read the counters, and ask the hosts for their names. (all ranks)"""
        self._last = self._read()
        names = self._mesh.gather(platform.node())
        if names is None:
            return
        described = []
        for host in self._hosts:
            ranks = [rank for rank, own in enumerate(self._mesh.hosts) if own == host]
            listed = ", ".join(map(str, ranks))
            described.append(f"{names[ranks[0]]} (rank {listed})")
        self._watch = LinkWatch(described)

    def measured(self) -> dict[str, Any]:
        """Return the metrics of the links since the last record. (all ranks)"""
        rows = self._mesh.gather_tensor(self._window())
        if rows is None or self._watch is None:
            return {}

        # The ranks of a host share its links.
        by_host: dict[tuple[int, int], Segments] = {}
        for rank, row in enumerate(rows):
            own = self._hosts.index(self._mesh.hosts[rank])
            for other in range(len(self._hosts)):
                counted = Segments(*row[other].tolist())
                if counted.sent:
                    before = by_host.get((own, other))
                    by_host[own, other] = _together(before, counted) if before else counted
        metrics, messages = self._watch.add(by_host)
        for message in messages:
            self._note(message)
        return metrics

    def _window(self) -> Tensor:
        """Return the `Segments` of this window to each host: (hosts, 4), float64."""
        now = self._read()
        window = torch.zeros(len(self._hosts), 4, dtype=torch.float64)
        for i, host in enumerate(self._hosts):
            if host in now:
                before = self._last.get(host, Segments(0.0, 0.0, 0, 0))
                new = now[host]._replace(
                    resent=max(0, now[host].resent - before.resent),
                    sent=max(0, now[host].sent - before.sent),
                )
                window[i] = torch.tensor(new, dtype=torch.float64)
        self._last = now
        return window

    def _read(self) -> dict[str, Segments]:
        infos = []
        for connection in self._mesh.sealed.connections():
            with suppress(OSError):  # it has just been closed
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                ends = connection.getsockname()[0], connection.getpeername()[0]
                infos.append((*(_plain(end) for end in ends), info))
        return read_segments(infos)


class LinkWatch:
    """Names a host, or a link, that is slow in most of the newest windows. (rank 0 only)"""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts`: their names and ranks, for messages."""
        self._hosts = hosts
        self._slow: deque[dict[str, str]] = deque(maxlen=WINDOWS)  # what was slow, and how
        self._named: set[str] = set()

    def add(self, table: dict[tuple[int, int], Segments]) -> tuple[dict[str, float], list[str]]:
        """Add a window; return its metrics, and messages. `table`: by sending and receiving host."""
        links = _links_of(table)
        if not links:
            return {}, []
        self._slow.append(self._slow_in(links))
        metrics = {
            "link/rtt_ms": max(link.rtt_ms for link in links.values()),
            "link/resent": max(link.resent_percent for link in links.values()),
        }
        rates = [link.gbps for link in links.values() if link.gbps]
        if rates:
            metrics["link/rate_gbps"] = min(rates)
        return metrics, self._messages()

    def _slow_in(self, links: dict[tuple[int, int], HostLink]) -> dict[str, str]:
        """Return what is slow in this window, by name, and in what way."""
        found = {}
        best = {}  # the best link of each host
        for host in range(len(self._hosts)):
            of_host = [link for pair, link in links.items() if host in pair]
            if of_host:
                best[host] = HostLink(
                    min(link.rtt_ms for link in of_host),
                    max(link.gbps for link in of_host),
                    min(link.resent_percent for link in of_host),
                    min(link.resent for link in of_host),
                )

        # A host all of whose links are bad has a bad link itself.
        slow_hosts = set()
        if len(best) > 2:
            for host, own in best.items():
                others = [link for other, link in best.items() if other != host]
                how = _how_slow(own, others)
                if how:
                    slow_hosts.add(host)
                    found[f"the link of {self._hosts[host]}"] = how

        # A bad link between two hosts whose other links are good
        for pair, link in links.items():
            rest = [other for other_pair, other in links.items() if other_pair != pair]
            how = _how_slow(link, rest)
            if how and not slow_hosts.intersection(pair):
                a, b = pair
                found[f"the link between {self._hosts[a]} and {self._hosts[b]}"] = how
        return found

    def _messages(self) -> list[str]:
        """Return a line for each link that has become slow, and for each that no longer is."""
        messages = []
        newest = self._slow[-1]
        for name, how in newest.items():
            times = sum(name in window for window in self._slow)
            if times >= NAMED_AT and name not in self._named:
                self._named.add(name)
                messages.append(
                    f"straggler  {name}: {how}; seen in {times} of the last {len(self._slow)} "
                    "records"
                )
        for name in sorted(self._named):
            if sum(name in window for window in self._slow) <= OVER_AT:
                self._named.remove(name)
                messages.append(f"straggler  {name} is as fast as the others again")
        return messages


def _together(a: Segments, b: Segments) -> Segments:
    """Return what two ranks of one host have counted towards another host."""
    return Segments(
        min(a.rtt_us, b.rtt_us),
        max(a.bytes_per_s, b.bytes_per_s),
        a.resent + b.resent,
        a.sent + b.sent,
    )


def _links_of(table: dict[tuple[int, int], Segments]) -> dict[tuple[int, int], HostLink]:
    """Return the links that have sent something, by their two hosts, the lower first."""
    links = {}
    for a, b in sorted({(min(pair), max(pair)) for pair in table}):
        ways = [table[pair] for pair in ((a, b), (b, a)) if pair in table]
        rtt_us = min(way.rtt_us for way in ways)
        # Of both directions the worse one: loss, or a limit, may be on one side alone.
        busy = [way for way in ways if way.sent >= MIN_SEGMENTS]
        links[a, b] = HostLink(
            rtt_us / 1e3,
            min((way.bytes_per_s for way in busy), default=0.0) / 1e9,
            max((100 * way.resent / way.sent for way in busy), default=0.0),
            max((way.resent for way in busy), default=0),
        )
    return links


def _how_slow(link: HostLink, others: Sequence[HostLink]) -> str | None:
    """Return in what way a link is worse than the others; None if it is not."""
    usual_loss = 0.0
    if others:
        usual_ms = median(other.rtt_ms for other in others)
        if link.rtt_ms > SLOW_TIMES * usual_ms and link.rtt_ms > usual_ms + SLOW_MS:
            return f"a round trip takes {link.rtt_ms:.3g} ms, {usual_ms:.3g} ms elsewhere"
        usual_gbps = median(other.gbps for other in others)
        if link.gbps and link.gbps * SLOW_TIMES < usual_gbps:
            return f"{1e3 * link.gbps:.3g} MB/s arrive, {1e3 * usual_gbps:.3g} MB/s elsewhere"
        usual_loss = median(other.resent_percent for other in others)
    is_lossy = link.resent_percent > max(LOSS_PERCENT, SLOW_TIMES * usual_loss)
    if is_lossy and link.resent >= MIN_RESENT:
        return f"{link.resent_percent:.1f} % of its packets were lost and sent again"
    return None


def _plain(address: str) -> str:
    """Return an IPv4 address that IPv6 wraps, and one without its zone, as the others write it."""
    return address.removeprefix("::ffff:").partition("%")[0]
