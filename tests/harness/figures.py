"""Hold the measured figures of the pages against the committed JSON files of docs/results.

A comment that no reader sees follows a figure and names its place in a file:

    0.26 s<!-- recovery-cpu: spare standstill -->          the median of the row of arm and metric
    n = 5<!-- train-cpu: ray step, n -->                   another key of the row
    3.3 (3.2–3.4)<!-- train-cpu: ray step, range -->       median, min and max; see STATISTICS
    0.5 MB<!-- f: {all bytes} / 1000000 -->                arithmetic, from left to right
    2026-11-26<!-- recovery-cpu: date -->                  the day on which the file was measured
    1.716<!-- moe-cpu: val_loss.2000 -->                   in a file without rows: keys, joined by dots
    0.94, aimed at 0.95<!-- step-cpu: missed TARGET -->    a target that the file says was missed
    6 of 14<!-- layouts-cpu: missed error of ... -->       how many of the targets that begin so

Figures are compared as they are printed: with as many decimals. A table stands between
`<!-- begin: python -m MODULE ARGUMENTS -->` and `<!-- end -->`, and is what the module's `main`
prints; this one prints the tables of a file (`recovery-cpu`), or some of them (`recovery-cpu 0 2`).

A date or a number with a unit that was not measured has one of REASONS behind it, on the same line:
`30 s<!-- setting -->`. It covers the numbers since the comment before it.

`python -m tests.harness.figures` writes all of them anew; tests/unit/test_figures.py fails where a
page and a file differ.
"""

from __future__ import annotations

import io
import json
import operator
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.report import Measurement, Report
from nanoray.bench.registry import BENCHMARKS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"

# But for the comments that begin a table, and those that name the tests of a promise
MARKER = re.compile(r"<!-- (?!begin:|tests:)([\w-]+): (.+?) -->")
BLOCK = re.compile(r"<!-- begin: python -m (.+?) -->\n(.*?)\n<!-- end -->", re.DOTALL)
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
NOT_TEXT = re.compile(r"<!--.*?-->|\]\([^)\s]*\)")  # its digits are no figures
FIGURE = re.compile(
    r"\d{4}-\d\d-\d\d|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e-\d+)?|\bnone\b"
)
# What the last word of a marker asks for, in the order of the numbers before it
STATISTICS = {
    "range": ("median", "min", "max"),
    "quartiles": ("median", "lower_quartile", "upper_quartile"),
    "extremes": ("min", "max"),
    "middle": ("lower_quartile", "upper_quartile"),
}
# Why a number with a unit names no file
REASONS = {
    "setting": "a flag, a key, a manifest, a limit or the size of what was measured says so",
    "arithmetic": "it follows from other numbers or from a formula; nothing was measured",
    "tried": "the day on which something was tried, without a figure",
}
COMMENT = re.compile(r"<!-- (.+?) -->")
IN_CODE = re.compile(r"`[^`\n]*`")
# What makes a number a quantity, a ratio, or the time of one: `unmarked` wants a source for it
UNITS = (
    "%",
    r"×(?! ?(?:\d|dp|cp|tp|pp|ep|ranks))",  # a ratio, not the sizes of axes and tables
    "x(?= as )",
    "times(?= as | less| more)",
    r"(?:[nµum]?s|min|minutes?|seconds?|hours?)\b",
    r"(?:[kKMGT]i?B|[KMG]bit|Gb)(?:/s)?\b",
    r"(?:tok|tokens|steps?|[TG]FLOP)/s",
)
QUANTITY = re.compile(
    rf"(?<![\w.,])(?<!\d-)\d[\d,]*(?:\.\d+)? ?(?:{'|'.join(UNITS)})"
    r"|\d{4}-\d\d-\d\d|\d\.\de-\d\d"
    r"|(?<=\| )\d[\d,]*\.\d+(?= [(|])"  # alone in a table's cell, or with its spread
)
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


class UnknownPlace(Exception):
    """A marker names a file, a row or a key that does not exist."""


