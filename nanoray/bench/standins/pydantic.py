"""A stand-in for pydantic, with what nanoray's configuration needs of it.

A model's fields come from its annotations, in the order of its bases from the last to the first.
Texts become what the annotation says: 6 from "6", True from "yes". Messages are pydantic's where a
user sees them often.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

ConfigDict = dict
_MISSING: Any = object()
_TRUE = ("1", "on", "t", "true", "y", "yes")
_FALSE = ("0", "off", "f", "false", "n", "no")


class _Bad(Exception):
    """A value that does not fit: pydantic's type of the error, its message, and where."""

    def __init__(self, kind: str, message: str, *place: Any, value: Any = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.place = place
        self.value = value  # of the place, which lies within that of a field


class ValidationError(ValueError):
    """Values that a model does not take."""

    def __init__(self, title: str, errors: list[dict[str, Any]]) -> None:
        lines = [f"{'.'.join(map(str, each['loc']))}\n  {each['msg']}" for each in errors]
        super().__init__("\n".join([f"{len(errors)} validation error(s) for {title}", *lines]))
        self._errors = errors

    def errors(self) -> list[dict[str, Any]]:
        """Return a dict with type, loc, msg and input for each error."""
        return self._errors


class BeforeValidator(NamedTuple):
    """A function that changes a value before it is checked."""

    func: Callable[[Any], Any]


class FieldInfo:
    """What a field declares."""

    def __init__(self, default: Any = _MISSING, **declared: Any) -> None:
        self.default = default
        self.json_schema_extra = declared.pop("json_schema_extra", None)
        self.limits: dict[str, Any] = declared
        self.annotation: Any = None
        self.metadata: list[Any] = []
        self.description: str | None = None


def Field(default: Any = _MISSING, **declared: Any) -> Any:
    """Return what a field declares; keywords are its limits, such as gt and pattern."""
    return FieldInfo(default, **declared)


class _Marked(NamedTuple):
    """A method that a decorator below has marked."""

    names: tuple[str, ...]  # of fields; none: it checks the model
    mode: str
    function: Any


class ValidationInfo(NamedTuple):
    """What a validator of several fields may ask for."""

    field_name: str


def field_validator(*names: str, mode: str = "after") -> Callable[[Any], Any]:
    """Mark a class method that changes some fields' values before or after they are checked."""
    return lambda function: _Marked(names, mode, function)


def model_validator(*, mode: str) -> Callable[[Any], Any]:
    """Mark a method that changes all values before, or checks the model after."""
    return lambda function: _Marked((), mode, function)


class BaseModel:
    """A model whose annotations are its fields."""

    model_config: ClassVar[dict[str, Any]] = {}
    model_fields: ClassVar[dict[str, FieldInfo]] = {}
    _validators: ClassVar[dict[str, _Marked]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        configs = [base.__dict__.get("model_config", {}) for base in reversed(cls.__mro__)]
        cls.model_config = {key: value for config in configs for key, value in config.items()}

        # Methods that were marked are methods again.
        validators = {}
        for base in reversed(cls.__mro__[1:]):
            validators.update(base.__dict__.get("_validators", {}))
        for name, value in list(cls.__dict__.items()):
            if isinstance(value, _Marked):
                validators[name] = value
                setattr(cls, name, value.function)
        cls._validators = validators

        fields: dict[str, FieldInfo] = {}
        for base in reversed(cls.__mro__[1:]):
            fields.update(base.__dict__.get("model_fields", {}))
        cls.model_fields = fields | _fields_of(cls)

    def __init__(self, **values: Any) -> None:
        cls = type(self)
        given: Any = values
        for name, marked in cls._validators.items():
            if not marked.names and marked.mode == "before":
                given = _call(cls, name, given, values)

        errors = []
        found: dict[str, Any] = {}
        for key, field in cls.model_fields.items():
            try:
                found[key] = _checked(cls, key, field, given)
            except _Bad as error:
                value = error.value if error.place else given.get(key)
                place = (key, *error.place)
                errors.append({"type": error.kind, "loc": place, "msg": str(error), "input": value})
        for key in given:
            if key not in cls.model_fields and cls.model_config.get("extra") == "forbid":
                message = "Extra inputs are not permitted"
                errors.append(
                    {"type": "extra_forbidden", "loc": (key,), "msg": message, "input": given[key]}
                )
        if errors:
            raise ValidationError(cls.__name__, errors)
        self.__dict__.update(found)
        self.__dict__["_given"] = {key for key in given if key in cls.model_fields}
        for name, marked in cls._validators.items():
            if not marked.names and marked.mode == "after":
                _call(self, name, None, values)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.model_config.get("frozen"):
            error = {"type": "frozen_instance", "loc": (name,), "msg": "Instance is frozen"}
            raise ValidationError(type(self).__name__, [error | {"input": value}])
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        parts = [f"{key}={getattr(self, key)!r}" for key in self.model_fields]
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def model_fields_set(self) -> set[str]:
        """The fields that were given."""
        return set(self.__dict__["_given"])

    def model_dump(self, mode: str = "python", exclude_defaults: bool = False) -> dict[str, Any]:
        """Return the fields as a dict of plain values."""
        dumped = {}
        for key, field in self.model_fields.items():
            value = getattr(self, key)
            if exclude_defaults and value == field.default:
                continue
            if isinstance(value, BaseModel):
                value = value.model_dump(mode, exclude_defaults)
            dumped[key] = copy.deepcopy(value)
        return dumped

    def model_copy(self, update: Mapping[str, Any] | None = None) -> Any:
        """Return a copy with other values, which are not checked."""
        other = copy.copy(self)
        other.__dict__.update(update or {})
        other.__dict__["_given"] = self.model_fields_set | set(update or {})
        return other

    @classmethod
    def model_construct(cls, **values: Any) -> Any:
        """Return a model of defaults and these values, which are not checked."""
        made = cls.__new__(cls)
        defaults = {key: copy.deepcopy(field.default) for key, field in cls.model_fields.items()}
        made.__dict__.update(defaults | values | {"_given": set(values)})
        return made

    @classmethod
    def model_validate(cls, values: Any) -> Any:
        """Return a model of a dict's values. Raises ValidationError."""
        return values if isinstance(values, cls) else cls(**values)


class TypeAdapter:
    """Converts values of one type."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def validate_python(self, value: Any) -> Any:
        """Return the converted value. Raises ValidationError."""
        try:
            return _convert(self._kind, value, {})
        except _Bad as error:
            found = {"type": error.kind, "loc": error.place, "msg": str(error), "input": value}
            raise ValidationError(str(self._kind), [found]) from None


# ---- fields --------------------------------------------------------------------------------------


def _fields_of(cls: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that a class itself declares, and take their defaults out of it."""
    own = inspect.get_annotations(cls)
    hints = get_type_hints(cls, include_extras=True)
    docs = {}
    if cls.model_config.get("use_attribute_docstrings"):
        docs = _docstrings(cls.__module__).get(cls.__qualname__, {})
    fields = {}
    for name in own:
        if get_origin(hints[name]) is ClassVar:
            continue
        declared = cls.__dict__.get(name, _MISSING)
        field = declared if isinstance(declared, FieldInfo) else FieldInfo(declared)
        field.annotation = hints[name]
        if get_origin(hints[name]) is Annotated:
            field.annotation, *field.metadata = get_args(hints[name])
        field.description = docs.get(name)
        fields[name] = field
        if declared is not _MISSING:
            delattr(cls, name)
    return fields


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the texts behind the attributes of each class of a module."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = found.setdefault(node.name, {})
        for above, below in zip(node.body, node.body[1:], strict=False):
            is_field = isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if is_field and is_text and isinstance(below.value.value, str):  # type: ignore[attr-defined]
                texts[above.target.id] = inspect.cleandoc(below.value.value)  # type: ignore[attr-defined]
    return found


def _call(owner: Any, name: str, value: Any, values: Any) -> Any:
    """Call a validator of the whole model. Raises ValidationError for its ValueError."""
    function = getattr(owner, name)
    try:
        return function() if value is None else function(value)
    except ValidationError:
        raise
    except ValueError as error:
        found = {"type": "value_error", "loc": (), "msg": f"Value error, {error}", "input": values}
        title = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise ValidationError(title, [found]) from None


def _checked(cls: type[BaseModel], key: str, field: FieldInfo, given: Mapping[str, Any]) -> Any:
    """Return the value of a field. Raises _Bad."""
    if key not in given:
        if field.default is _MISSING:
            raise _Bad("missing", "Field required")
        return copy.deepcopy(field.default)
    value = _validated(cls, key, "before", given[key])
    value = _annotated(field.annotation, field.metadata, value, cls.model_config)
    _require(value, field.limits)
    return _validated(cls, key, "after", value)


def _validated(cls: type[BaseModel], key: str, mode: str, value: Any) -> Any:
    """Return the value of a field after its validators of this mode. Raises _Bad."""
    for name, marked in cls._validators.items():
        if key not in marked.names or marked.mode != mode:
            continue
        validator = getattr(cls, name)
        arguments: list[Any] = [value]
        if len(inspect.signature(validator).parameters) > 1:
            arguments.append(ValidationInfo(key))
        try:
            value = validator(*arguments)
        except ValueError as error:
            raise _Bad("value_error", f"Value error, {error}") from None
    return value


# ---- values --------------------------------------------------------------------------------------


def _convert(kind: Any, value: Any, config: Mapping[str, Any]) -> Any:
    """Return a value as `kind`. Raises _Bad."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        inner, *extras = get_args(kind)
        return _annotated(inner, extras, value, config)
    if origin is Literal:
        return _literal(get_args(kind), value)
    if origin in (Union, UnionType):
        return _union(get_args(kind), value, config)
    if origin is dict:
        return _mapping(get_args(kind), value, config)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise _Bad("list_type", "Input should be a valid list")
        return origin(_convert(get_args(kind)[0], each, config) for each in value)
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        return _model(kind, value)
    return _CONVERTERS[kind](value, config)


def _annotated(kind: Any, extras: list[Any], value: Any, config: Mapping[str, Any]) -> Any:
    """Return a value as `kind`, between the validators and the limits of its annotation."""
    for extra in extras:
        if isinstance(extra, BeforeValidator):
            value = extra.func(value)
    value = _convert(kind, value, config)
    for extra in extras:
        if isinstance(extra, FieldInfo):
            _require(value, extra.limits)
    return value


def _literal(words: tuple[Any, ...], value: Any) -> Any:
    for word in words:
        if type(word) is type(value) and word == value:
            return word
    names = [repr(word) for word in words]
    text = " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
    raise _Bad("literal_error", f"Input should be {text}")


def _union(kinds: tuple[Any, ...], value: Any, config: Mapping[str, Any]) -> Any:
    """Return the value of the kind that it has already, else of the first one that takes it."""
    problems = []
    fitting = []
    for kind in kinds:
        try:
            converted = _convert(kind, value, config)
        except _Bad as error:
            problems.append(error)
            continue
        if type(converted) is type(value) and converted == value:
            return converted
        fitting.append(converted)
    if not fitting:
        raise problems[0]
    return fitting[0]


def _mapping(kinds: tuple[Any, ...], value: Any, config: Mapping[str, Any]) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _Bad("dict_type", "Input should be a valid dictionary")
    found = {}
    for key, inner in value.items():
        try:
            found[_convert(kinds[0], key, config)] = _convert(kinds[1], inner, config)
        except _Bad as error:
            raise _Bad(error.kind, str(error), key, *error.place, value=inner) from None
    return found


def _model(kind: type[BaseModel], value: Any) -> BaseModel:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise _Bad(
            "model_type", f"Input should be a valid dictionary or instance of {kind.__name__}"
        )
    try:
        return kind(**value)
    except ValidationError as error:
        first = error.errors()[0]
        raise _Bad(first["type"], first["msg"], *first["loc"], value=first["input"]) from None


def _bool(value: Any, config: Mapping[str, Any]) -> bool:
    text = str(value).strip().lower()
    if isinstance(value, bool | str | int) and text in (*_TRUE, *_FALSE):
        return text in _TRUE
    raise _Bad("bool_parsing", "Input should be a valid boolean, unable to interpret input")


def _int(value: Any, config: Mapping[str, Any]) -> int:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+(\.0*)?\s*", value):
        return int(value.partition(".")[0])
    if isinstance(value, str):
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise _Bad("int_parsing", message)
    raise _Bad("int_type", "Input should be a valid integer")


def _float(value: Any, config: Mapping[str, Any]) -> float:
    if not isinstance(value, int | float | str):
        raise _Bad("float_type", "Input should be a valid number")
    try:
        found = float(value)
    except ValueError:
        message = "Input should be a valid number, unable to parse string as a number"
        raise _Bad("float_parsing", message) from None
    if not math.isfinite(found) and not config.get("allow_inf_nan", True):
        raise _Bad("finite_number", "Input should be a finite number")
    return found


def _str(value: Any, config: Mapping[str, Any]) -> str:
    if isinstance(value, str):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and config.get("coerce_numbers_to_str"):
        return str(value)
    raise _Bad("string_type", "Input should be a valid string")


def _none(value: Any, config: Mapping[str, Any]) -> None:
    if value is not None:
        raise _Bad("none_required", "Input should be None")


_CONVERTERS: dict[Any, Callable[[Any, Mapping[str, Any]], Any]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    NoneType: _none,
}


def _require(value: Any, limits: Mapping[str, Any]) -> None:
    """Raise _Bad for a value outside of a field's limits."""
    for name, limit in limits.items():
        if name not in _LIMITS:
            continue
        holds, kind, message = _LIMITS[name]
        if not holds(value, limit):
            raise _Bad(kind, message.format(limit))


def _matches(value: str, pattern: str) -> bool:
    return re.search(pattern, value) is not None


_Limit = tuple[Callable[[Any, Any], bool], str, str]
_LIMITS: dict[str, _Limit] = {
    "gt": (lambda v, n: v > n, "greater_than", "Input should be greater than {}"),
    "ge": (
        lambda v, n: v >= n,
        "greater_than_equal",
        "Input should be greater than or equal to {}",
    ),
    "lt": (lambda v, n: v < n, "less_than", "Input should be less than {}"),
    "le": (lambda v, n: v <= n, "less_than_equal", "Input should be less than or equal to {}"),
    "min_length": (
        lambda v, n: len(v) >= n,
        "string_too_short",
        "String should have at least {} character",
    ),
    "max_length": (
        lambda v, n: len(v) <= n,
        "string_too_long",
        "String should have at most {} characters",
    ),
    "pattern": (_matches, "string_pattern_mismatch", "String should match pattern '{}'"),
}


def __getattr__(name: str) -> Iterable[Any]:
    raise AttributeError(
        f"the stand-in for pydantic has no {name}; install pydantic, or see docs/gpu.md"
    )
