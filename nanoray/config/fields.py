"""What every group of keys is made of: a frozen model whose attribute docstrings are help texts."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# A number with an exponent, of at most 18 digits
_POWER_OF_TEN = re.compile(r"\s*([-+]?\d+)(?:\.(\d*))?[eE]\+?(1?\d)\s*")


def whole_number(value: Any) -> Any:
    """Return the int of a text such as 6e5 or 1.5e3, and any other value as it is."""
    if not isinstance(value, str):
        return value
    form = _POWER_OF_TEN.fullmatch(value)
    if form is None:
        return value

    # In integers, because a float has 53 bits only
    fraction = (form[2] or "").rstrip("0")
    shift = int(form[3]) - len(fraction)
    if shift < 0:
        return value
    return int(form[1] + fraction) * 10**shift


Integer = Annotated[int, BeforeValidator(whole_number)]
Positive = Annotated[int, Field(gt=0), BeforeValidator(whole_number)]
Natural = Annotated[int, Field(ge=0), BeforeValidator(whole_number)]


class Group(BaseModel):
    """The base of each group of keys. Each attribute's docstring is the help text of its flag."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # name = 2026
        defer_build=True,  # only Config is ever made, and not each of its bases
    )

    def check(self) -> None:
        """Raise ValueError for values that are wrong by what this group alone contains.

        `Config` calls the `check` of each group by its class. All groups have a method of this
        name, so a plain `config.check()` would run one of them and silently skip the others.
        """


def field(default: Any, group: str, **limits: Any) -> Any:
    """Return a pydantic field of a group; `limits` are pydantic's, such as gt, ge and pattern."""
    return Field(default, json_schema_extra={"group": group}, **limits)


def path(default: Any, group: str, **limits: Any) -> Any:
    """Return a field that contains a path, or may: paths.py expands variables in it."""
    return Field(default, json_schema_extra={"group": group, "path": True}, **limits)


def hidden(default: Any, group: str, **limits: Any) -> Any:
    """Return a field that is no flag and no YAML key: see spellings.py."""
    return Field(default, json_schema_extra={"group": group, "flag": False}, **limits)
