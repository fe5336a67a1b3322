"""The folder of a program that travels to other machines: which files, and what they are afterwards."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nanoray.errors import ConfigError
from nanoray.launch.program.folder import ProgramFolder, digest, unpack

FILES = ("train.py", "lib/model.py", "conf/a.yaml")
STAY = ("data.bin", ".env", ".git/x", "lib/__pycache__/m.pyc", "venv/pyvenv.cfg", "venv/x.py")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, in which this process is, with files that stay where they are."""
    folder = tmp_path / "project"
    for name in (*FILES, *STAY, "runs/2026/logs/rank0.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text("*.bin")
    shutil.rmtree(folder / ".git")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("repository", [False, True])
def test_what_git_would_add_travels(project: Path, repository: bool, tmp_path: Path) -> None:
    if repository:
        subprocess.run(["git", "init", "--quiet"], check=True)
    folder = ProgramFolder.of("script", ["train.py", "--lr", "1"], "runs")
    assert folder
    assert folder.files == sorted(FILES)
    copy = tmp_path / "copy"
    unpack(folder.pack(2**20, "a node", ""), copy)
    assert sorted(p.name for p in copy.rglob("*.*")) == sorted(Path(name).name for name in FILES)

    # Another content, or a file that is missing, is another folder
    assert digest(project, folder.files) == digest(copy, folder.files)
    (copy / "lib" / "model.py").write_text("another")
    assert digest(project, folder.files) != digest(copy, folder.files)
    (copy / "lib" / "model.py").unlink()
    assert digest(copy, folder.files) == ""


@pytest.mark.parametrize(
    ("kind", "words", "found"),
    [
        ("script", ["lib/model.py"], (".", ["lib/model.py"])),
        ("script", ["../other/go.py", "x"], ("../other", ["go.py", "x"])),
        ("module", ["lib.model"], (".", ["lib.model"])),
        ("module", ["http.server"], None),
        ("command", ["sh", "train.py"], (".", ["sh", "train.py"])),
        ("command", ["echo", "train"], None),
    ],
)
def test_the_folder_of_a_program(
    project: Path, kind: str, words: list[str], found: tuple[str, list[str]] | None
) -> None:
    (project.parent / "other").mkdir()
    (project.parent / "other" / "go.py").touch()
    folder = ProgramFolder.of(kind, words, "runs")
    expected = (project / found[0]).resolve() if found else None
    assert (folder.path if folder else None) == expected
    if folder and found:
        assert folder.words == found[1]


def test_a_folder_that_is_too_large_names_what_is_large(project: Path) -> None:
    (project / "words.txt").write_bytes(bytes(range(256)) * 40)
    folder = ProgramFolder.of("script", ["train.py"], "runs")
    assert folder
    with pytest.raises(ConfigError, match=r"but a node takes 0\.1 KiB; .*words\.txt 10\.0 KiB"):
        folder.pack(100, "a node", "put it on shared storage")
