"""What a GPU can do, one feature after the other: no data set, no configuration.

    python -m tests.gpu.features cuda --features tf32,fp8

Each feature is compared with a plain way to compute the same, and both are timed, at the sizes of
GPT-2 124M with micro batches of 12. Each runs in a process of its own: one that hangs or crashes
costs its own row. day.py starts it.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoray.bench.harness.report import Measurement, Report, conditions, say
from nanoray.config.choose import cannot_compile
from nanoray.machine.atomic import write_json
from nanoray.models.fp8 import Fp8Linear, in_hardware
from nanoray.models.kernels import chunked_cross_entropy, cross_entropy, fused_attention

COMMAND = "python -m tests.gpu.features"
LEAST_S = 5.0  # with less, no feature begins
REPEATS = 10  # of what is timed, after one that is not
OF_GPUS = ("tf32", "flash attention", "cuDNN attention", "fp8", "CUDA graphs")


class FeatureSizes(NamedTuple):
    """The sizes of one micro batch."""

    square: int  # rows and columns of a large product
    batch: int
    heads: int
    length: int
    head_dim: int
    vocab: int
    padded: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        return self.batch * self.length


GPT2 = FeatureSizes(8192, 12, 12, 1024, 64, 50257, 50304)
SMALL = FeatureSizes(256, 2, 2, 32, 16, 60, 64)  # for a CPU


class FeatureResult(NamedTuple):
    """What a feature came to."""

    rows: list[tuple[str, str, float]]
    wrong: int | None = None  # whether the result is not that of the plain way
    note: str = ""


class Skipped(Exception):
    """This device, or this torch, lacks the feature."""


class Bench:
    """A device, the sizes for it, and a clock."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self.sizes = GPT2 if device == "cuda" else SMALL
        torch.manual_seed(0)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normal random numbers."""
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def ms(self, work: Callable[[], object]) -> float:
        """Return the milliseconds of one call, the median of REPEATS."""
        work()
        times = []
        for _ in range(REPEATS):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start))
        return sorted(times)[len(times) // 2]

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()


def far(found: Tensor, expected: Tensor) -> float:
    """Return the distance of two tensors, as a share of the second one's norm."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def judge(distance: float, least: float, most: float) -> int:
    """Return 0 if a distance is in a range, 1 if not, as also for NaN."""
    return 0 if least <= distance <= most else 1


# ---- features ------------------------------------------------------------------------------------


def facts(bench: Bench) -> FeatureResult:
    """Versions and the device, as a note."""
    words = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if bench.is_cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        words += [
            properties.name,
            f"compute capability {properties.major}.{properties.minor}",
            f"{properties.multi_processor_count} multiprocessors",
            f"{properties.total_memory / 2**30:.1f} GiB",
            f"CUDA {torch.version.cuda}",
            f"cuDNN {torch.backends.cudnn.version()}",
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} (as torch was built)",
        ]
    compilers = [name for name in ("gcc", "g++", "nvcc") if shutil.which(name)]
    words.append(f"compilers: {', '.join(compilers) or 'none'}")
    return FeatureResult([], None, " · ".join(words))


def tf32(bench: Bench) -> FeatureResult:
    """TF32 products of float32 numbers: faster than float32, and wrong in the fourth digit."""
    size = bench.sizes.square
    a, b = bench.random(size, size), bench.random(size, size)
    found = {}
    for setting in ("highest", "high"):
        torch.set_float32_matmul_precision(setting)
        found[setting] = (a @ b, bench.ms(lambda: a @ b))
    rows = []
    for name, setting in (("float32", "highest"), ("tf32", "high")):
        rows.append((f"product, {name}", "TFLOP/s", 2 * size**3 / found[setting][1] / 1e9))
    distance = far(found["high"][0], found["highest"][0])
    rows.append(("distance", "", distance))
    # Not 0: then the setting would have had no effect.
    return FeatureResult(rows, judge(distance, 1e-6, 5e-3))


def bf16(bench: Bench) -> FeatureResult:
    """bf16 products."""
    size = bench.sizes.square
    a, b = bench.random(size, size), bench.random(size, size)
    a16, b16 = a.bfloat16(), b.bfloat16()
    ms = bench.ms(lambda: a16 @ b16)
    distance = far(a16 @ b16, a @ b)
    rows = [("product, bf16", "TFLOP/s", 2 * size**3 / ms / 1e9), ("distance", "", distance)]
    return FeatureResult(rows, judge(distance, 1e-6, 2e-2))


