"""The rules of the house: imports point downward, there is no circle, and few rooms know Ray."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.harness.parsing import parse

PACKAGE = Path(__file__).resolve().parents[2] / "nanoray"
FILES = sorted(PACKAGE.rglob("*.py"))

# A room may import from the rows above its own, and from itself. docs/architecture.md draws the
# same picture. Beside the rooms nanoray/ has only its face: what users import.
ROWS = [
    {"machine"},
    {"config"},
    {"data", "faults"},
    {"models"},
    {"parallel"},
    {"checkpoint"},
    {"cli"},
    {"observe"},
    {"train"},
    {"script"},
    {"launch"},
    {"bench", "kube", "lab"},
    {"__main__"},
]
FACE = ""
ON_TOP = {"__init__.py", "__init__.pyi", "__main__.py", "errors.py", "py.typed"}
ROW = {FACE: -1} | {room: i for i, row in enumerate(ROWS) for room in row}
MAY_IMPORT_RAY = {"launch", "bench"}


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return "" if name == "__init__" else name.removesuffix(".__init__")


def room(module: str) -> str:
    """Return the room of a module: a folder. `nanoray` and `nanoray.errors`, which are public, have
    none: every room may import them, and they import nothing at their top.
    """
    name = module.split(".")[0]
    return FACE if name == "errors" else name


MODULES = {module_name(path): path for path in FILES}


@cache
def imported(path: Path, top_only: bool = False) -> frozenset[str]:
    """Every name that a file imports, also inside functions and under TYPE_CHECKING."""
    tree = parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def own_modules(path: Path, top_only: bool = False) -> set[str]:
    """The nanoray modules that a file imports; a package whose __init__ imports nothing is none."""
    names = {
        name.removeprefix("nanoray.")
        for name in imported(path, top_only)
        if name.startswith("nanoray.")
    }
    return {
        name
        for name in names & MODULES.keys()
        if MODULES[name].name != "__init__.py" or imported(MODULES[name])
    }


def test_imports_point_downward() -> None:
    for module, path in MODULES.items():
        for target in own_modules(path):
            if room(target) != room(module):
                assert ROW[room(target)] < ROW[room(module)], (
                    f"{module} imports {target}, which is not below it"
                )


def test_nothing_imports_what_stands_beside_the_product() -> None:
    for module, path in MODULES.items():
        reached = {room(target) for target in own_modules(path)} - {room(module)}
        assert not reached & {"bench", "kube", "lab"}, f"{module} imports {reached}"


def test_the_page_of_rooms_has_every_room() -> None:
    """`make docs` counts the tokens anew; the page may be a little behind the code."""
    page = (PACKAGE.parent / "docs" / "rooms.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| (\w+) \|", page, re.M)[1:-1]
    assert set(rooms) == ROW.keys() - {FACE, "__main__"}


def test_no_circle() -> None:
    """Not between two files of one room either, nor through a late import, nor for types only."""
    graph = {module: own_modules(path) - {module} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(error.args[1])}")


def test_any_program_runs_without_recovery_in_place() -> None:
    """The storeys of launch/: what `nanoray run` reaches places, starts, watches and restarts ranks.

    Recovery in place stands above it. Only the ways in to our own training join the two.
    """
    ways_in = {"launch.__main__", "launch.from_script", "launch.auto"}
    storey = {module for module in MODULES if module.startswith("launch.")} - ways_in
    above = {module for module in storey if module.startswith("launch.recovery.")}
    assert above
    assert storey - above
    for module in sorted(storey - above):
        higher = own_modules(MODULES[module]) & (above | ways_in)
        assert not higher, f"{module} imports {higher}, which knows steps and states"


def test_every_module_has_a_room() -> None:
    assert {room(module) for module in MODULES} == ROW.keys()


def test_the_entries_of_the_package_are_rooms_and_its_face() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries - ON_TOP == ROW.keys() - {FACE, "__main__"}
    assert entries >= ON_TOP


@cache
def below(name: str) -> frozenset[str]:
    """Return the rooms that a room imports, also those that these import, and itself."""
    found = {name}
    for module, path in MODULES.items():
        if room(module) == name:
            found |= {room(target) for target in own_modules(path)}
    lower = {other for other in found if ROW[other] < ROW[name]}
    return frozenset(found.union(*map(below, lower)))


def test_a_class_name_stands_once_where_a_reader_meets_both() -> None:
    """In one room, or in two of which one imports the other."""
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    twice = {
        name: modules
        for name, modules in places.items()
        for n, one in enumerate(modules)
        for other in modules[n + 1 :]
        if room(one) in below(room(other)) or room(other) in below(room(one))
    }
    assert not twice, twice


def test_only_launch_and_bench_import_ray() -> None:
    for module, path in MODULES.items():
        if room(module) not in MAY_IMPORT_RAY:
            strangers = {n for n in imported(path) if n == "ray" or n.startswith("ray.")}
            assert not strangers, f"{module} imports {strangers}; only {MAY_IMPORT_RAY} may"


@pytest.mark.parametrize(
    ("command", "heavy", "among_others"),
    [
        (
            "launch.__main__",
            {"torch"},
            {
                "launch.recovery.driver",
                "launch.recovery.worker_group",
                "parallel.rendezvous",
                "train.report",
            },
        ),
        (
            "launch.program.on_ray",
            {"torch"},
            {"launch.program.observed", "observe.trace.comm_log", "observe.trace.costs"},
        ),
        # Its fork server imports torch while it imports Ray.
        ("launch.program.__main__", {"torch", "ray"}, {"launch.program.forked"}),
    ],
)
def test_the_driver_starts_without_torch(
    command: str, heavy: set[str], among_others: set[str]
) -> None:
    """Whatever the driver imports when it starts, directly or not: none of it may import torch at
    its top.
    """
    seen, todo = set[str](), {command}
    while todo:
        module = todo.pop()
        seen.add(module)
        found = {n for n in imported(MODULES[module], top_only=True) if n.split(".")[0] in heavy}
        assert not found, f"{module} imports {found} at its top: ranks would start later"
        todo |= own_modules(MODULES[module], top_only=True) - seen
    assert among_others <= seen


def picture() -> str:
    """Return the floors with their rooms, and which rooms each one imports from."""
    arrows: dict[str, set[str]] = {name: set() for row in ROWS for name in row}
    for module, path in MODULES.items():
        name = room(module)
        if name != FACE:
            arrows[name] |= {room(target) for target in own_modules(path)} - {name, FACE}
    lines = []
    for floor, row in enumerate(ROWS):
        lines.append(f"floor {floor}")
        for name in sorted(row):
            lines.append(f"  {name:<12} imports {', '.join(sorted(arrows[name])) or 'nothing'}")
    number = sum(len(targets) for targets in arrows.values())
    return "\n".join([*lines, f"{len(arrows)} rooms on {len(ROWS)} floors, {number} arrows"])


if __name__ == "__main__":
    print(picture())
