"""What benchmarks that start trainings share: flags, arms, recipe, Ray head, failed arms."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nanoray.bench.harness.launchers import command
from nanoray.bench.harness.processes import (
    Child,
    ChildFailed,
    arm_environment,
    python_in,
    ray_head,
    scratch_folder,
)
from nanoray.bench.harness.rank_pool import RankFailed
from nanoray.bench.harness.report import Report, say
from nanoray.config import load_config, refuse_unknown
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError
from nanoray.machine.slots import Slots

Name = TypeVar("Name")
SEE_FAILED = "see FAILED below"


def add_arms_flag(parser: argparse.ArgumentParser, known: Iterable[str]) -> None:
    """Add --arms, which `chosen` reads."""
    which = f"which of {', '.join(known)} [%(default)s]"
    parser.add_argument("--arms", default="all", metavar="A,B", help=which)


def chosen(text: str, known: Sequence[str], what: str = "arm") -> list[str]:
    """Return the names of a comma-separated list, or `all`, in their own order. Raises ConfigError."""
    names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            refuse_unknown(name, list(known), what)
    return [name for name in known if name in names]


def numbers_of(
    text: str, flag: str, example: str, kind: Callable[[str], float] = float, above: float = 0
) -> list[Any]:
    """Return the numbers of a comma-separated flag, in its order. Raises ConfigError."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(above < number < math.inf for number in numbers):
        raise ConfigError(
            f"{flag} = {text}: not numbers above {above:g}; write for example {example}"
        )
    return numbers


def rotated(arms: Sequence[Name], turn: int) -> list[Name]:
    """Return the order of the arms in one round: each round begins with the next arm."""
    shift = turn % max(1, len(arms))
    return [*arms[shift:], *arms[:shift]]


def in_turns(
    arms: Sequence[Name],
    rounds: int,
    gone: Container[Name],
    run: Callable[[Name, int], object],
    fail: Callable[[Name, Exception], object],
) -> None:
    """Run every arm in each round, in rotating order: a slow minute of the machine hits no arm always.

    An arm whose processes or ranks fail is given to `fail`, which puts it among those that are
    `gone`; the others go on.
    """
    for turn in range(rounds):
        for arm in rotated(arms, turn):
            if arm in gone:
                continue
            try:
                run(arm, turn)
            except (ChildFailed, RankFailed) as error:
                fail(arm, error)


def words(flags: Mapping[str, object]) -> list[str]:
    """Return {"max_steps": 30} as ["--max_steps", "30"]."""
    return [word for key, value in flags.items() for word in (f"--{key}", str(value))]


def data_flags(args: argparse.Namespace) -> dict[str, str]:
    """Return the configuration keys of --dataset and --data_dir."""
    flags = {"dataset": args.dataset}
    if args.data_dir:
        flags["data_dir"] = args.data_dir
    return flags


def add_data_flags(parser: argparse.ArgumentParser, dataset: str = "auto") -> None:
    """Add --dataset and --data_dir, which `data_flags` reads."""
    parser.add_argument("--dataset", default=dataset, help="as in nanoray.launch [%(default)s]")
    parser.add_argument("--data_dir", default="", help="as in nanoray.launch")


def add_settings_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --settings, which `settings_of` reads. `what`: what the keys replace."""
    parser.add_argument(
        "--settings", metavar="KEY=VALUE,...", default="", help=f"keys that replace {what}"
    )


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the configuration keys of --settings. Raises ConfigError."""
    try:
        return dict(part.split("=", 1) for part in args.settings.split(",") if part)
    except ValueError:
        raise ConfigError(
            f"settings = {args.settings}: not KEY=VALUE,...; write for example n_embd=256"
        ) from None


def add_training_flags(parser: argparse.ArgumentParser, preset: str, timeout_s: float) -> None:
    """Add the flags that say what is trained, on what, and how long a run may take."""
    parser.add_argument(
        "--workers", type=int, metavar="W", help="ranks [every GPU or slice, else 2 on CPU]"
    )
    parser.add_argument("--device", default="auto", help="as in nanoray.launch [auto]")
    parser.add_argument(
        "--preset", default=preset, help="the recipe of all launchers [%(default)s]"
    )
    add_data_flags(parser)
    late = "seconds after which a run has failed [%(default)g]"
    parser.add_argument("--timeout_s", type=float, default=timeout_s, help=late)


@dataclass
class BenchPlan:
    """What one call of a benchmark is going to do, and what it has started for that."""

    args: argparse.Namespace  # with the flags of `add_training_flags`
    report: Report
    arms: list[str]
    slots: Slots
    folder: Path  # of all runs
    env: dict[str, str]  # of all children
    note: str = ""  # what the dataset is
    address: str = ""  # of the Ray head
    head: Child | None = None
    broken: set[str] = field(default_factory=set)  # arms that have failed

    def recipe(self, flags: Mapping[str, object]) -> list[str]:
        """Return the command line of the recipe, which is the same for all launchers."""
        own = {
            "preset": self.args.preset,
            "eval_every": 0,
            "sample_tokens": 0,
            "device": self.args.device,
        }
        return words(own | data_flags(self.args) | dict(flags))

    def command(
        self, launcher: str, flags: list[str], folder: Path, restarts: int = 0
    ) -> list[str]:
        """Return the command that trains as `launcher` does, with the ranks and the head of this plan."""
        python = python_in(self.folder)
        device = self.args.device
        workers = self.slots.workers
        return command(launcher, workers, flags, self.address, folder, device, python, restarts)

    def fail(self, arm: str, error: Exception) -> None:
        """Record that an arm has failed, and print it; the other arms continue."""
        self.broken.add(arm)
        text = f"{arm}: {error}"
        if self.head and self.head.process.poll() is not None:
            text += f"\nthe Ray head is gone, exit code {self.head.process.returncode}\n{self.head.tail()}"
        self.report.failures.append(text)
        say(f"FAILED  {text}")

    def add(
        self,
        arm: str,
        metric: str,
        unit: str,
        values: float | Sequence[float],
        *note: str,
        **more: Any,
    ) -> None:
        """Add a row of an arm, without values if the arm has failed."""
        if arm in self.broken:
            values = ()
            more["error"] = SEE_FAILED
        self.report.add(arm, metric, unit, values, *note, **more)

    def start_head(self, users: Sequence[str], stack: ExitStack) -> None:
        """Start the Ray head that the arms `users` share, if there are any; it ends with `stack`."""
        if not users:
            return
        try:
            head = ray_head(self.folder / "ray", self.env, self.slots)
            self.address, self.head = stack.enter_context(head)
        except (ChildFailed, OSError) as error:
            for arm in users:
                self.fail(arm, error)


@contextmanager
def planned(
    args: argparse.Namespace, report: Report, arms: list[str], slots: Slots
) -> Iterator[tuple[BenchPlan, ExitStack]]:
    """Yield a plan with a scratch folder and a prepared dataset; remove the folder at the end.

    The dataset is prepared here so that no arm pays for that.
    """
    with scratch_folder() as folder, ExitStack() as stack:
        note = prepare(load_config(preset=args.preset, overrides=dict(data_flags(args)))).note
        env = arm_environment() | {"TMPDIR": str(folder / "tmp")}
        yield BenchPlan(args, report, arms, slots, folder, env, note), stack
