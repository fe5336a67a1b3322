"""Two constructs that the package does without, because they must be decoded before they are read.

A conditional expression inside another one is an `if` statement that was squeezed into a line, and so
is a list or a number times a truth value. Each file that still has some stands in ALLOWED with their
number. The list only shrinks: a file with fewer than its number fails until the number is lowered.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.harness.parsing import parse

PACKAGE = Path(__file__).resolve().parents[2] / "nanoray"

ALLOWED: dict[str, int] = {}


def nested_conditionals(tree: ast.AST) -> list[int]:
    """Return the lines of conditional expressions that contain another one as a part of their own."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            parts = (node.test, node.body, node.orelse)
            if any(isinstance(part, ast.IfExp) for part in parts):
                found.append(node.lineno)
    return found


def is_truth_value(node: ast.expr) -> bool:
    """Return whether an expression can be seen to be a truth value.

    `size or 1` is none: it is a value with a default.
    """
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.BoolOp):
        return isinstance(node.op, ast.And) or all(is_truth_value(part) for part in node.values)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("bool", "isinstance", "callable", "hasattr", "any", "all")
    return False


def products_with_truth_values(tree: ast.AST) -> list[int]:
    """Return the lines on which something is multiplied by a truth value."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            factors = [node.left, node.right]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
            factors = [node.value]
        else:
            continue
        if any(is_truth_value(factor) for factor in factors):
            found.append(node.lineno)
    return found


def constructs(source: str) -> list[int]:
    tree = parse(source)
    return sorted(nested_conditionals(tree) + products_with_truth_values(tree))


def test_the_package_has_no_more_than_allowed_and_the_list_shrinks() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = constructs(path.read_text("utf-8"))
        if lines:
            found[path.relative_to(PACKAGE).as_posix()] = lines
    more = {name: lines for name, lines in found.items() if len(lines) > ALLOWED.get(name, 0)}
    assert not more, f"write these out as statements: {more}"
    fewer = {name: n for name, n in ALLOWED.items() if len(found.get(name, ())) < n}
    assert not fewer, f"lower these numbers in ALLOWED: {fewer}"
