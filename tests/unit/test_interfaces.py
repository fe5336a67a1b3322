"""The interface that gloo gets: the one that the environment names, or that of the route."""

from __future__ import annotations

import json
import socket
from contextlib import closing, suppress

import pytest
import torch.distributed as dist

from nanoray.errors import ConfigError
from nanoray.machine.interfaces import (
    Route,
    addresses_of_hosts,
    interface_for_gloo,
    interface_of,
    is_loopback,
    own_interfaces,
    require_interface,
    route_to,
)
from nanoray.parallel.mesh import join
from nanoray.parallel.rendezvous import Rendezvous, _listen


def test_a_name_that_fits_no_interface_is_refused() -> None:
    names = [name for _, name in socket.if_nameindex()]
    for value in ("", "lo", ",".join(names)):
        require_interface({"GLOO_SOCKET_IFNAME": value})
    for value in ("nowhere0", "lo,nowhere0"):
        with pytest.raises(ConfigError, match=r"names no interface \('nowhere0'\) on .* has .*lo"):
            require_interface({"GLOO_SOCKET_IFNAME": value})


def test_a_rank_is_refused_before_it_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing serves a store at this address: it was not even dialled."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    nobody = Rendezvous(rank=1, world_size=2, master_addr="127.0.0.1", master_port=1)
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME = 'nowhere0' names no interface"):
        join(nobody, {}, timeout_s=1, init_timeout_s=1)


# ---- gloo's own choice, and ours -----------------------------------------------------------------

LOOP = Route("127.0.0.1", "127.0.1.1")  # on the store's host, where its name is 127.0.1.1
FAR = "198.51.100.7"  # of documentation (RFC 5737): no host has it


def address_here() -> str:
    """An address of this host that is not the loopback."""
    with suppress(OSError):
        own = route_to(FAR, 9).own
        if not is_loopback(own):
            return own
    pytest.skip("this host has no address on a network")


@pytest.mark.parametrize(
    "routes",
    [
        [LOOP, LOOP],
        [Route("", ""), Route("", "")],
        [Route("here", "here"), Route("here", "here")],  # by address, as Ray gives it
    ],
)
def test_ranks_of_one_host_are_left_to_gloo(routes: list[Route]) -> None:
    here = address_here()
    routes = [Route(*(here if part == "here" else part for part in route)) for route in routes]
    hosts = hosts_of(routes)
    assert len(set(hosts)) == 1
    assert [interface_for_gloo(hosts, rank) for rank in range(2)] == ["", ""]


def hosts_of(routes: list[Route]) -> list[str]:
    store = dist.HashStore()
    for rank, route in enumerate(routes):
        store.set(f"route/{rank}", json.dumps(route))
    return addresses_of_hosts(store, len(routes))


def test_ranks_of_two_hosts_take_the_interface_of_their_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 is beside the store and learns its own address from the other; then the other way."""
    here = address_here()
    name = interface_of(here)
    assert name in own_interfaces()
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")  # as Debian's 127.0.1.1
    assert interface_for_gloo(hosts_of([LOOP, Route(FAR, here)]), 0) == name
    assert interface_for_gloo(hosts_of([LOOP, Route(here, FAR)]), 1) == name
    # An address that no interface here has: nothing is set, and gloo's error names the variable.
    assert interface_for_gloo(hosts_of([LOOP, Route(here, FAR)]), 0) == ""
    # The host's name has an address that others can reach: gloo takes that one.
    monkeypatch.setattr(socket, "gethostname", lambda: here)
    assert interface_for_gloo(hosts_of([LOOP, Route(FAR, here)]), 0) == ""


@pytest.mark.parametrize(("only_here", "everywhere"), [(True, False), (False, True)])
def test_a_store_at_a_name_of_the_loopback_is_open_to_other_hosts_only_if_there_are_some(
    only_here: bool, everywhere: bool
) -> None:
    listener = _listen("127.0.1.1", 0, only_here)
    with closing(listener):
        bound = listener.getsockname()[0]
    assert (bound in ("0.0.0.0", "::")) is everywhere
