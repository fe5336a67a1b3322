"""check.py against made-up machines: each problem alone, its remedy, the exit code; and nothing
heavy is imported.
"""

from __future__ import annotations

import ctypes
import json
import re
import socket
import subprocess
import sys
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoray.config import load_config, load_settings
from nanoray.data import cifar10
from nanoray.host import host
from nanoray.host.device import Device
from nanoray.tools import check
from tests.harness.permissions import closed
from tests.harness.token_files import write_llmc

GOOD = {"nanoray": "0", "python": "3.11.7", "torch": "2.13.0+cpu", "ray": "2.60.0"}
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
        self.set(check, versions=dict(GOOD), torch_cuda_build=None, nccl_version=None, shm_gib=8.0)
        monkeypatch.setattr(check.sys, "prefix", "/home/me/nanoray/.venv")
        self.set(
            host, available_cpus=2.0, available_memory_bytes=16 << 30, cpu_features=frozenset()
        )
        self.gpus()
        monkeypatch.setattr(
            check.shutil, "disk_usage", lambda _: SimpleNamespace(free=50 << 30, total=90 << 30)
        )

    def set(self, module: Any, **answers: Any) -> Machine:
        for name, answer in answers.items():
            self.patch.setattr(module, name, lambda *_, answer=answer: answer)
        return self

    def gpus(
        self, *found: Device, build: str | None = None, nccl: tuple[int, int, int] | None = None
    ) -> Machine:
        return self.set(check, discover_gpus=list(found), torch_cuda_build=build, nccl_version=nccl)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Machine(monkeypatch)


def look(**overrides: Any) -> dict[str, Any]:
    return check.survey(load_settings(overrides=overrides), NVML)


def chosen(report: dict[str, Any]) -> tuple[str, str, str]:
    return tuple(report[key]["choice"] for key in ("placement", "precision", "backend"))  # type: ignore[return-value]


def problem(report: dict[str, Any]) -> tuple[str, str, bool]:
    (only,) = report["problems"]
    return only["what"], only["remedy"], only["fatal"]


# --- the command ---


