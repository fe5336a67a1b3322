"""Run the tests with other versions of torch and Ray, each pair in an environment of its own.

    make test-versions                                    every pair, every file of FILES
    make test-versions ARGS="--pair 0 --files tests/ranks/test_own.py"

The environments are build/versions/torch-X-ray-Y; each takes gigabytes, because torch's wheels of
the package index bring CUDA. The other packages are the newest that pip finds. The outcome of each
file goes to docs/results/versions.json, from which README.md has its table: a file that is run again
replaces its own outcome there, so one pair can be tested in parts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from nanoray.host.host import available_cpus, cpu_name

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


def environment_of(pair: Pair) -> Path:
    """Return the Python of a pair's environment, which is made at the first call."""
    folder = ROOT / "build" / "versions" / f"torch-{pair.torch}-ray-{pair.ray}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if ready.exists():
        return python
    print(f"making {folder.relative_to(ROOT)}: gigabytes, minutes ...", flush=True)
    venv.create(folder, with_pip=True)
    packages = (f"torch=={pair.torch}", f"ray[default]=={pair.ray}", "-e", f"{ROOT}[test]")
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, *packages], check=True)
    ready.touch()
    return python


def outcome(python: Path, file: str) -> dict[str, Any]:
    """Run the tests of one file with an environment's Python; return how many passed and failed."""
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
        done = subprocess.run(command, cwd=ROOT)
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
    revision = ("git", "rev-parse", "--short", "HEAD")
    commit = subprocess.run(revision, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit,
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "failures": failed,
        "seconds": round(time.monotonic() - began, 1),
    }


def load() -> list[dict[str, Any]]:
    """Return the committed outcomes, one record per pair; none if there is no file yet."""
    if not RESULTS.exists():
        return []
    pairs: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["pairs"]
    return pairs


def note(python: Path, pair: Pair, file: str, result: dict[str, Any]) -> None:
    """Put the outcome of one file into RESULTS."""
    version = "import platform; print(platform.python_version())"
    asked = subprocess.run([str(python), "-c", version], capture_output=True, text=True, check=True)
    key = {"torch": pair.torch, "ray": pair.ray, "python": asked.stdout.strip()}

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
    text = json.dumps({"tests": "not full", "pairs": records}, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def total(record: dict[str, Any], key: str) -> int:
    """Return a sum over the files of a pair; a file that could not be run counts as a failure."""
    count = 0
    for result in record["files"].values():
        if "error" not in result:
            count += result[key]
        elif key == "failed":
            count += 1
    return count


def table() -> list[str]:
    """Return the table of README.md: which pairs have passed."""
    lines = [
        "| torch | Ray | Python | test files | passed | failed | skipped | on |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for record in load():
        counts = [total(record, key) for key in ("passed", "failed", "skipped")]
        cells = [record["torch"], record["ray"], record["python"], len(record["files"]), *counts]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, record["date"]]) + " |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Test the pairs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=int, choices=range(len(PAIRS)), help="0 is the oldest")
    parser.add_argument("--files", nargs="+", default=FILES, help="test files (default: all)")
    parser.add_argument("--table", action="store_true", help="print the table and test nothing")
    args = parser.parse_args(argv)
    if args.table:
        print("\n".join(table()))
        return 0

    pairs = PAIRS if args.pair is None else PAIRS[args.pair : args.pair + 1]
    for pair in pairs:
        python = environment_of(pair)
        for file in args.files:
            print(f"torch {pair.torch}, Ray {pair.ray}: {file}", flush=True)
            note(python, pair, file, outcome(python, file))
    print("\n".join(table()))
    return int(any(total(record, "failed") for record in load()))


if __name__ == "__main__":
    sys.exit(main())
