"""Links between hosts: what the kernel counts, and which link is named."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from nanoray.train.watch.links import LinkWatch, Segments, read_segments

THREE = ["alpha (rank 0)", "beta (rank 1)", "gamma (rank 2)"]
GOOD = Segments(rtt_us=500, bytes_per_s=100e6, resent=0, sent=200)
Table = dict[tuple[int, int], Segments]


def table(hosts: int, **of_pairs: Segments) -> Table:
    """All pairs of hosts with good links, but for those that are given, as _01=... both ways."""
    found = {(a, b): GOOD for a in range(hosts) for b in range(hosts) if a != b}
    for name, segments in of_pairs.items():
        a, b = (int(digit) for digit in name[1:])
        found[a, b] = found[b, a] = segments
    return found


def lines(hosts: list[str], windows: list[Table]) -> list[str]:
    watch = LinkWatch(hosts)
    return [line for window in windows for line in watch.add(window)[1]]


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        client = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with closing(client), closing(other):
            yield client, other


def test_the_fields_are_those_of_this_kernel() -> None:
    """Ten messages that are each waited for are ten segments. An offset that is wrong is no ten."""
    with connection() as (client, other):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(10):
            client.sendall(bytes(100))
            assert len(other.recv(100, socket.MSG_WAITALL)) == 100
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        silent = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    found = read_segments([("10.0.0.1", "10.0.0.2", info), ("10.0.0.1", "10.0.0.3", silent)])
    # Who has sent nothing has no figures but those of the handshake.
    assert list(found) == ["10.0.0.2"]
    (segments,) = found.values()
    assert (segments.sent, segments.resent) == (10, 0)
    assert 0 < segments.rtt_us < 1e6
    assert segments.bytes_per_s > 1000
    # A connection within a host is no link, and an older kernel's record is too short.
    assert read_segments([("10.0.0.1", "10.0.0.1", info)]) == {}
    assert read_segments([("10.0.0.1", "10.0.0.2", info[:100])]) == {}
    # Two connections to one host
    twice = read_segments([("a", "b", info), ("a", "b", info)])["b"]
    assert (twice.sent, twice.rtt_us) == (20, segments.rtt_us)


SLOW = {
    "far": (GOOD._replace(rtt_us=40_000), "a round trip takes 40 ms, 0.5 ms elsewhere"),
    "narrow": (GOOD._replace(bytes_per_s=2e6), "2 MB/s arrive, 100 MB/s elsewhere"),
    "lossy": (GOOD._replace(resent=10), "5.0 % of its packets were lost and sent again"),
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_host_whose_links_are_all_bad_is_named_once_and_once_when_it_is_good_again(
    kind: str,
) -> None:
    bad, how = SLOW[kind]
    slow = table(3, _02=bad, _12=bad)
    said = lines(THREE, [table(3)] * 4 + [slow] * 20 + [table(3)] * 20)
    name = "the link of gamma (rank 2)"
    assert said == [
        f"straggler  {name}: {how}; seen in 6 of the last 8 records",
        f"straggler  {name} is as fast as the others again",
    ]


@pytest.mark.parametrize("kind", SLOW)
def test_a_bad_link_between_good_hosts_is_named_as_that(kind: str) -> None:
    bad, how = SLOW[kind]
    said = lines(THREE, [table(3, _01=bad)] * 8)
    name = "the link between alpha (rank 0) and beta (rank 1)"
    assert said == [f"straggler  {name}: {how}; seen in 6 of the last 6 records"]


def test_two_hosts_have_one_link_whose_loss_alone_is_named() -> None:
    two = THREE[:2]
    assert lines(two, [table(2, _01=SLOW["far"][0])] * 20) == []
    assert lines(two, [table(2, _01=SLOW["narrow"][0])] * 20) == []
    (line,) = lines(two, [table(2, _01=SLOW["lossy"][0])] * 20)
    assert line.startswith("straggler  the link between alpha (rank 0) and beta (rank 1): 5.0 %")


def test_a_thousand_windows_of_noise_name_nothing() -> None:
    """Round trips and rates that vary by a factor of three, and a probe sent again now and then."""
    source = random.Random(0)

    def noisy() -> Segments:
        return Segments(
            500 * source.uniform(1, 3),
            100e6 / source.uniform(1, 3),
            source.choice([0, 0, 1, 3]),
            200,
        )

    windows = [{pair: noisy() for pair in table(3)} for _ in range(1000)]
    assert lines(THREE, windows) == []
