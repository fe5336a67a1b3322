"""`python -m nanoray.bench precision`: what 16 bits lose, what cures it, what each mode costs.

One process trains a small GPT in every precision, on the same batches, and measures apart:
gradients that underflow, updates that are lost, and means over ranks that
overflow. docs/precision.md explains the rows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, Panel
from nanoray.bench.harness.report import Measurement, Record, Report, say
from nanoray.bench.harness.table import Table, TableColumn, names
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
STATE_FORMULA = "state, formula"
KEPT = "batch"
KEPT_FORMULA = "batch, formula"
LOSS = "final loss"
CURVE = "loss curve"
SKIPPED = "skipped steps"
NO_SCALE = "lost"
SCALED = "lost, scaled"
LATE = "lost, trained"
LATE_SCALED = "lost, trained, scaled"
UPDATES: dict[str, Record] = {name: of for name, of in MODES.items() if name.endswith("_pure")}
UPDATES |= {name: of for name, of in MODES.items() if name.startswith("bf16_pure, ")}
STUCK = "never moved"
WENT = "went"
MEANS = ("sum, then divide", "divide, then sum", "by √n, twice")


# The arms of each study, and what it varies
LOSS_WEIGHTS = {f"loss × 2^-{k}": k for k in range(0, 25, 4)}
LEARNING_RATES = {f"lr {lr:.0e}": lr for lr in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)}
RANK_COUNTS = {f"{n} ranks": n for n in (2, 8, 64, 512, 4096)}
# Columns or curves: two for each way to take the mean
LOST = (NO_SCALE, SCALED, LATE, LATE_SCALED)
SUMS = {f"{what}, {how}": f"{what}: {how}" for how in MEANS for what in ("overflow", "zero")}


def modes_of(report: Report) -> list[str]:
    """Return the modes that were measured, in their order."""
    return [row.arm for row in report.rows if row.metric == STATE]


def _study(
    first: str, arms: Iterable[str] | Callable[[Report], Iterable[str]], heads: Mapping[str, str]
) -> Table:
    """Return the table of a study: a line for each arm, a column for each metric, by its head."""

    def measured_arms(report: Report) -> Sequence[str]:
        every = list(arms(report) if callable(arms) else arms)
        any_row = any(report.row(arm, metric) for arm in every for metric in heads)
        return every if any_row else []  # a GPU's report has the modes alone

    columns = [TableColumn(head, metric) for metric, head in heads.items()]
    return Table(measured_arms, [names(first), *columns], missing="·")


def _curves(arms: Mapping[str, float], metrics: Iterable[str], axes: Any, report: Report) -> None:
    """Draw a curve for each metric over what the arms vary."""
    for metric in metrics:
        rows = [(x, report.row(arm, metric)) for arm, x in arms.items()]
        points = [(x, row.median) for x, row in rows if row]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=metric)


def _over(arms: Mapping[str, float], metrics: Iterable[str], **axes: str) -> Panel:
    return Panel(partial(_curves, arms, metrics), axes, {"fontsize": 6})


def _draw_losses(axes: Any, report: Report) -> None:
    for name in modes_of(report):
        row = report.row(name, CURVE)
        if row:
            axes.plot(row.values, label=name, linewidth=1)


class PrecisionBenchmark(Benchmark):
    """Measure what 16 bits lose in training, and what each mode costs."""

    numbers = (
        Number("steps", "steps of each mode", usual=100, few=24),
        Number("rounds", "rounds of all modes in turn", usual=10, few=2),
    )
    shows_rows = True
    tables = (
        _study(
            "mode",
            modes_of,
            {
                STEP: "step, ms",
                STATE: "state, MiB",
                STATE_FORMULA: "by formula",
                KEPT: "kept for backward, MiB",
                KEPT_FORMULA: "with logits, by formula",
                LOSS: "final loss",
                SKIPPED: "skipped",
            },
        ),
        _study("lost, %", LOSS_WEIGHTS, {metric: metric for metric in LOST}),
        _study(
            "weights that never moved, %", LEARNING_RATES, {f"{STUCK}, {n}": n for n in UPDATES}
        ),
        _study("distance, % of float64's", LEARNING_RATES, {f"{WENT}, {n}": n for n in UPDATES}),
        _study("mean in fp16, %", RANK_COUNTS, SUMS),
    )
    # One picture per claim
    figure = Figure(
        (
            _over(
                LOSS_WEIGHTS,
                LOST,
                title="gradients that fp16 makes zero",
                xlabel="k of a loss × 2^-k",
                ylabel="%",
            ),
            _over(
                LEARNING_RATES,
                [f"{WENT}, {name}" for name in UPDATES],
                title="distance of repeated small updates",
                xlabel="lr",
                ylabel="% of float64's",
                xscale="log",
            ),
            _over(
                RANK_COUNTS,
                SUMS,
                title="mean over ranks in fp16",
                xlabel="ranks",
                ylabel="%",
                xscale="log",
            ),
            Panel(
                _draw_losses,
                {
                    "title": "loss of each mode, same batches",
                    "xlabel": "60ths of the run",
                    "ylabel": "nat/token",
                },
                {"fontsize": 6},
            ),
        ),
        size=(11, 7.4),
        rows=2,
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--dataset", default="stdlib", help="text to learn, as of nanoray.train [%(default)s]"
        )
        gpu = "cuda: what each mode costs on a GPU, without the studies, whose numbers no device changes [%(default)s]"
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=gpu)
        add_settings_flag(parser, "those of the small model")

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Run all experiments and fill the report."""
        steps = args.steps
        rounds = args.rounds
        # Refuse before torch is imported, which takes seconds.
        if steps < rounds:
            raise ConfigError(f"steps = {steps}, rounds = {rounds}; at least one step a round")
        import torch

        from nanoray.bench.precision_lab import Lab
        from nanoray.data.tokens import TokenData

        # One thread: gradients are then summed in one order, so the shares repeat to the bit.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            settings = (TINY if args.quick else SETTINGS) | settings_of(args)
            # The rate falls by a factor of 300, so the last steps have the small updates that 16
            # bits lose.
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
            study(lab, report, steps, rounds, args.quick)
        finally:
            torch.set_num_threads(threads)


