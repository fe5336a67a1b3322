"""`nanoray tune` on real ranks: every choice trains the same run, and a search ends with a recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanoray.checkpoint.run_folder import RunSpec, write_attempt
from nanoray.config import load_config
from nanoray.errors import ConfigError
from nanoray.parallel.mesh import join
from nanoray.parallel.rendezvous import Order, Rendezvous
from tests.harness.commands import run, torchrun
from tests.harness.ranks import make_spec, run_ranks

if TYPE_CHECKING:
    from nanoray.lab.tune.trials import Trials

# What two ranks may do otherwise, with the same losses
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch_size": 2},
    {"attention": "plain"},
    {"loss_chunk": 32},
    {"activation_checkpointing": "block"},
    {"cpus_per_worker": 1.0},
    {"dp_mode": "ddp_by_hand"},
    {"dp_mode": "zero1"},
    {"dp_mode": "zero2"},
    {"dp_mode": "fsdp"},
    {"bucket_mb": 0.01},
    {"allreduce": "ring"},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2, "dp_mode": "ddp_by_hand", "micro_batch_size": 3},
)


def trials_of(
    spec: RunSpec,
    rendezvous: Rendezvous,
    observers: Sequence[Any] = (),
    wanted: Callable[[], Order] = lambda: Order.GO_ON,
    store: Any = None,
    rejoin: Any = None,
) -> Trials:
    """Return what measures choices, as a search has it. (all ranks)"""
    from nanoray.faults.inject import Injector
    from nanoray.lab.tune.program import here_of
    from nanoray.lab.tune.trials import Trials
    from nanoray.lab.tune.tuned_model import TunedModel
    from nanoray.train.rank import meet_group, prepare_process

    prepare_process(spec, rendezvous)
    mesh = meet_group(Injector(spec.folder / "faults.jsonl"), join, spec, rendezvous, store)
    subject = TunedModel(None, frozenset(), rendezvous)
    here = here_of(spec, mesh, rendezvous, subject)
    trials = Trials(spec, mesh, subject, here, 1e12, wanted)
    trials.read()
    return trials


def as_choice(settings: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(settings.items()))


def measure_choices(
    *rank: Any, choices: Sequence[dict[str, Any]] = CHOICES, **more: Any
) -> dict[str, Any]:
    """Measure each choice once, as a search does. (all ranks)"""
    trials = trials_of(*rank, **more)
    trials.next_turn()
    found = []
    for settings in choices:
        trial = trials.measure(as_choice(settings), 0.01)
        found.append(trial._asdict() if trial else trials.refused[as_choice(settings)])
    return {"found": found, "exit_reason": "finished"}


@pytest.mark.full
def test_every_choice_has_the_losses_of_the_present_setting(text: Path, tmp_path: Path) -> None:
    """Two ranks, float32: another order of sums, and nothing else. They stay alive for all."""
    spec = make_spec(text, tmp_path, precision="fp32", optimizer="sgd", lr=0.5, min_lr=0.1)
    outcomes = run_ranks(spec, 2, train=measure_choices, timeout_s=180)
    assert all("error" not in outcome for outcome in outcomes), outcomes
    found = outcomes[0]["found"]
    assert found == outcomes[1]["found"]  # both ranks decide from the same figures
    by_choice = list(zip(CHOICES, found, strict=True))
    assert [(settings, why) for settings, why in by_choice if isinstance(why, str)] == []
    present = found[0]["loss"]
    assert present > 1
    for settings, trial in by_choice:
        assert trial["loss"] == pytest.approx(present, rel=2e-5), settings
        assert trial["step_s"] > 0
    lines = (spec.folder / "tune.jsonl").read_text().splitlines()
    assert len(lines) == len(CHOICES)


def measure_side_by_side(*rank: Any, **more: Any) -> dict[str, Any]:
    """Measure choices in turns while their arms stay open; count the arms that were made. (all ranks)"""
    from nanoray.train import loop_arm

    made: list[int] = []
    recipe_of = loop_arm.Recipe

    def noted(*given: Any) -> Any:
        made.append(1)
        return recipe_of(*given)

    trials = trials_of(*rank, **more)
    choices = [as_choice(settings) for settings in CHOICES]
    counts = []

    def run_turn(staying: Sequence[Any] = ()) -> None:
        trials.next_turn(staying)
        for choice in choices:
            trials.measure(choice, 0.01)
        counts.append(len(made))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_arm, "Recipe", noted)
        run_turn()
        run_turn(choices)
        run_turn(choices)
        # With less memory than all of them may need together, each block makes its arm.
        trials.memory = 0.0
        choices = choices[:2]
        run_turn(choices)
        assert not trials._open
    samples = [[trial._asdict() for trial in trials.samples[choice]] for choice in trials.samples]
    found = {"samples": samples, "refused": list(trials.refused.values()), "counts": counts}
    return found | {"exit_reason": "finished"}


@pytest.mark.full
def test_arms_stay_while_they_are_compared(text: Path, tmp_path: Path) -> None:
    """Other layouts, shardings and threads, in turn, on ranks that have all of them at once."""
    spec = make_spec(text, tmp_path, precision="fp32", optimizer="sgd", lr=0.5, min_lr=0.1)
    outcomes = run_ranks(spec, 2, train=measure_side_by_side, timeout_s=180)
    assert all("error" not in outcome for outcome in outcomes), outcomes
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["refused"] == []
    n = len(CHOICES)
    assert outcomes[0]["counts"] == [n, 2 * n, 2 * n, 2 * n + 2]
    for number, trials in enumerate(outcomes[0]["samples"]):
        assert len(trials) == (4 if number < 2 else 3)
        first = trials[0]
        for trial in trials[1:3]:
            # What an arm holds beside others, and the losses of later steps, say nothing about it.
            assert (trial["peak_bytes"], trial["loss"]) == (first["peak_bytes"], first["loss"])
            assert trial["step_s"] > 0


# Compiling takes most of the time of a search
NO_COMPILER = {**os.environ, "CXX": "no-such-compiler"}


def flags_of(text: Path, folder: Path) -> list[str]:
    return [
        "--dataset",
        str(text),
        "--data_dir",
        str(text.parent / "cache"),
        "--out_dir",
        str(folder),
        "--device",
        "cpu",
        "--workers",
        "1",
        "--cpus_per_worker",
        "1",
        "--precision",
        "fp32",
    ]


def only_search(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a search, and the lines of its file."""
    (search,) = folder.glob("*_tune-*")
    return search, [json.loads(line) for line in (search / "tune.jsonl").read_text().splitlines()]


