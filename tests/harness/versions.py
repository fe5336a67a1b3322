"""Run the tests with other versions of torch, Ray and Python, each in an environment of its own.

    make test-versions                                    every pair, every file of FILES, every Python
    make test-versions ARGS="--pair 0 --files tests/ranks/test_own.py"
    make test-versions ARGS="--python python3.10 /opt/python3.13/bin/python3"

A pair of torch and Ray is tested with this Python, in build/versions/torch-X-ray-Y; each takes
gigabytes, because torch's wheels of the package index bring CUDA. The other packages are the newest
that pip finds. The outcome of each file goes to docs/results/versions.json, from which
docs/environments.md has its tables: a file that is run again replaces its own outcome there, so one
pair can be tested in parts.

With another Python, what needs neither torch nor Ray is tested, in build/versions/python-X, with the
versions of constraints.txt: every file is compiled, and tests/unit runs. A test that fails for want
of torch or Ray is counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
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


# The minor versions of Python that pyproject.toml allows
MINORS = (10, 11, 12, 13)
# What tests/unit needs there. Each extra of pyproject.toml would bring torch, Ray, or a server.
PLAIN = (
    *(
        "aiohttp",
        "fsspec",
        "hypothesis",
        "jinja2",
        "jsonschema",
        "kubernetes",
        "kubernetes-validate",
    ),
    *("matplotlib", "mypy", "numpy", "nvidia-ml-py", "packaging", "pydantic", "pytest"),
    *("pytest-timeout", "pyyaml", "rich", "safetensors", "shtab", "tensorboard", "tiktoken"),
)
LEFT_OUT = re.compile(r"No module named '(torch|ray|pyarrow)")
# Tests whose processes lack torch, and do not say so where pytest could see it
NEED_TORCH = (
    "tests/unit/test_alerts.py::test_every_query_is_of_metrics_that_exist",
    "tests/unit/test_check.py::test_the_command_is_quick_to_import_and_ready_here",
    "tests/unit/test_check.py::test_what_is_installed_here",
    "tests/unit/test_console.py",
    "tests/unit/test_help.py::test_the_version",
    "tests/unit/test_launcher_watch.py",
    "tests/unit/test_processes.py::test_a_head_is_started_by_a_path_without_a_space",
)


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


def plain_environment_of(python: str) -> Path:
    """Return the Python of an environment without torch and Ray, which is made at the first call."""
    folder = ROOT / "build" / "versions" / f"python-{version_of(python)}"
    ready = folder / "ready"
    inside = folder / "bin" / "python"
    if not ready.exists():
        print(f"making {folder.relative_to(ROOT)}: minutes ...", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        pip = (str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *PLAIN], check=True)
        ready.touch()
    return inside


def plain_outcome(python: Path) -> dict[str, Any]:
    """Compile all files, and run the tests that need neither torch nor Ray."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # What this Python compiles stays out of the repository
        env = os.environ | {"PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
        rooms = [str(ROOT / room) for room in ("nanoray", "examples", "tests", "docs")]
        compiled = subprocess.run([str(python), "-m", "compileall", "-q", *rooms], env=env)
        files = sum(1 for _ in Path(folder).rglob("*.pyc"))

        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "--noconftest", "tests/unit"]
        command += ["-p", "tests.harness.fixtures", "-p", "no:cacheprovider", "-m", "not full"]
        command += ["--continue-on-collection-errors", f"--junitxml={report}"]
        command += [f"--deselect={test}" for test in NEED_TORCH]
        tests = subprocess.run(command, cwd=ROOT, env=env)
        if not report.exists():
            raise SystemExit(f"{python}: pytest ended with exit code {tests.returncode}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))

    failed: list[str] = []
    counts = {"passed": 0, "skipped": 0, "need torch or Ray": 0}
    for case in cases:
        problems = [child for child in case if child.tag in ("failure", "error")]
        text = "".join(f"{problem.get('message')} {problem.text}" for problem in problems)
        if LEFT_OUT.search(text):
            counts["need torch or Ray"] += 1
        elif problems:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return {
        "python": version_of(python),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{cpu_name()}, {available_cpus():g} CPUs",
        "commit": commit(),
        "files compiled": files if compiled.returncode == 0 else 0,
        **counts,
        "failed": len(failed),
        "failures": failed,
        "seconds": round(time.monotonic() - began, 1),
    }


def load(kind: str = "pairs") -> list[dict[str, Any]]:
    """Return the committed outcomes, one record per pair, or per Python (kind "pythons")."""
    if not RESULTS.exists():
        return []
    records: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")).get(kind, [])
    return records


def store(pairs: list[dict[str, Any]], pythons: list[dict[str, Any]]) -> None:
    """Write RESULTS."""
    content = {"tests": "not full", "pairs": pairs, "pythons": pythons}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """Return the commit that is tested."""
    revision = ("git", "rev-parse", "--short", "HEAD")
    return subprocess.run(revision, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def note(python: Path, pair: Pair, file: str, result: dict[str, Any]) -> None:
    """Put the outcome of one file into RESULTS."""
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
    store(records, load("pythons"))


def note_plain(result: dict[str, Any]) -> None:
    """Put the outcome of a Python into RESULTS, in place of that of its minor version."""
    minor = result["python"].rpartition(".")[0]
    others = [r for r in load("pythons") if r["python"].rpartition(".")[0] != minor]
    records = sorted([*others, result], key=lambda r: [int(n) for n in r["python"].split(".")])
    store(load(), records)


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
    """Return the table of docs/environments.md: which pairs have passed."""
    lines = [
        "| torch | Ray | Python | test files | passed | failed | skipped | on |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for record in load():
        counts = [total(record, key) for key in ("passed", "failed", "skipped")]
        cells = [record["torch"], record["ray"], record["python"], len(record["files"]), *counts]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, record["date"]]) + " |")
    return lines


