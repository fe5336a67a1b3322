"""Trackers of experiments: what W&B and MLflow have afterwards is what the run has recorded.

Both write real files, without a network. What they wrote is read back: W&B's by tests/harness, MLflow's
by its own client.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import nanoray
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import script_data
from nanoray.machine.metrics import METRICS
from nanoray.observe.track.tracker import Results, Tracker
from nanoray.observe.track.tracking import Tracking
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from nanoray.script.settings import DEFAULTS
from tests.harness import script_runs
from tests.harness.packages import needs
from tests.harness.ranks import make_spec, records, run_ranks
from tests.ranks.wandb_file import read_offline

pytestmark = needs("mlflow", "wandb")

SECRET = "hunter2-do-not-store"
UNSET = ("WANDB_", "MLFLOW_", "NETRC")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, no server and no netrc file of this machine, for this process and what it starts."""
    for name in os.environ:
        if name.startswith(UNSET):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def isolate(home: Path, mode: str = "") -> None:
    """Do the same in a rank, which is forked from a server with the variables of its own start."""
    for name in [name for name in os.environ if name.startswith(UNSET)]:
        del os.environ[name]
    os.environ |= {"HOME": str(home), "MLFLOW_DISABLE_TELEMETRY": "true"}
    if mode:
        os.environ["WANDB_MODE"] = mode


def points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Logs(nanoray.Callback):
    """Adds values of its own, under names that not every tracker takes."""

    def on_run_start(self, run: Run) -> None:
        self.run = run

    def on_step_end(self, step: int, record: Mapping[str, Any]) -> None:
        self.run.log({"my accuracy (%)": step / 2, "a//b": step, "note": f"after {step}"})

    def on_run_end(self, outcome: Mapping[str, Any]) -> None:
        self.run.log({"at the end": outcome["step"]})


def tracked(run: Run) -> None:
    """A script that logs values of its own."""
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    engine = RuntimeEngine(model, optimizer, run, nn.functional.mse_loss, [Logs()])
    engine.fit(points(50, 1), points(20, 2))


def open_own(folder: Path, **settings: Any) -> RunSpec:
    values = DEFAULTS | script_runs.SETTINGS | {"eval_every": 4, "out_dir": str(folder)} | settings
    return open_run(make_config(values), script_data(), time.time())


def only_run(folder: Path) -> Any:
    """The only run in the MLflow file beside the runs' folders."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [e.experiment_id for e in client.search_experiments() if e.name != "Default"]
    (found,) = client.search_runs(experiments)
    return client, found


def run_and_resume(tmp_path: Path, kind: str) -> tuple[RunSpec, dict[str, Any]]:
    """Train on two ranks, and go on with one; return the run, and the outcome of its resume."""
    isolated = partial(isolate, tmp_path, "offline")
    train = Program(tracked, frozenset())
    first = open_own(tmp_path, max_steps=6, checkpoint_every=3, env={"TOKEN": SECRET}, track=kind)
    outcomes = run_ranks(first, 2, first=isolated, train=train)
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    resumed = open_own(tmp_path, max_steps=9, resume=str(first.folder), track=kind)
    assert resumed.folder == first.folder
    (outcome,) = run_ranks(resumed, 1, first=isolated, train=train)
    assert "error" not in outcome, outcome

    # No value of a variable reaches a tracker, its files or the log.
    for path in (
        *first.folder.rglob("*.wandb"),
        *first.folder.rglob("*.log"),
        *tmp_path.glob("*.db"),
    ):
        assert SECRET.encode() not in path.read_bytes(), path
    return first, outcome


def numbers_of(spec: RunSpec) -> list[dict[str, Any]]:
    """The metrics in metrics.jsonl: of all steps once, those of both commands."""
    truth = records(spec)
    assert [record["step"] for record in truth] == [*range(1, 10)]
    return [{k: v for k, v in record.items() if k in METRICS} for record in truth]


@pytest.mark.full
def test_wandb_has_all_metrics_of_a_run_and_of_its_resume(tmp_path: Path) -> None:
    first, outcome = run_and_resume(tmp_path, "wandb")
    one, two = read_offline(first.folder / "wandb")  # two processes of one run
    assert one.run_id == two.run_id
    assert (one.project, one.exit_code, two.exit_code) == ("nanoray", 0, 0)
    history = [*one.history, *two.history]
    late = [history.pop(6), history.pop()]
    assert [(point["step"], point["at the end"]) for point in late] == [(6, 6), (9, 9)]
    assert [point["step"] for point in history] == [*range(1, 10)]
    for point, expected in zip(history, numbers_of(first), strict=True):
        assert {key: point[key] for key in expected} == expected
        assert (point["my accuracy (%)"], point["a//b"]) == (point["step"] / 2, point["step"])
        assert point["note"] == f"after {point['step']}"
    assert one.config["global_batch_size"] == 12
    assert one.config["env"] == ["TOKEN"]
    assert two.summary["exit_reason"] == "finished"
    assert two.summary["val_loss"] == outcome["val_loss"]


@pytest.mark.full
def test_mlflow_has_all_metrics_of_a_run_and_of_its_resume(tmp_path: Path) -> None:
    first, _ = run_and_resume(tmp_path, "mlflow")
    truth = records(first)
    client, found = only_run(tmp_path)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == first.folder.name
    for name in set().union(*numbers_of(first)):
        points = [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)]
        assert points == [(r["step"], r[name]) for r in truth if name in r], name
    for name, factor in (("my accuracy ___", 0.5), ("a_b", 1)):
        points = [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)]
        assert points == [(step, factor * step) for step in range(1, 10)]
    assert found.data.metrics["at the end"] == 9
    assert found.data.tags["note"] == "after 9"
    assert found.data.params["max_steps"] == "6"
    assert found.data.tags["nanoray.exit_reason"] == "finished"


def test_a_recipe_of_ours_reports_its_sample(text: Path, tmp_path: Path) -> None:
    """With `--track`, and the mode from W&B's own variable."""
    spec = make_spec(text, tmp_path, max_steps=3, sample_tokens=20, track="wandb")
    (outcome,) = run_ranks(spec, 1, first=partial(isolate, tmp_path, "offline"))
    assert "error" not in outcome, outcome
    (written,) = read_offline(spec.folder / "wandb")
    losses = [point["train/loss"] for point in written.history if "train/loss" in point]
    assert losses == [record["train/loss"] for record in records(spec)]
    assert written.summary["sample_text"] == outcome["sample"]


