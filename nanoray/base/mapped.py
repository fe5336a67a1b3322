"""Small files that a process maps into its memory: they outlive it, also after SIGKILL.

A cleaner may remove such a file, or a user may move its folder, while the process lives. Its memory
keeps the content then, but no other process can read it. `restore_missing` writes the file anew.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary


class MappedFile:
    """A file of fixed size. Values that are packed into `memory` are in the file at once."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Create the file. If that fails, as on a full disk, the content stays in memory alone."""
        self.path = path
        self.memory: mmap.mmap | bytearray = bytearray(content)
        with suppress(OSError):
            self._create()
        _OPEN[path] = self

    def _create(self) -> None:
        """Write the content to the path, and map that file. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written before it is mapped, because an empty file cannot be.
        content = bytes(self.memory)
        self.path.write_bytes(content)
        with self.path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), len(content))

    def restore(self) -> bool:
        """Create the file anew if it is missing; return whether that was done."""
        # A file that exists may belong to another process by now, which has taken over this slot.
        # Any other error, of a storage that does not answer for a while, proves nothing.
        try:
            os.stat(self.path)
        except FileNotFoundError:
            with suppress(OSError):
                self._create()
                return True
        except OSError:
            pass
        return False


# The files of this process that are still in use.
_OPEN: WeakValueDictionary[Path, MappedFile] = WeakValueDictionary()


def content_of(path: Path) -> bytes | None:
    """Return the content of a file that this process has mapped, from memory; None for others."""
    file = _OPEN.get(path)
    return None if file is None else bytes(file.memory)


def restore_missing() -> list[Path]:
    """Create this process's missing files anew; return their paths. Costs a stat for each file."""
    files = list(_OPEN.values())
    return [file.path for file in files if file.restore()]
