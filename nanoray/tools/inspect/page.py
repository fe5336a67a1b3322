"""The dump as one HTML page, in the style of `nanoray report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanoray.tools.inspect import text
from nanoray.tools.report.charts import drawn_memory
from nanoray.tools.report.html import render
from nanoray.tools.report.memory import COLUMNS


def page(description: dict[str, Any]) -> str:
    """Return the page. It loads nothing and runs no script; texts are escaped."""
    return render(
        Path(__file__).with_name("inspect.html.j2"),
        title=description["subject"],
        description=description,
        text=text,  # tables and units as the lines have them
        memory=drawn_memory(description["memory_timeline"]),
        columns=COLUMNS,
    )
