"""tests/kinds.yaml: no kind of fault is without a test in `make test`; and neither is a promise.

tests/promises.yaml names the tests that hold each of the eight promises.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.harness.parsing import parse

TESTS = Path(__file__).resolve().parents[1]
# They measure; what they are about is in docs/performance.md.
BENCHMARKS = ("test_bench_", "test_gpu_day", "test_soak", "test_speedrun")
FULL = "pytest.mark.full"

ROOT = TESTS.parent
EVERYDAY = ("unit", "ranks", "cluster")  # folders of whose tests `make test` runs all but the full


@cache
def kinds() -> list[dict[str, Any]]:
    """Return the rows. Every worker collects this file, so it is not read at its top."""
    rows: list[dict[str, Any]] = yaml.safe_load((TESTS / "kinds.yaml").read_text(encoding="utf-8"))
    return rows


@cache
def marks_of_tests() -> dict[str, bool]:
    """Return each test, and whether `make test` leaves it out as a whole."""
    found = {}
    for path in sorted(TESTS.glob("*/test_*.py")):
        tree = parse(path.read_text(encoding="utf-8"))
        of_file = False
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                of_file = FULL in ast.unparse(node.value)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                name = f"{path.relative_to(TESTS)}::{node.name}"
                found[name] = of_file or FULL in marks
    return found


def test_a_kind_has_an_everyday_test() -> None:
    is_full = marks_of_tests()
    for row in kinds():
        assert row["everyday"], row["kind"]
        wrong = [name for name in row["everyday"] if is_full.get(name, True)]
        assert wrong == [], f"{row['kind']}: full, or gone"
        wrong = [name for name in row["full"] if not is_full.get(name, False)]
        assert wrong == [], f"{row['kind']}: not marked, or gone"


def test_each_test_that_is_left_out_belongs_to_a_kind() -> None:
    listed = {name for row in kinds() for name in row["full"]}
    left_out = {name for name, is_full in marks_of_tests().items() if is_full}
    missing = [
        name
        for name in sorted(left_out - listed)
        if not name.partition("/")[2].startswith(BENCHMARKS)
    ]
    assert missing == [], "add it to a kind in tests/kinds.yaml, beside the test that remains"


def rows_of(page: str, header: str) -> list[list[str]]:
    """Return the cells of each row of a page's table with this header."""
    text = (ROOT / page).read_text(encoding="utf-8")
    table = text.partition(f"\n{header}")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def promises() -> dict[str, dict[str, list[str]]]:
    """Return each promise, what it includes, and the tests of that."""
    found: dict[str, dict[str, list[str]]] = yaml.safe_load(
        (TESTS / "promises.yaml").read_text(encoding="utf-8")
    )
    return found


def not_everyday(tests: list[str]) -> list[str]:
    """Return those that are gone, marked `full`, or in a folder that needs more than a CPU."""
    is_full = marks_of_tests()
    return [
        name for name in tests if name.partition("/")[0] not in EVERYDAY or is_full.get(name, True)
    ]


def test_the_pages_have_the_promises_of_the_list() -> None:
    listed = promises()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## What you can rely on\n")[2].partition("\n## ")[0]
    assert len(listed) == 8
    assert re.findall(r"^- (.*)$", section, re.M) == list(listed)
    faults = [row[0] for row in rows_of("docs/reliability.md", "| fault ")]

    parts = [part for includes in listed.values() for part in includes]
    assert len(faults) >= 9
    assert sorted(part for part in parts if part in faults) == sorted(faults)

    page = (ROOT / "docs" / "reliability" / "tested.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", page, re.M) == list(listed)


def test_a_promise_has_everyday_tests() -> None:
    for includes in promises().values():
        for part, tests in includes.items():
            assert tests, f"{part}: name its tests in tests/promises.yaml"
            assert not_everyday(tests) == [], f"{part}: full, or gone"


def test_a_promise_without_an_everyday_test_is_found() -> None:
    gone = "unit/test_kinds.py::no"
    others = [
        "gpu/test_cuda.py::test_a",
        "cluster/test_kill_points.py::test_drivers_end_at_every_point",
    ]
    here = "unit/test_kinds.py::test_a_kind_has_an_everyday_test"
    assert not_everyday([here, gone, *others]) == [gone, *others]
