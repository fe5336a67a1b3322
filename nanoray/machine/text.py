"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def short(value: float, gap: str = "") -> str:
    """Write 32100 as 32.1k; `gap` stands before the prefix."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{gap}{prefix}"
    return f"{value:.3g}"


def parameters(count: int) -> str:
    """Write 27 parameters as they are, and 10,745,088 as 10.75 M parameters."""
    return f"{count / 1e6:.2f} M parameters" if count >= 10_000 else f"{count:,} parameters"


def clock(seconds: float) -> str:
    """Write 61.2 seconds as 1:01, and 3,700 as 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return a line for each row, each column as wide as its widest cell.

    The columns in `right` are numbers, which end below each other.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if column in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines
