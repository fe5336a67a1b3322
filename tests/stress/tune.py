"""`python -m tests.stress tune`: what `nanoray tune` finds, beside the present setting and a full grid.

    search    as `nanoray tune` does, on one rank
    grid      every combination of what the search may change: one turn of all, then more turns of the
              fastest ones
    compared  the present setting, the one that was found and the grid's best, in turns of their own
    equal     50 steps of SGD with the present setting and with the one that was found: their losses

Subjects are recipes, and two models of a script: a ResNet, and torch's TransformerEncoder. Of
recipes for CPUs dropout is off, since otherwise the micro batch stays. `small micros` is
shakespeare-cpu with micro batches of 1: a recipe that is far from the best. gpt2-124m, on random
tokens, needs a GPU. Compiling is left out of search and grid, but for --compile: on a CPU each
combination would compile for half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.benchmark import Benchmark, Number, ranks_for
from nanoray.bench.harness.figure import Figure, Panel, bars, with_values
from nanoray.bench.harness.processes import scratch_folder
from nanoray.bench.harness.rank_pool import add_where_flags, where_from
from nanoray.bench.harness.report import Emit, Record, Report, say
from nanoray.bench.harness.table import Table, TableColumn, count_of_rounds, names
from nanoray.bench.harness.trainings import add_data_flags, chosen, data_flags, rotated
from nanoray.bench.ladder import random_tokens
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import load_config
from nanoray.config.load import make_config
from nanoray.data.dataset import script_data
from nanoray.data.prepare import prepare
from nanoray.machine.gpus import discover_gpus

if TYPE_CHECKING:
    from nanoray.lab.tune.knobs import Choice, TunedRun
    from nanoray.lab.tune.trials import Trials
    from nanoray.lab.tune.tuned_model import TunedModel
    from nanoray.parallel.mesh import Mesh
    from nanoray.script.run import Run

PRESENT = "as it is"
TUNED = "tuned"
BEST = "best of the grid"
STEP = "step"
SECONDS = "seconds"
TRIED = "settings"
LOSS = "loss"
EQUAL_STEPS = 50
EQUAL = 2e-5  # between losses, relative
FINALISTS = 8  # of the grid, that get more turns
GRID_TURNS = 5
SIGN_EVERY = 10  # settings of a grid: a rank that is silent for ten minutes counts as failed
LONGEST_S = 1.0  # of steps in a block of the fastest ones
GPT2 = "gpt2-124m"
SMALL = "small micros"
GPT2_TOKENS = 50257  # its vocabulary matters for speed, its text does not: random tokens do
ON_CPU = {"precision": "fp32", "dropout": 0.0}
RECIPES: dict[str, Record] = {  # a preset, or one that is named, and what is changed of it
    "shakespeare-cpu": ON_CPU,
    SMALL: ON_CPU | {"preset": "shakespeare-cpu", "micro_batch_size": 1},
    "shakespeare-char": ON_CPU | {"global_batch_size": 4},
    "moe-tiny": ON_CPU,
    GPT2: {"tokenizer": "auto", "global_batch_size": 96, "micro_batch_size": 12},
}
SCRIPTS = ("resnet", "encoder")
SUBJECTS = (*RECIPES, *SCRIPTS)


# What, metric, unit, values, note, and how many are wrong
Row = tuple[str, str, str, Any, str, int | None]


# The models of scripts.


def resnet(run: Run) -> None:
    """Train a ResNet of eight layers on random images."""
    import torch
    from torch import nn

    from nanoray.models.resnet import ResNet, ResNetShape
    from nanoray.script.engine import RuntimeEngine

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ResNet(ResNetShape(8, 1, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.net(x)
            return logits

    source = torch.Generator().manual_seed(0)
    images = torch.randn(256, 3, 32, 32, generator=source)
    labels = torch.randint(10, (256,), generator=source)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(images, labels)
    RuntimeEngine(model, optimizer, run, loss_fn=nn.functional.cross_entropy).fit(data)


def encoder(run: Run) -> None:
    """Train torch's TransformerEncoder to reproduce its inputs."""
    import torch
    from torch import nn

    from nanoray.script.engine import RuntimeEngine

    source = torch.Generator().manual_seed(0)
    x = torch.randn(256, 32, 64, generator=source)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(x, x)
    RuntimeEngine(model, optimizer, run, loss_fn=nn.functional.mse_loss).fit(data)


MAINS: dict[str, Callable[[Run], None]] = {"resnet": resnet, "encoder": encoder}


# What is shown.


def _arm(subject: str, what: str) -> str:
    return f"{subject}: {what}"


def draw_ratios(axes: Any, report: Report) -> None:
    bars(axes, with_values(report, STEP, ratios=True), quartiles=True, color="0.6")
    axes.axvline(1.0, color="C3", linewidth=1)


class TuneBenchmark(Benchmark):
    """Compare what a search finds with the present setting and a full grid."""

    # Wrong: losses that differ from the present setting's by more than EQUAL in float32, and by
    # more than rounding explains in another precision, relative
    numbers = (
        Number("rounds", "turns of the last comparison", usual=9, few=2),
        Number("budget_s", "seconds of a search", 600.0, 2.0),
        Number(
            "most", "settings of a grid, evenly cut from larger ones; 0: no grid", 400, zero=True
        ),
    )
    tables = (
        Table(
            STEP,
            (
                names("setting"),
                TableColumn("step, ms", STEP, "quartiles"),
                TableColumn(
                    "what differs", lambda report, arm, spread: _note(report, arm), left=True
                ),
                count_of_rounds(STEP),
            ),
        ),
        Table(
            TRIED,
            (
                names("which"),
                TableColumn("settings measured", TRIED),
                TableColumn("seconds", SECONDS),
                TableColumn("losses apart, relative", LOSS, optional=True),
            ),
        ),
    )
    figure = Figure(
        (Panel(draw_ratios, {"xlabel": "time of a step beside the other, quartiles"}),),
        size=(9, 4.5),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser, cpu_workers=1)
        which = f"which of {', '.join(SUBJECTS)} [all]"
        parser.add_argument("--subjects", default="all", metavar="A,B", help=which)
        parser.add_argument("--compile", action="store_true", help="try compiling, too")
        add_data_flags(parser)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Search, walk the grid, and compare, for each subject."""
        subjects = chosen(args.subjects, SUBJECTS, "subject")
        where = where_from(args)
        if GPT2 in subjects and not discover_gpus():
            subjects = [subject for subject in subjects if subject != GPT2]
            arm = _arm(GPT2, PRESENT)
            report.add(arm, STEP, "ms", (), skipped="its search takes hours on a CPU")
        for subject in subjects:
            with (
                scratch_folder() as folder,
                ranks_for(report, where, partial(_add_targets, report, subject)) as pool,
            ):
                spec = _open(subject, args, folder)
                order = {
                    "subject": subject,
                    "spec": spec.to_dict(),
                    "rounds": args.rounds,
                    "most": min(args.most, 4) if args.quick else args.most,
                    "budget_s": args.budget_s,
                    "block_s": 0.05 if args.quick else LONGEST_S,
                    "compile": args.compile,
                }
                for event in pool.run("tests.stress.tune:tune_rank", order):
                    say(f"{subject}  {event['line']}")
                    for what, *row, wrong in event["rows"]:
                        report.add(_arm(subject, what), *row, wrong=wrong)


def _note(report: Report, arm: str) -> str:
    row = report.row(arm, STEP)
    return row.note if row else ""


def _open(subject: str, args: argparse.Namespace, folder: Path) -> RunSpec:
    """Open the run that is tuned; it is never trained."""
    started = time.time()
    if subject in RECIPES:
        values = {"tensorboard": False, "out_dir": str(folder)} | data_flags(args)
        values |= RECIPES[subject]
        if subject == GPT2:
            values["dataset"] = str(random_tokens(folder / "random-tokens", GPT2_TOKENS))
        preset = str(values.pop("preset", subject))
        config = load_config(preset=preset, overrides=values)
        return open_run(config, prepare(config), started)
    from nanoray.script.settings import DEFAULTS

    values = DEFAULTS | {
        "name": subject,
        "precision": "fp32",
        "device": "cpu",
        "out_dir": str(folder),
        "micro_batch_size": 0,
        "global_batch_size": 8 if args.quick else 32,
    }
    return open_run(make_config(values), script_data(), started)


def _add_targets(report: Report, subject: str) -> None:
    """Add the ratios and targets of one subject, as far as it has come."""
    tuned, grid = _arm(subject, "search"), _arm(subject, "grid")
    for other, limit in ((BEST, 1.05), (PRESENT, 1.0)):
        row = report.compare(_arm(subject, TUNED), _arm(subject, other), STEP)
        if row:
            report.add_target(f"{subject}: step, tuned / {other}", row, "<=", limit)
    row = report.compare(tuned, grid, SECONDS)
    if row:
        report.add_target(f"{subject}: seconds, search / grid", row, "<=", 0.1)


# What is measured, on every rank.


def tune_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Search, walk the grid, and compare. (all ranks)"""
    import torch

    from nanoray.lab.tune.knobs import KNOBS, words
    from nanoray.lab.tune.program import USED, here_of
    from nanoray.lab.tune.search import Search
    from nanoray.lab.tune.trials import Trials
    from nanoray.lab.tune.tuned_model import TunedModel
    from nanoray.parallel.rendezvous import Order, Rendezvous
    from nanoray.train.loop_arm import memory_of_rank, same_loss

    spec = RunSpec.from_dict(order["spec"])
    place = Rendezvous(
        rank=mesh.rank,
        world_size=mesh.world_size,
        local_world_size=mesh.world_size,
        threads=torch.get_num_threads(),
    )
    given = frozenset({"global_batch_size"})
    subject = TunedModel(MAINS.get(order["subject"]), given, place)
    here = here_of(spec, mesh, place, subject)
    memory = USED * memory_of_rank(mesh)

    def trials_in(name: str) -> Trials:
        folder = spec.folder / name
        folder.mkdir(exist_ok=True)
        own = replace(spec, config=here.config, folder=folder)
        return Trials(own, mesh, subject, here, memory, lambda: Order.GO_ON)

    # The search
    only = [name for name in KNOBS if order["compile"] or name != "compile"]
    trials = trials_in("search")
    search = Search(trials, here, order["budget_s"], True, only, lambda line: None)
    began = time.monotonic()
    tuned = search.run()
    trials.next_turn()  # closes what is open
    spent_s = time.monotonic() - began
    apart = _losses_apart(mesh, spec, subject, here, tuned)
    # On a GPU, in 16 bits, a run's losses are not even those of the same run again.
    precision = here.config.precision
    most_apart = EQUAL if precision == "fp32" else same_loss(precision)
    after = f"after {EQUAL_STEPS} steps of SGD"
    row = ("search", LOSS, "", apart, after, int(apart > most_apart))
    emit(_tried("search", trials, spent_s, tuned, [row]))

    three = {PRESENT: (), TUNED: tuned}
    if order["most"]:
        choices = _combinations(here, only, order["most"])
        turns = min(GRID_TURNS, order["rounds"])
        grid = trials_in("grid")
        three[BEST] = _walk_grid(grid, choices, turns, order["block_s"], emit)

    # Side by side, in turns of their own
    last = trials_in("compared")
    times: dict[str, list[float]] = {name: [] for name in three}
    for turn in range(order["rounds"]):
        last.next_turn()
        for name in rotated(list(three), turn):
            trial = last.measure(three[name], order["block_s"])
            assert trial is not None, last.refused
            times[name].append(1e3 * trial.step_s)
    medians_ms = ", ".join(f"{name} {statistics.median(ms):.2f} ms" for name, ms in times.items())
    rows: list[Row] = []
    for name, ms in times.items():
        rows.append((name, STEP, "ms", ms, words(three[name]), None))
    emit({"line": medians_ms, "rows": rows})


