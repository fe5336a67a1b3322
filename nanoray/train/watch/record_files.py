"""The files that rank 0 appends its records to: metrics.jsonl, and TensorBoard's events below tb/."""

from __future__ import annotations

import io
import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoray.base.atomic import replace_bytes, write_whole
from nanoray.base.metrics import values_of
from nanoray.train.track.observer import Observer


class JsonlWriter(Observer):
    """metrics.jsonl: one line per logged step, written before the step's checkpoint.

    Opening it at `resume_step` drops the records after that step, which the resumed run writes
    again. While the disk is full, records wait in memory.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path = path
        self._waiting: list[dict[str, Any]] = []
        self._closed = False
        self._open(resume_step)

    def _open(self, step: int) -> None:
        path = self._path
        path.touch(mode=0o600)
        lines = path.read_bytes().splitlines(keepends=True)
        kept = 0
        while kept < len(lines) and _step_of(lines[kept]) <= step:
            kept += 1
        if kept < len(lines):
            before = b"".join(lines[:kept])
            try:
                # As another file (inode), so that a process which follows it notices.
                replace_bytes(path, before, sync=False)
            except OSError:
                # On a full disk a file can still be cut.
                os.truncate(path, len(before))
        self.newest: dict[str, Any] = {}  # record
        if kept:
            self.newest = json.loads(lines[kept - 1])
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND)

    @property
    def last_step(self) -> int:
        """The step of the newest record; -1 without one."""
        return int(self.newest.get("step", -1))

    def rewind(self, step: int) -> None:
        """Drop the records after `step`. Raises OSError."""
        before = self._fd
        self._open(step)
        os.close(before)
        self._waiting = [record for record in self._waiting if record["step"] <= step]
        if self._waiting:
            self.newest = self._waiting[-1]

    def on_record(self, record: dict[str, Any]) -> None:
        """Append one line; json writes floats so that they read back to the same bits.

        Raises OSError if it cannot be written; the next call tries again.
        """
        self.newest = record
        self._waiting.append(record)
        self._write()

    def _write(self) -> None:
        # A record leaves the queue only when it is written.
        while self._waiting:
            line = json.dumps(self._waiting[0], allow_nan=False) + "\n"
            write_whole(self._fd, line.encode())
            self._waiting.pop(0)

    def on_late(self, record: dict[str, Any]) -> None:
        """Write the line of the newest record anew, with the values that come late. Raises OSError."""
        complete = record | self.newest
        self.rewind(complete["step"] - 1)
        self.on_record(complete)

    def close(self) -> None:
        """Write what waits, and close the file. Raises OSError."""
        if self._closed:
            return
        self._closed = True
        try:
            self._write()
        finally:
            os.close(self._fd)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a torn last line of a killed run


class TensorBoardWriter(Observer):
    """TensorBoard events under tb/: the configuration as text, each metric as a scalar.

    torch's SummaryWriter has a thread that ends at the first error, with a traceback on the console.
    What cannot be written here, on a full disk, is in metrics.jsonl alone.
    """

    def __init__(self, folder: Path, config_json: str, resume_step: int) -> None:
        # Imported only by runs that write events.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import text

        self._event = Event
        self._session_log = SessionLog
        self._summary = Summary
        self._text = text
        self._record_writer = RecordWriter
        self._folder = folder
        self._config_json = config_json
        self._count = 0  # files of this process
        self._fd: int | None = None
        self._first_step = resume_step + 1  # scalars from it on in older files are void
        with suppress(OSError):  # a full disk: the first record tries again
            self._begin()

    def _begin(self) -> None:
        """Begin a file. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, and several may be of one second.
        name = f"{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{self._count:04d}"
        self._count += 1
        path = self._folder / f"events.out.tfevents.{name}"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        now = time.time()
        begin = self._session_log(status=self._session_log.START)
        config = self._text("config", "```json\n" + self._config_json + "\n```")
        try:
            self._append(
                self._event(wall_time=now, file_version="brain.Event:2"),
                self._event(wall_time=now, step=self._first_step, session_log=begin),
                self._event(wall_time=now, step=0, summary=config),
            )
        except OSError:
            self.close()  # a file without these events is of no use
            raise

    def _append(self, *events: Any) -> None:
        """Write events, each with its length and checksums: all of them, or none. Raises OSError."""
        stream = io.BytesIO()
        writer = self._record_writer(stream)
        for event in events:
            writer.write(event.SerializeToString())
        assert self._fd is not None
        write_whole(self._fd, stream.getvalue())

    def rewind(self, step: int) -> None:
        """Drop the scalars after `step` from TensorBoard. Raises OSError."""
        self.close()
        self._first_step = step + 1
        self._begin()

    def on_record(self, record: dict[str, Any]) -> None:
        """Add each metric as a scalar, and each text as a text. Raises OSError."""
        if self._fd is None:
            self._begin()
        events = []
        for name, value in values_of(record).items():
            if isinstance(value, str):
                summary = self._text(name, value)
            else:
                scalar = self._summary.Value(tag=name, simple_value=value)
                summary = self._summary(value=[scalar])
            events.append(
                self._event(wall_time=record["time"], step=record["step"], summary=summary)
            )
        self._append(*events)

    on_late = on_record

    def close(self) -> None:
        """Close the event file."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
