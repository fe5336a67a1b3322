"""Download a file, with retries for transient errors."""

from __future__ import annotations

import time
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

TRIES = 3
BACKOFF_S = (0.3, 1.0)  # pauses between tries


class FetchFailed(Exception):
    """A download failed, or returned something other than the expected file."""

    def __init__(self, reason: str, transient: bool = False, got: str = "nothing") -> None:
        super().__init__(reason)
        self.transient = transient
        self.got = got  # sha256 of what arrived


def fetch(url: str, tries: int, timeout_s: float) -> bytes:
    """Read an http(s):// or file:// URL, or a bare path; retry after a transient error.

    `timeout_s`: how long the server may be silent. Raises FetchFailed.
    """
    if "://" not in url:
        url = Path(url).expanduser().absolute().as_uri()
    # urlopen would also open ftp: and data: URLs.
    if not url.startswith(("http://", "https://", "file://")):
        raise FetchFailed("not an http(s):// or file:// URL")
    if url.startswith("file://"):
        tries = 1  # a local error stays
    for pause_s in BACKOFF_S[: tries - 1]:
        try:
            return _try(url, timeout_s)
        except FetchFailed as error:
            if not error.transient:
                raise
        time.sleep(pause_s)
    return _try(url, timeout_s)


def _try(url: str, timeout_s: float) -> bytes:
    try:
        with urlopen(url, timeout=timeout_s) as response:
            data: bytes = response.read()
            return data
    except HTTPError as error:
        # 5xx, 408 (timeout) and 429 (too many requests) may pass; other codes stay.
        error.close()
        transient = error.code >= 500 or error.code in (408, 429)
        raise FetchFailed(f"HTTP {error.code} {error.reason}", transient) from None
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise FetchFailed(str(reason) or type(reason).__name__, transient=True) from None
