"""`python -m nanoray.bench precision`: what 16 bits lose, what cures it, what each mode costs.

One process trains a small GPT in every precision, on the same batches, and measures apart:
gradients that underflow, updates that are lost, Adam's moments, overflow in attention and in
compressed sums, the loss scale after overflows, and eight bits in the residual stream and in the
loss. docs/precision.md explains the rows.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure
from nanoray.bench.harness.plan import add_settings_flag, count_of, settings_of
from nanoray.bench.harness.report import Measurement, Report, Target, markdown, say
from nanoray.config import load_config
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError

if TYPE_CHECKING:
    from nanoray.bench.precision_lab import Lab

MODES: dict[str, dict[str, Any]] = {
    name: {"precision": name} for name in ("fp32", "bf16", "fp16", "bf16_pure")
}
MODES["bf16_pure, stochastic"] = {"precision": "bf16_pure", "rounding": "stochastic"}
MODES["bf16_pure, fp32 masters"] = {"precision": "bf16_pure", "master_weights": "fp32"}
MODES["fp16_pure"] = {"precision": "fp16_pure"}
MODES["fp16_pure, fp32 masters"] = {"precision": "fp16_pure", "master_weights": "fp32"}
FP8: dict[str, dict[str, Any]] = {
    f", per {how}": {"precision": "fp8", "fp8_scaling": how} for how in ("tensor", "row")
}
MODES |= {f"fp8 emulated{how}": of for how, of in FP8.items()}
ON_GPUS = {name: of for name, of in MODES.items() if of["precision"] != "fp8"} | {
    "tf32": {"precision": "tf32"}
}
SETTINGS: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "block_size": 32,
    "global_batch_size": 4,
}
TINY: dict[str, Any] = SETTINGS | {
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
WEIGHTS = (0, 4, 8, 12, 16, 20, 24)  # k of a loss weight of 2^-k
NO_SCALE = "lost"
SCALED = "lost, scaled"
LATE = "lost, trained"
LATE_SCALED = "lost, trained, scaled"
SMALL = "subnormal, trained"
RATES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
UPDATES: dict[str, dict[str, Any]] = {
    name: of for name, of in MODES.items() if name.endswith("_pure")
}
UPDATES |= {name: of for name, of in MODES.items() if name.startswith("bf16_pure, ")}
STUCK = "never moved"
WENT = "went"
EXPONENTS = (-1, -2, -3, -4, -5, -6, -7)
PLAIN = "wrong, m and v"
ROOT = "wrong, scaled m and √v"
HEADS = (8.0, 16.0, 32.0, 64.0, 128.0)
RANKS = (2, 8, 64, 512, 4096)
MEANS = ("sum, then divide", "divide, then sum", "by √n, twice")
OVERFLOWS = (1, 5, 10, 16)
DEPTHS = (2, 8, 32)
KINDS = ("bf16", "bf16_pure", "fp16_pure")
Axes = Any


class PrecisionBenchmark(Benchmark):
    """Measure what 16 bits lose in training, and what each mode costs."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--dataset", default="stdlib", help="text to learn, as of nanoray.train [%(default)s]"
        )
        parser.add_argument(
            "--steps", type=int, metavar="N", help="steps of each mode [100; 24 with --quick]"
        )
        parser.add_argument(
            "--rounds",
            type=int,
            metavar="N",
            help="rounds of all modes in turn [10; 2 with --quick]",
        )
        parser.add_argument(
            "--workers", type=int, metavar="N", default=1, help="1: this bench is one process"
        )
        gpu = "cuda: what each mode costs on a GPU, without the studies, whose numbers no device changes [%(default)s]"
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=gpu)
        add_settings_flag(parser, "those of the small model")

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Run all experiments and fill the report."""
        steps = count_of(args.steps, args.quick, few=24, usual=100)
        rounds = count_of(args.rounds, args.quick, few=2, usual=10)
        # Refuse before torch is imported, which takes seconds.
        if args.workers != 1:
            raise ConfigError(
                f"workers = {args.workers}, but this bench studies arithmetic in one process; drop "
                "--workers"
            )
        if rounds < 1 or steps < rounds:
            raise ConfigError(
                f"steps = {steps}, rounds = {rounds}; at least one step a round, and one round"
            )
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

    def format_markdown(self, report: Report) -> list[str]:
        """Return the tables of docs/precision.md."""

        # One table of the page: a line for each arm, a column for each metric.
        def of(arms: list[str], metrics: dict[str, str], first: str) -> list[str]:
            if not any(report.row(arm, metric) for arm in arms for metric in metrics):
                return []  # a GPU's report has the modes alone
            lines = [
                [arm, *(format_value(report, arm, metric) for metric in metrics)] for arm in arms
            ]
            return [*markdown([first, *metrics.values()], lines), ""]

        costs = {
            STEP: "step, ms",
            STATE: "state, MiB",
            STATE_FORMULA: "by formula",
            KEPT: "kept for backward, MiB",
        }
        costs |= {KEPT_FORMULA: "with logits, by formula", LOSS: "final loss", SKIPPED: "skipped"}
        # Two columns for each way to take the mean.
        sums = {
            f"{what}, {how}": f"{what}: {how}" for how in MEANS for what in ("overflow", "zero")
        }
        attention = (
            "fp16, scaled after",
            "fp16, scaled before",
            "fp16, torch's kernel",
            "bf16, scaled after",
        )
        sections = [
            of(modes_of(report), costs, "mode"),
            of(
                [f"loss × 2^-{k}" for k in WEIGHTS],
                {k: k for k in (NO_SCALE, SCALED, LATE, LATE_SCALED)},
                "lost, %",
            ),
            of(
                _layer_arms(report),
                {LATE: "zero", SMALL: "subnormal"},
                "gradients of loss × 2^-8, trained, no scale, %",
            ),
            of(
                [f"lr {lr:.0e}" for lr in RATES],
                {f"{STUCK}, {n}": n for n in UPDATES},
                "weights that never moved, %",
            ),
            of(
                [f"lr {lr:.0e}" for lr in RATES],
                {f"{WENT}, {n}": n for n in UPDATES},
                "distance, % of float64's",
            ),
            of(
                [f"gradients of 1e{e}" for e in EXPONENTS],
                {PLAIN: "m and v in fp16", ROOT: "2^12·m, 2^12·√v"},
                "wrong, %",
            ),
            of(
                [f"q and k of {h:g}" for h in HEADS],
                {f"not finite, {h}": h for h in attention},
                "not finite, %",
            ),
            of([f"{n} ranks" for n in RANKS], sums, "mean in fp16, %"),
            of(
                [f"{n} overflows" for n in OVERFLOWS],
                {"lowest scale": "lowest scale", LATE: "lost, %"},
                "in a row",
            ),
            of(
                [f"{n} layers" for n in DEPTHS],
                {f"error, {kind}": kind for kind in KINDS},
                "residual stream, % off",
            ),
            of(
                [f"loss in {kind}" for kind in ("bf16", "fp16", "fp32")],
                {"error": "error, nat"},
                "mean loss",
            ),
        ]
        return [line for section in sections for line in section]

    def draw(self, report: Report, path: Path) -> None:
        """Draw one picture per claim."""
        with figure(report, path, (16, 11), (3, 3)) as axes:
            # Share of lost gradients against the weight of the loss.
            _plot_lines(
                axes[0],
                report,
                [f"loss × 2^-{k}" for k in WEIGHTS],
                WEIGHTS,
                (NO_SCALE, SCALED, LATE, LATE_SCALED),
            )
            axes[0].set(
                title="gradients that fp16 makes zero", xlabel="k of a loss × 2^-k", ylabel="%"
            )
            # Zero and subnormal gradients of each layer, one bar on top of the other.
            layers = _layer_arms(report)
            bottom = [0.0] * len(_layer_arms(report))
            for metric, label in ((LATE, "zero"), (SMALL, "subnormal")):
                rows = [report.row(layer, metric) for layer in layers]
                shares = [row.median if row else 0.0 for row in rows]
                axes[1].bar(
                    [layer.removeprefix("layer ") for layer in layers],
                    shares,
                    bottom=bottom,
                    label=label,
                )
                bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
            axes[1].tick_params(axis="x", rotation=30)
            axes[1].set(title="the same by layer, loss × 2^-8, no scale", ylabel="%")
            # Updates that round to nothing, against the learning rate.
            rates = [f"lr {lr:.0e}" for lr in RATES]
            _plot_lines(axes[2], report, rates, RATES, [f"{WENT}, {name}" for name in UPDATES])
            axes[2].set(
                title="distance of repeated small updates",
                xlabel="lr",
                ylabel="% of float64's",
                xscale="log",
            )
            # Second moments below fp16's range make AdamW's updates wrong.
            arms = [f"gradients of 1e{e}" for e in EXPONENTS]
            _plot_lines(axes[3], report, arms, EXPONENTS, (PLAIN, ROOT))
            axes[3].set(
                title="AdamW's state in fp16: wrong updates",
                xlabel="log10 of the gradient",
                ylabel="%",
            )
            # Attention's logits grow with the square of q and k.
            how = [r.metric for r in report.rows if r.arm == f"q and k of {HEADS[0]:g}"]
            _plot_lines(axes[4], report, [f"q and k of {h:g}" for h in HEADS], HEADS, how)
            axes[4].set(title="attention that is not finite", xlabel="size of q and k", ylabel="%")
            # A sum over ranks overflows unless it is divided before.
            sums = [f"{what}, {how}" for how in MEANS for what in ("overflow", "zero")]
            _plot_lines(axes[5], report, [f"{n} ranks" for n in RANKS], RANKS, sums)
            axes[5].set(title="mean over ranks in fp16", xlabel="ranks", ylabel="%", xscale="log")
            # Each overflow halves the scale, and only many good steps double it again.
            for count in OVERFLOWS:
                row = report.row(f"{count} overflows", "scale")
                if row:
                    axes[6].plot(row.values, label=row.arm)
            axes[6].set(
                title="life of a loss scale (growth interval 20)",
                xlabel="step",
                ylabel="scale",
                yscale="log",
            )
            # Rounding errors add up over the layers of the residual stream.
            _plot_lines(
                axes[7],
                report,
                [f"{n} layers" for n in DEPTHS],
                DEPTHS,
                [f"error, {kind}" for kind in KINDS],
            )
            axes[7].set(
                title="error of the residual stream", xlabel="layers", ylabel="%", xscale="log"
            )
            # The losses of all modes on the same batches.
            for name in modes_of(report):
                row = report.row(name, CURVE)
                if row:
                    axes[8].plot(row.values, label=name, linewidth=1)
            axes[8].set(
                title="loss of each mode, same batches",
                xlabel="60ths of the run",
                ylabel="nat/token",
            )
            for each in axes:
                each.legend(fontsize=6)


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
    say("moments, overflow, eight bits")
    moments(report)
    overflow(lab, report, trained)
    eight_bits(lab, report, trained, 2 if quick else 5)


def train_modes(lab: Lab, report: Report, steps: int, rounds: int) -> dict[str, Any]:
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
    for name, ms in rounds_of(runs, steps, rounds):
        times[name].append(statistics.median(ms))
    for name, run in runs.items():
        say(f"{name:<24} {statistics.median(times[name]):.1f} ms, loss {run.losses[-1]:.3f}")
        # Memory held and the formula's, side by side; the time is the median of each round.
        held = sum(run.held.values())
        formula = run.formula
        report.rows += [
            Measurement(name, STEP, "ms", tuple(times[name])),
            Measurement(name, STATE, "MiB", (held / 2**20,), extra={"held": run.held}),
            Measurement(name, STATE_FORMULA, "MiB", (formula["state"] / 2**20,)),
            Measurement(name, KEPT, "MiB", (run.kept_for_backward() / 2**20,), "kept for backward"),
            Measurement(
                name,
                KEPT_FORMULA,
                "MiB",
                (formula["batch"] / 2**20,),
                "activations, copies and both logits",
            ),
            Measurement(
                name,
                LOSS,
                "nat",
                (statistics.mean(run.losses[-max(1, steps // 10) :]),),
                "mean of the last tenth",
            ),
            Measurement(name, CURVE, "nat", tuple(run.losses[:: max(1, steps // 60)])),
        ]
        if run.scaler.enabled:
            report.rows.append(
                Measurement(name, SKIPPED, "steps", (float(run.scaler.values()["skipped"]),))
            )
    return {name: p.detach() for name, p in runs["fp32"].model.named_parameters()}


def underflow(lab: Lab, report: Report, trained: dict[str, Any], batches: int) -> None:
    """Count gradients that fp16 makes zero: by loss scale, before and after training, by layer."""
    from nanoray.bench.precision_lab import gradients, largest_scale, lost, pieces_of, subnormal

    # Fresh weights have large gradients. Late in training they are small, and fp16 loses more.
    first = lab.model()
    late = lab.model()
    late.load_state_dict(trained, strict=False)
    layers: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in pieces_of(late)
    }
    for k in WEIGHTS:
        found: dict[str, list[float]] = {name: [] for name in (NO_SCALE, SCALED, LATE, LATE_SCALED)}
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
                # One weight of the loss is broken down by layer.
                if model is late and k == 8:
                    for name, (zeros, small) in layers.items():
                        zeros.append(lost(half, exact, name))
                        small.append(subnormal(half, name))
        arm = f"loss × 2^-{k}"
        report.rows += [
            Measurement(arm, name, "%", tuple(values)) for name, values in found.items()
        ]
        report.rows.append(
            Measurement(arm, "scale", "1", tuple(scales), "largest without an overflow, up to 2^24")
        )
    for name, both in layers.items():
        for metric, values in zip((LATE, SMALL), both, strict=True):
            report.rows.append(
                Measurement(f"layer {name}", metric, "%", tuple(values), "loss × 2^-8, no scale")
            )


def updates(lab: Lab, report: Report, trained: dict[str, Any], steps: int) -> None:
    """Repeat one update of trained weights; count those that do not move."""
    from nanoray.bench.precision_lab import move

    for lr in RATES:
        for name, settings in UPDATES.items():
            # The same update again and again, as in a long run with a small rate.
            stuck, went = move(lab, trained, lr, steps, **settings)
            report.rows.append(
                Measurement(
                    f"lr {lr:.0e}", f"{STUCK}, {name}", "%", (stuck,), f"in {steps} updates"
                )
            )
            report.rows.append(
                Measurement(
                    f"lr {lr:.0e}", f"{WENT}, {name}", "%", (went,), "100: as far as in float64"
                )
            )


def moments(report: Report) -> None:
    """Compare AdamW's first updates with fp16 state with exact ones, by size of the gradient."""
    from nanoray.bench.precision_lab import adam_in_fp16

    for exponent in EXPONENTS:
        plain, scaled = adam_in_fp16(10.0**exponent)
        arm = f"gradients of 1e{exponent}"
        report.rows += [
            Measurement(arm, PLAIN, "%", (plain,), "off by over a tenth"),
            Measurement(arm, ROOT, "%", (scaled,)),
        ]


