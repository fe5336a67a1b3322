"""What a rank prints, in a process of its own: nothing is lost, and a flood does not fill memory."""

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
first = [True]
out = rank_output.RankOutput(
    folder / "logs" / "rank0.log", lambda *line: sent.append(line), lambda: first[0]
)
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
first[0] = False
print("of a rank that is not the first any more")
first[0] = True
print("without an end", end="")
out.finish()
"""
    log, sent = ran(tmp_path, body)
    assert log == (
        "a b\nto stderr\nas C does\nbytes\n\r10 %\r20 %\nnot ASCII: \u00e9\u4e2d\n"
        "of a rank that is not the first any more\nwithout an end"
    ).replace("\r", "\n")  # text mode reads a carriage return so
    assert sent == [
        ("stdout", "a b"),
        ("stderr", "to stderr"),
        ("stdout", "bytes"),
        ("stdout", "20 %"),
        ("stdout", "not ASCII: \u00e9\u4e2d"),
        ("stdout", "without an end"),
    ]


def test_a_flood_is_in_the_log_and_one_line_says_so(tmp_path: Path) -> None:
    body = """
rank_output.MOST_WAITING = 100
for number in range(50):
    print("line", number)
out.polled()
print("after a poll")
"""
    log, sent = ran(tmp_path, body)
    assert len(log.splitlines()) == 51
    warnings = [line for stream, line in sent if stream == "stderr"]
    assert len(warnings) == 1
    assert "lines are left out here" in warnings[0]
    assert len(sent) < 20
    assert sent[-1] == ("stdout", "after a poll")
