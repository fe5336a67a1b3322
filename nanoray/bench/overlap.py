"""`python -m nanoray.bench overlap`: what communication costs per bucket size, and what hides it.

One model, one DDP wrapper per bucket size around it, and one that never communicates (no_sync).
Every round runs a few steps of each in turn, so a slow minute of the machine hits all. Step times
are those of DDP's own C++ path; busy and exposed times come from extra steps with the recording
hook of `--comm_trace`, right after them. Wrappers that a step does not use cost it under a
microsecond per parameter, in all arms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from nanoray.bench.engine import BUSY, EXPOSED, STEP, Found, each
from nanoray.bench.harness.benchmark import Benchmark, Count, part
from nanoray.bench.harness.figure import Figure, Panel, dots, measured, with_values
from nanoray.bench.harness.plan import numbers_of, rotated
from nanoray.bench.harness.rank_pool import RankPool, add_where_flags, describe, where_from
from nanoray.bench.harness.report import Emit, Measurement, Record, Report, say
from nanoray.bench.harness.table import (
    SPREAD,
    TEXT,
    Table,
    TableColumn,
    names,
    remarks_on,
)
from nanoray.config import load_config
from nanoray.errors import ConfigError

COST = "A/B cost"
NO_SYNC = "no_sync"
# Relative: buckets of another size sum in another order, no more; in 16 bits attention's backward
# has an order as well.
SAME_GRADIENT = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
CPU_BUCKETS = "0.1,0.25,0.5,1,2,4"
GPU_BUCKETS = "1,5,12.5,25,50,100,500"


def _swept(report: Report) -> list[Measurement]:
    """Return the steps of the bucket sizes."""
    return [row for row in with_values(report, STEP) if row.arm != NO_SYNC]


def _draw_steps(axes: Any, report: Report) -> None:
    """Draw the step over the bucket size."""
    rows = _swept(report)
    dots(axes, [row.arm for row in rows], rows, fmt="-o", capsize=3, label="step")
    for bare in measured(report, [NO_SYNC], STEP):
        text = "step without communication (no_sync)"
        axes.axhline(bare.median, color="0.5", ls="--", label=text)


def _draw_communication(axes: Any, report: Report) -> None:
    """Draw hidden and exposed time over the bucket size."""
    sizes = [row.arm for row in _swept(report)]
    exposed = [_median(report, arm, EXPOSED) for arm in sizes]
    hidden = [_median(report, arm, BUSY) - e for arm, e in zip(sizes, exposed, strict=True)]
    costs = [_median(report, arm, COST) for arm in sizes]
    axes.bar(sizes, hidden, color="#f0b27a", label="hidden behind backward")
    axes.bar(sizes, exposed, bottom=hidden, color="#c0392b", label="exposed")
    axes.plot(sizes, costs, "k_", ms=18, label="A/B: step - step under no_sync")


def _note(report: Report) -> str:
    known = report.conditions
    ranks = known.get("ranks", {}).get("world size", "?")
    return f"{ranks} ranks, {known['backend']} · {known['recipe']}"


class OverlapBenchmark(Benchmark):
    """Time a DDP step for several bucket sizes, and the communication that it does not hide."""

    wrong = "parameters whose gradient is not that of the first bucket size"
    counts = (
        Count("rounds", "rounds of all sizes", usual=20, few=3),
        Count("steps", "steps of one size per round", usual=10, few=4),
    )
    tables = (
        Table(
            STEP,
            (
                names("buckets"),
                TableColumn("step, ms", STEP, SPREAD),
                TableColumn("/ no_sync", STEP, SPREAD, over=NO_SYNC, only=TEXT),
                TableColumn("busy, ms", BUSY, SPREAD),
                TableColumn("exposed, ms", EXPOSED, SPREAD),
                TableColumn("A/B cost, ms", COST, SPREAD),
                *remarks_on(STEP),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                _draw_steps,
                {
                    "title": "optimizer step over DDP's bucket size",
                    "ylabel": "ms, median and quartiles",
                },
                {"fontsize": 8},
            ),
            Panel(
                _draw_communication,
                {"title": "communication of a step", "ylabel": "ms, medians"},
                {"fontsize": 8},
            ),
        ),
        note=_note,
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        sizes = f"bucket sizes in MB [{CPU_BUCKETS} on CPU, {GPU_BUCKETS} on GPU]"
        parser.add_argument("--buckets", metavar="MB,MB", help=sizes)
        parser.add_argument(
            "--preset", help="whose model and batch [shakespeare-cpu; on GPU gpt2-124m]"
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Sweep the bucket sizes and fill the report."""
        where = where_from(args)
        if where.workers < 2:
            raise ConfigError(
                f"workers = {where.workers}: one rank has nothing to hide; use --workers 2 or more"
            )
        asked = None if args.buckets is None else _parse_sizes(args.buckets)
        if args.preset:
            load_config(preset=args.preset)  # refuses one that is not known
        found: Found = {}
        facts: dict[str, Record] = {}

        def add_rows() -> None:
            for arm, events in found.items():
                _add_rows(report, arm, events, facts.get(arm, {}))

        with part(report, add_rows), RankPool(where) as pool:
            describe(report, pool)
            on_cpu = pool.facts[0]["device"] == "cpu"
            sizes = asked or _parse_sizes(CPU_BUCKETS if on_cpu else GPU_BUCKETS)
            preset = args.preset or ("shakespeare-cpu" if on_cpu else "gpt2-124m")
            rounds = f"{args.rounds} rounds of {args.steps} steps"
            recipe = f"preset {preset}, {rounds}, random tokens"
            report.conditions["recipe"] = recipe
            order = {"preset": preset, "sizes": sizes, "rounds": args.rounds, "steps": args.steps}
            found |= {arm: [] for arm in (NO_SYNC, *map(_arm_name, sizes))}
            for event in pool.run("nanoray.bench.overlap:measure_rank", order):
                if "facts" in event:
                    facts |= event["facts"]
                    known = "{precision} ({why}), {parameters:,} parameters, vocabulary of {vocabulary:,}"
                    report.conditions["recipe"] = f"{recipe}, {known.format(**event)}"
                    continue
                found[event["arm"]].append(event)
                say(f"round {event['round']}  {event['arm']:<8} {event['step_ms']:.1f} ms")

    def finding(self, report: Report) -> list[str]:
        """Return the fastest bucket size, and whether hiding more made steps faster."""
        arms = [row.arm for row in _swept(report)]
        if not arms:
            return []
        # By the paired ratio to no_sync, not by medians of times that were taken in different
        # minutes.
        slowdown = {arm: _median(report, f"{arm} / {NO_SYNC}", STEP) for arm in arms}
        hidden = {}
        for arm in arms:
            share = _median(report, arm, EXPOSED) / _median(report, arm, BUSY)
            hidden[arm] = 100 * (1 - share)
        best = min(slowdown, key=lambda arm: slowdown[arm])
        most = max(hidden, key=lambda arm: hidden[arm])
        lines = [
            f"fastest: {best} buckets, a step takes {slowdown[best]:.3f} x one that does not "
            f"communicate, {hidden[best]:.0f} % of the communication hidden: --bucket_mb "
            f"{best.removesuffix(' MB')} on this machine",
        ]
        if most != best:
            lines.append(
                f"most hidden: {most} buckets, {hidden[most]:.0f} %, yet {slowdown[most]:.3f} x: "
                "hiding more is not faster where communication takes compute's cores, or where "
                "small messages cost latency"
            )
        return lines


