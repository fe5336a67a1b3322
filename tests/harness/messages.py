"""Compare messages by their key words and values, so that their prose can change."""

from __future__ import annotations

import re


def find_line(text: str, *words: str) -> str:
    """Return the first line of `text` that contains these words in this order.

    A word is matched as a whole: "step 1" is not found in "step 12". Fails if there is no line.
    """
    pattern = ".*".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words)
    for line in text.splitlines():
        if re.search(pattern, line):
            return line
    raise AssertionError(f"no line has {', '.join(words)} in this order:\n{text}")
