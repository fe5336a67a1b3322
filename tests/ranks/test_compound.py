"""A fault during the recovery from another one: no update is lost or done twice, and no rank takes
a wrong state.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.errors import StateDiverged
from nanoray.train.agree import find_checkpoint
from nanoray.train.guard.audit import Audit
from nanoray.train.guard.replicas import agreed
from tests.harness.alone import engine_of
from tests.harness.axes import equal, final
from tests.harness.elastic import run_elastic
from tests.harness.ranks import make_spec, records, run_ranks, series

RECIPE: dict[str, Any] = {
    "precision": "fp32",
    "lr": 0.01,
    "bucket_mb": 0.02,
    "global_batch_size": 24,
    "max_steps": 14,
}
RECIPE |= {"checkpoint_every": 4, "checkpoint_mode": "sync", "hash_every": 1}


def fired(spec: RunSpec) -> list[str]:
    events = [json.loads(line) for line in (spec.folder / "faults.jsonl").read_text().splitlines()]
    return [event["kind"] for event in events if event["event"] == "injected"]


def ends(outcome: Any) -> list[str]:
    return [
        found.get("error") or found["exit_reason"] for _, found in sorted(outcome.ranks.items())
    ]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("mode", [pytest.param("zero1", marks=pytest.mark.full), "fsdp"])
def test_no_share_is_taken_from_a_mirror_that_has_not_gone_back(
    text: Path, tmp_path: Path, mode: str
) -> None:
    """A rank is lost while a roll-back gives each share to its mirror. The survivors end, and start
    from the disk.
    """
    faults = "nan@rank=0,step=10,phase=forward;kill@rank=1,step=10,phase=exchange_state"
    spec = make_spec(text, tmp_path, **RECIPE, dp_mode=mode, on_nan="rollback", faults=faults)
    outcome = run_elastic(spec, 3, timeout_s=100)
    assert fired(spec) == ["nan", "kill"]
    assert "finished" not in ends(outcome)
    assert max(record["step"] for record in records(spec)) <= 10


@pytest.mark.full
@pytest.mark.parametrize("mode", ["zero1", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_rank_that_was_replaced_takes_part_in_a_roll_back(
    text: Path, tmp_path: Path, mode: str
) -> None:
    """It has not saved anything yet, and the others have."""
    faults = "kill@rank=1,step=9,phase=forward;nan@rank=0,step=10,phase=forward"
    spec = make_spec(text, tmp_path, **RECIPE, dp_mode=mode, on_nan="rollback", faults=faults)
    assert ends(run_elastic(spec, 3, timeout_s=100)) == ["finished"] * 3
    assert fired(spec) == ["kill", "nan"]
    assert records(spec)[-1]["fault/rollbacks"] == 1


def test_a_flipped_bit_is_not_given_to_the_others_when_a_rank_is_lost(
    text: Path, tmp_path: Path
) -> None:
    """Rank 0 differs, and the first of the furthest ranks would give its state to all."""
    clean = make_spec(text, tmp_path / "clean", **RECIPE)
    assert [outcome["exit_reason"] for outcome in run_ranks(clean, 4)] == ["finished"] * 4
    faults = "bitflip@rank=0,step=9,phase=log,bit=28;kill@rank=3,step=9,phase=log"
    spec = make_spec(text, tmp_path / "flip", **RECIPE, faults=faults)
    assert ends(run_elastic(spec, 4, timeout_s=100)) == ["finished"] * 4
    assert sorted(fired(spec)) == ["bitflip", "kill"]
    assert (
        "the state of rank 0 differs from the majority's: a flipped bit" in spec.log(0).read_text()
    )
    assert records(spec)[-1]["fault/healed"] == 1
    assert series(spec) == series(clean)
    assert equal(final(spec), final(clean))


def test_without_a_majority_the_run_goes_back_to_the_disk(text: Path, tmp_path: Path) -> None:
    faults = "bitflip@rank=0,step=9,phase=log,bit=28;kill@rank=2,step=9,phase=log"
    spec = make_spec(text, tmp_path, **RECIPE, faults=faults)
    assert {*ends(run_elastic(spec, 3, timeout_s=100))} == {"StateDiverged"}
    assert StateDiverged.retry
    assert max(record["step"] for record in records(spec)) <= 9


def test_who_agrees() -> None:
    assert agreed([None, 5, 5], 7) == (1, ())
    assert agreed([4, 5, None, 5], 7) == (1, (0,))
    assert agreed([5, 5, 4, 3, 5], 7) == (0, (2, 3))
    for digests in ([4, 5], [4, None, 5, 5, 4], [1, 2, 3]):
        with pytest.raises(
            StateDiverged, match="after step 7 the ranks that are left hold different weights"
        ):
            agreed(digests, 7)


@pytest.mark.full
def test_a_commit_waits_until_the_next_group_is_built(text: Path, tmp_path: Path) -> None:
    """A write is slow; a rank is lost, and another one while the next group is built, after the
    writer may go on.
    """
    faults = (
        "slow@rank=0,step=8,phase=save,seconds=3;kill@rank=1,step=9,phase=forward;kill@rank=2,step=9,phase=shared;"
        "slow@rank=0,step=0,phase=meet,attempt=2,seconds=4"
    )
    how: dict[str, Any] = {
        "hash_every": 0,
        "checkpoint_mode": "async",
        "profile": "12:13",
        "faults": faults,
    }
    how["keep_checkpoints"] = 4
    spec = make_spec(text, tmp_path, **RECIPE | how)
    assert ends(run_elastic(spec, 3, timeout_s=100)) == ["finished"] * 3
    assert fired(spec).count("kill") == 2
    assert (spec.checkpoints / "step_00000008").exists()


@pytest.mark.full
def test_a_roll_back_names_the_damaged_checkpoints_that_it_skips(
    text: Path, tmp_path: Path
) -> None:
    faults = "slow@rank=0,step=10,phase=data,seconds=3;nan@rank=0,step=11,phase=forward"
    spec = make_spec(text, tmp_path, **RECIPE, on_nan="rollback", faults=faults)
    newest = spec.checkpoints / "step_00000008" / "model-00000.safetensors"

    def watch() -> None:
        while not newest.exists():
            time.sleep(0.02)
        time.sleep(0.5)  # the fault holds the loop for longer
        damage(newest)

    threading.Thread(target=watch, daemon=True).start()
    assert [outcome["exit_reason"] for outcome in run_ranks(spec, 1)] == ["finished"]
    said = spec.log(0).read_text()
    assert f"Rolling back to {spec.checkpoints / 'step_00000004'}" in said
    assert "step_00000008" in said.split("Rolling back to")[0].split("warning")[-2]


def test_a_restart_names_the_damaged_checkpoints_of_a_run_that_began_elsewhere(
    text: Path, tmp_path: Path
) -> None:
    first = make_spec(text, tmp_path / "first", **RECIPE | {"max_steps": 4})
    run_ranks(first, 1)
    start = str(first.checkpoints / "step_00000004")
    spec = make_spec(text, tmp_path / "second", **RECIPE | {"max_steps": 8, "resume": start})
    assert [outcome["exit_reason"] for outcome in run_ranks(spec, 1)] == ["finished"]
    damage(spec.checkpoints / "step_00000008" / "model-00000.safetensors")
    path, step, notes = find_checkpoint(spec.next_attempt())
    assert (path, step) == (start, 4)
    (note,) = notes
    assert "step_00000008" in note


def test_an_audit_that_was_interrupted_leaves_nothing_behind(text: Path, tmp_path: Path) -> None:
    """Its hooks would keep the group's wrapper, with its buckets, for as long as the process lives."""
    spec = make_spec(text, tmp_path, **RECIPE, audit_every=1)
    engine = engine_of(spec)
    (audit,) = engine.checks
    assert isinstance(audit, Audit)
    audit._listen()
    assert any(p._backward_hooks for p in engine.state.model.parameters())
    audit.forget()
    assert not any(p._backward_hooks for p in engine.state.model.parameters())
    assert isinstance(next(engine.state.model.parameters()), torch.Tensor)
