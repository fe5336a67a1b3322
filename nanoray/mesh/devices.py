"""Find this node's devices: GPUs and MIG slices with memory and peak speed, CPUs within their quota.

Neither torch nor ray is imported here, so the driver starts fast. NVML is opened and closed in each call. MIG geometry
and peaks are from NVIDIA's MIG User Guide and data sheets. A peak that is not in the table is None, never a guess.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from nanoray.config import Config
from nanoray.errors import ConfigError, PlacementError
from nanoray.kernel_options import auto_on_gpus, cannot_audit

T = TypeVar("T")
MAX_RANKS_PER_CPU = 4
BF16_UNITS = frozenset({"amx_bf16", "avx512_bf16"})
# --precision auto: narrower layers were not measured, or their casts cost more than bf16 gains (docs/step.md).
BF16_MIN_WIDTH = {"flash": 256, "plain": 128}
PLAIN_MAX_BLOCK = 256  # --attention auto: the largest block_size at which plain attention was measured

# Compute slices (of 7) and memory slices (of 8) -> how many fit on one GPU; every GPU with 7 slices has these six.
MIG_SHAPES = {(1, 1): 7, (1, 2): 4, (2, 2): 3, (3, 4): 2, (4, 4): 1, (7, 8): 1}
_MIG_GB = (40, 80, 94, 96, 141, 180)  # nominal memory: A100, A100 and H100, H100 NVL, H100, H200, B200
_PROFILE = re.compile(r"(?:(\d)c\.)?(\d+g\.\d+gb)")

# NVML name -> dense TFLOP/s with float32 accumulation: bf16, fp16, TF32, float32; memory GB/s. 0: none.
_PEAKS: tuple[tuple[str, float, float, float, float, float], ...] = (
    (r"B200", 2250, 2250, 1125, 75, 8000),
    (r"H200", 989.4, 989.4, 494.7, 66.9, 4800),
    (r"H200 NVL", 835.5, 835.5, 417.8, 60, 4800),
    (r"H100 (80GB HBM3|SXM5?)", 989.4, 989.4, 494.7, 66.9, 3350),
    (r"H100 NVL", 835.5, 835.5, 417.8, 60, 3938),
    (r"H100 PCIe", 756.5, 756.5, 378.0, 51.2, 2039),
    (r"A100", 312, 312, 156, 19.5, 0),  # the memory differs by board
    (r"A100-(SXM4|PCIE)-40GB", 312, 312, 156, 19.5, 1555),
    (r"A100-SXM4-80GB", 312, 312, 156, 19.5, 2039),
    (r"A100 80GB PCIe", 312, 312, 156, 19.5, 1935),
    (r"L40S", 362.05, 362.05, 183, 91.6, 864),
    (r"L4", 121, 121, 60, 30.3, 300),
    (r"A10", 125, 125, 62.5, 31.2, 600),
    (r"RTX 3090", 71, 71, 35.6, 35.6, 936),
    (r"RTX 4090", 165.2, 165.2, 82.6, 82.6, 1008),
    (r"T4", 0, 65, 0, 8.1, 320),
    (r"V100-SXM2-(16|32)GB", 0, 125, 0, 15.7, 900),
)
_CPU_FEATURES = frozenset({"amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2", "fma", "bf16", "sve", "asimd"})


@dataclass(frozen=True)
class Device:
    """A device that a rank can be bound to."""

    kind: str  # "cuda" | "mig" | "cpu"
    index: int  # NVML's index of a GPU; for a slice, its index on its GPU
    uuid: str  # for CUDA_VISIBLE_DEVICES; "" for a CPU
    name: str
    memory_bytes: int
    parent_uuid: str  # the physical GPU; equals uuid for a whole one
    profile: str = ""  # "1g.18gb"
    compute_fraction: float = 1.0  # of the GPU's peak FLOP/s; 0 when the profile is unknown
    bandwidth_fraction: float = 1.0
    mig_mode: bool = False  # a whole GPU that only its slices can use
    bf16: bool = False  # compute capability >= 8

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Device:
        return cls(**values)


@dataclass(frozen=True)
class Load:
    """What a GPU or slice does now. None: NVML does not tell, as it does not of a slice's kernels and power."""

    device: Device
    busy: int | None  # percent of the last sample, up to a second long, in which some kernel ran
    used_bytes: int | None
    watts: float | None
    pids: tuple[int, ...] | None  # of processes that compute on it; in a container perhaps the host's ids


