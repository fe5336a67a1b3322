"""Keys that users write as one text: `dp_mode fsdp:bf16` is the mode and what it gathers.

A value says more than a second key would, which could only contradict it. Flags, YAML keys and
presets have the one text; `Config` and config.json keep each part in a field of its own, so that
code reads plain values and the config.json of an older run loads as it is.

    precision     fp8:row, bf16_pure:stochastic, bf16_pure:master, fp16_pure:master
    optimizer     sgd:nesterov
    dp_mode       fsdp:grad_op, fsdp:bf16, fsdp:grad_op:bf16
    pp_schedule   interleaved:3

One is a word alone: `micro_batch_size auto` is the field micro_batch_search, with the size 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoray.config.keys import Keys
from nanoray.errors import ConfigError


@dataclass(frozen=True)
class ValuePart:
    """A field of Config that users write as a word after the value of another key."""

    field: str
    key: str  # the key that users write
    owners: tuple[str | int, ...]  # the values of that key that can have the part
    words: Mapping[str, Any]  # word -> value of the field; empty for a whole number above 0
    example: str
    alone: bool = False  # the word stands in the place of the value, which is its only owner then

    @property
    def default(self) -> Any:
        """The value of the field where no word is written."""
        return Keys.model_fields[self.field].default

    def parse(self, word: str) -> Any:
        """Return the field's value for a word; None if it is no word of this part."""
        if self.words:
            return self.words.get(word)
        if word.isdecimal() and int(word) > 0:
            return int(word)
        return None

    def word(self, value: Any) -> str:
        """Return the word for a value of the field."""
        for word, meaning in self.words.items():
            if meaning == value:
                return word
        return str(value)

    def spelled(self, owner: Any, value: Any) -> str:
        """Write the value of the key and of the field as users do."""
        word = self.word(value)
        return word if self.alone else f"{owner}:{word}"


PARTS = (
    ValuePart("fp8_scaling", "precision", ("fp8",), {"row": "row"}, "fp8:row"),
    ValuePart(
        "master_weights",
        "precision",
        ("bf16_pure", "fp16_pure"),
        {"master": "fp32"},
        "bf16_pure:master",
    ),
    ValuePart(
        "rounding",
        "precision",
        ("bf16_pure",),
        {"stochastic": "stochastic"},
        "bf16_pure:stochastic",
    ),
    ValuePart("nesterov", "optimizer", ("sgd",), {"nesterov": True}, "sgd:nesterov"),
    ValuePart("fsdp_reshard", "dp_mode", ("fsdp",), {"grad_op": "grad_op"}, "fsdp:grad_op"),
    ValuePart("fsdp_gather", "dp_mode", ("fsdp",), {"bf16": "bf16"}, "fsdp:bf16"),
    ValuePart("pp_chunks", "pp_schedule", ("interleaved",), {}, "interleaved:3"),
    ValuePart("micro_batch_search", "micro_batch_size", (0,), {"auto": True}, "auto", alone=True),
)
PART_OF_FIELD = {part.field: part for part in PARTS}

# Fields that older versions had as keys. They are fixed now; a run that set another value loads.
FIXED = ("val_fraction", "resnet_width", "seq_warmup_from")


def parts_of(key: str) -> list[ValuePart]:
    """Return the parts that users write after the value of a key."""
    return [part for part in PARTS if part.key == key]


def split(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with each text such as `fsdp:bf16` split into the fields of its parts.

    A part that the text does not mention gets its default. Raises ValueError for an unknown word.
    """
    result = dict(values)
    for key in {part.key for part in PARTS}:
        text = values.get(key)
        if isinstance(text, str) and ":" in text:
            result.update(_split_text(key, text))
    for part in PARTS:
        text = values.get(part.key)
        if part.alone and isinstance(text, str) and text in part.words:
            result.update({part.key: part.owners[0], part.field: part.words[text]})
    return result


def _split_text(key: str, text: str) -> dict[str, Any]:
    owner, *words = text.split(":")
    parts = [part for part in parts_of(key) if owner in part.owners]
    fields: dict[str, Any] = {part.field: part.default for part in parts_of(key)}
    fields[key] = owner

    for word in words:
        meant = [part for part in parts if part.parse(word) is not None]
        if not meant:
            known = " or ".join(part.example for part in parts_of(key))
            raise ValueError(f"{key} = {text} has an unknown part {word!r}; use {known}")
        fields[meant[0].field] = meant[0].parse(word)
    return fields


def refuse_idle_parts(config: Keys) -> None:
    """Raise ValueError for a part whose key has a value that cannot have it."""
    for part in PARTS:
        value = getattr(config, part.field)
        owner = getattr(config, part.key)
        if value != part.default and owner not in part.owners:
            raise ValueError(
                f"{part.field} = {value} would be ignored: {part.key} = {owner}; use {part.key} "
                f"{part.example}, or drop it"
            )


def join(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of fields as users write them: the inverse of `split`."""
    result = dict(values)
    for part in PARTS:
        value = result.pop(part.field, part.default)
        if value != part.default:
            result[part.key] = part.spelled(result[part.key], value)
    return result


def spell(config: Keys, field: str) -> str:
    """Write a field as users give it: `lr = 0.001`, or `dp_mode = fsdp:bf16` for a part."""
    part = PART_OF_FIELD.get(field)
    if part is None:
        return f"{field} = {getattr(config, field)}"
    value = getattr(config, field)
    return f"{part.key} = {part.spelled(getattr(config, part.key), value)}"


def new_spelling(key: str, value: Any = None) -> str:
    """Return what to write in place of a key of older versions; "" for a key of today.

    `value`: what the user gave to the key, where that is known.
    """
    part = PART_OF_FIELD.get(key)
    if part is not None:
        example = part.example
        # With the user's own value, if it is one that the part can have
        if value is not None and not part.alone and part.parse(str(value)) is not None:
            example = f"{part.owners[0]}:{value}"
        return f"{key} is a part of {part.key} now; write {part.key} {example}"
    if key in FIXED:
        return f"{key} is fixed at {Keys.model_fields[key].default} now; drop it"
    return ""


def refuse_old(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first key that older versions had, with its new spelling."""
    for key, value in values.items():
        problem = new_spelling(key, value)
        if problem:
            raise ConfigError(problem)
