"""Where ranks run: connect to a Ray cluster or start a local one, and reserve the resources of one
slot per rank.
"""

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
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanoray.config import Config
from nanoray.devices.choose import choose_precision
from nanoray.devices.host import available_cpus
from nanoray.devices.slots import Slots, cpu_share
from nanoray.environment import environment
from nanoray.errors import PlacementError
from nanoray.launch.signals import Stop, StopRequested
from nanoray.launch.worker import bound_devices

_TOKEN_FILE = Path("~/.ray/auth_token").expanduser()
START_TIMEOUT_S = 90.0  # for a process to start and answer
PLACEMENT_POLL_S = 0.25  # how often a wait for resources looks whether a stop was requested
ASSEMBLED_S = 30.0  # no new node for so long: the pods of a KubeRay cluster are all there
# For resources, where nodes are all there
PATIENCE_S = float(Config.model_fields["placement_timeout_s"].default)
# An environment variable that its operator sets in every pod
_KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"
CLEANUP_TIMEOUT_S = 5.0
SHUTDOWN_S = 30.0  # of a cluster of others: Ray first sends its last metrics, which may take 10 s


@contextmanager
def connected(
    address: str, slots: Slots | None, stop: Stop | None = None, last: bool = False
) -> Iterator[None]:
    """Connect to a cluster; or, given local `slots`, start a Ray on this machine and remove it
    afterwards.

    A stop that is requested meanwhile raises StopRequested. `last`: the caller ends this process
    with os._exit soon afterwards, so a cluster of others sees the connection close.
    """
    options: dict[str, Any] = {
        # Two runs of one name on a cluster are not in each other's way
        "namespace": f"nanoray-{secrets.token_hex(4)}",
        "log_to_driver": False,  # ranks log to their own files; only the driver prints
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    temp, handles_signals, stop, devices = None, stop is not None, stop or Stop(), ExitStack()
    if slots is not None:
        # No usage statistics from a local Ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        temp = tempfile.mkdtemp(
            prefix="nanoray-", dir="/tmp" if os.access("/tmp", os.W_OK) else None
        )
        if slots.devices:
            visible = ",".join(d.uuid for d in slots.devices)
            devices.enter_context(environment({"CUDA_VISIBLE_DEVICES": visible}))
        if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & os.environ.keys() and not _TOKEN_FILE.exists():
            # A cluster without a token runs code of anyone who can reach it. Ray would write a
            # token into the user's home; this one is for this run only.
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
                dial(address)
            # Ray's dashboard leaves temporary files behind.
            with (
                environment({"TMPDIR": temp} if temp else {}),
                _group_of_their_own(),
                stop.at_once(),
            ):
                context = _init(address, options, temp)
        except SystemExit as ended:  # Ray has put its own handler for SIGTERM in the place of ours
            if ended.code != signal.SIGTERM:
                raise
            stop.signal = signal.SIGTERM
            raise StopRequested from None
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise PlacementError(
                f"cannot connect to Ray at {address}: {' '.join(str(error).split())[:300]}; check "
                "`ray status`, "
                "RAY_ADDRESS and RAY_AUTH_MODE, or use --ray_address local"
            ) from None
        where = f"local, {slots.reason}" if slots else f"cluster at {address}"
        dashboard = f" · dashboard http://{context.dashboard_url}" if context.dashboard_url else ""
        print(f"ray    {where}{dashboard}", flush=True)
        if handles_signals:
            stop.install()
        yield
    finally:
        if temp or not last:
            _disconnect(temp)
        devices.close()  # another launch of this process may take others


def _init(address: str, options: dict[str, Any], temp: str | None) -> Any:
    """Connect to a Ray, or start one in the folder `temp`: twice if it exceeds the 30 s that Ray
    itself gives it.
    """
    for once_more in (temp, None):
        try:
            return ray.init(address=address, **options)
        except Exception as error:  # Ray raises no more special one here
            if "timed out during startup" not in str(error):
                raise
            if not once_more:
                raise RuntimeError(str(error)) from None
            bounded(ray.shutdown, CLEANUP_TIMEOUT_S)
            _end_processes_of(once_more)
    raise AssertionError


