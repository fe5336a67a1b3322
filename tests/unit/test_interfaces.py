"""The interfaces that the environment chooses for gloo and NCCL, as those two read the values."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from nanoray.errors import ConfigError
from nanoray.mesh.interfaces import own_interfaces, require_interfaces
from nanoray.mesh.mesh import join
from nanoray.mesh.rendezvous import Rendezvous

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
    own = own_interfaces()
    assert "lo" in own
    names = [name for _, name in socket.if_nameindex()]
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
        assert accepted == (name in own), name


def test_a_rank_is_refused_before_it_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing serves a store at this address: it was not even dialled."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    nobody = Rendezvous(rank=1, world_size=2, master_addr="127.0.0.1", master_port=1)
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME = 'nowhere0' names no interface"):
        join(nobody, {}, timeout_s=1, init_timeout_s=1)
