"""Where ranks run: connect to a Ray cluster or start a local one, and reserve the resources of one slot per rank."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanoray.config import Config
from nanoray.errors import PlacementError
from nanoray.launch.signals import Stop, StopRequested
from nanoray.launch.worker import bound_devices
from nanoray.mesh.devices import Slots, available_cpus, cpu_share

_TOKEN_FILE = Path("~/.ray/auth_token").expanduser()
START_TIMEOUT_S = 90.0  # for a process to start and answer
PLACEMENT_POLL_S = 0.25  # how often a wait for resources looks whether a stop was requested
_CLEANUP_THREAD = "nanoray-cleanup"
CLEANUP_TIMEOUT_S = 5.0
SHUTDOWN_S = 3.0  # of a cluster of others: where that takes 5 s, Ray ends this process with code 1 in place of its own
HEAD_ANSWER_S = 2.0  # it answers in milliseconds
HEAD_TIMEOUT_S = 15.0  # after 60 s without a head Ray ends the driver, without an error


@contextmanager
def connected(address: str, slots: Slots | None, stop: Stop | None = None) -> Iterator[None]:
    """Connect to a cluster; or, given local `slots`, start a Ray on this machine and remove it afterwards.

    A stop that is requested meanwhile raises StopRequested.
    """
    options: dict[str, Any] = {
        "namespace": f"nanoray-{secrets.token_hex(4)}",  # two runs of one name on a cluster are not in each other's way
        "log_to_driver": False,  # ranks log to their own files; only the driver prints
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    temp, handles_signals, stop = None, stop is not None, stop or Stop()
    if slots is not None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics from a local Ray
        temp = tempfile.mkdtemp(prefix="nanoray-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)
        if slots.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(d.uuid for d in slots.devices)
        if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & os.environ.keys() and not _TOKEN_FILE.exists():
            # A cluster without a token runs code of anyone who can reach it. Ray would write a token into the user's
            # home; this one is for this run only.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        options |= {
            "num_cpus": max(1, int(available_cpus())),
            "num_gpus": len(slots.devices),
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "object_store_memory": 80 * 2**20,  # no tensors pass through it
            "_temp_dir": temp,
        }
    try:
        try:
            if slots is None:
                _dial(address)
            with _temporary_files_in(temp), stop.at_once():
                context = ray.init(address=address, **options)
        except SystemExit as ended:  # Ray has put its own handler for SIGTERM in the place of ours
            if ended.code != signal.SIGTERM:
                raise
            stop.signal = signal.SIGTERM
            raise StopRequested from None
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise PlacementError(
                f"cannot connect to Ray at {address}: {' '.join(str(error).split())[:300]}; check `ray status`, "
                "RAY_ADDRESS and RAY_AUTH_MODE, or use --ray_address local"
            ) from None
        where = f"local, {slots.reason}" if slots else f"cluster at {address}"
        dashboard = f" · dashboard http://{context.dashboard_url}" if context.dashboard_url else ""
        print(f"ray    {where}{dashboard}", flush=True)
        if handles_signals:
            stop.install()
        yield
    finally:
        bounded(ray.shutdown, CLEANUP_TIMEOUT_S if temp else SHUTDOWN_S)
        if temp:
            _end_processes_of(temp)
            shutil.rmtree(temp, ignore_errors=True)


def _end_processes_of(temp: str) -> None:
    """End what an interrupted start of a local Ray has left: the processes that have files in its folder open.

    Their parents are gone by then, and Ray overwrites their command lines and environments.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            files = [os.readlink(link) for link in (folder / "fd").iterdir()]
            if int(folder.name) != os.getpid() and any(file.startswith(f"{temp}/") for file in files):
                os.kill(int(folder.name), signal.SIGKILL)


@contextmanager
def _temporary_files_in(folder: str | None) -> Iterator[None]:
    """Give processes started here `folder` for temporary files: Ray's dashboard leaves some behind."""
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


def bounded(cleanup: Callable[[], object], seconds: float = CLEANUP_TIMEOUT_S) -> None:
    """Call `cleanup`, but wait for some seconds only: a call to a cluster without a head never returns."""
    thread = threading.Thread(target=cleanup, name=_CLEANUP_THREAD, daemon=True)
    thread.start()
    thread.join(seconds)


def stuck() -> bool:
    """Whether a cleanup of this process still waits for a cluster that does not answer; a normal exit would block."""
    return any(thread.name == _CLEANUP_THREAD for thread in threading.enumerate())


def _dial(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=5).close()


