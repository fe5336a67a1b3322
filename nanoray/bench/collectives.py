"""`python -m nanoray.bench communication collectives`: latency, algbw, busbw and #wrong of every collective.

    blocking     barrier, one call, wait: its latency is what a step waits for; the slowest rank counts
    pipelined    k calls, then one wait: bytes per second, from which algbw and busbw come, as in nccl-tests

S is the size column: of all_gather the output, of reduce_scatter and all_to_all the input of one
rank. Definitions: nccl-tests, doc/PERFORMANCE.md. GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.benchmark import Benchmark, ranks_for
from nanoray.bench.harness.figure import Figure, Panel
from nanoray.bench.harness.rank_pool import add_where_flags, where_from
from nanoray.bench.harness.report import Emit, Record, Report, markdown, number, say
from nanoray.bench.harness.trainings import chosen
from nanoray.errors import ConfigError
from nanoray.machine.host import available_memory_bytes
from nanoray.machine.metrics import algbw_gbps, busbw_factor
from nanoray.parallel.mesh import Mesh

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ENTRY = "nanoray.bench.collectives:measure_rank"
# Whether in place (True), out of place, or both, as torch's calls support it: all_reduce and
# broadcast take one buffer, an all_to_all needs two.
PLACEMENTS = {
    "all_reduce": (True,),
    "reduce_scatter": (False, True),
    "all_gather": (False, True),
    "broadcast": (True,),
    "all_to_all": (False,),
    "sendrecv": (False,),
}
SUMS = ("all_reduce", "reduce_scatter")
# Operations for which nccl-tests counts the elements per rank
PER_RANK = ("reduce_scatter", "all_gather", "all_to_all")
# dtype -> bytes, and the limit below which it holds every whole number
DTYPES = {
    "float32": (4, 2**24),
    "bfloat16": (2, 2**8),
    "float16": (2, 2**11),
    "float8_e4m3fn": (1, 2**4),
}
KB = 1 << 10
GIB = 1 << 30
COPY_BYTES = 64 << 20
COPY = "memory copy"
# Words of a backend's error that mean: this operation or dtype is not implemented
LACKS = (
    "not supported",
    "unsupported",
    "not implemented",
    "invalid scalar type",
    "does not support",
    "no support",
)
GLOO_REDUCE_SCATTER = "gloo has none of its own: torch does an all_reduce and copies a part of it"


def exact_period(name: str, addends: int) -> int:
    """Return m such that sums of `addends` whole numbers below m are exact in this dtype.

    Returns 1 where no such m exists. m is odd: otherwise data that landed a power of two too far
    would go unnoticed.
    """
    return min(251, DTYPES[name][1] // addends | 1)


def wrong_elements(got: Tensor, expected: Tensor) -> int:
    """Count the elements whose bits differ from the expected ones.

    Every expected value is a whole number >= 0, so equal values have equal bits.
    """
    import torch

    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return int((got.view(bits) != expected.view(bits)).sum())


def elements(op: str, size: int, itemsize: int, ranks: int) -> tuple[int, int]:
    """Return (S, the count column) of a requested size.

    S is a whole number of elements on every rank.
    """
    parts = ranks if op in PER_RANK else 1
    count = max(1, size // (itemsize * parts))
    return count * parts * itemsize, count


def p99_of(latencies: Sequence[float]) -> float:
    """Return the 99th percentile, or of fewer than a hundred the slowest."""
    return sorted(latencies)[math.ceil(0.99 * len(latencies)) - 1]


# The ranks' side. What is not of a class is used by bench/algorithms.py, too.


def data_of(
    ranks: Iterable[int], period: int, length: int, kind: torch.dtype, device: torch.device
) -> Tensor:
    """Return the sum over `ranks` of their data, which every order of additions gives.

    A rank's data are whole numbers below the period, shifted by the rank.
    """
    import torch

    numbers = torch.arange(period, device=device)
    total = sum(((numbers + 31 * rank) % period for rank in ranks), torch.zeros_like(numbers))
    return total.to(kind).repeat(math.ceil(length / period))[:length]


def agree(mesh: Mesh, values: Sequence[float], how: str) -> list[float]:
    """Return the max, min or sum over all ranks of each value. (all ranks)"""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64)
    if mesh.world_size > 1:
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, how.upper()), group=mesh.control_group)
    return tensor.tolist()


def start_together(mesh: Mesh) -> float:
    """Wait for all ranks; return the time. (all ranks)"""
    finish(mesh)
    mesh.barrier()
    return time.perf_counter()


def finish(mesh: Mesh, works: Iterable[Any] = ()) -> None:
    """Wait for these calls, and on CUDA for the device."""
    from nanoray.observe.trace.recorder import wait_for

    for work in works:
        work.wait()
    wait_for(mesh.device)


def measure_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Measure the copy limit, then every case of the order; emit one dict per case. (all ranks)"""
    bench = _Bench(mesh, order)
    emit({"copy_gbps": bench.copy_gbps()})
    for op in order["ops"]:
        for name in order["dtypes"]:
            for in_place in PLACEMENTS[op]:
                for size in order["sizes"]:
                    result = bench.case(op, name, in_place, size)
                    emit({"op": op, "dtype": name, "in_place": in_place} | result)
                    if "error" in result or result.get("lacking"):
                        break  # it would fail at every size


