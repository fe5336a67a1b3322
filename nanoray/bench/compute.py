"""Step time of nanoray's engine against a plain loop, on CPU: processes that run blocks of steps when told to.

    baseline   one process, float32, the plain loop below
    engine     nanoray.train.train with one rank: metrics files on, as in any run
    engine-2   the same with two ranks, which share the cores and the global batch; also with --comm_trace

Every arm stays alive with its model warm; the benchmark lets them run blocks of steps in turn while the others sleep in
a read, so slow minutes of the machine hit all arms and threads of one never disturb another.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from nanoray.run import RunSpec


class Gate:
    """What a loop asks before each step: at the end of a block it says how long that took and waits for an order.

    An order is a line with a number of steps; the answer is {"step_ms": ..., "cpu_ms": ...}: wall time, and CPU time of
    all threads of this process. The end of stdin ends the process.
    """

    def __init__(self, answers: TextIO) -> None:
        self._answers, self._left, self._asked, self._start, self._cpu_start = answers, 0, 0, 0.0, 0.0

    def __call__(self) -> bool:
        """Return False, always: the loop goes on. Blocks between two blocks of steps."""
        if self._left:
            self._left -= 1
            return False
        seconds, cpu_s = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        answer = {"step_ms": 1e3 * seconds / self._asked, "cpu_ms": 1e3 * cpu_s / self._asked} if self._asked else {}
        self._say(answer or {"ready": True})
        order = sys.stdin.readline()
        if not order.strip():
            os._exit(0)  # there is nothing to keep, and gloo's teardown can hang
        self._asked = int(order)
        self._left = self._asked - 1
        self._start, self._cpu_start = time.perf_counter(), time.process_time()
        return False

    def _say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def run_baseline(spec: RunSpec, gate: Callable[[], bool], threads: int) -> None:
    """Train nanoray's GPT with the loop people write first: nanoGPT's step, without what nanoray adds or leaves out.

    Random offsets from a fresh memmap, AdamW as torch makes it by default (not fused), clip_grad_norm_, and the loss
    fetched on every step. The model is the same class as in the other arms: only the loop is compared.
    """
    import numpy as np
    import torch

    from nanoray.model import GPT, ModelShape
    from nanoray.optim import lr_at

    torch.set_num_threads(threads)
    cfg, data = spec.config, spec.dataset
    torch.manual_seed(cfg.seed)
    model = GPT(ModelShape.of(cfg, data.vocab_size), cfg.dropout)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.memmap(Path(data.path) / "train.bin", dtype=data.dtype, mode="r")
        starts = torch.randint(len(tokens) - cfg.block_size, (cfg.global_batch_size,)).tolist()
        windows = [torch.from_numpy(tokens[i : i + cfg.block_size + 1].astype(np.int64)) for i in starts]
        block = torch.stack(windows)  # (B, T + 1)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    step, (x, y) = 0, batch()
    while not gate():
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


def run_engine(spec: RunSpec, gate: Callable[[], bool], order: dict[str, Any], answers: TextIO) -> None:
    """Train with nanoray as rank `order["rank"]` of `order["world"]`; rank 0 first says at which port it serves."""
    from nanoray.mesh import Rendezvous, open_store
    from nanoray.train import train

    rank, world, store, port = order["rank"], order["world"], None, order.get("port", 0)
    if world > 1 and rank == 0:
        store = open_store("127.0.0.1", world, 60)
        port = store.port
        answers.write(json.dumps({"port": port}) + "\n")
        answers.flush()
    rendezvous = Rendezvous(
        rank=rank,
        world_size=world,
        local_rank=rank,
        local_world_size=world,
        master_addr="127.0.0.1",
        master_port=port,
        backend_reason="CPU ranks",
        threads=order["threads"],
        secret="bench",
        agent_store=True,
    )
    train(spec, rendezvous, wish=gate, store=store)


def main() -> int:
    """Read one JSON order from the command line and obey it until stdin ends."""
    order = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not get between the answers
    spec = RunSpec.from_dict(json.loads(Path(order["spec"]).read_text(encoding="utf-8")))
    gate = Gate(answers)
    if order["arm"] == "baseline":
        run_baseline(spec, gate, order["threads"])
    else:
        run_engine(spec, gate, order, answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
