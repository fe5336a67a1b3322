"""What a checkpoint costs: a real measurement at toy size, shares worked out by hand, and nothing
left behind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager

import nanoray.bench.__main__ as bench
from nanoray.bench import checkpoint
from nanoray.bench.checkpoint import (
    ARMS,
    ASYNC,
    DCP_ASYNC,
    DONE,
    LOST,
    OF_DISK,
    OF_LOST,
    OF_STALL,
    PROCESS,
    RATE,
    RAW,
    STAGER,
    STALL,
    SYNC,
    CheckpointBenchmark,
    add_rows,
    file_system,
)
from nanoray.bench.harness.report import Report
from nanoray.parallel.mesh import Mesh

FLAGS = ["checkpoint", "--preset", "tiny", "--device", "cpu", "--rounds", "2", "--quick"]


@pytest.mark.full
def test_a_real_measurement_reads_back_every_bit_and_leaves_nothing(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_ranks(checkpoint)
    disk = tmp_path / "disk"
    disk.mkdir()
    files = [f"--json={tmp_path / 'c.json'}"]
    assert bench.main([*FLAGS, f"--folder={disk}", f"--figure={tmp_path / 'c.png'}", *files]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    assert list(disk.iterdir()) == [], "everything that it wrote is gone"
    told = json.loads((tmp_path / "c.json").read_text())
    assert told["conditions"]["recipe"].startswith("preset tiny, 2 rounds after one to warm up")
    assert told["conditions"]["state"].endswith("tensors on cpu")
    rows = {(r["arm"], r["metric"]): r for r in told["rows"]}
    for arm in ARMS:
        assert rows[arm, DONE]["n"] == 2
        assert rows[arm, DONE].get("wrong") == (None if arm == RAW else 0)
        assert rows[arm, DONE]["note"].endswith("GB")
    assert rows[SYNC, OF_STALL]["values"] == [100.0, 100.0]
    for arm in (ASYNC, STAGER, PROCESS):
        for stall, done in zip(rows[arm, STALL]["values"], rows[arm, DONE]["values"], strict=True):
            assert stall < done, f"{arm}: it is on disk after training went on"
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def until(done: Callable[[], bool]) -> None:
    while not done():
        pass


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)
def test_a_save_that_changes_a_bit_is_found(tmp_path: Path) -> None:
    """And one that does not get on disk is an error."""
    arms, tree = checkpoint.make_arms(
        Mesh(0, 1, 0, torch.device("cpu"), "none", ""), "tiny", tmp_path
    )
    assert {name.partition(".")[0] for name in tree()} == {"model", "optimizer"}
    done, read = arms[SYNC].begin(1), arms[SYNC].read  # the run above has read the others' files
    until(done)
    assert read
    back = read(1)
    assert all(checkpoint.same_bits(tensor, back[name]) for name, tensor in tree().items())
    name, tensor = next(iter(tree().items()))
    back[name] = tensor.clone()
    back[name].view(torch.int32).view(-1)[3] ^= 1
    assert not checkpoint.same_bits(tensor, back[name])
    assert not checkpoint.same_bits(tensor, None)
    assert not checkpoint.same_bits(tensor, tensor.double())
    for arm in arms.values():
        arm.close()
    (tmp_path / "checkpoints" / "step_00000002").write_text("in the way")
    done = arms[ASYNC].begin(2)
    with pytest.raises(
        checkpoint.CheckpointError, match="the checkpoint of round 2 was not written"
    ):
        until(done)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "arm", [ASYNC, DCP_ASYNC, STAGER, pytest.param(PROCESS, marks=pytest.mark.full)]
)
def test_an_update_waits_for_the_copy(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on disk is the state of the call, also where the copy takes its time."""
    stage = DefaultStager._stage

    def slow(self: DefaultStager, *state: Any, **more: Any) -> Any:
        time.sleep(0.3)
        return stage(self, *state, **more)

    monkeypatch.setattr(DefaultStager, "_stage", slow)
    arms, tree = checkpoint.make_arms(
        Mesh(0, 1, 0, torch.device("cpu"), "none", ""), "tiny", tmp_path
    )
    before = {name: tensor.clone() for name, tensor in tree().items()}
    done, read = arms[arm].begin(1), arms[arm].read
    arms[arm].copied()
    for tensor in tree().values():
        tensor.detach().add_(1)
    until(done)
    assert read
    back = read(1)
    assert all(checkpoint.same_bits(tensor, back[name]) for name, tensor in before.items())
    for each in arms.values():
        each.close()


def measured(**changes: dict[str, float]) -> Report:
    """Five rounds alike: 2 GB; raw disk 1 s, sync 2.5 s, async 0.1 s of stall and 0.25 s lost."""
    events: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for arm, stall, lost, done in (
        (RAW, 1.0, 1.0, 1.0),
        (SYNC, 2.5, 2.5, 2.5),
        (ASYNC, 0.1, 0.25, 4.0),
    ):
        event = {"stall_s": stall, "lost_s": lost, "done_s": done, "step_s": 0.02, "bytes": 2e9}
        events[arm] = [event | changes.get(arm.replace(" ", "_"), {})] * 5
    report = Report("checkpoint", {"recipe": "", "disk": ""})
    add_rows(report, events, {SYNC: 0, ASYNC: 0})
    return report


def test_shares_are_of_the_same_round(tmp_path: Path) -> None:
    report = measured()

    def median(arm: str, metric: str) -> float:
        row = report.row(arm, metric)
        assert row
        return row.median

    assert median(ASYNC, OF_STALL) == pytest.approx(4.0)
    assert median(ASYNC, OF_LOST) == pytest.approx(10.0)
    assert median(ASYNC, RATE) == pytest.approx(0.5)
    assert median(SYNC, OF_DISK) == pytest.approx(40.0)
    assert median(ASYNC, LOST) == 0.25
    assert [t.verdict for t in report.targets] == ["ok", "ok"]
    missed = measured(nanoray_async={"stall_s": 0.16, "lost_s": 0.31})
    assert [t.verdict for t in missed.targets] == ["MISSED", "MISSED"]
    head, raw, sync, own, torch_save, *_ = CheckpointBenchmark().format_text(report)
    assert head.split()[:3] == ["arm", "stall,", "s"]
    assert raw.split()[:3] == ["raw", "disk", "1.00"]
    assert sync.split()[2:4] == ["2.50", "(2.50–2.50)"]
    assert "100" in sync
    assert own.split()[2] == "0.100"
    assert torch_save.split()[1] == "FAILED"
    assert CheckpointBenchmark().format_markdown(report)[4] == (
        "| nanoray async | 0.100 (0.100–0.100) | 4.00 | 0.250 (0.250–0.250) | 10.0 | 4.00 "
        "(4.00–4.00) | 0.500 | 25.0 |"
    )
    CheckpointBenchmark().draw(report, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_the_file_system_is_named(tmp_path: Path) -> None:
    assert " at /" in file_system(tmp_path)
    assert file_system(Path("/proc/self")).startswith("proc at /proc")
