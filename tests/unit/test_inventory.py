"""What users have is what the committed list has (tests/harness/inventory.py)."""

from __future__ import annotations

import difflib

from tests.harness import inventory


def test_nothing_that_users_have_comes_or_goes_without_a_line() -> None:
    committed = inventory.LIST.read_text(encoding="utf-8").splitlines()
    differ = difflib.unified_diff(
        committed, inventory.lines(), "committed", "today", n=0, lineterm=""
    )
    lines = "\n".join(differ)
    assert not lines, (
        f"is each wanted? `python -m tests.harness.inventory` prints the list\n{lines}"
    )