@dataclass(frozen=True)
class Slots:
    """The slots of one machine: one rank per device, or `workers` ranks on its CPUs."""

    kind: str
    devices: tuple[Device, ...]  # empty on CPU
    workers: int
    reason: str


def discover_gpus(nvml: Any = None) -> list[Device]:
    """List whole GPUs, each followed by its MIG slices, filtered and ordered by CUDA_VISIBLE_DEVICES.

    Without a driver the list is empty. A GPU in CUDA_VISIBLE_DEVICES includes its slices. Indices are NVML's (bus
    order), which may differ from CUDA's order by speed; ranks are bound by UUID, so this does not matter.
    """
    devices: list[Device] = _ask(_read_gpus, [], nvml)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return devices if visible is None else _visible(devices, visible)


def gpu_loads(nvml: Any = None) -> list[Load]:
    """Return what each GPU and slice of `discover_gpus` does now, in its order."""
    devices = discover_gpus(nvml)
    return _ask(lambda nvml: [_read_load(nvml, device) for device in devices], [], nvml)


def _read_load(nvml: Any, device: Device) -> Load:
    def told(of: Callable[[Any], Any]) -> Any:
        with contextlib.suppress(nvml.NVMLError):  # not supported by a slice, or not permitted in a container
            return of(nvml.nvmlDeviceGetHandleByUUID(device.uuid))
        return None

    return Load(
        device,
        told(lambda handle: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        told(lambda handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
        told(lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        told(lambda handle: tuple(int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle))),
    )


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or "" without one."""
    return _ask(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()), "")


def _ask(question: Callable[[Any], T], otherwise: T, nvml: Any = None) -> T:
    """Return what `question` learns from NVML while it is open; `otherwise` without its module or a driver."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return otherwise
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            return question(nvml)
        finally:
            nvml.nvmlShutdown()
    return otherwise


def take_own_slice(local_rank: int) -> list[str]:
    """Leave one MIG slice of CUDA_VISIBLE_DEVICES to this process, and return it; empty where there are none.

    CUDA shows every process only the first of several. Call it before CUDA starts.
    """
    slices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.startswith("MIG-")]
    if len(slices) > 1:
        slices = [slices[local_rank % len(slices)]]
        os.environ["CUDA_VISIBLE_DEVICES"] = slices[0]
    return slices


def _read_gpus(nvml: Any) -> list[Device]:
    devices: list[Device] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):  # a GPU that fell off the bus
            devices += _read_gpu(nvml, index)
    return devices


def _read_gpu(nvml: Any, index: int) -> list[Device]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    bf16 = nvml.nvmlDeviceGetCudaComputeCapability(handle)[0] >= 8
    total, mig_mode = 0, False
    with contextlib.suppress(nvml.NVMLError):  # not permitted in a container that has one slice
        total = nvml.nvmlDeviceGetMemoryInfo(handle).total
    with contextlib.suppress(nvml.NVMLError):  # not supported by this GPU
        mig_mode = bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    found = [Device("cuda", index, uuid, name, total, uuid, mig_mode=mig_mode, bf16=bf16)]
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if mig_mode else 0):
        with contextlib.suppress(nvml.NVMLError):  # an empty place
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
            part_uuid, attributes = nvml.nvmlDeviceGetUUID(part), nvml.nvmlDeviceGetAttributes_v2(part)
            profile = _profile_of(nvml.nvmlDeviceGetName(part), attributes, total)
            label, memory = f"{name} MIG {profile or 'unknown'}", int(attributes.memorySizeMB) << 20
            shares = _fractions(label)
            found.append(Device("mig", i, part_uuid, label, memory, uuid, profile, *shares, bf16=bf16))
    return found


def _profile_of(name: str, attributes: Any, gpu_bytes: int) -> str:
    """Return the profile in the slice's name, or (older drivers give the GPU's name only) from its memory's share."""
    match, gb = _PROFILE.search(name), _mig_gb(gpu_bytes)
    if match or not gb:
        return match.group() if match else ""
    shape = (int(attributes.gpuInstanceSliceCount), round(8 * (attributes.memorySizeMB << 20) / gpu_bytes))
    return profile_name(gb, *shape) if shape in MIG_SHAPES else ""


def _mig_gb(gpu_bytes: int) -> int:
    """Return the nominal memory in a GPU's profile names (141 for an H200's 140.4 GiB), 0 for a GPU without MIG."""
    nearest = min(_MIG_GB, key=lambda gb: abs(gb - gpu_bytes / 2**30))
    return nearest if abs(nearest - gpu_bytes / 2**30) <= 1.5 else 0


