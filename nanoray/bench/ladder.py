"""A ladder: what a step costs under one setting after the other, for `bench step cpu` and `gpu`.

A rung trains by nanoray's engine, or by the loop that people write first, on ranks of its own
(compute.py), which do blocks of steps on request. All rungs of a ladder train the model and the
data of one preset; keys of a rung that begin with "_" are not the configuration's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.bench.compute import OPEN
from nanoray.bench.harness.benchmark import Number
from nanoray.bench.harness.figure import Panel, bars
from nanoray.bench.harness.rank_pool import RankFailed, RankPool, Where
from nanoray.bench.harness.report import Measurement, Record, Report, say
from nanoray.bench.harness.trainings import (
    add_data_flags,
    add_settings_flag,
    data_flags,
    in_turns,
)
from nanoray.cli.open_folder import open_run
from nanoray.config import Config, load_config, make_config
from nanoray.data.dataset import DatasetInfo
from nanoray.data.prepare import prepare

if TYPE_CHECKING:
    from typing_extensions import Self

LADDER_TIMEOUT = Number(
    "timeout_s", "seconds after which a rung that says nothing has failed", 300.0
)
TOKENS = "tokens"
MEMORY = "memory"
LOSS = "loss"
PRODUCTS = "products"
LOSS_STEP = 10  # whose losses are compared: later, roundings of another order have grown


@dataclass
class Ladder:
    """One preset on one device, and the rungs that were started there, with what was measured."""

    args: argparse.Namespace
    report: Report
    name: str  # of the preset
    config: Config
    data: DatasetInfo
    folder: Path
    caches: Mapping[str, str]  # variables of its processes
    device: str  # cpu or cuda
    configs: dict[str, Config] = field(default_factory=dict)  # of the rungs that were opened
    pools: dict[str, RankPool] = field(default_factory=dict)
    # Rungs with a script in place of ranks: it runs a number of steps, and returns the ms of one
    scripts: dict[str, Callable[[int], float]] = field(default_factory=dict)
    # What was measured
    ready_s: dict[str, list[float]] = field(default_factory=dict)  # one of each start
    step_ms: dict[str, list[float]] = field(default_factory=dict)  # one of each round
    losses: dict[str, float] = field(default_factory=dict)  # of step LOSS_STEP
    peak_bytes: dict[str, int] = field(default_factory=dict)
    # Why there is nothing
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_preset(
        cls,
        args: argparse.Namespace,
        report: Report,
        name: str,
        folder: Path,
        device: str,
        settings: Mapping[str, Any],
        vocab_size: int = 0,
    ) -> Self:
        """Return a ladder with its configuration and data; `args` has --dataset and --data_dir.

        vocab_size: of random tokens in the place of that dataset; 0: there are none.
        """
        values: Record = {"out_dir": str(folder), "device": device} | data_flags(args)
        if vocab_size:
            values["dataset"] = str(random_tokens(folder / "random-tokens", vocab_size))
        config = load_config(preset=name, overrides=values | dict(settings))
        caches = caches_of(folder, name)
        return cls(args, report, name, config, prepare(config), folder, caches, device)

    @property
    def timeout_s(self) -> float:
        """Seconds after which a rung that says nothing has failed."""
        return float(self.args.timeout_s)

    def arm(self, rung: str) -> str:
        """Return a rung's name in the report."""
        return f"{self.name}: {rung}"

    def add(self, rung: str, *row: Any, **more: Any) -> None:
        """Add a row of a rung: metric, unit, values, note; or why it failed or was skipped."""
        more["error"] = self.failed.get(rung, "")
        if not more["error"]:
            more["skipped"] = self.skipped.get(rung, "")
        self.report.add(self.arm(rung), *row, **more)

    def fail(self, rung: str, error: Exception) -> None:
        """Note that a rung has failed, and end it; the others go on.

        One that does not fit into the device's memory is skipped.
        """
        pool = self.pools.pop(rung, None)
        if pool:
            pool.end()
        if "OutOfMemoryError" in str(error):
            self.skipped[rung] = "does not fit into the device's memory"
            return
        self.failed[rung] = f"{self.arm(rung)}: {error}"
        self.report.failures.append(self.failed[rung])

    def open(self, rung: str, settings: Mapping[str, Any]) -> Record:
        """Open a run for a rung; return the order of its ranks. Raises a NanorayError."""
        own = {key: value for key, value in settings.items() if not key.startswith("_")}
        # A rung that is started again opens a second run, which needs a name of its own.
        words = re.sub("[^a-zA-Z0-9]+", "-", f"{self.name} {rung}").strip("-")
        name = f"{words}-{len(self.ready_s.get(rung, []))}"
        config = make_config(self.config.model_dump() | own | {"name": name})
        spec = open_run(config, self.data, time.time())
        self.configs[rung] = config
        how = {"unfused": settings.get("_unfused"), "keep_memory": settings.get("_keep")}
        kind = "plain" if settings.get("_eager") else "engine"
        return {"arm": kind, "spec": str(spec.folder / "run.json"), **how}

    def start(
        self, rung: str, order: Record, stack: ExitStack, ranks: int = 1, threads: int = 0
    ) -> None:
        """Start the ranks of a rung; record the seconds until they have done a first step.

        threads: of each rank; 0: an equal share of the cores.
        """
        device = "cpu" if self.device == "cpu" else "auto"  # a whole GPU, else a slice
        begin = time.monotonic()
        where = Where(
            ranks,
            device=device,
            timeout_s=self.timeout_s,
            threads=threads,
            variables=self.caches,
        )
        pool = RankPool(where)
        try:
            stack.enter_context(pool)
            self.pools[rung] = pool
            pool.keep(OPEN, order)
            self._run_block(rung, 1, settling=0)
        except RankFailed as error:
            self.fail(rung, error)
            return
        self.ready_s.setdefault(rung, []).append(time.monotonic() - begin)

    def _run_block(self, rung: str, steps: int, settling: int) -> Record:
        """Run a block of steps, after some that do not count. Raises ChildFailed or RankFailed."""
        if rung in self.scripts:
            return {"step_ms": self.scripts[rung](steps)}
        (found,) = self.pools[rung].run_kept({"steps": steps, "settling": settling})
        return found

    def run_rounds(self, rounds: int, block_ms: float) -> None:
        """Let the rungs that were started run a block in turn, round by round in rotating order.

        The first round does not count: memory and caches settle. Its milliseconds of a step decide
        how many steps a block of about `block_ms` has. In every other round one step does not count:
        while the rung slept, others had the caches. A rung that fails leaves the rotation, and the
        others go on.
        """
        rungs = [*self.pools, *self.scripts]
        steps = dict.fromkeys(rungs, 1)

        def settle(rung: str, turn: int) -> None:
            # `start` has done the first step
            found = self._run_block(rung, 1, settling=LOSS_STEP - 1)
            if "loss" in found:
                self.losses[rung] = found["loss"]
            if not self.args.quick:
                steps[rung] = max(1, round(block_ms / found["step_ms"]))

        def run(rung: str, turn: int) -> None:
            found = self._run_block(rung, steps[rung], settling=1)
            self.step_ms.setdefault(rung, []).append(found["step_ms"])
            self.peak_bytes[rung] = found.get("peak_bytes", 0)
            say(f"round {turn + 1}/{rounds}  {self.arm(rung):<40} {found['step_ms']:.2f} ms")

        gone = ChainMap(self.failed, self.skipped)
        in_turns(rungs, 1, gone, settle, self.fail)
        in_turns(rungs, rounds, gone, run, self.fail)

    def flops_per_token(self, rung: str) -> float:
        """Return the FLOPs of a token in training, by formula."""
        from nanoray.models.costs import flops_per_token
        from nanoray.models.gpt import ModelShape

        return flops_per_token(ModelShape.of(self.configs[rung], self.data.vocab_size))

    def compare_losses(self, base: str, not_same: Sequence[str] = ()) -> None:
        """Add each rung's loss; it is wrong where it is not the base's.

        But for the rungs `not_same`, of another model or batch. With dropout nothing is compared:
        other kernels draw other masks.
        """
        from nanoray.train.loop_arm import same_loss

        if base not in self.losses:
            return
        for rung, loss in self.losses.items():
            config = self.configs[rung]
            wrong = None
            if rung not in not_same and not config.dropout:
                tolerance = same_loss(config.precision)
                wrong = int(not math.isclose(loss, self.losses[base], rel_tol=tolerance))
            note = f"of step {LOSS_STEP}"
            self.report.add(self.arm(rung), LOSS, "", loss, note, wrong=wrong)


