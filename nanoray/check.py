"""`python -m nanoray.check`: check that this machine is ready, and show what would run where. It
starts nothing.

Neither torch nor ray is imported: versions come from package metadata, NCCL's from the library that
torch would load. Exit code 0: training works, perhaps with problems that are not fatal; 1: it does
not; 2: the flags are wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanoray import __version__
from nanoray.cli import exit_code_of, parse_args
from nanoray.config import Config
from nanoray.data import cifar10
from nanoray.data.dataset import cache_dir
from nanoray.devices import choose, host, mig
from nanoray.devices.device import Device
from nanoray.devices.gpus import discover_gpus
from nanoray.devices.slots import Slots, local_slots
from nanoray.errors import ConfigError, NanorayError
from nanoray.mesh.layout import Layout
from nanoray.mesh.rendezvous import RankDevice, choose_backend

GIB = 2**30


@dataclass(frozen=True)
class Problem:
    """A problem and its remedy; `fatal` when training cannot start."""

    what: str
    remedy: str
    fatal: bool


def survey(config: Config, nvml: Any = None) -> dict[str, Any]:
    """Inspect this machine and decide what `config` would run here. Return plain data, `problems`
    near the end.
    """
    gpus, cpus, features = discover_gpus(nvml), host.available_cpus(), host.cpu_features()
    cuda = {"torch_build": torch_cuda_build(), "driver": driver_cuda(nvml) if gpus else None}
    nccl = nccl_version() if cuda["torch_build"] else None
    report: dict[str, Any] = {
        "versions": versions(),
        "cpu": {"name": host.cpu_name(), "usable_cores": cpus, "features": sorted(features)},
        "memory": {
            "available_gib": round(host.available_memory_bytes() / GIB, 1),
            "shm_gib": shm_gib(),
        },
        "cuda": cuda | {"nccl": ".".join(map(str, nccl)) if nccl else None},
        "gpus": [gpu.to_dict() for gpu in gpus],
        "dataset": dataset_state(config),
        "out_dir": out_dir_state(config),
        "environment": sys.prefix,
        "ray": ray_state(config),
    }
    problems, slots = [*version_problems(report["versions"])], None
    try:
        slots = local_slots(
            config.device, None if config.workers == "auto" else config.workers, gpus, cpus
        )
        bf16_gpu = all(d.bf16 for d in slots.devices) if slots.devices else None
        precision, why = choose.choose_precision(config, slots.kind, features, bf16_gpu)
        cards = [RankDevice(d.kind, "this node", d.parent_uuid) for d in slots.devices]
        cards = cards or [RankDevice("cpu", "this node", "")] * slots.workers
        mesh = (
            f" = {Layout.of(config, slots.workers)}"
            if config.tp * config.pp * config.ep > 1
            else ""
        )
        report["placement"] = {
            "choice": f"{slots.workers} × {slots.kind}{mesh}",
            "reason": slots.reason,
        }
        report["precision"] = {"choice": precision, "reason": why}
        backend = choose_backend(cards, config.backend, nccl)
        report["backend"] = {"choice": backend.backend, "reason": backend.reason}
    except NanorayError as error:
        problems.append(Problem(*str(error).partition("; ")[::2], True))
    problems += [*gpu_problems(gpus, slots, cuda), *host_problems(report)]
    report["problems"] = [asdict(problem) for problem in problems]
    report["can_train"] = not any(problem.fatal for problem in problems)
    return report


def versions() -> dict[str, str | None]:
    """Return the versions of Python and the packages that training needs, None for one that is not
    installed.
    """
    installed = {
        name: next((d.version for d in metadata.distributions(name=name)), None)
        for name in ("torch", "ray")
    }
    return {"nanoray": __version__, "python": platform.python_version(), **installed}


def _torch_folder() -> Path:
    spec = find_spec("torch")
    return Path(spec.origin if spec and spec.origin else "torch/__init__.py").parent


def torch_cuda_build() -> str | None:
    """Return the CUDA version that torch was built for, None for a CPU build, without the seconds
    of an import.
    """
    path = _torch_folder() / "version.py"
    match = re.search(
        r"^cuda\b[^=\n]*= '([\d.]+)'",
        path.read_text("utf-8") if path.exists() else "",
        re.MULTILINE,
    )
    return match[1] if match else None


def nccl_version() -> tuple[int, int, int] | None:
    """Return the version of the NCCL library that would be loaded: a preloaded one, torch's own, or
    the system's.
    """
    preloaded = [p for p in re.split(r"[ :]", os.environ.get("LD_PRELOAD", "")) if "nccl" in p]
    for path in (
        *preloaded,
        str(_torch_folder().parent / "nvidia/nccl/lib/libnccl.so.2"),
        "libnccl.so.2",
    ):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number := ctypes.c_int()))
            return number.value // 10000, number.value // 100 % 100, number.value % 100
    return None


def driver_cuda(nvml: Any = None) -> str | None:
    """Return the newest CUDA version that the driver supports, None without a driver."""
    with contextlib.suppress(Exception):  # NVMLError cannot be named before pynvml is imported
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()
        number = nvml.nvmlSystemGetCudaDriverVersion()
        nvml.nvmlShutdown()
        return f"{number // 1000}.{number % 1000 // 10}"
    return None


def shm_gib() -> float | None:
    """Return the size of /dev/shm in GiB, None on systems without it."""
    return (
        round(shutil.disk_usage("/dev/shm").total / GIB, 2) if os.path.isdir("/dev/shm") else None
    )


def dataset_state(config: Config) -> dict[str, Any]:
    """Say whether the run's data are on this machine."""
    made = {"stdlib": "made from Python's standard library, needs no network"}
    made |= {"cifar10-generated": "generated, needs no network"}
    name, size, otherwise = "Shakespeare", "1.1 MB", "Python's standard library"
    file = cache_dir(config) / "shakespeare.txt"
    if config.model == "resnet":
        name, size, otherwise = "CIFAR-10", "170 MB", "generated images"
        file = cifar10.folder_of(config) / "meta.json"
    there = True
    if config.model == "own":
        note = "data of the script"
    elif config.dataset in made:
        note = made[config.dataset]
    elif config.dataset not in ("auto", "shakespeare", "cifar10"):
        there = os.path.exists(os.path.expanduser(config.dataset))
        note = "there" if there else "not there, or closed to this user"
    elif os.path.exists(file):
        note = f"{name} is cached"
    else:
        offline = f", or offline takes {otherwise}" if config.dataset == "auto" else ""
        note = f"{name} is not cached: the first run downloads {size}{offline}"
    return {"name": config.dataset, "missing": not there, "note": note}


