"""The helper by which tests compare messages: key words in order, each one a whole word."""

from __future__ import annotations

import pytest

from tests.harness.messages import find_line

LOG = "step 1 · rank 0\nstep 12 · rank 1 differs (loss is 2.5 there and 2.4 here)\n"


def test_the_line_with_the_words_is_returned() -> None:
    line = find_line(LOG, "step 12", "rank 1", "2.5 there", "2.4 here")
    assert line == LOG.splitlines()[1]


@pytest.mark.parametrize(
    "words",
    [("step 2",), ("step 1", "rank 1"), ("rank 1", "step 12"), ("step 12", "2.4 there")],
    ids=["part of a word", "another line", "another order", "another value"],
)
def test_without_such_a_line_it_fails(words: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="no line has"):
        find_line(LOG, *words)
