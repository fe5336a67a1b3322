"""Tables that a benchmark declares, in the terminal and on a page; parts that end early."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace

import pytest

from nanoray.bench.harness.benchmark import Number, part, read_numbers
from nanoray.bench.harness.rank_pool import RankFailed
from nanoray.bench.harness.report import Measurement, Report
from nanoray.bench.harness.table import (
    SPREAD,
    Table,
    TableColumn,
    count_of_rounds,
    names,
    wrong_of,
)
from nanoray.errors import ConfigError

BASE = Measurement("base", "step", "ms", (2.0, 4.0, 6.0), wrong=0)
SLOW = Measurement("slow", "step", "ms", (4.0, 8.0, 15.0), wrong=2)
BROKEN = Measurement("broken", "step", "ms", (), error="it died")


def report() -> Report:
    found = Report("made up", {}, [BASE, SLOW, BROKEN])
    found.compare("slow", "base", "step")
    return found


def test_a_line_per_arm_with_its_spread_its_ratio_and_what_failed() -> None:
    table = Table(
        "step",
        (
            names("arm"),
            TableColumn("step, ms", "step", SPREAD),
            TableColumn("/ base", "step", over="base"),
            count_of_rounds("step"),
            wrong_of("step"),
        ),
    )
    assert table.format_text(report()) == [
        "arm             step, ms  / base  n  wrong",
        "base    4.00 (2.00–6.00)          3      0",
        "slow    8.00 (4.00–15.0)    2.00  3      2",
        "broken            FAILED          0",
    ]
    page = table.format_page(report())
    assert page[2] == "| base | 4.00 (2.00–6.00) |  | 3 | 0 |"
    assert page[4] == "| broken | FAILED |  | 0 |  |"


def test_an_optional_column_without_a_value_is_left_out() -> None:
    columns = (
        names("arm"),
        TableColumn("step", "step"),
        TableColumn("loss", "loss", optional=True),
        TableColumn("loss, always", "loss"),
    )
    table = Table(lambda report: ["base"], columns, missing="·")
    assert table.format_text(report())[0] == "arm   step  loss, always"
    assert table.format_page(report())[0] == "| arm | step | loss, always |"
    assert table.format_page(report())[2] == "| base | 4.00 | · |"


def test_an_optional_column_stays_where_a_row_was_skipped() -> None:
    found = report()
    table = Table("step", (names("arm"), TableColumn("loss", "loss", optional=True)))
    assert table.format_page(found)[0] == "| arm |"
    found.rows.append(Measurement("base", "loss", "nat", (), skipped="not logged"))
    assert table.format_page(found)[0] == "| arm | loss |"


def test_a_table_without_a_line_is_no_table() -> None:
    assert Table("loss", (names("arm"),)).format_text(report()) == []
    assert Table("loss", (names("arm"),)).format_page(report()) == []


@pytest.mark.parametrize("ending", [RankFailed(1, "rank 1 died"), KeyboardInterrupt()])
def test_a_part_that_ends_early_keeps_its_rounds(ending: BaseException) -> None:
    """A rank that fails ends its part; an interruption ends the benchmark, but after its rows."""
    found = Report("made up", {})
    values: list[float] = []

    def measure() -> None:
        with part(found, lambda: found.rows.append(replace(BASE, values=tuple(values)))):
            values.append(1.0)
            raise ending

    if isinstance(ending, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            measure()
        assert found.failures == []
    else:
        measure()
        assert found.failures == ["rank 1 died"]
    assert found.rounds == 1


def test_numbers_come_from_their_flags_or_from_quick() -> None:
    numbers = (
        Number("rounds", "of all", usual=10, few=2),
        Number("steps", "of a round", 4),
        Number("window_s", "of a round", 0.5, zero=True),
    )
    parser = argparse.ArgumentParser()
    for number in numbers:
        number.add_to(parser)
    args = parser.parse_args(["--window_s", "0"])
    args.quick = True
    read_numbers(args, numbers)
    assert (args.rounds, args.steps, args.window_s) == (2, 4, 0.0)
    args = parser.parse_args(["--steps", "7"])
    args.quick = False
    read_numbers(args, numbers)
    assert (args.rounds, args.steps, args.window_s) == (10, 7, 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "rounds = 0; give a number above 0, or leave it out for 10"),
        (-1.5, "rounds = -1.5; give a number above 0"),
        (math.nan, "rounds = nan; give a number above 0"),
    ],
)
def test_a_number_that_cannot_be_is_refused(given: float, message: str) -> None:
    args = argparse.Namespace(rounds=given, quick=False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_numbers(args, (Number("rounds", "of all", 10),))
