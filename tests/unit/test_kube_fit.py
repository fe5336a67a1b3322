"""`nanoray kube submit --dry_run` says what the nodes cannot hold, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.kube.__main__ import main
from tests.harness.kube_server import ApiServer, submit_of
from tests.harness.messages import find_line

Object = dict[str, Any]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        yield server


@pytest.fixture
def submit(tmp_path: Path) -> list[str]:
    return [*submit_of(tmp_path), "--dataset", "shakespeare", "--dry_run"]


def node(server: ApiServer, name: str, cpu: str, memory: str, **more: Any) -> None:
    allocatable = {
        "cpu": cpu,
        "memory": memory,
        "pods": "110",
        "ephemeral-storage": "1Ei",
    } | more.pop("devices", {})
    metadata = {"name": name, "labels": more.pop("labels", {})}
    server.objects["nodes", "", name] = {
        "metadata": metadata,
        "spec": more,
        "status": {"allocatable": allocatable},
    }


def pod(
    server: ApiServer, name: str, where: str, cpu: str, phase: str = "Running", **labels: str
) -> None:
    containers = [{"resources": {"requests": {"cpu": cpu}}}, {"resources": {}}]
    thing = {
        "metadata": {"name": name, "labels": labels},
        "spec": {"nodeName": where, "containers": containers},
        "status": {"phase": phase},
    }
    server.objects["pods", "kube-system", name] = thing


def test_pods_that_fit(server: ApiServer, submit: list[str], capsys: Any) -> None:
    """Head and two workers of 1 CPU and 4 GiB, dataset Job and TensorBoard of half a CPU and 1 GiB
    each.
    """
    node(server, "a", "2", "9Gi")
    node(server, "b", "2100m", "8Gi")
    assert main(submit) == 0
    assert (
        "fit    5 pods ask for 4 CPU, 14 GiB; 2 node(s) have room for them\n"
        in capsys.readouterr().out
    )


def test_a_pod_that_fits_on_no_node_is_named_with_the_remedy(
    server: ApiServer, submit: list[str], capsys: Any
) -> None:
    node(server, "a", "2", "16Gi")
    node(server, "b", "1", "3Gi")
    assert main([*submit, "--cpus", "2.5", "--memory_gib", "20"]) == 4
    error = capsys.readouterr().err
    words = ("worker pod of RayJob words", "no node", "2.5 CPU", "a", "2 CPU", "20 GiB", "16 GiB")
    find_line(error, *words, "--cpus", "--memory_gib", "--overlay")
    assert "would apply RayJob" not in error
    node(server, "c", "8", "2Gi")
    assert main([*submit, "--cpus", "4"]) == 4
    error = capsys.readouterr().err
    find_line(error, "no single node", "4 CPU, 4 GiB", "--cpus", "--memory_gib")


def test_a_head_that_fits_on_no_node(server: ApiServer, submit: list[str], capsys: Any) -> None:
    node(server, "a", "4", "3584Mi")
    assert main([*submit, "--memory_gib", "2"]) == 4
    error = capsys.readouterr().err
    find_line(error, "head pod of RayJob words", "4 GiB", "a", "3.5 GiB", "--overlay laptop")
    assert "--memory_gib" not in error, "it changes the workers only"
    assert main([*submit, "--overlay", "laptop"]) == 0
    assert (
        "fit    3 pods ask for 1.35 CPU, 3.38 GiB; 1 node(s) have room" in capsys.readouterr().out
    )


def test_what_other_pods_use_is_counted(server: ApiServer, submit: list[str], capsys: Any) -> None:
    """Not those that are over, and not this namespace's TensorBoard, which is there already."""
    node(server, "a", "5", "32Gi")
    pod(server, "dns", "a", "500m")
    pod(server, "over", "a", "4", "Succeeded")
    pod(
        server,
        "tensorboard",
        "a",
        "500m",
        **{"app.kubernetes.io/name": "nanoray-tensorboard", "app.kubernetes.io/part-of": "nanoray"},
    )
    assert main(submit) == 0
    assert "1 node(s) have room" in capsys.readouterr().out
    pod(server, "another", "a", "1")
    assert main(submit) == 0, "it would wait, which is no error"
    out = capsys.readouterr().out
    assert "fit    no room now for 1 of them: " in out
    assert "until other pods end; or use fewer or smaller ones" in out


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "gpu-node has no label nvidia.com/gpu.present In ['true']"),
        (
            {"labels": {"nvidia.com/gpu.present": "true"}},
            "it asks for 1 nvidia.com/gpu, and gpu-node has the most, 0",
        ),
        (
            {
                "labels": {"nvidia.com/gpu.present": "true"},
                "taints": [{"key": "team", "effect": "NoSchedule"}],
            },
            "gpu-node has the taint team:NoSchedule; label or untaint a node",
        ),
        (
            {"unschedulable": True},
            "cpu-node has no label nvidia.com/gpu.present In ['true']; label",
        ),
    ],
    ids=["label", "devices", "taint", "cordoned"],
)
def test_gpu_nodes(
    server: ApiServer, submit: list[str], capsys: Any, more: Object, reason: str
) -> None:
    node(server, "cpu-node", "64", "256Gi")
    node(server, "gpu-node", "64", "256Gi", **more)
    assert main([*submit, "--device", "cuda"]) == 4
    assert reason in capsys.readouterr().err


def test_a_gpu_node_with_the_operators_taint_is_taken(
    server: ApiServer, submit: list[str], capsys: Any
) -> None:
    node(server, "cpu-node", "64", "256Gi")
    labels, taint = (
        {"nvidia.com/gpu.present": "true"},
        {"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "x"},
    )
    node(
        server,
        "gpu-node",
        "64",
        "256Gi",
        labels=labels,
        taints=[taint],
        devices={"nvidia.com/gpu": "2"},
    )
    assert main([*submit, "--device", "cuda"]) == 0
    assert "2 nvidia.com/gpu; 2 node(s) have room" in capsys.readouterr().out


def test_without_a_cluster_or_the_right_to_look_nothing_is_compared(
    server: ApiServer,
    submit: list[str],
    capsys: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node(server, "a", "8", "32Gi")
    server.refusals["GET pods"] = (403, "pods is forbidden")
    assert main(submit) == 0
    find_line(capsys.readouterr().out, "fit", "empty", "pods is forbidden")
    server.refusals["GET nodes"] = (403, "nodes is forbidden")
    assert main(submit) == 0
    find_line(capsys.readouterr().out, "fit", "not compared", "403", "nodes is forbidden")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    assert main(submit) == 0
    assert "fit    not compared with the nodes: no cluster: " in capsys.readouterr().out