def study(lab: Lab, report: Report, steps: int, rounds: int, quick: bool) -> None:
    """Run the experiments in turn."""
    # The studies that follow need trained weights: fresh ones have other gradients.
    trained = train_modes(lab, report, steps // rounds * rounds, rounds)
    add_targets(report)
    # The studies are about arithmetic, which is the same on every device.
    if lab.device.type != "cpu":
        return
    say("gradients")
    underflow(lab, report, trained, 2 if quick else 3)
    say("updates")
    updates(lab, report, trained, 4 if quick else 20)
    say("means")
    means(lab, report, trained)


def train_modes(lab: Lab, report: Report, steps: int, rounds: int) -> Record:
    """Train every mode on the same batches, in turn; return float32's weights."""
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
    return {name: p.detach() for name, p in runs["fp32"].model.named_parameters()}


def _add_mode_rows(
    report: Report, runs: Mapping[str, Training], times: Mapping[str, list[float]], steps: int
) -> None:
    """Add what each mode took, held and came to."""
    for name, run in runs.items():
        if not times[name]:
            continue
        say(f"{name:<24} {statistics.median(times[name]):.1f} ms, loss {run.losses[-1]:.3f}")
        # Memory held and the formula's, side by side; the time is the median of each round.
        held = sum(run.held.values())
        formula = run.formula
        report.add(name, STEP, "ms", times[name])
        report.add(name, STATE, "MiB", held / 2**20, extra={"held": run.held})
        report.add(name, STATE_FORMULA, "MiB", formula["state"] / 2**20)
        report.add(name, KEPT, "MiB", run.kept_for_backward() / 2**20, "kept for backward")
        report.add(
            name,
            KEPT_FORMULA,
            "MiB",
            formula["batch"] / 2**20,
            "activations, copies and both logits",
        )
        report.add(
            name,
            LOSS,
            "nat",
            statistics.mean(run.losses[-max(1, steps // 10) :]),
            "mean of the last tenth",
        )
        report.add(name, CURVE, "nat", run.losses[:: max(1, steps // 60)])
        if run.scaler.enabled:
            report.add(name, SKIPPED, "steps", run.scaler.values()["skipped"])


def underflow(lab: Lab, report: Report, trained: Record, batches: int) -> None:
    """Count gradients that fp16 makes zero: by loss scale, before and after training."""
    from nanoray.bench.precision_lab import gradients, largest_scale, lost

    # Fresh weights have large gradients. Late in training they are small, and fp16 loses more.
    first = lab.model()
    late = lab.model()
    late.load_state_dict(trained, strict=False)
    for arm, k in LOSS_WEIGHTS.items():
        found: dict[str, list[float]] = {name: [] for name in LOST}
        scales = []
        for number in range(batches):
            batch = lab.batch(1000 + number)
            for model, plain, cured in ((first, NO_SCALE, SCALED), (late, LATE, LATE_SCALED)):
                # Against the gradients in float32 of the same batch: which of them became zero?
                exact = gradients(model, batch, "fp32")
                half = gradients(model, batch, "fp16", 2.0**-k)
                scale = largest_scale(model, batch, 2.0**-k)
                found[plain].append(lost(half, exact))
                found[cured].append(lost(gradients(model, batch, "fp16", 2.0**-k * scale), exact))
                if model is late:
                    scales.append(scale)
        for name, values in found.items():
            report.add(arm, name, "%", values)
        report.add(arm, "scale", "1", scales, "largest without an overflow, up to 2^24")


def updates(lab: Lab, report: Report, trained: Record, steps: int) -> None:
    """Repeat one update of trained weights; count those that do not move."""
    from nanoray.bench.precision_lab import move

    for arm, lr in LEARNING_RATES.items():
        for name, settings in UPDATES.items():
            # The same update again and again, as in a long run with a small rate.
            stuck, went = move(lab, trained, lr, steps, **settings)
            report.add(arm, f"{STUCK}, {name}", "%", stuck, f"in {steps} updates")
            report.add(arm, f"{WENT}, {name}", "%", went, "100: as far as in float64")


def means(lab: Lab, report: Report, trained: Record) -> None:
    """Let sums over ranks overflow: of real gradients, not of random numbers."""
    import torch

    from nanoray.bench.precision_lab import compressed_mean, gradients

    model = lab.model()
    model.load_state_dict(trained, strict=False)
    exact = gradients(model, lab.batch(2000), "fp32")
    flat = torch.cat([g.flatten() for g in exact.values()])
    # As dynamic scaling leaves them: the largest near fp16's limit
    scaled = flat * (2.0**14 / flat.abs().max())
    for arm, ranks in RANK_COUNTS.items():
        for how in MEANS:
            over, zero = compressed_mean(scaled, ranks, how)
            report.add(arm, f"overflow, {how}", "%", over)
            report.add(arm, f"zero, {how}", "%", zero)


def add_targets(report: Report) -> None:
    """Say what must hold on any machine."""
    for mode in modes_of(report):
        held = report.row(mode, STATE)
        formula = report.row(mode, STATE_FORMULA)
        assert held
        assert formula
        # Memory is a number without spread, so five equal values satisfy the rule of five rounds.
        off = abs(held.median / formula.median - 1)
        row = Measurement(mode, "state, error", "1", (off,) * 5, "one number: memory has no spread")
        report.add_target(f"{mode}: state held beside the formula", row, "<=", 0.01)