def profile_name(gb: int, compute: int, memory: int) -> str:
    """Return a profile's name on a GPU with `gb` of memory: 1g.18gb is one compute and one memory slice of 141 GB."""
    return f"{compute}g.{math.floor(gb * memory / 8 + 0.5)}gb"


def _visible(devices: list[Device], value: str) -> list[Device]:
    """Apply CUDA's rule: the list ends at the first entry that names no device, or more than one."""
    chosen: list[Device] = []
    for token in (t.strip() for t in value.split(",")):
        if token.isdecimal():
            hits = [d.uuid for d in devices if d.kind == "cuda" and d.index == int(token)]
        elif token.startswith(("GPU-", "MIG-")):
            exact = [d.uuid for d in devices if d.uuid == token]
            hits = exact or [d.uuid for d in devices if d.uuid.startswith(token)]
        else:
            hits = []
        if len(hits) != 1:
            break
        chosen += [d for d in devices if hits[0] in (d.uuid, d.parent_uuid) and d not in chosen]
    return chosen


def mig_profile(name: str) -> tuple[int, int]:
    """Return the compute slices (of 7) and memory slices (of 8) of a profile, or of a device name that ends in one.

    1g.10gb is two memory slices of a 40 GB card or one of an 80 GB card; the latter unless the name says 40GB. Raises
    PlacementError for an unknown profile.
    """
    match = _PROFILE.search(name)
    sizes = sorted(_MIG_GB, key=lambda gb: gb == (40 if "40GB" in name else 80))  # the last one wins
    shapes = {profile_name(gb, *shape): shape for gb in sizes for shape in MIG_SHAPES}
    if not match or match[2] not in shapes:
        raise PlacementError(f"{name} is no MIG profile known here; known: {', '.join(sorted(shapes))}")
    compute, memory = shapes[match[2]]
    return int(match[1] or compute), memory


def mig_commands(gpu: Device, workers: int | None = None) -> str:
    """Return commands, to be printed, that cut `gpu` into the largest slices of which `workers` (default: most) fit."""
    gb, wanted = _mig_gb(gpu.memory_bytes), min(workers or 7, 7)
    if not gb:
        return f"use a GPU that has MIG ({gpu.name} is not known to)"
    shape = next(shape for shape in reversed(MIG_SHAPES) if MIG_SHAPES[shape] >= wanted)
    profiles = ",".join([profile_name(gb, *shape)] * MIG_SHAPES[shape])
    enable = "" if gpu.mig_mode else f"sudo nvidia-smi -i {gpu.index} -mig 1 && "
    return f"run: {enable}sudo nvidia-smi mig -i {gpu.index} -cgi {profiles} -C"


def _fractions(name: str) -> tuple[float, float]:
    if " MIG " not in name:
        return 1.0, 1.0
    try:
        compute, memory = mig_profile(name)
    except PlacementError:
        return 0.0, 0.0
    return compute / 7, memory / 8


def _peak(device: Device | str, column: int) -> float | None:
    name = device if isinstance(device, str) else device.name
    fractions = _fractions(name) if isinstance(device, str) else (device.compute_fraction, device.bandwidth_fraction)
    bare = re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", name.partition(" MIG ")[0])
    row = next((row[1:] for row in _PEAKS if re.fullmatch(row[0], bare)), None)
    return row[column] * fractions[column == 4] * (1e9 if column == 4 else 1e12) or None if row else None


def peak_flops(device: Device | str, dtype: str) -> float | None:
    """Return the dense peak FLOP/s for "bf16", "fp16", "tf32" or "fp32", None when unknown."""
    column = {"bf16": 0, "fp16": 1, "tf32": 2, "fp32": 3}.get(dtype.removesuffix("_pure"))
    return None if column is None else _peak(device, column)


