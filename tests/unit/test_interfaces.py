"""The interfaces that the environment chooses for gloo and NCCL, as those two read the values."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from nanoray.errors import ConfigError
from nanoray.host.interfaces import (
    Route,
    addresses_of_hosts,
    gloo_address,
    interface_for_gloo,
    interface_of,
    is_loopback,
    is_own,
    own_interfaces,
    require_interfaces,
    route_to,
)
from nanoray.mesh.mesh import join
from nanoray.mesh.rendezvous import Rendezvous, _listen, connect_store, open_store
from nanoray.mesh.wire import SealedStore

OWN = ["lo", "eth0", "eth1", "ib0"]


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("GLOO_SOCKET_IFNAME", "eth2", "names no interface ('eth2') on "),
        ("GLOO_SOCKET_IFNAME", "eth0,eth2", "names no interface ('eth2')"),
        ("GLOO_SOCKET_IFNAME", "eth0, eth1", "names no interface (' eth1')"),
        ("GLOO_SOCKET_IFNAME", "eth", "names no interface ('eth')"),  # gloo takes whole names
        ("GLOO_SOCKET_IFNAME", "^lo", "names no interface ('^lo')"),
        ("NCCL_SOCKET_IFNAME", "en", "names no interface on "),
        ("NCCL_SOCKET_IFNAME", "=eth", "names no interface on "),
        ("NCCL_SOCKET_IFNAME", "^lo,eth,ib", "leaves no interface on "),
        ("NCCL_SOCKET_IFNAME", "^=lo,eth0,eth1,ib0", "leaves no interface on "),
    ],
)
def test_a_name_that_fits_no_interface_is_refused(variable: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        require_interfaces({variable: value}, "nccl", OWN)
    said = str(error.value)
    assert said.startswith(f"{variable} = {value!r} {text}")
    assert said.endswith("which has lo, eth0, eth1, ib0; set it to one of these, or unset it")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GLOO_SOCKET_IFNAME", ""),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0"),
        ("NCCL_SOCKET_IFNAME", ""),
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "en,ib"),
        ("NCCL_SOCKET_IFNAME", "=eth1:47000"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker"),
        ("NCCL_SOCKET_IFNAME", "^=eth"),
    ],
)
def test_what_fits_is_left_to_gloo_and_nccl(variable: str, value: str) -> None:
    require_interfaces({variable: value}, "nccl", OWN)


def test_gloo_does_not_read_nccl_s_variable() -> None:
    require_interfaces({"NCCL_SOCKET_IFNAME": "nowhere"}, "gloo", OWN)


def test_gloo_accepts_the_interfaces_that_are_listed_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference is gloo itself."""
    # Tests beside this one make and remove interfaces, and gloo may read a list that changes.
    for tries_left in (2, 1, 0):
        differ = differences_from_gloo(monkeypatch)
        if not differ:
            return
        assert tries_left, differ


def differences_from_gloo(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names that gloo accepts and we do not, or the other way round."""
    own = own_interfaces()
    assert "lo" in own
    names = [name for _, name in socket.if_nameindex()]
    differ = []
    for name in (*names, "nowhere0"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            accepted = True
        except RuntimeError:
            accepted = False
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if accepted != (name in own):
            differ.append(name)
    return differ


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


def test_gloos_own_address_is_the_one_that_gloo_offers() -> None:
    """The reference is what two ranks of gloo write into their store."""
    server = open_store("127.0.0.1", 2, 20)
    stores: list[SealedStore] = []

    def form(rank: int) -> None:
        client = connect_store(
            Rendezvous(rank, 2, master_addr="127.0.0.1", master_port=server.port, agent_store=True),
            20,
        )
        stores.append(SealedStore(dist.PrefixStore("group", client), "secret"))
        dist.ProcessGroupGloo(stores[-1], rank, 2, timedelta(seconds=20))

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    written = b" ".join(value for store in stores for value in store._passed)
    assert socket.inet_pton(family_of(gloo_address()), gloo_address()) in written


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.1.1", True), ("::1", True), ("192.0.2.1", False), ("fe80::1%eth0", False)],
)
def test_the_loopback_in_its_spellings(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_an_address_of_ipv6_leads_to_its_interface() -> None:
    if "lo" not in ipv6_interfaces():
        pytest.skip("no IPv6 here")
    assert is_own("::1")
    assert interface_of("::1") == "lo"
    assert interface_of("2001:db8::1") == ""
    assert not is_own("2001:db8::1")


def ipv6_interfaces() -> list[str]:
    with suppress(OSError):
        return [line.split()[-1] for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return []


def test_a_name_that_leads_nowhere_has_no_route() -> None:
    with pytest.raises(OSError, match=r"Name or service not known|No address|Temporary failure"):
        route_to("nowhere.invalid", 1)


@pytest.mark.parametrize(("only_here", "everywhere"), [(True, False), (False, True)])
def test_a_store_at_a_name_of_the_loopback_is_open_to_other_hosts_only_if_there_are_some(
    only_here: bool, everywhere: bool
) -> None:
    listener = _listen("127.0.1.1", 0, only_here)
    with closing(listener):
        bound = listener.getsockname()[0]
    assert (bound in ("0.0.0.0", "::")) is everywhere


def test_a_store_that_is_asked_for_on_the_loopback_stays_there() -> None:
    with closing(_listen("127.0.0.1", 0, only_here=False)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


# In a network of its own that has IPv6 alone: a process per line of this table.
WITHOUT_IPV4 = """
import ctypes, os, subprocess, sys
from dataclasses import replace
libc = ctypes.CDLL(None)
if libc.unshare(0x40000000) or subprocess.run(
    "ip link set lo up && ip addr del 127.0.0.1/8 dev lo", shell=True
).returncode:
    print("no network of its own")
    sys.exit()
from nanoray.errors import RendezvousError
from nanoray.host.interfaces import interface_for_gloo, loopback_address
from nanoray.mesh.rendezvous import Rendezvous, connect_store
print(loopback_address(), interface_for_gloo(["", ""], 0))
rank = Rendezvous(0, 2, local_world_size=2, master_addr="::1", master_port=29500, run_id="r")
connect_store(rank, 5)
try:
    connect_store(replace(rank, master_addr="127.0.0.1"), 60)
except RendezvousError as error:
    print(error)
"""


def test_ranks_meet_where_there_is_ipv6_alone() -> None:
    """gloo would offer 127.0.0.1, which this host does not have; nor may a store wait for it."""
    if "lo" not in ipv6_interfaces():
        pytest.skip("no IPv6 here")
    command = [sys.executable, "-c", WITHOUT_IPV4]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    if "no network of its own" in done.stdout:
        pytest.skip("this user may not make a network")
    first, refused = done.stdout.splitlines()
    assert first == "::1 lo"
    assert refused.endswith(
        "MASTER_ADDR = 127.0.0.1 is 127.0.0.1, which this host does not have: set it to one of its "
        "addresses, as ::1 for ranks of this host alone"
    )
