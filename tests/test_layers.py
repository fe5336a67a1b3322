"""The house's own rules: imports point downward, files and functions stay small, three modules know Ray."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "nanoray"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own row and from the rows above it.
LAYERS = [
    {"__init__", "errors", "sentinel", "kube_options"},
    {"config"},
    {"tokenizer", "download"},
    {"devices", "mesh", "data", "optim", "precision", "comm", "algorithms", "metrics"},
    {"run", "model", "checkpoint", "faults", "callbacks", "timeline", "trace", "parallel", "parallel.ddp"},
    {"watchdog", "failures"},
    {"engine", "saving", "guards", "recovery", "report"},
    {"train"},
    {"worker"},
    {"placement"},
    {"gang"},
    {"launch"},
    {"check", "sample", "mig", "checkpoint_cli", "faults_cli", "bench", "kube"},
    {"__main__"},
]
RANK = {name: i for i, row in enumerate(LAYERS) for name in row}
MAY_IMPORT_RAY = {"worker", "placement", "gang", "launch"}
LOOP_LINES, FUNCTION_LINES, FILE_LINES = 120, 80, 500
PACKAGE_LINES, BENCH_LINES, KUBE_LINES = 10500, 8000, 1500  # what trains and survives, what measures, what deploys


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def layer(name: str) -> int:
    return RANK[name.split(".")[0] if name.startswith(("bench", "kube")) else name]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_downward(path: Path) -> None:
    own = module_name(path)
    for name in imported(path):
        target = name.removeprefix("nanoray.")
        is_module = (PACKAGE / (target.replace(".", "/") + ".py")).exists()
        if name.startswith("nanoray.") and is_module:
            assert layer(target) <= layer(own), f"{own} imports {target}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_the_ray_modules_import_ray(path: Path) -> None:
    own = module_name(path)
    if own not in MAY_IMPORT_RAY and not own.startswith("bench"):
        strangers = {n for n in imported(path) if n == "ray" or n.startswith("ray.")}
        assert not strangers, f"{own} imports {strangers}; only {MAY_IMPORT_RAY} and a bench may"


def test_the_driver_starts_without_torch() -> None:
    """launch reaches config, data, devices, mesh, run and report; none of them may import torch at its top."""
    for name in (
        "config",
        "devices",
        "mesh",
        "data",
        "run",
        "report",
        "callbacks",
        "faults",
        "worker",
        "placement",
        "gang",
        "failures",
        "launch",
    ):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
        top = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
        top |= {n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)}
        heavy = top & {"torch", "nanoray.model", "nanoray.optim", "nanoray.checkpoint", "nanoray.train"}
        assert not heavy, f"{name} imports {heavy} at its top: the driver would start seconds later"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = LOOP_LINES if node.name == "fit" else FUNCTION_LINES
            assert lines <= limit, f"{node.name} has {lines} lines, the budget is {limit}"
            params = (
                len(node.args.args) + len(node.args.kwonlyargs) - (node.args.args[:1] != [] and node.name == "__init__")
            )
            assert params <= 8, f"{node.name} takes {params} parameters, the budget is 8"


def test_the_package_stays_readable() -> None:
    lines = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    bench, kube = (sum(n for p, n in lines.items() if p.parent.name == part) for part in ("bench", "kube"))
    assert bench <= BENCH_LINES
    assert kube <= KUBE_LINES
    assert sum(lines.values()) - bench - kube <= PACKAGE_LINES
