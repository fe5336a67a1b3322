"""What every group of keys is made of: a frozen model whose attribute docstrings are help texts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]


class Group(BaseModel):
    """The base of each group of keys. Each attribute's docstring is the help text of its flag."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def check(self) -> None:
        """Raise ValueError for values that are wrong by what this group alone contains.

        `Config` calls the `check` of each group by its class. All groups have a method of this
        name, so a plain `config.check()` would run one of them and silently skip the others.
        """


def field(default: Any, group: str, **limits: Any) -> Any:
    """Return a pydantic field of a group; `limits` are pydantic's, such as gt, ge and pattern."""
    return Field(default, json_schema_extra={"group": group}, **limits)


def hidden(default: Any, group: str, **limits: Any) -> Any:
    """Return a field that is no flag and no YAML key: see spellings.py."""
    return Field(default, json_schema_extra={"group": group, "flag": False}, **limits)
