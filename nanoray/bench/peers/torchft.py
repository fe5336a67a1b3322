"""The peer: nanoray's recipe under Ray Train with torchft, with the flags of nanoray.launch.

Each worker is a replica group of its own (Ray Train's TorchftConfig). When one is lost the others
form a new quorum and continue; Ray Train replaces only the lost worker, which gets the weights over
HTTP. As in nanoray the global batch is kept: the samples of a step are shared among those in the
quorum, so the loop waits for it before it reads data. The quorum is set to notice a lost worker
after a second instead of five, unless NANORAY_PEER_LIGHTHOUSE=defaults: then its lighthouse is the
one of Ray's own example. Model, data, optimizer, schedule and files are nanoray's; groups,
sums and recovery are torchft's. A checkpoint is one file, read only when all workers were lost.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.errors import ConfigError

log = logging.getLogger("nanoray.rank")
LIGHTHOUSE = {
    "min_replicas": 1,
    "quorum_tick_ms": 20,
    "heartbeat_timeout_ms": 1000,
    "join_timeout_ms": 1000,
}
DEFAULTS = {"min_replicas": 1}  # as in Ray's example of torchft
PEER_LIGHTHOUSE = "NANORAY_PEER_LIGHTHOUSE"
TIMEOUT = timedelta(seconds=60)


def missing() -> str | None:
    """Return why torchft cannot be measured here; None if it can."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed: pip install torchft==0.2.0, which nanoray[bench] holds"
    return None


def main(argv: list[str] | None = None) -> int:
    """Run the peer and return its exit code."""
    what = (
        "Train under Ray Train with torchft: what recovery in nanoray.launch is measured against."
    )
    # bench recovery reads this module's names without the seconds that Ray Train's import takes
    from nanoray.bench.peers import ray_train

    return ray_train.main(
        argv, "python -m nanoray.bench.peers.torchft", what, train_loop, torchft_config
    )


def torchft_config() -> Any:
    """Return Ray Train's configuration of torchft. Raises ConfigError where that is missing."""
    reason = missing()
    if reason:
        raise ConfigError(reason)
    from ray.train.v2.torch.torchft_config import TorchftConfig

    as_in_example = os.environ.get(PEER_LIGHTHOUSE) == "defaults"
    lighthouse = DEFAULTS if as_in_example else LIGHTHOUSE
    return TorchftConfig(lighthouse_kwargs=lighthouse, backend="gloo")


def train_loop(args: dict[str, Any]) -> None:
    """Train as one replica group of one rank. (all ranks)"""
    import ray.train
    import torch

    from nanoray.train.agree import log_to

    context = ray.train.get_context()
    spec = RunSpec.from_dict(args["spec"])
    rank = context.get_world_rank()
    torch.set_num_threads(args["threads"])
    log_to(spec.log(rank))
    log.info(
        "attempt 0, pid %d, replica group %d of %d", os.getpid(), rank, context.get_world_size()
    )
    Replica(spec, rank, context.get_world_size(), ray.train.torch.get_device()).train()


