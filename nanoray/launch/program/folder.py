"""The folder of a program: which of its files travel to machines that do not have them, as one archive.

What travels is what git would add: neither what .gitignore names, nor files and folders that begin
with a dot. Without git it is every file but those of caches and virtual environments. A folder of
runs stays where it is.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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
        found: list[str] = []
        size = 0
        for name in self._candidates():
            path = self.path / name
            hidden = any(part.startswith(".") for part in Path(name).parts)
            if hidden or path.is_relative_to(self.out_dir) or not path.is_file():
                continue
            found.append(name)
            size += path.stat().st_size
            if len(found) > MOST_FILES or size > MOST_BYTES:
                raise ConfigError(
                    f"{self.path} has more than {MOST_FILES} files, or {size_text(MOST_BYTES)}: too "
                    "much for the folder of a program; put the program into a folder of its own, or "
                    "name in .gitignore what it does not need"
                )
        return sorted(found)

    def _candidates(self) -> Iterable[str]:
        """Return the files that git would add, or without git those outside of caches."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        with suppress(OSError):
            done = subprocess.run(command, cwd=self.path, capture_output=True, check=False)
            if done.returncode == 0:
                return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
        return self._walk()

    def _walk(self) -> Iterator[str]:
        for parent, folders, files in os.walk(self.path):
            folders[:] = [
                name
                for name in folders
                if name not in _CACHES
                and not name.startswith(".")
                and not os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))
            ]
            for name in files:
                yield os.path.relpath(os.path.join(parent, name), self.path)

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
            f"{size_text(limit)}; name in .gitignore "
            f"what the program does not need (the largest: {', '.join(sizes)}), or {remedy}"
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
