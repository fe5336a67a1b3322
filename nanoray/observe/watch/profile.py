"""The cost of each operation of some steps: `--profile 5:8` writes profile/rank0.json.gz.

torch.profiler records operations, what they allocate, kernels and collectives. The loop's phases are spans above them.
https://ui.perfetto.dev opens a rank's file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from nanoray.config import Config
from nanoray.faults.progress import OUTSIDE
from nanoray.parallel.mesh import Mesh

FOLDER = "profile"  # in the run's folder


class Profile:
    """The instrument that profiles some steps on each rank, and writes their file."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        self._asked = config.profile
        self._steps = config.profiled
        self._note = note
        self._profiler: Any = None  # while steps are profiled
        self._span: AbstractContextManager[Any] | None = None  # the present phase

    def begin(self, folder: Path, mesh: Mesh, step: int) -> bool:
        """Begin in a group of ranks, and drop an unfinished profile of the one before.

        folder: of the run; step: the number of completed steps. Returns whether steps of this command
        are to be profiled.
        """
        self._drop()
        if not self._steps:
            return False
        if step >= self._steps[-1]:
            self._note(f"note    profile = {self._asked} records nothing: step {step} is done")
            return False
        self._folder = folder / FOLDER
        self._mesh = mesh
        return True

    def phase(self, step: int, phase: str) -> None:
        """Profile the steps where they are due, with a span for each phase."""
        is_after_last = step == self._steps[-1] and phase in OUTSIDE
        if step not in self._steps or is_after_last or phase == "done":
            if self._profiler is not None:
                self._finish()
            return
        if self._profiler is None:
            self._start()
        self._end_span()
        self._span = torch.profiler.record_function(f"step {step}: {phase}")
        self._span.__enter__()

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "7")  # else it writes to stderr
        activities = [ProfilerActivity.CPU]
        if self._mesh.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True
        )
        self._profiler.start()

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = None

    def _drop(self) -> None:
        self._end_span()
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = None

    def _finish(self) -> None:
        profiler = self._profiler
        path = self._folder / f"rank{self._mesh.rank}.json.gz"
        self._drop()
        # Under another name first, so that a reader finds a whole file or none. It ends in .gz, too:
        # torch then compresses it.
        partial = path.with_name(f".{path.name}")
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(partial))
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            self._note(
                f"warning  the profile of rank {self._mesh.rank} cannot be written ({error})"
            )
