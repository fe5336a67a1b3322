"""From a rendezvous record to a process group: the ranks meet, prove that they agree, and form their groups.

    Rendezvous (who am I, where is the store) ── join() ──► Mesh (groups, device) ── used by the loop
                                                  │
                        roll call: every rank writes its facts into the TCPStore and reads rank 0's

torch is imported inside the functions that need it: the Ray driver uses the first half of this file, and starts two
seconds sooner without torch.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nanoray.errors import ConfigError, RendezvousError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup, TCPStore, Work

    from nanoray.comm import CommRecorder

T = TypeVar("T")
GO_ON, REGROUP, STOP = 0, 1, 2  # what every rank votes for after each step; the highest wish counts
PATIENCE_S = 900.0  # for what one rank does alone while the others wait: writing and verifying checkpoints


@dataclass(frozen=True)
class Rendezvous:
    """Who this rank is and where the others are. Made by the Ray driver, or read from the environment."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    device: str = "cpu"  # "cpu" or "cuda:I" as this process counts
    backend: str = "gloo"
    backend_reason: str = ""
    env: tuple[tuple[str, str], ...] = ()  # what the backend needs in the environment
    threads: int = 1  # intra-op threads of torch
    secret: str = field(default="", repr=False)  # prefix of all keys in the store: strangers that dial it see none
    agent_store: bool = False  # somebody else already serves the store: torchrun's agent, or a rank that survived
    live: bool = False  # a rank among these holds the run's state in its memory
    seat: int = -1  # whose log and stamp it writes: its rank when all seats are taken
    seats: int = 0  # ranks that the run was started with

    def __post_init__(self) -> None:
        if self.seat < 0:
            object.__setattr__(self, "seat", self.rank)
        if not self.seats:
            object.__setattr__(self, "seats", self.world_size)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Rendezvous:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun or a StatefulSet sets them.

        None of them: one process. Some of them: ConfigError that names the missing ones.
        """
        wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [key for key in wanted if key not in env]
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls()
        if missing:
            raise ConfigError(
                f"the environment sets {', '.join(k for k in wanted if k in env)} but not {', '.join(missing)}; "
                "set all four (torchrun does), or none for one process"
            )
        try:
            rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
            local_rank, local_world = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
            node_rank, port = int(env.get("GROUP_RANK", rank // max(1, local_world))), int(env["MASTER_PORT"])
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT must be whole numbers: {error}") from None
        if not 0 <= rank < world:
            raise ConfigError(f"RANK = {rank} is outside 0..WORLD_SIZE-1 = {world - 1}; ranks count from 0")
        return cls(
            rank=rank,
            world_size=world,
            local_rank=local_rank,
            local_world_size=local_world,
            node_rank=node_rank,
            master_addr=env["MASTER_ADDR"],
            master_port=port,
            # torchrun's store outlives a restart: its attempts must not read each other's keys
            secret=f"{env.get('TORCHELASTIC_RUN_ID', 'env')}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


class BackendChoice(NamedTuple):
    """Which process group backend runs, why, and the environment variables it needs on every rank."""

    backend: str
    reason: str
    env: dict[str, str]


class RankDevice(NamedTuple):
    """What the choice of a backend depends on, per rank. `gpu` is the physical card: slices of one share it."""

    kind: str  # cpu | cuda | mig
    node: str
    gpu: str


def choose_backend(
    ranks: Sequence[RankDevice], requested: str, nccl_version: tuple[int, int, int] | None
) -> BackendChoice:
    """Choose NCCL or gloo for these devices. `nccl_version` is the library in force, None without one.

    NCCL refuses two ranks on one GPU or on slices of one before 2.30 ("Duplicate GPU detected"), allows a shared GPU
    from 2.30.3 and MIG slices from 2.31 with a switch (NCCL release notes; NVIDIA/nccl#1716).
    Raises ConfigError when `requested` cannot work.
    """
    if any(r.kind == "cpu" for r in ranks):
        if requested == "nccl":
            raise ConfigError("backend = nccl, but ranks run on CPU; use backend gloo or auto, or device cuda")
        return BackendChoice("gloo", "asked for" if requested == "gloo" else "CPU ranks", {})
    if requested == "gloo":
        return BackendChoice("gloo", "asked for", {})
    version = ".".join(map(str, nccl_version or ())) or "missing"
    if nccl_version is None:
        if requested == "nccl":
            raise ConfigError("backend = nccl, but this torch build has no NCCL; use backend gloo")
        return BackendChoice("gloo", "this torch build has no NCCL", {})
    cards = [(r.node, r.gpu) for r in ranks]
    if len(set(cards)) == len(cards):
        return BackendChoice("nccl", f"one rank per GPU, NCCL {version}", {})
    mig = any(r.kind == "mig" for r in ranks)
    what, needed = ("slices of one GPU", (2, 31, 0)) if mig else ("ranks that share a GPU", (2, 30, 3))
    if nccl_version >= needed:
        env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}
        return BackendChoice("nccl", f"{what}: NCCL {version} allows it with NCCL_MULTI_RANK_GPU_ENABLE=1", env)
    least = ".".join(map(str, needed))
    if requested == "nccl":
        raise ConfigError(
            f"backend = nccl, but NCCL {version} refuses {what}; use backend gloo or auto, "
            f"or install nvidia-nccl-cu13>={least}"
        )
    return BackendChoice("gloo", f"{what}: NCCL {version} refuses that (from {least} on it does not)", {})


def runtime_nccl_version() -> tuple[int, int, int] | None:
    """Return the version of the NCCL library in force, which may differ from the one torch was built with."""
    import torch
    import torch.distributed as dist

    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    from torch.distributed import ProcessGroupNCCL

    text = getattr(ProcessGroupNCCL, "get_runtime_nccl_version", torch.cuda.nccl.version)()
    numbers = re.findall(r"\d+", str(text))
    return (int(numbers[0]), int(numbers[1]), int(numbers[2]))


def open_store(host: str, world_size: int, timeout_s: float) -> TCPStore:
    """Serve the store that the ranks meet in, on a port that the kernel picks. (rank 0 only)

    Finding a free port first and binding it later is a race (ray-project/ray#35907); binding port 0 is none.
    """
    from torch.distributed import TCPStore

    return TCPStore(host, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


@dataclass
class Mesh:
    """The ranks of a run as this rank sees them. With one rank there is no process group and collectives do nothing."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    backend_reason: str
    control_group: ProcessGroup | None = None  # gloo on CPU: stop votes, apart from gradients
    patient_group: ProcessGroup | None = None  # gloo on CPU with a long timeout: where rank 0 may be busy with files
    store: Any = field(default=None, repr=False)
    recorder: CommRecorder | None = field(default=None, repr=False)  # notes what these collectives cost
    seat: int = -1  # as in Rendezvous
    seats: int = 0

    def __post_init__(self) -> None:
        self.seat = self.rank if self.seat < 0 else self.seat
        self.seats = self.seats or self.world_size

    def all_reduce_mean(self, tensor: Tensor, what: str = "value") -> Tensor:
        """Average `tensor` over all ranks, in place. `what` it is stands in the notes. (all ranks)"""
        tensor = self.all_reduce(tensor, what)
        tensor /= self.world_size
        return tensor

    def all_reduce(self, tensor: Tensor, what: str = "value", op: str = "sum") -> Tensor:
        """Sum (or max) `tensor` over all ranks, in place. (all ranks)"""
        if self.world_size > 1:
            import torch.distributed as dist

            with self._noted("all_reduce", what, "default", tensor):
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return tensor

    def vote(self, wish: int) -> Vote:
        """Start to ask for the highest of all ranks' wishes; the answer is read later: compute hides it. (all ranks)"""
        import torch

        ballot = torch.tensor([wish], dtype=torch.uint8)
        if self.world_size == 1:
            return Vote(ballot, None, self)
        import torch.distributed as dist

        work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.control_group, async_op=True)
        return Vote(ballot, work, self)

    def gather(self, value: T) -> list[T] | None:
        """Collect one picklable value per rank on rank 0; the others get None. (all ranks)"""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with self._noted("gather", "objects", "patient"):
            dist.gather_object(value, values, dst=0, group=self.patient_group)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Collect one picklable value per rank on every rank. (all ranks)"""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        with self._noted("all_gather", "objects", "patient"):
            dist.all_gather_object(values, value, group=self.patient_group)
        return values

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of rank `src` on every rank. (all ranks)"""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        with self._noted("broadcast", "objects", "patient"):
            dist.broadcast_object_list(box, src=src, group=self.patient_group)
        return box[0]

    def broadcast_tensor(self, tensor: Tensor, src: int) -> None:
        """Overwrite `tensor`, which lies on this rank's device, with that of rank `src`. (all ranks)"""
        if self.world_size == 1:
            return
        import torch.distributed as dist

        with self._noted("broadcast", "state", "default", tensor):
            dist.broadcast(tensor, src=src)

    def leave(self) -> None:
        """Abandon every process group, whatever is under way in it: the others see closed connections, not silence."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _abort_process_group

        self.control_group = self.patient_group = None  # the last references: with them go the sockets
        for end in (_abort_process_group, dist.destroy_process_group):
            with suppress(Exception):  # of groups that are broken already; whatever can be closed is
                end()

    def barrier(self) -> None:
        """Wait until every rank is here. (all ranks)"""
        if self.world_size > 1:
            import torch.distributed as dist

            with self._noted("barrier", "barrier", "patient"):
                dist.barrier(group=self.patient_group)

    def _noted(self, op: str, what: str, group: str, tensor: Tensor | None = None) -> AbstractContextManager[None]:
        return self.recorder.call(op, what, group, tensor) if self.recorder else nullcontext()


class Vote(NamedTuple):
    """A question to all ranks that is still under way."""

    ballot: Tensor
    work: Work | None
    mesh: Mesh

    def result(self) -> int:
        """Wait for the answer. (all ranks)"""
        if self.work is not None:
            with self.mesh._noted("all_reduce", "vote", "control", self.ballot):
                self.work.wait()
        return int(self.ballot.item())


def join(
    rendezvous: Rendezvous,
    facts: Mapping[str, str],
    timeout_s: float,
    init_timeout_s: float,
    store: TCPStore | None = None,
) -> Mesh:
    """Meet the other ranks, check that all hold the same `facts`, and form the process groups. (all ranks)

    `store` is the server that rank 0 opened with `open_store`, where there is one. Raises RendezvousError that names
    the absent ranks, or the fact that differs with both values.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional

    # That module, which DDP imports, keeps as default arguments whatever the default group is when it is imported. From
    # here on that is none: a group that broke must go, sockets and all, or its other ranks would wait for this one.
    r, device = rendezvous, torch.device(rendezvous.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if r.world_size == 1:
        return Mesh(0, 1, 0, device, "none", "one rank: no process group", seat=r.seat, seats=r.seats)
    deadline = time.monotonic() + init_timeout_s
    if store is None:
        store = connect_store(r, init_timeout_s)
    prefix = dist.PrefixStore(f"nanoray/{r.secret}", store)
    _roll_call(prefix, r, facts, deadline)
    dist.init_process_group(
        r.backend,
        store=dist.PrefixStore("default", prefix),
        rank=r.rank,
        world_size=r.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if r.backend == "nccl" else None,
    )
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(timeout_s, PATIENCE_S)))
    me = Mesh(r.rank, r.world_size, r.local_rank, device, r.backend, r.backend_reason, control, patient, store)
    me.seat, me.seats = r.seat, r.seats
    return me


