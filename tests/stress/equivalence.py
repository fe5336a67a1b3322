"""`python -m tests.stress equivalence`: does every way to share a batch train the same model?

A small GPT, of sizes that divide badly, learns for three steps: in one process, and on all ranks in
every data-parallel mode, with and without activation checkpointing, and with context, tensor and
pipeline parallelism where they divide the ranks. Plain SGD without clipping shows a wrong factor on the
gradient, which AdamW and clipping hide; two accumulations show whether it depends on them. A loss,
weight or norm too far from that of one process, or a bit that differs where none may, makes the
exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanoray.bench.arm import Arm, Case, alone_on
from nanoray.bench.harness.benchmark import Benchmark, part, ranks_for
from nanoray.bench.harness.figure import Figure, Panel, with_values
from nanoray.bench.harness.rank_pool import add_where_flags, where_from
from nanoray.bench.harness.report import Emit, Measurement, Record, Report, say
from nanoray.bench.harness.table import Cell, Table, TableColumn, names
from nanoray.bench.strategies import MODES
from nanoray.config import Config, make_config
from nanoray.config.mesh import BY_HAND
from nanoray.errors import ConfigError
from nanoray.parallel.schedules import SCHEDULES

if TYPE_CHECKING:
    from torch import Tensor

    from nanoray.parallel.mesh import Mesh

ENTRY = "tests.stress.equivalence:measure_rank"
SGD = {"optimizer": "sgd", "grad_clip": 0.0, "lr": 0.1}
ADAMW = {"optimizer": "adamw", "grad_clip": 0.1, "lr": 1e-3}
CASES: dict[str, Record] = {
    "SGD": {"accum": 1, "settings": SGD},
    "SGD, 2 micro batches": {"accum": 2, "settings": SGD},
    "AdamW, clipped": {"accum": 1, "settings": ADAMW},
    "AdamW, clipped, 2 micro batches": {"accum": 2, "settings": ADAMW},
}
LOSS = "Δ loss"
WEIGHT = "Δ weight"
NORM = "Δ norm / norm"
BITS = "bits"
# Sums in another order, on CPUs with other vector units; a wrong factor or a lost part is a
# thousand times as much.
LIMITS = {LOSS: 4e-6, NORM: 1e-4}
WEIGHT_LIMIT = {"sgd": 4e-6, "adamw": 1e-4}  # AdamW divides by gradients that are almost zero
EXPERTS = {
    "experts": 4,
    "expert_hidden": 24,
    "shared_experts": 1,
    "balance_loss": 0.5,
    "z_loss": 0.1,
}
# What an arm's model may have of its own
SHAPE = ("n_layer", "n_head", "block_size", "positions")
STEPS = 3


def _every_arm(report: Report) -> list[str]:
    return list(dict.fromkeys(row.arm for row in report.rows))


def _cases_of(report: Report) -> list[str]:
    return list(dict.fromkeys(row.metric.partition(":")[0] for row in report.rows))


def _rows_of(report: Report, arm: str, case: str = "", metric: str = "") -> list[Measurement]:
    """Return an arm's rows of the cases that begin with `case`, and of a metric."""
    rows = (row for row in report.rows if row.arm == arm)
    return [row for row in rows if row.metric.startswith(case) and row.metric.endswith(metric)]


def _largest(metric: str, optimizer: str) -> Cell:
    """Return the cell of the largest distance over all cases that share an optimizer."""

    def cell(report: Report, arm: str, spread: str) -> str:
        rows = _rows_of(report, arm, optimizer, metric)
        if any(not row.values for row in rows):
            return "FAILED"
        return f"{max(max(row.values) for row in rows):.1e}" if rows else ""

    return cell


def _same_bits(case: str) -> Cell:
    """Return the cell of the arms that had the same bits in a case."""

    def cell(report: Report, arm: str, spread: str) -> str:
        split = "".join(arm.rpartition(" × ")[:2])  # the others with the same split go without it
        for row in _rows_of(report, arm, f"{case}:", BITS):
            same = [n.removeprefix(split) for n in row.extra["same"] if " + " not in n]
            return ", ".join(same) or "–"
        return ""  # the arm cannot take so few micro batches

    return cell


def _wrong(report: Report, arm: str, spread: str) -> str:
    return str(sum(row.wrong or 0 for row in _rows_of(report, arm)))


