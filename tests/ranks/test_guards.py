"""Nothing that is not finite reaches the weights, and ranks that hold other weights are found,
named and healed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import resolve_batch
from nanoray.errors import NanorayError, StateDiverged, TrainingDiverged
from nanoray.faults.progress import ProgressFile
from nanoray.models.precision import LossScaler
from nanoray.parallel.rendezvous import Order
from nanoray.train.engine import Engine
from nanoray.train.guard.guards import (
    MANY_OVERFLOWS,
    BadStep,
    Guards,
    Verdict,
)
from nanoray.train.guard.replicas import hash_tensors
from nanoray.train.optim.groups import lr_at
from tests.harness.alone import engine_of
from tests.harness.ranks import TINY, make_spec, records, run_ranks, series
from tests.stress.equivalence import WEIGHT_LIMIT

GLOBAL = TINY["global_batch_size"]
# Hides no factor
SGD: dict[str, Any] = {"optimizer": "sgd", "grad_clip": 0.0, "lr": 0.1, "precision": "fp32"}


def weights_of(spec: RunSpec) -> dict[str, Tensor]:
    """The newest checkpoint's weights and optimizer state."""
    newest, damaged = newest_valid(spec.checkpoints)
    assert newest is not None
    assert not damaged
    return newest.state.model | newest.state.optimizer


def by_hand(spec: RunSpec, plan: list[tuple[int, int, bool]]) -> dict[str, Tensor]:
    """Train in a plain loop over (step before, first sample, whether to update); return the
    weights.
    """
    engine = engine_of(spec)
    cfg, gpt, optimizer = spec.config, engine.state.model, engine.state.optimizer
    for step, sample, update in plan:
        engine.seed_dropout(step, 0)
        gpt(*engine.batches.data.train_batch(sample, GLOBAL)).backward()
        if cfg.grad_clip:
            clip_grad_norm_(gpt.parameters(), cfg.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, cfg)
        if update:
            optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in gpt.named_parameters()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a.keys() & b.keys())


def straight(steps: int, left_out: int = 0) -> list[tuple[int, int, bool]]:
    return [(step, step * GLOBAL, step + 1 != left_out) for step in range(steps)]


# Not finite: stop, skip, roll back.


def test_a_nan_between_two_logged_steps_stops_all_ranks_in_that_step(
    text: Path, tmp_path: Path
) -> None:
    spec = make_spec(text, tmp_path, log_every=100, checkpoint_every=4, faults="nan@rank=1,step=6")
    outcomes = run_ranks(spec, 3)
    assert [o["error"] for o in outcomes] == ["TrainingDiverged"] * 3
    (message,) = {o["message"] for o in outcomes}
    assert message.startswith("at step 6 the loss is nan and the gradient norm nan (lr ")
    assert (
        "samples 60 to 71); repeated, it is finite this time: a transient error of the machine"
        in message
    )
    assert (
        "Not finite on rank 1: own loss nan, samples 64 to 67. The update was left out" in message
    )
    newest, _ = newest_valid(spec.checkpoints)
    assert newest is not None
    assert newest.path.name == "step_00000004"
    assert all(torch.isfinite(t).all() for t in weights_of(spec).values())


def test_a_nan_that_comes_again_is_traced_to_its_layer_and_micro_batch(
    text: Path, tmp_path: Path
) -> None:
    """Two micro batches a rank; the second one's forward is the first that breaks, and in the
    replay both do.
    """
    plan = "nan@rank=0,step=3,phase=backward,times=99"
    spec = make_spec(text, tmp_path, grad_accum_steps=2, log_every=100, dropout=0.1, faults=plan)
    outcomes = run_ranks(spec, 2)
    (message,) = {o["message"] for o in outcomes}
    assert "at step 3 the loss is nan" in message
    assert (
        "repeated, it is not finite again: lower lr, set grad_clip, or look at that data" in message
    )
    assert (
        "Not finite on rank 0: own loss nan, samples 24 to 26, first in the output of blocks.1."
        in message
    )


