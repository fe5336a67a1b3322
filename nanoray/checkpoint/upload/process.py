"""The upload of a run, as the process that has opened the run sees it.

The driver on Ray and rank 0 elsewhere start one process (send.py), which copies what is on disk to
the URL of the key `upload`. The loss or change of rank 0 on Ray does not concern it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

from nanoray.errors import ConfigError
from nanoray.machine.output import say
from nanoray.machine.storage.store import StorageError, Store
from nanoray.machine.storage.url import join

RESTART_S = 10.0  # after the process has died


class Upload:
    """Copies a run to the URL of the key `upload`; does nothing where that is empty."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s`: how long the end of the run waits for the last copy."""
        self._url = url
        self._timeout_s = timeout_s
        self._run: Path | None = None
        self._environment: dict[str, str] = {}
        self._orders, self._order = -1, -1  # the ends of a pipe
        self._process: subprocess.Popen[str] | None = None
        self._watcher: threading.Thread | None = None
        self._ended = threading.Event()
        self._is_complete = False

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is not sent yet, also where the run has failed."""
        self.finish()

    def check(self) -> None:
        """Raise ConfigError unless the storage takes an object from this process."""
        if not self._url:
            return
        try:
            Store(self._url).check()
        except StorageError as error:
            raise ConfigError(
                f"upload = {self._url} cannot be used: {error}; correct the URL or the credentials in "
                "this command's environment, or train without --upload, and copy the run with "
                "`nanoray checkpoint upload` later"
            ) from None

    def follow(self, run: Path) -> None:
        """Copy this run from now on, with the variables of the present environment."""
        if not self._url:
            return
        self._run = run
        self._environment = dict(os.environ)
        self._orders, self._order = os.pipe()
        self._start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _start(self) -> None:
        """Start the process, in a session of its own: Ctrl-C in a terminal is not for it."""
        self._process = subprocess.Popen(
            [
                sys.executable,
                *("-m", "nanoray.checkpoint.upload.send", str(self._run), self._url),
                str(os.getpid()),
            ],
            stdin=self._orders,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # packages of clouds may write credentials to it
            env=self._environment,
            start_new_session=True,
            text=True,
        )

    def _watch(self) -> None:
        """Print what the process has to say; start another one where it died. (a thread)"""
        while True:
            assert self._process
            assert self._process.stdout
            for line in self._process.stdout:
                say(line.rstrip("\n"))
            code = self._process.wait()
            self._is_complete = code == 0
            if self._is_complete or self._ended.is_set():
                return
            say(f"warning  upload: its process ended with {code}; another one goes on")
            self._ended.wait(RESTART_S)
            self._start()

    def finish(self) -> None:
        """Wait for the last copy, but not for ever, and say where it failed. (the run has ended)

        Ctrl-C ends the wait.
        """
        if self._run is None or self._watcher is None:
            return
        self._ended.set()
        is_gone = not self._run.exists()  # the run was refused before its first step
        if not is_gone:
            os.write(self._order, b"\n")
            try:
                self._watcher.join(self._timeout_s)
            except KeyboardInterrupt:
                say("upload   interrupted")
        while self._watcher.is_alive():  # it may start another one meanwhile
            if self._process:
                self._process.kill()
            self._watcher.join(0.1)
        os.close(self._order)
        os.close(self._orders)
        if not is_gone and not self._is_complete:
            command = (
                f"nanoray checkpoint upload {shlex.quote(str(self._run))} {shlex.quote(self._url)}"
            )
            say(
                f"warning  upload: not all is at {join(self._url, self._run.name)} yet; {command} "
                "sends the rest"
            )