def _tried(what: str, trials: Trials, spent_s: float, best: Choice, more: list[Row]) -> Record:
    """Return the event of what was tried, and what was the best of it."""
    from nanoray.lab.tune.knobs import words

    count = len(trials.samples)
    rows: list[Row] = [
        (what, TRIED, "", count, words(best), None),
        (what, SECONDS, "s", spent_s, "of all blocks", None),
    ]
    line = f"{what:<6}  {count} settings, {spent_s:.0f} s: {words(best)}"
    return {"line": line, "rows": rows + more}


def _walk_grid(
    grid: Trials, choices: list[Choice], turns: int, block_s: float, emit: Emit
) -> Choice:
    """Measure every combination once, and the fastest more often; return the best. (all ranks)"""
    began = time.monotonic()
    grid.next_turn()
    for number, choice in enumerate([(), *choices]):
        grid.measure(choice, block_s / 3)
        if number and number % SIGN_EVERY == 0:
            line = f"grid    {number} of {len(choices)} settings, {time.monotonic() - began:.0f} s"
            emit({"line": line, "rows": []})
    right = [choice for choice in grid.samples if choice not in grid.refused]
    fastest = sorted(right, key=lambda choice: grid.samples[choice][0].step_s)[:FINALISTS]
    for _ in range(turns - 1):
        grid.next_turn()
        for choice in fastest:
            grid.measure(choice, block_s)
    medians = {
        choice: statistics.median(trial.step_s for trial in grid.samples[choice])
        for choice in fastest
    }
    best = min(medians, key=lambda choice: medians[choice])
    emit(_tried("grid", grid, time.monotonic() - began, best, []))
    return best


def _combinations(here: TunedRun, only: list[str], most: int) -> list[Choice]:
    """Return every combination of what the search may change that can be trained, evenly cut."""
    from nanoray.errors import ConfigError
    from nanoray.lab.tune.knobs import configured, options, with_settings

    found: list[Choice] = []
    for parts in product(*([(), *choices] for choices in options(here, True, only).values())):
        choice: Choice = ()
        for settings in parts:
            choice = with_settings(here, choice, settings)
        try:
            configured(here, choice)
        except ConfigError:
            continue
        found.append(choice)
    found = list(dict.fromkeys(found))
    step = max(1, -(-len(found) // most))
    return found[::step]


def _losses_apart(
    mesh: Mesh, spec: RunSpec, subject: TunedModel, here: TunedRun, tuned: Choice
) -> float:
    """Return how far the losses of 50 steps of SGD are apart, relative. (all ranks)"""
    from nanoray.lab.tune.knobs import configured
    from nanoray.train.loop_arm import LoopArm

    losses = []
    for choice in ((), tuned):
        config = configured(here, choice)
        if config.model != "own":
            sgd = {
                "optimizer": "sgd",
                "momentum": 0.0,
                "lr": 0.1,
                "min_lr": 0.01,
                "warmup_steps": 0,
            }
            config = config.model_copy(update=sgd)
        own = replace(spec, config=config)

        def train(task: Any, own: RunSpec = own) -> float:
            arm = LoopArm(own, mesh, task)
            try:
                return arm.block(1, settling=EQUAL_STEPS).loss
            finally:
                arm.close()

        losses.append(subject.open(own, train))
    return abs(losses[1] - losses[0]) / abs(losses[0])
