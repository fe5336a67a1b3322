"""What crosses from rank to rank besides tensors: JSON, and a store of sealed values.

Nothing is pickled. Unpickling runs code that the sender chose, and neither gloo nor the store
authenticates the sender.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nanoray.errors import RendezvousError
from nanoray.models.values import Unsupported, put_together, take_apart

TAG_BYTES = 32  # HMAC-SHA256
LOOK_S = 1.0  # how often a wait for the store checks for an order to abort


def encode(value: Any) -> bytes:
    """Return a value as JSON. Raises TypeError if it cannot be encoded.

    It may be what models/values.py takes apart, such as numbers, text, dtypes, small tensors, and
    lists, tuples and dicts of them.
    """
    try:
        return json.dumps(take_apart(value, "it")).encode()
    except Unsupported as error:
        raise TypeError(f"{error}, which does not cross ranks") from None


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given. Raises ValueError.

    A tensor comes back on CPU. Floats keep their bits.
    """
    return put_together(json.loads(data))


class SealedStore(dist.Store):
    """A store in which every value carries a proof that a holder of the run's key wrote it.

    The proof is for this very name. The key never enters the store. A process that reaches the port
    can list the names, read the values and destroy them; a value without a proof is refused.
    Counters (`add`) are not sealed: they decide only how long ranks wait.
    """

    def __init__(self, inner: dist.Store, key: str) -> None:
        super().__init__()
        self._inner, self._key = inner, key.encode()
        # Values written or read, such as the addresses of gloo's ranks
        self._passed: list[bytes] = []
        self.aborted = False

    def _tag(self, name: str, value: bytes) -> bytes:
        return hmac.digest(
            self._key, len(name).to_bytes(4, "big") + name.encode() + value, "sha256"
        )

    def set(self, name: str, value: str | bytes) -> None:
        """Store a value with its proof."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._passed.append(value)
        self._inner.set(name, self._tag(name, value) + value)  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        """Return a value, waiting for it. Raises RendezvousError if its proof is missing or wrong."""
        return self._unseal(name, bytes(self._inner.get(name)))

    def _unseal(self, name: str, sealed: bytes) -> bytes:
        # The proof comes first, and has a fixed length.
        tag, value = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        # In constant time: a comparison that stops early would show a stranger how much is right.
        if not hmac.compare_digest(tag, self._tag(name, value)):
            raise RendezvousError(
                f"the rendezvous store holds a value of a stranger under {name}: a process "
                "without this run's key wrote it; who else can reach the store's port?"
            )
        self._passed.append(value)
        return value

    def multi_get(self, names: list[str]) -> list[bytes]:
        """Return several values, waiting for them. Raises RendezvousError as `get` does."""
        values = self._inner.multi_get(names)  # one request, however many ranks there are
        return [self._unseal(name, bytes(value)) for name, value in zip(names, values, strict=True)]

    def add(self, name: str, amount: int) -> int:
        """Add to a counter and return it."""
        return int(self._inner.add(name, amount))

    def wait(self, names: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all names are there.

        Raises DistStoreError when time is up, and soon after an order to abort.
        """
        deadline = time.monotonic() + (timeout or self._inner.timeout).total_seconds()  # type: ignore[attr-defined]

        # In short waits: a long one would not notice an order to abort.
        while (left := deadline - time.monotonic()) > LOOK_S:
            with suppress(dist.DistStoreError):
                self._inner.wait(names, timedelta(seconds=LOOK_S))
                return
            if self.aborted:
                raise dist.DistStoreError(
                    f"a peer is lost, and the driver has ordered to abort: no {', '.join(names)}"
                )
        self._inner.wait(names, timedelta(seconds=max(0.001, left)))

    def check(self, names: list[str]) -> bool:
        """Return whether all names are there."""
        return bool(self._inner.check(names))

    def abort(self) -> None:
        """Shut down gloo's TCP connections in this process. (any thread, any number of times)

        They are those with an end at an address that a rank has written to this store: gloo's ranks
        publish here where they listen, and no others do. A wait for such a connection fails then,
        as if the other rank had left, also where it has yet to connect.
        """
        self.aborted = True
        for connection in _tcp_sockets():
            with suppress(OSError):
                # A listening socket has no connection yet, but gloo may wait for ranks there.
                if _listens(connection):
                    self._answer(connection)
                elif self._is_gloos(connection):
                    connection.shutdown(socket.SHUT_RDWR)

    def _is_gloos(self, connection: socket.socket) -> bool:
        """Return whether one end is an address that a rank has written to this store.

        Other connections, such as Ray's, have no end at such an address. Raises OSError.
        """
        addresses = b" ".join(self._passed)
        ends = connection.getpeername(), connection.getsockname()
        return any(_packed(connection.family, end) in addresses for end in ends)

    def _answer(self, listening: socket.socket) -> None:
        """Take the place of ranks for which gloo waits at its listening socket, and leave again.

        While a group forms, gloo waits for ranks that have yet to connect, also if they are lost:
        five times the group's timeout (torch 2.13). A rank first sends, in 8 bytes, the number of
        its connection. This process has published a sockaddr_storage of 128 bytes and, after it,
        these numbers.
        """
        own = listening.getsockname()
        packed = _packed(listening.family, own)
        for value in set(self._passed):
            # The port is after the two bytes of the family. Values of other ranks do not have it.
            start = value.find(packed) - 2
            if start < 0:
                continue
            numbers = value[start + 128 :]
            for i in range(0, len(numbers) - 7, 8):
                with (
                    suppress(OSError),
                    socket.create_connection(own[:2], timeout=1.0) as connection,
                ):
                    connection.sendall(numbers[i : i + 8])

    def has_extended_api(self) -> bool:
        """Return False: torch is not to bypass the seals by other calls."""
        return False


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield copies of this process's TCP sockets, each closed when the next one is asked for."""
    # Every descriptor of this process: torch gives no access to gloo's connections.
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), _duplicate(int(name)) as connection:
            yield connection


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _duplicate(fd: int) -> socket.socket:
    """Return a TCP socket of this process as an object of its own. Raises OSError if `fd` is none."""
    # Of a copy: closing the object must not close the descriptor that gloo uses.
    copy = os.dup(fd)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        connection.close()
        raise OSError
    return connection


def _packed(family: int, address: tuple[Any, ...]) -> bytes:
    """Return an address as in a sockaddr_in (port, host) or sockaddr_in6 (port, flow, host)."""
    host = address[0].partition("%")[0]  # without the zone of an IPv6 address
    port = address[1]
    flow = b"" if family == socket.AF_INET else bytes(4)
    return bytes(port.to_bytes(2, "big") + flow + socket.inet_pton(family, host))
