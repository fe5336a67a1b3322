"""The files that rank 0 appends its records to: metrics.jsonl, and TensorBoard's events below tb/."""

from __future__ import annotations

import io
import json
import os
import platform
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoray.base.atomic import replace_bytes, write_whole
from nanoray.base.metrics import values_of
from nanoray.train.track.observer import Observer

MOST_WAITING = 100_000  # records that wait for room on the disk
CLOSED = -1  # in the place of a descriptor


class AppendedFile:
    """A file of records that stays complete on a full disk: records wait in memory meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[tuple[int, bytes]] = deque(maxlen=MOST_WAITING)  # step, bytes
        self._fd = CLOSED

    def open(self) -> None:
        """Open the file, and create it where it is missing. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def append(self, step: int, data: bytes) -> None:
        """Append the record of a step.

        Raises OSError if it cannot be written; it waits then, and the next call tries again.
        """
        self.waiting.append((step, data))
        self.write()

    def write(self) -> None:
        """Write what waits, in order. Raises OSError."""
        if not self.waiting:
            return
        if self._fd == CLOSED:
            self.open()
        # A record leaves the queue only when it is written.
        while self.waiting:
            write_whole(self._fd, self.waiting[0][1])
            self.waiting.popleft()

    def forget(self, step: int) -> None:
        """Drop the records after `step` that wait."""
        kept = [item for item in self.waiting if item[0] <= step]
        self.waiting = deque(kept, maxlen=MOST_WAITING)

    def release(self) -> None:
        """Close the file, without what waits."""
        if self._fd != CLOSED:
            os.close(self._fd)
        self._fd = CLOSED

    def close(self) -> None:
        """Write what waits, and close the file. Raises OSError."""
        try:
            self.write()
        finally:
            self.release()


class JsonlWriter(Observer):
    """metrics.jsonl: one line per logged step, written before the step's checkpoint.

    Opening it at `resume_step` drops the records after that step, which the resumed run writes
    again.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self._file = AppendedFile(path)
        self._open(resume_step)

    def _open(self, step: int) -> None:
        path = self._file.path
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
        self._file.open()

    @property
    def last_step(self) -> int:
        """The step of the newest record; -1 without one."""
        return int(self.newest.get("step", -1))

    def rewind(self, step: int) -> None:
        """Drop the records after `step`. Raises OSError."""
        self._file.release()
        self._open(step)
        self._file.forget(step)
        if self._file.waiting:
            self.newest = json.loads(self._file.waiting[-1][1])

    def on_record(self, record: dict[str, Any]) -> None:
        """Append one line; json writes floats so that they read back to the same bits.

        Raises OSError if it cannot be written; the next call tries again.
        """
        line = json.dumps(record, allow_nan=False) + "\n"
        self.newest = record
        self._file.append(record["step"], line.encode())

    def on_late(self, record: dict[str, Any]) -> None:
        """Write the line of the newest record anew, with the values that come late. Raises OSError."""
        complete = record | self.newest
        self.rewind(complete["step"] - 1)
        self.on_record(complete)

    def close(self) -> None:
        """Write what waits, and close the file. Raises OSError."""
        self._file.close()


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a torn last line of a killed run


class TensorBoardWriter(Observer):
    """TensorBoard events under tb/: the configuration as text, each metric as a scalar.

    torch's SummaryWriter has a thread that ends at the first error, with a traceback on the console
    and without what it had in memory. These are the same bytes, written by this thread.
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
        self._file = self._new_file(resume_step + 1)
        with suppress(OSError):  # a full disk: the first record tries again
            self._file.write()

    def _new_file(self, first_step: int) -> AppendedFile:
        """Return a file that begins; TensorBoard drops scalars from `first_step` on in older ones."""
        # TensorBoard reads files in the order of their names, and several may be of one second.
        name = f"{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{self._count:04d}"
        self._count += 1
        file = AppendedFile(self._folder / f"events.out.tfevents.{name}")
        now = time.time()
        config = self._text("config", "```json\n" + self._config_json + "\n```")
        begin = self._session_log(status=self._session_log.START)
        head = self._framed(
            [
                self._event(wall_time=now, file_version="brain.Event:2"),
                self._event(wall_time=now, step=first_step, session_log=begin),
                self._event(wall_time=now, step=0, summary=config),
            ]
        )
        file.waiting.append((0, head))
        return file

    def _framed(self, events: Iterable[Any]) -> bytes:
        """Return events as the file contains them: each with its length and checksums."""
        stream = io.BytesIO()
        writer = self._record_writer(stream)
        for event in events:
            writer.write(event.SerializeToString())
        return stream.getvalue()

    def rewind(self, step: int) -> None:
        """Drop the scalars after `step` from TensorBoard. Raises OSError."""
        self._file.forget(step)
        before = self._file
        self._file = self._new_file(step + 1)
        try:
            before.close()
        except OSError:
            # What could not be written yet goes into the new file.
            self._file.waiting.extend(item for item in before.waiting if item[0] > 0)
        self._file.write()

    def on_record(self, record: dict[str, Any]) -> None:
        """Add each metric as a scalar, and each text as a text.

        Raises OSError if they cannot be written; the next call tries again.
        """
        step = record["step"]
        events = []
        for name, value in values_of(record).items():
            if isinstance(value, str):
                summary = self._text(name, value)
            else:
                scalar = self._summary.Value(tag=name, simple_value=value)
                summary = self._summary(value=[scalar])
            events.append(self._event(wall_time=record["time"], step=step, summary=summary))
        self._file.append(step, self._framed(events))

    on_late = on_record

    def close(self) -> None:
        """Write what waits, and close the event file. Raises OSError."""
        self._file.close()
