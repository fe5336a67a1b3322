"""The search of `nanoray tune`: what it tries, what it recommends, and what it writes.

Machines are functions from a setting to seconds, with noise; real ranks are in
tests/ranks/test_tune_ranks.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoray.config import Config, load_config
from nanoray.errors import ConfigError
from nanoray.forecast.job import Job
from nanoray.forecast.links import Link, Topology
from nanoray.forecast.predict import OnTopology
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.rendezvous import Order
from nanoray.models.gpt import ModelShape
from nanoray.tune.__main__ import newest_search, recipe_of, seconds_of
from nanoray.tune.command import require_words
from nanoray.tune.expect import Expected
from nanoray.tune.may import KNOB_NAMES
from nanoray.tune.result import (
    closing_lines,
    page_of,
    rows_of,
    tuned_values,
    write_results,
)
from nanoray.tune.search import LEAST_RACE_TURNS, LEAST_TURNS, RACE_TURNS, Search
from nanoray.tune.space import (
    KNOBS,
    Choice,
    TunedRun,
    configured,
    left_out,
    options,
    with_settings,
    words,
)
from nanoray.tune.trials import STOPPED, SearchEnded, Trial, Trials

Cost = Callable[[dict[str, Any]], float]  # from the settings of a choice to seconds a step


def here_of(ranks: int = 1, device: str = "cpu", threads: int = 2, **settings: Any) -> TunedRun:
    values = {"precision": "fp32", "attention": "flash", "global_batch_size": 8} | settings
    config = load_config(preset="tiny", overrides=values)
    shape = ModelShape.of(config, 256)
    job = Job(shape, config, config.global_batch_size, "fp32", 8.0)
    return TunedRun(config, ranks, device, threads, threads, gradient_bytes=10**8, job=job)


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
        return Trial(self.turn, step_s, 1 << 20, self.loss_of(dict(choice)), block_s, 3)


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
    assert search.verdict.median == pytest.approx(1.32, rel=0.03)


def test_a_change_that_gains_only_beside_another_one_is_found(tmp_path: Path) -> None:
    def cost(settings: dict[str, Any]) -> float:
        if settings.get("attention") != "plain":
            return 1.0
        return 0.5 if settings.get("micro_batch_size") == 2 else 0.8

    search, _ = run(tmp_path, here_of(), cost)
    assert dict(search.best).items() >= {"attention": "plain", "micro_batch_size": 2}.items()


def test_a_machine_on_which_all_is_equal_gets_no_recommendation(tmp_path: Path) -> None:
    for seed in range(40):
        search, _ = run(tmp_path, here_of(), lambda settings: 1.0, noise=0.1, seed=seed)
        (tmp_path / "tune.jsonl").unlink()
        assert search.best == ()


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
    rows = rows_of(search, None, None)
    assert rows[0].note == ""
    (row,) = [row for row in rows if row.differs == "loss_chunk 256"]
    assert row.note == "its loss is 3.9, and that of the present setting 4"

    # What may change the result is not compared.
    (tmp_path / "b").mkdir()
    other = machine(here, tmp_path / "b", cost=lambda settings: 0.5 if settings else 1.0)
    other.loss_of = lambda settings: 3.0 if "precision" in settings else 4.0
    leave = [name for name in KNOB_NAMES if name != "precision"]
    search = Search(other, here, ("precision",), 1 << 40, leave=leave)
    search.run()
    assert dict(search.best) == {"precision": "bf16"}
    lines = closing_lines(search, rows_of(search, None, None), ("precision",))
    assert any("it changes precision" in line for line in lines)


def test_changes_that_gain_alone_and_fail_in_their_race_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = machine(here_of(), tmp_path, cost=plain_wins)
    search = Search(trials, here_of(), (), 1 << 40)
    races: list[int] = []
    race = search.race

    def second_fails(choices: Sequence[Choice]) -> list[Choice]:
        races.append(len(choices))
        if len(races) == 2:
            trials.loss_of = lambda settings: 3.0 if settings else 4.0
        return race(choices)

    monkeypatch.setattr(search, "race", second_fails)
    search.run()
    assert len(races) == 2
    assert search.best == ()


def test_what_is_decided_is_not_measured_again(tmp_path: Path) -> None:
    """One change gains much, and nothing beside it: no block more than shows that."""

    def cost(settings: dict[str, Any]) -> float:
        return 0.6 if settings.get("attention") == "plain" else 1.0

    search, trials = run(tmp_path, here_of(), cost)
    assert dict(search.best) == {"attention": "plain"}
    # It is confirmed in as many turns as a verdict needs.
    assert search.verdict.turns == LEAST_TURNS
    assert search.verdict.is_clear
    # It is the only change that gains, so it is not raced a second time, alone.
    plain = (("attention", "plain"),)
    beside_plain = [choice for choice in trials.samples if dict(choice).get("attention") == "plain"]
    first_beside = min(trials.samples[choice][0].turn for choice in beside_plain if choice != plain)
    races = [sample.turn for sample in trials.samples[plain] if sample.turn < first_beside]
    assert len(races) <= 1 + LEAST_RACE_TURNS


def test_what_lost_beside_the_best_change_is_not_raced_with_it_again(tmp_path: Path) -> None:
    def cost(settings: dict[str, Any]) -> float:
        return {4: 0.6, 2: 0.63}.get(settings.get("micro_batch_size", 0), 1.0)

    here = here_of(micro_batch_size=1, global_batch_size=4)
    search, trials = run(tmp_path, here, cost)
    assert dict(search.best)["micro_batch_size"] == 4
    turns_of = {
        dict(choice)["micro_batch_size"]: [sample.turn for sample in trials.samples[choice]]
        for choice in trials.samples
        if "micro_batch_size" in dict(choice) and len(choice) == len(search.best)
    }
    beside = [choice for choice in trials.samples if len(choice) > len(search.best)]
    second_pass = min(trials.samples[choice][0].turn for choice in beside)
    assert turns_of[2]
    assert max(turns_of[2]) < second_pass <= max(turns_of[4])


def test_on_a_noisy_machine_a_race_takes_more_turns(tmp_path: Path) -> None:
    def turns_of(noise: float, folder: Path) -> int:
        folder.mkdir()
        trials = machine(here_of(), folder, cost=plain_wins, noise=noise)
        search = Search(trials, here_of(), (), 1 << 40)
        trials.next_turn()
        trials.measure((), 1.0)
        search.race([(("attention", "plain"),)])
        return trials.turn - 1

    assert turns_of(0.01, tmp_path / "quiet") == LEAST_RACE_TURNS
    assert turns_of(0.3, tmp_path / "noisy") == RACE_TURNS


def test_a_setting_that_is_far_slower_leaves_after_one_turn(tmp_path: Path) -> None:
    def cost(settings: dict[str, Any]) -> float:
        return 3.0 if "loss_chunk" in settings else plain_wins(settings)

    _, trials = run(tmp_path, here_of(), cost)
    slow = [choice for choice in trials.samples if choice == (("loss_chunk", 256),)]
    for choice in slow:
        assert len(trials.samples[choice]) == 1


def test_a_spent_budget_ends_the_search_and_recommends_only_what_was_confirmed(
    tmp_path: Path,
) -> None:
    search, trials = run(tmp_path, here_of(), plain_wins, blocks=12)
    assert len(trials.measured) == 12
    assert search.ended == "the budget is spent"
    assert search.best == ()


def test_a_budget_that_ends_in_the_first_turn_confirms_its_leader(tmp_path: Path) -> None:
    """Where each block compiles first, a budget may be no longer than that."""
    here = here_of()
    once = 1 + len(options(here, ()))  # the present setting and each change, a block of each
    search, trials = run(tmp_path, here, plain_wins, blocks=once, reserved=100, noise=0.005)
    assert max(len(samples) for choice, samples in trials.samples.items() if choice) > 1
    assert dict(search.best) == {"attention": "plain"}
    assert search.verdict.turns >= 5


def test_a_search_that_is_stopped_says_so(tmp_path: Path) -> None:
    search, _ = run(tmp_path, here_of(), plain_wins, blocks=5, stops=True)
    assert search.ended == STOPPED
    lines = closing_lines(search, rows_of(search, None, None), ())
    assert any("--resume goes on" in line for line in lines)


def test_a_search_goes_on_from_its_file_without_measuring_again(tmp_path: Path) -> None:
    whole, first = run(tmp_path, here_of(), plain_wins, noise=0.02)
    again = machine(here_of(), tmp_path / "again", cost=plain_wins)
    (tmp_path / "again").mkdir()
    again.read([tmp_path / "tune.jsonl"], "here")
    search = Search(again, here_of(), (), 1 << 40)
    search.run()
    assert again.measured == []
    assert search.best == whole.best != ()
    assert again.spent_s == pytest.approx(first.spent_s)


def test_a_search_that_was_cut_off_ends_as_an_uncut_one(tmp_path: Path) -> None:
    """The noise is that of each block: what the file has is not drawn again."""
    (tmp_path / "a").mkdir()
    _, cut = run(tmp_path / "a", here_of(), plain_wins, blocks=9, stops=True)
    rest = machine(here_of(), tmp_path / "a", cost=plain_wins)
    rest.read([tmp_path / "a" / "tune.jsonl"], "here")
    search = Search(rest, here_of(), (), 1 << 40)
    search.run()
    assert dict(search.best).items() >= {"attention": "plain", "micro_batch_size": 4}.items()
    (tmp_path / "b").mkdir()
    _, whole = run(tmp_path / "b", here_of(), plain_wins)
    assert cut.measured + rest.measured == whole.measured


def test_a_search_of_another_run_or_place_is_not_gone_on_from(tmp_path: Path) -> None:
    first = machine(here_of(), tmp_path)
    first.read([], "here")
    file = tmp_path / "tune.jsonl"
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="for another run: here, and this is there; start a new"):
        machine(here_of(), tmp_path / "b").read([file], "there")
    with pytest.raises(ConfigError, match="for another run: lr; start a new one"):
        machine(here_of(lr=0.5), tmp_path / "b").read([file], "here")
    machine(here_of(name="other"), tmp_path / "b").read([file], "here")


def test_formulas_leave_out_what_is_too_large(tmp_path: Path) -> None:
    here = here_of()
    network = OnTopology(
        Topology(
            ranks_per_node=1, intra=Link(alpha_us=0, bandwidth_gb_per_s=1), inter="fit"
        ).filled(Link(alpha_us=0, bandwidth_gb_per_s=1))
    )
    assert here.job
    expected = Expected(here.job, 1, 2, network)
    small = expected.memory_bytes(configured(here, (("activation_checkpointing", "block"),)))
    present = expected.memory_bytes(here.config)
    assert small < present
    trials = machine(here, tmp_path, cost=plain_wins)
    search = Search(trials, here, (), int(present / 0.9) + 1, expected)
    search.run()
    assert search.predicted_s[()] == pytest.approx(1.0, rel=1e-3)
    assert trials.samples[()]
    tight = Search(machine(here, tmp_path, cost=plain_wins), here, (), present // 2, expected)
    tight.run()
    reasons = [why for why in tight.trials.refused.values() if "by formula" in why]
    assert reasons
    assert "stay free" in reasons[0]


def test_the_calibrated_formula_predicts_the_present_step() -> None:
    here = here_of()
    link = Link(alpha_us=10, bandwidth_gb_per_s=1)
    network = OnTopology(Topology(ranks_per_node=1, intra=link, inter=link))
    assert here.job
    expected = Expected(here.job, 1, 2, network).calibrated(here.config, 0.25)
    assert expected.step_s(here.config) == pytest.approx(0.25, rel=1e-6)
    block = configured(here, (("activation_checkpointing", "block"),))
    assert 0.25 < expected.step_s(block) < 0.36
    assert expected.step_s(configured(here, (("cpus_per_worker", 1.0),))) > 0.4


# ---- what may be tried ---------------------------------------------------------------------------


def knobs(here: TunedRun, *may: str) -> set[str]:
    return {option.knob for option in options(here, may)}


def test_dropout_keeps_what_would_draw_other_masks_out() -> None:
    with_dropout = here_of(dropout=0.1)
    assert knobs(here_of()) >= {"micro_batch", "attention"}
    assert not knobs(with_dropout) & {"micro_batch", "attention", "compile"}
    assert left_out(with_dropout, ()) == {"masks": ["micro_batch", "attention", "compile"]}
    assert knobs(with_dropout, "masks") >= {"micro_batch", "attention"}


def test_batch_norms_keep_the_micro_batch() -> None:
    from dataclasses import replace

    assert "micro_batch" not in knobs(replace(here_of(), has_norms=True))
    assert "micro_batch" in knobs(replace(here_of(), has_norms=True), "norms")


def test_data_in_batches_keep_the_micro_batch_whatever_may_change() -> None:
    from dataclasses import replace

    assert "micro_batch" not in knobs(replace(here_of(), in_batches=True), "norms", "masks")


def test_the_knobs_have_the_names_of_the_flag() -> None:
    assert tuple(knob.name for knob in KNOBS) == KNOB_NAMES
    assert "compile" not in {o.knob for o in options(here_of(), (), ("compile",))}


def test_formats_are_tried_only_where_they_may_change() -> None:
    assert "precision" not in knobs(here_of())
    assert "precision" in knobs(here_of(), "precision")


def test_several_ranks_add_modes_sums_and_layouts() -> None:
    found = options(here_of(ranks=4, global_batch_size=16), ())
    assert {"dp_mode", "buckets", "allreduce", "layout"} <= {option.knob for option in found}
    layouts = [dict(option.choice) for option in found if option.knob == "layout"]
    assert {"tp": 2}.items() <= layouts[0].items() or any("tp" in each for each in layouts)
    # Nothing that is offered is the present setting.
    assert all(option.choice for option in found)


def test_each_option_is_a_configuration_or_refused_by_a_rule() -> None:
    here = here_of(ranks=4, global_batch_size=16)
    possible = 0
    for option in options(here, ("precision", "compression")):
        try:
            config = configured(here, option.choice)
        except ConfigError:
            continue
        assert isinstance(config, Config)
        possible += 1
    assert possible > 15


def test_a_setting_that_is_there_already_is_no_part_of_a_choice() -> None:
    here = here_of()
    there = (("attention", "plain"),)
    assert with_settings(here, there, (("attention", "flash"),)) == ()


def test_choices_are_written_as_users_write_them() -> None:
    choice = (("dp_mode", "fsdp"), ("fsdp_reshard", "grad_op"))
    assert words(choice) == "dp_mode fsdp, fsdp_reshard grad_op"
    assert words(()) == "as it is"
    assert words((("compile", True), ("cpus_per_worker", 2.0))) == "compile true, cpus_per_worker 2"


# ---- what is written -----------------------------------------------------------------------------


def test_tuned_yaml_is_a_recipe_that_any_command_takes(tmp_path: Path) -> None:
    here = here_of(lr=0.002)
    search, _ = run(tmp_path, here, plain_wins)
    rows = rows_of(search, None, None)
    place = "2 x a machine, torch 2"
    lines = closing_lines(search, rows, ())
    write_results(tmp_path, here.config, "mine", search, rows, place, lines)
    loaded = load_config(str(tmp_path / "tuned.yaml"))
    assert (loaded.attention, loaded.micro_batch_size, loaded.lr) == ("plain", 4, 0.002)
    assert loaded.global_batch_size == 8
    assert loaded.name == "mine"
    assert loaded.tuned_for == "2 x a machine, torch 2"


def test_the_page_has_each_setting_and_marks_the_one_that_was_found(tmp_path: Path) -> None:
    search, _ = run(tmp_path, here_of(), plain_wins)
    rows = rows_of(search, None, None)
    page = page_of(search, rows, "a <machine>", closing_lines(search, rows, ()))
    assert "a &lt;machine&gt;" in page
    assert page.count('<tr class="look">') == 1
    assert all(row.differs in page for row in rows)


def test_tuned_yaml_has_no_secrets_and_nothing_of_one_command() -> None:
    config = here_of(env={"TOKEN": "secret"}, out_dir="/somewhere").config
    values = tuned_values(config, "mine", (), "here")
    assert "secret" not in str(values)
    assert "out_dir" not in values


def test_the_table_has_the_fastest_first_and_says_why_others_were_not_trained(
    tmp_path: Path,
) -> None:
    search, _ = run(tmp_path, here_of(), plain_wins)
    rows = rows_of(search, 1e9, 1e12)
    measured = [row for row in rows if row.step_ms]
    ratios = [row.ratio.median for row in measured if row.ratio]
    assert ratios == sorted(ratios, reverse=True)
    assert all(row.note for row in rows if row.step_ms is None)
    assert measured[0].step_ms
    assert measured[0].mfu == pytest.approx(100 * 1e9 / (measured[0].step_ms / 1e3) / 1e12)
    lines = closing_lines(search, rows, ())
    assert any(line.startswith("tuned  ") and "attention plain" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1.5h", 5400.0)]
)
def test_budgets(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "5 m", "-1", "nan", "5d"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time; give 90s"):
        seconds_of(text)


def test_an_unknown_change_of_the_result_is_refused() -> None:
    with pytest.raises(ConfigError, match="may = colour is none of the changes of a result: masks"):
        require_words(may=["colour"])


def test_the_recipe_is_a_preset_a_file_or_an_earlier_search(tmp_path: Path) -> None:
    assert recipe_of(["tiny", "--workers", "2"], "") == ["--preset", "tiny"]
    assert recipe_of(["my.yaml"], "") == ["--config", "my.yaml"]
    assert recipe_of(["--preset", "tiny"], "") == []
    assert recipe_of(["tiny"], "auto") == ["--preset", "tiny"]
    assert newest_search(tmp_path, "tiny") == ""
    for day in ("1", "2"):
        (tmp_path / f"2026-11-0{day}_tune-tiny").mkdir()
        (tmp_path / f"2026-11-0{day}_tune-tiny" / "tune.jsonl").touch()
    assert newest_search(tmp_path, "tiny") == str(tmp_path / "2026-11-02_tune-tiny")
    with pytest.raises(ConfigError, match="is no folder of a search"):
        recipe_of([], str(tmp_path))


def test_a_search_that_ended_early_does_not_say_that_nothing_is_faster(tmp_path: Path) -> None:
    """Where the budget was spent before a comparison, nothing is known."""
    search, _ = run(tmp_path, here_of(), plain_wins, blocks=1, stops=True)
    lines = "\n".join(closing_lines(search, rows_of(search, None, None), ()))
    assert "nothing was shown to be faster" in lines
    assert "--resume goes on" in lines
    (tmp_path / "done").mkdir()
    done, _ = run(tmp_path / "done", here_of(), lambda settings: 1.0)
    assert "nothing is faster" in "\n".join(closing_lines(done, [], ()))


def test_a_script_s_search_is_not_told_to_resume(tmp_path: Path) -> None:
    """--resume belongs to the command."""
    search, _ = run(tmp_path, replace(here_of(), draws=True), plain_wins, blocks=1)
    lines = "\n".join(closing_lines(search, rows_of(search, None, None), ()))
    assert "--resume" not in lines
    assert "budget_s" in lines
