"""A real browser, for pages that nanoray writes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from nanoray.bench.harness.processes import Child

CHROMIUM = shutil.which("chromium")
in_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH: apt-get install chromium")


def chromium(page: Path, *flags: str) -> str:
    """Open the page and return what the browser prints; it and its helpers end with the call."""
    argv = [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    argv += [f"--user-data-dir={page.parent / 'profile'}", *flags, page.as_uri()]
    log = page.with_suffix(".log")
    with Child(argv, os.environ | {"HOME": str(page.parent)}, log) as browser:
        browser.wait(300)
    return log.read_text()


def require_width(page: Path, width: int) -> None:
    """In a frame of that width nothing of the page is wider: it scrolls down only."""
    probe = page.with_name("probe.html")
    probe.write_text(
        f'<iframe src="{page.name}" style="width:{width}px;height:900px;border:0" onload="document.title = '
        "this.contentDocument.documentElement.scrollWidth + ' of ' + this.clientWidth\"></iframe>"
    )
    shown = chromium(probe, "--allow-file-access-from-files", "--dump-dom")
    found = re.search(r"<title>(\d+) of (\d+)</title>", shown)
    assert found, shown[:500]
    assert int(found[1]) <= int(found[2]) == width