@dataclass(frozen=True)
class Placement:
    """A Ray placement group with one bundle per rank; ranks are ordered by node, then by device."""

    group: PlacementGroup
    kind: str  # cpu | cuda | mig
    bundle: dict[str, float]
    order: tuple[int, ...]  # bundle index of each rank

    @property
    def workers(self) -> int:
        return len(self.order)

    @property
    def threads(self) -> int:
        """Intra-op threads per rank: the CPUs it reserved. Ray would set another number."""
        return max(1, int(self.bundle["CPU"]))

    @classmethod
    def make(cls, config: Config, check: Callable[[], None] = lambda: None, api: Any = ray) -> Placement:
        """Reserve one bundle per rank; `check` is called while it waits, and may raise.

        Raises PlacementError with the resources of each node if that is impossible.
        """
        nodes = _nodes(api)
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
        group = api.util.placement_group([bundle] * workers, strategy=config.placement.upper())
        try:
            deadline, ready = time.monotonic() + config.placement_timeout_s, group.ready()
            while not api.wait([ready], timeout=min(PLACEMENT_POLL_S, max(0.0, deadline - time.monotonic())))[0]:
                check()
                if time.monotonic() < deadline:
                    continue
                state = api.util.placement_group_table(group)["stats"]["scheduling_state"]
                raise PlacementError(
                    f"asked for {asked}, not free within {config.placement_timeout_s:g} s ({state}); "
                    f"{_table(_nodes(api), 'available')}; wait for other jobs, or raise --placement_timeout_s"
                )
            slots = _slots_of(group, kind, workers, api)
            if config.device == "mig" and not all(devices[0].startswith("MIG-") for _, devices, _ in slots):
                raise PlacementError(
                    f"device = mig, but Ray handed out {[devices[0] for _, devices, _ in slots]}; start Ray with "
                    "CUDA_VISIBLE_DEVICES set to the slices' MIG- UUIDs and --num-gpus to their number"
                )
        except BaseException:
            api.util.remove_placement_group(group)
            raise
        mig = kind != "cpu" and all(devices[0].startswith("MIG-") for _, devices, _ in slots)
        return cls(group, "mig" if mig else kind, bundle, tuple(index for _, _, index in sorted(slots)))


class ClusterWatch:
    """Checks every second, in a thread, that the cluster's head answers and that no node of this run is drained."""

    def __init__(self, place: Placement, api: Any = ray, clock: Any = time) -> None:
        self._place, self._api, self._clock = place, api, clock
        self._address = ""
        self._answered_at = clock.monotonic()
        self._asked, self._answered = 0, 0  # questions of head_answers
        self._drained: tuple[str, int] | None = None  # a node of this run and its deadline, Unix ms; 0 without one
        self._over, self._ask = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._check_until_exit, daemon=True)

    def __enter__(self) -> ClusterWatch:
        self._address = self._api.get_runtime_context().gcs_address  # not earlier: the call starts Ray if need be
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._ask.set()

    @property
    def head_lost(self) -> bool:
        """Whether the head has not answered for HEAD_TIMEOUT_S."""
        return self._clock.monotonic() - self._answered_at > HEAD_TIMEOUT_S

    def head_answers(self, within_s: float = HEAD_ANSWER_S) -> bool:
        """Whether the head answers a request of now. Without a head, creating or ending an actor blocks for ever.

        A connection proves nothing: the kernel accepts it for a process that is frozen.
        """
        self._asked += 1
        question, deadline = self._asked, time.monotonic() + within_s
        self._ask.set()
        while self._answered < question:
            try:
                _dial(self._address)
            except OSError:
                return False
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)  # the thread answers within a millisecond or two
        return True

    def trouble(self) -> str:
        """Return why this run should stop now, with a checkpoint; empty if it need not."""
        if self.head_lost:
            return f"the cluster's head has not answered for {HEAD_TIMEOUT_S:.0f} s"
        if not self._drained:
            return ""
        node, deadline_ms = self._drained
        left = f", {max(0.0, deadline_ms / 1e3 - time.time()):.0f} s left" if deadline_ms else ""
        return f"node {node[:8]} is being drained{left}"

    def check(self) -> None:
        """Ask the head which nodes are being drained."""
        question, asked_at = self._asked, self._clock.monotonic()
        with suppress(Exception):  # any error means that the head did not answer
            _dial(self._address)
            # Ray has no public call for this. A frozen head blocks it, and so this thread.
            draining = dict(self._api._private.state.state.get_draining_nodes())
            nodes: Iterable[str] = ()
            if draining:
                nodes = self._api.util.placement_group_table(self._place.group)["bundles_to_node_id"].values()
            self._drained = next(((node, at) for node, at in draining.items() if node in nodes), None)
            self._answered, self._answered_at = question, asked_at

    def _check_until_exit(self) -> None:
        while not self._over.is_set():
            self._ask.wait(1.0)
            self._ask.clear()
            self.check()


def _slots_of(group: PlacementGroup, kind: str, workers: int, api: Any) -> list[tuple[str, list[str], int]]:
    """Return (node, device ids, bundle index) per bundle. Bundles are not in the order of GPUs."""
    if kind == "cpu":
        node_of = api.util.placement_group_table(group)["bundles_to_node_id"]
        return [(node_of[index], [], index) for index in range(workers)]
    probe = api.remote(num_cpus=0, num_gpus=1)(_probe)
    refs = [probe.options(scheduling_strategy=strategy(group, index)).remote() for index in range(workers)]
    found = api.get(refs, timeout=START_TIMEOUT_S)
    return [(node, [_zero_padded(d) for d in devices], index) for index, (node, devices) in enumerate(found)]


def _probe() -> tuple[str, list[str]]:
    return ray.get_runtime_context().get_node_id(), bound_devices()


def _zero_padded(device: str) -> str:
    return device.zfill(4) if device.isdigit() else device  # so that GPU 10 sorts after GPU 9


def strategy(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _nodes(api: Any) -> list[dict[str, Any]]:
    available = api._private.state.available_resources_per_node()  # Ray has no public call for this
    alive = [n for n in api.nodes() if n["Alive"]]
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
