"""`python -m nanoray.bench precision`: the step, the state and the loss of each number format.

One process trains a small GPT in every precision, on the same batches, round by round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, Panel, bars, with_values
from nanoray.bench.harness.report import Record, Report, say
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.bench.harness.trainings import add_settings_flag, settings_of
from nanoray.config import load_config
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError

if TYPE_CHECKING:
    from nanoray.bench.precision_lab import Lab, Training

MODES: dict[str, Record] = {
    name: {"precision": name} for name in ("fp32", "bf16", "fp16", "bf16_pure")
}
MODES["bf16_pure, stochastic"] = {"precision": "bf16_pure", "rounding": "stochastic"}
MODES["bf16_pure, fp32 masters"] = {"precision": "bf16_pure", "master_weights": "fp32"}
MODES["fp16_pure"] = {"precision": "fp16_pure"}
MODES["fp16_pure, fp32 masters"] = {"precision": "fp16_pure", "master_weights": "fp32"}
FP8: dict[str, Record] = {
    f", per {how}": {"precision": "fp8", "fp8_scaling": how} for how in ("tensor", "row")
}
MODES |= {f"fp8 emulated{how}": of for how, of in FP8.items()}
ON_GPUS = {name: of for name, of in MODES.items() if of["precision"] != "fp8"} | {
    "tf32": {"precision": "tf32"}
}
SETTINGS: Record = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "block_size": 32,
    "global_batch_size": 4,
}
TINY: Record = SETTINGS | {
    "n_layer": 2,
    "n_embd": 32,
    "block_size": 16,
    "global_batch_size": 4,
}
STEP = "step"
STATE = "state"
LOSS = "final loss"
CURVE = "loss curve"
SKIPPED = "skipped steps"


def modes_of(report: Report) -> list[str]:
    """Return the modes that were measured, in their order."""
    return [row.arm for row in report.rows if row.metric == STATE]


def _draw_losses(axes: Any, report: Report) -> None:
    for row in with_values(report, CURVE):
        axes.plot(row.values, label=row.arm, linewidth=1)


def _draw_steps(axes: Any, report: Report) -> None:
    bars(axes, with_values(report, STEP), quartiles=True, color="0.6")


class PrecisionBenchmark(Benchmark):
    """Measure what each number format costs: time, memory, loss."""

    numbers = (
        Number("steps", "steps of each mode", usual=100, few=24),
        Number("rounds", "rounds of all modes in turn", usual=10, few=2),
    )
    tables = (
        Table(
            modes_of,
            (
                names("mode"),
                TableColumn("step, ms", STEP, SPREAD),
                TableColumn("state, MiB", STATE),
                TableColumn("final loss", LOSS),
                TableColumn("skipped", SKIPPED, optional=True),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                _draw_losses,
                {
                    "title": "loss of each mode, same batches",
                    "xlabel": "60ths of the run",
                    "ylabel": "nat/token",
                },
                {"fontsize": 6},
            ),
            Panel(
                _draw_steps,
                {"title": "step of each mode", "xlabel": "ms, median and quartiles"},
                down=True,
            ),
        ),
        note=("recipe",),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--dataset", default="stdlib", help="text to learn, as of nanoray.train [%(default)s]"
        )
        parser.add_argument(
            "--device",
            choices=("cpu", "cuda"),
            default="cpu",
            help="what it trains on [%(default)s]",
        )
        add_settings_flag(parser, "those of the small model")

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Train every mode and fill the report."""
        steps = args.steps
        rounds = args.rounds
        # Refuse before torch is imported, which takes seconds.
        if steps < rounds:
            raise ConfigError(f"steps = {steps}, rounds = {rounds}; at least one step a round")
        import torch

        from nanoray.bench.precision_lab import Lab
        from nanoray.data.tokens import TokenData

        # One thread: gradients are then summed in one order, so the losses repeat to the bit.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            settings = (TINY if args.quick else SETTINGS) | settings_of(args)
            # The rate falls by a factor of 300: the last steps have small updates, which 16 bits lose.
            own = {
                "dataset": args.dataset,
                "tokenizer": "byte",
                "max_steps": steps,
                "lr": 3e-3,
                "min_lr": 1e-5,
            }
            own["warmup_steps"] = min(20, steps // 4)
            config = load_config(preset="shakespeare-cpu", overrides=settings | own)
            info = prepare(config)
            device = torch.device(args.device)
            lab = Lab(
                config,
                TokenData(info, config.block_size, config.seed, device),
                info.vocab_size,
                device,
            )
            keys = ", ".join(f"{key} {setting}" for key, setting in settings.items())
            where = "1 thread" if args.device == "cpu" else torch.cuda.get_device_name()
            report.conditions["recipe"] = (
                f"{keys}, {steps} steps, lr 3e-3 to 1e-5, {info.note}, {where}"
            )
            train_modes(lab, report, steps // rounds * rounds, rounds)
        finally:
            torch.set_num_threads(threads)


def train_modes(lab: Lab, report: Report, steps: int, rounds: int) -> None:
    """Train every mode on the same batches, in turn, and add its rows."""
    from nanoray.bench.precision_lab import Training, rounds_of
    from nanoray.models.fp8 import in_hardware

    # A GPU has modes of its own; fp8 is labelled where the device only emulates it.
    modes = MODES
    if lab.device.type == "cuda":
        modes = ON_GPUS | {
            f"fp8{'' if in_hardware(lab.device) else ' emulated'}{how}": of
            for how, of in FP8.items()
        }
    runs = {name: Training(lab, **settings) for name, settings in modes.items()}
    # Rounds of all modes in turn, so that a slow minute of the machine meets all of them.
    times: dict[str, list[float]] = {name: [] for name in runs}
    with part(report, lambda: _add_mode_rows(report, runs, times, steps)):
        for name, ms in rounds_of(runs, steps, rounds):
            times[name].append(statistics.median(ms))


def _add_mode_rows(
    report: Report, runs: Mapping[str, Training], times: Mapping[str, list[float]], steps: int
) -> None:
    """Add what each mode took, held and came to."""
    for name, run in runs.items():
        if not times[name]:
            continue
        say(f"{name:<24} {statistics.median(times[name]):.1f} ms, loss {run.losses[-1]:.3f}")
        report.add(name, STEP, "ms", times[name], "median of a round")
        held = sum(run.held.values())
        report.add(name, STATE, "MiB", held / 2**20, extra={"held": run.held})
        last = statistics.mean(run.losses[-max(1, steps // 10) :])
        report.add(name, LOSS, "nat", last, "mean of the last tenth")
        report.add(name, CURVE, "nat", run.losses[:: max(1, steps // 60)])
        if run.scaler.enabled:
            report.add(name, SKIPPED, "steps", run.scaler.values()["skipped"])
