"""What the tests on a real cluster rely on, checked without one: their jobs' names and folders."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from nanoray.kube.cluster import Api
from nanoray.kube.fetch import fetch
from nanoray.kube.render import job_name, out_dir_of
from tests.cluster import test_kube_live as live
from tests.harness.kube_server import ApiServer

pytestmark = pytest.mark.usefixtures("kubectl")


def node_names() -> list[str]:
    """Return the names of the tests that get a job, each with the ids of its parameters."""
    names = []
    for name, function in inspect.getmembers(live, inspect.isfunction):
        if not name.startswith("test_") or "job" not in inspect.signature(function).parameters:
            continue
        ids = [
            mark.kwargs["ids"]
            for mark in getattr(function, "pytestmark", ())
            if mark.name == "parametrize"
        ]
        assert len(ids) <= 1, "write here how pytest joins them"
        names += [f"{name}[{each}]" for each in ids[0]] if ids else [name]
    return names


def test_each_test_has_a_job_of_its_own_under_a_name_that_kubernetes_takes() -> None:
    tests = node_names()
    assert any(name.endswith("[lost]") for name in tests), tests
    names = [live.name_of(test) for test in tests]
    assert len(set(names)) == len(names), names
    assert [job_name(name) for name in names] == names


@pytest.mark.parametrize("name", ["twin", live.name_of(node_names()[0]), "x" * 47, "a.b_C"])
def test_fetch_finds_the_folder_that_was_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also once the RayJob is gone, whose entrypoint names the folder."""
    monkeypatch.setenv("NANORAY_IMAGE", "nanoray:test")
    objects = live.Job(name, "nanoray").objects(steps=10)
    (job,) = [thing for thing in objects if thing["kind"] == "RayJob"]
    run = tmp_path / out_dir_of(job).removeprefix("/data/") / "2026-01-01_000000_words"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    labels: dict[str, Any] = {"app.kubernetes.io/name": "nanoray-tensorboard"}
    with ApiServer(tmp_path) as server:
        server.objects["pods", "nanoray", "tb"] = {
            "metadata": {"name": "tb", "labels": labels},
            "status": {"phase": "Running"},
        }
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        path = fetch(Api(), "nanoray", job_name(name), "", str(tmp_path / "out"))
    assert path.name == run.name
