"""The folder of a program: which of its files travel to machines that do not have them, as one archive.

What travels is what git would add, in a repository or not: nothing that .gitignore names. Files and
folders that begin with a dot, caches, virtual environments and the folder of runs stay, too.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath

from nanoray.errors import ConfigError

# The folder of a program has less; one with more is a home, or has the data in it.
MOST_FILES = 10_000
MOST_BYTES = 2**30
_CACHES = ("__pycache__", "node_modules")


@dataclass(frozen=True)
class ProgramFolder:
    """The folder that a program is run in, and the program's words in it."""

    path: Path
    words: list[str]  # as in the command line, but a script's path is relative to the folder
    out_dir: Path  # of runs, which do not travel

    @classmethod
    def of(cls, kind: str, words: list[str], out_dir: str) -> ProgramFolder | None:
        """Return the folder of a program: this process' own, or that of a script elsewhere.

        None for a program that is installed, and so in no folder: a module or a command that names
        no file of this process' folder.
        """
        here = Path.cwd()
        runs = Path(out_dir).absolute()
        if kind == "script":
            script = Path(words[0]).resolve()
            folder = here if script.is_relative_to(here) else script.parent
            return cls(folder, [str(script.relative_to(folder)), *words[1:]], runs)
        if kind == "module":
            top = words[0].partition(".")[0]
            is_here = (here / top).is_dir() or (here / f"{top}.py").is_file()
        else:
            is_here = any(not os.path.isabs(word) and (here / word).is_file() for word in words)
        return cls(here, words, runs) if is_here else None

    @cached_property
    def files(self) -> list[str]:
        """Return the files that travel, relative to the folder. Raises ConfigError for too many."""
        candidates = self._candidates()
        environments = [name.parent for name in candidates if name.name == "pyvenv.cfg"]
        found: list[str] = []
        size = 0
        for name in candidates:
            path = self.path / name
            if any(part.startswith(".") or part in _CACHES for part in name.parts):
                continue
            if any(name.is_relative_to(folder) for folder in environments):
                continue
            if path.is_relative_to(self.out_dir) or not path.is_file():
                continue
            found.append(str(name))
            size += path.stat().st_size
            if len(found) > MOST_FILES or size > MOST_BYTES:
                raise ConfigError(
                    f"{self.path} has more than {MOST_FILES} files, or {size_text(MOST_BYTES)}: too "
                    "much for the folder of a program; put the program into a folder of its own, or "
                    "name in .gitignore what it does not need"
                )
        return sorted(found)

    def _candidates(self) -> list[PurePath]:
        """Return the files that git would add. Raises ConfigError for a .gitignore without git."""
        files = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        try:
            done = self._git(*files)
            if done.returncode != 0:  # in no repository
                with tempfile.TemporaryDirectory() as empty:
                    self._git("init", "--quiet", "--bare", empty)
                    done = self._git("--git-dir", empty, "--work-tree", ".", *files)
        except FileNotFoundError:
            if (self.path / ".gitignore").exists():
                raise ConfigError(
                    f"{self.path}/.gitignore names what does not travel, and git, which reads it, is "
                    "not installed; install git, or remove the file"
                ) from None
            return [path.relative_to(self.path) for path in self.path.rglob("*")]
        return [PurePath(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]

    def _git(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["git", *words], cwd=self.path, capture_output=True, check=False)

    @cached_property
    def size(self) -> int:
        """Return the sum of the files' sizes."""
        return sum((self.path / name).stat().st_size for name in self.files)

    def describe(self) -> str:
        """Return what travels: the folder, its files and their size."""
        return f"{self.path}: {len(self.files)} files, {size_text(self.size)}"

    def pack(self, limit: int, where: str, remedy: str) -> bytes:
        """Return the files as a gzip'd tar archive.

        Raises ConfigError where it has more than `limit` bytes, and `where` takes no more.
        """
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", dereference=True) as archive:
            for name in self.files:
                archive.add(self.path / name, name, recursive=False)
        found = packed.getvalue()
        if len(found) <= limit:
            return found
        largest = sorted(self.files, key=lambda name: -(self.path / name).stat().st_size)[:3]
        sizes = [f"{name} {size_text((self.path / name).stat().st_size)}" for name in largest]
        raise ConfigError(
            f"{self.describe()}, packed {size_text(len(found))}, but {where} takes "
            f"{size_text(limit)}; start the command in the program's own folder, name in .gitignore "
            f"what it does not need (the largest: {', '.join(sizes)}), or {remedy}"
        )


def digest(folder: Path, files: list[str]) -> str:
    """Return a hash of the names and contents of files; empty where one is missing."""
    found = hashlib.sha256()
    try:
        for name in files:
            content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            found.update(f"{name}\0{content}\n".encode(errors="surrogateescape"))
    except OSError:
        return ""
    return found.hexdigest()


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack an archive into a folder, which appears when it is complete; one that exists is kept."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".code-", dir=folder.parent))
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
            packed.extractall(temporary, filter="data")
        with suppress(FileExistsError):  # another rank on this storage was faster
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def size_text(size: int) -> str:
    """Return a size in bytes for people."""
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:.1f} MiB"
