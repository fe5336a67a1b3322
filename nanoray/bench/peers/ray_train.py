"""The peer: nanoray's recipe inside Ray Train's TorchTrainer, with the flags of nanoray.launch.

Ray Train places the workers, sets up the process group and watches them. Its train loop calls the
same `train` as nanoray's own actors do: same data, model, DDP, engine and metrics files. Only the
process group is Ray Train's: `meet` takes it over. The loop does not call `report()` on every
logged step, as users of Ray Train do, because that waits for all ranks. Ray is found or started by
the same function as in nanoray.launch. Ray Train may start its workers again `--max_failures`
times; they go on from the newest of nanoray's own checkpoints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli import parse_args
from nanoray.cli.open_folder import open_run
from nanoray.config.layout import Layout
from nanoray.data.prepare import prepare
from nanoray.errors import NanorayError
from nanoray.launch.caller import ray_address
from nanoray.launch.connection import connected
from nanoray.launch.placement import slots_here
from nanoray.machine.slots import cpu_share
from nanoray.parallel.rendezvous import Order


def main(
    argv: list[str] | None = None,
    program: str = "python -m nanoray.bench.peers.ray_train",
    what: str = "Train under Ray Train's TorchTrainer: what nanoray.launch is measured against.",
    loop: Callable[[dict[str, Any]], None] | None = None,
    torch_config: Callable[[], Any] = lambda: None,
) -> int:
    """Run the peer and return its exit code.

    Another peer on Ray Train passes its own `loop` and `torch_config`.
    """
    started = time.time()
    try:
        config = parse_args(sys.argv[1:] if argv is None else argv, program, what).config
        settings = torch_config()
        address = ray_address(config)
        slots = None
        if address == "local":
            slots = slots_here(config)
            config = config.model_copy(update={"workers": slots.workers})
        dataset = prepare(config)
        with connected(address, slots):
            _fit(open_run(config, dataset, started), loop or train_loop, settings)
    except NanorayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _fit(spec: RunSpec, loop: Callable[[dict[str, Any]], None], torch_config: Any) -> None:
    has = ray.cluster_resources()
    use_gpu = spec.config.device != "cpu" and has.get("GPU", 0) > 0
    if spec.config.workers == "auto":
        workers = int(has["GPU"] if use_gpu else 2)
    else:
        workers = spec.config.workers
    # As nanoray.placement reserves them, on one node
    cpus = 1.0 if use_gpu else spec.config.cpus_per_worker or cpu_share([has["CPU"]], workers)
    failures: dict[str, Any] = {"max_failures": spec.config.max_failures}
    trainer = ray.train.torch.TorchTrainer(
        loop,
        torch_config=torch_config,
        train_loop_config={
            "spec": spec.to_dict(),
            "threads": max(1, int(cpus)),
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers,
            use_gpu=use_gpu,
            resources_per_worker={"CPU": cpus} | ({"GPU": 1} if use_gpu else {}),
        ),
        run_config=ray.train.RunConfig(
            name="ray_train",
            storage_path=str(spec.folder),
            failure_config=ray.train.FailureConfig(**failures),
        ),
    )
    trainer.fit()


def train_loop(args: dict[str, Any]) -> None:
    """Train as one rank of Ray Train's process group. (all ranks)"""
    import torch.distributed as dist

    from nanoray.parallel.mesh import Mesh
    from nanoray.parallel.rendezvous import Rendezvous
    from nanoray.train.rank import train

    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    rank = context.get_world_rank()
    world = context.get_world_size()

    def take_over(*_: Any, layout: Layout) -> Mesh:
        backend = dist.get_backend() if world > 1 else "none"
        control = dist.new_group(backend="gloo") if world > 1 else None  # (all ranks)
        return Mesh(
            rank,
            world,
            context.get_local_rank(),
            device,
            backend,
            "Ray Train's choice",
            control,
            layout=layout,
        )

    rendezvous = Rendezvous(
        rank=rank, world_size=world, device=str(device), threads=args["threads"]
    )
    spec = RunSpec.from_dict(args["spec"])
    attempt = [next_attempt(spec.folder) if rank == 0 else 0]
    if world > 1:
        dist.broadcast_object_list(attempt, src=0)  # (all ranks)
    train(replace(spec, attempt=attempt[0]), rendezvous, wanted=lambda: Order.GO_ON, meet=take_over)


def next_attempt(folder: Path) -> int:
    """Count this attempt of Ray Train and return its number, from 0 on. (rank 0 only)"""
    with (folder / "ray_train_attempts").open("a+", encoding="utf-8") as lines:
        lines.write(f"{time.time():.3f}\n")
        lines.seek(0)
        return len(lines.readlines()) - 1


if __name__ == "__main__":
    raise SystemExit(main())
