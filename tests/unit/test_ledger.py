"""The ledger: each second of each rank stands in one account, across killed processes, restarts and
commands.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanoray.errors import ConfigError
from nanoray.observe.trace import accounts
from nanoray.observe.trace.accounts import accounts_of
from nanoray.observe.trace.ledger import Ledger
from tests.harness.commands import ROOT

COMMAND = 1000.0  # Unix s
STEP = (("data", 1), ("forward", 2), ("backward", 3), ("optimizer", 1))  # seconds of each phase


class Clock:
    """Two clocks that tick together from different zeros."""

    def __init__(self, at: float) -> None:
        self.at = at

    def time(self) -> float:
        return COMMAND + self.at

    def monotonic(self) -> float:
        return 77 + self.at


class Rank:
    """A process that walks through phases."""

    def __init__(
        self, folder: Path, slot: int, at: float, takes_over: bool = False, command: float = 0.0
    ) -> None:
        self.clock = Clock(at)
        (folder / "logs").mkdir(exist_ok=True)
        path = folder / "logs" / f"rank{slot}.{command}-{at}.ledger"
        self.ledger = Ledger(path, COMMAND + command, takes_over, self.clock)

    def walk(self, *phases: tuple[str, float], step: int = 0) -> Rank:
        for name, seconds in phases:
            self.ledger.phase(step, name)
            self.clock.at += seconds
        return self


def ended(folder: Path, total_s: float) -> None:
    (folder / "summary.json").write_text(json.dumps({"total_s": total_s}))


def fault(folder: Path, **values: Any) -> None:
    event = {
        "event": "fault",
        "time": COMMAND + 10,
        "recovery": "in_place",
        "steps_repeated": 0,
    } | values
    with (folder / "faults.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def require(folder: Path, **expected: float) -> accounts.Accounts:
    """These accounts and no others have seconds, and they sum to the wall time of all slots."""
    found = accounts_of(folder)
    assert {name: seconds for name, seconds in found.seconds.items() if seconds} == pytest.approx(
        {name.replace("_", " "): seconds for name, seconds in expected.items()}
    )
    assert found.total == pytest.approx(found.slots * found.wall_s)
    return found


def test_each_phase_goes_to_its_account(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 4).walk(
        ("init", 5), *STEP, ("log", 2), ("eval", 3), ("eval", 3), ("checkpoint", 1)
    )
    rank.walk(*STEP, ("log", 2), ("done", 2)).ledger.close()
    ended(tmp_path, 40.0)  # the command ends 1 s after its rank
    found = require(
        tmp_path, start=9, data=2, compute=12, log=4, evaluation=6, checkpoint=1, closing=6
    )
    assert found.goodput == pytest.approx(14 / 40)


def test_a_killed_process_and_its_successor(tmp_path: Path) -> None:
    """Rank 1 is killed in a backward that its peer waits for; nothing but the mapped file is left
    of it.
    """
    survivor = Rank(tmp_path, 0, 0).walk(
        ("init", 4), *STEP, ("data", 1), ("forward", 2), ("backward", 5)
    )
    Rank(tmp_path, 1, 0).walk(("init", 4), *STEP, ("data", 1), ("forward", 2), ("backward", 3))
    survivor.ledger.group_lost()  # at 19 s
    survivor.clock.at += 6
    survivor.walk(("init", 1), *STEP, ("done", 0)).ledger.close()
    Rank(tmp_path, 1, 24, takes_over=True).walk(("init", 2), *STEP, ("done", 0)).ledger.close()
    fault(tmp_path)
    ended(tmp_path, 33.0)
    # Of rank 1's last phase only its begin is known, at 14 s: it is lost, as its peer's is.
    require(tmp_path, start=8, data=6, compute=28, recovery=12 + 12)


def test_ranks_that_end_for_a_restart_do_not_close_the_run(tmp_path: Path) -> None:
    """The peer of a killed rank saves and ends by itself; both have successors."""
    peer = Rank(tmp_path, 0, 0).walk(("init", 4), *STEP, ("checkpoint", 2), ("done", 3))
    peer.ledger.close()  # at 16 s
    peer.clock.at += 1
    Rank(tmp_path, 1, 0).walk(("init", 4), *STEP, ("data", 1))
    for slot in (0, 1):
        Rank(tmp_path, slot, 20).walk(("init", 2), *STEP, ("done", 1)).ledger.close()
    fault(tmp_path, recovery="restart")
    ended(tmp_path, 31.0)
    require(
        tmp_path,
        start=4 + 4 + 2 + 2,  # a new process starts, too
        data=4,
        compute=24,
        checkpoint=2,
        recovery=(3 + 4) + (20 - 11),
        closing=2 + 2,
    )


def test_steps_done_again_do_not_count(tmp_path: Path) -> None:
    # Killed: the checkpoint is of step 1
    killed = Rank(tmp_path, 0, 0).walk(("init", 4))
    for step in (1, 2):
        killed.walk(*STEP, step=step)
    killed.walk(("data", 0), step=3)
    again = Rank(tmp_path, 0, 20, takes_over=True).walk(("init", 3), step=2)
    for step in (2, 3):
        again.walk(*STEP, step=step)
    again.walk(("done", 0), step=3).ledger.close()
    fault(tmp_path, recovery="restart", steps_repeated=1)
    ended(tmp_path, 37.0)
    found = require(tmp_path, start=4, data=3, compute=18, repeated=7, recovery=2 + 3)
    assert found.goodput == pytest.approx(21 / 37)


def test_steps_of_a_killed_command_that_the_next_one_does_again(tmp_path: Path) -> None:
    """Everything was killed, so no driver told of it: the checkpoint is of step 1, and steps 2 and
    3 were done.
    """
    killed = Rank(tmp_path, 0, 0).walk(("init", 4))
    for step in (1, 2, 3):
        killed.walk(*STEP, step=step)
    killed.walk(("data", 0), step=4)
    again = Rank(tmp_path, 0, 500, command=500).walk(("init", 4), step=2)
    for step in (2, 3, 4):
        again.walk(*STEP, step=step)
    again.walk(("done", 0), step=4).ledger.close()
    ended(tmp_path, 25.0)
    require(tmp_path, start=8, data=4, compute=24, repeated=14)


def test_commands_add_up_without_the_time_between_them(tmp_path: Path) -> None:
    for command in (0.0, 500.0):
        Rank(tmp_path, 0, command, command=command).walk(
            ("init", 4), *STEP, ("done", 0)
        ).ledger.close()
    ended(tmp_path, 11.0)
    found = require(tmp_path, start=8, data=2, compute=12)
    assert (found.commands, found.wall_s) == (2, 22)


def test_a_rank_that_was_cut_off_and_its_successor_count_once(tmp_path: Path) -> None:
    """It trains on for 4 s beside the process that has its place already."""
    Rank(tmp_path, 0, 0).walk(("init", 4), *STEP, *STEP, ("data", 0))  # until 18 s
    # Until 27 s
    Rank(tmp_path, 0, 14, takes_over=True).walk(("init", 6), *STEP, ("done", 0)).ledger.close()
    ended(tmp_path, 27.0)
    found = accounts_of(tmp_path)
    assert found.total == pytest.approx(27)


def test_exposed_communication_comes_out_of_compute(tmp_path: Path) -> None:
    Rank(tmp_path, 0, 0).walk(("init", 0), *STEP, ("done", 0)).ledger.close()
    ended(tmp_path, 7.0)
    assert "was not measured" in accounts_of(tmp_path).verdict()
    (tmp_path / "comm").mkdir()
    steps = [{"collectives": [], "figures": {"step_ms": 4, "exposed_ms": ms}} for ms in (1, 3)]
    (tmp_path / "comm" / "steps.jsonl").write_text(
        "".join(json.dumps(step) + "\n" for step in steps)
    )
    found = require(tmp_path, data=1, compute=2.5, exposed_communication=3.5)
    assert "dominated by communication: 35.7 % compute, 50.0 % exposed" in found.verdict()


def test_without_a_ledger_the_remedy_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="has no ledger; give the folder of a run"):
        accounts_of(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "run.json").write_text("{}")
    # Its process died while it opened the file
    (tmp_path / "logs" / "rank0.1-0-9.ledger").write_bytes(bytes(8))
    assert accounts.main([str(tmp_path)]) == 2
    Rank(tmp_path, 0, 0).walk(("init", 1), *STEP, ("done", 1)).ledger.close()
    assert accounts.main([str(tmp_path)]) == 0
    assert "1 rank(s) x 9.0 s = 9.0 rank-seconds" in capsys.readouterr().out


def test_the_documentation_has_each_account() -> None:
    page = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    ledger = page.partition("\n## The ledger\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (.+) \|$", ledger, re.M)
    assert [(name, what.replace("`", "")) for name, what in rows[1:]] == [
        *accounts.MEANINGS.items()
    ]