def test_a_search_ends_with_a_recipe(text: Path, tmp_path: Path) -> None:
    written = tmp_path / "mine.yaml"
    flags = ["--budget_s", "4", "--write", str(written), *flags_of(text, tmp_path)]
    done = run("nanoray.lab.tune", "tiny", *flags, env=NO_COMPILER)
    assert done.returncode == 0, done.stderr
    assert "tuned  " in done.stdout
    search, lines = only_search(tmp_path)
    assert lines[0]["step_s"] > 0
    assert written.read_text() == (search / "tuned.yaml").read_text()
    tuned = load_config(str(written))
    assert tuned.name == "tiny"


@pytest.mark.full
def test_micro_batch_size_auto_searches_the_micro_batch_alone(text: Path, tmp_path: Path) -> None:
    written = tmp_path / "mine.yaml"
    flags = ["--micro_batch_size", "auto", "--dropout", "0.1", "--write", str(written)]
    flags += ["--budget_s", "4", *flags_of(text, tmp_path)]
    done = run("nanoray.lab.tune", "tiny", *flags, env=NO_COMPILER)
    assert done.returncode == 0, done.stderr
    _, lines = only_search(tmp_path)
    for line in lines:
        assert {key for key, _ in line["choice"]} <= {"micro_batch_size"}
    tuned = load_config(str(written))
    assert tuned.micro_batch_size in (1, 2, 3, 4, 6, 12)
    assert not tuned.micro_batch_search