def test_skip_leaves_out_exactly_that_update(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path, on_nan="skip", faults="nan@rank=1,step=5", **SGD)
    for outcome in run_ranks(spec, 2):
        assert outcome["exit_reason"] == "finished", outcome
    ours, reference = weights_of(spec), by_hand(spec, straight(8, left_out=5))
    assert largest_difference(ours, reference) < WEIGHT_LIMIT["sgd"]
    assert largest_difference(ours, by_hand(spec, straight(8))) > 1e-4, (
        "leaving it out changes nothing"
    )
    assert [r["step"] for r in records(spec)] == [*range(1, 9)]
    assert series(spec).keys() == {1, 2, 3, 4, 6, 7, 8}, "a skipped step has no loss"
    assert series(spec, "fault/skipped_steps") == {step: int(step >= 5) for step in range(1, 9)}
    assert "warning  at step 5 the loss is nan" in spec.log(0).read_text()


def test_rollback_goes_on_with_the_data_after_the_bad_step(text: Path, tmp_path: Path) -> None:
    plan = "nan@rank=1,step=6"
    spec = make_spec(text, tmp_path, on_nan="rollback", checkpoint_every=4, faults=plan, **SGD)
    for outcome in run_ranks(spec, 2):
        assert outcome["exit_reason"] == "finished", outcome
    # What steps 5 and 6 had is not seen again
    after = [(step, (step + 2) * GLOBAL, True) for step in range(4, 8)]
    assert (
        largest_difference(weights_of(spec), by_hand(spec, straight(4) + after))
        < WEIGHT_LIMIT["sgd"]
    )
    assert [r["step"] for r in records(spec)] == [*range(1, 9)], (
        "a step stands in metrics.jsonl twice, or not at all"
    )
    assert series(spec, "fault/rollbacks") == {step: int(step > 4) for step in range(1, 9)}
    newest, _ = newest_valid(spec.checkpoints)
    assert newest is not None
    assert newest.state.meta["samples_seen"] == 10 * GLOBAL


def test_in_fp16_an_overflow_is_the_scalers_and_no_event(text: Path, tmp_path: Path) -> None:
    """The loss is finite and its gradients overflow, until the scale has come down far enough. It
    is said.
    """
    spec = make_spec(text, tmp_path, precision="fp16", log_every=8)
    engine, notes = engine_of(spec), list[str]()
    engine.note = notes.append  # type: ignore[method-assign,assignment]
    engine.scaler.load_values({"scale": 2.0**26, "good_steps": 0, "skipped": 0})
    assert engine.fit()["exit_reason"] == "finished"
    skipped = engine.scaler.values()["skipped"]
    assert skipped >= MANY_OVERFLOWS, "the scale was too small for this test"
    assert engine.scaler.values()["scale"] == 2.0 ** (26 - skipped)
    assert engine.guards.metrics()["fault/skipped_steps"] == 0
    assert sum("fp16 gradients overflowed" in note for note in notes) == 1
    assert all(torch.isfinite(p).all() for p in engine.state.model.parameters())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("times", [1, 12])
def test_in_fp16_a_loss_that_is_not_finite_is_named_as_in_fp32(
    text: Path, tmp_path: Path, times: int, later: bool
) -> None:
    """No loss scale cures it: it was computed before the scale came in. The scale stays what it
    was.
    """
    spec = make_spec(
        text, tmp_path, precision="fp16", log_every=8, faults=f"nan@rank=0,step=5,times={times}"
    )
    engine = engine_of(spec)
    engine.guards.reads_each_step = not later
    with pytest.raises(TrainingDiverged, match="at step 5 the loss is nan"):
        engine.fit()
    assert (
        engine.scaler.values()["scale"]
        == LossScaler.INITIAL / 2 ** engine.scaler.values()["skipped"]
    )
    assert engine.scaler.values()["skipped"] <= 1, (
        "of later steps, which were left out, the scaler learned nothing"
    )
    assert all(torch.isfinite(p).all() for p in engine.state.model.parameters())