def _disconnect(temp: str | None) -> None:
    """Disconnect from Ray; remove a local one, whose folder is `temp`.

    While Ray shuts down, Python code that lets go of an ObjectRef makes it end this process at once
    with code 1. So this waits longer than Ray takes, but for a head that does not answer: then
    there is no end.
    """
    over = bounded(ray.shutdown, CLEANUP_TIMEOUT_S if temp else SHUTDOWN_S)
    if temp:
        _end_processes_of(temp)
        if over.is_alive():  # it waited for one of them
            over.join(SHUTDOWN_S)
        shutil.rmtree(temp, ignore_errors=True)


def _end_processes_of(temp: str) -> None:
    """End what an interrupted start of a local Ray has left: the processes that have files in its
    folder open.

    Their parents are gone by then, and Ray overwrites their command lines and environments.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            files = [os.readlink(link) for link in (folder / "fd").iterdir()]
            if int(folder.name) != os.getpid() and any(
                file.startswith(f"{temp}/") for file in files
            ):
                os.kill(int(folder.name), signal.SIGKILL)


@contextmanager
def _group_of_their_own() -> Iterator[None]:
    """Start Ray's processes in process groups of their own.

    A terminal that closes, `timeout` and batch systems signal the whole group of a command. In it,
    Ray's head would end at once, and the ranks with it, before they have saved. Ray itself has no
    setting for that.
    """
    services: Any = ray._private.services
    popen = services.ConsolePopen

    def start(command: list[str], preexec_fn: Callable[[], None], **options: Any) -> Any:
        def prepare() -> None:
            os.setpgid(0, 0)
            preexec_fn()

        return popen(command, preexec_fn=prepare, **options)

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = popen


def bounded(cleanup: Callable[[], object], seconds: float = CLEANUP_TIMEOUT_S) -> threading.Thread:
    """Call `cleanup`, but wait for some seconds only: a call to a cluster without a head never
    returns.

    Returns its thread. What a cluster refuses that does not know this run needs no cleanup.
    """

    def clean_up() -> None:
        with suppress(RayError):
            cleanup()

    thread = threading.Thread(target=clean_up, name="nanoray-cleanup", daemon=True)
    thread.start()
    thread.join(seconds)
    return thread


def dial(address: str) -> None:
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
    def make(
        cls, config: Config, check: Callable[[], None] = lambda: None, api: Any = ray
    ) -> Placement:
        """Reserve one bundle per rank; `check` is called while it waits, and may raise.

        Raises PlacementError with the resources of each node if that is impossible.
        """
        deadline = time.monotonic() + config.placement_timeout_s
        kind, workers, bundle = _request_that_fits(config, deadline, check, api)
        deadline = max(deadline, time.monotonic() + min(PATIENCE_S, config.placement_timeout_s))
        asked = f"{workers} × {_resources(bundle)}"
        group = api.util.placement_group([bundle] * workers, strategy=config.placement.upper())
        try:
            ready = group.ready()
            while not api.wait(
                [ready], timeout=min(PLACEMENT_POLL_S, max(0.0, deadline - time.monotonic()))
            )[0]:
                check()
                if time.monotonic() < deadline:
                    continue
                state = api.util.placement_group_table(group)["stats"]["scheduling_state"]
                raise PlacementError(
                    f"asked for {asked}, not free within {config.placement_timeout_s:g} s "
                    f"({state}); "
                    f"{_table(nodes_of(api), 'available')}; wait for other jobs, or raise "
                    "--placement_timeout_s"
                )
            slots = _slots_of(group, kind, workers, check, api)
            if config.device == "mig" and not all(
                devices[0].startswith("MIG-") for _, devices, _ in slots
            ):
                raise PlacementError(
                    f"device = mig, but Ray handed out {[devices[0] for _, devices, _ in slots]}; "
                    "start Ray with "
                    "CUDA_VISIBLE_DEVICES set to the slices' MIG- UUIDs and --num-gpus to their "
                    "number"
                )
        except BaseException:
            api.util.remove_placement_group(group)
            raise
        mig = kind != "cpu" and all(devices[0].startswith("MIG-") for _, devices, _ in slots)
        return cls(
            group, "mig" if mig else kind, bundle, tuple(index for _, _, index in sorted(slots))
        )


def _request_that_fits(
    config: Config, deadline: float, check: Callable[[], None], api: Any
) -> tuple[str, int, dict[str, float]]:
    """Return `_request` for the nodes that there are, waiting for more of them where more may come.

    A cluster is assembling if it has no CPU at all when this begins, as a head without workers, or
    if KubeRay's operator brings its pods up: then ranks that would share CPUs wait, too. A
    placement_timeout_s above the default says that others may grow. `check` is called while it
    waits, and may raise. Raises PlacementError when the cluster cannot hold the ranks.
    """
    assembling = _KUBERAY in os.environ
    said, seen, seen_at = "", set[str](), 0.0
    with closing(Demand(config.placement.upper(), api)) as demand:
        while True:
            nodes, now, request = nodes_of(api), time.monotonic(), None
            assembling |= not any(node["total"].get("CPU") for node in nodes)
            if seen != (seen := {node["id"] for node in nodes}):
                seen_at = now
            try:
                request = _, workers, bundle = _request(config, nodes)
                _require_room(nodes, workers, bundle)
                # Ranks that share a CPU: other nodes may only be late.
                dense = bundle["CPU"] < 1 and not config.cpus_per_worker
                if not (dense and assembling) or now > min(deadline, seen_at + ASSEMBLED_S):
                    return request
                problem = f"{workers} ranks would share CPUs"
            except PlacementError as error:
                if not assembling and config.placement_timeout_s <= PATIENCE_S:
                    raise
                if now >= deadline:
                    raise PlacementError(
                        f"{error}; waited {config.placement_timeout_s:g} s for more nodes: see why "
                        "they do not join, "
                        "or raise --placement_timeout_s"
                    ) from None
                problem = f"no room for workers = {config.workers}"
            demand.change(_wanted(config, request))
            if said != (said := f"{problem}; {_table(nodes, 'total')}"):
                print(f"wait   at most {deadline - now:.0f} s for more nodes: {said}", flush=True)
            check()
            time.sleep(max(0.0, min(PLACEMENT_POLL_S, deadline - time.monotonic())))


class Demand:
    """A placement group that waits, because an autoscaler adds nodes only for what somebody waits
    for.
    """

    def __init__(self, strategy: str, api: Any) -> None:
        self._strategy, self._api = strategy, api
        self._bundles: list[dict[str, float]] = []
        self._group: PlacementGroup | None = None

    def change(self, bundles: list[dict[str, float]]) -> None:
        """Wait for these bundles in place of those before."""
        if bundles != self._bundles:
            self.close()
            self._group = (
                self._api.util.placement_group(bundles, strategy=self._strategy)
                if bundles
                else None
            )
            self._bundles = bundles

    def close(self) -> None:
        if self._group:
            self._api.util.remove_placement_group(self._group)
        self._group, self._bundles = None, []


def _wanted(
    config: Config, request: tuple[str, int, dict[str, float]] | None
) -> list[dict[str, float]]:
    """Return the bundles that nodes are waited for with: on CPUs whole ones, which ranks share only
    without others.
    """
    if request and request[0] != "cpu":
        _, workers, bundle = request
        return [bundle] * workers
    return (
        []
        if config.workers == "auto"
        else [{"CPU": config.cpus_per_worker or 1.0}] * config.workers
    )


def _request(config: Config, nodes: list[dict[str, Any]]) -> tuple[str, int, dict[str, float]]:
    """Return the kind of device, the number of ranks and the resources of each, for these nodes.

    Raises PlacementError when CPUs do not suffice for the ranks.
    """
    gpus = sum(node["total"].get("GPU", 0) for node in nodes)
    kind = {"auto": "cuda" if gpus else "cpu"}.get(config.device, config.device)
    if kind == "cpu":
        choose_precision(config, kind, frozenset())  # raises for one that CPUs do not have
        cpus = [node["total"].get("CPU", 0.0) for node in nodes]
        workers = (2 if sum(cpus) >= 2 else 1) if config.workers == "auto" else config.workers
        return (
            kind,
            workers,
            {"CPU": config.cpus_per_worker or cpu_share([c for c in cpus if c > 0], workers)},
        )
    workers = max(1, int(gpus)) if config.workers == "auto" else config.workers
    return kind, workers, {"GPU": 1.0, "CPU": config.cpus_per_worker or 1.0}


def _require_room(nodes: list[dict[str, Any]], workers: int, bundle: dict[str, float]) -> None:
    """Raise PlacementError when the nodes cannot hold the ranks, even if nobody else used them."""
    if room_on(nodes, bundle, "total") < workers:
        raise PlacementError(
            f"asked for {workers} × {_resources(bundle)}, but the cluster can never hold it; "
            f"{_table(nodes, 'total')}; lower --workers or --cpus_per_worker, or add nodes"
        )


def _slots_of(
    group: PlacementGroup, kind: str, workers: int, check: Callable[[], None], api: Any
) -> list[tuple[str, list[str], int]]:
    """Return (node, device ids, bundle index) per bundle. Bundles are not in the order of GPUs."""
    if kind == "cpu":
        node_of = api.util.placement_group_table(group)["bundles_to_node_id"]
        return [(node_of[index], [], index) for index in range(workers)]
    probe = api.remote(num_cpus=0, num_gpus=1)(_probe)
    refs = [
        probe.options(scheduling_strategy=strategy(group, index)).remote()
        for index in range(workers)
    ]
    deadline = time.monotonic() + START_TIMEOUT_S
    while api.wait(refs, num_returns=workers, timeout=PLACEMENT_POLL_S)[1]:
        check()
        if time.monotonic() > deadline:
            raise PlacementError(
                f"Ray has started no process on each of the {workers} reserved devices within "
                f"{START_TIMEOUT_S:g} s; "
                "see the raylets' logs, and whether nodes are being lost"
            )
    try:
        found = api.get(refs, timeout=START_TIMEOUT_S)
    except RayError as error:
        raise PlacementError(
            "Ray lost a node, or a process on it, while it was asked which GPUs it has: "
            f"{' '.join(str(error).split())[:300]}; see `ray status`, and start again"
        ) from None
    return [
        (node, [_zero_padded(d) for d in devices], index)
        for index, (node, devices) in enumerate(found)
    ]


def _probe() -> tuple[str, list[str]]:
    return ray.get_runtime_context().get_node_id(), bound_devices()


def _zero_padded(device: str) -> str:
    return device.zfill(4) if device.isdigit() else device  # so that GPU 10 sorts after GPU 9


def strategy(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def nodes_of(api: Any) -> list[dict[str, Any]]:
    """Return id, address, total and available resources of each node that is alive."""
    available = api._private.state.available_resources_per_node()  # Ray has no public call for this
    return [
        {
            "id": node["NodeID"],
            "ip": node["NodeManagerAddress"],
            "total": node["Resources"],
            "available": available.get(node["NodeID"], {}),
        }
        for node in api.nodes()
        if node["Alive"]
    ]


def room_on(nodes: Iterable[dict[str, Any]], bundle: dict[str, float], column: str) -> int:
    """Return how many ranks of this bundle the nodes' `column` (total or available) can hold."""
    return sum(
        min(int(node[column].get(name, 0) / amount + 1e-6) for name, amount in bundle.items())
        for node in nodes
    )


def _resources(values: dict[str, float]) -> str:
    return (
        " + ".join(f"{values.get(name, 0):g} {name}" for name in ("GPU", "CPU") if name in values)
        or "nothing"
    )


def _table(nodes: list[dict[str, Any]], column: str) -> str:
    return f"{column} per node: " + "; ".join(
        f"{n['ip']} has {_resources(n[column])}" for n in nodes
    )
