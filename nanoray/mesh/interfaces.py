"""The network interfaces that the environment chooses for gloo and NCCL, checked on this host.

A name that fits no interface fails in each rank, each time, with a text of C++ that names neither
the variable nor what there is. So the ranks check it before they meet.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from nanoray.errors import ConfigError

_SIOCGIFADDR = 0x8915  # ask the kernel for an interface's IPv4 address


def require_interfaces(
    env: Mapping[str, str], backend: str = "gloo", interfaces: Sequence[str] | None = None
) -> None:
    """Raise ConfigError if a variable for gloo or NCCL names no interface of this host.

    Every run has groups of gloo, whatever its backend. `interfaces`: of another host.
    """
    own = own_interfaces() if interfaces is None else interfaces
    checks: dict[str, Callable[[str, Sequence[str]], str]] = {"GLOO_SOCKET_IFNAME": _gloo_problem}
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


def _gloo_problem(value: str, own: Sequence[str]) -> str:
    """Return what is wrong with a list of whole names, as gloo reads it; "" if nothing is."""
    if len(value) < 2:  # torch takes a shorter value for none
        return ""
    missing = [name for name in value.split(",") if name not in own]
    if missing:
        return f"names no interface ({', '.join(map(repr, missing))})"
    return ""


def _nccl_problem(value: str, own: Sequence[str]) -> str:
    """Return what is wrong with NCCL's value; "" if nothing is.

    `eth,ib` are beginnings of names, `=eth0` whole names; `^lo` and `^=lo` are those to leave out.
    """
    if not value:
        return ""
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
        return ""
    return "leaves no interface" if excludes else "names no interface"
