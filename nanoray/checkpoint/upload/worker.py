"""The process that sends a run to object storage: `python -m nanoray.checkpoint.upload.worker URL`.

It is started by the process that opens the run (process.py), and ends with it. So neither Python's
lock nor the memory of training is shared with the upload.

    stdin   {"run": FOLDER, "started": ..., "attempt": ...}    then  {"end": true}
    stdout  {"ready": true} | {"refused": TEXT} | {"unanswered": TEXT}
            {"line": TEXT}   {"sent": [CHECKPOINT, ...]}   {"bytes": N}   {"done": true}   {"over": true}
            {"failed": TEXT}, "" when it works again
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nanoray.base.atomic import write_whole
from nanoray.base.storage.store import StorageError, Store
from nanoray.base.storage.url import join, scrub
from nanoray.checkpoint.manifest import Damage
from nanoray.checkpoint.run import read_attempt
from nanoray.checkpoint.upload.records import HOLD, release
from nanoray.checkpoint.upload.records import LOOK_S as RECORDS_LOOK_S
from nanoray.checkpoint.upload.sender import NotAllowed, Removed, RunSender
from nanoray.errors import CheckpointError

NICE = 19
LOOK_S = 1.0  # between two looks at the run's folder
BACK_OFF_S = 60.0  # the longest pause after failures in a row
BACK_OFF_END_S = 2.0  # and when the run has ended
LOG = "logs/upload.log"


def main(argv: list[str] | None = None) -> int:
    """Run the process; its exit code has no meaning."""
    (url,) = sys.argv[1:] if argv is None else argv
    yield_to_training()
    orders = Orders()
    try:
        store = Store(url)
        store.probe()
    except StorageError as error:
        orders.report("refused" if error.refused else "unanswered", str(error))
        if error.refused:
            return 0
    else:
        orders.report("ready", True)

    order = orders.wait(None)
    if order is None or "run" not in order:
        return 0
    UploadWorker(orders, order, url).work()
    return 0


def yield_to_training() -> None:
    """Give every other process precedence, for the CPU and when memory is short."""
    with suppress(OSError):
        os.nice(NICE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800\n")


class Orders:
    """The pipes to the process that has started this one. When that ends, so does this one."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        # What a library prints must not be taken for a report.
        os.dup2(2, 1)
        self._text = b""
        self._lines: list[dict[str, Any]] = []
        self._wake, self._written = os.pipe()
        self.at_end: Callable[[], None] = lambda: None  # called when the parent has ended
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Read orders; end this process at once with its parent, also in the middle of a part."""
        parent = os.getppid()
        while True:
            readable, _, _ = select.select([0], [], [], LOOK_S)
            data = os.read(0, 1 << 16) if readable else b""
            # A process that the parent has forked may still have the pipe open.
            if (readable and not data) or os.getppid() != parent:
                self.at_end()
                os._exit(0)
            self._text += data
            *lines, self._text = self._text.split(b"\n")
            for line in lines:
                self._lines.append(json.loads(line))
                os.write(self._written, b".")

    def wait(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the next order; None if none comes within `seconds`."""
        readable, _, _ = select.select([self._wake], [], [], seconds)
        if not readable:
            return None
        os.read(self._wake, 1)
        return self._lines.pop(0)

    def report(self, kind: str, value: Any) -> None:
        """Send a report to the parent."""
        with suppress(OSError):  # it has ended
            write_whole(self._out, json.dumps({kind: value}).encode() + b"\n")


