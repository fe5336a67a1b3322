"""Read what W&B has written offline: a log of LevelDB's form, of records in protobuf.

Each block of 32 KiB has pieces of records: a checksum (4 bytes), a length (2) and a kind (1), then the
bytes. The first 7 bytes of the file are W&B's own.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 32768
HEADER = 7
WHOLE, FIRST, LAST = 1, 2, 4


class Written(NamedTuple):
    """One process' part of a W&B run."""

    run_id: str
    project: str
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    exit_code: int | None  # None: it was not finished


def read_offline(folder: Path) -> list[Written]:
    """Return what is in a run's wandb/ folder, one for each process, oldest first."""
    files = sorted(folder.glob("offline-run-*/run-*.wandb"))
    return [_read_file(file) for file in files]


def _read_file(path: Path) -> Written:
    from wandb.proto.wandb_internal_pb2 import Record

    run_id = ""
    project = ""
    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    exit_code = None
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id, project = record.run.run_id, record.run.project
            config |= _values(record.run.config.update)
        elif kind == "config":
            config |= _values(record.config.update)
        elif kind == "history":
            history.append(_values(record.history.item))
        elif kind == "summary":
            summary |= _values(record.summary.update)
        elif kind == "exit":
            exit_code = record.exit.exit_code
    return Written(run_id, project, config, history, summary, exit_code)


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> list[bytes]:
    """Return the records of a file, put together from their pieces."""
    records = []
    record = b""
    position = HEADER
    while position + HEADER <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEADER:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if not kind:
            break
        piece = data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        record = piece if kind in (WHOLE, FIRST) else record + piece
        if kind in (WHOLE, LAST):
            records.append(record)
    return records
