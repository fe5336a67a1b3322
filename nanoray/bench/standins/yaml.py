"""A stand-in for PyYAML that reads `key: value` lines, as all presets have them, and nothing else.

Values are texts, and {a: 1, b: 2} is a mapping of texts. Whatever else YAML has is refused.
"""

from __future__ import annotations

import re
import sys
from typing import Any

_LINE = re.compile(r"([A-Za-z_][\w.-]*):(?:\s+(.*))?")
_PLAIN = re.compile(r"[^\s\"'\[\]{}>|*&!%#`@,][^\[\]{}]*")
_NULLS = ("", "~", "null", "Null", "NULL")


class YAMLError(Exception):
    """A text that the stand-in does not read."""


class ConstructorError(YAMLError):
    """A document that cannot be built."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(" ".join(str(part) for part in parts if part))


class Node:
    """What PyYAML calls a node; the stand-in makes none."""


class ScalarNode(Node):
    """A word."""


class SequenceNode(Node):
    """A list."""


class MappingNode(Node):
    """A mapping; the document, if it has any key."""

    value: tuple[()] = ()  # its keys and values as nodes, which the stand-in does not make

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document


class SafeLoader:
    """Reads one document."""

    construct_yaml_null = construct_yaml_seq = construct_yaml_map = construct_undefined = None

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    @classmethod
    def add_implicit_resolver(cls, *_: Any) -> None:
        """Do nothing: every word stays a text."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raise YAMLError: there are no nodes."""
        raise YAMLError("the stand-in for PyYAML has no nodes")

    def get_single_node(self) -> MappingNode | None:
        """Return the document, None for an empty text. Raises YAMLError."""
        found = self.get_single_data()
        return None if found is None else MappingNode(found)

    def construct_document(self, node: MappingNode) -> dict[str, Any]:
        """Return the mapping."""
        return node.document

    def get_single_data(self) -> dict[str, Any] | None:
        """Return the mapping, None for an empty text. Raises YAMLError."""
        found: dict[str, Any] = {}
        for number, whole in enumerate(self._lines, 1):
            line = re.sub(r"(^|\s)#.*", "", whole).rstrip()
            if not line:
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                raise YAMLError(
                    f"line {number} is not `key: value`; PyYAML is missing here: {whole}"
                )
            if match[1] in found:
                raise YAMLError(f"line {number} has the key {match[1]} again; drop one of the two")
            found[match[1]] = self._value(match[2] or "", number)
        return found or None

    def _value(self, text: str, number: int) -> Any:
        if text.startswith("{") and text.endswith("}"):
            pairs = [pair.partition(":") for pair in text[1:-1].split(",") if pair.strip()]
            return {key.strip(): self._value(value.strip(), number) for key, _, value in pairs}
        if text in _NULLS:
            return None
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            return text[1:-1]
        if _PLAIN.fullmatch(text) is None:
            raise YAMLError(
                f"line {number} has more than a plain word; PyYAML is missing here: {text}"
            )
        return text


# `from yaml.nodes import ...` finds this file, too
for _name in ("constructor", "nodes"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
