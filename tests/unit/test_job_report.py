"""What a driver writes onto its Ray job: never over a state that Ray wrote, and never at the cost
of the run.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint.run import RunSpec, newest_record
from nanoray.launch import job_report, ray_compat
from nanoray.launch.job_report import JobReport, submission_id
from tests.harness.ranks import make_spec

KEY = b"_ray_internal_job_info_raysubmit_1"


class Store:
    """The part of Ray's key-value store that the jobs API uses."""

    def __init__(self, status: str = "RUNNING") -> None:
        self.values = {
            KEY: json.dumps(
                {"status": status, "message": "by Ray", "metadata": {"owner": "me"}}
            ).encode()
        }
        self.answers = threading.Event()
        self.answers.set()

    def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes:
        assert namespace == b"job"
        if not self.answers.wait(timeout):
            raise TimeoutError
        return self.values[key]

    def internal_kv_put(
        self, key: bytes, value: bytes, overwrite: bool, namespace: bytes, timeout: float
    ) -> None:
        assert (overwrite, namespace) == (True, b"job")
        self.values[key] = value

    @property
    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.values[KEY])
        return found


@pytest.fixture
def spec(text: Path, tmp_path: Path) -> RunSpec:
    return make_spec(text, tmp_path / "runs", max_steps=40)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    of_job = json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}})
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", of_job)
    monkeypatch.setattr(ray_compat, "internal_kv_get_gcs_client", lambda: store)
    monkeypatch.setattr(job_report, "INTERVAL_S", 0.02)
    return store


def until(ready: Any) -> None:
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def log_step(spec: RunSpec, step: int, end: str = "\n") -> None:
    record = {"step": step, "train/loss": 2.5, "time/step_ms": 1000.0}
    with (spec.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + end)


def test_it_follows_the_run_and_keeps_the_metadata_of_others(spec: RunSpec, store: Store) -> None:
    folder = str(spec.folder)
    with JobReport(spec) as report:
        until(lambda: "nanoray_state" in store.info["metadata"])
        assert store.info["metadata"] == {
            "owner": "me",
            "nanoray_state": "starting",
            "nanoray_folder": folder,
        }
        log_step(spec, 10)
        until(lambda: store.info["metadata"].get("nanoray_step") == "10/40")
        assert (
            store.info["message"]
            == f"training · folder {folder} · step 10/40 · loss 2.5000 · eta 0:30"
        )
        log_step(spec, 40)
        report.state = "finished"
    assert store.info["metadata"]["nanoray_state"] == "finished"
    assert store.info["metadata"]["nanoray_step"] == "40/40", (
        "the last step is there when the driver ends"
    )


def test_a_state_that_ray_wrote_is_never_overwritten(spec: RunSpec, store: Store) -> None:
    store.values = Store("STOPPED").values
    before = store.info
    with JobReport(spec):
        time.sleep(0.2)
    assert store.info == before


def test_an_exception_is_a_failed_run_and_goes_through(spec: RunSpec, store: Store) -> None:
    with pytest.raises(RuntimeError, match="broken"), JobReport(spec):
        raise RuntimeError("broken")
    assert store.info["metadata"]["nanoray_state"] == "failed"


def test_a_head_that_does_not_answer_costs_seconds_at_the_end_and_nothing_else(
    spec: RunSpec, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_report, "WRITE_S", 0.2)
    store.answers.clear()
    with JobReport(spec) as report:
        log_step(spec, 10)
        time.sleep(0.5)
        store.answers.set()
        until(lambda: store.info["metadata"].get("nanoray_step") == "10/40")
        store.answers.clear()
        report.state = "finished"
    assert "finished" not in store.info["metadata"].values()
    assert not report._thread.is_alive()


@pytest.mark.parametrize(
    "value", [None, "", "no json", "[]", "{}", '{"metadata": null}', '{"metadata": {}}']
)
def test_a_driver_outside_of_a_job_reports_nothing(
    spec: RunSpec, store: Store, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    if value is not None:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", value)
    assert submission_id() == ""
    with JobReport(spec) as report:
        pass
    assert not report._thread.ident, "not even a thread"
    assert store.info["message"] == "by Ray"


def test_the_newest_record_is_the_last_complete_line(spec: RunSpec) -> None:
    assert newest_record(spec.folder) is None
    for step in range(1, 2000):
        log_step(spec, step)
    log_step(spec, 2000, end="")  # it is being written
    assert (newest_record(spec.folder) or {})["step"] == 1999
    (spec.folder / "metrics.jsonl").write_text("no json\n")
    assert newest_record(spec.folder) is None
