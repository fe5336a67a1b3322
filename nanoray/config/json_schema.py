"""The JSON schema of a run's YAML file, for editors: keys, their types, their help texts.

It comes from the keys' definitions. `nanoray train --schema` prints it, and run.schema.json beside
this file is a copy, which the presets name in their first line.
"""

from __future__ import annotations

import json
from typing import Any

from nanoray.config.load import MAPPINGS, NESTED
from nanoray.config.merge import preset_names
from nanoray.config.schema import Config, field_extra

# What pydantic writes beside the words of JSON schema: titles, and the extras of fields.py
_NO_SCHEMA = ("title", "group", "flag", "path")


def schema_text() -> str:
    """Return the schema as JSON text."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def json_schema() -> dict[str, Any]:
    """Return the schema, in the draft 2020-12."""
    full = _without_extras(Config.model_json_schema())
    properties = {
        "preset": {
            "enum": preset_names(),
            "description": "keys that this file does not have come from this preset",
        }
    }
    for key, schema in full["properties"].items():
        if key in MAPPINGS or field_extra(key).get("flag", True):
            properties[key] = schema

    # The sections that load.py translates. A section may have the name of a key, as model has
    sections: dict[str, Any] = {}
    for name, key in NESTED.items():
        section, _, inner = name.partition(".")
        sections.setdefault(section, {})[inner] = properties[key]
    for section, inner_keys in sections.items():
        nested = {"type": "object", "properties": inner_keys, "additionalProperties": False}
        if section in properties:
            nested = {"anyOf": [properties[section], nested]}
        properties[section] = nested

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a run of nanoray",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": full["$defs"],
    }


def _without_extras(value: Any) -> Any:
    """Return a schema without what is none of its words, and its texts in one line each."""
    if isinstance(value, dict):
        return {key: _without_extras(part) for key, part in value.items() if key not in _NO_SCHEMA}
    if isinstance(value, list):
        return [_without_extras(part) for part in value]
    return " ".join(value.split()) if isinstance(value, str) else value
