"""Where ranks run: reserve a slot per rank on the cluster that this process is connected to.

nodes of the cluster ─► request that fits ─► placement group ─► devices ─► Placement
        ▲                       │
        └─ wait for more nodes ◄┘
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanoray.config import Config
from nanoray.config.choose import choose_precision
from nanoray.errors import PlacementError
from nanoray.launch.devices import bound_devices
from nanoray.launch.ray_compat import available_per_node
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus
from nanoray.machine.launchers import KUBERAY
from nanoray.machine.output import say
from nanoray.machine.slots import Slots, cpu_share, local_slots

START_TIMEOUT_S = 90.0  # for a process to start and answer
PLACEMENT_POLL_S = 0.25  # how often a wait for resources checks whether a stop was requested
RESERVE_S = 5.0  # how long Ray may take to reserve a group that the nodes have room for
# After this long without a new node, the pods of a KubeRay cluster are assumed to be all there.
ASSEMBLED_S = 30.0
# How long to wait for resources where all nodes are there.
PATIENCE_S = float(Config.model_fields["placement_timeout_s"].default)


def slots_here(config: Config) -> Slots:
    """Return the slots of a run on a Ray of its own, on this machine. Raises PlacementError."""
    workers = None if config.workers == "auto" else config.workers
    return local_slots(config.device, workers, discover_gpus(), available_cpus())


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

    def reserved_on(self, api: Any) -> dict[int, str]:
        """Return the node of each bundle if all are reserved now, on nodes that live, else {}.

        When a node is lost, Ray reserves its bundles again on others, once these have room.
        """
        table = api.util.placement_group_table(self.group)
        if table["state"] != "CREATED":
            return {}
        return dict(table["bundles_to_node_id"])

    @property
    def threads(self) -> int:
        """Return a rank's intra-op threads: the CPUs it reserved. Ray would set another number."""
        return max(1, int(self.bundle["CPU"]))

    @classmethod
    def make(
        cls, config: Config, check: Callable[[], None] = lambda: None, api: Any = ray
    ) -> Placement:
        """Reserve one bundle per rank; `check` is called while it waits, and may raise.

        Raises PlacementError with the resources of each node if that is impossible.
        """
        deadline = time.monotonic() + config.placement_timeout_s
        with closing(Demand(config.placement.upper(), api)) as demand:
            kind, workers, bundle = _request_that_fits(config, deadline, demand, check, api)
            group = demand.reserve([bundle] * workers)
            # The nodes are there now; give Ray a moment of its own to reserve their resources.
            patience_s = min(PATIENCE_S, config.placement_timeout_s)
            deadline = max(deadline, time.monotonic() + patience_s)
            _wait_until_reserved(group, config, workers, bundle, deadline, check, api)
            slots = _slots_of(group, kind, workers, check, api)
            is_mig = False
            first_devices: list[str] = []
            if kind != "cpu":
                first_devices = [devices[0] for _, devices, _ in slots]
                is_mig = all(device.startswith("MIG-") for device in first_devices)
            if config.device == "mig" and not is_mig:
                raise PlacementError(
                    f"device = mig, but Ray handed out {first_devices}; start Ray with "
                    "CUDA_VISIBLE_DEVICES set to the slices' MIG- UUIDs and --num-gpus to their "
                    "number"
                )
            demand.keep()
        # Ranks are ordered by node, then by device.
        order = tuple(index for _, _, index in sorted(slots))
        return cls(group, "mig" if is_mig else kind, bundle, order)


def _wait_until_reserved(
    group: PlacementGroup,
    config: Config,
    workers: int,
    bundle: dict[str, float],
    deadline: float,
    check: Callable[[], None],
    api: Any,
) -> None:
    """Wait until Ray has reserved all bundles, calling `check`. Raises PlacementError if late."""
    ready = group.ready()
    while True:
        remaining_s = max(0.0, deadline - time.monotonic())
        done, _ = api.wait([ready], timeout=min(PLACEMENT_POLL_S, remaining_s))
        if done:
            return
        check()
        if time.monotonic() < deadline:
            continue
        state = api.util.placement_group_table(group)["stats"]["scheduling_state"]
        raise PlacementError(
            f"asked for {workers} × {_format_resources(bundle)}, not free within "
            f"{config.placement_timeout_s:g} s ({state}); "
            f"{_format_nodes(nodes_of(api), 'available')}; wait for other jobs, or raise "
            "--placement_timeout_s"
        )


