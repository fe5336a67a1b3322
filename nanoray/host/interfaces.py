"""The network interfaces of this host: those that the environment names, and the one gloo needs.

A name that fits no interface fails in each rank, each time, with a text of C++ that names neither
the variable nor what there is. So the ranks check it before they meet.

Without a name gloo takes the address of the host's own name. On Debian and Ubuntu that is 127.0.1.1,
where no other host can connect. So ranks of several hosts exchange their routes to the store, and
choose the interface on that route where gloo would take the loopback. Where a host has no IPv4, gloo
would fall back to 127.0.0.1 all the same.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from nanoray.errors import ConfigError

_SIOCGIFADDR = 0x8915  # ask the kernel for an interface's IPv4 address


def require_interfaces(
    env: Mapping[str, str], backend: str = "gloo", interfaces: Sequence[str] | None = None
) -> None:
    """Raise ConfigError if a variable for gloo or NCCL names no interface of this host.

    Every run has groups of gloo, whatever its backend. `interfaces`: of another host.
    """
    own = own_interfaces() if interfaces is None else interfaces
    checks: dict[str, Callable[[str, Sequence[str]], str | None]] = {
        "GLOO_SOCKET_IFNAME": _gloo_problem
    }
    if backend == "nccl":
        checks["NCCL_SOCKET_IFNAME"] = _nccl_problem

    for variable, problem_of in checks.items():
        value = env.get(variable, "")
        problem = problem_of(value, own)
        if problem:
            raise ConfigError(
                f"{variable} = {value!r} {problem} on {socket.gethostname()}, which has "
                f"{', '.join(own) or 'none with an address'}; set it to one of these, or unset it"
            )


def own_interfaces() -> list[str]:
    """Return the interfaces of this host that have an IPv4 or IPv6 address."""
    names = [name for _, name in socket.if_nameindex()]
    with_address = set()
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for name in names:
            with suppress(OSError):  # no IPv4 address
                fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                with_address.add(name)
    with suppress(OSError):  # no IPv6 here, or no Linux
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            with_address.add(line.split()[-1])
    if not with_address:
        return names
    return [name for name in names if name in with_address]


def _gloo_problem(value: str, own: Sequence[str]) -> str | None:
    """Return what is wrong with a list of whole names, as gloo reads it; None if nothing is."""
    if len(value) < 2:  # torch takes a shorter value for none
        return None
    missing = [name for name in value.split(",") if name not in own]
    if missing:
        return f"names no interface ({', '.join(map(repr, missing))})"
    return None


def _nccl_problem(value: str, own: Sequence[str]) -> str | None:
    """Return what is wrong with NCCL's value; None if nothing is.

    `eth,ib` are beginnings of names, `=eth0` whole names; `^lo` and `^=lo` are those to leave out.
    """
    if not value:
        return None
    excludes = value.startswith("^")
    names = value.removeprefix("^")
    whole = names.startswith("=")
    # NCCL allows a port after each name.
    wanted = [name.split(":")[0] for name in names.removeprefix("=").split(",")]

    def is_wanted(interface: str) -> bool:
        if whole:
            return interface in wanted
        return any(interface.startswith(name) for name in wanted if name)

    left = [interface for interface in own if is_wanted(interface) != excludes]
    if left:
        return None
    return "leaves no interface" if excludes else "names no interface"


# ---- the interface that gloo needs ---------------------------------------------------------------


class Route(NamedTuple):
    """The way from a rank's host to the host of the store: the addresses of both ends."""

    own: str
    store: str


def route_to(host: str, port: int) -> Route:
    """Return the route that packets to the store take. Nothing is sent. Raises OSError."""
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with closing(socket.socket(family, kind)) as probe, suppress(OSError):
            probe.connect(address)  # of a datagram socket: the kernel looks up the route
            return Route(probe.getsockname()[0], probe.getpeername()[0])
    raise OSError(f"no route to {host}")


def publish_route(store: Any, rank: int, host: str, port: int) -> None:
    """Write this rank's route to the store's host into the store. (all ranks)"""
    route = Route("", "")
    with suppress(OSError):
        route = route_to(host, port)
    store.set(f"route/{rank}", json.dumps(route))


def addresses_of_hosts(store: Any, world_size: int) -> list[str]:
    """Return the address of each rank's host, on the network over which the ranks met. (all ranks)

    Ranks of one host have the same address, which is "" if it is unknown. All ranks have
    published their routes before.
    """
    values = store.multi_get([f"route/{rank}" for rank in range(world_size)])
    routes = [Route(*json.loads(value)) for value in values]

    # The store's own host reaches it by the loopback. Only the others know its address.
    at_store = [route.store for route in routes if route.store and not is_loopback(route.store)]
    addresses = []
    for route in routes:
        address = route.own
        if not address or is_loopback(address):
            address = at_store[0] if at_store else ""
        addresses.append(address)
    return addresses


def interface_for_gloo(hosts: Sequence[str], rank: int) -> str:
    """Return the interface over which gloo reaches the other ranks.

    `hosts`: the address of each rank's host. "" where gloo's own choice will do: this host's name
    has an address at which the others can connect.
    """
    choice = gloo_address()
    elsewhere = len(set(hosts)) > 1 and hosts[rank] != ""
    if is_own(choice) and not (elsewhere and is_loopback(choice)):
        return ""
    return interface_of(hosts[rank] or "::1")


def gloo_address() -> str:
    """Return the address that gloo takes without GLOO_SOCKET_IFNAME.

    The first address of this host's name that can be bound, else the loopback
    (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice).
    """
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            if is_own(str(address[0])):
                return str(address[0])
    return "127.0.0.1"


def loopback_address() -> str:
    """Return the address at which processes of this host meet, also where there is IPv6 alone."""
    return "127.0.0.1" if is_own("127.0.0.1") or not is_own("::1") else "::1"


def is_loopback(address: str) -> bool:
    """Return whether packets to this address never leave the host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_own(address: str) -> bool:
    """Return whether this host has the address: whether it can be bound."""
    with suppress(OSError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.bind((address, 0))
            return True
    return False


def interface_of(address: str) -> str:
    """Return the interface whose first IPv4 address, or one of whose IPv6 addresses, this is.

    "" if there is none. gloo takes the first address of an interface that is named to it.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        with suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
                digits, *_, name = line.split()
                if int(digits, 16) == int(wanted):
                    return name
        return ""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == wanted.packed:
                    return name
    return ""