def overflow(lab: Lab, report: Report, trained: dict[str, Any]) -> None:
    """Let attention's logits, sums over ranks, and whole steps overflow."""
    import torch

    from nanoray.bench.precision_lab import (
        attention_overflow,
        compressed_mean,
        gradients,
        life_of_a_scale,
        lost,
    )

    # Softmax's inputs overflow before the division by the root of the head's size.
    for size in HEADS:
        for how, bad in attention_overflow(size).items():
            report.rows.append(
                Measurement(f"q and k of {size:g}", f"not finite, {how}", "%", (bad,))
            )
    # Sums over ranks: of real gradients, not of random numbers.
    model = lab.model()
    batch = lab.batch(2000)
    model.load_state_dict(trained, strict=False)
    exact = gradients(model, batch, "fp32")
    flat = torch.cat([g.flatten() for g in exact.values()])
    # As dynamic scaling leaves them: the largest near fp16's limit
    scaled = flat * (2.0**14 / flat.abs().max())
    for ranks in RANKS:
        for how in MEANS:
            over, zero = compressed_mean(scaled, ranks, how)
            report.rows += [
                Measurement(f"{ranks} ranks", f"overflow, {how}", "%", (over,)),
                Measurement(f"{ranks} ranks", f"zero, {how}", "%", (zero,)),
            ]
    # A burst of overflows lowers the scale; gradients that are then zero are the price.
    for count in OVERFLOWS:
        scales = life_of_a_scale(count, 120, interval=20)
        low = gradients(model, batch, "fp16", min(scales))
        arm = f"{count} overflows"
        report.rows += [
            Measurement(arm, "lowest scale", "1", (min(scales),)),
            Measurement(arm, LATE, "%", (lost(low, exact),), "at the lowest scale"),
            Measurement(
                arm,
                "scale",
                "1",
                tuple(scales),
                "after each of 120 steps; growth interval 20 in place of 1000",
            ),
        ]