def out_dir_state(config: Config) -> dict[str, Any]:
    """Say whether runs can be written, and how much space is free."""
    path = Path(config.out_dir).expanduser().absolute()
    there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return {
        "path": config.out_dir,
        "writable": writable,
        "free_gib": round(shutil.disk_usage(there).free / GIB, 1),
    }


def ray_state(config: Config) -> dict[str, Any]:
    """Return the Ray cluster that a run would join and whether its port answers; None for a new
    local one.
    """
    address = (
        os.environ.get("RAY_ADDRESS", "") if config.ray_address == "auto" else config.ray_address
    )
    answers = None if address in ("", "local", "auto") else False
    with contextlib.suppress(OSError, ValueError):
        if answers is False:
            parts = urlsplit(address if "://" in address else f"//{address}")
            socket.create_connection(
                (parts.hostname or "", parts.port or 6379), timeout=0.5
            ).close()
            answers = True
    return {"address": address or None, "answers": answers}


def version_problems(found: dict[str, str | None]) -> Iterator[Problem]:
    """Compare the installed versions with the pins of pyproject.toml, read from the package's
    metadata.
    """
    try:
        pins, python = (
            metadata.requires("nanoray") or [],
            str(metadata.metadata("nanoray")["Requires-Python"]),
        )
    except metadata.PackageNotFoundError:  # nanoray is on the path but not installed
        pins, python = [], ""
    for name in ("torch", "ray"):
        pin = next(
            (m[1] for p in pins if (m := re.match(rf"{name}(?:\[\w+\])?==([\w.]+)", p))), None
        )
        have, install = found[name], f"pip install {name}" + (f"=={pin}" if pin else "")
        if have is None:
            yield Problem(f"{name} is not installed", install, fatal=True)
        elif pin and have.partition("+")[0] != pin:
            yield Problem(f"{name} {have} is not the tested version {pin}", install, fatal=False)
    bounds = dict(re.findall(r"(>=|<)3\.(\d+)", python))
    if (
        not int(bounds.get(">=", 0))
        <= int(str(found["python"]).split(".")[1])
        < int(bounds.get("<", 99))
    ):
        yield Problem(
            f"Python {found['python']} is outside {python}",
            "make the environment with another",
            fatal=True,
        )


def gpu_problems(
    gpus: list[Device], slots: Slots | None, cuda: dict[str, str | None]
) -> Iterator[Problem]:
    """Yield what prevents the use of the GPUs found."""
    wanted = slots is not None and slots.kind != "cpu"
    build, driver = cuda["torch_build"], cuda["driver"]
    if gpus and not build:
        yield Problem(
            "this torch has no CUDA, but there are GPUs",
            "install its CUDA build, or --device cpu",
            wanted,
        )
    elif build and driver and int(driver.split(".")[0]) < int(build.split(".")[0]):
        yield Problem(
            f"torch wants CUDA {build}, the driver ends at {driver}", "update the driver", wanted
        )
    for gpu in gpus:
        if gpu.mig_mode and not any(d.kind == "mig" and d.parent_uuid == gpu.uuid for d in gpus):
            yield Problem(
                f"GPU {gpu.index} is in MIG mode but has no slices",
                mig.mig_commands(gpu),
                fatal=False,
            )