def peak_bandwidth(device: Device | str) -> float | None:
    """Return the peak memory bandwidth in bytes/s, scaled to the slice, None when unknown."""
    return _peak(device, 4)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _cgroups(root: str, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup folders, innermost first; files of one that the container hides read as empty."""
    for line in _read(Path(root, "proc/self/cgroup")).splitlines():
        number, names, path = line.split(":", 2)
        if number != "0" and controller not in names.split(","):
            continue
        base = Path(root, "sys/fs/cgroup", "" if number == "0" else controller)
        inner = base / path.strip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == base or base in folder.parents)


def available_cpus(root: str = "/") -> float:
    """Return the cores that this process may use: its affinity, or a smaller cgroup quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for folder in _cgroups(root, "cpu"):
        version_1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        quota, _, period = (_read(folder / "cpu.max") or version_1).partition(" ")
        if quota.isdecimal() and period.isdecimal():  # not "max", not -1
            cores = min(cores, int(quota) / int(period))
    return max(1.0, round(cores, 2))


def available_memory_bytes(root: str = "/") -> int:
    """Return the bytes that this process may still allocate: free memory, or less under a cgroup limit."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(Path(root, "proc/meminfo")), re.MULTILINE)
    free = int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal():
            stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
            cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # reclaimed on demand
            free = min(free, max(0, int(limit) - int(used) + cache))
    return free


def cpu_name(root: str = "/") -> str:
    """Return the processor's name, or its architecture if the system does not tell."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(Path(root, "proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def cpu_features(root: str = "/") -> frozenset[str]:
    """Return the CPU's vector extensions that matter to training; empty without /proc/cpuinfo."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read(Path(root, "proc/cpuinfo")), re.MULTILINE)
    return _CPU_FEATURES & frozenset(match[1].split()) if match else frozenset()


def choose_precision(
    config: Config, kind: str, features: frozenset[str], bf16_gpu: bool | None = None
) -> tuple[str, str]:
    """Return the precision to train in, and why. `bf16_gpu`: every GPU of the run has compute capability >= 8.

    Raises ConfigError for one that this kind of device does not have.
    """
    if config.precision == "tf32" and (kind == "cpu" or bf16_gpu is False):
        have = "there is none" if kind == "cpu" else "a GPU is older than compute capability 8"
        raise ConfigError(f"precision = tf32 is a format of GPUs, but {have}; use precision fp32")
    if config.precision != "auto":
        return config.precision, "asked for"
    if kind != "cpu":
        if bf16_gpu or (bf16_gpu is None and kind == "mig"):
            return "bf16", "every GPU multiplies bf16, which needs no loss scaler"
        why = "no GPU is known to multiply" if bf16_gpu is None else "a GPU older than compute capability 8 lacks"
        return "fp16", f"{why} bf16; fp16 runs with a loss scaler"
    if config.model != "gpt":
        return "fp32", "the gain of bf16 on a CPU was measured for GPTs only"
    units = sorted(features & BF16_UNITS)
    if not units:
        return "fp32", "this CPU has neither amx_bf16 nor avx512_bf16"
    attention = choose_attention(config, kind, "bf16", features)
    told = f"with {attention} attention {units[0]} pays from width {BF16_MIN_WIDTH[attention]} on"
    precision = "bf16" if config.n_embd >= BF16_MIN_WIDTH[attention] else "fp32"
    return precision, f"{told}, and n_embd = {config.n_embd}"


def require_compiler(config: Config, device: str) -> None:
    """Raise ConfigError where `compile` cannot work."""
    if config.compile == "cuda_graphs" and device == "cpu":
        raise ConfigError("compile = cuda_graphs, but the device is a CPU, which has no kernels to launch; use true")
    if why := cannot_compile(device) if config.compile else "":
        raise ConfigError(f"compile = true {why}, or use --compile false")


def cannot_compile(device: str) -> str:
    """Return why torch cannot compile for this device, and what helps, or "". Triton needs C on a GPU."""
    if device != "cpu":
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        missing = f"needs a C compiler for a GPU, and {' or '.join(names)} is not on the PATH"
        return "" if any(map(shutil.which, names)) else f"{missing}; install gcc, name another one in CC"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"needs a C++ compiler for a CPU, and {compiler} is not on the PATH; install it, name another one in CXX"
    if any(letter.isspace() for letter in sys.prefix):
        return (
            f"cannot work on a CPU from {sys.prefix}: torch passes this path to {compiler} unquoted, and it has a "
            "space; make the environment in another folder"
        )
    return ""


def choose_attention(config: Config, kind: str, precision: str, features: frozenset[str]) -> str:
    """Return flash, cudnn or plain: what was measured to be faster for `auto`. Raises ConfigError if it cannot be."""
    if config.attention == "cudnn" and (kind == "cpu" or precision in ("fp32", "tf32")):
        raise ConfigError(f"attention = cudnn needs a GPU and 16 bits, but this is {kind} with {precision}; use flash")
    if kind != "cpu" and (why := cannot_audit(config)):
        raise ConfigError(why)
    if config.attention != "auto":
        return config.attention
    if kind != "cpu":
        return auto_on_gpus(config)
    # In bf16 torch's fused attention takes most of its time in its backward. With dropout torch has none on CPUs: what
    # it does instead is plain attention with a slower dropout.
    short = precision == "bf16" and bool(features & BF16_UNITS) and config.block_size <= PLAIN_MAX_BLOCK
    return "plain" if short or config.dropout > 0 else "flash"


def local_slots(device: str, workers: int | None, gpus: list[Device], cpus: float) -> Slots:
    """Choose this machine's slots; `device` and `workers` as in the Config, with None for auto workers.

    GPUs and slices keep the order in which they were discovered. Raises PlacementError.
    """
    whole = tuple(d for d in gpus if d.kind == "cuda" and not d.mig_mode)
    slices = tuple(d for d in gpus if d.kind == "mig")
    in_mig_mode = [d for d in gpus if d.kind == "cuda" and d.mig_mode]
    nothing = f"device = {device} (asked: {workers or 'all'}, available: 0"
    if device in ("cuda", "mig") and not gpus:
        raise PlacementError(f"{nothing}): no GPU is visible; use --device cpu, or see nvidia-smi -L")
    if device == "cuda" and not whole:
        first = "" if slices else f"; {mig_commands(in_mig_mode[0], workers)}"
        raise PlacementError(f"{nothing} whole GPUs): all GPUs are in MIG mode; use --device mig{first}")
    if device == "mig" and not slices:
        raise PlacementError(f"{nothing} MIG slices); {mig_commands((in_mig_mode or gpus)[0], workers)}")
    auto = device == "auto"
    if device == "cuda" or (auto and whole):
        return _take("cuda", "whole GPU(s)", whole, workers, auto)
    if device == "mig" or (auto and slices):
        return _take("mig", "MIG slice(s)", slices, workers, auto)
    why = f"{len(in_mig_mode)} GPU in MIG mode without slices" if in_mig_mode else "no GPU found"
    why = f"auto: {why}" if auto else "asked for"
    count = workers or (2 if cpus >= 2 else 1)
    cpu_share([cpus], count)
    return Slots("cpu", (), count, f"{why}; {count} of at most {MAX_RANKS_PER_CPU * cpus:g} ranks on {cpus:g} CPUs")


def _take(kind: str, noun: str, found: tuple[Device, ...], workers: int | None, auto: bool) -> Slots:
    count, n = workers or len(found), len(found)
    if count > n:
        raise PlacementError(
            f"asked: {count} workers, available: {n} {noun}; lower workers to {n}, or use --device cpu"
        )
    reason = f"{'auto' if auto else 'asked for'}: {count} of {n} {noun}"
    if len({d.profile or d.name for d in found[:count]}) > 1:
        reason += "; they differ, and the slowest sets the pace"
    return Slots(kind, found[:count], count, reason)


def cpu_share(node_cpus: list[float], workers: int) -> float:
    """Return the largest CPU share (a whole number, or 1/2, 1/3, 1/4) with which `workers` ranks fit on the nodes.

    Raises PlacementError when they do not fit at MAX_RANKS_PER_CPU ranks per CPU.
    """

    def held(share: float) -> int:  # 1e-9 is for rounding errors such as 3 * (1/3) < 1
        return sum(math.floor(cpus / share + 1e-9) for cpus in node_cpus)

    whole = [float(share) for share in range(math.floor(max(node_cpus, default=0)), 0, -1)]
    for share in whole + [1 / ranks for ranks in range(2, MAX_RANKS_PER_CPU + 1)]:
        if held(share) >= workers:
            return share
    most = held(1 / MAX_RANKS_PER_CPU)
    raise PlacementError(
        f"asked: {workers} ranks on CPU, available per node: {', '.join(f'{c:g}' for c in node_cpus) or 'none'} CPUs, "
        f"which hold {most} at {MAX_RANKS_PER_CPU} ranks per CPU; lower workers to {most}, or add nodes"
    )


def return_freed_memory() -> None:
    """Make glibc give freed memory back at once, so that resident memory is what is in use: what a tensor takes.

    From 64 KiB on each tensor has pages of its own. Slower: every tensor of a step is faulted in again.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # malloc.h
        libc.mallopt(mmap_threshold, 64 << 10)
        libc.mallopt(mmap_max, 1 << 20)
        libc.mallopt(trim_threshold, 64 << 10)
        libc.malloc_trim(0)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it and faulting it in again.

    On CPU activations come from malloc; with two threads a step of the CPU preset gets 6 to 10 % faster. C libraries
    without mallopt are left as they are.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 32 << 20)  # the largest that glibc accepts
        libc.mallopt(top_pad, 256 << 20)
