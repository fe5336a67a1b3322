"""Every measured figure of the pages is the one in the committed JSON (tests/harness/figures.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import figures
from tests.harness.figures import (
    MARKER,
    REASONS,
    RESULTS,
    ROOT,
    line_of,
    pages,
    problems,
    unmarked,
)

PAGES = {page.relative_to(ROOT).as_posix(): page for page in pages()}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
RENEW = "`make docs` writes the figures anew; read the sentences around them"


@pytest.mark.parametrize("name", PAGES)
def test_the_figures_of_a_page_are_those_of_the_files(name: str) -> None:
    assert problems(TEXTS[name]) == [], RENEW


def files_of_tables(text: str) -> set[str]:
    """Return the names of the files of which a page has a table."""
    found = set(re.findall(r"begin: python -m tests\.harness\.figures ([\w-]+)", text))
    if "begin: python -m tests.harness.versions" in text:
        found.add("versions")
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_leads_to_the_files_of_its_tables_and_has_a_figure_of_each_file(name: str) -> None:
    text = TEXTS[name]
    linked = set(re.findall(r"\]\([^)]*\bresults/([\w-]+)\.json\)", text))
    quoted = {marker[0] for marker in MARKER.findall(text)}
    assert files_of_tables(text) - linked == set(), "a reader wants command, machine and date"
    assert linked - quoted - files_of_tables(text) == set(), "give the figures of it a marker"


def missed_targets(results: Path = RESULTS) -> set[str]:
    """Return the targets that the files say were missed, as a marker names them."""
    found = set()
    for path in results.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        for target in content.get("targets", []):
            if target["verdict"] == "MISSED":
                found.add(f"{path.stem}: missed {target['target']}")
    return found


def unsaid(missed: set[str], texts: list[str]) -> set[str]:
    """Return the missed targets that no page says, by their names or by how several begin."""
    said = {f"{name}: {place}" for text in texts for name, place in MARKER.findall(text)}
    beginnings = tuple(place.removesuffix("...") for place in said if place.endswith("..."))
    return {target for target in missed - said if not target.startswith(beginnings)}


def test_every_missed_target_is_said_on_a_page() -> None:
    assert unsaid(missed_targets(), list(TEXTS.values())) == set()


# Written by `make docs` from the sources, whose numbers are settings; what the project is and was
WITHOUT_FIGURES = {
    "docs/metrics.md",
    "docs/flags.md",
    "docs/errors.md",
    "docs/api.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
}


@pytest.mark.parametrize("name", [name for name in PAGES if name not in WITHOUT_FIGURES])
def test_a_number_with_a_unit_names_its_file_or_says_why_not(name: str) -> None:
    text = TEXTS[name]
    found = [f"line {line_of(text, m.start())}: {m[0]}" for m in unmarked(text)]
    assert found == [], f"a marker, or one of {', '.join(REASONS)}: tests/harness/figures.py"


# A time or a share that a comment claims to have been measured; no file and no test would hold it
CLAIM = re.compile(
    r"\b(took|takes|costs?|saves|faster|slower)\b[^.;\n]{0,40}?\b\d+(\.\d+)? ?(ms|µs|us|s|%|×)(?!\w)"
    r"|\b\d+(\.\d+)? ?(%|×) (as )?(faster|slower|fast|slow)\b"
)


def claims(source: str) -> list[str]:
    """Return the figures of measurements in a file of Python, as they stand in comments."""
    prose = re.findall(r"#[^\n]*|\"\"\".*?\"\"\"", source, re.DOTALL | re.M)
    lines = [line for text in prose for line in text.splitlines()]
    return [line.strip() for line in lines if CLAIM.search(line)]


def test_a_comment_has_no_measured_figure() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sorted((ROOT / "nanoray").rglob("*.py"))
        if (lines := claims(path.read_text(encoding="utf-8")))
    }
    assert found == {}, "a figure belongs on a page, behind a marker"
    assert claims("# It takes 9 µs for a sample.\nx = 1  # 6 % faster\n") != []
    assert claims("x = 5 * 2  # S3 takes parts of 5 MiB; it waits 20 s\n") == []


# --- planted mistakes ---


def write_results(
    folder: Path, values: Sequence[float] = (0.247, 0.257, 0.277), measured: float = 0.257
) -> None:
    """Write a small file of a benchmark, r.json."""
    row = {"arm": "spare", "metric": "standstill", "unit": "s", "values": values, "note": ""}
    other = row | {"arm": "restart", "values": [3.0, 3.2, 3.4]}
    target = {"target": "spare, standstill", "verdict": "MISSED"}
    target |= {"measured": measured, "limit": 0.2}
    met = target | {"target": "restart", "verdict": "ok"}
    conditions = {"date": "2026-11-26 10:00 UTC", "load": {"before": 1}}
    content = {"conditions": conditions, "rows": [row, other], "targets": [target, met]}
    (folder / "r.json").write_text(json.dumps(content))


TRUE = [
    "0.26 s<!-- r: spare standstill -->",
    "**0.26** s (0.247 to 0.277)<!-- r: spare standstill, range -->",
    "n = 3<!-- r: spare standstill, n -->, at most 0.277<!-- r: spare standstill, max -->",
    "257 ms<!-- r: {spare standstill} * 1000 -->, 2.57e-01<!-- r: spare standstill -->",
    "12.5 x<!-- r: {restart standstill} / {spare standstill} -->",
    "92 % less<!-- r: {restart standstill} - {spare standstill} / {restart standstill} * 100 -->",
    "on 2026-11-26<!-- r: date -->, load 1<!-- r: conditions.load.before -->",
    "0.26 where 0.2 was the aim<!-- r: missed spare, standstill -->",
    "1 of 1 was missed<!-- r: missed spare, ... -->",
    "| 0.26<!-- r: spare standstill --> | 3.2<!-- r: restart standstill --> |",
    "equal in 8 runs <!-- tests: unit/test_x.py::test_y -->, 0.26 s<!-- r: spare standstill -->",
]


@pytest.mark.parametrize("text", TRUE)
def test_a_figure_of_a_file_is_accepted(text: str, tmp_path: Path) -> None:
    write_results(tmp_path)
    assert problems(text, tmp_path) == []


@pytest.mark.parametrize("text", TRUE)
def test_each_changed_digit_of_a_page_is_found(text: str, tmp_path: Path) -> None:
    write_results(tmp_path)
    readable = re.sub(r"<!--.*?-->", lambda match: " " * len(match[0]), text)
    readable = readable.replace("8 runs", "  runs")  # no figure of the file
    for digit in re.finditer(r"\d", readable):
        changed = str((int(digit[0]) + 1) % 10)
        wrong = text[: digit.start()] + changed + text[digit.end() :]
        assert problems(wrong, tmp_path) != [], wrong


@pytest.mark.parametrize("text", [text for text in TRUE if "standstill" in text])
def test_a_changed_value_of_a_file_is_found(text: str, tmp_path: Path) -> None:
    write_results(tmp_path, values=(0.299, 0.312, 0.344, 0.345), measured=0.312)
    assert problems(text, tmp_path) != []


def test_a_changed_row_of_a_committed_file_is_found_in_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the recovery's file with another value, and the page with the table of the old one."""
    report = json.loads((RESULTS / "recovery-cpu.json").read_text(encoding="utf-8"))
    page = "<!-- begin: python -m tests.harness.figures recovery-cpu -->\n{}\n<!-- end -->"
    (tmp_path / "recovery-cpu.json").write_text(json.dumps(report))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.printed_by.cache_clear()
    page = page.format(figures.printed_by("tests.harness.figures recovery-cpu"))
    assert problems(page) == []
    row = next(row for row in report["rows"] if row["metric"] == "standstill")
    row["values"] = [2 * value for value in row["values"]]
    (tmp_path / "recovery-cpu.json").write_text(json.dumps(report))
    figures.printed_by.cache_clear()
    assert len(problems(page)) == 1
    figures.printed_by.cache_clear()


