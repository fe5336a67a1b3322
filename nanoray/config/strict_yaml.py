"""YAML 1.2, read strictly: no key twice in a mapping, and no word that turns into another value.

PyYAML parses, but its rules for plain words are those of YAML 1.1: `off` is false, `0123` is 83 and
`2026-01-01` is a date. So the loaders here bring rules of their own.

    read_texts    for keys that are flags, too: each plain word stays the text that was written, and
                  the schema converts it, as it converts the text of the flag
    read_value    for other files: numbers, true, false and null of YAML 1.2
    read_values   the same, of several documents
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_MERGE = re.compile(r"(?:<<)\Z")
_TRUTH = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INTEGER = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_NUMBER = re.compile(r"(?:[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?)\Z")
_NOT_FINITE = re.compile(r"(?:[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")


class YamlError(ValueError):
    """A text cannot be read. The message goes after the name of its file."""


class _RepeatedKey(ConstructorError):
    """A mapping has a key twice."""


def read_texts(text: str, known: Collection[str] = ()) -> Any:
    """Return a document in which each plain word but null is a str. Raises YamlError.

    A key of the document that is not `known`, and whose mapping is merged elsewhere in it
    (`base: &base` with `<<: *base`), only holds that anchor: it is left out.
    """

    def read() -> Any:
        loader = _TextLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        # Before the document is made, which carries the merges out and removes their marks
        holders = _anchor_holders(node)
        document = loader.construct_document(node)
        if not isinstance(document, dict):
            return document
        return {key: value for key, value in document.items() if key in known or key not in holders}

    return _read(read)


def _anchor_holders(document: Node) -> set[str]:
    """Return the keys of a document whose mappings are merged somewhere in it."""
    if not isinstance(document, MappingNode):
        return set()
    merged: set[int] = set()
    seen: set[int] = set()
    pending: list[Node] = [document]
    while pending:
        node = pending.pop()
        if id(node) in seen or isinstance(node, ScalarNode):
            continue
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            pending += node.value
            continue
        for key, value in node.value:
            pending += [key, value]
            # One mapping, or a list of several
            if key.tag == f"{_TAG}merge":
                sources = value.value if isinstance(value, SequenceNode) else [value]
                merged |= {id(source) for source in sources}
    return {key.value for key, value in document.value if id(value) in merged}


def read_value(text: str) -> Any:
    """Return a document as `read_values` does. Raises YamlError, also for several documents."""
    return _read(lambda: _ValueLoader(text).get_single_data())


def read_values(text: str) -> list[Any]:
    """Return the documents of a text, with the values of YAML 1.2's core schema.

    Raises YamlError, also for a number such as 0644, which is octal in YAML 1.1 and not in 1.2.
    """

    def read() -> list[Any]:
        loader = _ValueLoader(text)
        documents = []
        while loader.check_data():
            documents.append(loader.get_data())
        return documents

    found: list[Any] = _read(read)
    return found


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except _RepeatedKey as error:
        raise YamlError(str(error)) from None
    except (yaml.YAMLError, ValueError) as error:
        # PyYAML has only the text, so it cannot name the file
        reason = " ".join(str(error).split()).replace(' in "<unicode string>",', " in")
        raise YamlError(f"is not YAML: {reason}") from None
    except RecursionError:
        raise YamlError("is not YAML: its lists and mappings are nested too deeply") from None


class _TextLoader(yaml.SafeLoader):
    """A loader in which a plain word is null, the key of a merge (<<), or its own text."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping. Raises _RepeatedKey for a key that it has twice."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            # What a merge brings is not looked at: keys beside it replace those on purpose
            if not isinstance(key, ScalarNode) or key.tag == f"{_TAG}merge":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _RepeatedKey(
                    None,
                    None,
                    f"has the key {key.value} in line {lines[key.value]} and again in line {line}; "
                    "drop one of the two",
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


class _ValueLoader(_TextLoader):
    """A loader with the numbers and truth values of YAML 1.2's core schema."""


def _text_of(loader: yaml.SafeLoader, node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise ConstructorError(None, None, f"{node.tag} does not fit this value", node.start_mark)
    return str(loader.construct_scalar(node))


def _bool_of(loader: yaml.SafeLoader, node: Node) -> bool:
    text = _text_of(loader, node).lower()
    if text not in ("true", "false"):
        raise ConstructorError(None, None, f"{text} is neither true nor false", node.start_mark)
    return text == "true"


def _int_of(loader: yaml.SafeLoader, node: Node) -> int:
    text = _text_of(loader, node)
    digits = text.lstrip("+-")
    # Kubernetes' tools read 0644 as octal, and YAML 1.2 as decimal
    if len(digits) > 1 and digits.startswith("0") and digits.isdecimal():
        raise ConstructorError(
            None,
            None,
            f"{text} is octal in YAML 1.1 and decimal in 1.2; write 0o{digits.lstrip('0') or '0'}, "
            f'or "{text}" for a text',
            node.start_mark,
        )
    return int(text, 0)


def _float_of(loader: yaml.SafeLoader, node: Node) -> float:
    # .inf and .nan are Python's words with a dot before them
    return float(re.sub(r"\.(?=[a-zA-Z])", "", _text_of(loader, node)))


_BUILDERS: dict[str | None, Callable[..., Any]] = {
    f"{_TAG}null": yaml.SafeLoader.construct_yaml_null,
    f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_TAG}map": yaml.SafeLoader.construct_yaml_map,
    f"{_TAG}str": _text_of,
    None: yaml.SafeLoader.construct_undefined,  # other tags, which could make objects
}
# In this order: the first rule that a word meets counts, and 12 is a number, too
_RULES: tuple[tuple[str, re.Pattern[str], Callable[..., Any]], ...] = (
    (f"{_TAG}bool", _TRUTH, _bool_of),
    (f"{_TAG}int", _INTEGER, _int_of),
    (f"{_TAG}float", _NUMBER, _float_of),
    (f"{_TAG}float", _NOT_FINITE, _float_of),
)


def _add_rules() -> None:
    """Register how plain words are read. None as first letters: a rule is tried on any word."""
    for loader in (_TextLoader, _ValueLoader):
        # None of SafeLoader's rules, which are those of YAML 1.1
        loader.yaml_implicit_resolvers = {}
        loader.yaml_constructors = {}
        loader.add_implicit_resolver(f"{_TAG}null", _NULL, None)
        loader.add_implicit_resolver(f"{_TAG}merge", _MERGE, None)
        for tag, build in _BUILDERS.items():
            loader.yaml_constructors[tag] = build

    for tag, pattern, build in _RULES:
        _ValueLoader.add_implicit_resolver(tag, pattern, None)
        _ValueLoader.yaml_constructors[tag] = build
        # `!!int 3` in a file of texts is the text 3
        _TextLoader.yaml_constructors[tag] = _text_of


_add_rules()
