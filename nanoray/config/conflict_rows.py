"""What a row of the table of conflicts is made of (conflicts.py has the rows).

A condition is written as docs/flags.md prints it, and read from these words:

    muon_lr                            asks for something: neither its default, nor 0, false or ""
    tp above 1                         a larger number
    model other than gpt and own       any value but these
    device cuda or mig                 one of these values
    micro_batch_size auto              the field micro_batch_search

`refused` and `ignored` make one row for each pair of what is asked and what it does not go with. A
remedy may name the two keys, and the default of the asked one: {asked}, {other}, {default}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoray.config.keys import Keys


@dataclass(frozen=True)
class Condition:
    """A predicate over the value of one key, and the words for it."""

    key: str
    words: str
    holds: Callable[[Any], bool]

    def met(self, config: Keys) -> bool:
        """Return whether the value of `config` meets the condition."""
        return self.holds(getattr(config, self.key))

    def value(self, config: Keys) -> str:
        """Write the key and its value, as users give them."""
        return spell(config, self.key)


def spell(config: Keys, key: str) -> str:
    """Write a key and its value, as users give them."""
    if key == "micro_batch_search":
        return "micro_batch_size = auto"
    return f"{key} = {getattr(config, key)}"


def condition(words: str) -> Condition:
    """Return the condition that some words say: see the top of this file."""
    key, _, rest = words.partition(" ")
    if not rest:
        default = Keys.model_fields[key].default
        return Condition(key, words, lambda found: found != default and bool(found))
    if words == "micro_batch_size auto":
        return Condition("micro_batch_search", words, bool)
    if rest.startswith("above "):
        limit = int(rest.removeprefix("above "))
        return Condition(key, words, lambda found: found > limit)
    if rest.startswith("other than "):
        others = [_value(word) for word in rest.removeprefix("other than ").split(" and ")]
        return Condition(key, words, lambda found: found not in others)
    values = [_value(word) for word in rest.split(" or ")]
    return Condition(key, words, lambda found: found in values)


def _value(word: str) -> Any:
    """Return the value of a key that a word of a condition means."""
    if word.isdecimal():
        return int(word)
    return {"True": True, "False": False, "empty": ""}.get(word, word)


@dataclass(frozen=True)
class Conflict:
    """Two settings that do not go together."""

    asked: Condition
    other: Condition
    why: str
    remedy: str
    also: Condition | None = None  # the row applies only if this is met, too
    ignored: bool = False  # the setting would have no effect; `why` follows the other's value
    other_words: str = ""  # in place of the other's key and value
    typed: bool = False  # about a flag that was typed, since a preset may set its key

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that the row reads, the asked one first."""
        if self.also is None:
            return (self.asked.key, self.other.key)
        return (self.asked.key, self.other.key, self.also.key)

    def met(self, config: Keys) -> bool:
        """Return whether a configuration meets all conditions of the row."""
        if self.also is not None and not self.also.met(config):
            return False
        return self.asked.met(config) and self.other.met(config)

    def problem(self, config: Keys) -> str | None:
        """Return the message for a configuration that meets the row's conditions, else None."""
        if not self.met(config):
            return None
        asked = self.asked.value(config)
        other = self.other_words or self.other.value(config)
        if not self.ignored:
            return f"{asked} with {other}: {self.why}; {self.remedy}"
        reason = f"{other} {self.why}".rstrip()
        return f"{asked} would be ignored: {reason}; {self.remedy}"


@dataclass(frozen=True)
class Rule:
    """A condition on several keys that needs arithmetic; `find` returns the message or None."""

    keys: tuple[str, ...]
    words: str
    find: Callable[[Keys], str | None]
    typed: bool = False  # about a flag that was typed: the first key

    def problem(self, config: Keys) -> str | None:
        """Return the message for a configuration that breaks the rule, else None."""
        return self.find(config)


Row = Conflict | Rule


# ---- constructors --------------------------------------------------------------------------------

Words = str | Sequence[str]


def refused(asked: Words, other: Words, why: str, remedy: str, also: str = "") -> list[Row]:
    """Return rows of settings that exclude each other."""
    return [
        Conflict(one, two, why, text, condition(also) if also else None)
        for one, two, text in _pairs(asked, other, remedy)
    ]


def ignored(
    asked: Words,
    other: Words,
    why: str,
    remedy: str,
    also: str = "",
    other_words: str = "",
    typed: bool = False,
) -> list[Row]:
    """Return rows of settings without an effect; `why` follows the other's value, and may be empty."""
    more = condition(also) if also else None
    return [
        Conflict(one, two, why, text, more, True, other_words, typed)
        for one, two, text in _pairs(asked, other, remedy)
    ]


def rule(
    keys: str, words: str, find: Callable[[Keys], str | None], typed: bool = False
) -> list[Row]:
    """Return the row of a condition that needs arithmetic over these keys."""
    return [Rule(tuple(keys.split()), words, find, typed)]


def _pairs(asked: Words, other: Words, remedy: str) -> list[tuple[Condition, Condition, str]]:
    """Return every pair of the two, with its remedy."""
    pairs = []
    for first in [asked] if isinstance(asked, str) else asked:
        for second in [other] if isinstance(other, str) else other:
            one, two = condition(first), condition(second)
            default = Keys.model_fields[one.key].default
            text = remedy.format(asked=one.key, other=two.key, default=default)
            pairs.append((one, two, text))
    return pairs