@dataclass(frozen=True)
class Figure:
    """A printed figure, where it stands in its page, and what its file has."""

    start: int
    end: int
    printed: str
    measured: str
    marker: str


# --- what a file has ---


@cache
def content_of(path: Path) -> dict[str, Any]:
    """Return a committed file. Raises UnknownPlace if there is none."""
    if not path.exists():
        raise UnknownPlace(f"there is no file docs/results/{path.name}")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@cache
def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a report with their statistics, by arm and metric."""
    found = {}
    for row in content_of(path).get("rows", []):
        name = f"{row['arm']} {row['metric']}"
        found[name] = row | Measurement.from_dict(row).to_dict()
        if row["values"]:
            found[name]["mean"] = statistics.fmean(row["values"])
    return found


def value_at(path: Path, place: str, statistic: str) -> float | str:
    """Return a statistic of a row, or what stands below keys that dots join.

    A place may end in the key of its row: "ray step, max" has another one than `statistic`.
    """
    rows = rows_of(path)
    name, _, key = place.rpartition(", ")
    found: Any = content_of(path)
    if place == "date":
        date: str = found.get("conditions", found)["date"]
        return date.split()[0]
    if place in rows:
        found, keys = rows[place], statistic
    elif name in rows:
        found, keys = rows[name], key
    else:
        keys = place
    for key in keys.split("."):
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise UnknownPlace(f"{path.name} has neither a row nor keys {place}") from error
    if not isinstance(found, int | float | str):
        raise UnknownPlace(f"{place} of {path.name} is no number")
    return found


def computed(path: Path, expression: str, statistic: str) -> float:
    """Return the value of such as "{ray step} / {plain step} * 100", from left to right."""
    total = 0.0
    operation = "+"
    for place, constant, sign in re.findall(r"\{(.+?)\}|([\d.]+)|([-+*/])", expression):
        if sign:
            operation = sign
            continue
        value = value_at(path, place, statistic) if place else constant
        total = OPERATIONS[operation](total, float(value))
    return total


def missed(path: Path, text: str) -> tuple[float, float]:
    """Return what was measured and what was aimed at, of a target that was missed.

    For the beginning of several targets' names and "...": how many were missed, and of how many.
    """
    targets = content_of(path).get("targets", [])
    if text.endswith("..."):
        begun = [t for t in targets if t["target"].startswith(text.removesuffix("..."))]
        return sum(target["verdict"] == "MISSED" for target in begun), len(begun)
    for target in targets:
        if target["target"] == text:
            if target["verdict"] != "MISSED":
                raise UnknownPlace(f"{path.name}: {text} is not missed: {target['verdict']}")
            return target["measured"], target["limit"]
    raise UnknownPlace(f"{path.name} has no target {text}")


def values(name: str, place: str, results: Path = RESULTS) -> list[float | str]:
    """Return the values that a marker stands for, in the order in which the page has them."""
    path = results / f"{name}.json"
    if place.startswith("missed "):
        return list(missed(path, place.removeprefix("missed ")))
    what, _, last = place.rpartition(", ")
    if last in STATISTICS:
        wanted = STATISTICS[last]
    else:
        what, wanted = place, ("median",)
    if "{" in what:
        return [computed(path, what, statistic) for statistic in wanted]
    return [value_at(path, what, statistic) for statistic in wanted]


def as_printed(value: float | str, like: str) -> str:
    """Write a value with the decimals and the commas of the figure that stands there."""
    if isinstance(value, str):
        return value
    if like == "none":
        return like if value == 0 else f"{value:g}"
    decimals = len(like.partition("e")[0].partition(".")[2])
    if "e" in like:
        return f"{value:.{decimals}e}"
    return f"{value:,.{decimals}f}" if "," in like else f"{value:.{decimals}f}"


# --- what a page has ---


def pages() -> list[Path]:
    """Return every page of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def blanked(text: str, pattern: re.Pattern[str]) -> str:
    """Return the text with spaces in place of what matches, so that places stay the same."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def figures(text: str, results: Path = RESULTS) -> Iterator[Figure]:
    """Return the figures of a page that have a marker. Raises UnknownPlace."""
    readable = blanked(text, NOT_TEXT)
    last_end = 0
    for marker in MARKER.finditer(blanked(text, FENCE)):
        name, place = marker.groups()
        # They stand in the marker's paragraph, behind the marker before it
        begin = max(last_end, text.rfind("\n\n", 0, marker.start()))
        found = list(FIGURE.finditer(readable, begin, marker.start()))
        wanted = values(name, place, results)
        if len(found) < len(wanted):
            raise UnknownPlace(f"{len(wanted)} figures are missing before {marker[0]}")
        for figure, value in zip(found[-len(wanted) :], wanted, strict=True):
            measured = as_printed(value, figure[0])
            yield Figure(figure.start(), figure.end(), figure[0], measured, marker[0])
        last_end = marker.end()


@cache
def printed_by(command: str) -> str:
    """Return what the `main` of a module of this repository prints, such as a table."""
    module, *arguments = command.split()
    output = io.StringIO()
    with redirect_stdout(output):
        code = import_module(module).main(arguments)
    if code:
        raise UnknownPlace(f"python -m {command} failed with exit code {code}")
    return output.getvalue().rstrip("\n")


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def problems(text: str, results: Path = RESULTS) -> list[str]:
    """Return what differs between a page and the files, a line each."""
    found = []
    try:
        for figure in figures(text, results):
            if figure.printed != figure.measured:
                found.append(
                    f"line {line_of(text, figure.start)}: {figure.printed} stands where "
                    f"{figure.measured} was measured {figure.marker}"
                )
        for block in BLOCK.finditer(text):
            if block[2] != printed_by(block[1]):
                found.append(
                    f"line {line_of(text, block.start())}: not what python -m {block[1]} prints"
                )
    except UnknownPlace as error:
        found.append(str(error))
    return found


def unmarked(text: str, results: Path = RESULTS) -> Iterator[re.Match[str]]:
    """Return the numbers with a unit that have neither a marker nor a reason.

    Not those in code, which are commands, settings and what a command printed, nor those of tables
    that a command writes.
    """
    measured = {figure.start for figure in figures(text, results)}
    readable = text
    for pattern in (FENCE, BLOCK, IN_CODE, NOT_TEXT):
        readable = blanked(readable, pattern)
    for quantity in QUANTITY.finditer(readable):
        line_end = text.find("\n", quantity.end())
        comment = COMMENT.search(text, quantity.end(), line_end if line_end >= 0 else len(text))
        has_reason = comment is not None and comment[1] in REASONS
        if quantity.start() not in measured and not has_reason:
            yield quantity


def renewed(text: str) -> str:
    """Return a page with its tables and figures as the files have them."""
    for block in reversed(list(BLOCK.finditer(text))):
        text = text[: block.start(2)] + printed_by(block[1]) + text[block.end(2) :]
    for figure in reversed(list(figures(text))):
        text = text[: figure.start] + figure.measured + text[figure.end :]
    return text


# --- the tables of a file ---


def benchmark_named(name: str) -> Benchmark:
    """Return a benchmark, also one of the tests and of the examples."""
    from examples.speedrun.benchmark import ENTRY
    from tests.stress.__main__ import JUDGES

    return (BENCHMARKS | JUDGES | {"speedrun": ENTRY})[name].load()


def tables(name: str) -> list[str]:
    """Return the tables that the benchmark of a file makes of it."""
    report = Report.read(RESULTS / f"{name}.json")
    text = "\n".join(benchmark_named(report.bench).format_markdown(report))
    return [part for part in text.split("\n\n") if part.startswith("|")]


def main(argv: list[str]) -> int:
    """Print the tables of the file that the arguments name; without one, renew all pages."""
    if argv:
        name, *numbers = argv
        chosen = tables(name)
        if numbers:
            chosen = [chosen[int(number)] for number in numbers]
        print("\n\n".join(chosen))
        return 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            new = renewed(text)
        except UnknownPlace as error:
            print(f"{page.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 1
        if new != text:
            page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