def _request_that_fits(
    config: Config, deadline: float, demand: Demand, check: Callable[[], None], api: Any
) -> tuple[str, int, dict[str, float]]:
    """Return `_request` for the present nodes, waiting for more of them where more may come.

    A cluster is assembling if it has no CPU at all when this begins, as a head without workers, or
    if KubeRay's operator brings its pods up: then ranks that would share CPUs wait, too. A
    placement_timeout_s above the default says that other clusters may grow. `demand` holds what is
    awaited; `check` is called meanwhile, and may raise. Raises PlacementError if the cluster cannot
    hold the ranks.
    """
    assembling = KUBERAY in os.environ
    known_ids: set[str] = set()
    changed_at = 0.0  # monotonic seconds at which a node came or went
    printed = ""
    while True:
        nodes = nodes_of(api)
        now = time.monotonic()
        if not any(node["total"].get("CPU") for node in nodes):
            assembling = True
        ids = {node["id"] for node in nodes}
        if ids != known_ids:
            known_ids = ids
            changed_at = now

        request = None
        try:
            request = _request(config, nodes)
            _, workers, bundle = request
            _require_room(nodes, workers, bundle)
            # Ranks share a CPU only if no further nodes come: others may only be late.
            shares_cpus = bundle["CPU"] < 1 and not config.cpus_per_worker
            patient_until = min(deadline, changed_at + ASSEMBLED_S)
            if not (shares_cpus and assembling) or now > patient_until:
                return request
            problem = f"{workers} ranks would share CPUs"
        except PlacementError as error:
            if not assembling and config.placement_timeout_s <= PATIENCE_S:
                raise
            if now >= deadline:
                raise PlacementError(
                    f"{error}; waited {config.placement_timeout_s:g} s for more nodes: see why "
                    "they do not join, or raise --placement_timeout_s"
                ) from None
            problem = f"no room for workers = {config.workers}"

        # An autoscaler adds nodes only for a placement group that waits for them.
        demand.change(_awaited_bundles(config, request))
        message = f"{problem}; {_format_nodes(nodes, 'total')}"
        if message != printed:
            printed = message
            remaining_s = deadline - now
            say(f"wait   at most {remaining_s:.0f} s for more nodes: {message}")
        check()
        time.sleep(max(0.0, min(PLACEMENT_POLL_S, deadline - time.monotonic())))


class Demand:
    """A placement group, removed again unless it is kept.

    While it is pending an autoscaler adds nodes, as it does only for resources that are awaited.
    """

    def __init__(self, strategy: str, api: Any) -> None:
        self._strategy = strategy
        self._api = api
        self._bundles: list[dict[str, float]] = []
        self._group: PlacementGroup | None = None

    def change(self, bundles: list[dict[str, float]]) -> None:
        """Wait for these bundles in place of the earlier ones."""
        if bundles == self._bundles:
            return
        self.close()
        if bundles:
            self._group = self._api.util.placement_group(bundles, strategy=self._strategy)
        self._bundles = bundles

    def reserve(self, bundles: list[dict[str, float]]) -> PlacementGroup:
        """Return a group of these bundles: the one that waits, if it has the same."""
        self.change(bundles)
        assert self._group
        return self._group

    def keep(self) -> None:
        """Leave the group to the caller."""
        self._group = None
        self._bundles = []

    def close(self) -> None:
        """Remove the group, if there is one."""
        if self._group:
            self._settle(self._group)
            self._api.util.remove_placement_group(self._group)
        self.keep()

    def _settle(self, group: PlacementGroup) -> None:
        """Wait until Ray has reserved the group's bundles, if the nodes have room for them.

        Ray may lose the resources of a group that is removed meanwhile (ray-project/ray#64693).
        """
        until = time.monotonic() + RESERVE_S
        while time.monotonic() < until:
            room = room_on(nodes_of(self._api), self._bundles[0], "available")
            state = self._api.util.placement_group_table(group)["state"]
            if state == "CREATED" or room < len(self._bundles):
                return
            time.sleep(PLACEMENT_POLL_S)


def _awaited_bundles(
    config: Config, request: tuple[str, int, dict[str, float]] | None
) -> list[dict[str, float]]:
    """Return the bundles that more nodes are awaited for.

    On CPUs these are whole ones: ranks share a CPU only if no more nodes come.
    """
    if request and request[0] != "cpu":
        _, workers, bundle = request
        return [bundle] * workers
    if config.workers == "auto":
        return []
    return [{"CPU": config.cpus_per_worker or 1.0}] * config.workers


