"""`python -m nanoray.bench hybrid`: what groups of ranks save where the link between nodes is slow.

Two nodes of a few ranks each train one model, sharded over all ranks and sharded within each node
(--replicas 2). Both nodes are on this machine. The link between them is real TCP that a relay
slows down (harness/thin_links.py); ranks of a node reach each other through its loopback. Every
round runs a few steps of each arm in turn. The relay counts what crosses the link, and the formula
of `nanoray.forecast.by_link` stands beside it.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure, whiskers
from nanoray.bench.harness.node import NodeOrder
from nanoray.bench.harness.plan import add_settings_flag, chosen, count_of, settings_of
from nanoray.bench.harness.processes import (
    Child,
    ChildFailed,
    arm_environment,
    free_port,
    scratch_folder,
)
from nanoray.bench.harness.report import Measurement, Report, Target, aligned, markdown, say
from nanoray.bench.harness.thin_links import DEVICE, LinkSpeed, ThinLinks, address_of, why_not
from nanoray.bench.strategies import HYBRID, MODES, configuration
from nanoray.errors import ConfigError

NODES = 2
LINKS = "none,1/1000,1/100"
LOOPBACK = "one node"
FUNCTION = "nanoray.bench.strategies:time_rank"
# Each mode over all ranks, and within each node
PLAIN = ("ddp", "zero1", "zero2", "fsdp full")
ARMS: dict[str, dict[str, Any]] = {mode: MODES[mode] for mode in PLAIN} | HYBRID

STEP = "step"
BETWEEN = "between nodes"
FORMULA = "between nodes, formula"
ERROR = "between nodes, error"
MOST_ERROR = 5.0  # %, with the headers of TCP and what the ranks exchange beside gradients


class HybridBenchmark(Benchmark):
    """Compare a state that is sharded over all ranks with one that is sharded in each node."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--ranks_per_node", type=int, default=2, metavar="N", help="of both nodes [2]"
        )
        parser.add_argument(
            "--preset", default="shakespeare-cpu", help="a gpt's sizes and batch [%(default)s]"
        )
        add_settings_flag(parser, "the preset's")
        parser.add_argument(
            "--arms", default="all", help=f"some of {', '.join(ARMS)} [%(default)s]"
        )
        parser.add_argument(
            "--links",
            metavar="MS/MBIT,...",
            default=LINKS,
            help="delay and speed of the link between the nodes; none: one node [%(default)s]",
        )
        parser.add_argument(
            "--rounds", type=int, metavar="N", help="rounds of all arms [7; 1 with --quick]"
        )
        parser.add_argument(
            "--steps", type=int, metavar="N", help="steps of an arm per round [3; 1 with --quick]"
        )
        parser.add_argument(
            "--timeout_s", type=float, default=900.0, help="seconds after which a link has failed"
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Time all arms at each link, and fill the report."""
        rounds = count_of(args.rounds, args.quick, few=1, usual=7)
        steps = count_of(args.steps, args.quick, few=1, usual=3)
        if args.ranks_per_node < 2 or min(rounds, steps) < 1:
            raise ConfigError(
                f"ranks_per_node = {args.ranks_per_node}, rounds = {rounds}, steps = {steps}; 2, 1 "
                "and 1 are the least: a group of one rank shards nothing"
            )
        links = parse_links(args.links)
        if any(links) and (reason := why_not()):
            raise ConfigError(f"links = {args.links}: {reason}; use --links none")
        arms = {name: ARMS[name] for name in chosen(args.arms, list(ARMS))}
        order = {
            "model": "gpt",
            "preset": args.preset,
            "overrides": settings_of(args),
            "arms": arms,
            "rounds": rounds,
            "steps": steps,
        }
        # Refuse impossible settings now, before a rank is started
        ranks = NODES * args.ranks_per_node
        expected = {name: _expected_mb(order, own, ranks) for name, own in arms.items()}

        report.conditions["nodes"] = f"{NODES} of {args.ranks_per_node} ranks, on this machine"
        for speed in links:
            link = str(speed) if speed else LOOPBACK
            try:
                events, sent = _run(args, order, speed, report)
            except ChildFailed as error:
                report.failures.append(f"{link}: {error}")
                continue
            for name in arms:
                of_arm = [number for number, event in enumerate(events) if event["arm"] == name]
                times = tuple(events[number]["step_ms"] for number in of_arm)
                crossed = [sent[number] for number in of_arm] if speed else []
                _add_rows(report, name, link, times, crossed, expected[name])
            _compare(report, list(arms), link)

    def format_text(self, report: Report) -> list[str]:
        """Return a line per arm and link: the step, and what crosses the link."""
        return aligned([(*line, "") for line in _table(report, "quartiles")], right={2, 3, 4, 5})

    def format_markdown(self, report: Report) -> list[str]:
        """Return the table for a page."""
        head, *body = _table(report, "range")
        return markdown(head, body)

    def draw(self, report: Report, path: Path) -> None:
        """Draw the step of each arm at each link, and what crosses the link in a step."""
        links = list(dict.fromkeys(_link_of(row) for row in report.rows if row.metric == STEP))
        with figure(report, path, (11, 4.2), note=report.conditions.get("recipe", "")) as both:
            for axes, metric, label in zip(
                both, (STEP, BETWEEN), ("step, ms", "MB between nodes a step"), strict=True
            ):
                for number, link in enumerate(links):
                    rows = [
                        row
                        for row in report.rows
                        if row.metric == metric and row.values and _link_of(row) == link
                    ]
                    if rows:
                        axes.errorbar(
                            [row.median for row in rows],
                            [row.arm.rpartition(" at ")[0] for row in rows],
                            xerr=whiskers(rows, quartiles=True),
                            fmt="o",
                            capsize=2,
                            color=f"C{number}",
                            label=link,
                        )
                axes.set(xlabel=f"{label}, median and quartiles", xlim=(0, None))
                axes.grid(alpha=0.25)
            both[0].legend(fontsize=7)


def parse_links(text: str) -> list[LinkSpeed | None]:
    """Return the links of MS/MBIT,...; None is one node. Raises ConfigError."""
    speeds: list[LinkSpeed | None] = []
    for part in text.split(","):
        if part == "none":
            speeds.append(None)
            continue
        speeds.append(LinkSpeed.parse(part, text, LINKS))
    return speeds


def _expected_mb(order: dict[str, Any], own: dict[str, Any], ranks: int) -> float:
    """Return the MB that cross the link in a step, both ways, by formula. Raises ConfigError."""
    from nanoray.bench.simulate import VOCAB
    from nanoray.config import resolve_batch
    from nanoray.forecast.by_link import sent_by_link
    from nanoray.forecast.scale import job_of
    from nanoray.forecast.traffic import talks_of
    from nanoray.mesh.layout import Layout

    config = configuration(order, own, ranks)
    layout = Layout.of(config, ranks)
    batch = resolve_batch(config, layout.dp)
    job = job_of(config, VOCAB[config.tokenizer], batch.global_size, on_gpus=False)
    sent = sent_by_link(talks_of(job, layout, batch.micro, 0), layout, ranks // NODES)
    return sent.between * ranks / 1e6


def _run(
    args: argparse.Namespace, order: dict[str, Any], speed: LinkSpeed | None, report: Report
) -> tuple[list[dict[str, Any]], list[float]]:
    """Run all rounds at one link; return the events, and the MB that crossed it in a step of each.

    Raises ChildFailed.
    """
    say(f"{speed or LOOPBACK}")
    per_node = args.ranks_per_node
    with scratch_folder() as folder, ExitStack() as stack:
        links = None
        nodes = 1
        address = "127.0.0.1"
        interface = "lo"
        if speed:
            links = stack.enter_context(ThinLinks(NODES, speed, folder))
            nodes = NODES
            address = address_of(0)
            interface = DEVICE

        port = free_port()
        children = []
        for node in range(nodes):
            ranks = NODES * per_node // nodes
            task = NodeOrder(
                node, nodes, ranks, address, port, interface, args.timeout_s, FUNCTION, order
            )
            command = task.command()
            if links:
                command = links.command(node, command)
            child = Child(command, arm_environment(), folder / f"node{node}.log", pipes=True)
            children.append(stack.enter_context(child))

        answer = children[0].answer(args.timeout_s)
        report.conditions["ranks"] = f"{len(answer['facts'])}, {answer['backend']}"
        events = []
        sent = []
        for event in answer["events"]:
            if "recipe" in event:
                report.conditions["recipe"] = event["recipe"]
                continue
            events.append(event)
            crossed = links.sent_between(event["began"], event["ended"]) if links else 0
            sent.append(crossed / order["steps"] / 1e6)
            say(f"round {event['round']}  {event['arm']:<18} {event['step_ms']:.1f} ms")
        return events, sent


def _add_rows(
    report: Report,
    name: str,
    link: str,
    times: tuple[float, ...],
    crossed: list[float],
    expected: float,
) -> None:
    """Add the rows of an arm at a link."""
    arm = f"{name} at {link}"
    report.rows.append(Measurement(arm, STEP, "ms", times))
    if not crossed:
        return
    errors = tuple(100 * (mb / expected - 1) for mb in crossed)
    report.rows += [
        Measurement(arm, BETWEEN, "MB", tuple(crossed), "of all ranks, both ways, with headers"),
        Measurement(arm, FORMULA, "MB", (expected,)),
        Measurement(arm, ERROR, "%", errors),
    ]
    off = Measurement(arm, ERROR, "%", tuple(abs(error) for error in errors))
    report.targets.append(
        Target(f"{BETWEEN}, against the formula, {arm}, %", off, "<=", MOST_ERROR)
    )


def _compare(report: Report, arms: list[str], link: str) -> None:
    """Add the ratio of each mode in groups to the same mode over all ranks."""
    for name in arms:
        plain = name.removesuffix(" hybrid")
        if plain != name and plain in arms:
            report.compare(f"{name} at {link}", f"{plain} at {link}", STEP, "paired by round")


def _link_of(row: Measurement) -> str:
    return row.arm.rpartition(" at ")[2]


def _table(report: Report, spread: str) -> list[tuple[str, ...]]:
    """Return a line per link and arm."""
    head = ("link", "mode", "hybrid / plain", "step, ms", "MB between nodes", "formula")
    table: list[tuple[str, ...]] = [head]
    for row in report.rows:
        if row.metric != STEP or row.unit != "ms":
            continue
        name, _, link = row.arm.rpartition(" at ")
        plain = name.removesuffix(" hybrid")
        ratio = report.cell(f"{row.arm} / {plain} at {link}", STEP, spread)
        table.append(
            (
                link,
                name,
                ratio,
                report.cell(row.arm, STEP, spread),
                report.cell(row.arm, BETWEEN, "none"),
                report.cell(row.arm, FORMULA, "none"),
            )
        )
    return table