def test_in_fp16_all_ranks_know_of_one_ranks_loss(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path, precision="fp16", log_every=100, faults="nan@rank=1,step=5")
    outcomes = run_ranks(spec, 2)
    assert [o["error"] for o in outcomes] == ["TrainingDiverged"] * 2
    assert "Not finite on rank 1: own loss nan" in outcomes[0]["message"]


@pytest.mark.parametrize("later", [False, True])
# tf32 is a format of GPUs
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8", "bf16_pure", "fp16_pure"])
def test_in_any_precision_no_bit_of_a_weight_changes_and_layer_and_samples_are_named(
    text: Path, tmp_path: Path, precision: str, later: bool
) -> None:
    """Nor of the optimizer's state. `later`: as on a GPU, where the host looks on logged steps only
    and the update itself must not happen.
    """
    spec = make_spec(
        text, tmp_path, precision=precision, log_every=100, faults="nan@rank=0,step=5,times=99"
    )
    after_4: dict[str, Tensor] = {}

    def wanted() -> Order:
        if engine.state.step == 4:
            after_4.update(tensors_of(engine))
        return Order.GO_ON

    engine = engine_of(spec, wanted)
    engine.guards.reads_each_step = not later
    with pytest.raises(TrainingDiverged, match="at step 5 the loss is nan") as raised:
        engine.fit()
    assert engine.state.step == (7 if later else 4), "in the last step, or in the bad one"
    assert "repeated, it is not finite again" in str(raised.value)
    assert (
        "Not finite on rank 0: own loss nan, samples 48 to 59, first in the output of blocks."
        in str(raised.value)
    )
    now = tensors_of(engine)
    assert now.keys() == after_4.keys()
    assert [name for name in now if not torch.equal(now[name], after_4[name])] == []
    assert not list(spec.checkpoints.iterdir())


def tensors_of(engine: Engine) -> dict[str, Tensor]:
    """Return copies of the weights and of the optimizer's tensors."""
    found = dict(engine.state.model.named_parameters())
    for i, values in enumerate(engine.state.optimizer.state.values()):
        found |= {f"{i}.{key}": value for key, value in values.items() if torch.is_tensor(value)}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def reading_later(spec: RunSpec, wanted: Callable[[], Order] = lambda: Order.GO_ON) -> Engine:
    """An engine that looks at norms on logged steps only, as on a GPU."""
    engine = engine_of(spec, wanted)
    engine.guards.reads_each_step = False
    return engine


def test_where_the_host_looks_later_nothing_moves_until_then(text: Path, tmp_path: Path) -> None:
    spec = make_spec(
        text,
        tmp_path,
        precision="fp32",
        log_every=4,
        dropout=0.1,
        faults="nan@rank=0,step=3,times=2",
    )
    engine = reading_later(spec)
    with pytest.raises(
        TrainingDiverged,
        match=r"at step 3 the loss is nan .* samples 24 to 35\); repeated, it is fin",
    ):
        engine.fit()
    assert engine.state.step == 3, "it is found at the logged step 4"
    expected = by_hand(spec, straight(2))
    assert all(torch.equal(p, expected[name]) for name, p in engine.state.model.named_parameters())


def test_where_the_host_looks_later_skip_still_leaves_out_one_update(
    text: Path, tmp_path: Path
) -> None:
    spec = make_spec(
        text, tmp_path, precision="fp32", log_every=4, on_nan="skip", faults="nan@rank=0,step=3"
    )
    engine = reading_later(spec)
    assert engine.fit()["exit_reason"] == "finished"
    assert engine.guards.metrics()["fault/skipped_steps"] == 1
    expected = by_hand(spec, straight(8, left_out=3))
    assert all(torch.equal(p, expected[name]) for name, p in engine.state.model.named_parameters())


def test_a_stop_between_logged_steps_saves_nothing_bad(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path, precision="fp32", log_every=100, faults="nan@rank=0,step=3")
    engine = reading_later(spec, lambda: Order.STOP if engine.state.step >= 4 else Order.GO_ON)
    with pytest.raises(TrainingDiverged, match="at step 3"):
        engine.fit()
    assert engine.state.step == 5, "it stopped before a logged step"
    assert not list(spec.checkpoints.iterdir())


