"""What is known of a running program besides its output: its memory, its GPUs, its collectives.

    program's process          its actor                          driver
    traced.py ─ notes, counts ─► RankObserver.observe ─ every 5 s ─► RunObserver ─► metrics.jsonl, tb/, comm/
                                  memory, GPUs ─► Ray's gauges

Without --trace the program's process contains nothing of this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

from nanoray.launch.gauges import RayMetrics
from nanoray.launch.program.counts import Counts
from nanoray.launch.program.rank_observer import MOST_BYTES
from nanoray.machine.output import say
from nanoray.observe.trace.comm_log import CommLog
from nanoray.observe.trace.costs import GLOO_LANES, ClockOffset, queue_starts
from nanoray.observe.watch.record_files import JsonlWriter, TensorBoardWriter

LOOK_S = 5.0  # between two looks; Ray drops a gauge that is not set for 20 s
CLOCK_ROUNDS = 5


class RunObserver:
    """Collects what the ranks' actors report, and writes the records of the run. (driver)"""

    def __init__(self, folder: Path, traced: bool) -> None:
        self._folder = folder
        self._traced = traced
        self._begun = time.monotonic()
        self._looked = 0.0  # monotonic seconds
        self._actors: list[Any] = []
        self._offsets: list[int] = []  # what has been read of each rank's notes
        self._clocks: list[ClockOffset] = []
        self._attempt = 0
        # Steps are numbered on over all attempts: how many were made before this one, and by now.
        self._steps_before = 0
        self._steps = 0
        # One thread writes: TensorBoard, which it imports, must not delay the output.
        self._writer = ThreadPoolExecutor(1)
        self._files: list[Any] = []
        self._log: CommLog | None = None
        self._sizes: dict[str, int] = {}  # of groups of ranks, by their label
        self._waiting: list[list[dict[str, Any]]] = []  # of each rank: steps that others lack
        self._torn: list[bytes] = []  # of each rank: a line that has not ended
        self._gauges = RayMetrics(folder.name, 0)
        self._seen = 0  # collectives, of all ranks
        self._failed = False
        self.summary: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """Steps that all ranks have made, of all attempts; without --trace seconds of the run."""
        return self._steps if self._traced else int(time.monotonic() - self._begun)

    def begin(self, actors: Sequence[Any], nodes: Sequence[str], attempt: int) -> None:
        """Observe the programs of an attempt, which have just started. nodes: of the ranks."""
        self._actors = list(actors)
        self._offsets = [0] * len(actors)
        self._attempt = attempt
        # The first look comes at once: a short program may end before the next one.
        self._looked = 0.0
        clocks = self._compare_clocks(nodes) if self._traced and len(set(nodes)) > 1 else None
        self._submit(self._begin, len(actors), clocks)

    def collect(self, now: bool = False) -> None:
        """Ask all actors, at most every LOOK_S. Raises RayError where one is lost."""
        if not self._actors:
            return  # no program has started
        if not now and time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        refs = [
            actor.observe.remote(offset)
            for actor, offset in zip(self._actors, self._offsets, strict=True)
        ]
        answers: list[dict[str, Any]] = ray.get(refs)
        for rank, answer in enumerate(answers):
            self._offsets[rank] += len(answer["notes"])
        self._submit(self._take, answers)
        if now and any(len(answer["notes"]) == MOST_BYTES for answer in answers):
            self.collect(now=True)

    def close(self) -> None:
        """Write what is left, and say what the collectives have cost."""
        self._submit(self._finish)
        self._writer.shutdown()
        if not self._traced or self._failed:
            return
        comm = self.summary.get("comm", {})
        if not self._seen:
            say(
                "trace    no collective was seen: the program uses no torch.distributed, or in "
                "processes that it has started itself"
            )
        elif comm.get("traced_steps"):
            exposed = f"{comm['exposed_ms']:.1f} ms of it exposed ({comm['exposed_share']:.0f} %)"
            say(
                f"trace    {comm['traced_steps']} steps: {comm['step_ms']:.1f} ms a step, "
                f"collectives {comm['busy_ms']:.1f} ms, {exposed}; `nanoray report timeline {self._folder}`"
            )

    def _submit(self, work: Any, *args: Any) -> None:
        def run() -> None:
            if self._failed:
                return
            try:
                work(*args)
            except Exception as error:
                # The program goes on: what it computes does not depend on this.
                self._failed = True
                say(f"warning  the run is no longer recorded: {type(error).__name__}: {error}")

        self._writer.submit(run)

    def _compare_clocks(self, nodes: Sequence[str]) -> list[tuple[float, float]]:
        """Return how far each rank's clock is ahead of this process', and the largest error of that."""
        of_node: dict[str, tuple[float, float]] = {}
        for actor, node in zip(self._actors, nodes, strict=True):
            if node in of_node:
                continue
            best = 0.0, float("inf")
            for _ in range(CLOCK_ROUNDS):
                sent = time.perf_counter()
                reading = ray.get(actor.clock.remote())
                half = (time.perf_counter() - sent) / 2
                best = min(best, (reading - sent - half, half), key=lambda pair: pair[1])
            of_node[node] = best
        return [of_node[node] for node in nodes]

    # In the writer's thread.

    def _begin(self, ranks: int, clocks: list[tuple[float, float]] | None) -> None:
        self._waiting = [[] for _ in range(ranks)]
        self._torn = [b""] * ranks
        self._steps_before = self._steps
        if self._log:
            self._log.finish(self._clocks)
        if not self._traced:
            return
        self._clocks = [ClockOffset(0.0, 0.0)] * ranks
        if clocks:
            first = clocks[0][0]
            self._clocks = [ClockOffset(ahead - first, half) for ahead, half in clocks]
        self._log = CommLog(
            self._folder / "comm", self._steps, self._attempt, self._sizes, partial=True
        )

    def _take(self, answers: list[dict[str, Any]]) -> None:
        """Write a record of what all ranks have reported."""
        values: dict[str, Any] = {}
        for rank, answer in enumerate(answers):
            *lines, self._torn[rank] = (self._torn[rank] + answer["notes"]).split(b"\n")
            self._waiting[rank] += [json.loads(line) for line in lines]
        complete = min(map(len, self._waiting))  # steps that all ranks have reported
        if self._log and complete:
            notes = [of_rank[:complete] for of_rank in self._waiting]
            self._waiting = [of_rank[complete:] for of_rank in self._waiting]
            values, messages = self._log.add(self._prepared(notes), self._clocks, {})
            for message in messages:
                say(message)

        usages = [answer["usage"] for answer in answers]
        keys = dict.fromkeys(key for usage in usages for key in usage)
        ranks = {key: [usage.get(key) for usage in usages] for key in keys}
        for key, of_ranks in ranks.items():
            values[key] = max(value for value in of_ranks if value is not None)
        self._steps = self._steps_before + min(answer["steps"] for answer in answers)
        self._gauges.set({key: value for key, value in values.items() if key not in ranks})
        if values:
            record = {"step": self.step, "attempt": self._attempt, "time": time.time()}
            self._write(record, values, ranks)

    def _prepared(self, notes: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """Return notes with the steps' numbers in the run, and with the moment each bucket began."""
        for of_rank in notes:
            for step in of_rank:
                step["step"] += self._steps_before
                self._sizes.update(step.pop("sizes"))
                self._seen += len(step["collectives"])
                buckets = [c for c in step["collectives"] if c["bucket"] is not None]
                lanes = 1 if buckets and buckets[0]["timing"] == "events" else GLOO_LANES
                arrivals = [c["enqueue"] for c in buckets]
                starts = queue_starts(arrivals, [c["end"] for c in buckets], lanes)
                for bucket, start in zip(buckets, starts, strict=True):
                    bucket["start"] = start
        return notes

    def _write(
        self, record: dict[str, Any], values: dict[str, Any], ranks: dict[str, list[Any]]
    ) -> None:
        if not self._files:
            self._files = [JsonlWriter(self._folder / "metrics.jsonl", -1)]
            self._files.append(TensorBoardWriter(self._folder / "tb", "{}", -1))
        jsonl, tensorboard = self._files
        jsonl.on_record(record | values | {"ranks": ranks})
        of_rank = {
            f"{key}/rank{rank}": value
            for key, of_ranks in ranks.items()
            for rank, value in enumerate(of_ranks)
            if value is not None
        }
        tensorboard.on_record(record | values | of_rank)

    def _finish(self) -> None:
        if self._log:
            self.summary["comm"] = self._log.finish(self._clocks)
        if self._traced:
            self.summary["steps"] = self._steps
        for file in self._files:
            file.close()


def explain_wait(counts: Sequence[Counts]) -> tuple[int, str]:
    """Return which rank the others wait for in a collective, and why; 0 and "" if that is not known.

    A group's collectives are numbered in the same order on all of its ranks. So the rank whose
    number is the smallest is behind.
    """
    for name in dict.fromkeys(name for of_rank in counts for name in of_rank.groups):
        group = {rank: c.groups[name] for rank, c in enumerate(counts) if name in c.groups}
        waiting = [rank for rank, c in group.items() if c.begun > c.ended]
        if not waiting:
            continue
        first = min(waiting, key=lambda rank: group[rank].ended)
        number = group[first].ended + 1
        what = f"{group[first].op} of {group[first].size:,} bytes"
        # Every rank belongs to the default group, also one that has begun nothing in it.
        begun = {rank: c.begun for rank, c in group.items()}
        if name == "default":
            begun = {rank: begun.get(rank, 0) for rank in range(len(counts))}
        behind = min(begun, key=lambda rank: begun[rank])
        if begun[behind] < number:
            return behind, (
                f"rank {behind} is behind: it has begun {begun[behind]} collectives of the group "
                f"{name}, and rank {first} waits in number {number}, {what}"
            )
        for rank in waiting:
            other = group[rank]
            if other.ended + 1 == number and (other.op, other.size) != group[first][2:]:
                return rank, (
                    f"collective {number} of the group {name} is {what} on rank {first} and "
                    f"{other.op} of {other.size:,} bytes on rank {rank}"
                )
        return first, f"all ranks of the group {name} wait in its collective {number}, {what}"
    return 0, ""