def caches_of(folder: Path, name: str) -> dict[str, str]:
    """Return the variables of processes that share a cache of compiled kernels, by its name.

    It is empty at first, so that the first start shows what compiling costs, and inside the scratch
    folder, so that nothing is left behind.
    """
    inductor = folder / "inductor" / name
    return {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(inductor)}


def add_ladder_flags(parser: argparse.ArgumentParser, presets: Sequence[str], arms: str) -> None:
    """Add the flags that say what is trained, and which rungs there are."""
    which = f"which of {', '.join(presets)} [all]"
    parser.add_argument("--presets", default="all", metavar="A,B", help=which)
    parser.add_argument("--arms", default="all", metavar="A,B", help=f"{arms} [all]")
    add_settings_flag(parser, "each preset's")
    add_data_flags(parser)


def products(size: int, dtype: str, tf32: bool = False) -> Record:
    """Return the order of a process whose step is a product of two square matrices."""
    return {"arm": "products", "size": size, "dtype": dtype, "tf32": tf32}


def product_flops(size: int) -> int:
    """Return the FLOPs of a product of two square matrices."""
    return 2 * size**3


def random_tokens(folder: Path, vocab_size: int) -> Path:
    """Write a data set of random tokens in nanoGPT's format.

    A step takes as long on them as on a text.
    """
    import numpy as np

    folder.mkdir()
    source = np.random.default_rng(0)
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes(
            source.integers(vocab_size, size=50_000, dtype=np.uint16).tobytes()
        )
    meta = {"vocab_size": vocab_size, "dtype": "uint16"}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