def attention_by(cudnn: bool) -> Callable[[Bench], FeatureResult]:
    """Return the feature of a fused attention, forward and backward, beside torch's plain one."""

    def attention(bench: Bench) -> FeatureResult:
        sizes = bench.sizes
        shape = (sizes.batch, sizes.heads, sizes.length, sizes.head_dim)
        # As the model has them: views of one product (B, T, 3, H, D)
        fused = bench.random(sizes.batch, sizes.length, 3, sizes.heads, sizes.head_dim)
        parts = [part.transpose(1, 2) for part in fused.bfloat16().unbind(2)]
        dy = bench.random(*shape, dtype=torch.bfloat16)

        def run(of: list[Tensor], dy: Tensor, plain: bool = False) -> list[Tensor]:
            q, k, v = (part.detach().requires_grad_() for part in of)
            if cudnn and not plain:
                y = fused_attention(q, k, v, cudnn=True)
            else:
                with sdpa_kernel(SDPBackend.MATH if plain else SDPBackend.FLASH_ATTENTION):
                    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return [y, *torch.autograd.grad(y, (q, k, v), dy)]

        # The plain one has a matrix for each head, in float32: two sequences are enough.
        found = run(parts, dy)
        expected = run([part[:2].float() for part in parts], dy[:2].float(), plain=True)
        distances = [far(a[:2], b) for a, b in zip(found, expected, strict=True)]
        ms = bench.ms(lambda: run(parts, dy))
        rows = [("forward and backward", "ms", ms), ("distance", "", max(distances))]
        return FeatureResult(rows, judge(max(distances), 1e-6, 2e-2))

    return attention


def fused_adamw(bench: Bench) -> FeatureResult:
    """AdamW as one kernel over all parameters, beside torch's default one."""
    sizes = bench.sizes
    shapes = [(4 * sizes.width, sizes.width)] * 24 + [(sizes.padded, sizes.width)]
    rows = []
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        weights = [nn.Parameter(bench.random(*shape)) for shape in shapes]
        for weight in weights:
            weight.grad = bench.random(*weight.shape)
        optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=fused or None)
        name = "fused" if fused else "default"
        rows.append((f"update, {name}", "ms", bench.ms(optimizer.step)))
        results.append(weights[0].detach().clone())
    distance = far(*results)
    return FeatureResult([*rows, ("distance", "", distance)], judge(distance, 0.0, 1e-4))


def loss_arms(bench: Bench) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs (N, C), the output layer's weight (V, C), and targets (N,)."""
    sizes = bench.sizes
    x = bench.random(sizes.tokens, sizes.width).requires_grad_()
    weight = (0.02 * bench.random(sizes.padded, sizes.width)).requires_grad_()
    targets = torch.randint(sizes.vocab, (sizes.tokens,), device=bench.device)
    return x, weight, targets


def compiled_loss(bench: Bench) -> FeatureResult:
    """The loss of a micro batch: operation by operation, compiled, and in chunks."""
    require_compiler(bench)
    x, weight, targets = loss_arms(bench)
    vocab, padded = bench.sizes.vocab, bench.sizes.padded
    compiled = torch.compile(cross_entropy)
    arms: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: cross_entropy(x, weight, targets, vocab, padded),
        "compiled": lambda: compiled(x, weight, targets, vocab, padded),
        "chunked": lambda: chunked_cross_entropy(x, weight, targets, vocab, 4096, padded),
    }

    def run(name: str) -> list[Tensor]:
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = arms[name]()
        return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]

    rows = []
    distances = []
    expected = run("plain")
    for name in arms:
        if bench.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        found = run(name)
        bench.wait()
        first_s = time.perf_counter() - start
        if name == "compiled":
            rows.append(("first call, compiled", "s", first_s))
        rows.append((f"forward and backward, {name}", "ms", bench.ms(lambda name=name: run(name))))  # type: ignore[misc]
        if bench.is_cuda:
            rows.append((f"memory, {name}", "MiB", torch.cuda.max_memory_allocated() / 2**20))
        distances += [far(a, b) for a, b in zip(found, expected, strict=True)]
    rows.append(("distance", "", max(distances)))
    return FeatureResult(rows, judge(max(distances), 0.0, 2e-2))


