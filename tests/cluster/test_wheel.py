"""A wheel trains, renders and measures outside the checkout: what the code reads at run time is
package data.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "nanoray", "kuberay")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return its standard output; fail with all that it printed."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHON", "VIRTUAL_ENV"))
    }
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{words}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bin/ of an environment with the wheel and this environment's dependencies, but not its
    editable install.

    Its path has a space. The wheel is built from a copy: a build/ left in the checkout would hide a
    missing file.
    """
    folder = tmp_path_factory.mktemp("wheel") / "a folder"
    sources, venv = folder / "sources", folder / "venv"
    sources.mkdir(parents=True)
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, sources / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(
        *pip,
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        folder,
        cwd=sources,
    )
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(
        *pip,
        "--python",
        venv / "bin" / "python",
        "install",
        "--no-compile",  # the tests import few of the modules
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    (site,) = venv.glob("lib/python*/site-packages")
    # A line of a .pth file is only put on the path: the .pth of the editable install in that folder
    # is not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(sources)
    yield venv / "bin"
    shutil.rmtree(folder)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def test_every_module_comes_from_the_wheel(installed: Path, elsewhere: Path) -> None:
    script = (
        "import importlib.util, sys\n"
        "for name in sys.argv[1:]:\n"
        "    spec = importlib.util.find_spec(name)\n"
        "    print(name, spec and spec.origin)\n"
    )
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "nanoray").rglob("*.py")
    ]
    names = [name.removesuffix(".__init__") for name in modules]
    found = dict(
        line.split(" ", 1)
        for line in run(installed / "python", "-c", script, *names, cwd=elsewhere).splitlines()
    )
    assert found.keys() == set(names)
    # Type checkers look for these two.
    package = Path(found["nanoray"]).parent
    assert [(package / name).is_file() for name in ("py.typed", "__init__.pyi")] == [True, True]
    assert {
        name: place for name, place in found.items() if not place.startswith(f"{installed.parent}/")
    } == {}


def test_every_manifest_is_in_the_wheel(installed: Path) -> None:
    (found,) = installed.parent.glob("lib/python*/site-packages/nanoray/kube/manifests")
    shared = sorted(path.name for path in (ROOT / "kuberay").glob("namespace*"))
    for part in ("base", "components", "overlays", *shared):
        wanted = {
            path.relative_to(ROOT / "kuberay")
            for path in (ROOT / "kuberay" / part).rglob("*")
            if path.is_file()
        }
        assert wanted == {
            path.relative_to(found) for path in (found / part).rglob("*") if path.is_file()
        }


def test_presets_topologies_names_and_templates_are_in_the_wheel(installed: Path) -> None:
    """That the code reads them there: above, a preset, and below, a topology and a template."""
    (found,) = installed.parent.glob("lib/python*/site-packages/nanoray")
    config = [f"config/{part}/*.yaml" for part in ("names", "presets", "topologies")]
    for pattern in ("**/*.j2", "config/run.schema.json", *config):
        wanted = {path.relative_to(ROOT / "nanoray") for path in (ROOT / "nanoray").glob(pattern)}
        assert wanted == {path.relative_to(found) for path in found.glob(pattern)} != set()
