"""`python -m nanoray.bench overlap`: what communication costs per bucket size, and what hides it.

One model, one DDP wrapper per bucket size around it, and one that never communicates (no_sync).
Every round runs a few steps of each in turn, so a slow minute of the machine hits all. Step times
are those of DDP's own C++ path; busy and exposed times come from extra steps with the recording
hook of `--comm_trace`, right after them. Wrappers that a step does not use cost it under a
microsecond per parameter, in all arms.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure, whiskers
from nanoray.bench.harness.plan import count_of, rotated
from nanoray.bench.harness.rank_pool import (
    RankFailed,
    RankPool,
    add_where_flags,
    describe,
    where_from,
)
from nanoray.bench.harness.report import Measurement, Report, aligned, markdown, ratio, say
from nanoray.config import load_config
from nanoray.errors import ConfigError

STEP = "step"
BUSY = "collectives busy"
EXPOSED = "exposed"
COST = "A/B cost"
NO_SYNC = "no_sync"
# Relative: buckets of another size sum in another order, no more; in 16 bits attention's backward
# has an order as well.
SAME_GRADIENT = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
CPU_BUCKETS = "0.1,0.25,0.5,1,2,4"
GPU_BUCKETS = "1,5,12.5,25,50,100,500"


class OverlapBenchmark(Benchmark):
    """Time a DDP step for several bucket sizes, and the communication that it does not hide."""

    wrong = "parameters whose gradient is not that of the first bucket size"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        sizes = f"bucket sizes in MB [{CPU_BUCKETS} on CPU, {GPU_BUCKETS} on GPU]"
        parser.add_argument("--buckets", metavar="MB,MB", help=sizes)
        parser.add_argument(
            "--preset", help="whose model and batch [shakespeare-cpu; on GPU gpt2-124m]"
        )
        parser.add_argument(
            "--rounds", type=int, metavar="N", help="rounds of all sizes [20; 3 with --quick]"
        )
        parser.add_argument(
            "--steps",
            type=int,
            metavar="N",
            help="steps of one size per round [10; 4 with --quick]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Sweep the bucket sizes and fill the report."""
        where = where_from(args)
        if where.workers < 2:
            raise ConfigError(
                f"workers = {where.workers}: one rank has nothing to hide; use --workers 2 or more"
            )
        rounds = count_of(args.rounds, args.quick, few=3, usual=20)
        steps = count_of(args.steps, args.quick, few=4, usual=10)
        if min(rounds, steps) < 1:
            raise ConfigError(
                f"rounds = {rounds}, steps = {steps}; both must be above 0: leave them out for 20 of 10"
            )
        asked = None if args.buckets is None else _parse_sizes(args.buckets)
        if args.preset:
            load_config(preset=args.preset)  # refuses one that is not known
        with RankPool(where) as pool:
            describe(report, pool)
            on_cpu = pool.facts[0]["device"] == "cpu"
            sizes = asked or _parse_sizes(CPU_BUCKETS if on_cpu else GPU_BUCKETS)
            preset = args.preset or ("shakespeare-cpu" if on_cpu else "gpt2-124m")
            recipe = f"preset {preset}, {rounds} rounds of {steps} steps, random tokens"
            report.conditions["recipe"] = recipe
            order = {"preset": preset, "sizes": sizes, "rounds": rounds, "steps": steps}
            found: dict[str, list[dict[str, Any]]] = {
                arm: [] for arm in (NO_SYNC, *map(_arm_name, sizes))
            }
            facts: dict[str, dict[str, Any]] = {}
            try:
                for event in pool.run("nanoray.bench.overlap:measure_rank", order):
                    if "facts" in event:
                        facts = event["facts"]
                        known = "{precision} ({why}), {parameters:,} parameters, vocabulary of {vocabulary:,}".format(
                            **event
                        )
                        report.conditions["recipe"] = f"{recipe}, {known}"
                        continue
                    found[event["arm"]].append(event)
                    say(f"round {event['round']}  {event['arm']:<8} {event['step_ms']:.1f} ms")
            except RankFailed as error:
                report.failures.append(str(error))
        for arm, events in found.items():
            fact = facts.get(arm, {})
            if fact:
                note = f"{fact['buckets']} bucket(s) of at most {fact['largest'] / 1e6:.3g} MB"
            else:
                note = ""
            _add_rows(report, arm, events, note, fact.get("wrong"))

    def format_text(self, report: Report) -> list[str]:
        """Return a table with a line per bucket size, medians with their quartiles, and the finding."""

        heads = (
            "buckets",
            "step, ms",
            "/ no_sync",
            "busy, ms",
            "exposed, ms",
            "A/B cost, ms",
            "n",
            "wrong",
            "",
        )
        found: list[tuple[str, ...]] = [heads]
        for row in (r for r in report.rows if r.metric == STEP and r.unit == "ms"):
            numbers = [report.cell(row.arm, STEP), report.cell(f"{row.arm} / {NO_SYNC}", STEP)]
            numbers += [report.cell(row.arm, metric) for metric in (BUSY, EXPOSED, COST)]
            wrong = "" if row.wrong is None else str(row.wrong)
            found.append(
                (row.arm, *numbers, str(row.n), wrong, row.problem if not row.values else row.note)
            )
        return [*aligned(found, right=set(range(1, 8))), "", *report.findings(finding(report))]

    def format_markdown(self, report: Report) -> list[str]:
        """Return a table for a README, and the finding."""
        arms = [r.arm for r in report.rows if r.metric == STEP and r.unit == "ms" and r.values]
        header = ("buckets", "step, ms", "busy, ms", "exposed, ms", "A/B cost, ms")
        cells = [
            (arm, *(report.cell(arm, metric, "range") for metric in (STEP, BUSY, EXPOSED, COST)))
            for arm in arms
        ]
        return [*markdown(header, cells), "", *report.findings(finding(report))]

    def draw(self, report: Report, path: Path) -> None:
        """Draw step, hidden and exposed time over the bucket size."""
        arms = [
            r
            for r in report.rows
            if r.metric == STEP and r.unit == "ms" and r.arm != NO_SYNC and r.values
        ]
        bare = report.row(NO_SYNC, STEP)
        names = [r.arm for r in arms]
        ranks = report.conditions.get("ranks", {}).get("world size", "?")
        note = f"{ranks} ranks, {report.conditions['backend']} · {report.conditions['recipe']}"
        with figure(report, path, note=note) as (left, right):
            spread = whiskers(arms, quartiles=True)
            left.errorbar(
                names, [r.median for r in arms], yerr=spread, marker="o", capsize=3, label="step"
            )
            if bare and bare.values:
                left.axhline(
                    bare.median, color="0.5", ls="--", label="step without communication (no_sync)"
                )
            left.set(
                title="optimizer step over DDP's bucket size", ylabel="ms, median and quartiles"
            )
            left.legend(fontsize=8)
            exposed = [_median(report, arm, EXPOSED) for arm in names]
            hidden = [_median(report, arm, BUSY) - e for arm, e in zip(names, exposed, strict=True)]
            right.bar(names, hidden, color="#f0b27a", label="hidden behind backward")
            right.bar(names, exposed, bottom=hidden, color="#c0392b", label="exposed")
            costs = [_median(report, arm, COST) for arm in names]
            right.plot(names, costs, "k_", ms=18, label="A/B: step - step under no_sync")
            right.set(title="communication of a step", ylabel="ms, medians")
            right.legend(fontsize=8)