class _Layer(nn.Module):
    """A pre-norm MLP, as a block has one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def compiled_layer(bench: Bench) -> FeatureResult:
    """A layer, compiled, and with CUDA graphs on a GPU."""
    require_compiler(bench)
    sizes = bench.sizes
    x = bench.random(sizes.tokens, sizes.width)
    modes = {"eager": None, "compiled": "default"}
    if bench.is_cuda:
        modes["CUDA graphs"] = "reduce-overhead"
    rows = []
    results: list[list[Tensor]] = []
    for name, mode in modes.items():
        torch.manual_seed(0)
        layer = _Layer(sizes.width).to(bench.device)
        if mode:
            layer.compile(mode=mode)

        def run(layer: nn.Module = layer) -> list[Tensor]:
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(bench.device.type, torch.bfloat16):
                y = layer(x)
            gradients = torch.autograd.grad(y.square().mean(), list(layer.parameters()))
            return [y.detach(), *gradients]

        # The first calls record a graph, and a replay writes over what the last one returned.
        for _ in range(3):
            found = run()
        results.append([tensor.clone() for tensor in found])
        rows.append((f"forward and backward, {name}", "ms", bench.ms(run)))
    distances = [far(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True)]
    rows.append(("distance", "", max(distances)))
    return FeatureResult(rows, judge(max(distances), 0.0, 2e-2))


def cuda_graphs(bench: Bench) -> FeatureResult:
    """A step of a small network, captured by hand and launched as one."""
    width, layers = 384, 12
    torch.manual_seed(0)
    network = nn.Sequential(*[_Layer(width) for _ in range(layers)]).to(bench.device)
    x = bench.random(256, width)

    def step() -> None:
        network.zero_grad(set_to_none=False)
        network(x).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    expected = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    eager_ms = bench.ms(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph_ms = bench.ms(graph.replay)
    found = [p.grad for p in network.parameters() if p.grad is not None]
    distance = max(far(a, b) for a, b in zip(found, expected, strict=True))
    rows = [("step, eager", "ms", eager_ms), ("step, graph", "ms", graph_ms)]
    return FeatureResult([*rows, ("distance", "", distance)], judge(distance, 0.0, 1e-3))


def fp8(bench: Bench) -> FeatureResult:
    """A linear layer in 8 bits, compiled, beside bf16."""
    if not in_hardware(bench.device):
        raise Skipped("this GPU has no products of 8 bits, which need compute capability 8.9")
    sizes = bench.sizes
    x = bench.random(sizes.tokens, sizes.width, dtype=torch.bfloat16)
    rows = []
    distances = []
    layer = nn.Linear(sizes.width, 4 * sizes.width, bias=False).to(bench.device)

    def run(layer: nn.Linear) -> list[Tensor]:
        inputs = x.detach().requires_grad_()
        with torch.autocast(bench.device.type, torch.bfloat16):
            y = layer(inputs)
        return [y, *torch.autograd.grad(y, (inputs, layer.weight), torch.ones_like(y))]

    expected = run(layer)
    rows.append(("forward and backward, bf16", "ms", bench.ms(lambda: run(layer))))
    for per_row in (False, True):
        quantized = Fp8Linear(sizes.width, 4 * sizes.width, bias=False).to(bench.device)
        quantized.load_state_dict(layer.state_dict())
        quantized.per_row = per_row
        name = "fp8 by row" if per_row else "fp8"
        found = run(quantized)
        distances += [far(a, b) for a, b in zip(found, expected, strict=True)]
        rows.append((f"forward and backward, {name}", "ms", bench.ms(lambda q=quantized: run(q))))  # type: ignore[misc]
        quantized.compile()
        timed = bench.ms(lambda q=quantized: run(q))  # type: ignore[misc]
        rows.append((f"forward and backward, {name}, compiled", "ms", timed))
    rows.append(("distance", "", max(distances)))
    return FeatureResult(rows, judge(max(distances), 1e-4, 0.15))


def require_compiler(bench: Bench) -> None:
    """Raise Skipped where torch cannot compile."""
    why = cannot_compile(bench.device.type)
    if why:
        raise Skipped(f"compile {why}")


FEATURES: dict[str, Callable[[Bench], FeatureResult]] = {
    "facts": facts,
    "bf16": bf16,
    "tf32": tf32,
    "compiled loss": compiled_loss,
    "compiled layer": compiled_layer,
    "flash attention": attention_by(cudnn=False),
    "cuDNN attention": attention_by(cudnn=True),
    "CUDA graphs": cuda_graphs,
    "fp8": fp8,
    "fused AdamW": fused_adamw,
}


def answer(name: str, device: str) -> dict[str, Any]:
    """Return what a feature came to, why it is skipped, or its error."""
    if name in OF_GPUS and device == "cpu":
        return {"skipped": "only on GPUs"}
    try:
        return FEATURES[name](Bench(device))._asdict()
    except Skipped as why:
        return {"skipped": str(why)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def send_answer(line: Connection, name: str, device: str) -> None:
    """Send a feature's answer. (its process)"""
    os.setpgid(0, 0)  # what the compiler starts ends with it
    line.send(answer(name, device))