def plain_table() -> list[str]:
    """Return the table of docs/environments.md of the Pythons that were tested without torch and Ray."""
    lines = [
        "| Python | files compiled | tests passed | failed | skipped | files or tests that need torch or Ray | on |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    keys = ("python", "files compiled", "passed", "failed", "skipped", "need torch or Ray", "date")
    for record in load("pythons"):
        lines.append("| " + " | ".join(str(record[key]) for key in keys) + " |")
    return lines


def other_pythons() -> list[str]:
    """Return the Pythons on PATH that nanoray allows, but for the minor version of this one."""
    names = [f"python3.{minor}" for minor in MINORS if minor != sys.version_info.minor]
    return [name for name in names if shutil.which(name)]


def main(argv: list[str] | None = None) -> int:
    """Test the pairs and the Pythons, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=int, choices=range(len(PAIRS)), help="0 is the oldest")
    parser.add_argument("--files", nargs="+", default=FILES, help="test files (default: all)")
    parser.add_argument(
        "--python", nargs="+", metavar="PYTHON", help="test these, and no pair (default: on PATH)"
    )
    parser.add_argument("--table", action="store_true", help="print the table and test nothing")
    args = parser.parse_args(argv)
    if args.table:
        print("\n".join([*table(), "", *plain_table()]))
        return 0

    pairs = PAIRS if args.pair is None else PAIRS[args.pair : args.pair + 1]
    pythons = other_pythons() if args.pair is None else []
    if args.python is not None:
        pairs, pythons = (), args.python
    for pair in pairs:
        python = environment_of(pair)
        for file in args.files:
            print(f"torch {pair.torch}, Ray {pair.ray}: {file}", flush=True)
            note(python, pair, file, outcome(python, file))
    for name in pythons:
        python = plain_environment_of(name)
        print(f"Python {version_of(python)}, without torch and Ray", flush=True)
        note_plain(plain_outcome(python))
    print("\n".join([*table(), "", *plain_table()]))
    failed = sum(total(record, "failed") for record in load())
    failed += sum(r["failed"] + (r["files compiled"] == 0) for r in load("pythons"))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
