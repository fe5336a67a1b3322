"""Where ranks run: reserve a slot per rank on the cluster that this process is connected to.

nodes of the cluster ─► request ─► placement group ─► wait until it is reserved ─► devices ─► Placement

The group waits for other jobs to end, for nodes that join, and for those that an autoscaler adds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
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
from nanoray.machine.output import say
from nanoray.machine.slots import Slots, cpu_share, local_slots

START_TIMEOUT_S = 90.0  # for a process to start and answer
PLACEMENT_POLL_S = 0.25  # how often a wait for resources checks whether a stop was requested
# How long to wait for resources where all nodes are there.
PATIENCE_S = float(Config.model_fields["placement_timeout_s"].default)
# An environment variable that KubeRay's operator sets in every pod.
_KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"


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

        A placement_timeout_s above the default says that nodes may join. Raises PlacementError with
        the resources of each node if that is impossible.
        """
        nodes = nodes_of(api)
        # The pods of KubeRay, and the workers of a head without CPUs, may be on their way.
        assembling = _KUBERAY in os.environ or not any(n["total"].get("CPU") for n in nodes)
        kind, workers, bundle = _request(config, nodes, assembling)
        if not assembling and config.placement_timeout_s <= PATIENCE_S:
            _require_room(nodes, workers, bundle)
        group = api.util.placement_group([bundle] * workers, strategy=config.placement.upper())
        try:
            _wait_until_reserved(group, config, workers, bundle, check, api)
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
        except BaseException:
            api.util.remove_placement_group(group)
            raise
        # Ranks are ordered by node, then by device.
        order = tuple(index for _, _, index in sorted(slots))
        return cls(group, "mig" if is_mig else kind, bundle, order)


def _wait_until_reserved(
    group: PlacementGroup,
    config: Config,
    workers: int,
    bundle: dict[str, float],
    check: Callable[[], None],
    api: Any,
) -> None:
    """Wait until Ray has reserved all bundles, calling `check`. Raises PlacementError if late."""
    asked = f"asked for {workers} × {_format_resources(bundle)}"
    deadline = time.monotonic() + config.placement_timeout_s
    ready = group.ready()
    printed = ""
    while True:
        remaining_s = max(0.0, deadline - time.monotonic())
        done, _ = api.wait([ready], timeout=min(PLACEMENT_POLL_S, remaining_s))
        if done:
            return
        check()
        nodes = nodes_of(api)
        if not remaining_s:
            state = api.util.placement_group_table(group)["stats"]["scheduling_state"]
            raise PlacementError(
                f"{asked}, not free within {config.placement_timeout_s:g} s ({state}); "
                f"{_format_nodes(nodes, 'available')}; wait for other jobs or nodes, or raise "
                "--placement_timeout_s"
            )
        message = f"{asked}; {_format_nodes(nodes, 'total')}"
        if message != printed and room_on(nodes, bundle, "total") < workers:
            printed = message
            say(f"wait   at most {remaining_s:.0f} s for more nodes: {message}")


def _request(
    config: Config, nodes: list[dict[str, Any]], assembling: bool
) -> tuple[str, int, dict[str, float]]:
    """Return the kind of device, the number of ranks and the resources of each, for these nodes.

    Raises PlacementError if CPUs do not suffice for the ranks, or if there is no node to choose by.
    """
    gpus = sum(node["total"].get("GPU", 0) for node in nodes)
    cpus = [node["total"].get("CPU", 0.0) for node in nodes]
    if not gpus and not any(cpus) and "auto" in (config.device, config.workers):
        raise PlacementError(
            f"device = {config.device}, workers = {config.workers}, but no node of the cluster has "
            "GPUs or CPUs yet by which auto could choose; give --device cpu|cuda|mig --workers N"
        )
    kind = config.device
    if kind == "auto":
        kind = "cuda" if gpus else "cpu"

    if kind != "cpu":
        workers = max(1, int(gpus)) if config.workers == "auto" else config.workers
        return kind, workers, {"GPU": 1.0, "CPU": config.cpus_per_worker or 1.0}

    choose_precision(config, kind, frozenset())  # raises for one that CPUs do not have
    if config.workers == "auto":
        workers = 2 if sum(cpus) >= 2 else 1
    else:
        workers = config.workers
    share = config.cpus_per_worker
    if not share and assembling and sum(map(int, cpus)) < workers:
        share = 1.0  # others are on their way: ranks share no CPU
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