def ask(name: str, device: str, limit_s: float) -> dict[str, Any]:
    """Return the answer of a feature that runs in a process of its own.

    A server forks it that has imported torch and nothing more: a fork of a process that has as much
    as counted the GPUs cannot use CUDA, and the CUDA of one that has crashed a kernel says nothing
    more.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send_answer, args=(theirs, name, device))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            return {"error": f"no answer within {limit_s:g} s"}
        return ours.recv()
    except EOFError:
        process.join()
        return {"error": f"exit code {process.exitcode} before it answered"}
    finally:
        # It may not have led its group yet, or have no process left in it.
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                end(process.pid or 0, signal.SIGKILL)
        process.join()


def add_feature(report: Report, name: str, found: Mapping[str, Any]) -> None:
    """Add the rows of one feature."""
    error, skipped = found.get("error", ""), found.get("skipped", "")
    if error or skipped:
        say(f"{'FAILED' if error else 'skipped'}  {name}: {error or skipped}")
        if error:
            report.failures.append(f"{name}: {error}")
        first_line = error.partition("\n")[0]
        row = Measurement(name, "feature", "", (), error=first_line, skipped=skipped)
        report.rows.append(row)
        return
    if name == "facts":
        report.conditions["facts"] = found["note"]
    for metric, unit, value in found["rows"]:
        # The distance decides
        wrong = found["wrong"] if metric == "distance" else None
        report.rows.append(Measurement(name, metric, unit, (value,), wrong=wrong))
    values = ", ".join(f"{metric} {value:.4g} {unit}" for metric, unit, value in found["rows"])
    say(f"{name}: {values or found['note']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Ask for one feature after the other, write the report, and return the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("device", choices=("cuda", "cpu"))
    which = f"all, or which of {', '.join(FEATURES)} [%(default)s]"
    parser.add_argument("--features", default="all", metavar="A,B", help=which)
    late = "seconds after which a feature has failed [%(default)g]"
    parser.add_argument("--feature_s", type=float, default=45.0, help=late)
    budget = "seconds for everything; what no time is left for is skipped [as long as it takes]"
    parser.add_argument("--budget_s", type=float, default=math.inf, help=budget)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    args = parser.parse_args(argv)
    names = list(FEATURES) if args.features == "all" else args.features.split(",")
    for name in names:
        if name not in FEATURES:
            parser.error(f"unknown feature {name}; known: {', '.join(FEATURES)}")

    deadline = time.monotonic() + args.budget_s
    report = Report("gpu_features", conditions(COMMAND, argv or sys.argv[1:]))
    for name in names:
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            found = {"skipped": f"no time was left of budget_s = {args.budget_s:g}"}
        else:
            found = ask(name, args.device, min(args.feature_s, left_s))
        add_feature(report, name, found)
        # A call that is cut off keeps the features before. The report is none of a benchmark, so
        # its name has another key.
        if args.json:
            content = report.to_dict()
            write_json(args.json, {"features": content.pop("bench"), **content})
    print("\n".join(report.lines()))
    return int(report.failed)


if __name__ == "__main__":
    raise SystemExit(main())
