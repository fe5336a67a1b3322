"""The upload of a run, as the process that has opened the run sees it.

The driver on Ray and rank 0 elsewhere start worker.py, which probes the storage before a device is
taken, and sends the run from then on. The loss or change of rank 0 on Ray does not concern it. What
it has to say waits until the main thread asks for news.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoray.base.output import say
from nanoray.base.storage.store import missing_package
from nanoray.base.storage.url import join
from nanoray.checkpoint.run import RunSpec
from nanoray.checkpoint.upload.records import release, steps_on_disk
from nanoray.errors import ConfigError

PROBE_S = 30.0  # for the answer of the storage before a run starts
STOPPED_S = 20.0  # the end of a stopped run waits at most so long: it may soon be killed
STALLED_S = 60.0  # without a byte at the end of a run
RESTARTS = 3  # of a process that was killed
TICK_S = 0.1


class Upload:
    """Sends a run to the URL of the key `upload`; does nothing where that is empty."""

    def __init__(
        self, url: str, timeout_s: float, variables: Mapping[str, str] | None = None
    ) -> None:
        """`timeout_s`: how long the end waits. `variables`: for the environment of its process."""
        self.stopped = False  # the run was stopped by a signal
        self._url = url
        self._timeout_s = timeout_s
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._order: dict[str, Any] | None = None
        self._restarts = 0

        # What the process has reported
        self._lines: list[str] = []
        self._answer: tuple[str, str] | None = None  # ready, refused or unanswered; and why
        self._sent: list[str] = []
        self._failure = ""  # why the last try failed; "" if it did not
        self._is_done = False
        self._is_over = False  # another command sends the run now
        self._moved_at = time.monotonic()  # when the last part was sent

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait for what is not sent yet, also where the run has failed."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self.stopped = True
        if getattr(error, "exit_code", 0) >= 128:
            self.stopped = True
        self.finish()

    def begin(self) -> None:
        """Start the process, and wait until the storage has taken an object from it.

        Raises ConfigError where it refuses. Without an answer the run starts, with a warning.
        """
        if not self._url:
            return
        missing = missing_package(self._url)
        if missing:
            raise ConfigError(f"upload = {missing}")
        self._start()
        deadline = time.monotonic() + PROBE_S
        while self._answer is None and time.monotonic() < deadline:
            if self._process and self._process.poll() is not None and self._reports.empty():
                break
            self._read_reports(TICK_S)
        reason = f"no answer within {PROBE_S:.0f} s"
        if self._process and self._process.returncode is not None:
            reason = f"the process that uploads ended with {self._process.returncode}"
        kind, reason = self._answer or ("unanswered", reason)
        if kind == "refused":
            self.end()
            raise ConfigError(
                f"upload = {self._url} cannot be used: {reason}; correct the URL, or the credentials "
                "in this command's environment and their rights"
            )
        if kind == "unanswered":
            self._lines.append(
                f"warning  upload = {self._url} does not answer: {reason}; the run starts, and what "
                "it writes is sent when the storage is there"
            )

    def follow(self, spec: RunSpec, attempt: int | None = None) -> None:
        """Send this run from now on. `attempt`: only while it is the present one."""
        if not self._url:
            return
        self._order = {"run": str(spec.folder), "started": spec.started, "attempt": attempt}
        self._give(self._order)

    def _start(self) -> None:
        """Start the process, in a session of its own: Ctrl-C in a terminal is not for it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nanoray.checkpoint.upload.worker", self._url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # until it has the run's folder, where its log is
            env={**os.environ, **self._variables},
            start_new_session=True,
        )
        listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        listener.start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Queue the reports of a process until it ends. (a thread of its own)"""
        assert process.stdout
        for line in process.stdout:
            with suppress(ValueError):
                self._reports.put(json.loads(line))

    def _give(self, order: dict[str, Any]) -> None:
        assert self._process
        assert self._process.stdin
        with suppress(OSError):  # it was killed: `news` starts another one
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _read_reports(self, wait_s: float = 0.0) -> None:
        """Take over what the process has reported; wait so long for the first report."""
        with suppress(queue.Empty):
            report = self._reports.get(timeout=wait_s) if wait_s else self._reports.get_nowait()
            while True:
                self._take(report)
                report = self._reports.get_nowait()

    def _take(self, report: dict[str, Any]) -> None:
        kind = next(iter(report))
        value = report[kind]
        if kind in ("ready", "refused", "unanswered"):
            self._answer = (kind, str(value))
        elif kind == "line":
            self._lines.append(value)
        elif kind == "sent":
            self._sent = value
        elif kind == "failed":
            self._failure = value
        elif kind == "bytes":
            self._moved_at = time.monotonic()
        elif kind == "done":
            self._is_done = True
        elif kind == "over":
            self._is_over = True

    def news(self) -> list[str]:
        """Return the lines since the last call; start a process that was killed anew."""
        if self._process is None:
            return []
        self._read_reports()
        if self._process.poll() is not None and self._order and not self._is_done:
            self._replace()
        lines = self._lines
        self._lines = []
        return lines

    def _replace(self) -> None:
        """Start another process in place of one that has ended by itself."""
        assert self._process
        assert self._order
        if self._restarts == RESTARTS or self._is_over:
            return
        self._restarts += 1
        self._lines.append(
            f"warning  upload: its process ended with {self._process.returncode}; another one goes on"
        )
        self._answer = None
        self._start()
        self._give(self._order)

    def say_news(self) -> None:
        """Print the lines since the last call."""
        for line in self.news():
            say(line)

    def finish(self) -> None:
        """Wait until all is sent, but not for ever, and print what is not. (the run has ended)

        Less long where the run was stopped, or where nothing moves. Ctrl-C ends the wait.
        """
        timeout_s = self._timeout_s
        if self._process is None or self._order is None:
            self.end()
            return
        if self.stopped:
            timeout_s = min(timeout_s, STOPPED_S)
        self.say_news()
        self._give({"end": True})
        began = time.monotonic()
        self._moved_at = began
        try:
            while not self._is_done and self._process.poll() is None:
                now = time.monotonic()
                if now > began + timeout_s or now > self._moved_at + STALLED_S:
                    break
                self._read_reports(TICK_S)
        except KeyboardInterrupt:
            say("upload   interrupted")
        self._read_reports()
        for line in self._lines:
            say(line)
        self.end()
        if not self._is_over:
            say(self._closing_line(time.monotonic() - began))

    def _closing_line(self, seconds: float) -> str:
        """Return the line that says what is there, and how to send the rest."""
        assert self._order
        run = Path(self._order["run"])
        where = join(self._url, run.name)
        newest = self._sent[0] if self._sent else "none"
        if self._is_done:
            return (
                f"upload   {where}: {len(self._sent)} checkpoint(s), newest {newest}; all records"
            )
        # What is on disk counts: the process may hang, and report nothing.
        left = [name for name in steps_on_disk(run / "checkpoints") if name not in self._sent]
        command = f"nanoray upload {shlex.quote(str(run))} {shlex.quote(self._url)}"
        failure = f"; the last error: {self._failure}" if self._failure else ""
        safe = f"newest checkpoint there: {newest}"
        if not self._sent:
            safe = "no checkpoint is complete there: NOTHING IS SAFE THERE"
        return (
            f"warning  after {seconds:.0f} s not yet at {where}: {', '.join([*left, 'records'])} "
            f"({safe}){failure}; {command} sends the rest"
        )

    def forget(self) -> None:
        """Send nothing more of the run: it has no step, and its folder goes."""
        self.end()
        self._process = None
        self._order = None

    def end(self) -> None:
        """End the process at once."""
        if self._process is None:
            return
        assert self._process.stdin
        assert self._process.stdout
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._process.stdin.close()
        if self._order:
            release(Path(self._order["run"]))
