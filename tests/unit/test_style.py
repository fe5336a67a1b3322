"""Words that the sources and documents no longer use: the field has a name for each of them.

RETIRED words are gone. Two lists shrink: functions whose names are no verbs, and words that turn
ranks and objects into people. The second half of this file counts them, file by file, and
`python -m tests.unit.test_style` writes the numbers anew.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.parsing import parse

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for folder, pattern in (
        (".", "*.md"),
        ("docs", "**/*.md"),
        ("kuberay", "**/*.md"),
        ("kuberay", "**/*.yaml"),
        ("examples", "*.py"),
        ("nanoray", "**/*.py"),
        ("nanoray", "**/*.yaml"),
        ("nanoray", "**/*.j2"),
    )
    for path in (ROOT / folder).glob(pattern)
)
RETIRED = {  # word -> what to write
    r"seats?": "slot",
    r"gangs?": "WorkerGroup, RankPool, ranks",
    r"campaigns?": "Driver",
    r"inquests?": "FailureCollector",
    r"echo(es)?": "consequences",
    r"wish(es)?": "order",
    r"stamps?|stamped": "progress file, timestamp",
    r"in vain": "without success",
    r"whoever": "the rank, process or user that",
}
PATTERN = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
ALLOWED = (  # (end of a file's path, text of the line)
    (".yaml", 'echo "'),  # the shell's
    ("nanoray/faults/cause.py", '"echo"'),  # the field's name in faults.jsonl of older runs
)


def hits(text: str, path: str) -> list[str]:
    """Return `PATH:LINE: word, write ...` for each retired word."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if any(path.endswith(end) and allowed in line for end, allowed in ALLOWED):
            continue
        for match in PATTERN.finditer(line):
            better = next(
                new for old, new in RETIRED.items() if re.fullmatch(old, match[0], re.IGNORECASE)
            )
            found.append(f"{path}:{number}: {match[0]!r}; write {better}")
    return found


def test_sources_and_documents_use_none() -> None:
    names = {path.relative_to(ROOT).as_posix(): path for path in FILES}
    assert {
        "README.md",
        "docs/architecture.md",
        "nanoray/config/schema.py",
        "kuberay/base/cluster.yaml",
    } <= names.keys()
    found = [hit for name, path in names.items() for hit in hits(path.read_text("utf-8"), name)]
    assert found == [], "\n" + "\n".join(found)


# --- two lists that shrink ---

# Functions are verbs: format_memory, not told_memory. `lines` and `draw` are public functions of
# each benchmark, so only private ones are counted.
HOUSE_NAME = re.compile(r"_?(told(_\w+)?|written|head|text|look)|_(lines|draw)")
# Ranks and objects do not talk, listen or know: they print, receive and contain. A number has a
# name or a digit, and so have things that are equal.
HOUSE_WORD = re.compile(r"\b(told|tells|so\s+many|nobody|alike|hears|knows)\b", re.IGNORECASE)

# BEGIN: written by `python -m tests.unit.test_style`
NAMES: dict[str, int] = {
    "bench/__main__.py": 1,
    "bench/harness/launchers.py": 1,
}
WORDS: dict[str, int] = {
    "bench/pipeline.py": 1,
    "config/conflicts.py": 1,
    "lab/replay/bisect.py": 1,
}
# END


def house_names(source: str) -> list[str]:
    """Return `LINE: name` for each function whose name is no verb. Properties need none."""
    found = []
    for node in ast.walk(parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any(decorator.endswith("property") for decorator in decorators):
            continue
        if HOUSE_NAME.fullmatch(node.name):
            found.append(f"{node.lineno}: {node.name}")
    return found


def house_words(source: str) -> list[str]:
    """Return `LINE: word` for each house word in comments, docstrings and messages."""
    texts: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts.append((token.start[0], token.string))
    for node in ast.walk(parse(source)):  # the parts of an f-string are constants, too
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append((node.lineno, node.value))

    found = []
    for first_line, text in texts:
        for match in HOUSE_WORD.finditer(text):
            line = first_line + text[: match.start()].count("\n")
            found.append(f"{line}: {match[0]}")
    return found


def count_in_package(find: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return what `find` finds in each file of the package that has any."""
    package = ROOT / "nanoray"
    by_file = {}
    for path in sorted(package.rglob("*.py")):
        found = find(path.read_text("utf-8"))
        if found:
            by_file[path.relative_to(package).as_posix()] = found
    return by_file


@pytest.mark.parametrize(
    ("find", "allowed"), [(house_names, NAMES), (house_words, WORDS)], ids=["names", "words"]
)
def test_the_package_has_no_more_than_listed_and_the_lists_shrink(
    find: Callable[[str], list[str]], allowed: dict[str, int]
) -> None:
    found = count_in_package(find)
    more = {file: hits for file, hits in found.items() if len(hits) > allowed.get(file, 0)}
    assert not more, f"rename or rewrite these: {more}"
    fewer = {file for file, number in allowed.items() if len(found.get(file, ())) < number}
    assert not fewer, f"fewer in {fewer}; run python -m tests.unit.test_style"


def write_lists() -> None:
    """Replace the two lists above by the numbers of the package as it is."""
    block = "# BEGIN: written by `python -m tests.unit.test_style`\n"
    for name, find in (("NAMES", house_names), ("WORDS", house_words)):
        counts = {file: len(hits) for file, hits in count_in_package(find).items()}
        entries = "".join(f'    "{file}": {number},\n' for file, number in counts.items())
        if entries:
            entries = f"\n{entries}"
        block += f"{name}: dict[str, int] = {{{entries}}}\n"
        print(f"{name}: {sum(counts.values())} in {len(counts)} files")
    path = Path(__file__)
    source = path.read_text("utf-8")
    path.write_text(re.sub(r"(?ms)^# BEGIN.*?^(?=# END$)", block, source, count=1), "utf-8")


if __name__ == "__main__":
    write_lists()
