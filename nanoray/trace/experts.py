"""Draw the load of each expert over a run's steps: `nanoray experts RUN` writes experts.svg."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nanoray.base.atomic import read_json_lines
from nanoray.cli import Parser, exit_code_of, name_program, tool_parser, writing
from nanoray.errors import ConfigError

LOADS = "expert_load"  # a record's key: for each layer, each expert's load over the mean
MAX_LABELS = 8  # experts with a label each; of more, every 8th has one


def make_parser() -> Parser:
    """Return the parser of `nanoray experts`."""
    parser = tool_parser(name_program("experts"), "Draw the load of experts over steps.")
    parser.add_argument("run", type=Path, help="folder of a run of a model with experts")
    parser.add_argument(
        "-o", "--figure", type=Path, metavar="FILE", help="picture to write [RUN/experts.svg]"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray experts RUN`: draw the load of the experts by layer, and the dropped tokens."""
    return exit_code_of(lambda: _run(make_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    records = read_loads(args.run)
    figure = args.figure or args.run / "experts.svg"
    with writing(figure, "give another --figure"):
        draw(records, figure)
    last = records[-1]
    print(
        f"{figure}  at step {last['step']} the largest load is {last['moe/load_max']:.2f} times "
        f"the mean, the smallest {last['moe/load_min']:.2f} times; {last['moe/dropped']:.1f} % "
        f"dropped; entropy {last['moe/entropy']:.2f}"
    )


def read_loads(run: Path) -> list[dict[str, Any]]:
    """Return a run's records with loads of experts. Raises ConfigError when there is none."""
    records = [record for record in read_json_lines(run / "metrics.jsonl") if LOADS in record]
    if not records:
        raise ConfigError(
            f"{run} has no record of experts; give the folder of a run that was started with "
            "--experts"
        )
    return records


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw a map per layer: x is the step, y the expert, the colour its load.

    A plot below shows the largest load, the entropy and the dropped tokens.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    steps = [record["step"] for record in records]
    layers = len(records[0][LOADS])
    experts = len(records[0][LOADS][0])
    figure = Figure(figsize=(8, 1.1 * layers + 2.2), layout="constrained")
    axes = figure.subplots(layers + 1, 1, sharex=True)

    # White is the mean load, 1. All layers share one scale, which reaches at least to 2.
    largest = max(load for record in records for layer in record[LOADS] for load in layer)
    colours = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=max(2.0, largest))

    labels = [str(expert) for expert in range(experts)]
    if experts > MAX_LABELS:
        labels = [label if int(label) % MAX_LABELS == 0 else "" for label in labels]
    row_edges = [expert - 0.5 for expert in range(experts + 1)]
    for layer in range(layers):
        loads = [[record[LOADS][layer][e] for record in records] for e in range(experts)]
        image = axes[layer].pcolormesh(
            column_edges(steps), row_edges, loads, cmap="RdBu_r", norm=colours
        )
        axes[layer].set_ylabel(f"block {layer}", rotation=0, ha="right", va="center")
        axes[layer].set_yticks(range(experts), labels)
    figure.colorbar(image, ax=list(axes[:layers]), label="load / mean", aspect=30, pad=0.01)

    # Below the maps, three numbers over all layers, on the same axis of steps.
    below = axes[-1]
    below.plot(
        steps,
        [record["moe/load_max"] for record in records],
        color="C3",
        label="largest load / mean",
    )
    below.plot(
        steps,
        [record["moe/entropy"] for record in records],
        color="C0",
        label="entropy / log(experts)",
    )
    # A run without a capacity drops nothing, and needs no line for it.
    if any(record["moe/dropped"] for record in records):
        below.plot(
            steps,
            [record["moe/dropped"] / 100 for record in records],
            color="C1",
            label="dropped, share",
        )
    below.set(xlabel="step", ylim=(0, None))
    below.legend(fontsize=7, ncols=3)
    below.grid(alpha=0.25)
    figure.suptitle("Load of the experts: white is the mean, red is more, blue is less", fontsize=9)
    figure.savefig(path, dpi=150)


def column_edges(steps: list[int]) -> list[float]:
    """Return where each step's column begins, and where the last one ends."""
    width = 1  # of the last column: as wide as the one before
    if len(steps) > 1:
        width = steps[-1] - steps[-2]
    return [float(step) for step in [*steps, steps[-1] + width]]


if __name__ == "__main__":
    raise SystemExit(main())
