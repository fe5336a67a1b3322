"""All that a GPU should be asked while it is at hand, in ten minutes: `make bench-gpu`.

    python3 -m tests.gpu.day [--budget_s 570] [--device cpu] [--quick] [--parts A,B]

It needs Python 3.10, torch 2.11 or newer, this tree, and the packages that bundle.py collects.
Of those it takes from build/gpu-day what this Python cannot import. It lies here and not in the
package because it runs the tests of this folder: an installed nanoray has none.

    search for gpt2-124m         the fastest settings                             tests.stress tune
    ladder of gpt2-124m          what each change gains a step                    bench step gpu
    seconds to 1.47              nanoGPT's baby GPT to that validation loss       bench step gpu
    features                     each kernel and number format                    tests/gpu/features.py
    tests/gpu                                                                     pytest
    ladder of shakespeare-char   what each change gains a step of it              bench step gpu
    equivalence of two ranks     on one card, against one process                 tests.stress equivalence

Each part is a command in a process of its own, and those of one feature or rung are, too: what
hangs or crashes costs its own row. A part has a share of the budget, and the time that earlier ones
have left. The report is written after each part. Exit code 0: nothing that ran has failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanoray.bench.harness.processes import (
    Child,
    ChildFailed,
    arm_environment,
    interruptible,
    scratch_folder,
)
from nanoray.bench.harness.report import Report, conditions, load_average, say
from nanoray.machine.atomic import write_json
from nanoray.machine.host import available_cpus
from tests.gpu.bundle import FOLDER, NEEDED, ROOT, how_to_get, is_there, unpack

OLDEST_TORCH = (2, 11)
LEAST_S = 15.0  # with less, no part begins
GRACE_S = 15.0  # between a benchmark's own budget and its end
COMPARE_S = 100.0  # for what follows a search: equal losses, and turns of both settings
TEST_S = 45.0  # of the longest test: none begins later than this before the end
SECONDS = "seconds"
TESTS = "tests/gpu"
LOG_LINES = 40  # of a part, on the terminal
COMMAND = "python -m tests.gpu.day"


@dataclass(frozen=True)
class DayPart:
    """One part of the day."""

    name: str
    command: tuple[str, ...]  # behind `python -m`
    share_s: float  # of the budget
    result: str = ""  # the JSON file that it writes, without the device
    writes_budget: bool = False  # whether the command takes --budget_s
    after_s: float = GRACE_S  # between that budget and the command's end
    least_s: float = LEAST_S  # with less, it does not begin


def parts_of(args: argparse.Namespace, device: str) -> list[DayPart]:
    """Return the parts in their order: what says most in least time comes first."""
    bench = ["nanoray.bench", "step", "gpu", "--device", device]
    bench += ["--dataset", args.dataset, "--timeout_s", "90"]
    rungs = "ladder"
    if device == "cpu":
        # To try the parts out: no model of 124 M parameters, and no minutes to 1.47
        rungs = "float32,+ tf32,+ fused AdamW,(CUDA graphs)"
        sizes = "n_layer=1,n_head=2,n_embd=16,block_size=16,dropout=0.0,compile=false"
        bench += ["--settings", f"{sizes},target_loss=9.0,max_steps=40,eval_every=20"]
    if args.quick or device == "cpu":
        bench.append("--quick")
    else:
        bench += ["--rounds", "5", "--block_ms", "500"]

    def ladder(preset: str, arms: str) -> tuple[str, ...]:
        return (*bench, "--presets", preset, "--arms", arms)

    limit = ("--feature_s", str(args.feature_s))
    features = ("tests.gpu.features", device, "--features", args.features, *limit)
    where = ("--device", "cpu") if device == "cpu" else ("--share_devices",)
    two_ranks_s = LEAST_S if device == "cpu" else 90.0  # they have no budget of their own
    two_ranks = ("tests.stress", "equivalence", "--quick", "--workers", "2", *where)
    # Without the conftest.py of all tests, which wants Ray and hypothesis
    folder = str(ROOT / TESTS)
    tests = ["pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={folder}", folder]
    # They start processes, and wait: with pytest-xdist several of them do at once
    if is_there("xdist"):
        tests += ["-n", str(max(1, int(available_cpus() // 2)))]
    gpt2, char = "gpt2-124m", "shakespeare-char"
    # On a CPU, to try it out, the smallest subject
    tuned = ("encoder", "--quick", "--workers", "1") if device == "cpu" else (gpt2, "--compile")
    tune = ("tests.stress", "tune", "--most", "0", "--device", device, "--subjects", *tuned)
    tune += () if args.quick or device == "cpu" else ("--rounds", "5")
    return [
        DayPart(f"search for {gpt2}", tune, 200, "tune", True, COMPARE_S),
        DayPart(f"ladder of {gpt2}", ladder(gpt2, rungs), 130, "gpu-gpt2", True),
        DayPart("seconds to 1.47", ladder(char, "baby"), 80, "gpu-baby", True),
        DayPart("features", features, 60, "gpu-features", True),
        DayPart(TESTS, tuple(tests), 100, after_s=TEST_S),
        # What the ones before it leave
        DayPart(f"ladder of {char}", ladder(char, rungs), 0, "gpu-char", True),
        DayPart("equivalence of two ranks", two_ranks, 0, "equivalence", least_s=two_ranks_s),
    ]


class Day:
    """One call: its device, its clock, and its report."""

    def __init__(
        self,
        args: argparse.Namespace,
        device: str,
        folder: Path,
        env: Mapping[str, str],
        report: Report,
    ) -> None:
        """`folder` is for logs, `env` for the parts."""
        self.args = args
        self.device = device
        self.folder = folder
        self.env = env
        self.report = report
        self.begun = time.monotonic()
        self.out: Path = args.out
        name = report.conditions["device"]
        self.slug = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
        self.path = self.out / f"gpu-day-{self.slug}.json"

    def run(self, parts: Sequence[DayPart]) -> None:
        """Run the parts, each within its share and what is left of those before it."""
        whole_s = sum(part.share_s for part in parts)
        shares_s = 0.0
        for part in parts:
            shares_s += part.share_s
            spent_s = time.monotonic() - self.begun
            share = shares_s / whole_s if whole_s else 1.0
            self.run_part(part, self.args.budget_s * share - spent_s)
            self.report.conditions["seconds"] = round(time.monotonic() - self.begun, 1)
            self.report.conditions["load"]["after"] = load_average()
            # A call that is cut off keeps the parts before. The report is none of a benchmark, so
            # its name has another key.
            content = self.report.to_dict()
            write_json(self.path, {"day": content.pop("bench"), **content})

    def run_part(self, part: DayPart, limit_s: float) -> None:
        """Run one part and add its row; what it raises is a failure of its own."""
        why = ""
        if part.name == TESTS and self.device == "cpu":
            why = "tests/gpu needs a GPU"
        elif part.name == TESTS and not is_there("pytest"):
            why = "needs pytest, which make bench-gpu-bundle collects"
        elif limit_s < part.least_s:
            why = f"no time was left of budget_s = {self.args.budget_s:g}"
        if why:
            say(f"skipped  {part.name}: {why}")
            self.report.add(part.name, SECONDS, "s", (), skipped=why)
            return
        say(f"== {part.name}, at most {limit_s:.0f} s")
        start = time.monotonic()
        error = ""
        note = ""
        try:
            note = self.run_command(part, limit_s)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
            self.report.failures.append(f"{part.name}: {failure}")
            say(f"FAILED  {part.name}: {failure}")
        seconds = time.monotonic() - start
        self.report.add(part.name, SECONDS, "s", seconds, note, error=error)

    def run_command(self, part: DayPart, limit_s: float) -> str:
        """Run a part's command to its end, and return the last line that it printed.

        Raises ChildFailed.
        """
        command = [sys.executable, "-m", *part.command]
        if part.result:
            command += ["--json", str(self.out / f"{part.result}-{self.slug}.json")]
        if part.writes_budget:
            command += ["--budget_s", f"{max(limit_s - part.after_s, 1):.0f}"]
        log = self.folder / f"{part.result or 'tests'}.log"
        # Tests that begin later are skipped: a test cannot be cut off without a failure.
        until = time.time() + limit_s - part.after_s
        own = {"NANORAY_TEST_GPU": "1", "NANORAY_TEST_GPU_UNTIL": str(until)}
        with Child(command, {**self.env, **own}, log) as child:
            try:
                child.wait(limit_s)
            except ChildFailed as error:
                raise ChildFailed(reason_in(log) or str(error)) from None
            finally:
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                print("\n".join(lines[-LOG_LINES:]), flush=True)
        return lines[-1] if lines else ""


def reason_in(log: Path) -> str | None:
    """Return the first line with which a benchmark reports an error, or its verdict, if any."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("error: ", "FAILED  ")):
            return line
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the day, print its table, and return the exit code."""
    args = read_flags(argv)
    why = lacking_torch()
    if why:
        print(f"gpu_day: {why}", file=sys.stderr)
        return 2
    with interruptible(), scratch_folder() as folder:
        lib = folder / "lib"
        bundled = unpack(args.bundle, lib)
        missing = [name for name in NEEDED if not is_there(name)]
        if missing:
            print(f"gpu_day: {how_to_get(missing)}", file=sys.stderr)
            return 2
        # Imported here: it needs what has just been unpacked.
        from nanoray.machine.gpus import discover_gpus

        gpus = [] if args.device == "cpu" else discover_gpus()
        if not gpus and args.device != "cpu":
            print(
                'gpu_day: NVIDIA\'s driver shows no GPU here; ARGS="--device cpu" tries the parts out',
                file=sys.stderr,
            )
            return 1
        report = Report("gpu_day", conditions(COMMAND, argv or sys.argv[1:]))
        report.conditions["device"] = f"{gpus[0].name} {gpus[0].profile}".strip() if gpus else "cpu"
        report.conditions["python"] = sys.executable
        report.conditions["from the bundle"] = bundled
        optional = ("pytest", "matplotlib", "ray")
        report.conditions["missing"] = [name for name in optional if not is_there(name)]
        args.out.mkdir(parents=True, exist_ok=True)
        paths = [str(lib), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = arm_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        env["TMPDIR"] = str(folder / "tmp")
        day = Day(args, "cuda" if gpus else "cpu", folder, env, report)
        wanted = args.parts.split(",")
        parts = parts_of(args, day.device)
        day.run([part for part in parts if args.parts == "all" or part.name in wanted])
    print("\n".join(report.lines()))
    print(f"written  {day.path}")
    return int(report.failed)


def read_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--budget_s", type=float, default=570.0, help="seconds for everything [%(default)g]"
    )
    late = "seconds after which a feature has failed [%(default)g]"
    parser.add_argument("--feature_s", type=float, default=45.0, help=late)
    parser.add_argument("--quick", action="store_true", help="few and short rounds")
    parser.add_argument("--parts", default="all", metavar="A,B", help="which of the parts [all]")
    which = "which of the features [%(default)s]"
    parser.add_argument("--features", default="all", metavar="A,B", help=which)
    text = "tiny Shakespeare, or as in nanoray.launch [the bundle's, else auto]"
    parser.add_argument("--dataset", default="", help=text)
    bundle = "folder of make bench-gpu-bundle [%(default)s]"
    parser.add_argument("--bundle", type=Path, default=FOLDER, help=bundle)
    parser.add_argument(
        "--out", type=Path, help="folder of the results [docs/results; build/gpu-trial on a CPU]"
    )
    args = parser.parse_args(argv)
    if not args.dataset:
        bundled = args.bundle / "shakespeare.txt"
        args.dataset = str(bundled) if bundled.is_file() else "auto"
    if args.out is None:
        args.out = ROOT / ("build/gpu-trial" if args.device == "cpu" else "docs/results")
    names = [part.name for part in parts_of(args, "cuda")]
    for name in args.parts.split(","):
        if name not in ("all", *names):
            parser.error(f"unknown part {name}; known: {', '.join(names)}")
    return args


def lacking_torch() -> str | None:
    """Return why this Python cannot run anything, or None."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"{sys.executable} has no torch; name another one: make bench-gpu GPU_PYTHON=/path/to/python3"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        return f"torch {version} is older than 2.11, the oldest that nanoray runs on; install a newer one"
    return None


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("interrupted: what was started is ended, finished parts are written", file=sys.stderr)
        raise SystemExit(130) from None