def eight_bits(lab: Lab, report: Report, trained: dict[str, Any], batches: int) -> None:
    """Measure what 16 bits in the residual stream and in the loss do to their values."""
    import torch

    from nanoray.bench.precision_lab import loss_error, stream_error

    # An untrained model is enough: rounding in the stream does not depend on the weights' meaning.
    for layers in DEPTHS:
        for kind in KINDS:
            error = stream_error(lab, layers, kind)
            report.rows.append(
                Measurement(
                    f"{layers} layers",
                    f"error, {kind}",
                    "%",
                    (error,),
                    "residual stream, untrained",
                )
            )
    # Equal logits for all types, so that only the loss itself differs.
    model = lab.model()
    model.load_state_dict(trained, strict=False)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        errors = [loss_error(model, lab.batch(3000 + i), dtype) for i in range(batches)]
        report.rows.append(
            Measurement(
                f"loss in {name}",
                "error",
                "nat",
                tuple(errors),
                "log-softmax and mean, equal logits",
            )
        )


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
        report.targets.append(Target(f"{mode}: state held beside the formula", row, "<=", 0.01))


def modes_of(report: Report) -> list[str]:
    """Return the modes that were measured, in their order."""
    return [row.arm for row in report.rows if row.metric == STATE]


def format_value(report: Report, arm: str, metric: str) -> str:
    return report.cell(arm, metric, "none") or "·"


def _layer_arms(report: Report) -> list[str]:
    return list(
        dict.fromkeys(row.arm for row in report.rows if row.arm.startswith("layer ") and row.values)
    )


def _plot_lines(axes: Axes, report: Report, arms: list[str], xs: Any, metrics: Any) -> None:
    for metric in metrics:
        points = []
        for x, arm in zip(xs, arms, strict=True):
            row = report.row(arm, metric)
            if row:
                points.append((x, row.median))
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=metric)
