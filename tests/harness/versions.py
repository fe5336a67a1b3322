"""Run the tests with other versions of torch, Ray and Python, each in an environment of its own.

    make test-versions                                    every pair with this Python, and every other Python
    make test-versions ARGS="--pair 0 --files tests/ranks/test_own.py"
    make test-versions ARGS="--python python3.10 /opt/python3.13/bin/python3"

A pair of torch and Ray is tested with this Python and FILES, another Python with the pair of
constraints.txt and FILES_OF_A_PYTHON. Each environment is in build/versions, and takes gigabytes,
because torch's wheels of the package index bring CUDA. Packages beside the pair are the newest that
pip finds with this Python, and those of constraints.txt with another one. The outcome of each file
goes to docs/results/versions.json, from which docs/environments.md has its table: a file that is run
again replaces its own outcome there, so one environment can be tested in parts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from nanoray.machine.host import available_cpus, cpu_name

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "versions.json"


class Pair(NamedTuple):
    """A torch and a Ray that are tested together."""

    torch: str
    ray: str


# The lowest versions that pyproject.toml allows, and the newest that the tests have seen.
PAIRS = (Pair("2.11.0", "2.50.0"), Pair("2.14.1", "2.60.0"))

# The benchmarks are left out: they measure the same code as the tests of what they measure.
RANKS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests" / "ranks").glob("test_*.py")
    if not path.name.startswith("test_bench_")
)
# Placement, actors, jobs; lost ranks and their replacement. Drained nodes are left out: an old Ray
# does not drain its node at SIGTERM.
CLUSTER = (
    "tests/cluster/test_own_on_ray.py",
    "tests/cluster/test_launch.py",
    "tests/cluster/test_recovery.py",
)
FILES = (*RANKS, *CLUSTER)


# Of another Python: what needs no ranks, and runs on 1, 2 and 3 ranks
FILES_OF_A_PYTHON = ("tests/unit", "tests/ranks/test_train.py")

# The minor versions of Python that pyproject.toml allows
MINORS = (10, 11, 12, 13)


def pins() -> dict[str, str]:
    """Return the versions of constraints.txt, by name; of several for different Pythons, the last."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, equals, version = line.partition(";")[0].strip().partition("==")
        if equals:
            found[name] = version.strip()
    return found


def pinned() -> Pair:
    """Return the pair of constraints.txt."""
    return Pair(pins()["torch"], pins()["ray"])


def environment_of(pair: Pair, python: str) -> Path:
    """Return the Python of an environment with this pair, which is made at the first call."""
    version = version_of(python)
    name = f"torch-{pair.torch}-ray-{pair.ray}-python-{version}"
    folder = ROOT / "build" / "versions" / name
    inside = folder / "bin" / "python"
    ready = folder / "ready"
    if ready.exists():
        return inside
    print(f"making {folder.relative_to(ROOT)}: gigabytes, minutes ...", flush=True)
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    packages = [f"torch=={pair.torch}", f"ray[default]=={pair.ray}", "-e", f"{ROOT}[test]"]
    packages += ["ruff", "types-PyYAML"]  # a few tests check code, as lint does
    if pair == pinned():
        packages += ["-c", str(ROOT / "constraints.txt")]
    pip = (str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, *packages], check=True)
    ready.touch()
    return inside


def outcome(python: Path, file: str) -> dict[str, Any]:
    """Run the tests of a file or folder with an environment's Python; return how many passed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-m",
            "not full",
            file,
            f"--junitxml={report}",
        ]
        if (ROOT / file).is_dir():
            command += ["-n", "2", "--dist", "loadfile"]
        # As in the Makefile: otherwise each process compiles torch anew
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
        done = subprocess.run(command, cwd=ROOT, env=env)
        if not report.exists():
            return {"error": f"pytest ended with exit code {done.returncode}"}
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))

    failed: list[str] = []
    skipped = 0
    for case in cases:
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(str(case.get("name")))
        elif "skipped" in kinds:
            skipped += 1
    return {
        "commit": commit(),
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "failures": failed,
        "seconds": round(time.monotonic() - began, 1),
    }


def version_of(python: Path | str) -> str:
    """Return the version of a Python, such as 3.12.1."""
    code = "import platform; print(platform.python_version())"
    asked = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def load() -> list[dict[str, Any]]:
    """Return the committed outcomes, a record for each environment."""
    if not RESULTS.exists():
        return []
    records: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["pairs"]
    return records


def commit() -> str:
    """Return the commit that is tested."""
    revision = ("git", "rev-parse", "--short", "HEAD")
    return subprocess.run(revision, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def note(python: Path, pair: Pair, file: str, result: dict[str, Any]) -> None:
    """Put the outcome of a file into RESULTS."""
    key = {"torch": pair.torch, "ray": pair.ray, "python": version_of(python)}

    records = load()
    record = next((r for r in records if key.items() <= r.items()), None)
    if record is None:
        record = {**key, "files": {}}
        records.append(record)
    record["date"] = time.strftime("%Y-%m-%d")
    record["machine"] = f"{cpu_name()}, {available_cpus():g} CPUs"
    record["files"][file] = result

    for each in records:
        each["files"] = dict(sorted(each["files"].items()))
    content = {"tests": "not full", "pairs": records}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def total(record: dict[str, Any], key: str) -> int:
    """Return a sum over the files of a record; a file that could not be run counts as a failure."""
    count = 0
    for result in record["files"].values():
        if "error" not in result:
            count += result[key]
        elif key == "failed":
            count += 1
    return count


def table() -> list[str]:
    """Return the table of docs/environments.md: what has passed."""
    lines = [
        "| torch | Ray | Python | tests of | passed | failed | skipped | on |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for record in load():
        counts = [total(record, key) for key in ("passed", "failed", "skipped")]
        files = record["files"]
        what = f"{len(files)} files" if len(files) > 3 else ", ".join(f"`{name}`" for name in files)
        cells = [record["torch"], record["ray"], record["python"], what, *counts]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, record["date"]]) + " |")
    return lines


def other_pythons() -> list[str]:
    """Return the Pythons on PATH that nanoray allows, but for the minor version of this one."""
    names = [f"python3.{minor}" for minor in MINORS if minor != sys.version_info.minor]
    return [name for name in names if shutil.which(name)]


def main(argv: list[str] | None = None) -> int:
    """Test the pairs and the Pythons, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=int, choices=range(len(PAIRS)), help="0 is the oldest")
    parser.add_argument(
        "--files", nargs="+", help="test files or folders (default: each one's own)"
    )
    parser.add_argument(
        "--python", nargs="+", metavar="PYTHON", help="test these, and no pair (default: on PATH)"
    )
    parser.add_argument("--table", action="store_true", help="print the table and test nothing")
    args = parser.parse_args(argv)
    if args.table:
        print("\n".join(table()))
        return 0

    pairs = PAIRS if args.pair is None else PAIRS[args.pair : args.pair + 1]
    pythons = other_pythons() if args.pair is None else []
    if args.python is not None:
        pairs, pythons = (), args.python
    wanted = [(pair, sys.executable, args.files or FILES) for pair in pairs]
    wanted += [(pinned(), python, args.files or FILES_OF_A_PYTHON) for python in pythons]
    for pair, name, files in wanted:
        python = environment_of(pair, name)
        for file in files:
            print(f"torch {pair.torch}, Ray {pair.ray}, {name}: {file}", flush=True)
            note(python, pair, file, outcome(python, file))
    print("\n".join(table()))
    return int(sum(total(record, "failed") for record in load()) > 0)


if __name__ == "__main__":
    sys.exit(main())
