"""Samples of a script's data: their places in the run, the generators they draw from, and the worker
processes that read them.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from nanoray.config import Batch
from nanoray.data.tokens import MicroBatches
from nanoray.script.data.epochs import Epochs
from nanoray.script.data.source import Items, ScriptData, source_of
from nanoray.script.data.stream import Stream

CPU = torch.device("cpu")


def test_an_epoch_ends_where_torchs_loader_ends_it() -> None:
    """Ten items in batches of four; the dataset alone has no batches."""
    order = list("abcdefghij")
    gaps = Epochs(lambda epoch: order, 10, batch=4)
    assert [sample.item for sample in gaps.samples(8, 8)] == ["i", "j", "a", "b", "c", "d"]
    assert [sample.number for sample in gaps.samples(8, 8)] == [8, 9, 12, 13, 14, 15]
    assert gaps.may_have_gaps
    dropped = Epochs(lambda epoch: order, 10, batch=4, drop_last=True)
    assert "".join(sample.item for sample in dropped.samples(4, 8)) == "efghabcd"
    assert not dropped.may_have_gaps
    alone = Epochs(lambda epoch: order, 10)
    assert "".join(sample.item for sample in alone.samples(8, 4)) == "ijab"


@pytest.mark.parametrize(
    ("options", "is_items"),
    [
        ({"batch_size": 3}, True),
        ({"batch_size": 3, "shuffle": True, "num_workers": 2, "drop_last": True}, True),
        ({"shuffle": True, "generator": torch.Generator()}, False),
        ({"sampler": RandomSampler(range(6), replacement=True)}, False),
        ({"sampler": range(4)}, False),
        ({"batch_sampler": [[1, 2], [3]]}, False),
        ({"batch_size": None}, False),
    ],
)
def test_a_plain_loader_is_read_by_number_and_any_other_is_a_stream(
    options: dict[str, Any], is_items: bool
) -> None:
    """As a stream it is itself what draws the order."""
    loader = DataLoader(TensorDataset(torch.arange(6.0), torch.arange(6)), **options)
    assert isinstance(source_of(loader, "train"), Items if is_items else Stream)


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]), i


def noise(workers: int, ranks: int) -> Tensor:
    """Two epochs of the noise, in the order of the run."""
    found = {}
    for rank in range(ranks):
        loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
        data = ScriptData(loader, None, 7, 2, CPU, (rank, ranks))
        batch = Batch(2, 6 // ranks, ranks)
        data.divide(batch, rank)
        batches = MicroBatches(data, batch, rank)
        for step in range(2):
            for micro, (x, _) in enumerate(batches.step(12 * step)):
                found[step, micro * ranks + rank] = x
        data.close()
    return torch.cat([found[key] for key in sorted(found)])


def test_augmentation_depends_on_the_sample_alone() -> None:
    """Not on ranks and workers; no two samples draw the same, and the callers' generators stay."""
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    alone = noise(0, 1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    assert len({*alone.flatten().tolist()}) == alone.numel() == 72
    assert torch.equal(noise(0, 2), alone)
    assert torch.equal(noise(2, 1), alone)
    assert torch.equal(noise(1, 3), alone)


x, y, image = torch.zeros(5, 3), torch.zeros(5), torch.zeros(3, 8, 8)
SCRIPT = """
import os, sys, time, torch
from torch.utils.data import DataLoader
from nanoray.script.data.source import ScriptData

class Pids(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.tensor(os.getpid()), i

if __name__ == "__main__":
    how, sampler = sys.argv[1], range(64) if sys.argv[2] == "stream" else None
    loader = DataLoader(
        Pids(), batch_size=2, sampler=sampler, num_workers=2, multiprocessing_context=how
    )
    data = ScriptData(loader, None, 0, 2, torch.device("cpu"))
    pids = [data.train_batch(first, 2)[0][0].item() for first in (0, 2)]
    print(*pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("fork", "loader"),
        pytest.param("fork", "stream", marks=pytest.mark.full),
        pytest.param("forkserver", "loader", marks=pytest.mark.full),
    ],
)
def test_workers_end_with_a_rank_that_is_killed(how: str, kind: str, tmp_path: Path) -> None:
    """At once: they would keep the lock of the run's folder."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), how, kind]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert rank.stdout
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert len({*pids}) == 2
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    rank.stdout.close()
    deadline = time.monotonic() + 2  # torch's own check takes 5 s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives its rank"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