class Replica:
    """A worker's model, data and optimizer under a torchft Manager.

    A step counts when the manager has committed it.
    """

    def __init__(self, spec: RunSpec, rank: int, world: int, device: Any) -> None:
        import torch
        from torchft import Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL

        from nanoray.parallel.mesh import Mesh
        from nanoray.train.agree import resolve_precision
        from nanoray.train.tasks import task_of

        self.spec = spec
        self.world = world
        self.task = task_of(spec)
        self.precision, _ = resolve_precision(spec.config, Mesh(0, 1, 0, device, "none", ""))
        if self.precision == "fp16":
            raise ConfigError(
                "precision = fp16 needs a scaler of losses, which this peer has not; use fp32 or "
                "bf16"
            )
        self.saved = spec.folder / "torchft.pt"
        self.over = spec.folder / "torchft.done"
        self.metrics = os.open(
            spec.folder / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        torch.manual_seed(spec.config.seed)  # the same initial weights on every rank
        self.device = device
        self.data = self.task.data(device)
        self.plain = self.task.model().to(device)
        self.inner = self.task.optimizer(self.plain, None)
        group = (ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo)(timeout=TIMEOUT)
        self.manager = Manager(
            pg=group,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            use_async_quorum=False,  # a replica that has just healed takes part at once
            timeout=TIMEOUT,
            rank=0,
            world_size=1,
            replica_id=f"rank_{rank}",
            init_sync=False,
        )
        self._go_on()
        self.optimizer = Optimizer(self.manager, self.inner)

    def train(self) -> None:
        """Train until max_steps. A new worker may come when the others are done."""
        while self.manager.current_step() < self.spec.config.max_steps and not self.over.exists():
            self._step()
        self.over.touch()
        self.manager.shutdown(wait=False)

    def _step(self) -> None:
        """Do a step; one in which a replica was lost is not committed, and done again."""
        import torch

        from nanoray.config import batch_for, resolve_batch
        from nanoray.data.tokens import MicroBatches
        from nanoray.models.precision import MeanLoss
        from nanoray.models.weighted import mean_of
        from nanoray.train.optim.groups import lr_at, set_lr

        cfg = self.spec.config
        manager = self.manager
        self.optimizer.zero_grad()  # waits for the quorum, and heals
        step = manager.current_step()
        rank = manager.participating_rank()
        now = manager.num_participants()
        batch = batch_for(cfg, self.world, now) or resolve_batch(cfg, now)
        lr = lr_at(step, cfg)
        set_lr([self.inner], lr)
        micro_batches = MicroBatches(self.data, batch, rank or 0)
        mean_loss = MeanLoss(self.device.type, self.precision, self.task.loss)
        loss = torch.zeros((), device=self.device)
        for micro in range(batch.accum):
            x, y = micro_batches.get(step * batch.global_size, micro)
            loss_of_batch = mean_loss(self.plain, x, y)
            part = mean_of(loss_of_batch) / batch.accum
            part.backward()
            loss += part.detach()
        self._average_gradients()
        manager.allreduce(loss).wait()
        if cfg.grad_clip:
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), cfg.grad_clip)
        self.optimizer.step()
        if manager.current_step() == step + 1:
            self._record(step + 1, float(loss), lr)
            if rank == 0 and cfg.checkpoint_every and (step + 1) % cfg.checkpoint_every == 0:
                self._save()

    def _average_gradients(self) -> None:
        """Average the gradients of those in the quorum.

        torchft's own DistributedDataParallel (0.2.0) fails an assertion where a rank is lost during
        backward, and then all workers begin again from the checkpoint; this returns, and the step
        is not committed.
        """
        import torch

        gradients = [p.grad for p in self.plain.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.manager.allreduce(flat).wait()
        for gradient, mean in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))

    def _record(self, step: int, loss: float, lr: float) -> None:
        """Write the record of a committed step.

        Every replica writes: a lost one may have committed more steps than it wrote. Quorums take
        the place of attempts: each has another number.
        """
        record = {
            "step": step,
            "attempt": self.manager._quorum_id,
            "time": time.time(),
            "train/loss": loss,
        }
        os.write(self.metrics, (json.dumps(record | {"train/lr": lr}) + "\n").encode())

    def _save(self) -> None:
        import torch

        fresh = self.saved.with_suffix(".tmp")
        torch.save({"user": self._state(), "manager": self.manager.state_dict()}, fresh)
        os.replace(fresh, self.saved)

    def _go_on(self) -> None:
        """Load the newest checkpoint: it is needed when all workers were lost."""
        import torch

        if Path(self.saved).exists():
            found = torch.load(self.saved, weights_only=True)
            self._load(found["user"])
            self.manager.load_state_dict(found["manager"])

    def _state(self) -> dict[str, Any]:
        return {"model": self.plain.state_dict(), "optimizer": self.inner.state_dict()}

    def _load(self, state: Any) -> None:
        self.plain.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])


if __name__ == "__main__":
    raise SystemExit(main())