def test_the_command_is_quick_to_import_and_ready_here(tmp_path: Path) -> None:
    code = (
        "import os, sys, nanoray.tools.check as c; os.environ.pop('RAY_ADDRESS', 0); rc = "
        "c.main(['--device', 'cpu']); "
        "print([m for m in ('torch', 'ray', 'nanoray.bench') if m in sys.modules], rc)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert out.stdout.splitlines()[-1] == "[] 0", out.stdout + out.stderr


def test_a_ready_machine(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ok: it can train"
    assert "placement  2 × cpu (auto: no GPU found; 2 of at most 8 ranks on 2 CPUs)" in lines
    assert "precision  fp32 (this CPU has neither amx_bf16 nor avx512_bf16)" in lines
    assert "backend    gloo (CPU ranks)" in lines
    assert "ray        a new local one" in lines
    for setting in (
        "workers 2 (2 CPUs)",
        "precision fp32 (this CPU has neither amx_bf16 nor avx512_bf16)",
        "lr 0.003 (preset shakespeare-cpu)",
    ):
        assert f"setting    {setting}" in lines
    assert len({re.match(r"\S+ +", line).end() for line in lines[:-1]}) == 1  # type: ignore[union-attr]


def test_json_says_the_same_as_the_text(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.gpus(*cut("a", "1g.18gb", "1g.18gb"), build="13.0", nccl=(2, 29, 7)).set(
        check, driver_cuda="13.0"
    )
    assert check.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == look()
    assert check.main([]) == 0
    text = capsys.readouterr().out
    assert text == check.render(report) + "\n"
    for part in (
        "MIG-a0",
        "NVIDIA H200 MIG 1g.18gb",
        "140.4 GiB",
        "MIG mode",
        "NCCL 2.29.7",
        "CUDA 13.0",
    ):
        assert part in text
    assert list(report)[-2:] == ["problems", "can_train"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--devise", "cpu"], "error: unknown flag --devise; did you mean --device?"),
        (
            ["--dry_run"],
            "error: dry_run cannot take effect: the check never starts anything; drop --dry_run",
        ),
        (
            ["--quiet"],
            "error: quiet cannot take effect: the check never starts anything; drop --quiet",
        ),
    ],
)
def test_wrong_flags(
    argv: list[str], text: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(argv) == 2
    assert capsys.readouterr().err.strip() == text


# --- what would run where ---


def test_two_gpus(machine: Machine) -> None:
    report = machine.gpus(gpu("a"), gpu("b", index=1), build="13.0", nccl=(2, 29, 7)) and look()
    assert chosen(report) == ("2 × cuda", "bf16", "nccl")
    assert report["problems"] == []
    assert report["cuda"] == {"torch_build": "13.0", "driver": "13.0", "nccl": "2.29.7"}


@pytest.mark.parametrize(("nccl", "backend"), [((2, 29, 7), "gloo"), ((2, 31, 2), "nccl")])
def test_slices_of_one_gpu_need_a_new_nccl(
    nccl: tuple[int, int, int], backend: str, machine: Machine
) -> None:
    report = machine.gpus(*cut("a", "1g.35gb", "1g.35gb"), build="13.0", nccl=nccl) and look()
    assert chosen(report) == ("2 × mig", "bf16", backend)
    assert ".".join(map(str, nccl)) in report["backend"]["reason"]


def test_an_old_gpu_trains_in_fp16(machine: Machine) -> None:
    machine.gpus(gpu("a"), gpu("t", name="Tesla T4", bf16=False), build="13.0", nccl=(2, 29, 7))
    assert look()["precision"]["choice"] == "fp16"


def test_width_decides_on_a_cpu_with_amx(machine: Machine) -> None:
    machine.set(host, cpu_features=frozenset({"amx_bf16"}))
    assert look(n_embd=128)["precision"]["choice"] == "bf16"
    assert look(n_embd=64)["precision"]["choice"] == "fp32"


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
    assert out.endswith("\n1 problem\n")


def test_an_impossible_backend(machine: Machine) -> None:
    machine.gpus(*cut("a", "1g.18gb", "1g.18gb"), build="13.0", nccl=(2, 29, 7))
    what, _, fatal = problem(look(backend="nccl"))
    assert "NCCL 2.29.7 refuses slices of one GPU" in what
    assert fatal


@pytest.mark.parametrize(("device", "fatal"), [("auto", True), ("cpu", False)])
def test_gpus_with_a_cpu_build_of_torch(device: str, fatal: bool, machine: Machine) -> None:
    machine.gpus(gpu("a"))
    assert problem(look(device=device)) == (
        "this torch has no CUDA, but there are GPUs",
        "install its CUDA build, or --device cpu",
        fatal,
    )


def test_a_driver_older_than_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus(gpu("a"), build="13.0", nccl=(2, 29, 7))
    monkeypatch.setattr(NVML, "nvmlSystemGetCudaDriverVersion", lambda: 12040)
    assert problem(look()) == (
        "torch wants CUDA 13.0, the driver ends at 12.4",
        "update the driver",
        True,
    )


def test_mig_mode_without_slices(machine: Machine) -> None:
    machine.gpus(gpu("a"), gpu("b", index=1, mig_mode=True), build="13.0", nccl=(2, 29, 7))
    what, remedy, fatal = problem(look())
    assert what == "GPU 1 is in MIG mode but has no slices"
    assert remedy.startswith("run: sudo nvidia-smi mig -i 1 -cgi 1g.18gb,")
    assert not fatal


def test_small_shared_memory_matters_to_nccl_only(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.set(check, shm_gib=0.06)
    assert look()["problems"] == []
    machine.gpus(gpu("a"), gpu("b"), build="13.0", nccl=(2, 29, 7))
    what, remedy, fatal = problem(look())
    assert (what, fatal) == ("/dev/shm has 0.06 GiB, NCCL wants 1", False)
    assert "--shm-size" in remedy
    assert check.main([]) == 0
    assert capsys.readouterr().out.endswith("\n1 problem, but it can train\n")


def test_a_space_in_the_path_of_the_environment(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.patch.setattr(check.sys, "prefix", "/home/me/my project/.venv")
    what, remedy, fatal = problem(look())
    assert what.startswith("the path of this environment has a space: /home/me/my project/.venv;")
    assert "`ray start --head --block` ends" in what
    assert remedy.endswith("--ray_address local")
    assert not fatal
    assert check.main([]) == 0
    assert capsys.readouterr().out.endswith("\n1 problem, but it can train\n")


def test_disk(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    what, remedy, fatal = problem(look(out_dir="file/runs"))
    assert (what, remedy, fatal) == (
        "out_dir = file/runs cannot be written",
        "give another --out_dir",
        True,
    )
    assert look(out_dir="not/yet/there")["problems"] == []
    assert not (tmp_path / "not").exists()  # looking makes nothing
    machine.patch.setattr(
        check.shutil, "disk_usage", lambda _: SimpleNamespace(free=check.GIB // 2, total=1)
    )
    assert problem(look()) == ("out_dir = runs has 0.5 GiB free, less than 1", "free some", False)


@pytest.mark.parametrize(
    ("found", "what", "remedy", "fatal"),
    [
        ({"torch": None}, "torch is not installed", "pip install 'torch>=9.1,<10'", True),
        ({"ray": None}, "ray is not installed", "pip install 'ray>=8.2,<9'", True),
        (
            {"torch": "9.0.9+cpu"},
            "torch 9.0.9+cpu is outside >=9.1,<10, the versions that nanoray is tested with",
            "pip install 'torch>=9.1,<10'",
            False,
        ),
        (
            {"ray": "9.0.0rc1"},
            "ray 9.0.0rc1 is outside >=8.2,<9, the versions that nanoray is tested with",
            "pip install 'ray>=8.2,<9'",
            False,
        ),
        (
            {"python": "3.9.1"},
            "Python 3.9.1 is outside >=3.10,<3.14",
            "make the environment with another",
            True,
        ),
        (
            {"python": "3.14.0"},
            "Python 3.14.0 is outside >=3.10,<3.14",
            "make the environment with another",
            True,
        ),
    ],
)
def test_versions(
    found: dict[str, Any], what: str, remedy: str, fatal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = Message()
    about["Requires-Python"] = ">=3.10,<3.14"
    ranges = ["torch<10,>=9.1", "ray[default]<9,>=8.2", 'ray[train]; extra == "bench"', "numpy"]
    monkeypatch.setattr(check.metadata, "metadata", lambda _: about)
    monkeypatch.setattr(check.metadata, "requires", lambda _: ranges)
    good = {"python": "3.13.9", "torch": "9.1.0+cu130", "ray": "8.2"}
    assert list(check.version_problems(good)) == []
    newer = {"python": "3.10.0", "torch": "9.11.3", "ray": "8.30.1"}
    assert list(check.version_problems(newer)) == []
    assert list(check.version_problems(good | found)) == [check.Problem(what, remedy, fatal)]


def test_without_an_installed_nanoray_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise check.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(check.metadata, "requires", absent)
    assert list(check.version_problems({"python": "3.11.1", "torch": "1", "ray": "1"})) == []


# --- the machine itself ---


def test_dataset(machine: Machine, tmp_path: Path) -> None:
    assert (
        "not cached: the first run downloads 1.1 MB, or offline"
        in look(dataset="auto")["dataset"]["note"]
    )
    assert look(dataset="shakespeare")["dataset"]["note"].endswith("downloads 1.1 MB")
    assert "needs no network" in look(dataset="stdlib")["dataset"]["note"]
    (tmp_path / "cache/nanoray/tokens/shakespeare-char-0").mkdir(parents=True)
    assert "not cached" in look(dataset="auto")["dataset"]["note"], (
        "tokens of a text of one's own do not bring the text"
    )
    (tmp_path / "cache/nanoray/shakespeare.txt").touch()
    assert look(dataset="auto")["dataset"]["note"] == "Shakespeare is cached"
    assert (
        "not cached"
        in look(dataset="auto", data_dir=str(tmp_path / "elsewhere"))["dataset"]["note"]
    )
    assert problem(look(dataset="gone.txt")) == (
        "dataset = gone.txt is not there, or closed to this user",
        "correct the path",
        True,
    )
    (tmp_path / "gone.txt").write_text("x")
    assert look(dataset="gone.txt")["problems"] == []


def test_dataset_of_token_files(machine: Machine, tmp_path: Path) -> None:
    write_llmc(tmp_path / "fineweb_train_000001.bin", range(99))
    write_llmc(tmp_path / "fineweb_val_000000.bin", range(99))
    for dataset in (tmp_path, tmp_path / "fineweb_*.bin"):
        report = look(dataset=str(dataset))
        assert report["problems"] == []
        assert report["dataset"]["note"] == (
            f"{tmp_path.name}: 1 + 1 token files of uint16 in {tmp_path}"
        )
    missing = look(dataset=str(tmp_path / "none_*.bin"))
    assert problem(missing)[0].endswith("none_*.bin is not there, or closed to this user")

    # A file that was cut off: the problem, and its remedy.
    (tmp_path / "fineweb_train_000001.bin").write_bytes(b"\x88\xd8\x34\x01" * 9)
    what, remedy, fatal = problem(look(dataset=str(tmp_path)))
    assert what.endswith("version 20240520, which nanoray does not read")
    assert remedy == "write it again with llm.c's scripts"
    assert fatal


def test_dataset_of_images_and_of_a_script(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "cache/nanoray").mkdir(parents=True)
    (tmp_path / "cache/nanoray/shakespeare.txt").touch()

    def note(**overrides: Any) -> str:
        report = look(**overrides)
        assert report["problems"] == []
        return str(report["dataset"]["note"])

    generated = "CIFAR-10 is not cached: the first run downloads 170 MB"
    assert note(model="resnet", dataset="auto") == f"{generated}, or offline takes generated images"
    assert note(model="resnet", dataset="cifar10") == generated
    assert note(model="resnet", dataset="cifar10-generated") == "generated, needs no network"
    assert note(model="own") == "data of the script"
    info = cifar10.DatasetInfo("cifar10", "", tmp_path, "uint8", 10, 1, 1, "", "", {})
    cifar10.store(cifar10.folder_of(load_config()), info, b"1", b"2")
    assert note(model="resnet", dataset="auto") == "CIFAR-10 is cached"


def test_below_a_folder_that_is_closed_to_this_user(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with closed(tmp_path / "other") as folder:
        told = look(
            dataset=str(folder / "x"), data_dir=str(folder / "y"), out_dir=str(folder / "z")
        )
        assert "not cached" in look(dataset="shakespeare", data_dir=str(folder))["dataset"]["note"]
    assert (
        told["problems"][0]["what"] == f"dataset = {folder}/x is not there, or closed to this user"
    )


def test_a_ray_cluster_is_asked_whether_it_answers(machine: Machine) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        machine.patch.setenv("RAY_ADDRESS", address)
        assert look()["ray"] == {"address": address, "answers": True}
        assert look(ray_address="local")["ray"]["answers"] is None
        assert look(ray_address=f"ray://{address}")["ray"]["answers"] is True
    assert problem(look()) == (
        f"no Ray answers at {address}",
        "start it, or use --ray_address local",
        True,
    )


def test_the_cuda_build_of_torch_is_read_from_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        check, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    assert check.torch_cuda_build() is None
    for line, build in (
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.8'", "12.8"),
        ("cuda = None", None),
    ):
        (tmp_path / "version.py").write_text(
            f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip = None\n"
        )
        assert check.torch_cuda_build() == build
    monkeypatch.setattr(check, "find_spec", lambda _: None)
    assert check.torch_cuda_build() is None


def test_nccl_in_force_is_the_preloaded_one_before_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"/opt/libnccl.so": 23102, "torch's": 22907}

    def load(path: str) -> Any:
        key = "torch's" if path.endswith("nvidia/nccl/lib/libnccl.so.2") else path
        if key not in there:
            raise OSError(path)

        def ncclGetVersion(pointer: Any) -> int:
            pointer._obj.value = there[key]
            return 0

        return SimpleNamespace(ncclGetVersion=ncclGetVersion)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setenv("LD_PRELOAD", "/opt/libother.so:/opt/libnccl.so")
    assert check.nccl_version() == (2, 31, 2)
    monkeypatch.delenv("LD_PRELOAD")
    assert check.nccl_version() == (2, 29, 7)
    there.clear()
    assert check.nccl_version() is None


def test_driver_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.driver_cuda(NVML) == "13.0"
    monkeypatch.setattr(NVML, "nvmlSystemGetCudaDriverVersion", lambda: 12080)
    assert check.driver_cuda(NVML) == "12.8"
    monkeypatch.setattr(NVML, "nvmlInit", lambda: 1 / 0)
    assert check.driver_cuda(NVML) is None


def test_what_is_installed_here() -> None:
    found = check.versions()
    assert found["torch"]
    assert found["ray"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
