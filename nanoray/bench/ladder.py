"""A ladder: what a step costs under one setting after the other, for `bench step cpu`, `gpu`, `train`.

A rung trains by nanoray's engine, or by the loop that people write first, in processes of its own
(compute.py), which do blocks of steps on request. All rungs of a ladder train the model and the
data of one preset; keys of a rung that begin with "_" are not the configuration's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.benchmark import Number
from nanoray.bench.harness.figure import Panel, bars
from nanoray.bench.harness.processes import Child, ChildFailed, arm_environment
from nanoray.bench.harness.report import Measurement, Record, Report, say
from nanoray.bench.harness.trainings import add_data_flags, add_settings_flag, data_flags, rotated
from nanoray.cli.open_folder import open_run
from nanoray.config import Config, load_config, make_config
from nanoray.data.dataset import DatasetInfo
from nanoray.data.prepare import prepare
from nanoray.machine.atomic import read_json_lines
from nanoray.machine.host import available_cpus

if TYPE_CHECKING:
    from typing_extensions import Self

LADDER_TIMEOUT = Number(
    "timeout_s", "seconds after which a rung that says nothing has failed", 300.0
)
TOKENS = "tokens"
MEMORY = "memory"
LOSS = "loss"
PRODUCTS = "products"


@dataclass
class Ladder:
    """One preset on one device, and the runs of its rungs."""

    args: argparse.Namespace
    report: Report
    name: str  # of the preset; "": there is only one ladder
    config: Config
    data: DatasetInfo
    folder: Path
    env: Mapping[str, str]
    device: str  # cpu or cuda
    configs: dict[str, Config] = field(default_factory=dict)  # of the rungs that were opened
    runs: dict[str, Path] = field(default_factory=dict)  # and the folders of their runs

    @classmethod
    def of_preset(
        cls,
        args: argparse.Namespace,
        report: Report,
        name: str,
        folder: Path,
        env: Mapping[str, str],
        device: str,
        settings: Mapping[str, Any],
        preset: str = "",
        vocab_size: int = 0,
    ) -> Self:
        """Return a ladder with its configuration and data; `args` has --dataset and --data_dir.

        vocab_size: of random tokens in the place of that dataset; 0: there are none.
        """
        # No rung may stop, evaluate or save by itself: a run lasts as long as its blocks of steps.
        values: Record = {"out_dir": str(folder), "max_steps": 10**6, "device": device}
        values |= {"eval_every": 0, "checkpoint_every": 0} | data_flags(args)
        if vocab_size:
            values["dataset"] = str(random_tokens(folder / "random-tokens", vocab_size))
        config = load_config(preset=preset or name, overrides=values | dict(settings))
        return cls(args, report, name, config, prepare(config), folder, env, device)

    def add(self, rung: str, *row: Any, **more: Any) -> None:
        """Add a row of a rung to the report: metric, unit, values and note."""
        self.report.add(self.arm(rung), *row, **more)

    @property
    def threads(self) -> int:
        return max(1, int(available_cpus()))

    def arm(self, rung: str) -> str:
        """Return a rung's name in the report."""
        return f"{self.name}: {rung}" if self.name else rung

    def open(self, rung: str, settings: Mapping[str, Any], name: str) -> Record:
        """Open a run for a rung; return the order of its one rank. Raises a NanorayError."""
        own = {key: value for key, value in settings.items() if not key.startswith("_")}
        config = make_config(self.config.model_dump() | own | {"name": name})
        spec = open_run(config, self.data, time.time())
        self.configs[rung] = config
        self.runs[rung] = spec.folder
        place = {"rank": 0, "world": 1, "unfused": settings.get("_unfused")}
        return {"arm": "engine", "spec": str(spec.folder / "run.json"), **place}

    def flops_per_token(self, rung: str) -> float:
        """Return the FLOPs of a token in training, by formula."""
        from nanoray.models.costs import flops_per_token
        from nanoray.models.gpt import ModelShape

        return flops_per_token(ModelShape.of(self.configs[rung], self.data.vocab_size))

    def losses(self, rung: str) -> dict[int, float]:
        """Return step -> loss of a rung's logged steps; empty for a peer, which keeps no records."""
        if rung not in self.runs:
            return {}
        records = read_json_lines(self.runs[rung] / "metrics.jsonl")
        return {r["step"]: r["train/loss"] for r in records if "train/loss" in r}

    def compare_losses(
        self, base: str, most: float = math.inf, not_same: Sequence[str] = ()
    ) -> None:
        """Add each rung's loss at the last step, up to `most`, that it and the base have logged.

        It is wrong where it is not the base's, but for the rungs `not_same`, of another model or
        batch. With dropout nothing is compared: other kernels draw other masks.
        """
        from nanoray.train.loop_arm import same_loss

        of_base = self.losses(base)
        for rung, config in self.configs.items():
            found = self.losses(rung)
            common = [step for step in found.keys() & of_base.keys() if step <= most]
            if not common:
                continue
            step = max(common)
            wrong = None
            if rung not in not_same and not config.dropout:
                tolerance = same_loss(config.precision)
                wrong = int(not math.isclose(found[step], of_base[step], rel_tol=tolerance))
            self.report.add(self.arm(rung), LOSS, "", found[step], f"of step {step}", wrong=wrong)


