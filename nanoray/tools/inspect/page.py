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
    verified = description["verify"]
    measured = text.measured(verified) if verified else []
    compared = description["against"]
    apart = text.apart(compared) if compared else []

    # The bars are drawn relative to the module that keeps most; `or 1` avoids a division by 0.
    most = max((row["kept"] for row in description["modules"]), default=0)
    return render(
        Path(__file__).with_name("inspect.html.j2"),
        title=description["subject"],
        description=description,
        figures=text.figures_of(description),
        same=text.alike(description["modules"]),
        flops=text.flops,
        size=text.size,
        shapes=text.shapes,
        owners=text.owners(description),
        most=most or 1,
        memory=drawn_memory(description.get("memory_timeline") or ()),
        columns=COLUMNS,
        verified=verified,
        measured=measured,
        compared=compared,
        apart=apart,
    )
