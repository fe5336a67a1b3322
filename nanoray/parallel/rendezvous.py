"""Ranks, the store in which they meet, and their backend.

The driver uses this module, so torch is imported late.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nanoray.errors import ConfigError, RendezvousError
from nanoray.machine.interfaces import is_loopback
from nanoray.machine.launchers import place_of, whole_number

if TYPE_CHECKING:
    from torch.distributed import TCPStore


T = TypeVar("T")


class Order(IntEnum):
    """What the ranks do after a step. All vote, and the highest value wins."""

    GO_ON = 0
    SAVE = 1  # save a checkpoint and go on: a script has asked for it
    REGROUP = 2  # leave the groups and meet again, in another number
    FINISH = 3  # save a checkpoint and end: a script has asked for it
    STOP = 4  # the same, by a signal


# Timeout while one rank works and the others wait: writing and verifying checkpoints
PATIENCE_S = 900.0


@dataclass(frozen=True)
class Rendezvous:
    """This rank's identity and the address of the store.

    Made by the Ray driver, or read from the environment.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    nodes: int = 0  # 0: unknown
    master_addr: str = ""
    master_port: int = 0
    device: str = "cpu"  # "cpu" or "cuda:I", I as this process sees its devices
    backend: str = "gloo"
    backend_reason: str = ""
    env: tuple[tuple[str, str], ...] = ()  # environment variables for the backend
    threads: int = 1  # intra-op threads of torch
    # The key that seals what ranks write into the store
    secret: str = field(default="", repr=False)
    # The store already exists: torchrun's agent or a surviving rank serves it
    agent_store: bool = False
    live: bool = False  # at least one of these ranks holds the run's state in memory
    # The rank with whose facts the others are compared: one that holds the state, if any does
    reference: int = 0
    # The driver may order to abort the groups: a lost rank is replaced, the others live on
    abortable: bool = False
    run_id: str = ""  # torchrun's id of the job, the same in all of its restarts
    restarts: int = 0  # how often torchrun has restarted all ranks
    # Which log and progress file it writes; equals the rank while every slot is in use
    slot: int = -1
    slots: int = 0  # ranks that the run was started with

    def __post_init__(self) -> None:
        if self.slot < 0:
            object.__setattr__(self, "slot", self.rank)
        if not self.slots:
            object.__setattr__(self, "slots", self.world_size)

    @property
    def public(self) -> str:
        """The name under which these ranks meet in the store; it does not reveal the secret."""
        return public_name(self.secret)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Rendezvous:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun or a
        StatefulSet sets them.

        NANORAY_SECRET, the same on all ranks, keeps out processes that can reach the store and do
        not have it. srun and mpirun have names of their own for the same values: see launchers.py.
        Without any of them the run is one process. Raises ConfigError if some are missing, or
        contradict each other.
        """
        place = place_of(env)
        if place is None:
            return cls()
        restarts = whole_number(env, "TORCHELASTIC_RESTART_COUNT", 0)
        return cls(
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            node_rank=place.node_rank,
            master_addr=place.master_addr,
            master_port=place.master_port,
            # torchrun's store outlives a restart, and an attempt must not read the keys of an
            # earlier one
            secret=f"{env.get('NANORAY_SECRET', '')}.{place.run_id}.{restarts}",
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run_id=place.run_id,
            restarts=restarts,
        )


class BackendChoice(NamedTuple):
    """The backend of the process group, the reason, and the variables it needs on every rank."""

    backend: str
    reason: str
    env: dict[str, str]


class RankDevice(NamedTuple):
    """What the choice of a backend depends on in a rank's device."""

    kind: str  # cpu | cuda | mig
    node: str
    gpu: str  # the physical card, also of a slice


def choose_backend(
    ranks: Sequence[RankDevice], requested: str, nccl_version: tuple[int, int, int] | None
) -> BackendChoice:
    """Choose NCCL or gloo for these devices.

    `nccl_version` is that of the loaded library; None: there is none. Before 2.30 NCCL refuses two
    ranks on one GPU or on its slices ("Duplicate GPU detected"). It allows a shared GPU from 2.30.3
    and MIG slices from 2.31, with an environment variable (NCCL release notes; NVIDIA/nccl#1716).
    Raises ConfigError when `requested` cannot work.
    """
    # A user's own backend checks the devices itself.
    if ":" in requested:
        return BackendChoice(requested, "asked for", {})

    # NCCL has no CPU tensors.
    if any(r.kind == "cpu" for r in ranks):
        if requested == "nccl":
            raise ConfigError(
                "backend = nccl, but ranks run on CPU; use backend gloo or auto, or device cuda"
            )
        return BackendChoice("gloo", "asked for" if requested == "gloo" else "CPU ranks", {})
    if requested == "gloo":
        return BackendChoice("gloo", "asked for", {})
    version = ".".join(map(str, nccl_version or ())) or "missing"
    if nccl_version is None:
        if requested == "nccl":
            raise ConfigError("backend = nccl, but this torch build has no NCCL; use backend gloo")
        return BackendChoice("gloo", "this torch build has no NCCL", {})

    # The usual case: each rank has a card of its own.
    cards = [(r.node, r.gpu) for r in ranks]
    if len(set(cards)) == len(cards):
        return BackendChoice("nccl", f"one rank per GPU, NCCL {version}", {})

    # Several ranks on one card need a newer NCCL, and a newer one still for slices.
    if any(r.kind == "mig" for r in ranks):
        what = "slices of one GPU"
        needed = (2, 31, 0)
    else:
        what = "ranks that share a GPU"
        needed = (2, 30, 3)
    if nccl_version >= needed:
        env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}
        reason = f"{what}: NCCL {version} allows it with NCCL_MULTI_RANK_GPU_ENABLE=1"
        return BackendChoice("nccl", reason, env)
    least = ".".join(map(str, needed))
    if requested == "nccl":
        raise ConfigError(
            f"backend = nccl, but NCCL {version} refuses {what}; use backend gloo or auto, or "
            f"install nvidia-nccl-cu13>={least}"
        )
    return BackendChoice(
        "gloo", f"{what}: NCCL {version} refuses that (from {least} on it does not)", {}
    )


