"""Draw the load of each expert over the steps of a run. `nanoray experts runs/RUN` writes
RUN/experts.svg.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nanoray.atomic import read_json_lines
from nanoray.cli import exit_code_of, writing
from nanoray.errors import ConfigError

LOADS = "expert_load"  # of a record: for each layer, each expert's load over the mean


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray experts RUN`: draw the load of the experts, layer by layer, and what was
    dropped.
    """
    parser = argparse.ArgumentParser(
        prog="nanoray experts", description="Draw the load of experts over steps."
    )
    parser.add_argument("run", type=Path, help="folder of a run of a model with experts")
    parser.add_argument("--figure", type=Path, help="picture to write [RUN/experts.svg]")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    records = read_loads(args.run)
    figure = args.figure or args.run / "experts.svg"
    with writing(figure, "give another --figure"):
        draw(records, figure)
    last = records[-1]
    print(
        f"{figure}  at step {last['step']} the largest load is {last['moe/load_max']:.2f} times "
        "the mean, the smallest "
        f"{last['moe/load_min']:.2f} times; {last['moe/dropped']:.1f} % dropped; entropy "
        f"{last['moe/entropy']:.2f}"
    )


def read_loads(run: Path) -> list[dict[str, Any]]:
    """Return a run's records that tell of experts. Raises ConfigError when there is none."""
    records = [record for record in read_json_lines(run / "metrics.jsonl") if LOADS in record]
    if not records:
        raise ConfigError(
            f"{run} has no record of experts; give the folder of a run that was started with "
            "--experts"
        )
    return records


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw a map per layer: steps to the right, experts upward, the colour is the load; below,
    dropped and entropy.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    steps, layers = [record["step"] for record in records], len(records[0][LOADS])
    experts = len(records[0][LOADS][0])
    figure, axes = pyplot.subplots(
        layers + 1, 1, figsize=(8, 1.1 * layers + 2.2), sharex=True, layout="constrained"
    )
    colours = TwoSlopeNorm(
        1.0, 0.0, max(2.0, *(max(map(max, record[LOADS])) for record in records))
    )
    for n in range(layers):
        loads = [[record[LOADS][n][e] for record in records] for e in range(experts)]
        rows = [e - 0.5 for e in range(experts + 1)]
        drawn = axes[n].pcolormesh(edges(steps), rows, loads, cmap="RdBu_r", norm=colours)
        axes[n].set_ylabel(f"block {n}", rotation=0, ha="right", va="center")
        axes[n].set_yticks(
            range(experts), [str(e) if experts <= 8 or e % 8 == 0 else "" for e in range(experts)]
        )
    figure.colorbar(drawn, ax=list(axes[:layers]), label="load / mean", aspect=30, pad=0.01)
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
    pyplot.close(figure)


def edges(steps: list[int]) -> list[float]:
    """Return where each step's column begins, and where the last one ends."""
    last = steps[-1] - steps[-2] if len(steps) > 1 else 1
    return [float(step) for step in [*steps, steps[-1] + last]]


if __name__ == "__main__":
    raise SystemExit(main())
