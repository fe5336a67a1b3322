"""check.py against made-up machines: each problem alone, its remedy, the exit code."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoray.config import load_config
from nanoray.lab import check
from nanoray.machine import host
from nanoray.machine.device import Device

NVML = SimpleNamespace(nvmlInit=int, nvmlShutdown=int, nvmlSystemGetCudaDriverVersion=lambda: 13000)


def gpu(letter: str, **changes: Any) -> Device:
    values = {
        "name": "NVIDIA H200",
        "memory_bytes": 143771 << 20,
        "bf16": True,
        "parent_uuid": f"GPU-{letter}",
    }
    return Device(**{"kind": "cuda", "index": 0, "uuid": f"GPU-{letter}"} | values | changes)


def cut(letter: str, *profiles: str) -> list[Device]:
    parts = [
        gpu(
            letter,
            kind="mig",
            index=i,
            uuid=f"MIG-{letter}{i}",
            profile=p,
            name=f"NVIDIA H200 MIG {p}",
        )
        for i, p in enumerate(profiles)
    ]
    return [gpu(letter, mig_mode=True), *parts]


class Machine:
    """Replaces what check asks the machine; a ready one with two cores and no GPU to begin with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.set(check, torch_builds=(None, None))
        self.set(
            host, available_cpus=2.0, available_memory_bytes=16 << 30, cpu_features=frozenset()
        )
        self.gpus()

    def set(self, module: Any, **answers: Any) -> Machine:
        for name, answer in answers.items():
            self.patch.setattr(module, name, lambda *_, answer=answer: answer)
        return self

    def gpus(
        self, *found: Device, build: str | None = None, nccl: tuple[int, int, int] | None = None
    ) -> Machine:
        return self.set(check, discover_gpus=list(found), torch_builds=(build, nccl))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Machine(monkeypatch)


def look(**overrides: Any) -> check.Survey:
    return check.survey(load_config(overrides=overrides), NVML)


def row(report: check.Survey, label: str) -> str:
    return dict(report.rows)[label]


def chosen(report: check.Survey) -> tuple[str, ...]:
    return tuple(row(report, key).split(" (")[0] for key in ("placement", "precision", "backend"))


def problem(report: check.Survey) -> tuple[str, str, bool]:
    (only,) = report.problems
    return only.what, only.remedy, only.fatal


# --- the command ---


def test_a_ready_machine(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ok: it can train"
    assert "placement  2 × cpu (auto: no GPU found; 2 of at most 8 ranks on 2 CPUs)" in lines
    assert "precision  fp32 (this CPU has neither amx_bf16 nor avx512_bf16)" in lines
    assert "backend    gloo (CPU ranks)" in lines
    assert "ray        a new local one" in lines
    assert len({re.match(r"\S+ +", line).end() for line in lines[:-1]}) == 1  # type: ignore[union-attr]


# --- what would run where ---


def test_two_gpus(machine: Machine) -> None:
    report = machine.gpus(gpu("a"), gpu("b", index=1), build="13.0", nccl=(2, 29, 7)) and look()
    assert chosen(report) == ("2 × cuda", "bf16", "nccl")
    assert report.problems == []


@pytest.mark.parametrize(("nccl", "backend"), [((2, 29, 7), "gloo"), ((2, 31, 2), "nccl")])
def test_slices_of_one_gpu_need_a_new_nccl(
    nccl: tuple[int, int, int], backend: str, machine: Machine
) -> None:
    report = machine.gpus(*cut("a", "1g.35gb", "1g.35gb"), build="13.0", nccl=nccl) and look()
    assert chosen(report) == ("2 × mig", "bf16", backend)
    assert ".".join(map(str, nccl)) in row(report, "backend")


def test_an_old_gpu_trains_in_fp16(machine: Machine) -> None:
    machine.gpus(gpu("a"), gpu("t", name="Tesla T4", bf16=False), build="13.0", nccl=(2, 29, 7))
    assert row(look(), "precision").startswith("fp16 (")


def test_width_decides_on_a_cpu_with_amx(machine: Machine) -> None:
    machine.set(host, cpu_features=frozenset({"amx_bf16"}))
    assert row(look(n_embd=128), "precision").startswith("bf16 (")
    assert row(look(n_embd=64), "precision").startswith("fp32 (")


# --- problems, each alone ---


def test_an_impossible_placement_is_a_fatal_problem_with_its_remedy(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    what, remedy, fatal = problem(look(device="cuda"))
    assert what == "device = cuda (asked: all, available: 0): no GPU is visible"
    assert remedy == "use --device cpu, or see nvidia-smi -L"
    assert fatal
    assert check.main(["--device", "cuda"]) == 1
    out = capsys.readouterr().out
    assert "placement" not in out
    assert out.endswith("\n1 problem(s)\n")


def test_an_impossible_backend(machine: Machine) -> None:
    machine.gpus(*cut("a", "1g.18gb", "1g.18gb"), build="13.0", nccl=(2, 29, 7))
    what, _, fatal = problem(look(backend="nccl"))
    assert "NCCL 2.29.7 refuses slices of one GPU" in what
    assert fatal


def test_a_driver_older_than_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus(gpu("a"), build="13.0", nccl=(2, 29, 7))
    monkeypatch.setattr(NVML, "nvmlSystemGetCudaDriverVersion", lambda: 12040)
    assert problem(look()) == (
        "torch wants CUDA 13.0, the driver ends at 12.4",
        "update the driver",
        True,
    )


def test_mig_mode_without_slices(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.gpus(gpu("a"), gpu("b", index=1, mig_mode=True), build="13.0", nccl=(2, 29, 7))
    what, remedy, fatal = problem(look())
    assert what == "GPU 1 is in MIG mode but has no slices"
    assert remedy.startswith("run: sudo nvidia-smi mig -i 1 -cgi 1g.18gb,")
    assert not fatal
    assert check.main([]) == 0
    assert capsys.readouterr().out.endswith("\n1 problem(s), but it can train\n")


def test_a_ray_cluster_is_asked_whether_it_answers(machine: Machine) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        machine.patch.setenv("RAY_ADDRESS", address)
        assert row(look(), "ray") == address
        assert row(look(ray_address="local"), "ray") == "a new local one"
        assert look(ray_address=f"ray://{address}").problems == []
    assert problem(look()) == (
        f"no Ray answers at {address}",
        "start it, or use --ray_address local",
        True,
    )


def test_driver_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.driver_cuda(NVML) == "13.0"
    monkeypatch.setattr(NVML, "nvmlSystemGetCudaDriverVersion", lambda: 12080)
    assert check.driver_cuda(NVML) == "12.8"
    monkeypatch.setattr(NVML, "nvmlInit", lambda: 1 / 0)
    assert check.driver_cuda(NVML) is None
