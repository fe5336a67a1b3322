"""tests/kinds.yaml: no kind of fault is without a test in `make test`; and neither is a promise.

Beside each promise of README.md and docs/reliability.md a comment names the tests that hold it:
`<!-- tests: FOLDER/FILE.py::TEST, ... -->`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.parsing import parse

TESTS = Path(__file__).resolve().parents[1]
# They measure; what they are about is in docs/performance.md.
BENCHMARKS = ("test_bench_", "test_gpu_day", "test_soak", "test_speedrun")
FULL = "pytest.mark.full"

ROOT = TESTS.parent
EVERYDAY = ("unit", "ranks", "cluster")  # folders of whose tests `make test` runs all but the full
# A page, and how the header of its table of promises begins
PROMISES = {"README.md": "| promise ", "docs/reliability.md": "| fault "}


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


def promises(text: str, header: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each row of the table with this header: its first cell, and the tests beside it."""
    table = text.partition(f"\n{header}")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        tests = re.search(r"<!-- tests: (.+?) -->", row)
        yield row.split("|")[1].strip(), tests[1].split(", ") if tests else []


def not_everyday(tests: list[str]) -> list[str]:
    """Return those that are gone, marked `full`, or in a folder that needs more than a CPU."""
    is_full = marks_of_tests()
    return [
        name for name in tests if name.partition("/")[0] not in EVERYDAY or is_full.get(name, True)
    ]


@pytest.mark.parametrize("page", PROMISES)
def test_a_promise_names_everyday_tests(page: str) -> None:
    rows = list(promises((ROOT / page).read_text(encoding="utf-8"), PROMISES[page]))
    assert len(rows) >= 9
    for promise, tests in rows:
        assert tests, f"{promise}: name its tests in a comment at the end of the row"
        assert not_everyday(tests) == [], f"{promise}: full, or gone"


def test_a_promise_without_an_everyday_test_is_found() -> None:
    table = """
| promise | kept by |
| --- | --- |
| a | b <!-- tests: unit/test_kinds.py::test_a_kind_has_an_everyday_test, unit/test_kinds.py::no -->|
| c | <!-- tests: gpu/test_cuda.py::test_a, cluster/test_kill_points.py::test_drivers_end_at_every_point --> |
| d | e |

| promise | of another table |
"""
    found = [(promise, not_everyday(tests)) for promise, tests in promises(table, "| promise ")]
    assert found == [
        ("a", ["unit/test_kinds.py::no"]),
        (
            "c",
            [
                "gpu/test_cuda.py::test_a",
                "cluster/test_kill_points.py::test_drivers_end_at_every_point",
            ],
        ),
        ("d", []),
    ]
