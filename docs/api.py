"""Print docs/api.md: the public names, from their signatures and docstrings (`make docs`).

PUBLIC is the list; tests/unit/test_face.py holds it against the package. An attribute's docstring is
the text below it in the class.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import nanoray
from nanoray import errors

# Each class with the members that a script uses, in the order of the page
PUBLIC: dict[str, tuple[str, ...]] = {
    "RuntimeEngine": (
        "__init__",
        "fit",
        "run",
        "model",
        "optimizer",
        "loss_fn",
        "callbacks",
    ),
    "Run": (
        "config",
        "folder",
        "rank",
        "world_size",
        "local_rank",
        "device",
        "spec",
        "outcome",
        "log",
        "save",
        "stop",
    ),
    "Config": ("to_json",),
    "Counted": ("batch", "samples"),
    "Weighted": ("sum", "weight"),
    "Callback": (
        "on_run_start",
        "on_step_end",
        "on_eval_end",
        "on_checkpoint",
        "on_fault",
        "on_run_end",
        "on_exception",
    ),
}
# Of the same classes: what the package itself calls, and Config's keys, which flags.md describes
INTERNAL: dict[str, tuple[str, ...]] = {
    "Run": (
        "rendezvous",
        "given",
        "observers",
        "wanted",
        "store",
        "rejoin",
        "take_logged",
        "on_fit",
        "order",
        "group_lost",
    ),
}
FUNCTIONS = ("launch", "tune")
HEAD = """\
# The Python API

Generated from the docstrings by `python docs/api.py`. These names are `nanoray.NAME`; importing nanoray
imports neither torch nor Ray. [python.md](python.md) introduces them with examples,
[own-models.md](own-models.md) has what happens to each kind of model, optimizer and data. Whatever else a
module of nanoray defines may change from version to version.
"""


def render() -> str:
    """Return the page."""
    parts = [HEAD]
    for name in FUNCTIONS:
        parts += _function(name)
    for name in PUBLIC:
        parts += _class(name)
    parts += _errors()
    return "\n".join(parts).rstrip()


def _function(name: str) -> list[str]:
    """Return the section of a function; `launch` is a package, too."""
    call = getattr(nanoray, name)
    if inspect.ismodule(call):
        call = type(call).__call__
    return [f"## {name}", "", *_code(f"nanoray.{name}", call), *_paragraphs(call.__doc__), ""]


def _class(name: str) -> list[str]:
    """Return the section of a class and its members."""
    kind = getattr(nanoray, name)
    lines = [f"## {name}", "", *_paragraphs(kind.__doc__), ""]
    if name == "Config":
        lines += ["Its attributes are the keys of [flags.md](flags.md).", ""]
    attributes = attribute_docs(kind)
    table = []
    for member in PUBLIC[name]:
        value = inspect.getattr_static(kind, member, None)
        if isinstance(value, property):
            table.append((member, _annotation(value.fget), value.__doc__))
        elif member in attributes:
            table.append((member, *attributes[member]))
    if table:
        lines += ["| attribute | type | |", "| --- | --- | --- |"]
        for member, kind_of, doc in table:
            words = " ".join((doc or "").split())
            lines.append(f"| `{member}` | `{_escaped(kind_of)}` | {words} |")
        lines.append("")
    for member in PUBLIC[name]:
        value = inspect.getattr_static(kind, member, None)
        if not inspect.isfunction(value):
            continue
        if member == "__init__":
            lines += [*_code(f"nanoray.{name}", value), *_paragraphs(value.__doc__), ""]
        else:
            lines += [f"### {name}.{member}", "", *_code(member, value)]
            lines += [*_paragraphs(value.__doc__), ""]
    return lines


def _errors() -> list[str]:
    """Return the section of the exceptions, which nanoray.errors draws as a tree."""
    tree = textwrap.dedent((errors.__doc__ or "").split("\n\n")[1])
    return [
        "## NanorayError",
        "",
        *_paragraphs(nanoray.NanorayError.__doc__),
        "",
        "The others are in `nanoray.errors`; [errors.md](errors.md) has what to do about each.",
        "",
        "```text",
        tree,
        "```",
        "",
    ]


def attribute_docs(kind: type) -> dict[str, tuple[str, str]]:
    """Return the annotation and the docstring of each attribute that a class declares."""
    found = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("nanoray."):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(after, ast.Expr):
                continue
            if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                name = ast.unparse(statement.target)
                found[name] = (ast.unparse(statement.annotation), after.value.value)
    return found


def _code(name: str, function: Any) -> list[str]:
    """Return a function's signature as a block, one parameter on a line where it is long."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    signature = signature.replace(parameters=parameters)
    # Annotations are texts, which str() would put in quotes.
    text = f"{name}{signature}".replace("'", "")
    if name.startswith("nanoray.") and name.removeprefix("nanoray.") not in FUNCTIONS:
        text = text.removesuffix(" -> None")
    if len(text) > 90:
        words = [str(p).replace("'", "") for p in parameters]
        for index, parameter in enumerate(parameters):
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                words.insert(index, "*")
                break
        end = text.rpartition(")")[2]
        text = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"
    return ["```python", text, "```", ""]


def _annotation(function: Any) -> str:
    return str(inspect.signature(function).return_annotation)


def _escaped(text: str) -> str:
    """Return a text for a cell of a table."""
    return text.replace("|", "\\|")


def _paragraphs(doc: str | None) -> list[str]:
    """Return a docstring as it stands, without its indentation."""
    return inspect.cleandoc(doc or "").splitlines()


if __name__ == "__main__":
    print(render())