# What is shown of a ladder.


def measured_arms(report: Report) -> list[str]:
    """Return the arms whose speed was measured, or failed."""
    rows = [row for row in report.rows if row.metric == TOKENS and row.unit == "1/s"]
    return [row.arm for row in rows if not row.skipped]


def panels_of(
    presets: Sequence[str], base: str, label: str, draw: Callable[[Any, Report, str], None]
) -> Callable[[Report], list[Panel]]:
    """Return the function of a figure that has a panel for each preset whose base was measured."""

    def panel(name: str) -> Panel:
        axes = {"title": name, "xlabel": label}
        return Panel(lambda place, report: draw(place, report, name), axes, down=True)

    def panels(report: Report) -> list[Panel]:
        return [panel(name) for name in presets if report.row(f"{name}: {base}", TOKENS)]

    return panels


def draw_rungs(axes: Any, rows: Sequence[Measurement]) -> None:
    """Draw a bar for each rung, named without its preset."""
    if rows:
        short = [row.arm.partition(": ")[2].partition(" / ")[0] for row in rows]
        named = [replace(row, arm=name) for row, name in zip(rows, short, strict=True)]
        bars(axes, named, quartiles=True, color="0.6")
    axes.tick_params(labelsize=7)


def product_lines(report: Report) -> list[str]:
    """Return a line for each speed of products."""
    rows = [row for row in report.rows if row.metric == PRODUCTS]
    return [f"{row.arm}: {report.cell(row.arm, PRODUCTS)} {row.unit}, {row.note}" for row in rows]


def skipped_lines(report: Report) -> list[str]:
    """Return a line for each arm that was left out."""
    rows = [row for row in report.rows if row.skipped and row.unit != "ratio"]
    return [f"skipped  {row.arm}: {row.skipped}" for row in rows]