def connect_store(r: Rendezvous, timeout_s: float) -> TCPStore:
    """Serve the store at MASTER_ADDR:MASTER_PORT (rank 0) or connect to it, within `timeout_s`."""
    from torch.distributed import TCPStore

    def connect() -> TCPStore:
        return TCPStore(
            r.master_addr,
            r.master_port,
            r.world_size,
            is_master=r.rank == 0 and not r.agent_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )

    where = f"{r.master_addr}:{r.master_port}"
    return _within(
        timeout_s, connect, f"rank {r.rank} cannot reach the store at {where}; is rank 0 up, and the port free?"
    )


def _within(seconds: float, call: Callable[[], T], complaint: str) -> T:
    """Run `call` with a deadline of its own: a TCPStore client that dials a silent listener ignores its timeout."""
    box: list[Any] = []

    def target() -> None:
        try:
            box.append((call(), None))
        except Exception as error:  # handed to the caller's thread below
            box.append((None, error))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds + 1)
    if not box:
        raise RendezvousError(f"{complaint} (no answer for {seconds:g} s)")
    value, error = box[0]
    if error is not None:
        raise RendezvousError(f"{complaint} ({' '.join(str(error).split())[:200]})")
    return value


def _roll_call(store: Any, r: Rendezvous, facts: Mapping[str, str], deadline: float) -> None:
    """Wait until every rank has written its facts; compare ours with rank 0's. (all ranks)"""
    facts = {**facts, "WORLD_SIZE": str(r.world_size), "backend": r.backend}
    keys = [f"facts/{rank}" for rank in range(r.world_size)]
    store.set(keys[r.rank], json.dumps(facts))
    try:
        store.wait(keys, timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except Exception:  # torch raises several types here; the store itself says who is absent
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise RendezvousError(
            f"rank {r.rank} waited in vain for rank {', '.join(absent)} of {r.world_size}; "
            "look at their logs, or raise init_timeout_s if they are only slow"
        ) from None
    for key, ours in facts.items():
        theirs = json.loads(store.get(keys[0])).get(key)
        if theirs != ours:
            raise RendezvousError(
                f"rank {r.rank} has {key} = {ours}, rank 0 has {theirs}; "
                "start every rank with the same code, configuration and versions"
            )


def network_env(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the NCCL, gloo and UCX variables of this environment, to pass on to the actors as they are."""
    source = os.environ if env is None else env
    return {k: v for k, v in source.items() if k.startswith(("NCCL_", "GLOO_", "UCX_", "TORCH_NCCL_", "TP_"))}