def _parse_sizes(text: str) -> list[float]:
    try:
        sizes = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(
            f"buckets = {text}: not numbers; write MB,MB like {CPU_BUCKETS}"
        ) from None
    if not all(0 < size < math.inf for size in sizes):
        raise ConfigError(
            f"buckets = {text}: a bucket needs a size above 0 and below infinity, like "
            f"{CPU_BUCKETS}"
        )
    return sizes


def _arm_name(mb: float) -> str:
    return f"{mb:g} MB"


def _add_rows(
    report: Report, arm: str, events: list[dict[str, Any]], note: str, wrong: int | None
) -> None:
    def row(metric: str, key: str) -> Measurement:
        return Measurement(
            arm,
            metric,
            "ms",
            tuple(e[key] for e in events),
            note,
            wrong=wrong if metric == STEP else None,
        )

    report.rows.append(row(STEP, "step_ms"))
    if arm == NO_SYNC or not events:
        return
    report.rows += [row(BUSY, "busy_ms"), row(EXPOSED, "exposed_ms")]
    bare = report.row(NO_SYNC, STEP)
    assert bare is not None
    own = report.rows[-3]
    cost = tuple(a - b for a, b in zip(own.values, bare.values, strict=False))
    report.rows.append(
        Measurement(arm, COST, "ms", cost, "step - step under no_sync, paired by round")
    )
    report.rows.append(ratio(f"{arm} / {NO_SYNC}", STEP, own, bare))


def finding(report: Report) -> list[str]:
    """Return the fastest bucket size, and whether hiding more made steps faster."""
    arms = [
        r
        for r in report.rows
        if r.metric == STEP and r.unit == "ms" and r.arm != NO_SYNC and r.values
    ]
    if not arms:
        return []
    # By the paired ratio to no_sync, not by medians of times that were taken in different minutes.
    slowdown = {r.arm: _median(report, f"{r.arm} / {NO_SYNC}", STEP) for r in arms}
    hidden = {
        r.arm: 100 * (1 - _median(report, r.arm, EXPOSED) / _median(report, r.arm, BUSY))
        for r in arms
    }
    best = min(slowdown, key=lambda a: slowdown[a])
    most = max(hidden, key=lambda a: hidden[a])
    lines = [
        f"fastest: {best} buckets, a step takes {slowdown[best]:.3f} x one that does not "
        "communicate, "
        f"{hidden[best]:.0f} % of the communication hidden: --bucket_mb {best.removesuffix(' MB')} "
        "on this machine",
    ]
    if most != best:
        lines.append(
            f"most hidden: {most} buckets, {hidden[most]:.0f} %, yet {slowdown[most]:.3f} x: "
            "hiding more is not faster "
            "where communication takes compute's cores, or where small messages cost latency"
        )
    return lines