def _request(config: Config, nodes: list[dict[str, Any]]) -> tuple[str, int, dict[str, float]]:
    """Return the kind of device, the number of ranks and the resources of each, for these nodes.

    Raises PlacementError if CPUs do not suffice for the ranks.
    """
    gpus = sum(node["total"].get("GPU", 0) for node in nodes)
    kind = config.device
    if kind == "auto":
        kind = "cuda" if gpus else "cpu"

    if kind != "cpu":
        workers = max(1, int(gpus)) if config.workers == "auto" else config.workers
        return kind, workers, {"GPU": 1.0, "CPU": config.cpus_per_worker or 1.0}

    choose_precision(config, kind, frozenset())  # raises for one that CPUs do not have
    cpus = [node["total"].get("CPU", 0.0) for node in nodes]
    if config.workers == "auto":
        workers = 2 if sum(cpus) >= 2 else 1
    else:
        workers = config.workers
    share = config.cpus_per_worker
    if not share:
        share = cpu_share([count for count in cpus if count > 0], workers)
    return kind, workers, {"CPU": share}


def _require_room(nodes: list[dict[str, Any]], workers: int, bundle: dict[str, float]) -> None:
    """Raise PlacementError if the nodes cannot hold the ranks, even without any other job."""
    if room_on(nodes, bundle, "total") < workers:
        raise PlacementError(
            f"asked for {workers} × {_format_resources(bundle)}, but the cluster can never hold "
            f"it; {_format_nodes(nodes, 'total')}; lower --workers or --cpus_per_worker, or add nodes"
        )


def _slots_of(
    group: PlacementGroup, kind: str, workers: int, check: Callable[[], None], api: Any
) -> list[tuple[str, list[str], int]]:
    """Return (node, device ids, bundle index) per bundle. Raises PlacementError."""
    if kind == "cpu":
        node_of = api.util.placement_group_table(group)["bundles_to_node_id"]
        return [(node_of[index], [], index) for index in range(workers)]

    # Bundles are not in the order of GPUs: a process in each bundle reports its own.
    probe = api.remote(num_cpus=0, num_gpus=1)(_probe)
    refs = []
    for index in range(workers):
        placed = probe.options(scheduling_strategy=strategy(group, index))
        refs.append(placed.remote())
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        _, pending = api.wait(refs, num_returns=workers, timeout=PLACEMENT_POLL_S)
        if not pending:
            break
        check()
        if time.monotonic() > deadline:
            raise PlacementError(
                f"Ray has started no process on each of the {workers} reserved devices within "
                f"{START_TIMEOUT_S:g} s; see the raylets' logs, and whether nodes are being lost"
            )
    try:
        probed = api.get(refs, timeout=START_TIMEOUT_S)
    except RayError as error:
        raise PlacementError(
            "Ray lost a node, or a process on it, while it was asked which GPUs it has: "
            f"{' '.join(str(error).split())[:300]}; see `ray status`, and start again"
        ) from None

    slots = []
    for index, (node, devices) in enumerate(probed):
        slots.append((node, [_zero_padded(device) for device in devices], index))
    return slots


def _probe() -> tuple[str, list[str]]:
    return ray.get_runtime_context().get_node_id(), bound_devices()


def _zero_padded(device: str) -> str:
    return device.zfill(4) if device.isdigit() else device  # so that GPU 10 sorts after GPU 9


def strategy(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def nodes_of(api: Any) -> list[dict[str, Any]]:
    """Return id, address, total and available resources of each node that is alive."""
    available = available_per_node(api)
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
    ranks = 0
    for node in nodes:
        # The scarcest resource limits a node; 1e-6 covers the rounding of shares of a CPU.
        ranks += min(
            int(node[column].get(name, 0) / amount + 1e-6) for name, amount in bundle.items()
        )
    return ranks


def _format_resources(values: dict[str, float]) -> str:
    parts = [f"{values[name]:g} {name}" for name in ("GPU", "CPU") if name in values]
    return " + ".join(parts) or "nothing"


def _format_nodes(nodes: list[dict[str, Any]], column: str) -> str:
    parts = [f"{node['ip']} has {_format_resources(node[column])}" for node in nodes]
    return f"{column} per node: " + "; ".join(parts)
