"""The search of `nanoray tune`: what it tries, what it recommends, and what it writes.

Machines are functions from a setting to seconds, with noise; real ranks are in
tests/ranks/test_tune_ranks.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoray.cli.forecast.job import Job
from nanoray.config import Config, load_config
from nanoray.config.choose import cannot_compile
from nanoray.lab.tune.knobs import (
    ALWAYS,
    Choice,
    TunedRun,
    configured,
    left_out,
    memory_bytes,
    options,
)
from nanoray.lab.tune.request import KNOB_NAMES, MASKS, NORMS
from nanoray.lab.tune.result import closing_lines, tuned_values, write_results
from nanoray.lab.tune.search import FINAL_TURNS, Search, is_faster
from nanoray.lab.tune.trials import STOPPED, SearchEnded, Trial, Trials
from nanoray.models.gpt import ModelShape
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.rendezvous import Order

Cost = Callable[[dict[str, Any]], float]  # from the settings of a choice to seconds a step


def here_of(ranks: int = 1, device: str = "cpu", threads: int = 2, **settings: Any) -> TunedRun:
    values = {"precision": "fp32", "attention": "flash", "global_batch_size": 8} | settings
    config = load_config(preset="tiny", overrides=values)
    shape = ModelShape.of(config, 256)
    job = Job(shape, config, config.global_batch_size, "fp32", 8.0)
    matters = ALWAYS | {MASKS} if config.dropout else ALWAYS
    return TunedRun(config, ranks, device, threads, threads, matters=matters, job=job)


@dataclass
class Machine(Trials):
    """Trials on a machine that takes cost(settings), with noise of a known size."""

    cost: Cost = lambda settings: 1.0
    noise: float = 0.0
    blocks: int = 10**9  # after which the budget is spent
    reserved: int = 0  # blocks beyond, for what the reserve is kept for
    stops: bool = False
    loss_of: Cost = lambda settings: 4.0
    measured: list[Choice] = field(default_factory=list)
    random: random.Random = field(default_factory=random.Random)

    def _require_time(self) -> None:
        if len(self.measured) >= self.blocks + (0 if self.reserve_s else self.reserved):
            raise SearchEnded(STOPPED if self.stops else "the budget is spent")

    def _run_block(self, choice: Choice, config: Config, block_s: float) -> Trial:
        self.measured.append(choice)
        step_s = self.cost(dict(choice)) * self.random.uniform(1 - self.noise, 1 + self.noise)
        return Trial(self.turn, step_s, 1 << 20, self.loss_of(dict(choice)))


def machine(here: TunedRun, folder: Path, seed: int = 0, **how: Any) -> Machine:
    mesh = Mesh(0, 1, 0, torch.device("cpu"), "none", "a test")
    spec: Any = SimpleNamespace(folder=folder)
    subject: Any = SimpleNamespace(keeps_tasks=False)
    trials = Machine(
        spec, mesh, subject, here, 300.0, lambda: Order.GO_ON, lambda line: None, **how
    )
    trials.random.seed(seed)
    return trials


def run(
    tmp_path: Path, here: TunedRun, cost: Cost, may: tuple[str, ...] = (), **how: Any
) -> tuple[Search, Machine]:
    trials = machine(here, tmp_path, cost=cost, **how)
    search = Search(trials, here, may, 1 << 40)
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
    assert median(search.verdict) == pytest.approx(1.32, rel=0.03)


def test_a_change_that_gains_only_beside_another_one_is_found(tmp_path: Path) -> None:
    def cost(settings: dict[str, Any]) -> float:
        if settings.get("attention") != "plain":
            return 1.0
        return 0.5 if settings.get("micro_batch_size") == 2 else 0.8

    search, _ = run(tmp_path, here_of(), cost)
    assert dict(search.best).items() >= {"attention": "plain", "micro_batch_size": 2}.items()


def test_what_does_not_go_together_is_refused_and_not_measured(tmp_path: Path) -> None:
    search, trials = run(tmp_path, here_of(precision="bf16"), plain_wins, may=("precision",))
    assert not any(dict(choice).get("attention") == "cudnn" for choice in trials.samples)
    assert search.best


def test_a_setting_with_another_loss_is_not_recommended(tmp_path: Path) -> None:
    """A kernel that computes something else, and is twice as fast."""

    def wrong(settings: dict[str, Any]) -> float:
        return 0.5 if "loss_chunk" in settings else plain_wins(settings)

    here = here_of(block_size=64)
    trials = machine(here, tmp_path, cost=wrong)
    trials.loss_of = lambda settings: 3.9 if "loss_chunk" in settings else 4.0
    search = Search(trials, here, (), 1 << 40)
    search.run()
    assert "loss_chunk" not in dict(search.best)
    assert search.best
    (why,) = {why for choice, why in trials.refused.items() if "loss_chunk" in dict(choice)}
    assert why == "its loss is 3.9, and that of the present setting 4"
    assert not any(line.endswith(" loss_chunk 256") for line in closing_lines(search))

    # What may change the result is not compared.
    (tmp_path / "b").mkdir()
    other = machine(here, tmp_path / "b", cost=lambda settings: 0.5 if settings else 1.0)
    other.loss_of = lambda settings: 3.0 if "precision" in settings else 4.0
    leave = [name for name in KNOB_NAMES if name != "precision"]
    search = Search(other, here, ("precision",), 1 << 40, leave=leave)
    search.run()
    assert dict(search.best) == {"precision": "bf16"}
    lines = closing_lines(search)
    assert any("it changes precision" in line for line in lines)


def test_a_spent_budget_ends_the_search_and_recommends_only_what_was_confirmed(
    tmp_path: Path,
) -> None:
    search, trials = run(tmp_path, here_of(), plain_wins, blocks=12)
    assert len(trials.measured) == 12
    assert search.ended == "the budget is spent"
    assert search.best == ()


def test_a_search_that_lost_a_rank_ends_as_another_one(tmp_path: Path) -> None:
    """What its file has is not measured again."""
    (tmp_path / "a").mkdir()
    _, cut = run(tmp_path / "a", here_of(), plain_wins, blocks=9, stops=True)
    rest = machine(here_of(), tmp_path / "a", cost=plain_wins)
    rest.read()
    search = Search(rest, here_of(), (), 1 << 40)
    search.run()
    assert dict(search.best).items() >= {"attention": "plain", "micro_batch_size": 4}.items()
    (tmp_path / "b").mkdir()
    _, whole = run(tmp_path / "b", here_of(), plain_wins)
    assert cut.measured + rest.measured == whole.measured


def test_a_verdict_needs_turns_that_agree() -> None:
    assert is_faster([1.05] * FINAL_TURNS)
    assert is_faster([0.99, *[1.05] * (FINAL_TURNS - 1)])
    assert not is_faster([0.99, 0.99, *[1.05] * (FINAL_TURNS - 2)])
    assert not is_faster([1.01] * FINAL_TURNS), "too little"
    assert not is_faster([2.0] * 5), "too few"


# ---- what may be tried ---------------------------------------------------------------------------


def knobs(here: TunedRun, *may: str) -> set[str]:
    return set(options(here, may).values())


def test_dropout_keeps_what_would_draw_other_masks_out() -> None:
    with_dropout = here_of(dropout=0.1)
    assert knobs(here_of()) >= {"micro_batch", "attention"}
    assert not knobs(with_dropout) & {"micro_batch", "attention", "compile"}
    # A machine without a compiler, or in a folder that it cannot work in, has no such knob.
    compiles = [] if cannot_compile("cpu") else ["compile"]
    assert left_out(with_dropout, ()) == {"masks": ["micro_batch", "attention", *compiles]}
    assert knobs(with_dropout, "masks") >= {"micro_batch", "attention"}


def test_norms_and_batches_of_a_script_keep_the_micro_batch() -> None:
    with_norms = replace(here_of(), matters=ALWAYS | {NORMS})
    assert "micro_batch" not in knobs(with_norms)
    assert "micro_batch" in knobs(with_norms, "norms")
    in_batches = replace(here_of(), in_batches=True)
    assert "micro_batch" not in knobs(in_batches, "norms", "masks")


def test_what_needs_too_much_memory_by_formula_is_not_tried(tmp_path: Path) -> None:
    here = here_of()
    block = (("activation_checkpointing", "block"),)
    assert memory_bytes(here, configured(here, block)) < memory_bytes(here, here.config)
    trials = machine(here, tmp_path, cost=plain_wins)
    Search(trials, here, (), memory_bytes(here, here.config) // 2).run()
    assert any("by formula, and a rank has" in why for why in trials.refused.values())
    assert len(trials.samples) < len(options(here, ()))


# ---- what is written -----------------------------------------------------------------------------


def test_tuned_yaml_is_a_recipe_that_any_command_takes(tmp_path: Path) -> None:
    here = here_of(lr=0.002)
    search, _ = run(tmp_path, here, plain_wins)
    place = "2 x a machine, torch 2"
    lines = closing_lines(search)
    write_results(tmp_path, here.config, "mine", search, place, lines)
    loaded = load_config(str(tmp_path / "tuned.yaml"))
    assert (loaded.attention, loaded.micro_batch_size, loaded.lr) == ("plain", 4, 0.002)
    assert loaded.global_batch_size == 8
    assert loaded.name == "mine"
    assert f"# Found by `nanoray tune` on {place}" in (tmp_path / "tuned.yaml").read_text()


def test_tuned_yaml_has_no_secrets_and_nothing_of_one_command() -> None:
    config = here_of(env={"TOKEN": "secret"}, out_dir="/somewhere").config
    values = tuned_values(config, "mine", ())
    assert "secret" not in str(values)
    assert "out_dir" not in values
