"""Download a file, bounded in time and size, with retries for transient errors."""

from __future__ import annotations

import threading
import time
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import build_opener

TRY_S = 10.0  # one socket operation
TRIES = 3
BACKOFF_S = (0.3, 1.0)  # pauses between tries
MAX_BYTES = 64 << 20  # so that a wrong server cannot fill the memory


class FetchFailed(Exception):
    """A download failed, or returned something other than the expected file."""

    def __init__(self, reason: str, transient: bool = False, got: str = "nothing") -> None:
        super().__init__(reason)
        self.transient = transient
        self.got = got  # sha256 of what arrived


def fetch(url: str, tries: int, total_s: float, most_bytes: int = 0) -> bytes:
    """Read an http(s):// or file:// URL, or a bare path; retry after a transient error.

    One try takes at most `total_s` seconds, and `most_bytes` (0: MAX_BYTES). Raises FetchFailed.
    """
    most_bytes = most_bytes or MAX_BYTES
    if "://" not in url:
        url = Path(url).expanduser().absolute().as_uri()
    # urlopen would also open ftp: and data: URLs.
    if not url.startswith(("http://", "https://", "file://")):
        raise FetchFailed("not an http(s):// or file:// URL")
    if url.startswith("file://"):
        tries = 1  # a local error stays
    for pause_s in BACKOFF_S[: tries - 1]:
        try:
            return _try(url, total_s, most_bytes)
        except FetchFailed as error:
            if not error.transient:
                raise
        time.sleep(pause_s)
    return _try(url, total_s, most_bytes)


def _try(url: str, total_s: float, most_bytes: int) -> bytes:
    results: list[bytes | FetchFailed] = []

    def read() -> None:
        try:
            # A new opener, because urlopen's global one keeps the proxies of its first call.
            with build_opener().open(url, timeout=min(TRY_S, total_s)) as response:
                body = response.read(most_bytes + 1)
                # read(n) does not raise when the connection ends early.
                missing = 0
                if len(body) <= most_bytes:
                    missing = getattr(response, "length", 0)
                if missing:
                    raise IncompleteRead(body, missing)
                results.append(body)
        except Exception as error:
            results.append(_explain(error))

    # A thread, because no socket timeout covers a silent name server or a body that arrives byte by
    # byte.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(total_s)
    if not results:
        raise FetchFailed(f"no answer within {total_s:g} s", transient=True)
    result = results[0]
    if isinstance(result, FetchFailed):
        raise result
    # One byte more than allowed was read, to notice a file that is too large.
    if len(result) > most_bytes:
        raise FetchFailed(f"more than {most_bytes >> 20} MiB, which is no file of ours")
    return result


def _explain(error: Exception) -> FetchFailed:
    """Return the reason of a failure, and whether another try may help."""
    # 5xx, 408 (timeout) and 429 (too many requests) may pass; other codes stay.
    if isinstance(error, HTTPError):
        error.close()
        transient = error.code >= 500 or error.code in (408, 429)
        return FetchFailed(f"HTTP {error.code} {error.reason}", transient)
    reason = error.reason if isinstance(error, URLError) else error
    transient = isinstance(error, (OSError, HTTPException))
    return FetchFailed(str(reason) or type(reason).__name__, transient)
