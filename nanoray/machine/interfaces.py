"""The network interface over which gloo connects the ranks of several hosts.

Without GLOO_SOCKET_IFNAME gloo takes the address of the host's own name. On Debian and Ubuntu that is
127.0.1.1, where no other host can connect. So ranks of several hosts exchange their routes to the
store, and choose the interface on that route where gloo would take the loopback.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

from nanoray.errors import ConfigError

LOOPBACK = "127.0.0.1"  # where processes of one host meet
_SIOCGIFADDR = 0x8915  # ask the kernel for an interface's IPv4 address


def require_interface(env: Mapping[str, str]) -> None:
    """Raise ConfigError if GLOO_SOCKET_IFNAME names no interface of this host.

    Every run has groups of gloo. Each rank would fail, and each restart.
    """
    value = env.get("GLOO_SOCKET_IFNAME", "")
    own = own_interfaces()
    for name in value.split(","):
        if name and name not in own:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME = {value!r} names no interface ({name!r}) on "
                f"{socket.gethostname()}, which has {', '.join(own)}; set it to one of these, or "
                "unset it"
            )


def free_port(host: str = LOOPBACK) -> int:
    """Return a port that is free now, for programs that refuse port 0; host "": on all interfaces.

    Another process may take it first.
    """
    with closing(socket.socket()) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def own_interfaces() -> list[str]:
    """Return the names of the interfaces of this host."""
    return [name for _, name in socket.if_nameindex()]


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

    `hosts`: the address of each rank's host. "" where gloo's own choice will do: all ranks are on
    one host, or this host's name has an address at which the others can connect.
    """
    if len(set(hosts)) == 1 or not hosts[rank] or not is_loopback(_address_of_name()):
        return ""
    return interface_of(hosts[rank])


def interface_of(address: str) -> str:
    """Return the interface whose first IPv4 address this is, "" if there is none.

    gloo takes the first address of an interface that is named to it.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for name in own_interfaces():
            with suppress(OSError):  # an interface without an IPv4 address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == wanted:
                    return name
    return ""


def _address_of_name() -> str:
    """Return the address of this host's name, which gloo takes; the loopback if it has none."""
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return LOOPBACK


def is_loopback(address: str) -> bool:
    """Return whether packets to this address never leave the host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
