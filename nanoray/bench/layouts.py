"""`python -m nanoray.bench layouts predicted`: predicted steps of dp × tp layouts, beside real ones.

    links      all-reduce, reduce-scatter and all-gather of Axis at 2 ranks   -> alpha, beta and CPU seconds of each
    compute    forward, backward, update at 2 ranks, whole and cut for tp 2   -> seconds; what tp does not divide
    predict    nanoray.cli.forecast.predict with these, and real steps, at 2, 4 and 8 ranks, all in each round

How each is measured stands in step_parts.py. More ranks than cores share them fairly, as in
`bench scaling`, whose other assumptions hold, too. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from nanoray.bench.engine import TIME_ENTRY, order_of
from nanoray.bench.fit import Fit, fit
from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, Panel, with_values
from nanoray.bench.harness.rank_pool import RankPool, Where, describe
from nanoray.bench.harness.report import Record, Report, say
from nanoray.bench.harness.table import Table, TableColumn, count_of_rounds, names
from nanoray.bench.harness.trainings import numbers_of, rotated
from nanoray.bench.predicted import (
    MEASURED,
    PREDICTED,
    FittedLinks,
    add_error_target,
    add_step_rows,
    draw_steps,
    percent_of_error,
    predict_step,
    speed_of,
)
from nanoray.bench.step_parts import COLLECTIVES, COMPUTE, PARTS, fastest_turns, one_micro_batch
from nanoray.config import Config, load_config
from nanoray.config.layout import Layout
from nanoray.machine.host import available_cpus

BASE = 2
RANKS = (2, 4, 8)
TPS = (1, 2, 4)
MODES = ("ddp_by_hand", "zero1")
MICRO = 6  # sequences of a replica and step
OPS = ("all_reduce", "reduce_scatter", "all_gather")


class LayoutsBenchmark(Benchmark):
    """Compare predicted with measured steps of dp × tp layouts."""

    numbers = (
        Number("rounds", "rounds of all arms", usual=7, few=1),
        Number("turns", "turns of an arm in a round", usual=4, few=1),
        Number("steps", "steps of a turn", usual=4, few=2),
    )
    tables = (
        Table(
            lambda report: [row.arm for row in with_values(report, MEASURED)],
            (
                names("layout"),
                TableColumn("step, ms", MEASURED, "quartiles"),
                TableColumn("predicted", PREDICTED),
                TableColumn("error", percent_of_error),
                count_of_rounds(MEASURED),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                partial(draw_steps, across=True),
                {"xlabel": "ms, median and middle half of the rounds", "xlim": (0, None)},
                {"fontsize": 8},
            ),
        ),
        size=(9, 4.5),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--preset", default="shakespeare-cpu", help="a gpt's sizes [%(default)s]"
        )
        parser.add_argument(
            "--ranks",
            metavar="N,M",
            default="2,4,8",
            help="numbers of ranks to check [%(default)s]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Fit links and compute at 2 ranks, and measure and predict every layout, in each round."""
        # Ranks on CPU share the cores, one thread each
        where = Where(BASE, device="cpu", threads=1)
        ranks = sorted(set(numbers_of(args.ranks, "ranks", "2,4,8", int, BASE - 1)))
        steps = args.steps
        # float32 on CPUs: what is checked is the model of time, not the kernels.
        config = load_config(preset=args.preset, overrides={"precision": "fp32", "device": "cpu"})
        arms = {n: arms_of(config, n) for n in ranks}
        # Sizes of messages from which the links are fitted, four times larger each.
        sizes = [1 << 10, 1 << 16, 1 << 20] if args.quick else [4**i << 10 for i in range(7)]
        turns = {"preset": args.preset, "turns": args.turns}
        calls = turns | {"ops": OPS, "sizes": sizes, "calls": 5 * steps, "micro": MICRO}
        compute = turns | {"steps": steps, "cases": [(1, MICRO), (2, MICRO)]}
        # Real steps, of a round's turns
        orders = {}
        for n, of_ranks in arms.items():
            configs = {
                arm: config.model_copy(update=one_micro_batch(MICRO) | own)
                for arm, own in of_ranks.items()
            }
            orders[n] = order_of(configs, args.turns, steps)
        # (predicted, measured) of each round
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        # One pool of ranks for each number of ranks, kept over all rounds.
        with part(report, lambda: _add_rows(report, found)), ExitStack() as stack:
            pools = {
                n: stack.enter_context(RankPool(replace(where, workers=n)))
                for n in sorted({BASE, *ranks})
            }
            describe(report, pools[max(ranks)])
            # Links and compute are fitted anew in each round, because the machine's speed drifts.
            for turn in range(args.rounds):
                fitted = [*pools[BASE].run(COLLECTIVES, calls), *pools[BASE].run(COMPUTE, compute)]
                here = _fit_machine(fitted)
                # The fit of the first round stands for all in the conditions.
                if not turn:
                    report.conditions["fit"] = here.format_fit()
                # The order of the sizes rotates, so that none is always measured first.
                for n in rotated(ranks, turn):
                    for arm, step_s in fastest_turns(pools[n].run(TIME_ENTRY, orders[n])).items():
                        own = arms[n][arm]
                        layout = Layout(dp=n // own["tp"], tp=own["tp"])
                        predicted_s = here.predict(config, layout, own["dp_mode"])
                        found[arm].append((predicted_s, step_s))
                        times = f"{1e3 * step_s:.1f} ms, predicted {1e3 * predicted_s:.1f}"
                        say(f"round {turn}  {arm:<30} {times}")


def arms_of(config: Config, ranks: int) -> dict[str, Record]:
    """Return the layouts and modes of `ranks` ranks for which the model can be cut."""
    arms = {}
    # A layout needs a whole number of replicas and of heads.
    for tp in (tp for tp in TPS if ranks % tp == 0 and config.n_head % tp == 0):
        for mode in MODES[: 1 if tp == ranks else None]:  # one replica shares nothing
            name = f"{ranks} ranks: {Layout(dp=ranks // tp, tp=tp)}" + (
                f", {mode}" if tp < ranks else ""
            )
            arms[name] = {"tp": tp, "dp_mode": mode}
    return arms


@dataclass(frozen=True)
class Here:
    """This machine in one round: links, and compute of a micro batch on one rank."""

    links: dict[str, Fit]
    cpu: dict[str, Fit]
    compute: dict[int, dict[str, float]]  # by tp

    def predict(self, config: Config, layout: Layout, mode: str) -> float:
        """Return the seconds of a step."""
        network = FittedLinks(self.links, self.cpu)
        own = config.model_copy(update={"dp_mode": mode, "tp": layout.tp})
        speed = speed_of(config, self.compute[1], MICRO, cut=self.compute[2])
        speed = replace(speed, cores=available_cpus() / layout.world_size)
        # Which a dry run leaves out
        norm = network.cost(Layout(dp=layout.world_size), "dp", "all_reduce", 8)
        return predict_step(own, layout, MICRO, network, speed).step_s + norm.seconds

    def format_fit(self) -> str:
        """Write what was fitted, for the conditions."""
        links = [
            f"{op} {1e6 * f.alpha_s:.0f} us + {1e12 * f.beta_s_per_byte:.0f} us/MB"
            for op, f in self.links.items()
        ]
        parts = [
            f"tp {tp} {1e3 * sum(times.values()):.1f} ms" for tp, times in self.compute.items()
        ]
        return "; ".join([*links, *parts])


def _fit_machine(events: list[Record]) -> Here:
    """Fit links and compute to the events of a round.

    A reduce-scatter or all-gather is fitted as a ring of its own.
    """
    # Two fits for each collective: seconds on the clock, and seconds of CPU, which compute then
    # lacks.
    points = {
        key: {op: [(e["nbytes"], e[key]) for e in events if e.get("op") == op] for op in OPS}
        for key in _TIMES
    }
    links, cpu = (
        {op: fit(own, "backend", BASE) for op, own in points[key].items()} for key in _TIMES
    )
    compute = {e["tp"]: {key: e[key] for key in PARTS} for e in events if "tp" in e}
    return Here(links, cpu, compute)


_TIMES = ("seconds", "cpu_s")


def _add_rows(report: Report, found: dict[str, list[tuple[float, float]]]) -> None:
    for arm, pairs in found.items():
        predicted, measured = zip(*pairs, strict=True)
        notes = ("fastest turn of each round", "links and compute of the same round")
        add_error_target(report, add_step_rows(report, arm, measured, predicted, notes), arm)
