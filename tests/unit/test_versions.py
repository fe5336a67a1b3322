"""torch and Ray come in a range of versions: what differs between them stands in two files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nanoray.launch import ray_compat
from tests.harness.parsing import parse
from tests.harness.versions import MINORS, PAIRS, load, pinned, pins

ROOT = Path(__file__).resolve().parents[2]
COMPATIBILITY = {"nanoray/base/compat.py", "nanoray/launch/ray_compat.py"}
SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("nanoray", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
# Names that have nothing to do with torch and Ray: Python's, which are documented
OF_PYTHON = {"_exit", "_getframe", "_asdict", "_fields", "_replace"}
# argparse's for the generated page of flags, typeshed's type of a hash, one of the peer torchft
OF_OTHERS = {"_actions", "_action_groups", "_group_actions", "_Hash", "_quorum_id"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def known_names() -> frozenset[str]:
    """The private names that nanoray itself defines, anywhere, and those of Python and others.

    It reads all sources, so not while tests are collected: each worker collects all of them.
    """
    found: set[str] = set()
    for path in SOURCES.values():
        for node in ast.walk(parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    own = {name for name in found if is_private(name)}
    return frozenset(own | OF_PYTHON | OF_OTHERS)


def private_names_of_others(tree: ast.AST) -> Iterator[str]:
    """The private modules that a file imports, and the private attributes that are not ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if any(is_private(part) for part in alias.name.split(".")):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_own = name.startswith("nanoray.")
                if not is_own and any(is_private(part) for part in name.split(".")):
                    yield name
        elif isinstance(node, ast.Attribute):
            is_others = is_private(node.attr) and node.attr not in known_names()
            if is_others:
                yield ast.unparse(node)


def test_private_names_of_torch_and_ray_stand_in_two_files() -> None:
    trees = {name: parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
    found = {name: set(private_names_of_others(tree)) for name, tree in trees.items()}
    assert {name for name, names in found.items() if names} == set(COMPATIBILITY), (
        f"give it a name in {' or '.join(sorted(COMPATIBILITY))}: {found}"
    )


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.distributed.distributed_c10d import _world",
        "torch._foreach_mul_(grads, 2)",
        "storage._cdata",
        "ray._private.worker",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert list(private_names_of_others(parse(line)))


def declared() -> dict[str, Requirement]:
    """The dependencies of pyproject.toml, by name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    found = [Requirement(words) for words in re.findall(r'^ +"([^"]+)"', section, re.MULTILINE)]
    return {requirement.name: requirement for requirement in found}


def test_the_oldest_versions_that_are_allowed_are_tested() -> None:
    for name, version in (("torch", PAIRS[0].torch), ("ray", PAIRS[0].ray)):
        (lowest,) = [p.version for p in declared()[name].specifier if p.operator == ">="]
        assert version == f"{lowest}.0"
    assert {(record["torch"], record["ray"]) for record in load()} == {*PAIRS, pinned()}


def test_the_pythons_that_are_claimed_are_those_that_can_be_tested() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ((lowest, above),) = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', text, re.M)
    assert [*MINORS] == [*range(int(lowest), int(above))]
    assert {int(record["python"].split(".")[1]) for record in load()} == {*MINORS}


@pytest.mark.parametrize(
    ("version", "has"), [("2.50.0", False), ("2.51.2", False), ("2.52.0", True), ("3.0.0rc1", True)]
)
def test_rays_that_can_ask_for_a_token(version: str, has: bool) -> None:
    assert ray_compat.has_tokens(version) == has


@pytest.mark.parametrize("name", ["torch", "ray"])
def test_a_range_of_versions_is_declared_and_one_of_them_is_pinned(name: str) -> None:
    specifier = declared()[name].specifier
    assert {part.operator for part in specifier} == {">=", "<"}, "no exact version"
    assert pins()[name] in specifier