def _median(report: Report, arm: str, metric: str) -> float:
    row = report.row(arm, metric)
    assert row is not None
    return row.median


# On every rank.


def _make_recipe(mesh: Any, preset: str) -> tuple[Any, Any, Callable[[Any], Any], dict[str, Any]]:
    """Return a preset's model, optimizer, forward function and description. (all ranks)"""
    import torch

    from nanoray.bench.simulate import VOCAB
    from nanoray.models.costs import count_parameters
    from nanoray.models.gpt import GPT, ModelShape
    from nanoray.models.precision import autocast
    from nanoray.train.agree import agree_on_precision, resolve_precision
    from nanoray.train.optim.groups import make_optimizer

    cfg = load_config(preset=preset)
    precision, why = agree_on_precision(mesh, resolve_precision(cfg, mesh))
    torch.manual_seed(cfg.seed)
    shape = ModelShape.of(cfg, VOCAB[cfg.tokenizer])
    gpt = GPT(shape, 0.0).to(mesh.device)
    rows = cfg.micro_batch_size or max(1, cfg.global_batch_size // mesh.world_size)
    source = torch.Generator().manual_seed(mesh.rank)
    size = rows, cfg.block_size
    # (B, T)
    x, y = (
        torch.randint(shape.vocab_size, size, generator=source).to(mesh.device) for _ in range(2)
    )

    def forward(model: Any) -> Any:
        # As the engine does; without the loss scaler of fp16
        with autocast(mesh.device.type, precision):
            return model(x, y)

    description = {
        "precision": precision,
        "why": why,
        "parameters": count_parameters(shape),
        "vocabulary": shape.vocab_size,
    }
    return gpt, make_optimizer(gpt, cfg), forward, description


def measure_rank(mesh: Any, order: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Run the rounds; emit one event per arm and round: ms, the slowest rank's. (all ranks)"""
    import torch

    from nanoray.parallel.ddp import apply_ddp
    from nanoray.trace.recorder import Collective, CommRecorder, account, wait_for

    gpt, optimizer, forward, description = _make_recipe(mesh, order["preset"])
    plain: dict[str, Any] = {_arm_name(mb): apply_ddp(gpt, mesh, mb) for mb in order["sizes"]}
    recorders = {arm: CommRecorder(mesh, every=1, profile=False) for arm in plain}
    noted = {
        _arm_name(mb): apply_ddp(gpt, mesh, mb, recorders[_arm_name(mb)].hook)
        for mb in order["sizes"]
    }
    first = next(iter(plain.values()))

    def step(model: Any, recorder: CommRecorder | None = None) -> None:
        if recorder:
            recorder.begin(0)
        forward(model).backward()
        if recorder:
            recorder.end()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def worst(ms: float) -> float:
        return mesh.all_reduce(torch.tensor([ms], device=mesh.device), op="max").item()

    def gradients(model: Any) -> list[torch.Tensor]:
        forward(model).backward()
        found = [p.grad.clone() for p in gpt.parameters() if p.grad is not None]
        optimizer.zero_grad(set_to_none=True)
        return found

    facts = {}
    reference = gradients(first)
    for arm, model in plain.items():
        gradients(model)  # DDP regroups its buckets after the first backward
        pairs = zip(gradients(model), reference, strict=True)
        wrong = sum(
            torch.dist(a, b).item() > SAME_GRADIENT[description["precision"]] * torch.norm(b).item()
            for a, b in pairs
        )
        gradients(noted[arm])
        recorders[arm].begin(0)
        gradients(noted[arm])
        recorders[arm].end()
        buckets = [c["size_bytes"] for c in recorders[arm].read()[0]["collectives"]]
        facts[arm] = {"wrong": wrong, "buckets": len(buckets), "largest": max(buckets)}
    emit({"facts": facts, **description})

    arms = [NO_SYNC, *plain]
    for turn in range(order["rounds"]):
        for arm in rotated(arms, turn):
            mesh.barrier()
            start = time.perf_counter()
            for _ in range(order["steps"]):
                if arm == NO_SYNC:
                    with first.no_sync():
                        step(first)
                else:
                    step(plain[arm])
            wait_for(mesh.device)
            event = {"arm": arm, "round": turn}
            event["step_ms"] = worst(1e3 * (time.perf_counter() - start) / order["steps"])
            if arm != NO_SYNC:
                recorders[arm].clock.anchor()
                for _ in range(3):
                    step(noted[arm], recorders[arm])
                wait_for(mesh.device)
                costs = [
                    account([Collective(**c) for c in s["collectives"]])
                    for s in recorders[arm].read()
                ]
                event["busy_ms"] = worst(1e3 * median(c.busy for c in costs))
                event["exposed_ms"] = worst(1e3 * median(c.exposed for c in costs))
            emit(event)
