"""Print docs/rooms.md: the rooms of nanoray, from low to high, with how much there is to read in each.

A token is one of Python's, without comments, docstrings and line ends: how a statement is laid out
changes nothing, so the sum grows only where code does.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

from tests.unit.test_layers import ROWS

PACKAGE = Path(__file__).resolve().parents[1] / "nanoray"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
HEAD = """# How much is there to read?

*Made by `make docs`.* A room is a folder of `nanoray/`; it imports only from rooms above it in this table
([architecture](architecture.md)). Tokens are Python's, in hundreds, without comments and docstrings.

| room | what it holds | files | tokens |
| --- | --- | ---: | ---: |
"""


def tokens_of(path: Path) -> int:
    """Return how many tokens of code a file has."""
    text = path.read_text(encoding="utf-8")
    documentation: set[int] = set()  # lines of docstrings
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                documentation.update(range(first.lineno, (first.end_lineno or 0) + 1))
    return sum(
        token.type not in NO_CODE
        and not (token.type == tokenize.STRING and token.start[0] in documentation)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def main() -> str:
    """Return the page."""
    lines = []
    total = [0, 0]
    for room in [room for row in ROWS for room in sorted(row) if room != "__main__"]:
        files = sorted((PACKAGE / room).rglob("*.py"))
        about = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
        tokens = sum(map(tokens_of, files))
        total[0] += len(files)
        total[1] += tokens
        lines.append(
            f"| {room} | {about.splitlines()[0]} | {len(files)} | {tokens // 100 * 100:,} |"
        )
    lines.append(f"| all | | {total[0]} | {total[1] // 100 * 100:,} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(main(), end="")