def _columns_of(report: Report) -> list[TableColumn]:
    """Return an optimizer's column for each distance, and a case's for the bits."""
    far = [
        TableColumn(f"{metric} {optimizer}", _largest(metric, optimizer))
        for metric in (LOSS, WEIGHT, NORM)
        for optimizer in ("SGD", "AdamW")
    ]
    bits = [
        TableColumn(f"bits of, {case}", _same_bits(case), left=True) for case in _cases_of(report)
    ]
    return [names("mode"), *far, *bits, TableColumn("wrong", _wrong, left=True)]


def draw_distances(axes: Any, report: Report) -> None:
    """Draw each mode's distance from the weights of one process, against the limits."""
    for case in CASES:
        rows = with_values(report, f"{case}: {WEIGHT}")
        # One point per arm, at its largest difference of all ranks.
        furthest = [max(*row.values, 1e-9) for row in rows]
        axes.plot(furthest, [row.arm for row in rows], "o", label=case, alpha=0.7)
    for optimizer, limit in WEIGHT_LIMIT.items():
        axes.axvline(limit, ls=":", color="0.4", label=f"limit with {optimizer}")


class EquivalenceBenchmark(Benchmark):
    """Compare losses and weights of every data-parallel mode with one process."""

    # Wrong: ranks above the limit, or modes that must be equal to the bit and are not
    tables = (Table(_every_arm, _columns_of),)
    figure = Figure(
        (
            Panel(
                draw_distances,
                {
                    "xscale": "log",
                    "xlabel": "largest difference of a weight from that of one process",
                },
                {"fontsize": 7},
            ),
        ),
        size=lambda report: (8, 0.28 * len(_every_arm(report)) + 1.6),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        parser.add_argument(
            "--only",
            metavar="WORD",
            default="",
            help="arms whose names contain it, such as replicas or fsdp [all arms]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Train every arm in every case and fill the report."""
        where = where_from(args)
        samples = samples_for(where.workers)
        if where.workers < 2 or samples % (2 * where.workers):
            raise ConfigError(
                f"workers = {where.workers}: one rank shares nothing, and {samples} samples in 2 micro "
                "batches must divide "
                "by the ranks; use --workers 2 to 7"
            )
        every_arm = arms_for(where.workers, checkpointing=not args.quick)
        arms = {arm: own for arm, own in every_arm.items() if args.only in arm}
        if not arms:
            raise ConfigError(
                f"only = {args.only}: none of the arms at {where.workers} ranks; they are "
                f"{', '.join(every_arm)}"
            )
        with ranks_for(report, where) as pool:
            # A tiny model whose sizes divide badly: padding and uneven slices are part of what is
            # compared.
            report.conditions["recipe"] = (
                f"2 blocks of width 20, {samples} samples a step, {STEPS} steps, fp32, dropout 0"
            )
            # Each case has an optimizer and a number of micro batches; the arms are the modes.
            for case, how in CASES.items():
                found: dict[str, list[Record]] = {}
                run = {}
                for arm, own in arms.items():
                    if fits(own, how["accum"]):
                        run[arm] = own

                def add_rows(case: str = case, how: Any = how, found: Any = found) -> None:
                    for arm, ranks in found.items():
                        report.rows.extend(_make_rows(case, how, arm, ranks, found))

                # A mode that fails ends the comparison: its ranks are gone.
                with part(report, add_rows):
                    for event in pool.run(ENTRY, {"arms": run, "cases": [how], "alone": True}):
                        found[event["arm"]] = event["ranks"]
                        say(f"{case:<32} {event['arm']}")
                if report.failures:
                    return


def samples_for(ranks: int) -> int:
    """Return the samples of a step: 2 to 7 ranks divide them, in 2 micro batches, too."""
    return 840 if ranks % 5 == 0 else 168


def arms_for(workers: int, checkpointing: bool = True) -> dict[str, Record]:
    """Return the settings of every arm on `ranks` ranks: all modes, cp, tp, pp, and experts."""

    def in_modes(split: str, own: Record, modes: Iterable[str] = MODES) -> dict[str, Record]:
        return {f"{split} × {mode}": own | MODES[mode] for mode in modes}

    # Data parallelism alone, in every mode.
    arms = dict(MODES)
    # Groups of ranks that each hold the whole state, and shard it.
    sharded = ("zero1", "zero2", "fsdp full", "fsdp grad_op")
    if workers % 4 == 0:
        arms |= in_modes("2 replicas", {"replicas": 2}, sharded)
    if workers == 6:
        arms |= in_modes("3 replicas", {"replicas": 3}, sharded)
    # Pipelines: every schedule where all ranks are stages, every mode where there are replicas.
    for pp in (2, 3, 4):
        piped = {"pp": pp, "n_layer": 2 * pp}  # two chunks of a block each, where there are chunks
        if workers == pp:
            arms |= {f"pp {pp} {kind}": {**piped, "pp_schedule": kind} for kind in SCHEDULES}
        elif workers % pp == 0:
            arms |= in_modes(f"pp {pp}", piped, ("ddp_by_hand", "zero1", "zero2"))
            arms |= {f"pp {pp} × tp 2": {**piped, "tp": 2}} if workers == 2 * pp else {}
    # Context parallelism: parts of sequences are data ranks, so every mode is one of them, too.
    for cp in (2, 3, 4):
        if workers % cp:
            continue
        # Two equal parts of a sequence for each rank
        cut = {"cp": cp, "block_size": 12} if cp == 3 else {"cp": cp}
        arms |= in_modes(f"cp {cp}", cut)
        arms[f"cp {cp}, rotary"] = {**cut, "positions": "rotary", "n_head": 2}
        if workers == 2 * cp:
            arms |= {
                f"cp {cp} × tp 2": {**cut, "tp": 2},
                f"cp {cp} × pp 2": {**cut, "pp": 2, "n_layer": 4, "dp_mode": "ddp_by_hand"},
            }
    # Tensor parallelism, likewise.
    for tp in (2, 4):
        if workers == tp:
            arms |= {
                f"tp {tp}": {"tp": tp},
                f"tp {tp}, sequence": {"tp": tp, "sequence_parallel": True},
            }
        elif workers % tp == 0:
            arms |= in_modes(f"tp {tp}", {"tp": tp})
    # A mixture of experts, whole on each rank, then spread over ep ranks.
    experts = in_modes("experts", EXPERTS, ("ddp", *BY_HAND))
    for ep in (2, 4):
        if workers % ep == 0:
            experts |= in_modes(f"experts, ep {ep}", EXPERTS | {"ep": ep}, BY_HAND)
    # Experts beside one other axis, and beside two.
    for axis, more in (("tp 2", {"tp": 2}), ("pp 2", {"pp": 2, "n_layer": 4})):
        if workers == 2:
            experts[f"experts, {axis}"] = EXPERTS | more
        elif workers == 4:
            experts |= in_modes(f"experts, ep 2, {axis}", EXPERTS | {"ep": 2} | more, BY_HAND)
    # One schedule is enough
    again = [arm for arm in arms if arms[arm].get("pp_schedule", "1f1b") == "1f1b"]
    again += [arm for arm in experts if arm.endswith("zero1")]
    arms |= experts
    # Activation checkpointing must change no bit of the arm that it is added to.
    hows = ("selective", "block") if checkpointing else ()
    return arms | {
        f"{a} + {how}": {**arms[a], "activation_checkpointing": how} for a in again for how in hows
    }


def fits(own: Record, accum: int) -> bool:
    """Return whether an arm supports `accum` micro batches."""
    return own.get("pp_schedule") != "interleaved" or accum % own["pp"] == 0


def _make_rows(
    case: str, how: Record, arm: str, ranks: list[Any], found: dict[str, list[Any]]
) -> list[Measurement]:
    def row(metric: str, limit: float, values: list[float]) -> Measurement:
        # NaN compares as neither larger nor smaller, so it would pass a limit.
        if not all(map(math.isfinite, values)):
            return Measurement(arm, f"{case}: {metric}", "", (), error="not finite")
        wrong = sum(value > limit for value in values)
        note = f"largest of {STEPS} steps, a value per rank; limit {limit:g}"
        return Measurement(arm, f"{case}: {metric}", "", tuple(values), note, wrong=wrong)

    def furthest(key: str, relative: bool) -> list[float]:
        # Each rank against one process that has all samples.
        pairs = [[*zip(rank[key], rank["alone"][key], strict=True)] for rank in ranks]
        return [
            largest([abs(a - b) / (abs(b) if relative else 1.0) for a, b in own]) for own in pairs
        ]

    # Arms with the same bits after all steps, by the digest of the weights.
    same = [
        other
        for other, theirs in found.items()
        if other != arm and theirs[0]["digest"] == ranks[0]["digest"]
    ]
    # Some arms must have the same bits: they take the same sums in the same order.
    missing = [other for other in must_equal(arm, how) if other in found and other not in same]
    # The ranks of one arm must agree among themselves, whatever the arm.
    differ = len({(*rank["losses"], *rank["norms"], rank["digest"]) for rank in ranks}) - 1
    note = f"= {', '.join(same) or 'none'}" + (
        f"; must be = {', '.join(missing)}" if missing else ""
    )
    note += "; its own ranks differ" if differ else ""
    # The norm of one replica's gradient is not that of the mean gradient.
    norms = []
    if ranks[0]["norms"]:
        norms.append(row(NORM, LIMITS[NORM], furthest("norms", True)))
    return [
        row(LOSS, LIMITS[LOSS], furthest("losses", False)),
        row(WEIGHT, WEIGHT_LIMIT[how["settings"]["optimizer"]], [rank["off"] for rank in ranks]),
        *norms,
        Measurement(
            arm,
            f"{case}: {BITS}",
            "arms",
            (len(same),),
            note,
            wrong=len(missing) + differ,
            extra={"same": same},
        ),
    ]


def largest(values: list[float]) -> float:
    """Return the largest value; NaN is larger than any."""
    return max(values, key=lambda value: (math.isnan(value), value))


def must_equal(arm: str, how: Record) -> list[str]:
    """Return the arms whose weights an arm's must equal to the bit in a case.

    Not among them: torch's DDP, which sums in another order; zero2 with accumulation, which sums
    over ranks first and micro batches last; and fsdp with AdamW, whose kernel rounds the last
    elements of a tensor otherwise.
    """
    # The name says what it is: SPLIT × MODE + CHECKPOINTING.
    base, _, checkpointed = arm.partition(" + ")
    split, times, mode = base.rpartition(" × ")
    same = []
    # Groups of ranks sum in an order of their own, which ddp_by_hand does not have.
    reference = "zero1" if split.endswith("replicas") else "ddp_by_hand"
    if mode == "zero1" or (mode == "zero2" and how["accum"] == 1):
        same.append(reference)
    # Schedules change the order of turns, not that of the sums.
    for kind in ("gpipe", "zero_bubble"):
        if mode.endswith(kind):
            same.append(mode.replace(kind, "1f1b"))
    if mode.startswith("fsdp"):
        # With AdamW only the two kinds of fsdp agree
        if how["settings"]["optimizer"] == "sgd":
            same.append("zero1")
        elif mode == "fsdp grad_op":
            same.append("fsdp full")
        else:
            same.append(mode)
    # Compared within the same split of the model.
    others = [split + times + other for other in same]
    if checkpointed:
        others.insert(0, base)
    return [other for other in others if other != arm]


# On every rank.


def small_gpt(mesh: Mesh, config: Config, precision: str, micro: int) -> Case:
    """Return a small GPT whose samples of a step do not depend on ranks and micro batches."""
    import torch

    from nanoray.models.build import gpt_of
    from nanoray.models.gpt import ModelShape

    # Samples of a step are numbered across ranks and micro batches, so every layout trains on the
    # same.
    layout = mesh.layout
    d = layout.coords(mesh.rank).dp
    samples = micro * config.grad_accum_steps * layout.dp
    # All ranks and the single process start from the same weights.
    torch.manual_seed(0)
    model = gpt_of(ModelShape.of(config, 65), config).to(mesh.device)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        step, part = divmod(number, config.grad_accum_steps)
        # The step's samples follow from its number; each rank takes its own part.
        size = (samples, config.block_size + 1)
        tokens = torch.randint(0, 65, size, generator=torch.Generator().manual_seed(step))
        own = tokens[(part * layout.dp + d) * micro :][:micro].to(mesh.device)
        return own[:, :-1].contiguous(), own[:, 1:].contiguous()  # (B, T) each

    return Case(model, batch, micro, config.block_size, {}, "")


def train(mesh: Mesh, accum: int, samples: int, **settings: Any) -> Record:
    """Train on this rank; return losses, norms, weights and what this rank keeps. (all ranks)

    samples: of a step, of all ranks together.
    """
    # Sizes that no number of ranks divides evenly, and buckets of 4 KB, so that there are several.
    small = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 20,
        "block_size": 8,
        "bias": True,
        "bucket_mb": 0.004,
    }  # divides badly
    size = {
        "micro_batch_size": 1,
        "grad_accum_steps": accum,
        "precision": "fp32",
        "timeout_s": 60.0,
    }
    # The micro batch follows from the number of replicas, which the configuration decides.
    config = make_config(small | size | settings)
    replicas = mesh.world_size // config.replica_ranks
    size = {"micro_batch_size": samples // accum // replicas}
    # The benchmark has no dropout; a test may ask for it.
    arm = Arm(mesh, config.model_copy(update=size), small_gpt, drops="dropout" in settings)
    losses = []
    norms = []
    # Losses and norms of each step are compared, too: equal weights may hide two errors that
    # cancel.
    for _ in range(STEPS):
        arm.step()
        losses.append(mesh.all_reduce_mean(arm.loss.clone()).item())
        norms.append(arm.norm.item())
        gradients = sum(g.numel() for g in arm.plan.gradients)
        arm.plan.zero_grad()
    arm.plan.settle()
    # What the ranks hold together must be the model of one process.
    weights = whole_weights(arm)
    arm.plan.close()
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "digest": hashlib.sha256(
            b"".join(p.contiguous().numpy().tobytes() for p in weights)
        ).hexdigest(),
        "state_elements": sum(
            t.numel() for kept in arm.optimizer.state.values() for t in kept.values() if t.dim()
        ),
        "gradient_elements": gradients,
        "elements": sum(p.numel() for p in weights),
    }


def whole_weights(arm: Arm) -> list[Tensor]:
    """Return the model's weights as one process holds them, on CPU. (all ranks)"""
    from torch.distributed.tensor import DTensor

    from nanoray.parallel.pieces import Piece, fill, is_cut, whole_pieces

    # Sharded weights are gathered by torch's own DTensor: on the host where gloo does it, which
    # reads a GPU's addresses as the host's.
    own = {}
    for name, p in arm.case.model.named_parameters():
        whole = p.detach()
        if isinstance(whole, DTensor):
            sharded: Any = whole.cpu() if arm.mesh.backend == "gloo" else whole
            whole = sharded.full_tensor()
        own[name] = whole.cpu().clone()
    # Pieces of tp, pp and ep are put together by their places.
    if is_cut(arm.case.model):
        mine = {
            n: [piece.to_json(), own[n].reshape(-1)]
            for n, piece in whole_pieces(arm.case.model).items()
        }
        everyone: list[Record] = arm.mesh.all_gather(mine)
        everyone.append(mine)  # of the pieces that others have as well, this rank's own
        for name in {name for of in everyone for name in of}:
            found = {str(of[name][0]): of[name] for of in everyone if name in of}
            parts = [(Piece.from_json(name, place), elements) for place, elements in found.values()]
            own[name] = fill(parts[0][0].all, parts).view(parts[0][0].shape)
    return [own[name] for name in sorted(own)]


def measure_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Train every arm in every case of the order; emit for each what all ranks found. (all ranks)

    With "alone" rank 0 also trains the whole batch by itself: how far a rank's weights are from
    that is "off".
    """
    single = alone_on(mesh)
    samples = samples_for(mesh.world_size)
    for case in order["cases"]:
        settings = case["settings"]
        alone_of: Record = {}
        for arm, own in order["arms"].items():
            found = train(mesh, case["accum"], samples, **settings | own)
            weights = found.pop("weights")
            if order["alone"]:
                # One process trains each model once; all layouts of it are compared with that.
                model = {key: own[key] for key in (*EXPERTS, *SHAPE) if key in own}
                if str(model) not in alone_of:  # the same model, in one process
                    if mesh.rank == 0:
                        of_one = train(single, 1, samples, **settings | model)
                    else:
                        of_one = None
                    alone_of[str(model)] = mesh.broadcast(of_one)
                alone = alone_of[str(model)]
                # The largest difference of any weight, by parameter.
                far = [
                    (a - b).abs().max().item()
                    for a, b in zip(weights, alone["weights"], strict=True)
                ]
                found |= {
                    "off": largest(far),
                    "alone": {key: alone[key] for key in ("losses", "norms")},
                }
            everyone = mesh.gather(found)
            if everyone is not None:
                emit({"arm": arm, "accum": case["accum"], "ranks": everyone})