def host_problems(report: dict[str, Any]) -> Iterator[Problem]:
    """Yield problems of shared memory, data, disk, environment and cluster."""
    shm, out, ray = report["memory"]["shm_gib"], report["out_dir"], report["ray"]
    if shm is not None and shm < 1 and report.get("backend", {}).get("choice") == "nccl":
        yield Problem(
            f"/dev/shm has {shm} GiB, NCCL wants 1",
            "docker run --shm-size=8g, or a larger emptyDir",
            False,
        )
    if report["dataset"]["missing"]:
        yield Problem(
            f"dataset = {report['dataset']['name']} is {report['dataset']['note']}",
            "correct the path",
            fatal=True,
        )
    if not out["writable"]:
        yield Problem(
            f"out_dir = {out['path']} cannot be written", "give another --out_dir", fatal=True
        )
    elif out["free_gib"] < 1:
        yield Problem(
            f"out_dir = {out['path']} has {out['free_gib']} GiB free, less than 1",
            "free some",
            fatal=False,
        )
    if any(letter.isspace() for letter in report["environment"]):
        yield Problem(
            f"the path of this environment has a space: {report['environment']}; Ray passes it "
            "unquoted to a shell, so "
            "`ray start --head --block` ends at once and `ray job submit` hangs; --compile on a "
            "CPU is refused",
            "make the environment in another folder; a Ray that nanoray starts itself works: "
            "--ray_address local",
            fatal=False,
        )
    if ray["answers"] is False:
        yield Problem(
            f"no Ray answers at {ray['address']}",
            "start it, or use --ray_address local",
            fatal=True,
        )


def render(report: dict[str, Any]) -> str:
    """Format the report as aligned lines; the last one says whether training works."""
    found, cpu, memory, cuda, out = (
        report[key] for key in ("versions", "cpu", "memory", "cuda", "out_dir")
    )
    torch = f"torch {found['torch']} ({'CUDA ' + cuda['torch_build'] if cuda['torch_build'] else 'CPU'} build)"
    rows = [
        (
            "nanoray",
            f"{found['nanoray']} · python {found['python']} · {torch} · ray {found['ray']}",
        ),
        (
            "cpu",
            f"{cpu['name']} · {cpu['usable_cores']:g} usable cores · "
            f"{' '.join(cpu['features']) or 'plain'}",
        ),
        ("memory", f"{memory['available_gib']} GiB available · /dev/shm {memory['shm_gib']} GiB"),
    ]
    if cuda["driver"] or cuda["nccl"]:
        rows.append(("cuda", f"driver up to CUDA {cuda['driver']} · NCCL {cuda['nccl']}"))
    for gpu in report["gpus"]:
        label = f"gpu {gpu['index']}" if gpu["kind"] == "cuda" else f"  slice {gpu['index']}"
        note = " · MIG mode" if gpu["mig_mode"] else ""
        rows.append(
            (label, f"{gpu['name']} · {gpu['memory_bytes'] / GIB:.1f} GiB · {gpu['uuid']}{note}")
        )
    if not report["gpus"]:
        rows.append(("gpus", "none"))
    for key in ("placement", "precision", "backend"):
        if key in report:
            rows.append((key, f"{report[key]['choice']} ({report[key]['reason']})"))
    rows.append(("dataset", f"{report['dataset']['name']} ({report['dataset']['note']})"))
    rows.append(("out_dir", f"{out['path']} · {out['free_gib']} GiB free"))
    answers = {None: "", True: " (answers)", False: " (does not answer)"}[report["ray"]["answers"]]
    rows.append(("ray", f"{report['ray']['address'] or 'a new local one'}{answers}"))
    rows += [("problem", f"{p['what']}; {p['remedy']}") for p in report["problems"]]
    width, count = max(len(label) for label, _ in rows), len(report["problems"])
    verdict = f"{count} problem{'s' * (count != 1)}" + ", but it can train" * report["can_train"]
    return "\n".join(
        [
            *(f"{label:<{width}}  {text}" for label, text in rows),
            verdict if count else "ok: it can train",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Print the report for the given training flags (default: none) and return the exit code."""
    return exit_code_of(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    about = "Is this machine ready, and what would run where? Flags are those of a run; --json prints JSON."
    loaded = parse_args([a for a in argv if a != "--json"], "nanoray.check", about)
    for flag in ("dry_run", "quiet"):
        if getattr(loaded, flag):
            raise ConfigError(
                f"{flag} cannot take effect: the check never starts anything; drop --{flag}"
            )
    report = survey(loaded.config)
    print(json.dumps(report, indent=2) if "--json" in argv else render(report))
    return 0 if report["can_train"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
