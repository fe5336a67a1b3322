"""What formulas say of a choice before it is tried: the memory of a rank, and the seconds of a step.

Only a GPT has formulas. Links are measured here, and the speed of compute follows from the present
setting's own step. What no formula contains (attention, compiling, the loss in chunks, the algorithm
of a sum) has the same prediction with and without it: there only real steps decide.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch

from nanoray.config import Config, resolve_batch
from nanoray.forecast.fit import fit
from nanoray.forecast.job import Job
from nanoray.forecast.layouts import total
from nanoray.forecast.links import LANES, Link, Topology
from nanoray.forecast.predict import OnTopology, Speed, memory_of, predict
from nanoray.mesh.layout import Layout
from nanoray.mesh.mesh import Mesh
from nanoray.tune.space import TunedRun

LINK_SIZES = (64 << 10, 1 << 20, 8 << 20)  # bytes of the sums from which the link is fitted
LINK_TIMES = 5  # each of them
NO_LINK = Link(alpha_us=0.0, bandwidth_gb_per_s=1e6)  # of one rank


@dataclass(frozen=True)
class Expected:
    """Formulas of one GPT on these ranks."""

    job: Job
    ranks: int
    threads: int  # of a rank now
    network: OnTopology
    flops: float = 0.0  # a second, of a rank with `threads`; 0: not known yet

    def memory_bytes(self, config: Config) -> int:
        """Return the memory of the rank that needs most."""
        job, layout, micro = self._of(config)
        return total(memory_of(job, layout, micro))

    def step_s(self, config: Config) -> float:
        """Return the seconds of a step. `calibrated` comes first."""
        job, layout, micro = self._of(config)
        share = (config.cpus_per_worker or self.threads) / self.threads
        speed = Speed(self.flops * share, self.flops * share)
        return predict(job, layout, micro, self.network, speed).step_s

    def calibrated(self, config: Config, step_s: float) -> Expected:
        """Return the formulas with the speed at which `config` has taken `step_s`."""
        low, high = 1e6, 1e18
        for _ in range(60):  # bisection, of the logarithm
            middle = (low * high) ** 0.5
            faster = replace(self, flops=middle).step_s(config) < step_s
            low, high = (low, middle) if faster else (middle, high)
        return replace(self, flops=high)

    def _of(self, config: Config) -> tuple[Job, Layout, int]:
        layout = Layout.of(config, self.ranks)
        batch = resolve_batch(config, layout.dp)
        job = replace(
            self.job,
            config=config,
            precision=config.precision,
            bucket_mb=config.bucket_mb or self.job.bucket_mb,
            sequences=batch.global_size,
        )
        return job, layout, batch.micro


def expected_of(here: TunedRun, mesh: Mesh) -> Expected | None:
    """Return the formulas of this model on these ranks; None for a model without. (all ranks)"""
    if here.job is None:
        return None
    return Expected(here.job, mesh.world_size, here.threads, measured_network(mesh))


def measured_network(mesh: Mesh) -> OnTopology:
    """Return the network of these ranks as one link, from a few sums over all of them. (all ranks)"""
    link = NO_LINK
    if mesh.world_size > 1:
        points = []
        for size in LINK_SIZES:
            tensor = torch.zeros(size // 4, device=mesh.device)
            times = [_time_of_sum(mesh, tensor) for _ in range(LINK_TIMES)]
            points.append((size, statistics.median(times[1:])))
        # (all ranks) One rank's clock counts: the others would predict otherwise.
        link = fit(mesh.broadcast(points), "backend", mesh.world_size).link
    lanes = LANES.get(mesh.backend, 1)
    topology = Topology(ranks_per_node=mesh.world_size, intra=link, inter=link, lanes=lanes)
    return OnTopology(topology)


def _time_of_sum(mesh: Mesh, tensor: torch.Tensor) -> float:
    mesh.barrier()
    start = time.perf_counter()
    mesh.all_reduce(tensor)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return time.perf_counter() - start
