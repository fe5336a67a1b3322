"""Worker processes of a script's DataLoader that are killed: the run ends, and so does its process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from nanoray.errors import DataError
from nanoray.own.data.reader import END, begin, end_workers, next_of
from nanoray.own.data.source import Batches

PATIENCE_S = 30.0  # without the mend these wait for ever
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


class Texts(Dataset[Any]):
    """Samples that are longer than a pipe: a worker is always in the middle of one."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> str:
        return "x" * 300_000 + str(i)


class Shares(IterableDataset[Any]):
    """The second worker has more samples than the first one, and reads on after its end."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(3 if info is None else 2 + 20 * info.id))


def unchanged(batch: Any) -> Any:
    return batch


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    settings: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    return DataLoader(dataset, collate_fn=unchanged, **settings | options)


def within(do: Callable[[], Any]) -> Any:
    """Return what `do` returns or raises, in a thread; fail where it does not end."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(do())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it still waits"
    return found[0]


def read_all(iterator: Iterator[Any]) -> list[Any]:
    return list(iter(lambda: next_of(iterator), END))


def kill_first(iterator: Any) -> None:
    os.kill(iterator._workers[0].pid, signal.SIGKILL)


def test_a_part_of_a_batch_is_not_waited_for() -> None:
    iterator: Any = begin(loader_of(Texts()))
    next_of(iterator)
    time.sleep(0.3)  # the pipe is full: each worker waits in the middle of a batch
    workers = list(iterator._workers)
    kill_first(iterator)
    error = within(lambda: read_all(iterator))
    assert isinstance(error, DataError), error
    assert str(error).startswith("a worker process of the DataLoader ended (")
    assert not any(worker.is_alive() for worker in workers)


def keep(lock: Any) -> None:
    lock.acquire()
    os._exit(0)


def test_a_lock_that_a_killed_worker_has_kept_is_not_waited_for() -> None:
    iterator: Any = begin(loader_of(Texts()))
    next_of(iterator)
    lock = iterator._workers_done_event._cond
    child = multiprocessing.get_context("fork").Process(target=keep, args=(lock,))
    child.start()
    child.join()
    kill_first(iterator)
    iterator._workers[0].join()
    assert within(lambda: end_workers(iterator)) is None
    assert iterator._shutdown


def test_workers_that_end_one_after_the_other_have_not_been_killed() -> None:
    iterator = begin(loader_of(Shares()))
    assert len(read_all(iterator)) == 2 + 22


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_begins_anew_after_a_worker_was_killed(persistent: bool) -> None:
    loader = loader_of(Texts(), persistent_workers=persistent)
    batches = Batches(loader, "train", 1)
    kept: Any = begin(loader)
    next_of(kept)
    kill_first(kept)
    assert isinstance(within(lambda: read_all(kept)), DataError)
    batches.close()
    again = begin(loader)
    assert next_of(again)[0].endswith("x0")
    end_workers(again)  # they live: nothing happens
    assert next_of(again)[0].endswith("x1")


SCRIPT = """
import os, pathlib, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
import nanoray

here, persistent = pathlib.Path(sys.argv[1]), sys.argv[2] == "True"

class Rows(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i):
        info = get_worker_info()
        if info and not (here / f"pid{info.id}").exists():
            (here / f"pid{info.id}").write_text(str(os.getpid()))
        x = torch.full((3,), i / 4000)
        return x, x.sum(0, keepdim=True)

class Kills(nanoray.Callback):
    def on_step_end(self, step, record):
        if step == 5:
            os.kill(int((here / "pid0").read_text()), signal.SIGKILL)

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
config = {"out_dir": str(here / "runs"), "log_every": 1, "eval_every": 0, "tensorboard": False}
engine = nanoray.RuntimeEngine(
    model, optimizer, config | {"device": "cpu"}, nn.functional.mse_loss, [Kills()]
)
loader = DataLoader(Rows(), batch_size=4, num_workers=2, persistent_workers=persistent)
engine.fit(loader, steps=900)
"""


@pytest.mark.full
@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_process_of_a_run_ends_after_a_worker_was_killed(
    tmp_path: Path, persistent: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path), str(persistent)]
    done = subprocess.run(
        command, env=ONE_THREAD, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "a worker process of the DataLoader ended" in done.stderr
    assert done.stderr.startswith("error: after step "), "one line, without a traceback"
    assert len(done.stderr.splitlines()) == 1
    (run,) = (tmp_path / "runs").iterdir()
    step = int(done.stderr.split()[3])
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{step:08d}"]
    for pid in (int((tmp_path / f"pid{n}").read_text()) for n in (0, 1)):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
