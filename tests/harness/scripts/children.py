"""A rank that spawns processes, forks one, and starts a command."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(index: int, results: "mp.SimpleQueue[float]") -> None:
    torch.manual_seed(index + 2 * int(os.environ["RANK"]))
    results.put(torch.rand(1).item())


def main() -> None:
    dist.init_process_group("gloo")
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (results,), nprocs=2)
    total = torch.tensor(results.get() + results.get())
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, b"%f" % (1 + dist.get_rank()))
        os._exit(0)
    os.wait()
    total += float(os.read(reader, 100))
    code = "import os; print(os.environ['LOCAL_RANK'], os.getcwd() != '')"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"loss {total.item():.6f} {said.stdout.strip()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
