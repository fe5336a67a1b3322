"""Names that other programs have for keys of ours: one table (names/programs.yaml), asked when a
key is unknown.

A user of nanoGPT types `--learning_rate`, one of Hugging Face `per_device_train_batch_size`. Each
gets our name, and how the value changes where it is not the same thing. A name that two programs use
in different ways has a row for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nanoray.config.strict_yaml import read_value

_FOLDER = Path(__file__).with_name("names")
NO_KEY = "none"  # in the place of our key, where there is none


@cache
def read_names(file: str) -> dict[str, Any]:
    """Return what a file of names/ says. It is read when a name is asked for."""
    content: dict[str, Any] = read_value((_FOLDER / file).read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True)
class Name:
    """One program's name for something, and ours for it."""

    theirs: str
    program: str
    ours: tuple[str, ...]  # keys of ours; empty where there is none
    how: str = ""  # how the value changes, or what to do where there is no key
    values: Mapping[str, str] | None = None  # their words and ours

    def value_of(self, given: str) -> str:
        """Return our value for theirs; "" where it is not the same thing, or unknown."""
        if self.how or len(self.ours) != 1 or not given:
            return ""
        if self.values is None:
            return given
        return self.values.get(given.lower(), "")


@cache
def table() -> tuple[Name, ...]:
    """Return the names of all programs."""
    names = []
    for program, rows in read_names("programs.yaml")["programs"].items():
        for theirs, ours in rows.items():
            how: Any = ""
            if isinstance(ours, dict):
                ((ours, how),) = ours.items()
            keys = () if ours == NO_KEY else tuple(ours.split())
            if isinstance(how, dict):
                names.append(Name(theirs, program, keys, values=how))
            else:
                names.append(Name(theirs, program, keys, how))
    return tuple(names)


def words_of_values() -> dict[str, dict[str, str]]:
    """Return the words of other programs for values of our keys, by key."""
    words: dict[str, dict[str, str]] = read_names("programs.yaml")["words"]
    return words


def find(name: str) -> list[Name]:
    """Return the rows of a name. Hyphens are underscores; a section may be left out."""
    word = normalise(name)
    rows = [row for row in table() if row.theirs == word]
    if rows:
        return rows
    # torchtitan's keys, as they stand below their section in a file
    return [row for row in table() if row.theirs.rpartition(".")[2] == word and "." in row.theirs]


def translate_value(key: str, value: Any) -> str:
    """Return our word for another program's value of a key of ours; "" for an unknown one."""
    return words_of_values().get(key, {}).get(str(value).lower(), "")


def normalise(name: str) -> str:
    """Return a name without the dashes before it, in lower case, with underscores."""
    return name.lstrip("-").replace("-", "_").lower()


def answer(name: str, value: Any, mark: str) -> str:
    """Return what to write in place of another program's name; "" for a name that is no program's.

    mark: what stands before a key, `--` on a command line. value: what the user gave, or None.
    """
    given = "" if value is None or isinstance(value, (dict, list)) else str(value)
    answers: dict[str, list[str]] = {}
    for row in find(name):
        answers.setdefault(_advice(row, given, mark), []).append(row.program)
    if not answers:
        return ""

    # One meaning: whose it is does not matter
    if len(answers) == 1:
        (advice,) = answers
        return advice
    return "; ".join(f"from {_listed(programs)}: {text}" for text, programs in answers.items())


def _advice(row: Name, given: str, mark: str) -> str:
    """Return what one row says: a line to write, or where to look."""
    if not row.ours:
        return row.how
    # Another value of the same key says it: `bf16` is `precision bf16`
    if row.how.startswith(f"{row.ours[0]} "):
        return f"write {mark}{row.how}"

    keys = " and ".join(f"{mark}{key}" for key in row.ours)
    value = row.value_of(given)
    if value and mark == "--":
        return f"write {keys} {value}"
    if value:
        return f"write {keys}: {value}"
    if row.how:
        return f"it is {keys} here ({row.how})"
    return f"it is {keys} here"


def _listed(programs: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(programs))
