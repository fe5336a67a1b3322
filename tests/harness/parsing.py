"""Parse Python sources in a process whose other threads may parse, too."""

from __future__ import annotations

import ast
import gc


def parse(source: str) -> ast.Module:
    """Return `ast.parse(source)`, without collecting garbage meanwhile.

    CPython 3.11 counts the depth of all threads' parses in one place, and a finalizer lets another
    thread run in the middle: "AST constructor recursion depth mismatch" (cpython#106905).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()
