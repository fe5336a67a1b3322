"""Where a run is: the table in run_state.py says who writes each field, and the code agrees."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from pathlib import Path

from nanoray.launch.recovery import run_state
from tests.harness.parsing import parse

FOLDER = Path(run_state.__file__).parent
FIELDS = {field.name for field in dataclasses.fields(run_state.RunState)}


def writers() -> dict[str, set[str]]:
    """Return, of each field of a RunState, the methods that assign it."""
    found = defaultdict(set)
    for path in FOLDER.glob("*.py"):
        for cls in parse(path.read_text(encoding="utf-8")).body:
            for method in getattr(cls, "body", []):
                for node in ast.walk(method):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        # `at.stage = ...` or `self.at.stage = ...`
                        owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
                        if owner == "at":
                            found[node.attr].add(f"{cls.name}.{method.name}")
    return found


def test_the_table_names_who_writes_each_field() -> None:
    table = {}
    assert run_state.__doc__
    for line in run_state.__doc__.splitlines():
        field = line.split()[:1]
        if field and field[0] in FIELDS:
            _, _, where = line.strip().rpartition("  ")
            table[field[0]] = {name.strip() for name in where.split(",")}
    assert table.keys() == FIELDS
    assert table == writers()
