"""Recovery in place: a rank is lost, the others keep process, weights and data, and a new one takes its seat.

    survivor   collective error ─► leave the groups ─► wait for the driver ─┐
    newcomer   process starts ─► imports torch ─────────────────────────────┴► join ─► furthest? ─► adopt ─► go on

The state travels from the memory of the furthest rank through the new process group; no disk is read and no completed
step is repeated. Survivors can be one step apart, when one had its last all-reduce and another had not. The step in
flight is done again by all, with the same data and the same dropout: the losses are those of a run without the fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nanoray.data import TokenData
from nanoray.mesh import Mesh
from nanoray.model import GPT, ModelShape
from nanoray.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors
from nanoray.run import RunSpec

if TYPE_CHECKING:
    from nanoray.engine import RuntimeEngine

# What a rank's memory holds of a run, besides weights, optimizer and scaler: attributes of the engine.
LIVE = (
    *("step", "_current", "samples", "val_loss", "best_val_loss", "_pending", "last_record", "_train_loss"),
    *("_saved_step", "_evaluated_step", "_first_step", "_first_step_s", "_total_s", "_total_steps"),
)


def furthest(mesh: Mesh, engine: RuntimeEngine | None) -> tuple[int, str, int]:
    """Return the rank whose memory is furthest, the run's precision, and the completed step there. (all ranks)

    A newcomer has no engine yet. Raises RuntimeError when nobody holds the state, which the driver excludes.
    """
    own = (engine.step, engine.cfg.precision) if engine and engine.live else (-1, "")
    standing = mesh.all_gather(own)
    step, precision = max(standing)
    if step < 0:
        raise RuntimeError("no rank holds the state of the run any more; it goes on from a checkpoint")
    return standing.index((step, precision)), precision, step


def rehearse(spec: RunSpec) -> None:
    """Do once, alone and on CPU, what a rank does first: a spare that then takes a seat need not wait for that.

    The first model, optimizer, process group and DDP wrapper of a process load code and take a second or two; the
    second ones take milliseconds. Nothing of it stays but that.
    """
    import torch.distributed.nn.functional  # before there is a group: see mesh.join

    torch.set_num_threads(1)
    gpt = GPT(ModelShape.of(spec.config, spec.dataset.vocab_size), spec.config.dropout)
    optimizer = make_optimizer(gpt, spec.config)
    alone = Mesh(0, 1, 0, torch.device("cpu"), "gloo", "")
    data = TokenData(spec.dataset, spec.config.block_size, spec.config.seed, alone.device)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(gpt)
    for _ in range(2):  # DDP regroups its buckets at the start of the second
        model(*data.train_batch(0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    alone.leave()


def adopt(engine: RuntimeEngine, source: int) -> None:
    """Take over weights, optimizer, scaler and cursor of rank `source` from its memory. (all ranks)"""
    mesh, gpt, own = engine.mesh, engine.gpt, engine.mesh.rank == source
    tensors: dict[str, Tensor] = {}
    if own:
        tensors = {f"model.{name}": p.data for name, p in gpt.named_parameters()}
        tensors |= optimizer_tensors(engine.optimizer, gpt)
    layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    state = {name: getattr(engine, name) for name in LIVE}
    meta: dict[str, Any] = mesh.broadcast(
        {
            "layout": layout,
            "state": state,
            "scaler": engine.scaler.state_dict(),
            "guards": engine.guards.state(),
        },
        src=source,
    )
    for name, shape, dtype in meta["layout"]:
        tensor = tensors[name].to(mesh.device) if own else torch.empty(shape, dtype=dtype, device=mesh.device)
        mesh.broadcast_tensor(tensor, source)
        tensors[name] = tensor
    if not own:
        with torch.no_grad():
            for name, p in gpt.named_parameters():
                p.copy_(tensors.pop(f"model.{name}"))
        if tensors:  # none before the first step
            load_optimizer_tensors(engine.optimizer, gpt, tensors)
        engine.scaler.load_state_dict(meta["scaler"])
        engine.guards.load_state(meta["guards"])
        for name, value in meta["state"].items():
            setattr(engine, name, value)
    engine.live = True
