"""The search of `nanoray tune`: what it tries, what it recommends, and what it writes.

Machines are functions from a setting to seconds, with noise; real ranks are in
tests/ranks/test_tune_ranks.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoray.cli.forecast.job import Job
from nanoray.config import Config, load_config
from nanoray.config.choose import cannot_compile
from nanoray.lab.tune.__main__ import main
from nanoray.lab.tune.knobs import KNOBS, Choice, TunedRun, configured, memory_bytes, options
from nanoray.lab.tune.result import closing_lines, write_results
from nanoray.lab.tune.search import FINAL_TURNS, Search, is_faster
from nanoray.lab.tune.trials import STOPPED, SearchEnded, Trial, Trials
from nanoray.machine.atomic import read_json
from nanoray.models.gpt import ModelShape
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.rendezvous import Order

Cost = Callable[[dict[str, Any]], float]  # from the settings of a choice to seconds a step


def here_of(ranks: int = 1, device: str = "cpu", cores: int = 2, **settings: Any) -> TunedRun:
    batch = {"global_batch_size": 8, "micro_batch_size": 8, "grad_accum_steps": 0}
    values = {"precision": "fp32", "attention": "flash"} | batch | settings
    config = load_config(preset="tiny", overrides=values)
    shape = ModelShape.of(config, 256)
    job = Job(shape, config, config.global_batch_size, "fp32", 8.0)
    return TunedRun(config, ranks, device, cores, draws=config.dropout > 0, job=job)


@dataclass
class Machine(Trials):
    """Trials on a machine that takes cost(settings), with noise of a known size."""

    cost: Cost = lambda settings: 1.0
    noise: float = 0.0
    blocks: int = 10**9  # after which the budget is spent
    stops: bool = False
    loss_of: Cost = lambda settings: 4.0
    measured: list[Choice] = field(default_factory=list)
    random: random.Random = field(default_factory=random.Random)

    def _require_time(self) -> None:
        if len(self.measured) >= self.blocks:
            raise SearchEnded(STOPPED if self.stops else "the budget is spent")

    def _run_block(self, choice: Choice, config: Config, block_s: float) -> Trial:
        self.measured.append(choice)
        step_s = self.cost(dict(choice)) * self.random.uniform(1 - self.noise, 1 + self.noise)
        return Trial(self.turn, step_s, 1 << 20, self.loss_of(dict(choice)))


def machine(here: TunedRun, folder: Path, seed: int = 0, **how: Any) -> Machine:
    mesh = Mesh(0, 1, 0, torch.device("cpu"), "none", "a test")
    spec: Any = SimpleNamespace(folder=folder)
    subject: Any = SimpleNamespace(main=None)
    trials = Machine(spec, mesh, subject, here, 1 << 40, lambda: Order.GO_ON, **how)
    trials.random.seed(seed)
    return trials


def run(tmp_path: Path, here: TunedRun, cost: Cost, **how: Any) -> tuple[Search, Machine]:
    trials = machine(here, tmp_path, cost=cost, **how)
    search = Search(trials, here, 300.0)
    search.run()
    return search, trials


def plain_wins(settings: dict[str, Any]) -> float:
    """Plain attention gains a fifth, and a micro batch of 4 a tenth more."""
    gain = 1.2 if settings.get("attention") == "plain" else 1.0
    gain *= 1.1 if settings.get("micro_batch_size") == 4 else 1.0
    return 1.0 / gain


def test_two_changes_that_gain_are_found_and_combined(tmp_path: Path) -> None:
    search, _ = run(tmp_path, here_of(), plain_wins, noise=0.005)
    assert dict(search.best)["attention"] == "plain"
    assert dict(search.best)["micro_batch_size"] == 4
    assert search.gain == pytest.approx(1.32, rel=0.03)


def test_a_change_that_gains_only_beside_another_one_is_found(tmp_path: Path) -> None:
    def cost(settings: dict[str, Any]) -> float:
        if settings.get("attention") != "plain":
            return 1.0
        return 0.5 if settings.get("micro_batch_size") == 2 else 0.8

    search, _ = run(tmp_path, here_of(), cost)
    assert dict(search.best).items() >= {"attention": "plain", "micro_batch_size": 2}.items()


def test_what_does_not_go_together_is_refused_and_not_measured(tmp_path: Path) -> None:
    def cost(settings: dict[str, Any]) -> float:
        return 0.5 if "cpus_per_worker" in settings else plain_wins(settings)

    _, trials = run(tmp_path, here_of(), cost)
    assert not any(dict(choice).get("attention") == "cudnn" for choice in trials.samples)


def test_a_setting_with_another_loss_is_not_recommended(tmp_path: Path) -> None:
    """A kernel that computes something else, and is twice as fast."""

    def wrong(settings: dict[str, Any]) -> float:
        return 0.5 if "loss_chunk" in settings else plain_wins(settings)

    here = here_of(block_size=64)
    trials = machine(here, tmp_path, cost=wrong)
    trials.loss_of = lambda settings: 3.9 if "loss_chunk" in settings else 4.0
    search = Search(trials, here, 300.0)
    search.run()
    assert "loss_chunk" not in dict(search.best)
    assert search.best
    (why,) = {why for choice, why in trials.refused.items() if "loss_chunk" in dict(choice)}
    assert why == "its loss is 3.9, and that of the present setting 4"
    assert not any(line.endswith(" loss_chunk 256") for line in closing_lines(search))

    # What may change the result is not compared.
    (tmp_path / "b").mkdir()
    here = here_of(dropout=0.1)
    other = machine(here, tmp_path / "b", cost=lambda settings: 0.5 if settings else 1.0)
    other.loss_of = lambda settings: 3.0 if "attention" in settings else 4.0
    search = Search(other, here, 300.0, may_differ=True, only=["attention"])
    search.run()
    assert dict(search.best) == {"attention": "plain"}
    assert any("losses may differ" in line for line in closing_lines(search))


def test_a_spent_budget_ends_the_search_and_recommends_only_what_was_confirmed(
    tmp_path: Path,
) -> None:
    search, trials = run(tmp_path, here_of(), plain_wins, blocks=12)
    assert len(trials.measured) == 12
    assert search.ended == "the budget is spent"
    assert search.best == ()


def test_a_search_that_is_stopped_has_the_best_setting_so_far(tmp_path: Path) -> None:
    search, trials = run(tmp_path, here_of(), plain_wins, blocks=12, stops=True)
    assert len(trials.measured) == 12
    assert dict(search.best) == {"micro_batch_size": 4}
    assert search.gain == pytest.approx(1.1)


def test_a_search_that_lost_a_rank_ends_as_another_one(tmp_path: Path) -> None:
    """What its file has is not measured again."""
    (tmp_path / "a").mkdir()
    _, cut = run(tmp_path / "a", here_of(), plain_wins, blocks=9, stops=True)
    rest = machine(here_of(), tmp_path / "a", cost=plain_wins)
    rest.read()
    search = Search(rest, here_of(), 300.0)
    search.run()
    assert dict(search.best).items() >= {"attention": "plain", "micro_batch_size": 4}.items()
    (tmp_path / "b").mkdir()
    _, whole = run(tmp_path / "b", here_of(), plain_wins)
    assert cut.measured + rest.measured == whole.measured


def test_a_budget_that_ends_before_the_first_block_leaves_the_present_setting(
    tmp_path: Path,
) -> None:
    search, trials = run(tmp_path, here_of(), plain_wins, blocks=0)
    assert search.best == ()
    assert trials.samples == {}
    assert closing_lines(search)[-1] == "note   the budget is spent; a larger budget looks further"


@pytest.mark.parametrize("budget_s", ["0", "-1", "nan", "inf"])
def test_a_budget_is_a_number_of_seconds_above_0(
    budget_s: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny", "--budget_s", budget_s]) == 2
    error = f"error: budget_s = {float(budget_s):g}; give a number of seconds above 0"
    assert error in capsys.readouterr().err


def test_a_verdict_needs_turns_that_agree() -> None:
    assert is_faster([1.05] * FINAL_TURNS)
    assert is_faster([0.99, *[1.05] * (FINAL_TURNS - 1)])
    assert not is_faster([0.99, 0.99, *[1.05] * (FINAL_TURNS - 2)])
    assert not is_faster([1.01] * FINAL_TURNS), "too little"
    assert not is_faster([2.0] * 5), "too few"


# ---- what may be tried ---------------------------------------------------------------------------


def knobs(here: TunedRun, may_differ: bool = False) -> set[str]:
    return {*options(here, may_differ)}


def test_dropout_keeps_what_would_draw_other_masks_out(tmp_path: Path) -> None:
    with_dropout = here_of(dropout=0.1)
    # A machine without a compiler, or in a folder that it cannot work in, has no such knob.
    drawing = {"micro_batch", "attention"} | ({"compile"} - {cannot_compile("cpu") and "compile"})
    assert knobs(here_of()) >= drawing
    assert knobs(with_dropout) == knobs(here_of()) - drawing
    assert knobs(with_dropout, may_differ=True) == knobs(here_of())
    search, _ = run(tmp_path, with_dropout, plain_wins)
    assert any("not tried: micro_batch, attention" in line for line in closing_lines(search))


def test_a_script_s_batches_keep_the_micro_batch() -> None:
    in_batches = replace(here_of(), keeps_micro_batch=True)
    assert "micro_batch" not in knobs(in_batches, may_differ=True)


def test_layouts_and_modes_are_those_of_several_ranks() -> None:
    assert not knobs(here_of()) & {"dp_mode", "layout", "buckets"}
    here = here_of(ranks=2, micro_batch_size=4)
    assert knobs(here) >= {"dp_mode", "layout", "buckets"}
    for choices in options(here, False).values():
        for choice in choices:
            assert configured(here, choice).global_batch_size == 8
    assert {*options(here, False, ["layout"])} == {"layout"}
    assert {*options(here, False)} <= {*KNOBS}


def test_what_needs_too_much_memory_by_formula_is_not_tried(tmp_path: Path) -> None:
    here = here_of()
    block = (("activation_checkpointing", "block"),)
    assert memory_bytes(here, configured(here, block)) < memory_bytes(here, here.config)
    trials = machine(here, tmp_path, cost=plain_wins)
    trials.memory = memory_bytes(here, here.config) // 2
    Search(trials, here, 300.0).run()
    assert any("by formula, and a rank has" in why for why in trials.refused.values())
    assert len(trials.samples) < sum(len(choices) for choices in options(here, False).values())


# ---- what is written -----------------------------------------------------------------------------


def test_tuned_yaml_is_a_recipe_that_any_command_takes(tmp_path: Path) -> None:
    here = here_of(lr=0.002)
    search, _ = run(tmp_path, here, plain_wins)
    lines = ["Found by `nanoray tune` on a machine", *closing_lines(search)]
    write_results(tmp_path, here.config, "mine", search, lines)
    loaded = load_config(str(tmp_path / "tuned.yaml"))
    assert (loaded.attention, loaded.micro_batch_size, loaded.lr) == ("plain", 4, 0.002)
    assert loaded.global_batch_size == 8
    assert loaded.name == "mine"
    assert (
        (tmp_path / "tuned.yaml").read_text().startswith("# Found by `nanoray tune` on a machine")
    )
    settings = read_json(tmp_path / "tune.json")["settings"]
    assert settings.items() >= {"micro_batch_size": 4, "global_batch_size": 8}.items()


def test_tuned_yaml_has_no_secrets_and_nothing_of_one_command(tmp_path: Path) -> None:
    here = here_of(env={"TOKEN": "secret"}, out_dir="/somewhere")
    search, _ = run(tmp_path, here, plain_wins)
    write_results(tmp_path, here.config, "mine", search, [])
    written = (tmp_path / "tuned.yaml").read_text()
    assert "secret" not in written
    assert "out_dir" not in written
