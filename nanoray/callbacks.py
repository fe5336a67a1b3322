"""Observers of a run: they see notes and metric records and change nothing. Only rank 0 has any."""

from __future__ import annotations

import json
import os
import sys
import time
from math import nan
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from nanoray.metrics import METRICS, check_record


class Callback(Protocol):
    """What the engine calls. A callback must be quick: the step waits for it."""

    def on_note(self, text: str) -> None:
        """See one line of what is going on."""

    def on_record(self, record: dict[str, Any]) -> None:
        """See the metrics of one logged step; `step` is the number of completed optimizer steps."""

    def close(self) -> None:
        """Write out what is still in memory."""


@runtime_checkable
class Rewindable(Protocol):
    """A callback that keeps records, and must drop some when training goes back to an older step."""

    def rewind(self, step: int) -> None:
        """Forget the records after `step`: those steps come again."""


class JsonlWriter:
    """metrics.jsonl, the truth: one line per logged step, on disk before the step's checkpoint is.

    Opening it at `resume_step` drops the records after that step, which the resumed run will write again.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path = path
        self._file = self._open(resume_step)

    def _open(self, step: int) -> TextIO:
        self.last_step = -1
        if self._path.exists():
            kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
            aside = self._path.with_suffix(".tmp")
            aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(aside, self._path)
            self.last_step = int(max(map(_step_of, kept), default=-1))
        return self._path.open("a", encoding="utf-8", buffering=1)

    def rewind(self, step: int) -> None:
        """Drop the records after `step`."""
        self._file.close()
        self._file = self._open(step)

    def on_note(self, text: str) -> None:
        """Notes are not metrics."""

    def on_record(self, record: dict[str, Any]) -> None:
        """Append one line; json writes floats so that they read back to the same bits."""
        check_record(record)
        self._file.write(json.dumps(record, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a torn last line of a killed run


class TensorBoardWriter:
    """TensorBoard events under tb/: the configuration as text, and every metric as a scalar over steps."""

    def __init__(self, folder: Path, config_json: str, resume_step: int) -> None:
        self._folder = folder
        self._writer = self._open(resume_step)
        self._writer.add_text("config", "```json\n" + config_json + "\n```")

    def _open(self, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # imported only by runs that write events

        return SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=5)

    def rewind(self, step: int) -> None:
        """Let TensorBoard forget the scalars after `step`."""
        self._writer.close()
        self._writer = self._open(step)

    def on_note(self, text: str) -> None:
        """Notes are not metrics."""

    def on_record(self, record: dict[str, Any]) -> None:
        """Add each metric; a thread of the writer does the output."""
        for name in METRICS.keys() & record.keys():
            self._writer.add_scalar(name, record[name], record["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Console:
    """One line per logged step, for people."""

    def __init__(self, max_steps: int, stream: TextIO | None = None) -> None:
        self._max_steps = max_steps
        self._stream = stream or sys.stdout
        self._first: tuple[float, int] | None = None

    def on_note(self, text: str) -> None:
        """Print the line at once."""
        print(text, file=self._stream, flush=True)

    def on_record(self, record: dict[str, Any]) -> None:
        """Print one aligned line."""
        step = record["step"]
        parts = [
            f"step {step:>{len(str(self._max_steps))}}/{self._max_steps}",
            f"loss {record.get('train/loss', nan):.4f}",
        ]
        if "val/loss" in record:
            parts.append(f"val {record['val/loss']:.4f}")
        parts += [f"lr {record['train/lr']:.1e}", f"gnorm {record.get('train/grad_norm', nan):.2f}"]
        if "time/step_ms" in record:
            parts += [f"{record['time/step_ms']:.3g} ms", f"{short(record['perf/tok_per_sec'])} tok/s"]
        if "perf/mfu" in record:
            parts.append(f"mfu {record['perf/mfu']:.1f} %")
        if "comm/exposed_share" in record:
            parts.append(f"comm exposed {record['comm/exposed_share']:.0f} %")
        if self._first is None or step < self._first[1]:  # a restart may begin before the first line
            self._first = (record["time"], step)
        seconds, steps = record["time"] - self._first[0], step - self._first[1]
        if steps:
            parts.append(f"eta {clock(seconds / steps * (self._max_steps - step))}")
        print(" | ".join(parts), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to close."""


def short(value: float) -> str:
    """Write 32100 as 32.1k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Write 61.2 seconds as 1:01, and 3,700 as 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def now() -> float:
    """Return Unix seconds, for people; nothing is ordered by it."""
    return round(time.time(), 3)
