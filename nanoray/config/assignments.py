"""Read a Python file of assignments without running it.

Literals count, and simple arithmetic of literals and of names that are assigned above. Nothing is
called, imported or looked up anywhere else.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.errors import ConfigError

Value = str | int | float | bool | None

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LARGEST = 10**18  # of a number, so that no expression takes long
_LARGEST_EXPONENT = 60


class _NotLiteral(Exception):
    """An expression is more than literals and arithmetic."""


@dataclass
class Assignments:
    """What a file assigns."""

    values: dict[str, Value] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)  # name -> its expression, which is code
    used: set[str] = field(default_factory=set)  # names in expressions below them
    lines: dict[str, int] = field(default_factory=dict)


def read_assignments(path: Path) -> Assignments:
    """Return what a file assigns. Raises ConfigError for a file that holds anything else."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not Python: {reason}; check the file") from None

    found = Assignments()
    for node in tree.body:
        _read_statement(node, found, path)
    return found


def _read_statement(node: ast.stmt, found: Assignments, path: Path) -> None:
    # An import is for code, which is not run. A text by itself is a comment
    is_comment = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_comment or isinstance(node, ast.Import | ast.ImportFrom):
        return
    target: ast.expr | None = None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    if isinstance(node, ast.AnnAssign):
        target = node.target
    if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(target, ast.Name):
        raise ConfigError(
            f"{path}, line {node.lineno}: only NAME = VALUE is read, and nothing is run; write the "
            "value there, or a YAML file for --config"
        )
    if node.value is None:
        return

    name = target.id
    found.lines[name] = node.lineno
    found.values.pop(name, None)
    found.unread.pop(name, None)
    try:
        found.values[name] = _evaluate(node.value, found)
    except _NotLiteral:
        found.unread[name] = ast.unparse(node.value)
    except (ArithmeticError, TypeError) as error:
        raise ConfigError(
            f"{path}, line {node.lineno}: {name} = {ast.unparse(node.value)} has no value "
            f"({error}); mend it"
        ) from None


def _evaluate(node: ast.expr, found: Assignments) -> Value:
    """Return the value of an expression. Raises _NotLiteral, or what its arithmetic raises."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in found.values:
        found.used.add(node.id)
        return found.values[node.id]
    if isinstance(node, ast.UnaryOp):
        return _evaluate_sign(node, found)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _BINARY:
        raise _NotLiteral

    left = _evaluate(node.left, found)
    right = _evaluate(node.right, found)
    # Texts can be joined. All other arithmetic is of numbers
    if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
        return left + right
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        raise _NotLiteral
    if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
        raise OverflowError("the exponent is too large")
    value: Value = _BINARY[type(node.op)](left, right)
    if not isinstance(value, int | float) or abs(value) > _LARGEST:
        raise OverflowError("the number is too large")
    return value


def _evaluate_sign(node: ast.UnaryOp, found: Assignments) -> Value:
    value = _evaluate(node.operand, found)
    if isinstance(node.op, ast.Not) and isinstance(value, bool):
        return not value
    if isinstance(value, int | float) and isinstance(node.op, ast.USub):
        return -value
    if isinstance(value, int | float) and isinstance(node.op, ast.UAdd):
        return value
    raise _NotLiteral
