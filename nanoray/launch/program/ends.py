"""Why a rank of any program has ended: from its exit code, its last traceback, or its actor's end."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import OutOfMemoryError, RayError

from nanoray.faults import exit_record
from nanoray.faults.cause import Failure, how_it_ended, reports_lost_peer, title_of
from nanoray.machine.atomic import read_json

# Errors of Python that come again at each start
INCURABLE = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError")
# Who sends them is outside of the program: that they come again says nothing of it.
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
LINES_KEPT = 15  # of a failed rank's output, in its report
USAGE = 2  # the exit code of a command line that argparse, absl or a shell refuses
RANK_PREFIX = re.compile(rb"^\[rank\d+\]: ", re.M)  # of torch, before each line of a traceback
# Of an error in the syntax of the script itself Python shows only where it is.
TRACEBACK = re.compile(
    rb'(?:Traceback \(most recent call last\):|  File ".+", line \d+)\n'
    rb"(?:[ \t].*\n|\n)*([\w.]+)(?:: (.*))?"
)


def failure_of_program(
    rank: int, end: dict[str, Any], output: bytes, error_file: Path, facts: dict[str, Any]
) -> Failure:
    """Describe how a rank's program has ended.

    end: see ProgramRank.wait_for_end. output: the newest. error_file: see error_of.
    """
    code: int = end["code"]
    record = exit_record.record_of(code) | {"oom": end["oom"]}
    cause, verb, how = how_it_ended(record)
    exit_code = 128 - code if code < 0 else code
    curable = code != USAGE
    kind, message = error_of(code, output, error_file) if code > 0 else ("", "")
    if kind:
        cause, verb = "exception", "failed"
        how = f"{kind}: {message}" if message else kind
        curable = kind not in INCURABLE
        if reports_lost_peer({kind.rpartition(".")[2]}, message):
            cause = "peer_lost"
    lines = output.decode(errors="replace").splitlines()
    is_own = bool(record["oom"]) or record.get("signal") not in FROM_OUTSIDE
    return Failure(
        rank,
        cause,
        title_of(rank, facts, verb, how),
        phase="",
        detail="\n".join(lines[-LINES_KEPT:]),
        retry=curable,
        exit_code=exit_code,
        signature=how if is_own else "",
        facts=facts,
        exit_record=record,
        at=end["at"],
    )


def error_of(code: int, output: bytes, error_file: Path) -> tuple[str, str]:
    """Return class and message of the error that has ended a program; "" if unknown.

    error_file: in which a program of torch's `@record` reports it.
    """
    report = read_json(error_file).get("message", {})
    extra = report.get("extraInfo", {}) if isinstance(report, dict) else {}
    text = str(extra.get("py_callstack", "")).encode()
    # Python ends with 1 after an uncaught error. Before another code a program may have printed
    # one that it did catch.
    if not text and code == 1:
        text = output
    errors = TRACEBACK.findall(RANK_PREFIX.sub(b"", text))
    if not errors:
        return "", ""
    kind, message = errors[-1]
    return kind.decode(), message.decode(errors="replace")[:300]


def failure_of_actor(error: RayError, of_ranks: Sequence[dict[str, Any]]) -> Failure:
    """Describe how a rank's actor has ended, which takes its program along.

    of_ranks: the facts of each rank.
    """
    actor = getattr(error, "actor_id", None)
    ranks = [rank for rank, facts in enumerate(of_ranks) if facts["actor"] == actor]
    rank = ranks[0] if ranks else -1
    cause, how = "out_of_memory", "ended by Ray's memory monitor: its node was almost full"
    if not isinstance(error, OutOfMemoryError):
        lines = [line.strip() for line in str(error).splitlines()]
        why = next((line for line in lines if line.startswith("The actor")), lines[0])
        cause, how = "node_lost", f"its node, or Ray's process on it, was lost: {why[:300]}"
    facts = of_ranks[rank] if rank >= 0 else {}
    title = title_of(rank, facts, "died", how) if "pid" in facts else f"a rank died: {how}"
    return Failure(rank, cause, title, phase="", facts=facts, at=time.time())
