"""Download a file, bounded in size."""

from __future__ import annotations

from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.request import build_opener

from nanoray.errors import DataError

ANSWER_S = 10.0  # without an answer, after which a download fails
MAX_BYTES = 64 << 20  # so that a wrong server cannot fill the memory


class NotDownloaded(DataError):
    """A file of ours that another machine has is not here, and could not be fetched."""


class FetchFailed(Exception):
    """A download failed, or returned something other than the expected file."""

    def __init__(self, reason: str, got: str = "nothing") -> None:
        super().__init__(reason)
        self.got = got  # sha256 of what arrived


def fetch(url: str, answer_s: float = ANSWER_S, most_bytes: int = 0) -> bytes:
    """Read a URL, or a file by its path.

    `answer_s`: seconds without an answer after which it fails. `most_bytes`: 0 is MAX_BYTES. A body
    may end early: the caller compares a hash. Raises FetchFailed.
    """
    most_bytes = most_bytes or MAX_BYTES
    if "://" not in url:
        url = Path(url).expanduser().absolute().as_uri()
    try:
        # A new opener, because urlopen's global one keeps the proxies of its first call.
        with build_opener().open(url, timeout=answer_s) as response:
            body: bytes = response.read(most_bytes + 1)
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if type(error) is URLError else error
        raise FetchFailed(str(reason) or type(reason).__name__) from None
    # One byte more than allowed was read, to notice a file that is too large.
    if len(body) > most_bytes:
        raise FetchFailed(f"more than {most_bytes >> 20} MiB, which is no file of ours")
    return body
