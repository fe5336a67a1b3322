"""What `nanoray run --trace` costs a step: `python -m tests.harness.trace_cost [--rounds 20] [--json FILE]`.

Two groups of two ranks train the same model with torch's DDP over gloo, one of them traced. They take
turns of a few steps, so that a machine which becomes slower slows both; a ratio is of one turn of each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nanoray.machine.interfaces import free_port

RANKS = 2
STEPS = 10  # of a turn
WIDTH = 1024  # four layers of it: 16.8 MB of gradients
BATCH = 128
WARM_UP = 3  # turns: the first 20 steps are all noted
ARMS = ("plain", "traced")


def train() -> None:
    """Be a rank: make STEPS steps for each line on stdin, and print their ms and CPU ms."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    if os.environ["TRACED"]:
        from nanoray.launch.program.traced import trace

        trace(os.environ["TRACED"], int(os.environ["RANK"]), 10)
    dist.init_process_group("gloo")
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH)
    for _ in sys.stdin:
        dist.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        took = time.perf_counter() - begun, time.process_time() - cpu
        print(json.dumps([1e3 * seconds / STEPS for seconds in took]), flush=True)


def measure(rounds: int) -> dict[str, Any]:
    """Return the ms and the CPU ms of a step of each arm, and their ratios by round."""
    values: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}  # of a turn: ms, CPU ms
    with tempfile.TemporaryDirectory() as folder:
        groups = {arm: _start(folder if arm == "traced" else "") for arm in ARMS}
        try:
            for turn in range(WARM_UP + rounds):
                for arm in ARMS if turn % 2 else ARMS[::-1]:
                    answers = _turn(groups[arm])
                    if turn >= WARM_UP:
                        values[arm].append(
                            [statistics.fmean(v) for v in zip(*answers, strict=True)]
                        )
        finally:
            for process in [process for group in groups.values() for process in group]:
                process.communicate(timeout=60)
        notes = Path(folder, "rank0.notes.jsonl").read_text().splitlines()
    result: dict[str, Any] = {"rounds": rounds, "steps_per_turn": STEPS, "ranks": RANKS}
    result["collectives_per_step"] = len(json.loads(notes[5])["collectives"])
    for number, name in enumerate(("step_ms", "cpu_ms")):
        of_arm = {arm: [turn[number] for turn in values[arm]] for arm in ARMS}
        ratios = [b / a for a, b in zip(of_arm["plain"], of_arm["traced"], strict=True)]
        result[name] = {arm: statistics.median(of_arm[arm]) for arm in ARMS}
        result[name]["ratio"] = statistics.median(ratios)
        result[name]["ratios"] = ratios
    return result


def _start(traced: str) -> list[subprocess.Popen[str]]:
    port = free_port("")
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.harness.trace_cost", "--rank"],
            env=os.environ | shared | {"RANK": str(rank), "TRACED": traced},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


def _turn(group: list[subprocess.Popen[str]]) -> list[list[float]]:
    for process in group:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = []
    for process in group:
        assert process.stdout
        answers.append(json.loads(process.stdout.readline()))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train()
        return
    result = measure(args.rounds)
    for name in ("step_ms", "cpu_ms"):
        of = result[name]
        print(
            f"{name}: plain {of['plain']:.1f}, traced {of['traced']:.1f}, ratio {of['ratio']:.3f}"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
