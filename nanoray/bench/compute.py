"""One rank of an arm of `bench step cpu`, `gpu` or `train`: a loop that runs blocks of steps on request.

    products   a step is one product of two square matrices: what this machine can do at most
    plain      the loop that people write first, with torch's allocator as it is, or kept as nanoray does
    engine     nanoray.train.rank.train: metrics files on, as in any run; or with torch's default AdamW

Every arm stays alive with its model warm; the benchmark lets them run blocks of steps in turn while
the others sleep in a read, so a slow minute of the machine hits all arms, and the threads of one
never disturb another.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.processes import answers_only
from nanoray.bench.harness.report import Emit, Record
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Config
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import DataError
from nanoray.machine.host import keep_freed_memory
from nanoray.parallel.rendezvous import BackendChoice, Order, open_store, rendezvous_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from nanoray.parallel.pieces import Shard


class Gate:
    """Run a loop in blocks of steps: the loop calls it before each step.

    At the end of a block it reports the time of the block and waits for the next order. An order is
    a line with a number of steps; the answer is {"step_ms": ..., "cpu_ms": ...}: wall time, and CPU
    time of all threads of this process; with a GPU, whose steps must have ended, also "peak_bytes",
    the most it had allocated. The end of stdin ends the process.
    """

    def __init__(self, say: Emit, device: str = "cpu") -> None:
        self._say = say
        self._left = 0
        self._asked = 0
        self._start = 0.0
        self._cpu_start = 0.0
        self._cuda = device == "cuda"

    def __call__(self) -> Order:
        """Return Order.GO_ON, always. Blocks between two blocks of steps."""
        if self._left:
            self._left -= 1
            return Order.GO_ON
        if self._cuda:
            import torch

            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start
        cpu_s = time.process_time() - self._cpu_start
        answer = {}
        if self._asked:
            answer = {"step_ms": 1e3 * seconds / self._asked, "cpu_ms": 1e3 * cpu_s / self._asked}
            if self._cuda:
                answer["peak_bytes"] = torch.cuda.max_memory_allocated()
        self._say(answer or {"ready": True})
        order = sys.stdin.readline()
        if not order.strip():
            os._exit(0)  # nothing has to be kept, and gloo's teardown can hang
        self._asked = int(order)
        self._left = self._asked - 1
        self._start = time.perf_counter()
        self._cpu_start = time.process_time()
        return Order.GO_ON


def run_products(gate: Gate, order: Mapping[str, Any]) -> None:
    """Multiply two matrices (size, size) again and again: 2·size³ FLOPs a step."""
    import torch

    torch.set_num_threads(order["threads"])
    torch.set_float32_matmul_precision("high" if order["tf32"] else "highest")
    size, dtype, device = order["size"], getattr(torch, order["dtype"]), order["device"]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    while gate() is Order.GO_ON:
        torch.mm(a, b, out=out)


def plain_loop(cfg: Config, data: DatasetInfo, threads: int) -> Iterator[nn.Module]:
    """Train nanoray's GPT with the loop that people write first.

    It is nanoGPT's step, without nanoray's additions and omissions. Random offsets from a fresh
    memmap, AdamW as torch makes it by default (not fused), clip_grad_norm_, and the loss fetched on
    every step. The model is the same class as in the other arms: only the loop is compared. Yields
    the model before each step, without end.
    """
    import numpy as np
    import torch

    from nanoray.models.gpt import GPT, ModelShape
    from nanoray.train.optim.groups import lr_at

    torch.set_num_threads(threads)
    torch.manual_seed(cfg.seed)
    model = GPT(ModelShape.of(cfg, data.vocab_size), cfg.dropout)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": cfg.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2))

    # The loop of a reader's first program: it reads one file.
    if len(data.files("train")) > 1:
        raise DataError(
            f"{data.path} has several train files, and the plain loop reads one; give a dataset "
            "with one train.bin"
        )
    (file,) = data.files("train")

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        # Opened anew for each batch, as nanoGPT does it.
        tokens = np.memmap(data.path / file.name, dtype=data.dtype, mode="r", offset=file.offset)
        starts = torch.randint(len(tokens) - cfg.block_size, (cfg.global_batch_size,)).tolist()
        windows = [
            torch.from_numpy(tokens[i : i + cfg.block_size + 1].astype(np.int64)) for i in starts
        ]
        block = torch.stack(windows)  # (B, T + 1)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    step = 0
    (x, y) = batch()
    while True:
        yield model
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, cfg)
        loss = model(x, y)
        x, y = batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        step += 1


def run_engine(spec: RunSpec, gate: Gate, order: Mapping[str, Any], say: Emit) -> None:
    """Train with nanoray as rank `order["rank"]` of `order["world"]`.

    Rank 0 of several first reports the port at which it serves the store.
    """
    from nanoray.train.rank import train
    from nanoray.train.tasks import TextTask, task_of

    class UnfusedTask(TextTask):
        """A GPT whose AdamW is torch's default one: not one kernel over all parameters, but many."""

        def optimizer(self, model: nn.Module, shards: list[Shard] | None) -> Optimizer:
            optimizer = super().optimizer(model, shards)
            for group in optimizer.param_groups:
                # Torch decides: a loop on CPUs, many parameters at a time on GPUs
                group["fused"] = None
            return optimizer

    rank = order["rank"]
    world = order["world"]
    store = None
    port = order.get("port", 0)
    if world > 1 and rank == 0:
        store = open_store("127.0.0.1", world, 60)
        port = store.port
        say({"port": port})
    ranks = rendezvous_of(["here"] * world, BackendChoice("gloo", "CPU ranks", {}), "bench")
    place = {
        "device": "cuda:0" if order.get("device") == "cuda" else "cpu",
        "threads": order["threads"],
    }
    rendezvous = replace(ranks[rank], **place, master_addr="127.0.0.1", master_port=port)
    train(
        spec,
        replace(rendezvous, agent_store=True),
        wanted=gate,
        store=store,
        task_of=UnfusedTask if order.get("unfused") else task_of,
    )


def main() -> int:
    """Run the arm of one JSON order from the command line until stdin ends."""
    order: Record = json.loads(sys.argv[1])
    say = answers_only()
    if order.get("pinned"):  # before torch starts its threads
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[order["rank"] % len(cores)]})
    gate = Gate(say, order.get("device", "cpu"))
    if order["arm"] == "products":
        run_products(gate, order)
        return 0
    spec = RunSpec.from_dict(json.loads(Path(order["spec"]).read_text(encoding="utf-8")))
    if order["arm"] == "engine":
        run_engine(spec, gate, order, say)
        return 0
    if order.get("keep_memory"):
        keep_freed_memory()
    # A step at each call of the gate
    for _ in plain_loop(spec.config, spec.dataset, order["threads"]):
        gate()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
