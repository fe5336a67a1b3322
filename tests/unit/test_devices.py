"""devices.py against a made-up NVML, a made-up /proc and /sys, closed forms and brute force. No GPU
is needed.
"""

from __future__ import annotations

import importlib
import itertools
import os
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoray.config import make_config
from nanoray.config.choose import choose_precision
from nanoray.errors import PlacementError
from nanoray.machine import host
from nanoray.machine.device import Device
from nanoray.machine.gpus import discover_gpus, take_own_slice
from nanoray.machine.mig import mig_profile
from nanoray.machine.slots import Slots, cpu_share, local_slots

H200_MIB = 143771
# Profile -> (compute slices, memory slices, MiB as NVML reports them, how many fit)
H200_SLICES = {
    "1g.18gb": (1, 1, 16384, 7),
    "1g.35gb": (1, 2, 33280, 4),
    "2g.35gb": (2, 2, 33280, 3),
    "3g.71gb": (3, 4, 71424, 2),
    "4g.71gb": (4, 4, 71424, 1),
    "7g.141gb": (7, 8, 142848, 1),
}


class FakeNvml:
    """pynvml's function names over a list of made-up GPUs."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self, *gpus: dict[str, Any], driver: bool = True) -> None:
        self.gpus, self.driver, self.open = gpus, driver, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def _ask(self, handle: dict[str, Any], key: str) -> Any:
        if handle.get(key) is None:
            raise self.NVMLError_NotSupported(f"{key}: Not Supported")
        return handle[key]

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        if self.gpus[index].get("lost"):
            raise self.NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> str:
        return self._ask(handle, "uuid")

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> str:
        return self._ask(handle, "name")

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> Any:
        return SimpleNamespace(
            total=self._ask(handle, "mib") << 20, used=handle.get("used_mib", 0) << 20
        )

    def nvmlDeviceGetCudaComputeCapability(self, handle: dict[str, Any]) -> tuple[int, int]:
        return self._ask(handle, "capability")

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> list[int]:
        return [self._ask(handle, "mig"), 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], i: int) -> dict[str, Any]:
        if i >= len(handle["slices"]) or handle["slices"][i] is None:
            raise self.NVMLError("Not Found")
        return handle["slices"][i]

    def nvmlDeviceGetAttributes_v2(self, handle: dict[str, Any]) -> Any:
        return SimpleNamespace(memorySizeMB=handle["mib"], gpuInstanceSliceCount=handle["slices"])


def h200(
    letter: str, *profiles: str | None, mig: bool | None = None, named: bool = True
) -> dict[str, Any]:
    """A made-up H200 cut into `profiles` (None leaves a place empty)."""
    slices = [
        p
        and {
            "uuid": f"MIG-{letter}{i}00-5555",
            "name": f"NVIDIA H200 MIG {p}" if named else "NVIDIA H200",
            "mib": H200_SLICES[p][2],
            "slices": H200_SLICES[p][0],
        }
        for i, p in enumerate(profiles)
    ]
    mode = bool(profiles) if mig is None else mig
    return {
        "uuid": f"GPU-{letter}000-1111",
        "name": "NVIDIA H200",
        "mib": H200_MIB,
        "capability": (9, 0),
        "mig": int(mode),
        "slices": slices,
    }


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus(*made: dict[str, Any]) -> list[Device]:
    return discover_gpus(FakeNvml(*made))


# --- what they do now ---


# --- discovery ---


def test_no_driver_no_library_and_a_lost_gpu_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert discover_gpus(FakeNvml(driver=False)) == []
    nvml = FakeNvml({"lost": True}, h200("b"))
    assert [(d.index, d.uuid) for d in discover_gpus(nvml)] == [(1, "GPU-b000-1111")]
    assert nvml.open == 0

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    assert discover_gpus() == []


def test_whole_gpu() -> None:
    (gpu,) = gpus(h200("a"))
    assert gpu == Device(
        "cuda",
        0,
        "GPU-a000-1111",
        "NVIDIA H200",
        H200_MIB << 20,
        "GPU-a000-1111",
        "",
        1.0,
        1.0,
        False,
        True,
    )
    old = h200("t") | {"name": "Tesla T4", "capability": (7, 5), "mig": None}
    (t4,) = gpus(old)
    assert (t4.bf16, t4.mig_mode) == (False, False)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("profile", H200_SLICES)
def test_every_h200_profile_from_the_name_or_from_the_attributes(profile: str, named: bool) -> None:
    compute, memory, mib, count = H200_SLICES[profile]
    whole, *slices = gpus(h200("a", *[profile] * count, named=named))
    assert whole.mig_mode
    assert len(slices) == count
    for i, d in enumerate(slices):
        assert (d.kind, d.index, d.profile, d.name) == (
            "mig",
            i,
            profile,
            f"NVIDIA H200 MIG {profile}",
        )
        assert (d.uuid, d.parent_uuid) == (f"MIG-a{i}00-5555", "GPU-a000-1111")
        assert d.memory_bytes == mib * 2**20
        assert (d.compute_fraction, d.bandwidth_fraction) == (compute / 7, memory / 8)
        assert d.bf16
        assert not d.mig_mode


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        ("", []),
        ("1", ["GPU-b000-1111", "MIG-b000-5555", "MIG-b100-5555"]),
        ("2,0", ["GPU-c000-1111", "GPU-a000-1111"]),
        ("0,7,2", ["GPU-a000-1111"]),  # CUDA stops at the first unknown entry
        ("GPU-c000-1111,GPU-a", ["GPU-c000-1111", "GPU-a000-1111"]),
        # names three
        ("MIG-b100-5555,MIG-b000-5555", ["MIG-b100-5555", "MIG-b000-5555"]),
        ("MIG-gone", []),
    ],
)
def test_cuda_visible_devices(
    value: str, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = gpus(h200("a"), h200("b", "3g.71gb", "3g.71gb"), h200("c"))
    assert [d.uuid for d in found] == uuids


# --- MIG geometry and peaks ---


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        *((p, v[:2]) for p, v in H200_SLICES.items()),
        ("NVIDIA H200 MIG 3g.71gb", (3, 4)),
        ("MIG 1c.3g.71gb", (1, 4)),
        ("1g.18gb+me", (1, 1)),
        *zip(
            ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
            ((1, 1), (2, 2), (3, 4), (4, 4), (7, 8)),
            strict=True,
        ),
        ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", (1, 2)),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (1, 1)),
        ("1g.12gb", (1, 1)),
        ("1g.23gb", (1, 1)),
    ],
)
def test_mig_profile(name: str, slices: tuple[int, int]) -> None:
    assert mig_profile(name) == slices


@pytest.mark.parametrize("name", ["5g.99gb", "NVIDIA H200", ""])
def test_an_unknown_mig_profile_is_refused(name: str) -> None:
    with pytest.raises(
        PlacementError, match=r"is no MIG profile known here; known: 1g\.10gb, .*7g\.94gb"
    ):
        mig_profile(name)


# --- CPU and memory ---


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


V2, V1 = "0::/pod/box\n", "9:memory:/pod/box\n5:cpu,cpuacct:/pod/box\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8.0),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/box/cpu.max": "max 100000"}, 8.0),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/box/cpu.max": "250000 100000"}, 2.5),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/box/cpu.max": "9900000 100000"}, 8.0),
        # a limit of the parent holds for the child; a path of the host's that is not mounted reads
        # as empty
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/cpu.max": "300000 100000"}, 3.0),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/pod/box/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/pod/box/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
    ],
)
def test_available_cpus(
    files: dict[str, str], cpus: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert host.available_cpus(write(tmp_path, files)) == cpus


# --- decisions ---


PAYS = "with {} attention {} pays from width {} on, and n_embd = {}".format


@pytest.mark.parametrize(
    ("kind", "settings", "features", "bf16_gpu", "precision", "reason"),
    [
        ("cpu", {"n_embd": 128}, {"amx_bf16"}, None, "bf16", PAYS("plain", "amx_bf16", 128, 128)),
        ("cpu", {"n_embd": 127}, {"amx_bf16"}, None, "fp32", PAYS("plain", "amx_bf16", 128, 127)),
        (
            "cpu",
            {"n_embd": 128, "attention": "flash"},
            {"amx_bf16"},
            None,
            "fp32",
            PAYS("flash", "amx_bf16", 256, 128),
        ),
        (
            "cpu",
            {"n_embd": 256, "block_size": 512},
            {"avx512_bf16"},
            None,
            "bf16",
            PAYS("flash", "avx512_bf16", 256, 256),
        ),
        (
            "cpu",
            {"n_embd": 384},
            {"avx512f"},
            None,
            "fp32",
            "this CPU has neither amx_bf16 nor avx512_bf16",
        ),
        (
            "cuda",
            {"n_embd": 128},
            set(),
            True,
            "bf16",
            "every GPU multiplies bf16, which needs no loss scaler",
        ),
        (
            "cuda",
            {"n_embd": 384},
            {"amx_bf16"},
            False,
            "fp16",
            "a GPU older than compute capability 8 lacks bf16",
        ),
        ("cuda", {"n_embd": 384}, set(), None, "fp16", "no GPU is known to multiply bf16"),
    ],
)
def test_choose_precision(
    kind: str,
    settings: dict[str, Any],
    features: set[str],
    bf16_gpu: bool | None,
    precision: str,
    reason: str,
) -> None:
    settings = {
        "micro_batch_size": 1,
        **({"n_head": 1} if "n_embd" in settings else {}),
        **settings,
    }
    chosen, why = choose_precision(make_config(settings), kind, frozenset(features), bf16_gpu)
    assert chosen == precision
    assert why.startswith(reason)
    for asked in ("fp32", "bf16", "fp16"):
        config = make_config(settings | {"precision": asked})
        assert choose_precision(config, kind, frozenset(features), bf16_gpu) == (asked, "asked for")


WHOLE, MIXED = [h200("a"), h200("b")], [h200("a"), h200("b", "3g.71gb", "3g.71gb")]
SLICED, BARE = [h200("a", "1g.35gb", "1g.35gb", "1g.35gb")], [h200("a", mig=True)]


@pytest.mark.parametrize(
    ("device", "workers", "made", "cpus", "kind", "uuids", "count", "reason"),
    [
        ("auto", None, WHOLE, 2, "cuda", ["GPU-a", "GPU-b"], 2, "auto: 2 of 2 whole GPU(s)"),
        ("auto", None, MIXED, 2, "cuda", ["GPU-a"], 1, "auto: 1 of 1 whole GPU(s)"),
        ("mig", None, MIXED, 2, "mig", ["MIG-b0", "MIG-b1"], 2, "asked for: 2 of 2 MIG slice(s)"),
        (
            "auto",
            None,
            SLICED,
            2,
            "mig",
            ["MIG-a0", "MIG-a1", "MIG-a2"],
            3,
            "auto: 3 of 3 MIG slice(s)",
        ),
        (
            "auto",
            None,
            BARE,
            2,
            "cpu",
            [],
            2,
            "auto: 1 GPU in MIG mode without slices; 2 of at most 8 ranks on 2 CPUs",
        ),
        (
            "auto",
            None,
            [],
            16,
            "cpu",
            [],
            2,
            "auto: no GPU found; 2 of at most 64 ranks on 16 CPUs",
        ),
        ("cpu", 8, WHOLE, 2, "cpu", [], 8, "asked for; 8 of at most 8 ranks on 2 CPUs"),
    ],
)
def test_local_slots(
    device: str,
    workers: int | None,
    made: list[dict[str, Any]],
    cpus: float,
    kind: str,
    uuids: list[str],
    count: int,
    reason: str,
) -> None:
    slots = local_slots(device, workers, gpus(*made), cpus)
    assert isinstance(slots, Slots)
    assert (slots.kind, slots.workers, slots.reason) == (kind, count, reason)
    assert [d.uuid[: len(u)] for d, u in zip(slots.devices, uuids, strict=True)] == uuids


@pytest.mark.parametrize(
    ("device", "workers", "made", "text"),
    [
        (
            "cuda",
            2,
            [],
            "device = cuda (asked: 2, available: 0): no GPU is visible; use --device cpu, or see "
            "nvidia-smi -L",
        ),
        (
            "cuda",
            None,
            SLICED,
            "available: 0 whole GPUs): all GPUs are in MIG mode; use --device mig",
        ),
        (
            "mig",
            2,
            WHOLE,
            "run: sudo nvidia-smi -i 0 -mig 1 && sudo nvidia-smi mig -i 0 -cgi 3g.71gb,3g.71gb -C",
        ),
        (
            "auto",
            3,
            WHOLE,
            "asked: 3 workers, available: 2 whole GPU(s); lower workers to 2, or use --device cpu",
        ),
        (
            "cpu",
            9,
            [],
            "asked: 9 ranks on CPU, available per node: 2 CPUs, which hold 8 at 4 ranks per CPU; ",
        ),
    ],
)
def test_local_slots_refuses(
    device: str, workers: int | None, made: list[dict[str, Any]], text: str
) -> None:
    with pytest.raises(PlacementError) as error:
        local_slots(device, workers, gpus(*made), 2.0)
    assert text in str(error.value)


def brute_share(nodes: list[Fraction], workers: int) -> Fraction | None:
    """Deal ranks out one by one for every allowed share, largest first."""
    shares = [Fraction(n) for n in range(20, 0, -1)] + [
        Fraction(1, 2),
        Fraction(1, 3),
        Fraction(1, 4),
    ]
    for share in shares:
        left, placed = list(nodes), 0
        for i, _ in itertools.product(range(len(left)), range(workers)):
            if left[i] >= share and placed < workers:
                left[i] -= share
                placed += 1
        if placed == workers:
            return share
    return None


@settings(max_examples=150)
@given(st.lists(st.fractions(0, 16, max_denominator=4), max_size=4), st.integers(1, 40))
def test_cpu_share_against_brute_force(nodes: list[Fraction], workers: int) -> None:
    expected = brute_share(nodes, workers)
    if expected is None:
        with pytest.raises(PlacementError):
            cpu_share([float(n) for n in nodes], workers)
    else:
        assert cpu_share([float(n) for n in nodes], workers) == float(expected)


@pytest.mark.parametrize(
    ("nodes", "workers", "share"),
    [
        ([2], 2, 1),
        ([2], 1, 2),
        ([8, 8], 4, 4),
        ([7, 3], 3, 3),
        ([2], 4, 1 / 2),
        ([1], 3, 1 / 3),
        ([2, 2], 16, 1 / 4),
    ],
)
def test_cpu_share(nodes: list[float], workers: int, share: float) -> None:
    assert cpu_share(nodes, workers) == share


def test_cpu_share_refuses_with_what_each_node_has() -> None:
    with pytest.raises(PlacementError) as error:
        cpu_share([2.0, 1.5], 99)
    assert str(error.value) == (
        "asked: 99 ranks on CPU, available per node: 2, 1.5 CPUs, which hold 14 at 4 ranks per "
        "CPU; "
        "lower workers to 14, or add nodes"
    )
    with pytest.raises(PlacementError, match="available per node: none CPUs"):
        cpu_share([], 1)


@pytest.mark.parametrize(
    ("visible", "local_rank", "left", "own"),
    [
        ("MIG-a,MIG-b", 1, "MIG-b", ["MIG-b"]),
        ("MIG-a,MIG-b", 2, "MIG-a", ["MIG-a"]),
        ("MIG-a", 1, "MIG-a", ["MIG-a"]),
        ("0,1", 1, "0,1", []),
    ],
)
def test_a_process_keeps_one_slice(
    visible: str, local_rank: int, left: str, own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert take_own_slice(local_rank) == own
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