def rendezvous_of(nodes: Sequence[str], choice: BackendChoice, secret: str) -> list[Rendezvous]:
    """Return the record of each rank, given its node; the caller adds addresses and devices."""
    node_rank = {node: i for i, node in enumerate(dict.fromkeys(nodes))}  # in order of appearance
    ranks_on_node = Counter(nodes)
    env = tuple((network_env() | choice.env).items())

    counted = Counter[str]()
    ranks = []
    for rank, node in enumerate(nodes):
        record = Rendezvous(
            rank=rank,
            world_size=len(nodes),
            local_rank=counted[node],
            local_world_size=ranks_on_node[node],
            node_rank=node_rank[node],
            nodes=len(node_rank),
            backend=choice.backend,
            backend_reason=choice.reason,
            env=env,
            secret=secret,
        )
        ranks.append(record)
        counted[node] += 1
    return ranks


def runtime_nccl_version() -> tuple[int, int, int] | None:
    """Return the version of the loaded NCCL library; None without one.

    It may differ from the version that torch was built with.
    """
    import torch
    import torch.distributed as dist

    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    from torch.distributed import ProcessGroupNCCL

    text = getattr(ProcessGroupNCCL, "get_runtime_nccl_version", torch.cuda.nccl.version)()
    numbers = re.findall(r"\d+", str(text))
    return (int(numbers[0]), int(numbers[1]), int(numbers[2]))


def public_name(secret: str) -> str:
    """Return a name that only holders of the secret can derive, and that does not reveal it."""
    return hmac.digest(secret.encode(), b"name", "sha256").hex()[:16]


def open_store(
    host: str, world_size: int, timeout_s: float, port: int = 0, only_here: bool = True
) -> TCPStore:
    """Serve the store in which the ranks meet. (rank 0 only)

    It listens on the address that the ranks use, and on no other, at a port that the kernel picks
    unless one is given. `only_here`: a loopback address will do, because all ranks are on this
    host. Finding a free port first and binding it later is a race (ray-project/ray#35907); binding
    port 0 is not. Raises OSError when the port is taken.
    """
    from torch.distributed import TCPStore

    listener = _listen(host, port, only_here)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listen(host: str, port: int, only_here: bool = True) -> socket.socket:
    """Listen at the address of `host`, or at all addresses if others could not connect there.

    That is so where it is none of this machine's (it is behind a NAT), and, unless all ranks are
    `only_here`, where the machine's own name is a loopback address, as Debian and Ubuntu set it.
    """
    by_name = host not in ("localhost", "127.0.0.1", "::1")
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if by_name and not only_here and is_loopback(str(address[0])):
            continue
        try:
            return socket.create_server(address, family=family, backlog=4096)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(("", port), backlog=4096)


def connect_store(r: Rendezvous, timeout_s: float) -> TCPStore:
    """Serve the store at MASTER_ADDR:MASTER_PORT (rank 0) or connect to it, within `timeout_s`.

    Raises RendezvousError with what is wrong with the address.
    """
    from torch.distributed import TCPStore

    def connect() -> TCPStore:
        if r.rank == 0 and not r.agent_store:
            only_here = r.local_world_size == r.world_size
            return open_store(r.master_addr, r.world_size, timeout_s, r.master_port, only_here)
        patience = timedelta(seconds=timeout_s)
        return TCPStore(
            r.master_addr, r.master_port, r.world_size, timeout=patience, wait_for_workers=False
        )

    complaint = (
        f"rank {r.rank} cannot reach the store at {r.master_addr}:{r.master_port}; is rank 0 up, and "
        "the port free?"
    )
    if r.run_id:  # the address came from variables
        complaint += " MASTER_ADDR and MASTER_PORT must name rank 0's host, and a port open to all"
    return _within(timeout_s, connect, complaint)


def _within(seconds: float, call: Callable[[], T], complaint: str) -> T:
    """Run `call` with a deadline. Raises RendezvousError with `complaint`.

    A TCPStore client that connects to a silent listener ignores its own timeout, so it runs in a
    thread of its own.
    """
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append((call(), None))
        except Exception as error:  # raised in the caller's thread below
            outcome.append((None, error))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds + 1)
    if not outcome:
        raise RendezvousError(f"{complaint} (no answer for {seconds:g} s)")
    value, error = outcome[0]
    if error is not None:
        reason = " ".join(str(error).split())  # on one line
        raise RendezvousError(f"{complaint} ({reason[:200]})")
    return value


def network_env() -> dict[str, str]:
    """Return the NCCL, gloo and UCX variables of this environment, for the actors."""
    prefixes = ("NCCL_", "GLOO_", "UCX_", "TORCH_NCCL_", "TP_")
    return {key: value for key, value in os.environ.items() if key.startswith(prefixes)}
