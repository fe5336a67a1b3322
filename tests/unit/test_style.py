"""Words that the sources and documents no longer use: the field has a name for each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for folder, pattern in (
        (".", "*.md"),
        ("docs", "*.md"),
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
    ("docs/reliability.md", "echo of errors"),  # and in the page that shows it
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


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("# a lost Seat", "Seat"),
        ("the gang restarts", "gang"),
        ("waited in vain", "in vain"),
        ("run.stamp", "stamp"),
    ],
)
def test_a_retired_word_is_found(line: str, word: str) -> None:
    (found,) = hits(f"first\n{line}\n", "nanoray/x.py")
    assert found.startswith(f"nanoray/x.py:2: {word!r}; write ")


@pytest.mark.parametrize(
    "line", ["timestamp = 1", "a seatbelt", "gangway", "wishbone", "os.stat(path)"]
)
def test_other_words_are_not(line: str) -> None:
    assert hits(line, "nanoray/x.py") == []


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
