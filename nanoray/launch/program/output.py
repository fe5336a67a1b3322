"""What ranks print: read from their files by offsets, shown, and its newest part kept. (driver)"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanoray.launch.program.rank import TAIL_BYTES


class RankOutputs:
    """The output of all ranks, as their actors send it."""

    def __init__(
        self, printed: Sequence[int], copies: Sequence[Path | None], all_lines: bool
    ) -> None:
        """printed: bytes that each rank's file had before. copies: where the output of a rank is added
        too, because its node writes into a folder of its own. all_lines: show those of all ranks.
        """
        self.offsets = list(printed)  # what has been taken of each rank's file
        self.texts = [b""] * len(printed)  # its newest part
        self._all_lines = all_lines
        self._copies = copies
        self._new = [b""] * len(printed)  # what has been taken and neither shown nor dropped
        self._begun = [b""] * len(printed)  # with all_lines: a line that has not ended
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # of rank 0's output

    def is_read(self, rank: int) -> bool:
        """Whether all output of a rank is read; of the others the end is enough."""
        return rank == 0 or self._all_lines or self._copies[rank] is not None

    def take(self, rank: int, answer: dict[str, Any]) -> None:
        """Take a part of a rank's output, unless another answer had it already."""
        if answer["from"] != self.offsets[rank]:
            return
        data: bytes = answer["output"]
        self.offsets[rank] = answer["to"]
        copy = self._copies[rank]
        if data and copy:
            with copy.open("ab") as log:
                log.write(data)
        self.texts[rank] = (self.texts[rank] + data)[-TAIL_BYTES:]
        self._new[rank] += data

    def show_new(self, only: int | None = None) -> None:
        """Show what was taken; of `only` this rank, if it is given."""
        for rank, data in enumerate(self._new):
            if data and only in (None, rank):
                self._show(rank, data)
            self._new[rank] = b""

    def show_rest(self) -> None:
        """With all_lines: show the last lines of ranks that have ended without a line break."""
        for rank, line in enumerate(self._begun):
            if line:
                self._show(rank, b"\n")

    def _show(self, rank: int, data: bytes) -> None:
        """Show output of a rank: rank 0's as it comes, or all lines with their rank."""
        text = ""
        if self._all_lines:
            *lines, self._begun[rank] = (self._begun[rank] + data).split(b"\n")
            text = "".join(f"[{rank}] {line.decode(errors='replace')}\n" for line in lines)
        elif rank == 0:
            text = self._decoder.decode(data)  # which keeps a character that has not ended
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