FULL = """
import sys, torch
real = torch.nn.functional.cross_entropy
def short(logits, *args, **kwargs):
    if len(logits) > 4 * 32:  # more than four sequences
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return real(logits, *args, **kwargs)
torch.nn.functional.cross_entropy = short
from nanoray.lab.tune.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def _little_memory() -> None:
    """Let rank 1 run out of memory with its whole share at once."""
    from nanoray.parallel.plan import Plan

    forward_backward = Plan.forward_backward

    def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan: Any = self
        if plan._mesh.rank == 1 and plan._accum == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward_backward(self, *args, **kwargs)

    Plan.forward_backward = full  # type: ignore[method-assign]


@pytest.mark.full
def test_ranks_begin_again_without_what_did_not_fit(text: Path, tmp_path: Path) -> None:
    """The others wait for the rank in a collective: all end, and a restart leaves the choice out."""
    batch = {"micro_batch_size": 2, "global_batch_size": 12}
    spec = make_spec(text, tmp_path, **batch)
    # In a test the process of a rank that has failed lives on, so the other waits for this long
    spec = replace(spec, config=spec.config.model_copy(update={"timeout_s": 5.0}))
    choices = ({}, {"micro_batch_size": 6})
    measure = partial(measure_choices, choices=choices)
    outcomes = run_ranks(spec, 2, train=measure, first=_little_memory)
    assert outcomes[1]["error"] == "OutOfMemory"
    assert "micro_batch_size 6: out of memory" in outcomes[1]["message"]

    again = spec.next_attempt()
    write_attempt(again)
    outcomes = run_ranks(again, 2, train=measure)
    assert all("error" not in outcome for outcome in outcomes), outcomes
    trained, refused = outcomes[0]["found"]
    assert trained["step_s"] > 0
    assert "out of memory" in refused


@pytest.mark.full
def test_a_choice_that_runs_out_of_memory_is_left_out(text: Path, tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(FULL)
    flags = ["--micro_batch_size", "2", "--budget_s", "10", "--only", "micro_batch"]
    flags += flags_of(text, tmp_path / "out")
    done = run(str(tmp_path / "full.py"), "tiny", *flags, env=NO_COMPILER)
    assert done.returncode == 0, done.stderr
    _, lines = only_search(tmp_path / "out")
    short = [line for line in lines if "out of memory" in line.get("refused", "")]
    sizes = {dict(line["choice"])["micro_batch_size"] for line in short}
    assert sizes == {6, 12}


def test_a_search_whose_present_setting_fails_says_so_and_leaves_nothing_half_done(
    text: Path, tmp_path: Path
) -> None:
    (tmp_path / "full.py").write_text(FULL)
    flags = ["--micro_batch_size", "6", "--budget_s", "10", *flags_of(text, tmp_path / "out")]
    done = run(str(tmp_path / "full.py"), "tiny", *flags, env=NO_COMPILER)
    assert done.returncode == ConfigError.exit_code, done.stdout + done.stderr
    assert "the present setting cannot be trained: " in done.stderr
    assert not list((tmp_path / "out").glob("*/arms"))


SCRIPT = """
import torch
from torch import nn
import nanoray

calls = []

def main(run):
    calls.append(run.config.cpus_per_worker)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    engine = nanoray.RuntimeEngine(model, optimizer, run, loss_fn=nn.functional.mse_loss)
    engine.fit(data, steps=20)

config = {"global_batch_size": 32, "out_dir": OUT, "device": "cpu"}
tuned = nanoray.tune(main, config, budget_s=6, may_differ=True, ray=False)
assert len(calls) > 2  # once for each block
# The program goes on: it can train with what was found.
assert nanoray.launch(main, config | tuned, ray=False) == 0
print("and on", len(calls))
"""


@pytest.mark.full
def test_a_script_s_own_model_is_tuned_and_trained(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("OUT", repr(str(tmp_path / "out"))))
    done = run(str(script), env=NO_COMPILER)
    assert done.returncode == 0, done.stderr
    assert "and on" in done.stdout
    _, lines = only_search(tmp_path / "out")
    assert any("micro_batch_size" in dict(line["choice"]) for line in lines)


@pytest.mark.full
def test_a_script_under_torchrun_has_the_result_on_every_rank(tmp_path: Path) -> None:
    """Each rank's process goes on with the same settings; only rank 0 has made the folder."""
    text = SCRIPT.replace("OUT", repr(str(tmp_path / "out")))
    text = text.replace("budget_s=6", "budget_s=2").replace("assert len(calls) > 2", "assert calls")
    text += '\nprint("found", tuned)\n'
    script = tmp_path / "script.py"
    script.write_text(text)
    done = torchrun(2, str(script), env=NO_COMPILER)
    assert [rank.returncode for rank in done] == [0, 0], done
    first, second = (
        next(line for line in rank.stdout.splitlines() if line.startswith("found")) for rank in done
    )
    assert first == second
