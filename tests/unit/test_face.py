"""The Python face: the public names, their types, and their reference page."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import nanoray
from tests.harness.parsing import parse

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "nanoray" / "__init__.pyi"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# `launch` is a package at run time, and its attributes are the package's business
CLASSES = [name for name in nanoray.__all__ if inspect.isclass(getattr(nanoray, name))]


def page() -> ModuleType:
    """The module that writes docs/api.md."""
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "docs" / "api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


API = page()


def run_python(source: str) -> str:
    """Run a program in a fresh interpreter, and return what it prints."""
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_import_needs_neither_torch_nor_ray_and_changes_no_logging() -> None:
    printed = run_python(
        "import logging, sys\n"
        "import nanoray\n"
        "print(*[m for m in ('torch', 'ray', 'numpy', 'pydantic', 'wandb') if m in sys.modules])\n"
        "print(logging.getLogger().handlers, logging.getLogger('nanoray').handlers)\n"
        "print(set(nanoray.__all__) <= set(dir(nanoray)))\n"
        "print('torch' in sys.modules)\n"
    )
    assert printed.splitlines() == ["", "[] []", "True", "False"]


def test_the_names_are_those_of_dir_help_stub_and_page() -> None:
    assert sorted(nanoray.__all__, key=str.lower) == sorted(set(nanoray.__all__), key=str.lower)
    assert set(nanoray.__all__) <= set(dir(nanoray))
    assert {"__version__", "launch", *nanoray._EXPORTED} == set(nanoray.__all__)

    # The stub has the same names, each from the module that defines it.
    tree = parse(STUB.read_text(encoding="utf-8"))
    imported: dict[str, str | None] = {}
    defined: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname: node.module for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            defined[node.targets[0].id] = ast.literal_eval(node.value)
    assert imported == nanoray._EXPORTED
    assert defined["__all__"] == nanoray.__all__

    # help(nanoray) begins with a line for each.
    doc = nanoray.__doc__ or ""
    assert [name for name in [*CLASSES, *API.FUNCTIONS] if name not in doc] == []
    assert {*API.PUBLIC, "NanorayError"} == set(CLASSES)


def test_the_stub_of_launch_has_the_signature_of_its_package() -> None:
    functions = [n for n in parse(STUB.read_text()).body if isinstance(n, ast.FunctionDef)]
    (stub,) = [function for function in functions if function.name == "launch"]
    signature = inspect.signature(nanoray.launch)
    assert [argument.arg for argument in stub.args.args] == [*signature.parameters]
    defaults = [ast.literal_eval(default) for default in stub.args.defaults]
    assert defaults == [p.default for p in signature.parameters.values()][1:]
    # An editor shows the text of the stub.
    assert ast.get_docstring(stub) == inspect.getdoc(type(nanoray.launch).__call__)


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert written == API.render() + "\n", "run: make docs"


SCRIPT = """
import torch
from torch import nn

import nanoray


class Watch(nanoray.Callback):
    def on_run_start(self, run: nanoray.Run) -> None:
        print(run.folder / "metrics.jsonl", run.rank, run.config.lr)


def main(run: nanoray.Run) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    callbacks = [Watch()]
    engine = nanoray.RuntimeEngine(model, optimizer, run, nn.functional.mse_loss, callbacks)
    engine.fitt([(1, 2)])  # attr-defined
    print(engine.fit([(1, 2)], steps="3"))  # arg-type
    run.stopp()  # attr-defined
    print(run.config.learning_rate)  # attr-defined


code: str = nanoray.launch(main, {"workers": 2})  # assignment
nanoray.launch(main, {"workers": 2}, rayy=False)  # call-arg
nanoray.Weighted(sum=torch.ones(()), weigth=1)  # call-arg
try:
    print(nanoray.RuntimeEngin)  # attr-defined
except nanoray.NanorayError as error:
    print(error.exit_code + error.retry_count)  # attr-defined
"""


@pytest.mark.full
def test_a_checker_accepts_the_examples_and_finds_the_mistakes_of_a_script(tmp_path: Path) -> None:
    """As strict as `mypy --strict`; with the cache of `make lint`, which has torch in it."""
    script = tmp_path / "user_script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "pyproject.toml",
        "--no-error-summary",
    ]
    if sys.version_info >= (3, 12):
        # numpy's types for these Pythons are no syntax of the version that the configuration names
        command += ["--python-version", f"3.{sys.version_info.minor}"]
    done = subprocess.run(
        [*command, *map(str, EXAMPLES), str(script)],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    # The file's name alone: mypy keeps messages, with the folder of an earlier run of this test.
    found = set(re.findall(r"^(?:.*/)?(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M))
    expected = set()
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        code = re.search(r"  # ([a-z-]+)$", line)
        if code:
            expected.add((script.name, str(number), code[1]))
    assert found == expected, done.stdout + done.stderr


# What the library says, and who receives it.
