"""Every measured figure of the pages is the one in the committed JSON (tests/harness/figures.py)."""

from __future__ import annotations

import json
import re
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
    return set(re.findall(r"begin: python -m tests\.harness\.figures ([\w-]+)", text))


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


# --- planted mistakes ---


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
