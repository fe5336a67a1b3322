"""A process without the run's key attacks the ranks' store: it lists names, forges values, and
sends pickles.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import pickle
import queue
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import nanoray
from nanoray.errors import RendezvousError
from nanoray.parallel import wire
from nanoray.parallel.mesh import Mesh, join
from nanoray.parallel.rendezvous import Rendezvous, open_store
from tests.harness.commands import forkserver
from tests.harness.parsing import parse

SECRET = "a secret of 32 bytes, so to speak"


class Bomb:
    """Its unpickling would leave a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def rendezvous(rank: int, port: int, secret: str = SECRET) -> Rendezvous:
    values = {
        "master_addr": "127.0.0.1",
        "master_port": port,
        "secret": secret,
        "agent_store": True,
    }
    return Rendezvous(rank=rank, world_size=2, backend="gloo", **values)  # type: ignore[arg-type]


def rank_of(
    rank: int, port: int, store: TCPStore | None, work: Callable[[Mesh], Any], answers: Any
) -> None:
    try:
        mesh = join(
            rendezvous(rank, port), {"code": "1"}, timeout_s=20, init_timeout_s=20, store=store
        )
        answers.put((rank, work(mesh)))
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_abort_closes_the_connections_by_addresses_in_the_store_and_no_others(host: str) -> None:
    """Also those that this process has accepted; a connection of Ray's in the same process stays."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    store = wire.SealedStore(dist.HashStore(), SECRET)
    pairs = []
    for _ in range(3):
        with socket.create_server((host, 0), family=family) as server:
            client = socket.create_connection(server.getsockname()[:2])
            pairs.append((client, server.accept()[0]))
    for name, (client, _) in (("mine", pairs[0]), ("theirs", pairs[1])):
        _, port = client.getpeername()[:2]
        flow = bytes(4) if family == socket.AF_INET6 else b""
        store.set(
            name,
            b"sockaddr" + port.to_bytes(2, "big") + flow + socket.inet_pton(family, host) + b"rest",
        )
    store.abort()
    store.abort()
    for pair in pairs[:2]:
        assert [end.recv(1) for end in pair] == [b"", b""]
    pairs[2][0].sendall(b"x")
    assert pairs[2][1].recv(1) == b"x"
    assert store.aborted
    for end in [end for pair in pairs for end in pair]:
        end.close()


def exchange(mesh: Mesh) -> Any:
    return mesh.all_gather(("rank", mesh.rank))


def both(store: TCPStore, work: Callable[[Mesh], Any] = exchange) -> dict[int, Any]:
    """Run two ranks that do some `work`, each in a process of its own; return what each got, or its
    error.
    """
    answers = forkserver.Queue()
    ranks = [
        forkserver.Process(target=rank_of, args=(r, store.port, None, work, answers))
        for r in (0, 1)
    ]
    for process in ranks:
        process.start()
    try:
        return dict(answers.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def stranger(port: int) -> TCPStore:
    return TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
    )


def test_the_key_is_nowhere_in_the_store() -> None:
    store = open_store("127.0.0.1", 2, 20)
    assert both(store) == {0: [("rank", 0), ("rank", 1)], 1: [("rank", 0), ("rank", 1)]}
    spy = stranger(store.port)
    names = spy.list_keys()
    assert any("facts/0" in name for name in names), "a stranger can list the names"
    everything = "".join(names) + "".join(repr(bytes(spy.get(name))) for name in names)
    assert SECRET not in everything


def test_a_stranger_cannot_join_as_a_rank(tmp_path: Path) -> None:
    """It copies the names that rank 0 uses, announces itself as rank 1, and leaves a pickle for
    whoever reads it.
    """
    store, answers = open_store("127.0.0.1", 2, 20), forkserver.Queue()
    bomb = tmp_path / "ran"
    rank = forkserver.Process(target=rank_of, args=(0, store.port, None, exchange, answers))
    rank.start()
    try:
        spy = stranger(store.port)
        while not (found := [name for name in spy.list_keys() if name.endswith("facts/0")]):
            pass
        room = found[0].removesuffix("facts/0")
        spy.set(f"{room}facts/1", pickle.dumps(Bomb(str(bomb))))
        spy.set(f"{room}verdict", pickle.dumps(Bomb(str(bomb))))
        spy.add(f"{room}arrived", 1)
        number, said = answers.get(timeout=120)
    finally:
        rank.kill()
        rank.join()
    assert number == 0
    assert re.match(
        "RendezvousError: the rendezvous store holds a value of a stranger under (verdict|facts/1)",
        said,
    )
    assert not bomb.exists()


@pytest.mark.parametrize("secret", ["", "a guess"])
def test_without_the_key_no_meeting(secret: str) -> None:
    """Another secret is another room: the ranks do not even wait for each other."""
    store = open_store("127.0.0.1", 2, 5)
    with pytest.raises(RendezvousError, match="timed out waiting for rank 0 of 2"):
        join(rendezvous(1, store.port, secret), {}, timeout_s=2, init_timeout_s=1)


def test_an_address_that_a_stranger_has_put_in_place_of_a_ranks_is_refused(tmp_path: Path) -> None:
    """gloo's addresses travel in the same store: whoever replaces one would be connected to as that
    rank.
    """
    store = open_store("127.0.0.1", 2, 20)
    sealed = wire.SealedStore(dist.PrefixStore("room", store), SECRET)
    sealed.set("address/0", b"10.0.0.1:4711")
    assert sealed.get("address/0") == b"10.0.0.1:4711"
    spy = stranger(store.port)
    theirs = bytes(spy.get("room/address/0"))
    spy.set("room/address/0", theirs[:-1] + b"2")  # type: ignore[arg-type]
    with pytest.raises(RendezvousError, match="a value of a stranger under address/0"):
        sealed.get("address/0")
    spy.set("room/address/1", theirs)  # type: ignore[arg-type]
    with pytest.raises(RendezvousError, match="under address/1"):
        sealed.get("address/1")


def test_nothing_of_ours_unpickles() -> None:
    """No call of torch.distributed that pickles, and no pickle, in any module; Ray's own peer arm
    apart.
    """
    root = Path(nanoray.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        for node in ast.walk(parse(path.read_text(encoding="utf-8"))):
            name = (
                node.attr
                if isinstance(node, ast.Attribute)
                else node.id
                if isinstance(node, ast.Name)
                else ""
            )
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if name.endswith(("_object", "_object_list")) or "pickle" in imported:
                found.append(f"{path.relative_to(root)}:{node.lineno} {name or imported}")
    assert [line for line in found if not line.startswith("bench/peers/ray_train.py")] == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, "zwei", 3.5, True, None),
        {"a": [(1, 2), {"b": float("inf")}], "tuple": {"tuple": 1}},
        0.1 + 0.2,
        -(2**63),
        torch.float32,
        {"rng": torch.arange(7, dtype=torch.uint8), "half": torch.ones(2, 3, dtype=torch.bfloat16)},
    ],
)
def test_values_cross_unchanged(value: Any) -> None:
    found = wire.decode(wire.encode(value))
    if isinstance(value, dict) and "rng" in value:
        assert all(
            torch.equal(found[key], value[key]) and found[key].dtype == value[key].dtype
            for key in value
        )
    else:
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    "data",
    [
        {"": "dtype", "name": "load"},
        {"": "tensor", "dtype": "load", "shape": [0], "data": ""},
    ],
)
def test_a_name_from_outside_is_a_dtype_and_nothing_else_of_torch(data: dict[str, Any]) -> None:
    with pytest.raises(KeyError, match="load"):
        wire.decode(json.dumps(data).encode())


def test_what_is_no_data_does_not_cross(tmp_path: Path) -> None:
    for value in (
        Bomb(str(tmp_path)),
        {"set": {1}},
        multiprocessing,
        queue.Queue(),
        os,
    ):
        with pytest.raises(TypeError, match="does not cross ranks"):
            wire.encode(value)
