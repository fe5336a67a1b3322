"""What a rank prints, in a process of its own: nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

START = """
import os, sys
from pathlib import Path
from nanoray.launch.recovery import rank_output
sent = []
folder = Path(sys.argv[1])
out = rank_output.RankOutput(folder / "logs" / "rank0.log", lambda *line: sent.append(line))
"""
END = """
(folder / "sent").write_text(repr(sent))
os._exit(0)
"""


def ran(folder: Path, body: str) -> tuple[str, list[tuple[str, str]]]:
    """Run code in a rank's process; return its log and the lines that were sent to the driver."""
    (folder / "logs").mkdir()
    command = [sys.executable, "-c", START + body + END, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    sent: list[tuple[str, str]] = eval((folder / "sent").read_text())
    return (folder / "logs" / "rank0.log").read_text(), sent


def test_all_kinds_of_output_are_in_the_log_and_lines_are_sent(tmp_path: Path) -> None:
    body = """
print("a", "b")
print("to stderr", file=sys.stderr)
os.write(1, b"as C does\\n")
sys.stdout.buffer.write(b"bytes\\n")
print("\\r10 %\\r20 %")
print("not ASCII: \u00e9\u4e2d")
print("without an end", end="")
out.finish()
"""
    log, sent = ran(tmp_path, body)
    assert log == (
        "a b\nto stderr\nas C does\nbytes\n\r10 %\r20 %\nnot ASCII: \u00e9\u4e2d\nwithout an end"
    ).replace("\r", "\n")  # text mode reads a carriage return so
    assert sent == [
        ("stdout", "a b"),
        ("stderr", "to stderr"),
        ("stdout", "bytes"),
        ("stdout", "20 %"),
        ("stdout", "not ASCII: \u00e9\u4e2d"),
        ("stdout", "without an end"),
    ]
