"""What metrics, logs and health questions cost: one training run that is loud and quiet by turns.

A nanoray actor trains on Ray. In loud windows it does what every run does: stamps its progress, and each log_every
steps fetches loss and norm and passes the record to metrics.jsonl, TensorBoard, Ray's gauges and the driver, which
polls it and prints. In quiet windows it does none of that. Windows are paired loud-quiet, quiet-loud, ..., so what else
the machine does hits both. Ray's own heartbeats, and background flushes of TensorBoard's thread, fall on both.

One per cent of a step drowns in a shared machine's wall-clock noise. CPU time does not: the target is judged on the
CPU time of the whole rank process (one intra-op thread, so that nothing spins), and the wall-clock ratio stands beside.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from nanoray.callbacks import Console
from nanoray.launch import POLL_S
from nanoray.mesh import Rendezvous
from nanoray.placement import connected
from nanoray.run import RunSpec
from nanoray.worker import Worker

EDGE = 5  # windows begin at steps W*k + 5: no record, and so no callback, falls on an edge


def is_loud(window: int) -> bool:
    """Return whether a window is a loud one: loud quiet, quiet loud, loud quiet, ..."""
    return window % 4 in (0, 3)


def pair_ratios(seconds: list[float]) -> list[float]:
    """Return loud / quiet for each pair of neighbouring windows."""
    pairs = zip(seconds[::2], seconds[1::2], strict=False)
    return [a / b if is_loud(2 * i) else b / a for i, (a, b) in enumerate(pairs)]


class Measured(Worker):
    """nanoray's own actor, with an engine that is loud and quiet by turns."""

    def run(self, spec: dict[str, Any], rendezvous: Rendezvous, window_steps: int = 40) -> dict[str, Any]:
        """Train, and return the seconds of each window and of each emitted record besides."""
        self._importing.join()
        import nanoray.train as recipe
        from nanoray.engine import RuntimeEngine

        stamps: list[float] = []
        cpu_stamps: list[float] = []
        emits: list[float] = []
        flag = Path(spec["folder"]) / "loud"
        flag.touch()

        class Alternating(RuntimeEngine):
            loud = True

            def _is_logged(self, step: int, last: int) -> bool:
                if step % window_steps == EDGE:
                    self.loud = is_loud(len(stamps))
                    flag.touch() if self.loud else flag.unlink(missing_ok=True)
                    stamps.append(time.perf_counter())
                    cpu_stamps.append(time.process_time())
                return super()._is_logged(step, last) if self.loud else step == last

            def _enter(self, phase: str) -> None:
                if self.loud:
                    super()._enter(phase)

            def _emit(self, record: dict[str, Any]) -> None:
                start = time.perf_counter()
                super()._emit(record)
                emits.append(time.perf_counter() - start)

        recipe.RuntimeEngine = Alternating  # type: ignore[misc]
        outcome = super().run(spec, rendezvous)
        windows = {"wall": [b - a for a, b in pairwise(stamps)], "cpu": [b - a for a, b in pairwise(cpu_stamps)]}
        return outcome | {"windows": windows, "emits": emits}


def main() -> int:
    """Run `python -m nanoray.bench.traffic RUN_JSON ADDRESS WINDOW_STEPS`; the last line printed is the result."""
    spec = RunSpec.from_dict(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    address, window_steps = sys.argv[2], int(sys.argv[3])
    with connected(address, None, spec.config):
        remote: Any = ray.remote(concurrency_groups={"control": 1})(Measured)  # type: ignore[call-overload]
        actor = remote.options(num_cpus=1).remote(spec.folder.name, 0)
        run = actor.run.remote(spec.to_dict(), Rendezvous(threads=1), window_steps)
        console, flag, polls = Console(spec.config.max_steps), spec.folder / "loud", 0
        while not ray.wait([run], timeout=POLL_S)[0]:
            if flag.exists():
                polls += 1
                with suppress(RayError):  # a dead actor is reported by its run
                    for kind, value in ray.get(actor.poll.remote(), timeout=5):
                        console.on_note(value) if kind == "note" else console.on_record(value)
        result = ray.get(run)
        ray.kill(actor)
    if not result["ok"]:
        print(result["traceback"], file=sys.stderr)
        return 1
    wall, cpu = result["windows"]["wall"], result["windows"]["cpu"]
    quiet_ms = [1e3 * s / window_steps for i, s in enumerate(wall) if not is_loud(i)]
    found = {"ratios": pair_ratios(wall), "cpu_ratios": pair_ratios(cpu), "quiet_ms": quiet_ms, "polls": polls}
    print(json.dumps(found | {"emit_ms": [1e3 * s for s in result["emits"]]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
