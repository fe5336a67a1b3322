"""torch and Ray come in a range of versions: what differs between them stands in two files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.harness.parsing import parse

ROOT = Path(__file__).resolve().parents[2]
COMPATIBILITY = {
    "nanoray/machine/compat.py",
    "nanoray/launch/ray_compat.py",
    # It runs in the process of a program that imports nothing else of nanoray.
    "nanoray/launch/program/traced.py",
}
SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("nanoray", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
# Names that have nothing to do with torch and Ray: Python's, which are documented
OF_PYTHON = {"_exit", "_getframe", "_asdict", "_fields", "_replace"}
# argparse's for the generated page of flags, typeshed's type of a hash, one of the peer torchft
OF_OTHERS = {"_actions", "_action_groups", "_group_actions", "_Hash", "_quorum_id"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def known_names() -> frozenset[str]:
    """The private names that nanoray itself defines, anywhere, and those of Python and others.

    It reads all sources, so not while tests are collected: each worker collects all of them.
    """
    found: set[str] = set()
    for path in SOURCES.values():
        for node in ast.walk(parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    own = {name for name in found if is_private(name)}
    return frozenset(own | OF_PYTHON | OF_OTHERS)


def private_names_of_others(tree: ast.AST) -> Iterator[str]:
    """The private modules that a file imports, and the private attributes that are not ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if any(is_private(part) for part in alias.name.split(".")):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_own = name.startswith("nanoray.")
                if not is_own and any(is_private(part) for part in name.split(".")):
                    yield name
        elif isinstance(node, ast.Attribute):
            is_others = is_private(node.attr) and node.attr not in known_names()
            if is_others:
                yield ast.unparse(node)


def test_private_names_of_torch_and_ray_stand_in_three_files() -> None:
    trees = {name: parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
    found = {name: set(private_names_of_others(tree)) for name, tree in trees.items()}
    assert {name for name, names in found.items() if names} == set(COMPATIBILITY), (
        f"give it a name in {' or '.join(sorted(COMPATIBILITY))}: {found}"
    )
