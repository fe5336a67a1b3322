"""tests/kinds.yaml: no kind of fault is without a test in `make test`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parents[1]
# They measure; what they are about is in docs/performance.md.
BENCHMARKS = ("test_bench_", "test_gpu_day", "test_soak", "test_speedrun")
FULL = "pytest.mark.full"


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
        tree = ast.parse(path.read_text(encoding="utf-8"))
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
