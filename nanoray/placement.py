"""Where ranks run: connect to a cluster or start a local Ray, and reserve one slot per rank, or say why not."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanoray.config import Config
from nanoray.devices import Slots, available_cpus, cpu_share
from nanoray.errors import PlacementError
from nanoray.worker import bound_devices

_TOKEN_FILE = Path("~/.ray/auth_token").expanduser()
START_TIMEOUT_S = 90.0  # for a process to start and answer
_ENDING = "nanoray-end"
END_TIMEOUT_S = 5.0  # what is not ended by then has nobody to end it
HEAD_TIMEOUT_S = 15.0  # a driver without a head is ended by Ray after 60 s, without a word


@contextmanager
def connected(address: str, slots: Slots | None, config: Config) -> Iterator[None]:
    """Connect to a cluster, or start a local Ray and leave nothing of it behind."""
    options: dict[str, Any] = {
        "namespace": "nanoray",
        "log_to_driver": False,  # ranks log to their own files; the driver alone prints
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    temp = None
    if slots is not None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a local Ray does not phone home
        temp = tempfile.mkdtemp(prefix="nanoray-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)
        if slots.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(d.uuid for d in slots.devices)
        if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & os.environ.keys() and not _TOKEN_FILE.exists():
            # Ray guards a local cluster with a token, for whoever reaches an open one runs code in it. Give it one for
            # this run alone: otherwise it writes one into the user's home.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        options |= {
            "num_cpus": max(1, int(available_cpus())),
            "num_gpus": len(slots.devices),
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "object_store_memory": 80 * 2**20,  # nothing of size ever goes through it
            "_temp_dir": temp,
        }
    try:
        try:
            if slots is None:
                _dial(address)
            with _temporary_files_in(temp):
                context = ray.init(address=address, **options)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise PlacementError(
                f"cannot connect to Ray at {address}: {' '.join(str(error).split())[:300]}; check `ray status`, "
                "RAY_ADDRESS and RAY_AUTH_MODE, or use --ray_address local"
            ) from None
        where = f"local, {slots.reason}" if slots else f"cluster at {address}"
        dashboard = f" · dashboard http://{context.dashboard_url}" if context.dashboard_url else ""
        print(f"ray    {where}{dashboard}", flush=True)
        yield
    finally:
        bounded(ray.shutdown)
        if temp:
            shutil.rmtree(temp, ignore_errors=True)


@contextmanager
def _temporary_files_in(folder: str | None) -> Iterator[None]:
    """Let processes that are started here put their temporary files into `folder`: Ray's dashboard forgets some."""
    if folder is None:
        yield
        return
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before


def bounded(end: Callable[[], object]) -> None:
    """Call what ends something on the cluster. Without a head it would never return: wait for it for a while only."""
    thread = threading.Thread(target=end, name=_ENDING, daemon=True)
    thread.start()
    thread.join(END_TIMEOUT_S)


def stuck() -> bool:
    """Whether something of this process still waits for a cluster that does not answer, and would wait at exit, too."""
    return any(thread.name == _ENDING for thread in threading.enumerate())


