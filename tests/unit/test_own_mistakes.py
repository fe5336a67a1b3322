"""The table of what nanoray looks for in a script: each check has its line, and each line its test."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from nanoray.launch.own import launch_own
from nanoray.own.absent import AbsentGradients
from nanoray.own.checks import unstorable
from nanoray.own.data.epochs import Epochs
from nanoray.own.data.source import OwnData
from nanoray.own.data.stream import Stream
from nanoray.own.engine import RuntimeEngine
from nanoray.own.layer_order import LayerOrder
from nanoray.own.loose_buffers import LooseBuffers
from nanoray.parallel.script import Script
from tests.harness.own_mistakes import MISTAKES
from tests.harness.parsing import parse

TESTS = Path(__file__).resolve().parents[1]
TABLE = "own_mistakes.py"
ROOM = Path(inspect.getfile(RuntimeEngine)).parent
OTHERS = (
    OwnData,
    Epochs,
    Stream,
    unstorable,
    launch_own,
    AbsentGradients,
    LayerOrder,
    LooseBuffers,
    Script,
)
# The wrapper's own text, and what it passes on; a second error of the same check; an assertion
NOT_CHECKS = ("out of memory: ", "float() would parse it", " samples, and each is one rank's")
WORDS = [words for part in MISTAKES.values() for words in part]


def files() -> list[Path]:
    """Return the sources of what is a script's own, wherever they lie."""
    return sorted({*ROOM.rglob("*.py"), *(Path(inspect.getfile(thing)) for thing in OTHERS)})


def text_of(node: ast.AST) -> str:
    """Return the constant parts of the texts in an expression."""
    parts = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            parts.append(inner.value)
    return "".join(parts)


def messages() -> list[tuple[str, str]]:
    """Return the text of each refusal in the sources, with its place."""
    found = []
    for path in files():
        for node in ast.walk(parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                text = text_of(node.exc)
                # A text is made by a function, or the error is passed on.
                if len(text) > 20 and not any(words in text for words in NOT_CHECKS):
                    found.append((f"{path.name}:{node.lineno}", text))
    return found


def test_each_check_has_a_line() -> None:
    without = [(place, text) for place, text in messages() if not any(w in text for w in WORDS)]
    assert not without, "add the mistake to tests/harness/own_mistakes.py, or leave it to part.py"


def sources() -> str:
    """Return all texts in the code of what is a script's own."""
    return "\n".join(text_of(parse(path.read_text(encoding="utf-8"))) for path in files())


def texts_of_tests() -> str:
    """Return the code of all other tests."""
    texts = []
    for path in TESTS.rglob("*.py"):
        if path.name not in (TABLE, Path(__file__).name):
            # Texts that go on in the next line, and dots that a pattern escapes
            text = re.sub(r'"\s*\n\s*r?f?"', "", path.read_text(encoding="utf-8"))
            texts.append(text.replace("\\", ""))
    return "\n".join(texts)


def test_each_line_is_a_check_and_has_a_test() -> None:
    said = sources()
    expected = texts_of_tests()
    assert not [words for words in WORDS if words not in said], "no code says this any more"
    assert not [words for words in WORDS if words not in expected], "no test expects this"
