"""A real browser, for pages that nanoray writes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench.harness.processes import Child
from tests.harness.cluster import end_session, ends_with_tests

CHROMIUM = shutil.which("chromium")
in_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium on the PATH: apt-get install chromium"
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
# All text of a page, with that of web components.
TEXT = """(function text(node) {
  if (node.nodeType === 3) return node.textContent + "\\n";
  if (["STYLE", "SCRIPT", "TEMPLATE"].includes(node.nodeName)) return "";
  return [...node.childNodes, ...(node.shadowRoot ? [node.shadowRoot] : [])].map(text).join("");
})(document)"""


def chromium(page: Path, *flags: str) -> str:
    """Open the page and return what the browser prints; it and its helpers end with the call."""
    argv = [
        CHROMIUM or "",
        *FLAGS,
        f"--user-data-dir={page.parent / 'profile'}",
        *flags,
        page.as_uri(),
    ]
    log = page.with_suffix(".log")
    with Child(argv, os.environ | {"HOME": str(page.parent)}, log) as browser:
        browser.wait(300)
    return log.read_text()


def require_width(page: Path, width: int) -> None:
    """In a frame of that width nothing of the page is wider: it scrolls down only."""
    probe = page.with_name("probe.html")
    probe.write_text(
        f'<iframe src="{page.name}" style="width:{width}px;height:900px;border:0" '
        'onload="document.title = '
        "this.contentDocument.documentElement.scrollWidth + ' of ' + this.clientWidth\"></iframe>"
    )
    shown = chromium(probe, "--allow-file-access-from-files", "--dump-dom")
    found = re.search(r"<title>(\d+) of (\d+)</title>", shown)
    assert found, shown[:500]
    assert int(found[1]) <= int(found[2]) == width


class Tab:
    """A tab of a running browser, driven by the DevTools protocol over two pipes. A page may take
    its time.
    """

    def __init__(self, commands: int, answers: int) -> None:
        """`commands` and `answers` are file descriptors: of what the browser reads and of what it
        writes.
        """
        self._commands, self._answers, self._read, self._number = commands, answers, b"", 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._answers], [], [], 60.0)[0], "the browser does not answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in JavaScript."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, url: str, width: int = 1280, height: int = 800) -> None:
        """Go to an address, in a window of that size."""
        self.resize(width, height)
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int = 800) -> None:
        """Give the window another size; the page is laid out anew."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    @property
    def text(self) -> str:
        """All text of the page."""
        return str(self.evaluate(TEXT))

    def wait_for(self, script: str, seconds: float = 60.0, pause_s: float = 0.2) -> Any:
        """Wait until an expression is true, and return its value. Raises AssertionError with the
        page's text.

        pause_s: seconds between two questions.
        """
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > end:
                shown = "\n".join(line for line in self.text.splitlines() if line.strip())
                raise AssertionError(f"not true after {seconds:g} s: {script}\n{shown}")
            time.sleep(pause_s)
        return value


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start a browser that keeps its files in `folder`; it and its helpers end with the block."""
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    argv = [
        CHROMIUM or "",
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        "--remote-debugging-pipe",
    ]
    # It reads commands from descriptor 3 and writes answers to 4.
    shell = [
        "bash",
        "-c",
        f'exec "$@" 3<&{read_commands} 4>&{write_answers}',
        "bash",
        *argv,
        "about:blank",
    ]
    with (folder / "browser.log").open("w") as log:
        process = subprocess.Popen(
            shell,
            env=os.environ | {"HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(read_commands, write_answers),
            start_new_session=True,
            preexec_fn=ends_with_tests,
        )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Tab(commands, answers)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        end_session(process)
        os.close(commands)
        os.close(answers)
