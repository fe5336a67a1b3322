"""What is seen of a program that `nanoray run` runs: who is behind, who moves, what its GPUs do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoray.launch.program.counts import Counts, CountsFile, GroupCounts, read_counts
from nanoray.launch.program.driver import Movement
from nanoray.launch.program.observed import RunObserver, explain_wait
from nanoray.machine.gpus import gpu_usage


def rank(begun: int, ended: int, op: str = "all_reduce", size: int = 20) -> Counts:
    return Counts(0, ended, {"default": GroupCounts(begun, ended, op, size)})


@pytest.mark.parametrize(
    ("counts", "behind", "why"),
    [
        ([rank(9, 8), rank(8, 8)], 1, "rank 1 is behind: it has begun 8 collectives of the group"),
        ([rank(8, 8), rank(8, 8), rank(9, 8)], 0, "rank 2 waits in number 9, all_reduce of 20"),
        ([rank(1, 0), Counts()], 1, "rank 1 is behind: it has begun 0 collectives"),
        # All have called, but not the same: the wrong program, or ranks that took another branch.
        (
            [rank(9, 8), rank(9, 8, "all_gather", 64)],
            1,
            "collective 9 of the group default is all_reduce of 20 bytes on rank 0 and all_gather",
        ),
        ([rank(9, 8), rank(9, 8)], 0, "all ranks of the group default wait in its collective 9"),
        # Without --trace, and where no rank waits in a collective.
        ([Counts(), Counts()], 0, ""),
        ([rank(8, 8), rank(8, 8)], 0, ""),
    ],
)
def test_who_is_behind_in_a_collective(counts: list[Counts], behind: int, why: str) -> None:
    found, text = explain_wait(counts)
    assert found == behind
    assert why in text
    assert bool(text) == bool(why)


def test_a_rank_outside_of_a_group_is_not_behind_in_it() -> None:
    part = Counts(0, 3, {"default": GroupCounts(3, 3, "barrier", 0)})
    waits = Counts(0, 4, part.groups | {"dp 1": GroupCounts(2, 1, "broadcast", 12)})
    late = Counts(0, 3, part.groups | {"dp 1": GroupCounts(1, 1, "broadcast", 12)})
    assert explain_wait([part, waits, late])[0] == 2


def test_a_rank_that_computes_in_a_collective_does_not_move() -> None:
    before = Movement(output=10, cpu=1.0, ended=5, waits=True)
    assert not before._replace(cpu=9.0).is_after(before, 10.0)  # NCCL spins
    assert before._replace(ended=6).is_after(before, 10.0)
    assert before._replace(output=11).is_after(before, 10.0)
    # Outside of a collective it computes for itself.
    assert before._replace(cpu=9.0, waits=False).is_after(before, 10.0)


def test_a_rank_with_a_thread_that_looks_around_does_not_move() -> None:
    """However long it does: 0.05 s in each 10 s is no work; a program that copies files uses more."""
    before = Movement(output=10, cpu=1.0, ended=0, waits=False)
    assert not before._replace(cpu=1.05).is_after(before, 10.0)
    assert before._replace(cpu=1.2).is_after(before, 10.0)
    # The kernel counts in ticks: between two looks of a short timeout a single one is nothing.
    assert not before._replace(cpu=1.01).is_after(before, 0.1)


def test_the_driver_of_a_traced_program_imports_no_torch(tmp_path: Path) -> None:
    """It computes what collectives cost from the notes of the ranks: in plain Python."""
    code = (
        "import pathlib, sys\n"
        "from nanoray.launch.program.observed import RunObserver\n"
        "observer = RunObserver(pathlib.Path(sys.argv[1]), traced=True)\n"
        "observer.begin([], [], 0)\n"
        "observer.close()\n"
        "assert observer.summary == {'comm': {'traced_steps': 0}, 'steps': 0}, observer.summary\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_run_that_is_stopped_before_its_program_began_has_nothing_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = RunObserver(tmp_path, traced=False)
    observer.collect(now=True)
    observer.close()
    assert capsys.readouterr().out == ""


def test_counts_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "rank0.counts"
    assert read_counts(path) == Counts()
    file = CountsFile(path)
    assert read_counts(path) == Counts()
    groups = {
        "default": GroupCounts(7, 6, "all_reduce", 1 << 40),
        "mesh_dp 1": GroupCounts(1, 1, "barrier", 0),
    }
    file.write_head(3, 7)
    for place, (name, counts) in enumerate(groups.items()):
        file.write_group(place, name, counts)
    file.write_group(64, "one too many", GroupCounts(1, 1, "barrier", 0))
    assert read_counts(path) == Counts(3, 7, groups)
    assert read_counts(path).waits


class NoLoad(Exception):
    """NVML's error."""


def test_the_usage_of_gpus_and_slices() -> None:
    """By NVML's functions over two made-up GPUs, of which the second is a slice."""

    def load(handle: str) -> SimpleNamespace:
        if handle.startswith("MIG-"):
            raise NoLoad
        return SimpleNamespace(gpu=80)

    nvml = SimpleNamespace(
        NVMLError=NoLoad,
        nvmlInit=int,
        nvmlShutdown=int,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
        nvmlDeviceGetHandleByUUID=str,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3 << 30),
        nvmlDeviceGetUtilizationRates=load,
    )
    assert gpu_usage(["0"], nvml) == {"gpu/mem_gib": 3.0, "gpu/load": 80.0}
    assert gpu_usage(["MIG-1"], nvml) == {"gpu/mem_gib": 3.0}
    assert gpu_usage([], nvml) == {}
