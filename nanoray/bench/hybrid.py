"""`python -m nanoray.bench layouts hybrid`: what groups of ranks save where the link between nodes is slow.

Two nodes of a few ranks each train one model, sharded over all ranks and sharded within each node
(--replicas 2). Both nodes are on this machine. The link between them is real TCP that a relay
slows down (harness/thin_links.py); ranks of a node reach each other through its loopback. Every
round runs a few steps of each arm in turn. The relay counts what crosses the link, and the formula
of `nanoray.forecast.by_link` stands beside it.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from nanoray.bench.engine import STEP, TIME_ENTRY, Found, collect, each, order_of
from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, Panel, dots, with_values
from nanoray.bench.harness.plan import add_arms_flag, add_settings_flag, chosen, settings_of
from nanoray.bench.harness.rank_pool import RankPool
from nanoray.bench.harness.ranks import Where
from nanoray.bench.harness.report import Measurement, Report, say
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, arms_with, names
from nanoray.bench.harness.thin_links import parse_links, why_not
from nanoray.bench.strategies import HYBRID, MODES, configuration
from nanoray.config import Config
from nanoray.errors import ConfigError

NODES = 2
LINKS = "none,1/1000,1/100"
LOOPBACK = "one node"
# Each mode over all ranks, and within each node
PLAIN = ("ddp", "zero1", "zero2", "fsdp full")
ARMS: dict[str, dict[str, Any]] = {mode: MODES[mode] for mode in PLAIN} | HYBRID

BETWEEN = "between nodes"
FORMULA = "between nodes, formula"
ERROR = "between nodes, error"
MOST_ERROR = 5.0  # %, with the headers of TCP and what the ranks exchange beside gradients


def _name_of(arm: str) -> str:
    return arm.rpartition(" at ")[0]


def _link_of(arm: str) -> str:
    return arm.rpartition(" at ")[2]


def plain_of(arm: str) -> str:
    """Return the arm of the same mode over all ranks, at the same link."""
    return f"{_name_of(arm).removesuffix(' hybrid')} at {_link_of(arm)}"


def draw_by_link(metric: str, axes: Any, report: Report) -> None:
    """Draw a metric of each arm, in a colour per link."""
    rows = with_values(report, metric)
    for number, link in enumerate(dict.fromkeys(map(_link_of, arms_with(report, STEP)))):
        own = [row for row in rows if _link_of(row.arm) == link]
        at = [_name_of(row.arm) for row in own]
        dots(axes, at, own, across=True, color=f"C{number}", label=link)


class HybridBenchmark(Benchmark):
    """Compare a state that is sharded over all ranks with one that is sharded in each node."""

    numbers = (
        Number("rounds", "rounds of all arms", usual=7, few=1),
        Number("steps", "steps of an arm per round", usual=3, few=1),
        Number("ranks_per_node", "of both nodes", 2),
        Number("timeout_s", "seconds after which a link has failed", 900.0),
    )
    tables = (
        Table(
            STEP,
            (
                TableColumn("link", lambda report, arm, spread: _link_of(arm), left=True),
                names("mode", _name_of),
                TableColumn("hybrid / plain", STEP, SPREAD, over=plain_of),
                TableColumn("step, ms", STEP, SPREAD),
                TableColumn("MB between nodes", BETWEEN),
                TableColumn("formula", FORMULA),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                partial(draw_by_link, STEP),
                {"xlabel": "step, ms, median and quartiles", "xlim": (0, None)},
                {"fontsize": 7},
                grid=True,
            ),
            Panel(
                partial(draw_by_link, BETWEEN),
                {"xlabel": "MB between nodes a step, median and quartiles", "xlim": (0, None)},
                grid=True,
            ),
        ),
        size=(11, 4.2),
        note=("recipe",),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--preset", default="shakespeare-cpu", help="a gpt's sizes and batch [%(default)s]"
        )
        add_settings_flag(parser, "the preset's")
        add_arms_flag(parser, ARMS)
        parser.add_argument(
            "--links",
            metavar="MS/MBIT,...",
            default=LINKS,
            help="delay and speed of the link between the nodes; none: one node [%(default)s]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Time all arms at each link, and fill the report."""
        if args.ranks_per_node < 2:
            raise ConfigError(
                f"ranks_per_node = {args.ranks_per_node}; 2 is the least: a group of one rank shards "
                "nothing"
            )
        links = parse_links(args.links, LINKS)
        if any(links) and (reason := why_not()):
            raise ConfigError(f"links = {args.links}: {reason}; use --links none")
        # Refuse impossible settings now, before a rank is started
        ranks = NODES * args.ranks_per_node
        base = {"model": "gpt", "preset": args.preset, "overrides": settings_of(args)}
        arms = chosen(args.arms, list(ARMS))
        configs = {name: configuration(base, ARMS[name], ranks) for name in arms}
        expected = {name: _expected_mb(config, ranks) for name, config in configs.items()}
        order = order_of(configs, args.rounds, args.steps)

        report.conditions["nodes"] = f"{NODES} of {args.ranks_per_node} ranks, on this machine"
        for speed in links:
            link = str(speed) if speed else LOOPBACK
            say(link)
            found: Found = {name: [] for name in arms}

            def add_rows(link: str = link, found: Found = found) -> None:
                for name, events in found.items():
                    times = each(events, "step_ms")
                    crossed = [e["crossed"] / args.steps / 1e6 for e in events if "crossed" in e]
                    _add_rows(report, f"{name} at {link}", times, crossed, expected[name])
                _compare(report, arms, link)

            where = Where(ranks, device="cpu", timeout_s=args.timeout_s, nodes=NODES, speed=speed)
            with part(report, add_rows), RankPool(where) as pool:
                report.conditions["ranks"] = f"{len(pool.facts)}, {pool.backend}"
                collect(pool.run(TIME_ENTRY, order), report, found)


def _expected_mb(config: Config, ranks: int) -> float:
    """Return the MB that cross the link in a step, both ways, by formula."""
    from nanoray.bench.simulate import communication_of
    from nanoray.forecast.by_link import sent_by_link

    sent = sent_by_link(*communication_of(config, ranks), ranks // NODES)
    return sent.between * ranks / 1e6


def _add_rows(
    report: Report, arm: str, times: list[float], crossed: list[float], expected: float
) -> None:
    """Add the rows of an arm at a link."""
    report.add(arm, STEP, "ms", times)
    if not crossed:
        return
    errors = [100 * (mb / expected - 1) for mb in crossed]
    report.add(arm, BETWEEN, "MB", crossed, "of all ranks, both ways, with headers")
    report.add(arm, FORMULA, "MB", expected)
    report.add(arm, ERROR, "%", errors)
    off = Measurement(arm, ERROR, "%", tuple(abs(error) for error in errors))
    report.add_target(f"{BETWEEN}, against the formula, {arm}, %", off, "<=", MOST_ERROR)


def _compare(report: Report, arms: list[str], link: str) -> None:
    """Add the ratio of each mode in groups to the same mode over all ranks."""
    for name in arms:
        plain = name.removesuffix(" hybrid")
        if plain != name and plain in arms:
            report.compare(f"{name} at {link}", f"{plain} at {link}", STEP, "paired by round")