@dataclass
class _Case:
    """One collective with its buffers."""

    source: Tensor
    out: Tensor  # the source itself, or a part of it, in place
    own: Callable[[], Tensor] | None  # what this rank's source holds; None: nothing
    expected: Callable[[], Tensor]
    call: Callable[[], list[Any]]  # starts it, returns what to wait for

    def fill(self) -> None:
        self.out.fill_(-1)  # which no result contains
        if self.own:
            self.source.copy_(self.own())


class _Bench:
    """The process group and the settings of all cases on one rank.

    All ranks must call the methods that communicate.
    """

    def __init__(self, mesh: Mesh, order: Record) -> None:
        import torch.distributed as dist

        self.mesh = mesh
        self.order = order
        self.n = mesh.world_size
        self.backend = mesh.backend
        if self.n == 1:
            self.backend = "nccl" if mesh.device.type == "cuda" else "gloo"
            if not dist.is_initialized():
                dist.init_process_group(self.backend, store=dist.HashStore(), rank=0, world_size=1)
        self.group: Any = None
        self.renew_group()

    def free_bytes(self) -> int:
        """Return the bytes that the rank with the least memory may still allocate. (all ranks)

        Ranks that share memory get equal parts of it.
        """
        import torch

        free = available_memory_bytes()
        if self.mesh.device.type == "cuda":
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            free = torch.cuda.mem_get_info()[0] + unused
        sharing = self.order["sharing"][self.mesh.rank]
        (least,) = agree(self.mesh, [0.9 * free / sharing], "min")
        return int(least)

    def copy_gbps(self) -> list[float]:
        """Return the slowest rank's copy speed per round, while all ranks copy. (all ranks)"""
        import torch

        size = min(COPY_BYTES, self.free_bytes() // 4)
        source = torch.ones(size, dtype=torch.uint8, device=self.mesh.device)
        target = torch.empty_like(source).copy_(source)
        rates = []
        for _ in range(self.order["rounds"]):
            start = start_together(self.mesh)
            for _ in range(4):
                target.copy_(source)
            finish(self.mesh)
            (seconds,) = agree(self.mesh, [time.perf_counter() - start], "max")
            rates.append(algbw_gbps(4 * size, seconds))
        return rates

    def case(self, op: str, name: str, in_place: bool, asked: int) -> Record:
        """Measure and check one case. (all ranks)

        Returns {"skipped": why} for a size that does not fit, or an operation that the backend
        lacks.
        """
        size, count = elements(op, asked, DTYPES[name][0], self.n)
        result: Record = {"bytes": size, "count": count}

        # Skip what cannot run here
        if op == "sendrecv" and self.n == 1:
            return result | {"skipped": "one rank has no other to send to", "lacking": True}
        addends = self.n if op in SUMS else 1
        if exact_period(name, addends) < 3:
            reason = f"{name} holds no exact sums over {self.n} ranks"
            return result | {"skipped": reason, "lacking": True}
        # Four buffers: in, out, expected, and a copy while the backend or the check works
        need = 4 * size
        free = self.free_bytes()
        if need > free:
            reason = f"needs {need / GIB:.2f} GiB per rank, the least free is {free / GIB:.2f} GiB"
            return result | {"skipped": reason}

        # A first call shows whether the backend supports it. An error is sent to all ranks below; the
        # death of a rank breaks that exchange, too, and ends the pool.
        case = None
        own_error = ""
        try:
            case = self.prepare(op, name, in_place, count)
            case.fill()
            finish(self.mesh, case.call())
        except Exception as raised:
            own_error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"

        # All ranks must continue in the same way: an error on one is an error on all
        errors = self.mesh.broadcast(self.mesh.gather(own_error)) or []
        error = next(filter(None, errors), "")
        if error or case is None:
            self.renew_group()
            if any(words in error.lower() for words in LACKS):
                return result | {"skipped": f"backend {self.backend}: {error}", "lacking": True}
            return result | {"error": error}

        # Time it, and check the result of one more call
        blocking, pipelined = self.time(case)
        case.fill()
        finish(self.mesh, case.call())
        (wrong,) = agree(self.mesh, [wrong_elements(case.out, case.expected())], "sum")
        return result | {"blocking_us": blocking, "pipelined_us": pipelined, "wrong": int(wrong)}

    def time(self, case: _Case) -> tuple[list[float], list[float]]:
        """Return the microseconds of each blocking call, and per round of a pipelined call."""
        # One call shows how many fit into the budget
        start = start_together(self.mesh)
        finish(self.mesh, case.call())
        (seconds,) = agree(self.mesh, [time.perf_counter() - start], "max")
        guess = max(1e-6, seconds)
        budget_s = self.order["budget_s"]
        rounds = self.order["rounds"]

        # Blocking: a barrier before each call
        blocking = []
        for _ in range(min(200, max(5, int(budget_s / guess)))):
            start = start_together(self.mesh)
            finish(self.mesh, case.call())
            blocking.append(1e6 * (time.perf_counter() - start))

        # Pipelined: start `depth` calls, then wait once
        pipelined = []
        depth = min(50, max(2, int(budget_s / rounds / guess)))
        for _ in range(rounds):
            start = start_together(self.mesh)
            works = [work for _ in range(depth) for work in case.call()]
            finish(self.mesh, works)
            pipelined.append(1e6 * (time.perf_counter() - start) / depth)
        return agree(self.mesh, blocking, "max"), agree(self.mesh, pipelined, "max")

    def renew_group(self) -> None:
        """Replace the process group.

        After a call that failed on some ranks, later calls in the old group would not match.
        """
        import torch.distributed as dist

        self.group = dist.new_group(
            backend=self.backend, timeout=timedelta(seconds=self.order["timeout_s"])
        )

    def prepare(self, op: str, name: str, in_place: bool, count: int) -> _Case:
        """Return the case with its buffers.

        Only placements that torch's call supports are requested.
        """
        import torch
        import torch.distributed as dist

        n = self.n
        rank = self.mesh.rank
        kind = getattr(torch, name)
        period = exact_period(name, n if op in SUMS else 1)

        # `whole` holds the parts of all ranks where there are any; `part` is this rank's
        parts = n if op in PER_RANK else 1
        whole = torch.empty(count * parts, dtype=kind, device=self.mesh.device)  # (parts * count,)
        mine = slice(rank * count, (rank + 1) * count)
        part = whole[mine] if in_place else torch.empty_like(whole[:count])
        everyone = range(n)

        def data(ranks: Iterable[int], length: int = count) -> Tensor:
            return data_of(ranks, period, length, kind, self.mesh.device)

        def own() -> Tensor:
            return data([rank])

        def call(collective: Callable[..., Any], *values: Any) -> Callable[[], list[Any]]:
            return lambda: [collective(*values, group=self.group, async_op=True)]

        if op == "all_reduce":
            summed = call(dist.all_reduce, whole)
            return _Case(whole, whole, own, lambda: data(everyone), summed)
        if op == "broadcast":
            sent = call(partial(dist.broadcast, src=0), whole)
            return _Case(whole, whole, None if rank else own, lambda: data([0]), sent)
        if op == "reduce_scatter":
            scattered = call(dist.reduce_scatter_tensor, part, whole)
            length = n * count
            return _Case(
                whole,
                part,
                lambda: data([rank], length),
                lambda: data(everyone, length)[mine],
                scattered,
            )
        if op == "all_gather":
            gathered = call(dist.all_gather_into_tensor, whole, part)
            return _Case(
                part, whole, own, lambda: torch.cat([data([r]) for r in everyone]), gathered
            )
        other = torch.empty_like(whole)
        if op == "all_to_all":
            return _Case(
                whole,
                other,
                lambda: torch.cat([data([rank + n * to]) for to in everyone]),
                lambda: torch.cat([data([sender + n * rank]) for sender in everyone]),
                call(dist.all_to_all_single, other, whole),
            )

        # sendrecv: every rank sends to the next one of a ring
        to = (rank + 1) % n
        source = (rank - 1) % n

        def exchange() -> list[Any]:
            send = dist.P2POp(dist.isend, whole, to, self.group)
            receive = dist.P2POp(dist.irecv, other, source, self.group)
            return dist.batch_isend_irecv([send, receive])

        return _Case(whole, other, own, lambda: data([source]), exchange)


# The driver's side.


def _draw_speeds(axes: Any, report: Report) -> None:
    """Draw busbw over the size beside the copy limit; one rank alone has none, only algbw."""
    curves = _curves(report)
    for op, points in curves.items():
        speed = [point["busbw_gbps"] or point["algbw_gbps"] for point in points]
        axes.plot([p["bytes"] for p in points], speed, marker="o", markersize=3, label=op)
    copy = report.row(COPY, "copied")
    if copy:
        axes.axhline(copy.median, color="0.3", linestyle="--", linewidth=1, label="memory copy")
    dtype = next(iter(curves.values()))[0]["dtype"] if curves else "nothing was measured"
    axes.set_title(f"busbw, {dtype}")


def _draw_latencies(axes: Any, report: Report) -> None:
    """Draw the latency of a blocking call: the median, and dotted the 99th percentile."""
    for points in _curves(report).values():
        sizes = [point["bytes"] for point in points]
        (line,) = axes.plot(sizes, [p["time_us"] for p in points], marker="o", markersize=3)
        tail = [point["p99_us"] for point in points]
        axes.plot(sizes, tail, color=line.get_color(), linestyle=":", linewidth=1)


def _note(report: Report) -> str:
    ranks = report.conditions.get("ranks", {}).get("world size", 0)
    return f"{ranks} ranks, {report.conditions.get('backend', 'no backend')}"


LOGARITHMIC = {"xscale": "log", "yscale": "log", "xlabel": "bytes"}


class CollectivesBenchmark(Benchmark):
    """Time every collective over sizes and dtypes, and count its wrong elements."""

    figure = Figure(
        (
            Panel(_draw_speeds, LOGARITHMIC | {"ylabel": "GB/s"}, {"fontsize": 8}, grid=True),
            Panel(
                _draw_latencies,
                LOGARITHMIC
                | {
                    "title": "blocking calls: p50; dotted p99, of fewer than 100 the slowest",
                    "ylabel": "us",
                },
                grid=True,
            ),
        ),
        size=(11, 4.2),
        note=_note,
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_where_flags(parser)
        parser.add_argument(
            "--ops", default=",".join(PLACEMENTS), help="which, with commas between [%(default)s]"
        )
        parser.add_argument(
            "--dtypes", help=f"some of {','.join(DTYPES)} [the first three; with --quick the first]"
        )
        largest = "the largest size in bytes, from 1 KB in steps of 4 [64 MB on CPU, 1 GiB on GPUs; with --quick 1 MB]"
        parser.add_argument("--max_bytes", type=int, help=largest)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Measure what is asked for. A rank that dies leaves the rows that were there, and a failure."""
        where = where_from(args)
        ops = chosen(args.ops, list(PLACEMENTS), "op")
        default = list(DTYPES)[:1] if args.quick else list(DTYPES)[:3]
        dtypes = chosen(args.dtypes or ",".join(default), list(DTYPES), "dtype")
        if args.max_bytes is not None and args.max_bytes < KB:
            raise ConfigError(
                f"max_bytes = {args.max_bytes} is below the smallest size, {KB}; raise it"
            )
        with ranks_for(report, where) as pool:
            if args.max_bytes:
                largest = args.max_bytes
            elif args.quick:
                largest = 1024 * KB
            elif pool.facts[0]["device"] == "cpu":
                largest = 64 * KB * KB
            else:
                largest = GIB
            # Ranks share the memory of a host, or of one GPU of it
            shares = [(f["host"], f["uuid"]) for f in pool.facts]
            order = {
                "ops": ops,
                "dtypes": dtypes,
                "sizes": sizes(largest, args.quick),
                "sharing": [Counter(shares)[share] for share in shares],
                "budget_s": 0.03 if args.quick else 0.25,
                "rounds": 3 if args.quick else 7,
                "timeout_s": where.timeout_s,
            }
            for event in pool.run(ENTRY, order):
                _add(report, event, len(pool.facts), pool.backend)

    def format_markdown(self, report: Report) -> list[str]:
        """Return a table for a README: latency of the smallest size, bandwidth of the largest."""
        curves = _curves(report)
        if not curves:
            return []
        first_curve = next(iter(curves.values()))
        small = first_curve[0]
        large = first_curve[-1]
        header = (
            small["dtype"],
            f"{small['bytes']} B: p50, us",
            "p99, us",
            f"{large['bytes']} B: algbw, GB/s",
            "busbw",
            "of a copy's",
        )
        table = []
        for op, points in curves.items():
            small = points[0]
            large = points[-1]
            table.append(
                (
                    op,
                    number(small["time_us"]),
                    number(small["p99_us"]),
                    number(large["algbw_gbps"]),
                    "" if large["busbw_gbps"] is None else number(large["busbw_gbps"]),
                    _percent(large["share_of_copy"]),
                )
            )
        return markdown(header, table)


def sizes(largest: int, quick: bool = False) -> list[int]:
    """Return 1 KB, 4 KB, 16 KB, ... up to `largest`.

    quick: only the smallest, the middle one and the largest.
    """
    steps = [KB << 2 * i for i in range(30) if KB << 2 * i <= largest]
    if quick:
        return sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    return steps


def _add(report: Report, event: Record, ranks: int, backend: str) -> None:
    """Add the row of an event of rank 0, and print progress."""
    if "copy_gbps" in event:
        note = f"what each of {ranks} ranks copies per second while all copy: the limit of the machine's memory"
        report.add(COPY, "copied", "GB/s", event["copy_gbps"], note)
        return
    op = event["op"]
    size = event["bytes"]
    placement = "in place" if event["in_place"] else "out of place"
    keys = {key: event[key] for key in ("op", "dtype", "bytes", "count", "in_place")}
    keys["ranks"] = ranks
    arm = f"{op} {event['dtype']} {size} B {placement}"
    note = ""
    if op == "reduce_scatter" and backend == "gloo":
        note = GLOO_REDUCE_SCATTER
    factor = busbw_factor(op, ranks)
    metric = "algbw" if factor is None else "busbw"
    if "blocking_us" not in event:
        texts = {"error": event.get("error", ""), "skipped": event.get("skipped", "")}
        report.add(arm, metric, "GB/s", (), note, **texts, extra=keys)
    else:
        # As in nccl-tests: the bandwidth from pipelined calls, the latency from blocking ones
        blocking = event["blocking_us"]
        pipelined_us = statistics.median(event["pipelined_us"])
        algbw = algbw_gbps(size, pipelined_us / 1e6)
        busbw = None if factor is None else factor * algbw
        copy = next(row.median for row in report.rows if row.arm == COPY)
        keys |= {
            "time_us": statistics.median(blocking),
            "p99_us": p99_of(blocking),
            "latencies": len(blocking),
            "pipelined_us": pipelined_us,
            "algbw_gbps": algbw,
            "busbw_gbps": busbw,
            "share_of_copy": None if busbw is None else busbw / copy,
        }
        scale = 1.0 if factor is None else factor
        values = [scale * algbw_gbps(size, us / 1e6) for us in event["pipelined_us"]]
        p50 = f"p50 {number(keys['time_us'])}"
        latencies = f"{len(blocking)} blocking calls: {p50}, {_tail(keys)} us"
        note = "; ".join(filter(None, (note, f"algbw {number(algbw)} GB/s", latencies)))
        report.add(arm, metric, "GB/s", values, note, wrong=event["wrong"], extra=keys)
    say(f"{arm}  {report.rows[-1].skipped or report.rows[-1].problem or 'ok'}")


def _tail(timed: Record) -> str:
    """Return the 99th percentile of the latencies, or of fewer than a hundred the slowest."""
    name = "p99" if timed["latencies"] >= 100 else "max"
    return f"{name} {number(timed['p99_us'])}"


def _curves(report: Report) -> dict[str, list[Record]]:
    """Return the measured rows of the first dtype, by operation and size.

    They are out of place where an operation has both placements.
    """
    cases = [row for row in report.rows if row.extra]
    curves: dict[str, dict[int, Record]] = {}
    for row in sorted(cases, key=lambda row: bool(row.extra["in_place"])):
        if row.values and row.extra["dtype"] == cases[0].extra["dtype"]:
            curves.setdefault(row.extra["op"], {}).setdefault(row.extra["bytes"], row.extra)
    ops = dict.fromkeys(row.extra["op"] for row in cases)
    return {op: list(curves[op].values()) for op in ops if op in curves}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"
