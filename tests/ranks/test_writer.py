"""Checkpoints that are written beside training: the step they claim, none lost, failures heard by
all ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoray.checkpoint import writer
from nanoray.checkpoint.files import load
from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec, write_attempt
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.checkpoint.writer import AttemptOver, CheckpointWriter
from nanoray.errors import CheckpointError
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.pieces import Piece
from nanoray.train.agree import find_checkpoint
from tests.harness.alone import engine_of
from tests.harness.commands import Command, forkserver, killed_saves
from tests.harness.commands import wait_for as until
from tests.harness.ranks import TINY, make_spec, records, run_ranks, series
from tests.harness.saving import save

ALONE = Mesh(0, 1, 0, torch.device("cpu"), "none", "")


def slow_disk(seconds: float = 0.1) -> None:
    """Make every fsync of this process take longer: a checkpoint takes at least seven times that."""
    fsync = os.fsync

    def slow(fd: int) -> None:
        time.sleep(seconds)
        fsync(fd)

    os.fsync = slow  # type: ignore[assignment]


def step_4_after_step_7() -> None:
    """A slow disk, which takes the checkpoint of step 4 only when this run has recorded seven
    steps.
    """
    slow_disk()
    fsync = os.fsync

    def slow(fd: int) -> None:
        run, _, file = os.readlink(f"/proc/self/fd/{fd}").partition("/checkpoints/")
        if file.startswith(".tmp-step_00000004"):
            until(lambda: Path(run, "metrics.jsonl").read_text().count("\n") >= 7, 60)
        fsync(fd)

    os.fsync = slow  # type: ignore[assignment]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk for the length of a test."""
    monkeypatch.setattr(os, "fsync", os.fsync)
    slow_disk(0.15)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes nothing of the thread which writes checkpoints until this is set."""
    event, fsync, test = threading.Event(), os.fsync, threading.current_thread()

    def gated(fd: int) -> None:
        assert threading.current_thread() is test or event.wait(60)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", gated)
    return event


def make(step: int, numel: int = 64) -> StateDict:
    """Return a state whose every value follows from `step`."""
    values = torch.full((numel,), float(step))
    rng = [{"torch": torch.full((16,), step % 251, dtype=torch.uint8)}]
    return StateDict({"w": values}, {"exp_avg.w": values / 2}, rng, {"scale": 2.0}, {"step": step})


def saver_of(spec: RunSpec, notes: list[str] | None = None) -> CheckpointWriter:
    return CheckpointWriter(spec, [].append if notes is None else notes.append)


def steps(spec: RunSpec) -> list[int]:
    return sorted(int(path.name[5:]) for path in spec.checkpoints.glob("step_*"))


def hidden(spec: RunSpec) -> list[str]:
    return [path.name for path in spec.checkpoints.glob(".*")]


def writers_at_work() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "checkpoint"}


def wait_for(saver: CheckpointWriter) -> None:
    end = time.monotonic() + 200
    while saver.busy:
        assert time.monotonic() < end
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------- what is in it


@pytest.mark.full
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 3])
def test_resume_from_one_that_was_written_beside_training_is_bit_identical(
    text: Path, tmp_path: Path, world: int
) -> None:
    """With AdamW, accumulation and dropout. Step 4 gets on disk when training is steps further."""
    recipe = {"dropout": 0.1, "max_steps": 9, "global_batch_size": 24, "grad_accum_steps": 2}
    whole = make_spec(
        text, tmp_path / "whole", **recipe, checkpoint_every=4, checkpoint_mode="sync"
    )
    spec = make_spec(text, tmp_path / "parts", **recipe, checkpoint_every=4, keep_checkpoints=9)
    for outcome in run_ranks(whole, world) + run_ranks(spec, world, first=step_4_after_step_7):
        assert "error" not in outcome, outcome
    four = spec.checkpoints / "step_00000004"
    assert four.stat().st_mtime > records(spec)[6]["time"], (
        "the disk was not slow enough to show anything"
    )
    nine = whole.checkpoints / "step_00000009"
    files = [path.name for path in nine.glob("*.safetensors")]
    assert len(files) == 3
    for name in files:
        other = spec.checkpoints / "step_00000009" / name
        assert other.read_bytes() == (nine / name).read_bytes(), name
    for newer in ("step_00000008", "step_00000009"):
        shutil.rmtree(spec.checkpoints / newer)
    (spec.folder / "metrics.jsonl").rename(tmp_path / "first.jsonl")
    rest = make_spec(text, tmp_path / "parts", **recipe, checkpoint_every=4, resume="auto")
    outcomes = run_ranks(rest, world)
    assert outcomes[0]["resumed_from"].endswith("step_00000004")
    expected = {step: loss for step, loss in series(whole).items() if step > 4}
    assert series(rest) == expected
    for name in files:
        other = rest.checkpoints / "step_00000009" / name
        assert other.read_bytes() == (nine / name).read_bytes(), name


def copy_late() -> None:
    """Let each thread that copies a state begin when forward and backward are over."""
    late = partial(ThreadPoolExecutor, initializer=time.sleep, initargs=(1.0,))
    writer.ThreadPoolExecutor = late  # type: ignore[misc, assignment]


@pytest.mark.full
@pytest.mark.parametrize(
    "mode", ["ddp", "zero1", *(pytest.param(m, marks=pytest.mark.full) for m in ("zero2", "fsdp"))]
)
def test_an_update_waits_for_a_copy_that_is_late(text: Path, tmp_path: Path, mode: str) -> None:
    """Of a whole state, which rank 0 copies, and of one in parts."""
    recipe = {"dp_mode": mode, "checkpoint_every": 2, "keep_checkpoints": 9, "max_steps": 5}
    waiting = make_spec(text, tmp_path / "sync", **recipe, checkpoint_mode="sync")
    beside = make_spec(text, tmp_path / "async", **recipe)
    for outcome in run_ranks(waiting, 2) + run_ranks(beside, 2, first=copy_late):
        assert "error" not in outcome, outcome
    for step in (2, 4):
        folder = waiting.checkpoints / f"step_0000000{step}"
        for file in folder.glob("*.safetensors"):
            other = beside.checkpoints / folder.name / file.name
            assert file.read_bytes() == other.read_bytes(), other
    # The wait for the copy counts as the checkpoint's, and no step is longer for it.
    paused = [r for r in records(beside) if r["step"] in (3, 5)]
    assert all(r["time/checkpoint_s"] > 0.4 > r["time/step_ms"] / 1e3 for r in paused), paused


@pytest.mark.full
@pytest.mark.parametrize("how", ["a flipped bit", "no manifest"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    text: Path, tmp_path: Path, how: str
) -> None:
    whole = make_spec(text, tmp_path / "whole")
    spec = make_spec(text, tmp_path / "parts", checkpoint_every=3, stop_at=6)
    for each in (whole, spec):
        assert "error" not in run_ranks(each, 1)[0]
    six = spec.checkpoints / "step_00000006"
    data = bytearray((six / "optimizer-00000.safetensors").read_bytes())
    if how == "no manifest":
        (six / "manifest.json").unlink()
    else:
        data[-1] ^= 16
        (six / "optimizer-00000.safetensors").write_bytes(data)
    rest = make_spec(text, tmp_path / "parts", resume="auto")
    (outcome,) = run_ranks(rest, 1)
    assert outcome["resumed_from"].endswith("step_00000003")
    assert re.search(
        r"resume  checkpoint step_00000006 is damaged \([\w-]+\.\w+: [^)]+\); using step_00000003",
        rest.log(0).read_text(),
    )
    assert series(rest) == series(whole)


def test_a_copy_holds_every_bit_of_every_kind_of_tensor(text: Path, tmp_path: Path) -> None:
    """Tied, transposed, empty, of one element, of 1 to 8 bytes; the same memory serves the next
    step.
    """
    spec = make_spec(text, tmp_path)
    raw = torch.randint(0, 256, (240,), dtype=torch.uint8)  # any bits, so NaNs too
    w = torch.randn(7, 3)
    model = {
        "wte": w,
        "lm_head": w,
        "t": w.t(),
        "none": w[:0],
        "bf16": raw.view(torch.bfloat16),
        "u8": raw[1:5],
    }
    state = StateDict(
        model, {"step.w": torch.tensor(3.0), "big": raw.view(torch.float64)}, [], {}, {"step": 1}
    )
    saver = saver_of(spec)
    for step in (1, 2):
        w += 1
        state.meta["step"] = step
        saver.save(ALONE, state)
        expected = {name: t.clone() for name, t in (state.model | state.optimizer).items()}
        w *= 3
        saver.close()
        w /= 3
        back = load(spec.checkpoints / f"step_0000000{step}")
        for name, tensor in (back.model | back.optimizer).items():
            assert torch.equal(_bits(tensor), _bits(expected[name])), name
    assert saver._snapshot
    assert saver._snapshot._memory.numel() < 3 * 128 + 2 * 256 + 4 * 64, (
        "tied weights are copied once"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# -------------------------------------------------------------------------------------------------- beside training


@pytest.mark.full
def test_training_waits_for_the_copy_and_the_next_checkpoint_for_the_disk(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", os.fsync)
    slow_disk(0.3)  # a write takes 2.1 s or more
    spec = make_spec(text, tmp_path, keep_checkpoints=9)
    saver, times, writers, earlier = saver_of(spec), [], [], writers_at_work()
    for step in (1, 2, 3):
        start = time.monotonic()
        saver.save(ALONE, make(step))
        times.append(time.monotonic() - start)
        writers.append(len(writers_at_work() - earlier))
    assert times[0] < 0.8, "the first waits for nothing"
    assert min(times[1:]) > 0.8, "the others for the one before"
    assert writers == [1, 1, 1], "one writer at a time"
    assert steps(spec) == [1, 2], "and the third is under way"
    assert saver.busy
    start = time.monotonic()
    saver.save(ALONE, make(3), final=True)
    assert time.monotonic() - start > 0.1
    assert (saver.committed, steps(spec), hidden(spec)) == (3, [1, 2, 3], [])
    assert saver.news()["time/checkpoint_write_s"] > 0.8
    assert saver.news() == {}
    start = time.monotonic()
    saver.save(ALONE, make(3), final=True)
    assert time.monotonic() - start < 0.8, "it is there already"


def test_an_exception_does_not_lose_the_checkpoint_that_is_being_written(
    text: Path, tmp_path: Path
) -> None:
    plan = "raise@rank=0,step=5,phase=forward"
    spec = make_spec(text, tmp_path, checkpoint_every=4, faults=plan)
    (outcome,) = run_ranks(spec, 1, first=slow_disk)
    assert outcome["error"] == "InjectedFault"
    assert (steps(spec), hidden(spec)) == ([4], [])
    load(spec.checkpoints / "step_00000004")


def test_a_rollback_waits_for_the_checkpoint_that_is_being_written(
    text: Path, tmp_path: Path
) -> None:
    """Training is a step further when it must go back: to step 4, which is not on disk yet, and not
    to the start.
    """
    keys = {"on_nan": "rollback", "checkpoint_every": 4, "faults": "nan@rank=0,step=5"}
    spec = make_spec(text, tmp_path, **keys)
    for outcome in run_ranks(spec, 2, first=slow_disk):
        assert "error" not in outcome, outcome
    assert f"Rolling back to {spec.checkpoints}/step_00000004" in spec.log(0).read_text()
    assert steps(spec) == [4, 8]


def test_the_last_checkpoint_is_one_that_is_on_disk(text: Path, tmp_path: Path, slow: None) -> None:
    """A rank 0 that took over the run knows which step was taken, but its predecessor died before
    it was on disk.
    """
    spec = make_spec(text, tmp_path, checkpoint_every=TINY["max_steps"], precision="fp32")
    engine = engine_of(spec)
    engine.fit()
    last = spec.checkpoints / f"step_0000000{TINY['max_steps']}"
    assert last.exists(), "the end waits for it"
    shutil.rmtree(last)
    # A newcomer's; the session that it took over says that the step was saved
    engine.writer = saver_of(spec)
    assert engine.state.session.saved == engine.state.step
    engine.fit()
    assert last.exists()


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_failed_write_is_reported_and_training_goes_on(text: Path, tmp_path: Path) -> None:
    spec, notes = make_spec(text, tmp_path), list[str]()
    saver = saver_of(spec, notes)
    saver.save(ALONE, make(1), final=True)
    spec.checkpoints.rename(tmp_path / "aside")
    spec.checkpoints.write_text("not a folder")
    saver.save(ALONE, make(2))
    assert not saver.busy
    (note,) = notes
    assert note.startswith(
        "warning  checkpoint of step 2 skipped, training goes on: cannot write checkpoint step_0000"
    )
    spec.checkpoints.unlink()  # vanished altogether: the next one makes it anew
    saver.save(ALONE, make(2), final=True)
    assert (saver.committed, steps(spec), len(notes)) == (2, [2], 1)
    assert load(tmp_path / "aside" / "step_00000001").meta["step"] == 1


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.full)])
def test_the_third_failure_in_a_row_ends_all_ranks_alike(
    text: Path, tmp_path: Path, mode: str
) -> None:
    spec = make_spec(
        text, tmp_path, checkpoint_every=2, max_steps=40, checkpoint_mode=mode, keep_checkpoints=9
    )
    spec.checkpoints.rmdir()
    spec.checkpoints.write_text("not a folder")
    outcomes = run_ranks(spec, 2)
    assert [o["error"] for o in outcomes] == ["CheckpointError"] * 2, outcomes
    assert outcomes[0]["message"] == outcomes[1]["message"]
    assert "cannot write checkpoint step_00000006" in outcomes[0]["message"]
    assert len(records(spec)) == 6
    log = spec.log(0).read_text()
    assert log.count("skipped, training goes on") == 2
    assert "checkpoint of step 6 skipped, which ends the run" in log


def test_a_full_disk_costs_a_checkpoint_and_no_step(text: Path, tmp_path: Path) -> None:
    # Until the checkpoint of step 2 is written
    plan = "slow@rank=0,step=4,phase=forward,seconds=2;"
    plan += "disk-full@rank=0,step=4,phase=checkpoint,seconds=3;slow@rank=0,step=6,phase=forward,seconds=5"
    spec = make_spec(
        text, tmp_path, checkpoint_every=2, keep_checkpoints=9, max_steps=8, faults=plan
    )
    outcomes = run_ranks(spec, 2)
    assert not [o for o in outcomes if "error" in o], outcomes
    assert (steps(spec), hidden(spec)) == ([2, 6, 8], [])
    assert re.search(
        r"checkpoint of step 4 skipped, training goes on: .*File too large", spec.log(0).read_text()
    )
    clean = make_spec(text, tmp_path / "clean", max_steps=8)
    run_ranks(clean, 2)
    assert series(spec) == series(clean)


def train_forever(spec: dict[str, Any], done: Any) -> None:
    """Change the state in place all the time, and save it at every step."""
    run = RunSpec.from_dict(spec)
    found, _ = newest_valid(run.checkpoints)
    step, saver, state = found.state.meta["step"] if found else 0, saver_of(run), make(0, 50_000)
    while True:
        step += 1
        state.meta["step"] = step
        for name, tensor in (state.model | state.optimizer).items():
            tensor.fill_(step if name == "w" else step / 2)
        saver.save(ALONE, state)
        while saver.busy:
            state.model["w"].fill_(-1)  # the next step is at work
        saver.news()
        done.value = saver.committed


@pytest.mark.full  # test_sharded_files has it, and test_checkpoint a death before each system call
def test_sigkill_at_any_time_loses_nothing(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path)
    for done in killed_saves(spec.checkpoints, train_forever, spec.to_dict()):
        found, notes = newest_valid(spec.checkpoints)
        assert found
        step = found.state.meta["step"]
        assert done <= step <= done + 1, "committed but not yet told"
        assert found.state.model["w"].eq(step).all(), "of the step that it claims"
        assert found.state.optimizer["exp_avg.w"].eq(step / 2).all()
        assert notes == []


def test_sigterm_leaves_a_complete_last_checkpoint(text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "words.yaml"
    values = TINY | {
        "dataset": str(text),
        "data_dir": str(tmp_path / "cache"),
        "checkpoint_every": 3,
    }
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    flags = ("--config", str(recipe), "--out_dir", str(tmp_path / "runs"), "--max_steps", "100000")
    with Command("nanoray.train", *flags) as process:
        until(lambda: "step     20/" in process.output, process=process)
        process.terminate()
        assert process.wait(200) == 143
    (run,) = (tmp_path / "runs").iterdir()
    step = json.loads((run / "summary.json").read_text())["steps"]
    assert newest_valid(run / "checkpoints")[0].path.name == f"step_{step:08d}"  # type: ignore[union-attr]
    assert not list((run / "checkpoints").glob(".*"))


# -------------------------------------------------------------------------------------------------- only this attempt


def test_an_attempt_that_is_over_writes_nothing(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path).next_attempt()
    write_attempt(replace(spec, attempt=2))
    theirs = spec.checkpoints / ".tmp-step_00000009-2-77"
    theirs.mkdir()
    saver = saver_of(spec)
    with pytest.raises(
        CheckpointError, match=r"^attempt 1 is over: attempt 2 runs now; nothing written$"
    ):
        saver.save(ALONE, make(8), final=True)
    assert (steps(spec), hidden(spec)) == ([], [theirs.name]), (
        "what the other attempt is writing stays"
    )


def freeze_before_the_rename(spec: dict[str, Any]) -> None:
    """Save step 20, and freeze once everything is written and the attempt was found to be the
    present one.
    """
    run, calls = RunSpec.from_dict(spec), iter(range(2))
    save(
        run.checkpoints,
        make(20),
        9,
        "0",
        lambda: os.kill(os.getpid(), signal.SIGSTOP) if next(calls) else None,
    )


@pytest.mark.parametrize("saves", [False, True])
def test_a_process_that_was_frozen_before_its_rename_commits_nothing(
    text: Path, tmp_path: Path, saves: bool
) -> None:
    """The next attempt starts meanwhile. If it saves the same step, with other content, that stays."""
    spec = make_spec(text, tmp_path)
    saver_of(spec).save(ALONE, make(3), final=True)
    old = forkserver.Process(target=freeze_before_the_rename, args=(spec.to_dict(),), daemon=True)
    old.start()
    status = Path(f"/proc/{old.pid}/stat")
    until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
    assert len(hidden(spec)) == 1
    following = spec.next_attempt()
    write_attempt(following)
    assert find_checkpoint(following)[1] == 3
    if saves:
        saver_of(following).save(ALONE, make(20, numel=8), final=True)
    os.kill(old.pid or 0, signal.SIGCONT)
    old.join(60)
    assert old.exitcode == 1, "its rename failed"
    assert steps(spec) == ([3, 20] if saves else [3])
    assert hidden(spec) == []
    newest, notes = newest_valid(spec.checkpoints)
    assert newest
    assert (len(newest.state.model["w"]), notes) == (8 if saves else 64, [])


def test_an_attempt_that_ends_in_mid_write_does_not_commit(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, notes = make_spec(text, tmp_path), list[str]()
    saver = saver_of(spec, notes)
    saver.save(ALONE, make(1), final=True)
    over, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: over.wait(60) and fsync(fd))
    saver.save(ALONE, make(2))
    until(lambda: hidden(spec))
    theirs = spec.checkpoints / ".tmp-step_00000009-1-77"
    theirs.mkdir()
    write_attempt(replace(spec, attempt=1))
    over.set()
    wait_for(saver)
    assert (steps(spec), hidden(spec)) == ([1], [theirs.name])
    with pytest.raises(
        CheckpointError, match=r"^attempt 0 is over: attempt 1 runs now; nothing written$"
    ):
        saver.save(ALONE, make(3))
    assert notes == [
        "warning  checkpoint of step 2 skipped, which ends the run: " + str(saver._outcome)
    ]
    assert isinstance(saver._outcome, AttemptOver)


def test_a_survivor_that_is_writing_commits_as_a_member_of_the_next_attempt(
    text: Path, tmp_path: Path, gate: threading.Event
) -> None:
    spec = make_spec(text, tmp_path)
    saver = saver_of(spec)
    saver.save(ALONE, make(1))
    saver.hold()  # its group broke
    write_attempt(replace(spec, attempt=1))  # the driver
    gate.set()
    time.sleep(1.0)
    assert saver.busy
    assert steps(spec) == [], "it waits to learn whether it is in"
    saver.go_on(spec.next_attempt(), 0)
    wait_for(saver)
    assert steps(spec) == [1]


def seat(rank: int, ranks: int, *said: str) -> Any:
    """A rank's place in a group whose other ranks the test plays; `said` is what rank 0 broadcasts,
    one by one.
    """
    words = iter(said)

    def gather(value: Any) -> list[Any] | None:
        return None if rank else [value, *[type(value)()] * (ranks - 1)]

    def broadcast(value: Any) -> Any:
        return next(words) if rank else value

    return SimpleNamespace(rank=rank, world_size=ranks, gather=gather, broadcast=broadcast)


def part(step: int) -> StateDict:
    state = make(step)
    return replace(state, pieces={"w": Piece.whole("w", (64,), (64,))}, aliases={})


def test_a_part_is_no_checkpoint_of_the_rank_that_becomes_the_first(
    text: Path, tmp_path: Path
) -> None:
    """Rank 0 was lost before it committed, and the ranks that are left save the same step at once."""
    spec = make_spec(text, tmp_path)
    saver = saver_of(spec)
    (tmp_path / "draft").mkdir()
    saver.save(seat(1, 2, str(tmp_path / "draft"), ""), part(4))
    wait_for(saver)
    assert list((tmp_path / "draft").iterdir()), "its part is written"
    saver.hold()
    write_attempt(replace(spec, attempt=1))
    saver.go_on(spec.next_attempt(), 0)
    saver.save(seat(0, 1), part(4), final=True)
    assert steps(spec) == [4]


def test_a_part_that_was_lost_with_its_rank_is_not_waited_for(
    text: Path, tmp_path: Path, gate: threading.Event
) -> None:
    """Rank 0 still writes its own when its group breaks, and when the next one saves."""
    spec, notes = make_spec(text, tmp_path), list[str]()
    saver = saver_of(spec, notes)
    saver.save(seat(0, 2), part(4))
    saver.hold()
    write_attempt(replace(spec, attempt=1))
    saver.go_on(spec.next_attempt(), 0)
    assert saver.busy
    gate.set()
    saver.save(seat(0, 1), part(5), final=True)
    assert steps(spec) == [5]
    (note,) = notes
    assert note.startswith("warning  checkpoint of step 4 skipped, training goes on: not all parts")


def test_ranks_of_an_earlier_command_write_nothing(text: Path, tmp_path: Path) -> None:
    """They may outlive their driver for a while, and another command has gone on with the run
    meanwhile.
    """
    spec = make_spec(text, tmp_path)
    write_attempt(replace(spec, started=spec.started + 1))
    with pytest.raises(
        CheckpointError, match=r"^this command is over: another one continues the run; nothing wr"
    ):
        saver_of(spec).save(ALONE, make(8), final=True)
    assert steps(spec) == []


def test_a_survivor_that_nobody_wants_back_does_not_commit(
    text: Path, tmp_path: Path, gate: threading.Event
) -> None:
    spec = make_spec(text, tmp_path)
    saver = saver_of(spec)
    saver.save(ALONE, make(1))
    saver.hold()
    write_attempt(replace(spec, attempt=1))
    gate.set()
    saver.close()
    assert (steps(spec), hidden(spec)) == ([], [])
    assert not writers_at_work(), "nothing outlives the run"