class UploadWorker:
    """Sends what a run writes, until it is ordered to end and all is sent."""

    def __init__(self, orders: Orders, order: dict[str, Any], url: str) -> None:
        """`order` names the run's folder, when its command started, and its attempt or None."""
        self._orders = orders
        self._run = Path(order["run"])
        self._url = url
        self._allowed = fence(self._run, order["started"], order["attempt"])
        self._ending = False
        self._failures = 0  # in a row
        self._sender: RunSender | None = None
        self._records_at = 0.0  # monotonic seconds of the next look at the records
        self._hold = self._run / f"{HOLD}{os.getpid()}"
        orders.at_end = partial(release, self._run)
        # A traceback of this process, too, belongs into its log.
        with suppress(OSError):
            log = os.open(self._run / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(log, 2)
            os.dup2(log, 1)
            os.close(log)

    def work(self) -> None:
        """Send until the end. Returns early where another command has taken over the run."""
        while True:
            pause_s = LOOK_S
            try:
                is_done = self._send_next()
                self._works_again()
            except NotAllowed as over:
                self._say(f"upload   ends here: {over}")
                self._orders.report("over", True)
                return
            except (Removed, Damage) as skipped:
                self._say(f"warning  upload: {skipped}; it is left out")
                continue
            except Exception as error:  # of any package: the run goes on
                is_done = False
                pause_s = self._failed(error)
            if self._sender:
                self._orders.report("sent", self._sender.sent())
            if is_done and self._ending:
                self._orders.report("done", True)
                return
            # Without a pause while there is something to send.
            has_more = not is_done and not self._failures
            self._wait(0.0 if has_more else pause_s)

    def _send_next(self) -> bool:
        """Send the newest checkpoint that is not there, or else records; return whether all is."""
        self._allowed()
        if self._sender is None:
            release(self._run)
            self._sender = RunSender(
                self._run, self._store(), self._hold, self._allowed, self._log, self._count
            )
        # Another connection, which reads credentials anew.
        elif self._failures:
            self._sender.store = self._store()
        self._sender.find_sent()
        pending = self._sender.pending()
        if pending:
            self._sender.send_checkpoint(pending[0])
            return False
        # All files are looked at, so not every second.
        if self._ending or time.monotonic() >= self._records_at:
            self._records_at = time.monotonic() + RECORDS_LOOK_S
            self._sender.send_records(at_once=self._ending)
        return not self._sender.pending()

    def _store(self) -> Store:
        return Store(join(self._url, self._run.name))

    def _wait(self, seconds: float) -> None:
        """Wait for an order, at most so long."""
        order = self._orders.wait(seconds)
        if order and order.get("end"):
            self._ending = True
            self._failures = min(self._failures, 1)  # try again soon

    def _failed(self, error: Exception) -> float:
        """Warn at the first of several failures; return the seconds until the next try."""
        text = str(error)
        if not isinstance(error, StorageError):
            text = scrub(f"{type(error).__name__}: {error}")
        self._log(f"failed: {text}")
        self._orders.report("failed", text)
        self._failures += 1
        if self._failures == 1:
            self._say(f"warning  upload: {text}; it is tried again, and training goes on")
        longest = BACK_OFF_END_S if self._ending else BACK_OFF_S
        return min(longest, 2.0 ** min(self._failures - 1, 10))

    def _works_again(self) -> None:
        if self._failures:
            self._say("upload   works again")
            self._orders.report("failed", "")
        self._failures = 0

    def _count(self, count: int) -> None:
        self._orders.report("bytes", count)

    def _say(self, text: str) -> None:
        self._log(text)
        self._orders.report("line", text)

    def _log(self, text: str) -> None:
        """Append a line to the log."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        with suppress(OSError), (self._run / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{moment} {text}\n")


def fence(run: Path, started: float, attempt: int | None) -> Callable[[], None]:
    """Return the function that raises NotAllowed when another command or attempt has the run.

    `attempt` None: every attempt of this command may be sent. Raises StorageError where the run's
    folder does not say who has it: that may pass.
    """

    def require_current() -> None:
        try:
            newest = read_attempt(run)
        except CheckpointError as error:
            raise StorageError(str(error)) from None
        if newest is None:
            raise StorageError(f"{run}/attempt is missing, so nothing says who may send the run")
        if newest[1] != started:
            raise NotAllowed("another command continues the run, and sends it")
        if attempt is not None and newest[0] != attempt:
            raise NotAllowed(f"attempt {attempt} is over: attempt {newest[0]} sends the run")

    return require_current


if __name__ == "__main__":
    raise SystemExit(main())