def test_a_group_that_forms_only_to_save_is_at_the_step_that_is_done(
    text: Path, tmp_path: Path
) -> None:
    """A rank was lost in the middle of step 5. What the rest announces while it saves is of step 4:
    the driver would count step 5 as done, and then as repeated.
    """
    spec = make_spec(text, tmp_path)
    engine = engine_of(spec, lambda: Order.STOP if engine.state.step >= 3 else Order.GO_ON)
    engine.fit()
    assert (ProgressFile.read_all(spec.progress(0)) or ())[:2] == (4, "done")
    engine.state.session.current = 5
    engine.regrouped = True
    engine.fit()
    assert engine.state.step == 4
    assert (ProgressFile.read_all(spec.progress(0)) or ())[:2] == (4, "done")


def guards_of(spec: RunSpec) -> Guards:
    return Guards(spec.config, resolve_batch(spec.config, 1), torch.device("cpu"))


def test_a_spike_of_the_gradient_norm_is_said_once(text: Path, tmp_path: Path) -> None:
    guards, loss = guards_of(make_spec(text, tmp_path, precision="fp32")), torch.tensor(3.0)
    # The first 20 norms are spikes of nothing
    early, late = [90.0, *[1.0, 1.2] * 15, 9.0], [14.0, 20.0, *[1.0] * 5]
    said = []
    for step, norm in enumerate(early + late, start=1):
        verdict = guards.check(
            step, torch.tensor(norm), loss, None, False, pytest.fail, (step - 1) * GLOBAL
        )
        assert verdict.leave_out is None
        assert not verdict.roll_back
        said += [verdict.warning] if verdict.warning else []
    assert guards.metrics()["fault/grad_spikes"] == 2
    assert said == ["gradient norm 14 at step 33 is 12 times its median 1.2 (samples 384 to 395)"]


def test_a_step_that_was_cut_off_is_judged_once(text: Path, tmp_path: Path) -> None:
    """Where the host looks later, a step that is done again must not stand twice among those to
    look at.
    """
    spec = make_spec(text, tmp_path, precision="fp32", on_nan="skip", log_every=8)
    guards, seen = guards_of(spec), []
    guards.reads_each_step = False
    good, bad = torch.tensor(1.0), torch.tensor(float("nan"))

    def explain(step: BadStep) -> str:
        seen.append(step.step)
        return "why"

    # Step 3 broke, and was good then
    for step, norm in [(1, good), (2, good), (3, bad), (3, good), (4, good)]:
        assert guards.check(step, norm, good, None, False, explain, 0).warning is None
    assert guards.decide(True, explain, 0) == Verdict()
    assert seen == []
    for step, norm in [(5, good), (5, bad), (6, good)]:
        guards.check(step, norm, good, None, False, explain, 0)
    assert "The update was left out;" in guards.decide(True, explain, 0).warning, (
        "it counts as one update"
    )
    assert guards.metrics()["fault/skipped_steps"] == 1


# Silent divergence.


@pytest.mark.parametrize("size", [1, 16, 1000, 300_000])  # the last in several chunks
def test_the_hash_sees_flipped_bits_and_swaps(size: int) -> None:
    """Every single bit of a small tensor, and a sample of those of a large one."""
    source = random.Random(size)
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    bits = tensor.view(torch.int32)
    names, (clean,) = hash_tensors({"w": tensor})
    assert names == ["w"]
    flips = [(at, bit) for at in range(size) for bit in range(32)]
    if size > 16:
        flips = source.sample(flips, 200 if size < 100_000 else 20)
    for at, bit in flips:
        mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        bits[at] ^= mask
        assert hash_tensors({"w": tensor})[1] != [clean], (at, bit)
        bits[at] ^= mask
        i, j = source.randrange(size), source.randrange(size)
        if bits[i] != bits[j]:
            bits[[i, j]] = bits[[j, i]]
            assert hash_tensors({"w": tensor})[1] != [clean], (i, j)
            bits[[i, j]] = bits[[j, i]]
    assert hash_tensors({"w": tensor})[1] == [clean]