def _parse_sizes(text: str) -> list[float]:
    return sorted(set(numbers_of(text, "buckets", CPU_BUCKETS)))


def _arm_name(mb: float) -> str:
    return f"{mb:g} MB"


def _add_rows(report: Report, arm: str, events: list[Record], fact: Record) -> None:
    note = ""
    if fact:
        note = f"{fact['buckets']} bucket(s) of at most {fact['largest'] / 1e6:.3g} MB"
    times = each(events, "step_ms")
    own = report.add(arm, STEP, "ms", times, note, wrong=fact.get("wrong"))
    if arm == NO_SYNC or not events:
        return
    bare = report.row(NO_SYNC, STEP)
    assert bare is not None
    cost = [a - b for a, b in zip(own.values, bare.values, strict=False)]
    report.add(arm, BUSY, "ms", each(events, "busy_ms"), note)
    report.add(arm, EXPOSED, "ms", each(events, "exposed_ms"), note)
    report.add(arm, COST, "ms", cost, "step - step under no_sync, paired by round")
    report.compare(arm, NO_SYNC, STEP)


def _median(report: Report, arm: str, metric: str) -> float:
    row = report.row(arm, metric)
    assert row is not None
    return row.median


# On every rank.


def _make_recipe(mesh: Any, preset: str) -> tuple[Any, Any, Callable[[Any], Any], Record]:
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


def measure_rank(mesh: Any, order: Record, emit: Emit) -> None:
    """Run the rounds; emit one event per arm and round: ms, the slowest rank's. (all ranks)"""
    import torch

    from nanoray.parallel.ddp import apply_ddp
    from nanoray.trace.recorder import Collective, CommRecorder, account, wait_for

    gpt, optimizer, forward, description = _make_recipe(mesh, order["preset"])
    plain: Record = {_arm_name(mb): apply_ddp(gpt, mesh, mb) for mb in order["sizes"]}
    recorders = {arm: CommRecorder(mesh, every=1) for arm in plain}
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
