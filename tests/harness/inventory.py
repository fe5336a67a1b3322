"""What users have, one line for each: commands and flags, keys, presets, metrics, names, results.

    python -m tests.harness.inventory > tests/harness/inventory.txt

tests/unit/test_inventory.py compares the list with the committed one. So a change that takes
something away, or adds it, shows that as a line of its own, and says why in its commit.
"""

from __future__ import annotations

import inspect
import re
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path

import nanoray
from nanoray import errors
from nanoray.cli.catalog import COMMANDS
from nanoray.config import Config
from nanoray.machine import metrics
from tests.harness.parsers import find_parsers

ROOT = Path(nanoray.__file__).parent.parent
# Of README: a command in a block of code; a heading, a table's row, an item, a bold beginning
COMMAND = r"(\$ )?(nanoray|python|make|pip|ray|kubectl|torchrun|git)\b"
BEGINNING = r"#|\||[-*] |\*\*"
LIST = Path(__file__).with_suffix(".txt")


def commands() -> Iterator[str]:
    """Each command and its flags; a run's flags are the keys."""
    for name in COMMANDS:
        for word, parsers in find_parsers(name).items():
            whole = f"nanoray {name} {word}".rstrip()
            yield whole
            if name == "check":
                continue  # its flags are those of train
            for flag in _flags(parsers[0]):
                yield f"{whole} {flag}"


def _flags(parser: ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help == SUPPRESS:
            continue
        yield ", ".join(action.option_strings) or str(action.metavar or action.dest)


def keys() -> Iterator[str]:
    """Each key of a configuration, its type and its default."""
    for name, field in Config.model_fields.items():
        annotation = re.sub(r" at 0x\w+", "", inspect.formatannotation(field.annotation))
        yield f"{name}: {annotation} = {field.default!r}"


def rows_of_conflicts() -> Iterator[str]:
    """Each row of the table of conflicts, in the words of docs/flags.md."""
    page = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    table = page.split("## What does not go together")[1].split("\n## ")[0]
    for line in table.splitlines():
        if line.startswith("|"):
            yield line


def presets() -> Iterator[str]:
    """Each preset with its values, and each topology."""
    for path in sorted((ROOT / "nanoray/config/presets").iterdir()):
        for line in path.read_text(encoding="utf-8").splitlines():
            value = line.split(" #")[0].strip()
            if value and not value.startswith("#"):
                yield f"{path.stem} {value}"
    for path in sorted((ROOT / "nanoray/config/topologies").iterdir()):
        yield f"topology {path.stem}"


def recorded() -> Iterator[str]:
    """Each metric and its unit."""
    for metric in metrics.METRICS.values():
        yield f"{metric.name} [{metric.unit}]"


def public_names() -> Iterator[str]:
    """The public names with their signatures, as docs/api.md has them, and the errors."""
    yield from sorted(nanoray.__all__)
    for line in (ROOT / "docs/api.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            yield line
    for name, error in sorted(vars(errors).items()):
        if isinstance(error, type):
            yield f"{name} exit {error.exit_code}"


def promises() -> Iterator[str]:
    """README's headings, commands, and what its lists and tables begin with."""
    is_code = False
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        text = re.sub(r" ?<!--.*?-->", "", line).strip()  # a reader does not see comments
        if text.startswith("```"):
            is_code = not is_code
        elif re.match(COMMAND if is_code else BEGINNING, text):
            yield text


def results() -> Iterator[str]:
    """The committed results."""
    for path in sorted((ROOT / "docs/results").iterdir()):
        yield path.name


def files() -> Iterator[str]:
    """Pages, examples and manifests."""
    for folder in ("docs", "examples", "kuberay", "docker"):
        for path in sorted((ROOT / folder).rglob("*")):
            is_shown = path.suffix in (".md", ".py", ".yaml", ".ipynb", ".sh")
            if is_shown and "__pycache__" not in path.parts:
                yield str(path.relative_to(ROOT))


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "keys": keys,
    "conflicts": rows_of_conflicts,
    "presets": presets,
    "metrics": recorded,
    "names": public_names,
    "README": promises,
    "results": results,
    "files": files,
}


def lines() -> list[str]:
    """Return the whole list: `section | what`."""
    return [f"{section} | {line}" for section, find in SECTIONS.items() for line in find()]


if __name__ == "__main__":
    print("\n".join(lines()))
