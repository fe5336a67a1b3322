"""The files that rank 0 appends its records to: metrics.jsonl, and TensorBoard's events below tb/."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoray.machine.atomic import replace_bytes, write_whole
from nanoray.machine.metrics import values_of
from nanoray.observe.track.observer import Observer


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
        complete = self.newest | record
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


FLUSH_S = 10  # seconds between two writes of events to the disk, by a thread of torch


class TensorBoardWriter(Observer):
    """TensorBoard events under tb/: the configuration as text, each metric as a scalar.

    They are written with TensorBoard's own writer, as torch's SummaryWriter does, but without torch:
    a driver that watches a program would import it for this alone, for seconds of a core.

    After an error that writer writes no more; metrics.jsonl has every record.
    """

    def __init__(self, folder: Path, config_json: str, resume_step: int) -> None:
        self._folder = folder
        self._config_json = config_json
        # Imported by runs that write events alone, and before their first step.
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._make: Any = EventFileWriter
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._metadata: Any = summary_pb2.SummaryMetadata
        self._tensor: Any = tensor_pb2.TensorProto
        self._start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer: Any = None  # until the first record
        self._first_step = resume_step + 1  # scalars from it on in older files are void

    def _begin(self) -> None:
        """Begin a file. Raises OSError."""
        self._writer = self._make(str(self._folder), max_queue_size=1000, flush_secs=FLUSH_S)
        # TensorBoard drops what older files have from this step on.
        start = self._event(step=self._first_step, session_log=self._start, wall_time=time.time())
        self._writer.add_event(start)
        self._add("config", f"```json\n{self._config_json}\n```", 0, time.time())

    def _add(self, name: str, value: float | str, step: int, at: float) -> None:
        """Add a scalar or a text. Raises OSError."""
        if isinstance(value, str):
            kind = self._metadata(plugin_data=self._metadata.PluginData(plugin_name="text"))
            tensor = self._tensor(dtype="DT_STRING", string_val=[value.encode()])
            tensor.tensor_shape.dim.add(size=1)
            of_step = {"tag": f"{name}/text_summary", "metadata": kind, "tensor": tensor}
        else:
            of_step = {"tag": name, "simple_value": float(value)}
        summary = self._summary(value=[self._summary.Value(**of_step)])
        self._writer.add_event(self._event(step=step, wall_time=at, summary=summary))

    def rewind(self, step: int) -> None:
        """Drop the scalars after `step` from TensorBoard. Raises OSError."""
        self.close()
        self._first_step = step + 1

    def on_record(self, record: dict[str, Any]) -> None:
        """Add each metric as a scalar, and each text as a text. Raises OSError."""
        if self._writer is None:
            self._begin()
        for name, value in values_of(record).items():
            self._add(name, value, record["step"], record["time"])

    on_late = on_record

    def on_saved(self, step: int) -> None:
        """Bring what was added to the disk: a resume of this checkpoint adds it no more."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.flush()

    def close(self) -> None:
        """Close the event file. Raises OSError."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