def _dial(address: str) -> None:
    """Raise OSError when nobody listens at HOST:PORT. Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=5).close()


@dataclass(frozen=True)
class Placement:
    """A placement group whose bundles are ordered as the ranks will be: by node, then by device."""

    group: PlacementGroup
    kind: str  # cpu | cuda | mig
    bundle: dict[str, float]
    order: tuple[int, ...]  # bundle index of each rank

    @property
    def workers(self) -> int:
        return len(self.order)

    @property
    def threads(self) -> int:
        """Intra-op threads per rank: the CPUs it reserved, set on purpose (Ray's default follows other rules)."""
        return max(1, int(self.bundle["CPU"]))

    @classmethod
    def make(cls, config: Config) -> Placement:
        """Reserve one bundle per rank. Raises PlacementError, with what each node has, when that cannot be done."""
        nodes = _nodes()
        gpus = sum(node["total"].get("GPU", 0) for node in nodes)
        kind = {"auto": "cuda" if gpus else "cpu"}.get(config.device, config.device)
        if kind == "cpu":
            cpus = [node["total"].get("CPU", 0.0) for node in nodes]
            workers = (2 if sum(cpus) >= 2 else 1) if config.workers == "auto" else config.workers
            bundle = {"CPU": config.cpus_per_worker or cpu_share([c for c in cpus if c > 0], workers)}
        else:
            workers = max(1, int(gpus)) if config.workers == "auto" else config.workers
            bundle = {"GPU": 1.0, "CPU": config.cpus_per_worker or 1.0}
        asked = f"{workers} × {_resources(bundle)}"
        if sum(_fits(node["total"], bundle) for node in nodes) < workers:
            raise PlacementError(
                f"asked for {asked}, but the cluster can never hold it; {_table(nodes, 'total')}; "
                "lower --workers or --cpus_per_worker, or add nodes"
            )
        group = placement_group([bundle] * workers, strategy=config.placement.upper())
        try:
            ray.get(group.ready(), timeout=config.placement_timeout_s)
        except GetTimeoutError:
            state = placement_group_table(group)["stats"]["scheduling_state"]
            remove_placement_group(group)
            raise PlacementError(
                f"asked for {asked}, not free within {config.placement_timeout_s:g} s ({state}); "
                f"{_table(_nodes(), 'available')}; wait for other jobs, or raise --placement_timeout_s"
            ) from None
        try:
            slots = _slots_of(group, kind, workers)
            if config.device == "mig" and not all(devices[0].startswith("MIG-") for _, devices, _ in slots):
                raise PlacementError(
                    f"device = mig, but Ray handed out {[devices[0] for _, devices, _ in slots]}; start Ray with "
                    "CUDA_VISIBLE_DEVICES set to the slices' MIG- UUIDs and --num-gpus to their number"
                )
        except BaseException:
            remove_placement_group(group)
            raise
        mig = kind != "cpu" and all(devices[0].startswith("MIG-") for _, devices, _ in slots)
        return cls(group, "mig" if mig else kind, bundle, tuple(index for _, _, index in sorted(slots)))


class ClusterWatch:
    """Looks every second, in a thread, whether the cluster's head answers and whether a node of this run is drained."""

    def __init__(self, place: Placement) -> None:
        self._place = place
        self._address = ""
        self._answered = time.monotonic()
        self._draining: dict[str, int] = {}  # node -> deadline, Unix ms; 0 without one
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> ClusterWatch:
        self._address = ray.get_runtime_context().gcs_address  # which would start a Ray where there is none
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    @property
    def head_lost(self) -> bool:
        """Whether the head has not answered for so long that nothing can be started any more."""
        return time.monotonic() - self._answered > HEAD_TIMEOUT_S

    def head_answers(self) -> bool:
        """Ask the head now. Whoever creates an actor without one waits for ever."""
        try:
            _dial(self._address)
        except OSError:
            return False
        return True

    def trouble(self) -> str:
        """Return why this run should end now, with a checkpoint; empty when all is well."""
        if self.head_lost:
            return f"the cluster's head has not answered for {HEAD_TIMEOUT_S:.0f} s"
        if not self._draining:
            return ""
        nodes = placement_group_table(self._place.group)["bundles_to_node_id"].values()
        for node, deadline_ms in self._draining.items():
            if node in nodes:
                left = f", {max(0.0, deadline_ms / 1e3 - time.time()):.0f} s left" if deadline_ms else ""
                return f"node {node[:8]} is being drained{left}"
        return ""

    def _look(self) -> None:
        while not self._over.wait(1.0):
            with suppress(Exception):  # whatever it raises: the head did not answer
                _dial(self._address)
                self._answered = time.monotonic()  # a head that is frozen keeps the call below, and this thread with it
                from ray._private.state import state  # there is no public call that tells who is drained

                self._draining = dict(state.get_draining_nodes())


def _slots_of(group: PlacementGroup, kind: str, workers: int) -> list[tuple[str, list[str], int]]:
    """Return (node, device ids, bundle index) per bundle. The order of bundles says nothing about that of GPUs."""
    if kind == "cpu":
        node_of = placement_group_table(group)["bundles_to_node_id"]
        return [(node_of[index], [], index) for index in range(workers)]
    probe = ray.remote(num_cpus=0, num_gpus=1)(_probe)
    refs = [probe.options(scheduling_strategy=strategy(group, index)).remote() for index in range(workers)]
    found = ray.get(refs, timeout=START_TIMEOUT_S)
    return [(node, [_zero_padded(d) for d in devices], index) for index, (node, devices) in enumerate(found)]


def _probe() -> tuple[str, list[str]]:
    return ray.get_runtime_context().get_node_id(), bound_devices()


def _zero_padded(device: str) -> str:
    return device.zfill(4) if device.isdigit() else device  # GPU 10 comes after GPU 9


def strategy(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _nodes() -> list[dict[str, Any]]:
    from ray._private.state import available_resources_per_node  # there is no public call that tells it per node

    available = available_resources_per_node()
    alive = [n for n in ray.nodes() if n["Alive"]]
    return [
        {"ip": n["NodeManagerAddress"], "total": n["Resources"], "available": available.get(n["NodeID"], {})}
        for n in alive
    ]


def _fits(resources: dict[str, float], bundle: dict[str, float]) -> int:
    return min(int(resources.get(name, 0) / amount + 1e-6) for name, amount in bundle.items())


def _resources(values: dict[str, float]) -> str:
    return " + ".join(f"{values.get(name, 0):g} {name}" for name in ("GPU", "CPU") if name in values) or "nothing"


def _table(nodes: list[dict[str, Any]], column: str) -> str:
    return f"{column} per node: " + "; ".join(f"{n['ip']} has {_resources(n[column])}" for n in nodes)
