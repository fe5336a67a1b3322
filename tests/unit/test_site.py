"""The website, as a reader without network and without server sees it, on a screen and on a phone."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.harness.browser import Tab, browser, in_chromium

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1280, 400)
TABLES = ".md-typeset__scrollwrap"  # the box in which the theme puts each table
# Pages of code are made alike, so one of each kind stands for all.
OF_CODE = ("source/nanoray/train/engine.py.html", "source/nanoray/topologies/index.html")

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


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


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


def test_a_wrong_link_of_the_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="x"></h1><a href="#x"></a><a href="b.html#y"></a><a href="https://x.org"></a>'
        '<a href="c.html"></a><a href="a.html#z"></a><script src="https://x.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="y"></p>')
    wrong = ["a.html: c.html", "a.html: a.html#z", "a.html: https://x.org/x.js"]
    assert wrong_links(tmp_path) == wrong


def show(tab: Tab, page: Path, width: int) -> None:
    """Open a page, and wait until the theme's script has put its tables into boxes."""
    tab.open(page.as_uri(), width=width)
    tab.wait_for(
        f"location.href == {json.dumps(page.as_uri())} && document.readyState == 'complete'"
        f" && document.querySelectorAll('table').length"
        f" == document.querySelectorAll('{TABLES} table, .highlighttable').length",
        pause_s=0.02,
    )


def too_wide(tab: Tab, page: Path) -> list[str]:
    """Return what of a page is wider than the window, at each of WIDTHS.

    A table of many numbers may scroll in its own box on a phone, but not on a screen.
    """
    found = []
    for width in WIDTHS:
        if width == WIDTHS[0]:
            show(tab, page, width)
        else:
            tab.resize(width)
        for name, elements in (
            ("page", "[document.documentElement]"),
            ("table", f"[...document.querySelectorAll('{TABLES}')]"),
        ):
            if name == "table" and width < 1000:
                continue
            count = tab.evaluate(
                f"{elements}.filter(box => box.scrollWidth > box.clientWidth + 1).length"
            )
            if count:
                found.append(f"{name} at {width}")
    return found


@pytest.mark.full
@in_chromium
def test_no_page_scrolls_to_the_side(site: Path, tab: Tab) -> None:
    """On a screen and on a phone, each document; and each kind of page with code."""
    pages = [path for path in site.rglob("*.html") if "source" not in path.relative_to(site).parts]
    assert len(pages) > 30
    found = {}
    for page in (*pages, *(site / name for name in OF_CODE)):
        wide = too_wide(tab, page)
        if wide:
            found[page.relative_to(site).as_posix()] = wide
        loaded = tab.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert [url for url in loaded if not url.startswith("file:")] == [], page
    assert found == {}


@in_chromium
@pytest.mark.full
def test_what_is_too_wide_is_found(site: Path, tab: Tab, tmp_path: Path) -> None:
    """A picture that is wider than the phone, and a table that is wider than the screen."""
    html = (site / "gpu.html").read_text(encoding="utf-8")
    base = f'<base href="{site.as_uri()}/">'
    for planted, expected in (
        ('<p style="width: 600px">x</p>', ["page at 400"]),
        (f"<table><tr><td>{'x' * 300}</td></tr></table>", ["table at 1280"]),
    ):
        page = tmp_path / "page.html"
        planted_html = html.replace("<head>", f"<head>{base}").replace(
            "</h1>", f"</h1>{planted}", 1
        )
        page.write_text(planted_html, encoding="utf-8")
        assert too_wide(tab, page) == expected


@pytest.mark.full
@in_chromium
def test_search_works_without_a_server(site: Path, tab: Tab) -> None:
    """Also from a page in a folder. Pages of code are no hits."""
    show(tab, site / "course" / "1-one-process.html", 1280)
    tab.evaluate("document.querySelector('.md-search__button').click()")
    tab.wait_for("document.activeElement.shadowRoot?.querySelector('input')")
    tab.call("Input.insertText", text="hang_timeout")
    hits = (
        "[...document.activeElement.shadowRoot.querySelectorAll('a')].map(hit => hit.href)"
        ".filter(url => url.includes('hang_timeout'))"
    )
    found = tab.wait_for(f"({hits}).length > 3 && ({hits})")
    pages = {Path(unquote(urlsplit(url).path)) for url in found}
    assert all(page.is_file() for page in pages)
    assert site / "reliability" / "every-fault.html" in pages
    assert not any("source" in page.parts for page in pages)


@in_chromium
def test_a_reader_chooses_colours_and_a_phone_has_a_menu(site: Path, tab: Tab) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    colours = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        tab.call("Emulation.setEmulatedMedia", features=features)
        show(tab, site / "readme.html", 400)
        rgb = tab.evaluate(f"{background}.match(/[0-9]+/g).map(Number)")
        colours.append(sum(rgb[:3]))
    assert colours[0] > 600
    assert colours[1] < 200

    # The menu slides in from the left, where it cannot be seen before.
    left = "document.querySelector('.md-sidebar--primary').getBoundingClientRect().left"
    assert tab.evaluate(left) < 0
    tab.evaluate("document.querySelector('label[for=__drawer]').click()")
    tab.wait_for(f"{left} >= 0")
    assert tab.evaluate("document.querySelectorAll('.md-code__button').length") > 0, "copy buttons"


@in_chromium
@pytest.mark.full  # 2 s for each picture; NANORAY_TEST_PICTURES=FOLDER keeps them, to be looked at
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_of_pages(site: Path, tab: Tab, width: int, scheme: str) -> None:
    """Something is painted on the start page and on the pages with the widest tables."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    tab.call("Emulation.setEmulatedMedia", features=features)
    for name in ("index", "coming-from", "flags", "parallelism", "api"):
        show(tab, site / f"{name}.html", width)
        tab.evaluate("document.querySelector('table').scrollIntoView({block: 'center'})")
        tab.picture(f"site-{name}-{width}-{scheme}")
