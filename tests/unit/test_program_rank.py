"""A rank of `nanoray run` without Ray: its process, its output, and the report of its error."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from nanoray.faults.cause import Failure
from nanoray.launch.program.driver import ProgramDriver, RankProgram
from nanoray.launch.program.rank import MOST_BYTES, ProgramRank


def test_a_program_has_ended_when_all_of_its_output_was_read(tmp_path: Path) -> None:
    rank = ProgramRank(str(tmp_path / "logs" / "rank0.log"), 1, warm=False)
    count = 2 * MOST_BYTES + 5
    words = [sys.executable, "-c", f"print('x' * {count - 1}); raise SystemExit(3)"]
    rank.start({"kind": "command", "words": words, "folder": str(tmp_path)}, dict(os.environ))
    time.sleep(2)  # it has ended before the first look
    read, code = 0, None
    deadline = time.monotonic() + 60
    while code is None and time.monotonic() < deadline:
        answer = rank.poll(read)
        read += len(answer["output"])
        code = answer["code"]
    rank.close()
    assert (read, code) == (count, 3)


def test_the_report_of_an_earlier_attempt_names_no_later_failure(tmp_path: Path) -> None:
    nothing: Any = None
    driver = ProgramDriver(RankProgram("script", ["x.py"], tmp_path), nothing, nothing)
    driver._texts = [b"Traceback (most recent call last):\n  File ...\nKeyError: 'later'\n"]
    earlier = "Traceback (most recent call last):\n  File ...\nValueError: earlier\n"
    (tmp_path / "logs").mkdir()
    report = {"message": {"extraInfo": {"py_callstack": earlier}}}
    driver._error_file(0).write_text(json.dumps(report))
    assert driver._error_of(0) == ("ValueError", "earlier")
    driver.failures.append(Failure(0, "exception", "raised ValueError: earlier"))
    assert driver._error_of(0) == ("KeyError", "'later'")
