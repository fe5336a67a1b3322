"""`python -m nanoray.bench train`: what starting, running and watching a training costs, against its peers.

Launchers, each running the same recipe with the same seed, round by round in rotating order:

    plain              python -m nanoray.train                        one process
    torchrun           torchrun --nproc-per-node W -m nanoray.train
    ray                python -m nanoray.launch                       on a running cluster
    ray-init           python -m nanoray.launch --ray_address local   with its own Ray
    torchtrainer       Ray Train's TorchTrainer around nanoray's recipe (ray_train_peer.py), on the same cluster
    torchtrainer-init  the same with its own Ray

The cluster is this benchmark's own: a head that idles beside every arm, whichever is running. Then what a
step costs on CPU (compute.py: baseline, engine, engine-2, and at width 384 baseline-384, engine-384), what measuring
the collectives of two ranks costs and shows (untraced, every-50, always), and what watching costs (traffic.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.bench.launchers import LAUNCHERS, METRICS, SAME_LOSS, Moments, command, run_once
from nanoray.bench.processes import Child, ChildFailed, arm_environment, ray_head, session_members
from nanoray.bench.report import Report, Row, Target, markdown, number
from nanoray.config import load_config
from nanoray.data import prepare
from nanoray.devices import Slots, available_cpus, cpu_features, discover_gpus, local_slots
from nanoray.errors import ConfigError
from nanoray.run import open_run

NARROW, WIDE = ("baseline", "engine", "engine-2"), ("baseline-384", "engine-384")
TRACED = {"untraced": "off", "every-50": "every=50", "always": "always"}  # arm -> --comm_trace, at two ranks
ARMS = (*LAUNCHERS, *NARROW, *WIDE, *TRACED, "traffic")
ON_CLUSTER = {"ray", "torchtrainer", "traffic"}
WIDTH_384 = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "global_batch_size": 4}
BF16_UNITS = frozenset({"amx_bf16", "avx512_bf16"})
FIRST, WHOLE, STEP = (METRICS[name][0] for name in ("first_step_s", "whole_run_s", "step_ms"))
CPU_TIME = "CPU time of a step"
BLOCKS_PER_ROUND = 4  # blocks of steps are short: more of them for the same minutes
TRACED_STEPS = 100  # of one block: two windows of traced steps and one backward pass without collectives
COMM = {  # metric of a traced run -> (row, unit)
    "comm/busy_ms": ("comm: busy", "ms"),
    "comm/exposed_ms": ("comm: exposed", "ms"),
    "comm/exposed_share": ("comm: exposed share", "%"),
    "comm/ab_ms": ("comm: A/B cost", "ms"),
    "comm/busbw_gbps": ("comm: busbw", "GB/s"),
}
PAIRS_PER_ROUND = 12  # a loud and a quiet window: 1 % is little against the noise of a shared machine
WINDOW_STEPS = 20


@dataclass
class Plan:
    """What one call of this benchmark is going to do."""

    args: argparse.Namespace
    arms: list[str]
    rounds: int
    steps: int
    slots: Slots
    folder: Path
    env: dict[str, str]
    address: str = ""
    broken: set[str] = field(default_factory=set)

    @property
    def data(self) -> dict[str, str]:
        return {"dataset": self.args.dataset} | ({"data_dir": self.args.data_dir} if self.args.data_dir else {})

    def recipe(self) -> list[str]:
        """Return the flags that all launchers get."""
        flags = {"preset": self.args.preset, "max_steps": self.steps, "eval_every": 0, "checkpoint_every": 0}
        flags |= {"log_every": 10, "sample_tokens": 0, "device": self.args.device} | self.data
        return [part for key, value in flags.items() for part in (f"--{key}", str(value))]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument("--arms", default="all", metavar="A,B", help=f"which of {', '.join(ARMS)} [all]")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of all launchers [5; 1 with --quick]")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of a launch [300; 30 with --quick]")
    parser.add_argument("--workers", type=int, metavar="W", help="ranks [every GPU or slice, else 2 on CPU]")
    parser.add_argument("--device", default="auto", help="as in nanoray.launch [auto]")
    parser.add_argument("--preset", default="shakespeare-cpu", help="the launchers' recipe [shakespeare-cpu]")
    parser.add_argument("--dataset", default="auto", help="as in nanoray.launch [auto]")
    parser.add_argument("--data_dir", default="", help="as in nanoray.launch")
    parser.add_argument("--timeout_s", type=float, default=600.0, help="an arm that takes longer has failed [600]")


def measure(args: argparse.Namespace, report: Report) -> None:
    """Run every arm that was asked for and fill the report. Nothing that it starts outlives it."""
    arms = _chosen(args.arms)
    rounds, steps = args.rounds or (1 if args.quick else 5), args.steps or (30 if args.quick else 300)
    if rounds < 1 or steps < 2:
        raise ConfigError(f"rounds = {rounds}, steps = {steps}; at least 1 round of 2 steps is needed")
    slots = local_slots(args.device, args.workers, discover_gpus(), available_cpus())
    long = len(tempfile.gettempdir()) > 30  # Ray's sockets lie below it, and a socket's path has 107 characters
    folder = Path(tempfile.mkdtemp(prefix="nrb-", dir="/tmp" if long else None))
    (folder / "tmp").mkdir()  # torchrun and killed daemons leave things in TMPDIR
    plan = Plan(args, arms, rounds, steps, slots, folder, arm_environment() | {"TMPDIR": str(folder / "tmp")})
    try:
        with ExitStack() as stack:
            data = prepare(load_config(preset=args.preset, overrides=plan.data))  # now, and not in the first arm
            report.conditions["recipe"] = f"preset {args.preset}, {steps} steps, {slots.workers} rank(s), {data.note}"
            _start_cluster(plan, report, stack)
            _launch(plan, report)
            _compute(plan, report, NARROW, {})
            _compute(plan, report, WIDE, WIDTH_384)
            _compute(plan, report, tuple(TRACED), {})
            _communication(plan, report)
            if "traffic" in arms:
                _traffic(plan, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _judge(report)


def _chosen(text: str) -> list[str]:
    names = list(ARMS) if text == "all" else [name.strip() for name in text.split(",")]
    if strangers := [name for name in names if name not in ARMS]:
        raise ConfigError(f"unknown arm {strangers[0]}; known: {', '.join(ARMS)}")
    return [arm for arm in ARMS if arm in names]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(plan: Plan, report: Report, arm: str, error: Exception) -> None:
    plan.broken.add(arm)
    report.failures.append(f"{arm}: {error}")
    _say(f"FAILED  {arm}: {error}")


def _start_cluster(plan: Plan, report: Report, stack: ExitStack) -> None:
    """Start the cluster that the arms on a cluster share, and measure what it costs when idle."""
    users = [arm for arm in plan.arms if arm in ON_CLUSTER]
    if not users:
        return
    try:
        plan.address, head = stack.enter_context(ray_head(plan.folder / "ray", plan.env, plan.slots))
    except (ChildFailed, OSError) as error:
        for arm in users:
            _fail(plan, report, arm, error)
        return
    time.sleep(5)  # its workers start
    before, start = session_members(head.process.pid), time.monotonic()
    time.sleep(5)
    after, seconds = session_members(head.process.pid), time.monotonic() - start
    if after:
        busy = 100 * sum(after[pid] - before.get(pid, 0.0) for pid in after) / seconds
        report.rows.append(Row("idle Ray head", "CPU use", "% of a core", (busy,), "it runs beside every arm"))


def _launch(plan: Plan, report: Report) -> None:
    """Run the launchers, round by round, and add their rows."""
    arms = [arm for arm in plan.arms if arm in LAUNCHERS]
    found: dict[str, list[Moments]] = {arm: [] for arm in arms}
    for turn in range(plan.rounds):
        for arm in arms[turn % max(1, len(arms)) :] + arms[: turn % max(1, len(arms))]:
            if arm in plan.broken:
                continue
            argv = command(arm, plan.slots.workers, plan.recipe(), plan.address)
            try:
                run = run_once(argv, plan.env, plan.folder / f"{arm}-{turn}", plan.args.timeout_s, plan.steps)
            except ChildFailed as error:
                _fail(plan, report, arm, error)
                continue
            found[arm].append(run)
            _say(
                f"round {turn + 1}/{plan.rounds}  {arm:<17}  first step {run.first_step_s:.2f} s  "
                f"whole run {run.whole_run_s:.2f} s  step {run.step_ms:.1f} ms  loss {run.last_loss:.4f}"
            )
    for name, (metric, unit) in METRICS.items():
        for arm in arms:
            if arm not in plan.broken or metric in (FIRST, WHOLE, STEP):
                report.rows.append(_row(plan, arm, metric, unit, [getattr(run, name) for run in found[arm]]))
    last = {arm: runs[-1].last_loss for arm, runs in found.items() if runs and arm not in plan.broken}
    for arm, loss in last.items():  # wrong results, fast, are no results
        reference = next(iter(last.values()))
        if abs(loss - reference) > SAME_LOSS * abs(reference):
            report.failures.append(f"{arm}: wrong: loss {loss:.4f} after {plan.steps} steps, others {reference:.4f}")


def _row(plan: Plan, arm: str, metric: str, unit: str, values: list[float], note: str = "") -> Row:
    broken = arm in plan.broken
    return Row(arm, metric, unit, () if broken else tuple(values), note, "see FAILED below" if broken else "")


def _compute(plan: Plan, report: Report, group: tuple[str, ...], shape: dict[str, int]) -> None:
    """Run blocks of steps of each arm of a group in turn, and add their step times."""
    arms = [arm for arm in plan.arms if arm in group]
    if not arms:
        return
    traced = group == tuple(TRACED)
    blocks = 3 if plan.args.quick else (2 if traced else BLOCKS_PER_ROUND) * plan.rounds
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    with ExitStack() as stack:
        ranks: dict[str, list[Child]] = {}
        for arm in arms:
            ranks[arm] = []
            try:
                _start_arm(plan, arm, shape, ranks[arm], stack)
                found[arm] = [_block(ranks[arm], 5 if not shape else 1)]
                _say(f"warm  {arm:<13} {found[arm][0][0]:.1f} ms")
            except ChildFailed as error:
                _fail(plan, report, arm, error)
        fastest_ms = min((values[0][0] for values in found.values() if values), default=1000.0)
        steps = max(2, round((200 if plan.args.quick else 1000) / fastest_ms))
        if traced:
            steps = TRACED_STEPS // 2 if plan.args.quick else TRACED_STEPS
        for turn in range(-1, blocks):  # one more, thrown away: memory and caches settle
            for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
                try:
                    if arm not in plan.broken:
                        found[arm].append(_block(ranks[arm], steps))
                except ChildFailed as error:
                    _fail(plan, report, arm, error)
    note = f"blocks of {steps} steps; preset shakespeare-cpu" + (", width 384, T 256, batch 4" if shape else "")
    for arm in arms:
        report.rows.append(_row(plan, arm, "compute: step", "ms", [step for step, _ in found[arm][2:]], note))
        if traced:
            cpu = [cpu for _, cpu in found[arm][2:]]
            report.rows.append(_row(plan, arm, CPU_TIME, "ms", cpu, "all threads of both ranks"))


def _communication(plan: Plan, report: Report) -> None:
    """Add what the traced arms found out about their collectives: one value per record of the run."""
    for arm in TRACED:
        if arm == "untraced" or arm not in plan.arms or arm in plan.broken:
            continue
        (run,) = plan.folder.glob(f"*_{arm}")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for metric, (name, unit) in COMM.items():
            values = [r[metric] for r in records if metric in r]
            if values:  # a short run has no A/B comparison
                report.rows.append(_row(plan, arm, name, unit, values, "of a step, as the run itself recorded it"))


def _start_arm(plan: Plan, arm: str, shape: dict[str, int], ranks: list[Child], stack: ExitStack) -> None:
    kind, world = (
        ("baseline" if arm.startswith("baseline") else "engine"),
        2 if arm == "engine-2" or arm in TRACED else 1,
    )
    values = {"name": arm, "out_dir": str(plan.folder), "max_steps": 10**6, "eval_every": 0, "checkpoint_every": 0}
    values |= {"log_every": 10, "device": "cpu", "timeout_s": plan.args.timeout_s} | shape | plan.data
    values |= {"comm_trace": TRACED.get(arm, "off")}
    config = load_config(preset="shakespeare-cpu", overrides=values)
    spec = open_run(config, prepare(config), time.time())
    order = {"arm": kind, "world": world, "threads": max(1, int(available_cpus() / world))}
    order["spec"] = str(spec.folder / "run.json")
    env = plan.env | {"CUDA_VISIBLE_DEVICES": ""}
    for rank in range(world):
        argv = [sys.executable, "-m", "nanoray.bench.compute", json.dumps(order | {"rank": rank})]
        ranks.append(stack.enter_context(Child(argv, env, spec.folder / f"output{rank}.log", pipes=True)))
        if world > 1 and rank == 0:
            order |= ranks[0].answer(60)  # the port at which it serves the store
    for child in ranks:
        child.answer(120)  # ready


def _block(ranks: list[Child], steps: int) -> tuple[float, float]:
    """Let an arm run `steps` steps; return milliseconds per step: wall time, and CPU time of all ranks together."""
    for child in ranks:
        child.ask(str(steps))
    answers = [child.answer(120) for child in ranks]
    return max(a["step_ms"] for a in answers), sum(a["cpu_ms"] for a in answers)


def _traffic(plan: Plan, report: Report) -> None:
    """Run the loud and quiet windows on the cluster, and add their ratios."""
    name, metric = "traffic", "step, loud / quiet"
    pairs = 2 if plan.args.quick else PAIRS_PER_ROUND * plan.rounds
    values = {"name": name, "out_dir": str(plan.folder), "log_every": 10, "eval_every": 0, "checkpoint_every": 0}
    values |= {"max_steps": 2 * pairs * WINDOW_STEPS + 10, "sample_tokens": 0, "device": "cpu"} | plan.data
    result: dict[str, Any] = {"ratios": [], "cpu_ratios": [], "emit_ms": [], "quiet_ms": []}
    if name not in plan.broken:
        config = load_config(preset="shakespeare-cpu", overrides=values)
        spec = open_run(config, prepare(config), time.time())
        argv = [sys.executable, "-m", "nanoray.bench.traffic", str(spec.folder / "run.json"), plan.address]
        try:
            with Child([*argv, str(WINDOW_STEPS)], plan.env, spec.folder / "output.log") as child:
                child.wait(plan.args.timeout_s)
                result = json.loads(child.tail().splitlines()[-1])
        except (ChildFailed, ValueError) as error:
            _fail(plan, report, name, error)
    note = f"windows of {WINDOW_STEPS} steps with all reporting / with none of it"
    report.rows.append(_row(plan, name, f"CPU time of a {metric}", "ratio", result["cpu_ratios"], note))
    report.rows.append(_row(plan, name, metric, "ratio", result["ratios"], "the same by the wall clock"))
    report.rows.append(_row(plan, name, "quiet step", "ms", result["quiet_ms"]))
    note = "what of it the loop waits for: jsonl, TensorBoard, Ray gauges; one record every 10 steps"
    report.rows.append(_row(plan, name, "callbacks of a record", "ms", result["emit_ms"], note))


def _judge(report: Report) -> None:
    """Add the ratios and the targets that the measured arms allow."""
    wide_excuse = "" if cpu_features() & BF16_UNITS else "this CPU has neither amx_bf16 nor avx512_bf16"
    pairs = (
        ("ray", "torchrun", STEP, "<=", 1.02, ""),
        ("ray", "torchrun", FIRST, "<=", 1.15, ""),
        ("ray", "torchtrainer", FIRST, "<=", 0.35, ""),
        ("ray-init", "torchtrainer-init", FIRST, "", 0.0, ""),
        ("baseline", "engine", "compute: step", ">=", 1.05, ""),
        ("baseline", "engine-2", "compute: step", ">=", 0.95, ""),
        ("baseline-384", "engine-384", "compute: step", ">=", 1.9, wide_excuse),
        ("every-50", "untraced", CPU_TIME, "<=", 1.01, ""),  # 1 % drowns in the noise of a wall clock
        ("every-50", "untraced", "compute: step", "", 0.0, ""),
        ("always", "untraced", CPU_TIME, "", 0.0, ""),
        ("always", "untraced", "compute: step", "<=", 1.05, ""),
    )
    for upper, lower, metric, relation, limit, excuse in pairs:
        row = report.compare(upper, lower, metric)
        if row and relation:
            report.targets.append(Target(f"{metric}, {row.arm}", row, relation, limit, excuse))
    row = report.row("traffic", "CPU time of a step, loud / quiet")
    if row:
        report.targets.append(Target("metrics, log and health traffic, CPU time loud / quiet", row, "<=", 1.01))


def paste(report: Report) -> list[str]:
    """Return tables for a README: medians with their range."""

    def cell(arm: str, metric: str) -> str:
        row = report.row(arm, metric)
        if row is None or not row.values:
            return "FAILED"
        return f"{number(row.median)} ({number(min(row.values))}–{number(max(row.values))})"

    launched = [arm for arm in LAUNCHERS if report.row(arm, FIRST)]
    lines: list[str] = []
    if launched:
        header = ("started by", "command to first step, s", "whole run, s", "step, ms")
        lines += markdown(header, [(arm, *(cell(arm, m) for m in (FIRST, WHOLE, STEP))) for arm in launched])
    computed = [arm for arm in (*NARROW, *WIDE, *TRACED) if report.row(arm, "compute: step")]
    if computed:
        shown = [name for name, _ in COMM.values() if any(report.row(arm, name) for arm in computed)]
        names = ["loop, on CPU", "step, ms", *(f"{n}, {u}" for n, u in COMM.values() if n in shown)]
        cells = [[a, *(cell(a, m) if report.row(a, m) else "" for m in ("compute: step", *shown))] for a in computed]
        lines += ["", *markdown(names, cells)]
    return lines


def draw(report: Report, path: Path) -> None:
    """Draw the way to the first step, split into its parts, and the step times; bars are medians, lines min to max."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    started = [arm for arm in LAUNCHERS if (row := report.row(arm, FIRST)) and row.values]
    begin = dict.fromkeys(started, 0.0)
    for name in ("imports_s", "until_rank_s", "until_step_s"):
        rows = [row for arm in started if (row := report.row(arm, METRICS[name][0]))]
        widths = [row.median for row in rows]
        left.barh(started, widths, left=[begin[a] for a in started], label=METRICS[name][0].removeprefix("of it: "))
        begin = {arm: begin[arm] + width for arm, width in zip(started, widths, strict=True)}
    left.set(title="command to first optimizer step", xlabel="seconds, medians")
    left.legend(fontsize=8)
    timed = [r for r in report.rows if r.metric in (STEP, "compute: step") and r.unit == "ms" and r.values]
    timed = [r for r in timed if r.arm not in WIDE]  # another scale
    spread = [[r.median - min(r.values) for r in timed], [max(r.values) - r.median for r in timed]]
    right.barh([r.arm for r in timed], [r.median for r in timed], xerr=spread, color="0.6", capsize=3)
    right.set(title="optimizer step", xlabel="ms, median and range")
    for axes in (left, right):
        axes.invert_yaxis()
    versions = " · ".join(f"{k} {v}" for k, v in report.conditions["versions"].items())
    figure.supxlabel(f"{report.conditions['command']}  ·  {versions}", fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