# A tracker that fails, hangs, or is slow.


class Odd:
    """A tracker that behaves as it is asked to."""

    kind = "odd"

    def __init__(self, on_start: Callable[[], Any], on_log: Callable[[], Any]) -> None:
        self.on_start = on_start
        self.on_log = on_log
        self.steps: list[int] = []
        self.results: Results | None = None

    def problem(self) -> None:
        pass

    def start(self, folder: Path, config: dict[str, Any], known_id: str) -> tuple[str, str]:
        self.on_start()
        return "id", "here"

    def log(self, step: int, time_s: float, values: Mapping[str, float | str]) -> None:
        self.on_log()
        self.steps.append(step)

    def finish(self, step: int, results: Results) -> None:
        self.results = results


def fails() -> None:
    raise RuntimeError(f"503 from http://me:{SECRET}@a.org: come\nback later")


def exits() -> None:
    raise SystemExit(1)


def nothing() -> None:
    pass


def report(tracker: Tracker, spec: RunSpec, count: int) -> tuple[list[str], float]:
    """Report so many records; return the notes, and the seconds that reporting and closing took."""
    notes: list[str] = []
    begun = time.monotonic()
    tracking = Tracking(tracker, spec, notes.append, patience_s=0.5)
    for step in range(1, count + 1):
        tracking.on_record({"step": step, "time": 0.0, "train/loss": 1.0})
    tracking.on_end({"exit_reason": "finished", "step": count})
    tracking.close()
    return notes, time.monotonic() - begun


@pytest.mark.parametrize(
    ("on_start", "on_log", "note"),
    [
        (
            fails,
            nothing,
            "warning  odd failed (RuntimeError: 503 from http://a.org: come); the run",
        ),
        (
            nothing,
            fails,
            "warning  odd failed (RuntimeError: 503 from http://a.org: come); the run goes on without",
        ),
        (exits, nothing, "warning  odd failed (SystemExit: 1); the run goes on without it"),
        (threading.Event().wait, nothing, "warning  odd failed (no answer within 0.5 s); the run"),
        (nothing, threading.Event().wait, "warning  odd failed (no answer within 0.5 s); the run"),
    ],
)
def test_a_tracker_that_fails_or_hangs_gives_one_warning(
    on_start: Callable[[], Any], on_log: Callable[[], Any], note: str, tmp_path: Path
) -> None:
    tracker = Odd(on_start, on_log)
    notes, seconds = report(tracker, open_own(tmp_path), 50)
    (warning,) = [line for line in notes if line.startswith("warning")]
    assert warning.startswith(note)
    assert seconds < 5
    assert tracker.results is None