@pytest.mark.parametrize(
    "world",
    [1, *(pytest.param(world, marks=pytest.mark.full) for world in (2, 3, 4))],
)
def test_clean_runs_raise_no_alarm(text: Path, tmp_path: Path, world: int) -> None:
    spec = make_spec(text, tmp_path, hash_every=1, max_steps=40, dropout=0.1, log_every=40)
    for outcome in run_ranks(spec, world):
        assert outcome["exit_reason"] == "finished", outcome
    last = records(spec)[-1]
    assert [value for key, value in last.items() if key.startswith("fault/")] == [0] * 5
    assert "warning" not in spec.log(0).read_text()


def test_a_flipped_bit_found_before_the_next_step_leaves_no_trace(
    text: Path, tmp_path: Path
) -> None:
    clean = make_spec(text, tmp_path / "clean")
    spec = make_spec(
        text, tmp_path / "flipped", hash_every=1, faults="bitflip@rank=1,step=4,phase=log"
    )
    for outcome in run_ranks(clean, 3) + run_ranks(spec, 3):
        assert outcome["exit_reason"] == "finished", outcome
    said = (
        "after step 4 the state differs from the majority's on rank 1 in blocks.1.attn.proj.weight"
    )
    assert all(said in spec.log(rank).read_text() for rank in range(3))
    assert series(spec, "fault/healed") == {step: int(step > 4) for step in range(1, 9)}
    expected, ours = weights_of(clean), weights_of(spec)
    assert expected.keys() == ours.keys()
    assert all(torch.equal(expected[name], ours[name]) for name in expected)
    assert list(series(spec).values()) == list(series(clean).values())


def test_rank_0_is_healed_like_any_other(text: Path, tmp_path: Path) -> None:
    clean = make_spec(text, tmp_path / "clean")
    spec = make_spec(
        text, tmp_path / "flipped", hash_every=1, faults="bitflip@rank=0,step=4,phase=log,bit=31"
    )
    for outcome in run_ranks(clean, 3) + run_ranks(spec, 3):
        assert outcome["exit_reason"] == "finished", outcome
    assert [r["step"] for r in records(spec)] == [*range(1, 9)]
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights_of(clean).values(), weights_of(spec).values(), strict=True)
    )


def test_a_flipped_bit_found_before_a_checkpoint_is_healed_by_then(
    text: Path, tmp_path: Path
) -> None:
    """Its gradients went into everybody's weights, so the run is another one; but ranks agree, and
    are finite.
    """
    clean = make_spec(text, tmp_path / "clean")
    spec = make_spec(
        text, tmp_path / "flipped", checkpoint_every=6, faults="bitflip@rank=2,step=4,bit=24"
    )
    for outcome in run_ranks(clean, 3) + run_ranks(spec, 3):
        assert outcome["exit_reason"] == "finished", outcome
    assert (
        "after step 6 the state differs from the majority's on rank 2 in "
        in spec.log(0).read_text()
    )
    assert series(spec, "fault/healed")[8] == 1, "after the heal the ranks did not agree"
    assert 0 < largest_difference(weights_of(clean), weights_of(spec)) < 0.1


def test_two_ranks_that_differ_have_no_majority(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path, checkpoint_every=2, faults="bitflip@rank=1,step=5")
    outcomes = run_ranks(spec, 2)
    assert [o["error"] for o in outcomes] == ["StateDiverged"] * 2
    assert "after step 6 the ranks hold different weights" in outcomes[0]["message"]
    assert "no majority agrees: rank 1 in " in outcomes[0]["message"]
    newest, _ = newest_valid(spec.checkpoints)
    assert newest is not None
    assert newest.path.name == "step_00000004", "a state on which the ranks disagree was saved"
    assert StateDiverged.retry
    assert not NanorayError.retry
    assert not TrainingDiverged.retry