class RungProcesses:
    """The ranks of a rung, or one process that multiplies matrices, ready for their first step.

    Leaving the `with` block ends them.
    """

    def __init__(
        self, ladder: Ladder, rung: str, orders: Sequence[Record], timeout_s: float
    ) -> None:
        """Start a process for each order (compute.py), and wait for all. Raises ChildFailed."""
        begin = time.monotonic()
        self.children: list[Child] = []
        share = max(1, ladder.threads // len(orders))
        common = {"device": ladder.device, "threads": share, "port": 0}
        name = re.sub("[^a-zA-Z0-9+]+", "-", rung)
        try:
            for rank, order in enumerate(orders):
                argv = [sys.executable, "-m", "nanoray.bench.compute", json.dumps(common | order)]
                log = ladder.folder / f"{ladder.name}-{name}-{rank}.log"
                self.children.append(Child(argv, ladder.env, log, pipes=True))
                # The other ranks need the port of rank 0's store, which it chooses only when it runs.
                if len(orders) > 1 and rank == 0:
                    common |= self.children[0].answer(timeout_s)
            for child in self.children:
                child.answer(timeout_s)
        except BaseException:
            self.end()
            raise
        self.ready_s = time.monotonic() - begin

    def __enter__(self) -> RungProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the processes."""
        for child in self.children:
            child.end()

    def block(self, steps: int, timeout_s: float) -> dict[str, float]:
        """Run a block of steps; return the answer of its slowest rank, and the CPU time of all.

        Raises ChildFailed.
        """
        # Ask all ranks before waiting for any: they run at the same time and wait for each other.
        for child in self.children:
            child.ask(str(steps))
        answers = [child.answer(timeout_s) for child in self.children]
        slowest = max(answers, key=lambda answer: answer["step_ms"])
        return slowest | {"cpu_ms": sum(answer["cpu_ms"] for answer in answers)}


@dataclass
class Climb(Ladder):
    """A ladder of which all rungs stay alive, with what was started and found."""

    ranks: dict[str, RungProcesses] = field(default_factory=dict)
    ready_s: dict[str, list[float]] = field(default_factory=dict)
    step_ms: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    steps: int = 1  # of a block

    def fail(self, rung: str, error: Exception) -> None:
        """Note that a rung has failed, and end it; the others go on."""
        self.failed[rung] = f"{self.arm(rung)}: {error}"
        self.report.failures.append(self.failed[rung])
        if rung in self.ranks:
            self.ranks.pop(rung).end()

    def add(self, rung: str, *row: Any, **more: Any) -> None:
        """Add a row of a rung, with the reason where it failed or was skipped."""
        more["error"] = self.failed.get(rung, "")
        if not more["error"]:
            more["skipped"] = self.skipped.get(rung, "")
        super().add(rung, *row, **more)

    def orders(self, rung: str, settings: Mapping[str, Any]) -> list[Record]:
        """Open a run for a rung; return the order of each of its ranks. Raises a NanorayError."""
        # A rung that is started again opens a second run, which needs a name of its own.
        name = rung.replace(" + ", "-").replace(" ", "-") + f"-{len(self.ready_s.get(rung, []))}"
        ranks = settings.get("_ranks", 1)
        order = self.open(rung, settings, name) | {"world": ranks}
        order |= {"pinned": settings.get("_pinned"), "keep_memory": settings.get("_keep")}
        if settings.get("_eager"):
            order["arm"] = "plain"
        if settings.get("_threads"):
            order["threads"] = settings["_threads"]
        return [order | {"rank": rank} for rank in range(ranks)]

    def start(self, rung: str, orders: list[Record], stack: ExitStack) -> None:
        """Start the processes of a rung; record the seconds until they are ready for a step."""
        try:
            ranks = RungProcesses(self, rung, orders, self.args.timeout_s)
        except ChildFailed as error:
            self.fail(rung, error)
            return
        self.ranks[rung] = stack.enter_context(ranks)
        self.ready_s.setdefault(rung, []).append(ranks.ready_s)

    def run_rounds(
        self,
        rungs: Sequence[str],
        rounds: int,
        block: Callable[[str, bool], Mapping[str, float]],
        steps_for: Callable[[Mapping[str, float]], int],
    ) -> None:
        """Let the rungs run a block of steps in turn, round by round in rotating order.

        The first round does not count: memory and caches settle. Its milliseconds of a step decide
        how many steps a block has, the same for all rungs: `steps_for`. block(rung, counts) runs one
        and returns its answer, or {} for a rung that leaves the round out. A rung that fails leaves
        the rotation, and the others go on.
        """
        for turn in range(-1, rounds):
            settled: dict[str, float] = {}
            for rung in rotated(rungs, max(turn, 0)):
                if rung in self.failed:
                    continue
                try:
                    found = block(rung, turn >= 0)
                except ChildFailed as error:
                    self.fail(rung, error)
                    continue
                if turn >= 0:
                    self.step_ms.setdefault(rung, []).append(found["step_ms"])
                    self.cpu_ms.setdefault(rung, []).append(found.get("cpu_ms", 0.0))
                elif found:
                    settled[rung] = found["step_ms"]
            if turn < 0:
                self.steps = steps_for(settled)
            say(f"round {turn + 1}/{rounds}  {self.name}  blocks of {self.steps} steps")


def environment_of(folder: Path, name: str, gpu: str = "") -> dict[str, str]:
    """Return the environment of processes that see one GPU, by its uuid, or none.

    Those of one name share a cache of compiled kernels, which is empty at first, so that the first
    start shows what compiling costs, and inside the scratch folder, so that nothing is left behind.
    """
    env = arm_environment() | {"TMPDIR": str(folder / "tmp"), "CUDA_VISIBLE_DEVICES": gpu}
    return env | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor" / name)}


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
