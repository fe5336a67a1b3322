"""Files of YAML and JSON, in which a key that stands twice is an error.

A plain word of YAML stays the text that was written (`off`, `0123`, `6e5`), and the schema converts it
as it converts the text of a flag. So a word means the same in a file and on a command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode

from nanoray.errors import ConfigError

_NULL = "tag:yaml.org,2002:null"


class _Loader(yaml.BaseLoader):
    """PyYAML's loader of texts, with null, and without repeated keys."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping. Raises ValueError for a key that it has twice."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in lines:
                raise ValueError(
                    f"the key {name} is in line {lines[name]} and again in line {line}"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


# `key:` and `key: null` give no text. None as first letters: the rule is tried on any word
_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|)\Z"), None)
_Loader.add_constructor(_NULL, lambda loader, node: None)


def read_texts(text: str) -> Any:
    """Return a document of YAML, in which each plain word is a str. Raises ValueError, YAMLError."""
    return _Loader(text).get_single_data()


def read_file(path: Path) -> Any:
    """Return what a file of JSON or YAML contains. Raises ConfigError, in one line."""
    try:
        # utf-8-sig: with the mark of Windows at the start, or without
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_without_repeats)
        return read_texts(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path") from None
    # ValueError: also of a text in another encoding, and of JSON
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()).replace(' in "<unicode string>",', " in")
        raise ConfigError(f"cannot read {path}: {reason}") from None


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build a mapping of JSON. Raises ValueError for a key that it has twice."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key} is there twice, as {values[key]} and as {value}")
        values[key] = value
    return values
