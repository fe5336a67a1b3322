"""tests/kinds.yaml: no kind of fault is without a test in `make test`."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

TESTS = Path(__file__).resolve().parents[1]
KINDS: list[dict[str, Any]] = yaml.safe_load((TESTS / "kinds.yaml").read_text(encoding="utf-8"))
# They measure; what they are about is in docs/performance.md.
BENCHMARKS = ("test_bench_", "test_gpu_day", "test_soak", "test_speedrun")
FULL = "pytest.mark.full"


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


IS_FULL = marks_of_tests()


@pytest.mark.parametrize("row", KINDS, ids=lambda row: str(row["kind"]))
def test_a_kind_has_an_everyday_test(row: dict[str, Any]) -> None:
    assert row["everyday"]
    assert [name for name in row["everyday"] if IS_FULL.get(name, True)] == [], "full, or gone"
    assert [name for name in row["full"] if not IS_FULL.get(name, False)] == [], (
        "not marked, or gone"
    )


def test_each_test_that_is_left_out_belongs_to_a_kind() -> None:
    listed = {name for row in KINDS for name in row["full"]}
    left_out = {name for name, is_full in IS_FULL.items() if is_full}
    missing = [
        name
        for name in sorted(left_out - listed)
        if not name.partition("/")[2].startswith(BENCHMARKS)
    ]
    assert missing == [], "add it to a kind in tests/kinds.yaml, beside the test that remains"
