"""The website, as a reader without network and without server sees it, on a screen and on a phone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("zensical"),
    reason="zensical is not installed: pip install -e '.[docs]'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "docs/site/build.py", "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.strip()).is_file()
    return folder / "site"


class Page(HTMLParser):
    """Collects the anchors of a page, its links, and what a browser loads for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value or "")
            if name in ("href", "src"):
                target = self.links if tag == "a" else self.loaded
                target.append(value or "")


def wrong_links(site: Path) -> list[str]:
    """Return `PAGE: LINK` for each link without a target, and for what is loaded from elsewhere."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme:
                leads = link in page.links
            else:
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                leads = target.is_file()
                # The theme makes the target of its own anchors, __skip and others, by script.
                if leads and target in pages and not parts.fragment.startswith("__"):
                    leads = not parts.fragment or unquote(parts.fragment) in pages[target].anchors
            if not leads:
                wrong.append(f"{path.relative_to(site)}: {link}")
    return wrong


@pytest.mark.full
def test_each_link_leads_to_a_page_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert wrong_links(site) == []


@pytest.mark.full
def test_a_table_has_all_its_cells_and_no_backslash(site: Path) -> None:
    """A pipe in the code of a cell neither ends the cell nor keeps its backslash."""
    with_pipes = 0
    for path in site.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        for table in re.findall(r"<table>.*?</table>", html, re.DOTALL):
            assert "\\|" not in table, path
            rows = re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
            widths = {len(re.findall(r"<t[hd][ >]", row)) for row in rows}
            assert len(widths) == 1, (path, rows[0])
            with_pipes += "|" in table
    assert with_pipes > 2
