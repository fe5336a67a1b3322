"""All that a GPU should be asked while it is at hand, in ten minutes: `make bench-gpu`.

    python3 -m nanoray.bench.gpu_day [--budget_s 570] [--device cpu] [--quick] [--parts A,B]

It needs Python 3.10 and torch 2.11 or newer, and this tree. It uses what else can be imported, and
skips by name what cannot run. pydantic, PyYAML and nvidia-ml-py have stand-ins here (standins/);
numpy and pytest have none. `make bench-gpu-bundle` puts them into build/gpu-day, where
pip works; that folder is used where it is found beside this tree.

    features                     each kernel and number format, with torch alone  gpu_features.py
    ladder of gpt2-124m          what each change gains a step                    bench gpu
    seconds to 1.47              nanoGPT's baby GPT to that validation loss       bench gpu
    ladder of shakespeare-char   what each change gains a step of it              bench gpu
    equivalence of two ranks     on one card, against one process                 bench equivalence
    tests/gpu                                                                     pytest

Each part is a process of its own, and those of one feature or rung are, too: what hangs or crashes
costs its own row. A part has a share of the budget, and the time that earlier ones have left. The
report is written after each part. Exit code 0: nothing that ran has failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.base.atomic import write_json
from nanoray.bench.harness.processes import Child, ChildFailed, arm_environment, scratch_folder
from nanoray.bench.harness.report import Measurement, Report, conditions, load_average, say

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "build" / "gpu-day"
STANDINS = Path(__file__).with_name("standins")
OLDEST_TORCH = (2, 11)
FEATURES = (
    "facts",
    "bf16",
    "tf32",
    "compiled loss",
    "compiled layer",
    "flash attention",
    "cuDNN attention",
    "CUDA graphs",
    "fp8",
    "fused AdamW",
)
FEATURE_S = 45.0  # for one feature, compiling included
START_S = 120.0  # for a process to import torch from a cold disk
LEAST_S = 15.0  # with less, no part begins
BUNDLED = "make bench-gpu-bundle, where pip works, puts it into build/gpu-day"
GRACE_S = 15.0  # between a benchmark's own budget and its end


@dataclass(frozen=True)
class DayPart:
    """One part of the day: a command, or the features."""

    name: str
    command: tuple[str, ...]  # behind `python -m`; empty: the features
    share_s: float  # of the budget
    needs: tuple[str, ...] = ()  # modules without which it is skipped by name
    result: str = ""  # the JSON file that it writes, without the device
    writes_budget: bool = False  # whether the command takes --budget_s

    def file(self, folder: Path, device: str) -> Path | None:
        """Return where its own report goes."""
        return folder / f"{self.result}-{device}.json" if self.result else None


ENDINGS = (".dist-info", ".libs", ".data", ".pth")  # of what a wheel has beside its modules
NEEDS = ("numpy", "pydantic", "yaml")
SECONDS = "seconds"
TESTS = "tests/gpu"
LOG_LINES = 40  # of a part, on the terminal
COMMAND = "python -m nanoray.bench.gpu_day"


def parts_of(device: str, quick: bool, dataset: str) -> list[DayPart]:
    """Return the parts in their order: what says most in least time comes first."""
    bench = ["nanoray.bench", "gpu", "--device", device, "--dataset", dataset, "--timeout_s", "90"]
    rungs = "ladder"
    if device == "cpu":
        # To try the parts out: no model of 124 M parameters, and no minutes to 1.47
        rungs = "float32,+ tf32,+ fused AdamW,(CUDA graphs)"
        sizes = "n_layer=1,n_head=2,n_embd=16,block_size=16,dropout=0.0,compile=false"
        bench += ["--settings", f"{sizes},target_loss=9.0,max_steps=40,eval_every=20"]
    if quick or device == "cpu":
        bench.append("--quick")
    else:
        bench += ["--rounds", "5", "--block_ms", "500"]

    def ladder(preset: str, arms: str) -> tuple[str, ...]:
        return (*bench, "--presets", preset, "--arms", arms)

    where = ("--device", "cpu") if device == "cpu" else ("--share_devices",)
    two_ranks = ("nanoray.bench", "equivalence", "--quick", "--workers", "2", *where)
    # Without the conftest.py of all tests, which wants Ray and hypothesis
    folder = str(ROOT / TESTS)
    tests = ("pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={folder}", folder)
    gpt2, char = "gpt2-124m", "shakespeare-char"
    return [
        DayPart("features", (), 100),
        DayPart(f"ladder of {gpt2}", ladder(gpt2, rungs), 190, NEEDS, "gpu-gpt2", True),
        DayPart("seconds to 1.47", ladder(char, "baby"), 110, NEEDS, "gpu-baby", True),
        DayPart(f"ladder of {char}", ladder(char, rungs), 50, NEEDS, "gpu-char", True),
        DayPart("equivalence of two ranks", two_ranks, 60, NEEDS, "equivalence"),
        DayPart(TESTS, tests, 60, (*NEEDS, "pytest")),
    ]


class DayPlace:
    """Where the parts run: their environment, and what is missing there."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        """Put what this Python lacks into a folder of its own, from the bundle or the stand-ins."""
        self.folder = folder
        self.bundled: list[str] = []
        self.standins: list[str] = []
        lib = folder / "lib"
        lib.mkdir()
        # Only what cannot be imported: an installed package is never replaced.
        for wheel in sorted((bundle / "wheels").glob("*.whl")):
            if fits(wheel.name):
                self.bundled += [name for name in unpack(wheel, lib) if name[0] != "_"]
        for name in ("pydantic", "yaml", "pynvml"):
            if not is_there(name) and name not in self.bundled:
                shutil.copy(STANDINS / f"{name}.py", lib)
                self.standins.append(name)
        # Last in this process, which imports only a few modules.
        sys.path.append(str(lib))
        paths = [str(lib), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.env = arm_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.env |= {
            "TMPDIR": str(folder / "tmp"),
            "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
        }

    def lacks(self, names: Sequence[str]) -> list[str]:
        """Return which of these modules cannot be imported, from anywhere."""
        return [name for name in names if not is_there(name)]


def fits(wheel: str) -> bool:
    """Whether a wheel, by its name, is for this Python and this processor."""
    _, python, abi, machine = wheel.removesuffix(".whl").rsplit("-", 3)
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    is_pure = "py3" in python.split(".") and abi == "none"
    of_this_python = is_pure or own in python.split(".") or abi == "abi3"
    return of_this_python and (machine == "any" or machine.endswith(platform.machine()))


def unpack(wheel: Path, lib: Path) -> list[str]:
    """Unpack a wheel if some module of it is missing; return the names of those modules."""
    with zipfile.ZipFile(wheel) as file:
        tops = {name.partition("/")[0] for name in file.namelist()}
        modules = sorted(top.partition(".")[0] for top in tops if not top.endswith(ENDINGS))
        missing = [name for name in modules if not is_there(name)]
        if missing:
            file.extractall(lib)
    return missing


def is_there(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


class Day:
    """One call: its device, its clock, and its report."""

    def __init__(
        self, args: argparse.Namespace, device: str, place: DayPlace, report: Report
    ) -> None:
        self.args = args
        self.device = device
        self.place = place
        self.report = report
        self.begun = time.monotonic()
        self.shares_s = 0.0  # of the parts so far
        self.out: Path = args.out
        name = report.conditions["device"]
        self.slug = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
        self.path = self.out / f"gpu-day-{self.slug}.json"

    def run(self, parts: Sequence[DayPart]) -> None:
        """Run the parts, each within its share and what is left of those before it."""
        whole_s = sum(part.share_s for part in parts)
        for part in parts:
            self.shares_s += part.share_s
            spent_s = time.monotonic() - self.begun
            limit_s = self.args.budget_s * self.shares_s / whole_s - spent_s
            self.run_part(part, limit_s)
            self.report.conditions["seconds"] = round(time.monotonic() - self.begun, 1)
            self.report.conditions["load"]["after"] = load_average()
            # A call that is cut off keeps the parts before.
            self.write()

    def write(self) -> None:
        """Write the report; it is none of a benchmark, so its name has another key."""
        content = self.report.to_dict()
        write_json(self.path, {"day": content.pop("bench"), **content})

    def run_part(self, part: DayPart, limit_s: float) -> None:
        """Run one part and add its row; what it raises is a failure of its own."""
        why = ""
        missing = self.place.lacks(part.needs)
        if missing:
            why = f"needs {', '.join(missing)}, which this Python lacks; {BUNDLED}"
        elif part.name == TESTS and self.device == "cpu":
            why = "tests/gpu needs a GPU"
        elif limit_s < LEAST_S:
            why = f"no time was left of budget_s = {self.args.budget_s:g}"
        if why:
            say(f"skipped  {part.name}: {why}")
            self.report.rows.append(Measurement(part.name, SECONDS, "s", (), skipped=why))
            return
        say(f"== {part.name}, at most {limit_s:.0f} s")
        start = time.monotonic()
        error = ""
        note = ""
        try:
            if part.command:
                note = self.run_command(part, limit_s)
            else:
                self.ask_features(self.args.features.split(","), limit_s)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
            self.report.failures.append(f"{part.name}: {failure}")
            say(f"FAILED  {part.name}: {failure}")
        seconds = time.monotonic() - start
        self.report.rows.append(Measurement(part.name, SECONDS, "s", (seconds,), note, error))

    def run_command(self, part: DayPart, limit_s: float) -> str:
        """Run a part's command to its end, and return the last line that it printed.

        Raises ChildFailed.
        """
        command = [sys.executable, "-m", *part.command]
        result = part.file(self.out, self.slug)
        if result:
            command += ["--json", str(result)]
        if part.writes_budget:
            command += ["--budget_s", f"{max(limit_s - GRACE_S, 1):.0f}"]
        log = self.place.folder / f"{part.result or 'tests'}.log"
        # Tests that begin later are skipped: a test cannot be cut off without a failure.
        until = time.time() + limit_s - GRACE_S
        env = self.place.env | {"NANORAY_TEST_GPU": "1", "NANORAY_TEST_GPU_UNTIL": str(until)}
        with Child(command, env, log) as child:
            try:
                child.wait(limit_s)
            except ChildFailed as error:
                raise ChildFailed(reason_in(log) or str(error)) from None
            finally:
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                print("\n".join(lines[-LOG_LINES:]), flush=True)
        return lines[-1] if lines else ""

    def ask_features(
        self, names: Sequence[str], limit_s: float, module: str = "nanoray.bench.gpu_features"
    ) -> None:
        """Ask one process for all features, and another one for what is left when it has ended."""
        deadline = time.monotonic() + limit_s
        left = [*names]
        while left:
            if time.monotonic() + LEAST_S > deadline:
                for name in left:
                    why = f"no time was left of budget_s = {self.args.budget_s:g}"
                    self.report.rows.append(Measurement(name, SECONDS, "s", (), skipped=why))
                return
            command = [sys.executable, "-m", module, self.device]
            log = self.place.folder / f"features-{len(left)}.log"
            with Child(command, self.place.env, log, pipes=True) as child:
                limit_s = START_S  # to import torch, of the first feature
                while left:
                    name = left.pop(0)
                    try:
                        if limit_s == START_S:
                            child.answer(self.at_most(START_S, deadline))
                        limit_s = self.args.feature_s
                        child.ask(name)
                        found = child.answer(self.at_most(limit_s, deadline))
                    except ChildFailed as error:
                        found = {"error": str(error)}
                    self.add_feature(name, found)
                    # After a failed kernel the rest of a process says nothing.
                    if "error" in found:
                        break

    def at_most(self, limit_s: float, deadline: float) -> float:
        """Return a limit, or what is left until a deadline if that is less."""
        return max(1.0, min(limit_s, deadline - time.monotonic()))

    def add_feature(self, name: str, found: Mapping[str, Any]) -> None:
        """Add the rows of one feature."""
        if "error" in found:
            say(f"FAILED  {name}: {found['error']}")
            self.report.failures.append(f"{name}: {found['error']}")
            first_line = found["error"].splitlines()[0]
            self.report.rows.append(Measurement(name, "feature", "", (), error=first_line))
            return
        if "skipped" in found:
            say(f"skipped  {name}: {found['skipped']}")
            self.report.rows.append(Measurement(name, "feature", "", (), skipped=found["skipped"]))
            return
        if name == "facts":
            self.report.conditions["facts"] = found["note"]
        for metric, unit, value in found["rows"]:
            # The distance decides
            wrong = found["wrong"] if metric == "distance" else None
            self.report.rows.append(Measurement(name, metric, unit, (value,), wrong=wrong))
        values = ", ".join(f"{metric} {value:.4g} {unit}" for metric, unit, value in found["rows"])
        say(f"{name}: {values or found['note']}")


def reason_in(log: Path) -> str:
    """Return the first line with which a benchmark reports an error, or its verdict; "" if none."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("error: ", "FAILED  ")):
            return line
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the day, print its table, and return the exit code."""
    args = read_flags(argv)
    why = lacking_torch()
    if why:
        print(f"gpu_day: {why}", file=sys.stderr)
        return 2
    with interruptible(), scratch_folder() as folder:
        place = DayPlace(folder, args.bundle)
        # It imports pynvml, or its stand-in.
        from nanoray.host.gpus import discover_gpus

        gpus = [] if args.device == "cpu" else discover_gpus()
        if not gpus and args.device != "cpu":
            print(
                'gpu_day: NVIDIA\'s driver shows no GPU here; ARGS="--device cpu" tries the parts out',
                file=sys.stderr,
            )
            return 1
        device = "cuda" if gpus else "cpu"
        report = Report("gpu_day", conditions("gpu_day", argv or sys.argv[1:], COMMAND))
        report.conditions["device"] = f"{gpus[0].name} {gpus[0].profile}".strip() if gpus else "cpu"
        report.conditions["python"] = sys.executable
        report.conditions["stand-ins"] = place.standins
        report.conditions["from the bundle"] = place.bundled
        report.conditions["missing"] = place.lacks((*NEEDS, "pytest", "matplotlib", "ray"))
        args.out.mkdir(parents=True, exist_ok=True)
        day = Day(args, device, place, report)
        parts = parts_of(device, args.quick, args.dataset)
        day.run(
            [part for part in parts if args.parts == "all" or part.name in args.parts.split(",")]
        )
    print("\n".join(report.lines()))
    print(f"written  {day.path}")
    return int(report.failed)


def read_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    names = [part.name for part in parts_of("cuda", False, "auto")]
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--budget_s", type=float, default=570.0, help="seconds for everything [%(default)g]"
    )
    late = "seconds after which a feature has failed [%(default)g]"
    parser.add_argument("--feature_s", type=float, default=FEATURE_S, help=late)
    parser.add_argument("--quick", action="store_true", help="few and short rounds")
    parser.add_argument(
        "--parts", default="all", metavar="A,B", help=f"which of {', '.join(names)} [all]"
    )
    which = "which of the features [%(default)s]"
    parser.add_argument("--features", default=",".join(FEATURES), metavar="A,B", help=which)
    text = "tiny Shakespeare, or as in nanoray.launch [the bundle's, else auto]"
    parser.add_argument("--dataset", default="", help=text)
    bundle = "folder of make bench-gpu-bundle [%(default)s]"
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help=bundle)
    parser.add_argument(
        "--out", type=Path, help="folder of the results [docs/results; build/gpu-trial on a CPU]"
    )
    args = parser.parse_args(argv)
    if not args.dataset:
        bundled = args.bundle / "shakespeare.txt"
        args.dataset = str(bundled) if bundled.is_file() else "auto"
    if args.out is None:
        args.out = ROOT / ("build/gpu-trial" if args.device == "cpu" else "docs/results")
    for name in args.parts.split(","):
        if name not in ("all", *names):
            parser.error(f"unknown part {name}; known: {', '.join(names)}")
    for name in args.features.split(","):
        if name not in FEATURES:
            parser.error(f"unknown feature {name}; known: {', '.join(FEATURES)}")
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


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that children are ended; the report is on disk."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("interrupted: what was started is ended, finished parts are written", file=sys.stderr)
        raise SystemExit(130) from None
