"""Text from bytes that must be UTF-8."""

from __future__ import annotations

from nanoray.errors import DataError


def decode(data: bytes, where: str, start: int = 0, is_last: bool = True) -> str:
    """Return the text of bytes, which begin at `start` of a file. Raises DataError.

    The last character of a piece that is not the last one may be cut off.
    """
    nul = data.find(b"\0")
    if nul >= 0:  # UTF-16 and binary files have them
        raise DataError(
            f"{where} is not UTF-8 text (NUL byte at offset {start + nul}); convert it, e.g. iconv -f "
            "utf-16 -t utf-8"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        cut_off = not is_last and error.reason == "unexpected end of data"
        if cut_off and len(data) - error.start < 4:
            return data[: error.start].decode("utf-8")
        raise DataError(
            f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset {start + error.start} "
            f"({error.reason}); convert it, e.g. iconv -f latin1 -t utf-8"
        ) from None
