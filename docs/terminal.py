"""Record a command on a terminal of its own as an SVG: what is left to see at its end.

python docs/terminal.py docs/results/kill_a_worker.svg .venv/bin/python examples/kill_a_worker.py
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 118
ERASED = r"[^\n]*\r\x1b\[2K"  # a status line, and the order to erase it


def main() -> int:
    """Run the command of the arguments, show what it prints, and write the SVG; return its exit
    code.
    """
    path, *command = sys.argv[1:]
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    seen = io.BytesIO()

    def read(fd: int) -> bytes:
        data = os.read(fd, 65536)
        seen.write(data)
        return data

    code = os.waitstatus_to_exitcode(pty.spawn(command, read))
    text = seen.getvalue().decode("utf-8", "replace").replace("\r\n", "\n")
    screen = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    screen.print(Text(f"$ {shlex.join(command)}", style="bold"))
    for line in filter(None, re.sub(ERASED, "", text).splitlines()):
        screen.print(Text.from_ansi(line), no_wrap=True, overflow="ellipsis", crop=True)
    # From the web
    picture = re.sub(
        r"@font-face \{.*?\}\s*", "", screen.export_svg(title="nanoray"), flags=re.DOTALL
    )
    Path(path).write_text(picture, encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