def test_a_missed_target_that_no_page_says_is_found(tmp_path: Path) -> None:
    write_results(tmp_path)
    missed = missed_targets(tmp_path)
    assert len(missed) == 1
    assert unsaid(missed, ["0.26 s<!-- r: spare standstill -->"]) == missed
    assert unsaid(missed, ["0.26, aim 0.2<!-- r: missed spare, standstill -->"]) == set()
    assert unsaid(missed, ["1 of 1<!-- r: missed spare, ... -->"]) == set()


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        ("s: spare standstill", "there is no file docs/results/s.json"),
        ("r: spare stands", "r.json has neither a row nor keys spare stands"),
        ("r: missed other", "r.json has no target other"),
        ("r: missed restart", "r.json: restart is not missed: ok"),
        ("r: spare standstill, range", "3 figures are missing before"),
    ],
)
def test_a_marker_that_leads_nowhere_is_found(marker: str, problem: str, tmp_path: Path) -> None:
    write_results(tmp_path)
    (found,) = problems(f"0.26 s<!-- {marker} -->", tmp_path)
    assert problem in found


@pytest.mark.parametrize(
    "text",
    [
        "It takes 0.3 s.",
        "measured on 2026-11-26, 1.5e-08 apart",
        "It takes 0.3 s<!-- r: spare standstill -->, at most 0.4 s.",
        "It takes 0.3 s, at most\n0.4 s<!-- setting -->.",
        "12,000 tokens/s, 5 % of it",
        "1.4 × as fast",
        "| first | 12.4 (11.6–13.8) |",
        "-3 %, 12 MiB",
    ],
)
def test_a_number_with_a_unit_and_without_a_source_is_found(text: str, tmp_path: Path) -> None:
    write_results(tmp_path)
    assert list(unmarked(text, tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "It takes 0.257 s<!-- r: spare standstill -->, at most 2 to 4 s<!-- setting -->.",
        "`--timeout_s 5 s` on dp 2 × tp 2, 2 × 339, Ray 2.60",
        "```\nfinished in 5.2 s\n```",
        "| 0.26<!-- r: spare standstill --> | [3.0 s](page.md)<!-- arithmetic --> |",
    ],
)
def test_a_number_with_a_source_or_a_reason_is_accepted(text: str, tmp_path: Path) -> None:
    write_results(tmp_path)
    assert not list(unmarked(text, tmp_path))
