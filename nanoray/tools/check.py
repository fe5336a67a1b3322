"""Check that this machine is ready to train, and show what would run where. Starts nothing.

`nanoray check SCRIPT.py` is another check, of a script: check_script.py.

Neither torch nor ray is imported, so the answer comes within a second: versions come from package
metadata, NCCL's from the library that torch would load.

Exit codes of `nanoray check`: 0, training works, perhaps with problems that are not
fatal; 1, training does not work; 2, the flags are wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
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

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nanoray import __version__
from nanoray.cli import Page, Parser, exit_code_of, name_program, parse_args
from nanoray.config import Config, Settings
from nanoray.config.data import exists
from nanoray.config.mesh import IN_REPLICA
from nanoray.config.settings import lines_of, public
from nanoray.data import cifar10
from nanoray.data.dataset import absolute, cache_dir
from nanoray.data.token_folder import inspect_folder
from nanoray.errors import ConfigError, DataError, NanorayError
from nanoray.host import host, mig
from nanoray.host.choose import precision_of
from nanoray.host.device import Device
from nanoray.host.gpus import discover_gpus
from nanoray.host.slots import Slots, local_slots
from nanoray.mesh.layout import Layout
from nanoray.mesh.rendezvous import RankDevice, choose_backend

GIB = 2**30
NO_NETWORK = {
    "stdlib": "made from Python's standard library, needs no network",
    "cifar10-generated": "generated, needs no network",
}
RAY_PORT = 6379  # of a Ray head whose address names none
RAY_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class Problem:
    """A problem and its remedy; `fatal` when training cannot start."""

    what: str
    remedy: str
    fatal: bool


def survey(settings: Settings, nvml: Any = None) -> dict[str, Any]:
    """Inspect this machine and decide what a run with these settings would be here.

    Returns plain data that json.dumps accepts; `problems` and `can_train` are its last keys.
    """
    config = settings.config
    gpus = discover_gpus(nvml)
    cpus = host.available_cpus()
    features = host.cpu_features()

    cuda: dict[str, str | None] = {"torch_build": torch_cuda_build(), "driver": None, "nccl": None}
    nccl = None
    if gpus:
        cuda["driver"] = driver_cuda(nvml)
    # A CPU build of torch loads no NCCL, whatever the system has installed.
    if cuda["torch_build"]:
        nccl = nccl_version()
    if nccl:
        cuda["nccl"] = ".".join(str(part) for part in nccl)

    report: dict[str, Any] = {
        "versions": versions(),
        "cpu": {"name": host.cpu_name(), "usable_cores": cpus, "features": sorted(features)},
        "memory": {
            "available_gib": round(host.available_memory_bytes() / GIB, 1),
            "shm_gib": shm_gib(),
        },
        "cuda": cuda,
        "gpus": [gpu.to_dict() for gpu in gpus],
        "dataset": dataset_state(config),
        "out_dir": out_dir_state(config),
        "environment": sys.prefix,
        "ray": ray_state(config),
    }
    problems = list(version_problems(report["versions"]))

    # The choices of a launch, by the functions that a launch calls. A refused choice becomes a
    # problem, and the report keeps the choices before it.
    slots = None
    try:
        workers = None if config.workers == "auto" else config.workers
        slots = local_slots(config.device, workers, gpus, cpus)
        precision, reason = precision_of(config, slots.kind, slots.devices, features)
        report["placement"] = {"choice": _placement(config, slots), "reason": slots.reason}
        report["precision"] = {"choice": precision, "reason": reason}

        # After the placement, because the backend depends on which ranks share a GPU.
        backend = choose_backend(_rank_devices(slots), config.backend, nccl)
        report["backend"] = {"choice": backend.backend, "reason": backend.reason}
        settings = settings.set({"workers": slots.workers}, slots.found)
        settings = settings.set({"precision": precision}, reason)
    except NanorayError as error:
        what, _, remedy = str(error).partition("; ")
        problems.append(Problem(what, remedy, fatal=True))

    report["settings"] = [
        {"key": key, "value": public(key, value), "origin": by}
        for key, value, by in settings.chosen()
    ]
    problems += gpu_problems(gpus, slots, cuda)
    problems += host_problems(report)
    report["problems"] = [asdict(problem) for problem in problems]
    report["can_train"] = not any(problem.fatal for problem in problems)
    return report


def _placement(config: Config, slots: Slots) -> str:
    """Describe the number and kind of slots, and the mesh where it has more than one axis."""
    choice = f"{slots.workers} × {slots.kind}"
    if config.replica_ranks * config.ep * config.replicas > 1:
        choice += f" = {Layout.of(config, slots.workers)}"
    return choice


def _rank_devices(slots: Slots) -> list[RankDevice]:
    """Return the device of each rank, as the choice of a backend needs it."""
    if not slots.devices:
        return [RankDevice("cpu", "this node", "")] * slots.workers
    return [RankDevice(device.kind, "this node", device.parent_uuid) for device in slots.devices]


# What is installed.


def versions() -> dict[str, str | None]:
    """Return the versions of nanoray, Python, torch and ray, None for one that is not installed."""
    return {
        "nanoray": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": _installed_version("torch"),
        "ray": _installed_version("ray"),
    }


def _installed_version(name: str) -> str | None:
    # metadata.version raises where a package is missing; this loop does not.
    for distribution in metadata.distributions(name=name):
        return distribution.version
    return None


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return Path("torch")
    return Path(spec.origin).parent


def torch_cuda_build() -> str | None:
    """Return the CUDA version that torch was built for, None for a CPU build.

    Reads torch's version.py, because importing torch takes seconds.
    """
    path = _torch_folder() / "version.py"
    if not path.exists():
        return None
    # The line is "cuda: Optional[str] = '13.0'", with None instead of the text in a CPU build.
    match = re.search(r"^cuda\b[^=\n]*= '([\d.]+)'", path.read_text("utf-8"), re.MULTILINE)
    if match is None:
        return None
    return match[1]


def nccl_version() -> tuple[int, int, int] | None:
    """Return the version of the NCCL library that training would load, None without one.

    Tries them in the order of the dynamic loader: preloaded, torch's own, the system's.
    """
    preloaded = re.split(r"[ :]", os.environ.get("LD_PRELOAD", ""))
    paths = [path for path in preloaded if "nccl" in path]
    paths.append(str(_torch_folder().parent / "nvidia/nccl/lib/libnccl.so.2"))
    paths.append("libnccl.so.2")

    number = ctypes.c_int()
    for path in paths:
        try:
            ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):  # no such library, or not NCCL
            continue
        # NCCL encodes 2.29.7 as 22907.
        return number.value // 10000, number.value // 100 % 100, number.value % 100
    return None


def driver_cuda(nvml: Any = None) -> str | None:
    """Return the newest CUDA version that the driver supports, None without a driver."""
    with contextlib.suppress(Exception):  # NVMLError cannot be named before pynvml is imported
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()
        number = nvml.nvmlSystemGetCudaDriverVersion()
        nvml.nvmlShutdown()
        return f"{number // 1000}.{number % 1000 // 10}"  # CUDA encodes 12.8 as 12080
    return None


def shm_gib() -> float | None:
    """Return the size of /dev/shm in GiB, None on systems without it."""
    if not os.path.isdir("/dev/shm"):
        return None
    return round(shutil.disk_usage("/dev/shm").total / GIB, 2)


# What a run reads and writes.


def dataset_state(config: Config) -> dict[str, Any]:
    """Return the dataset's name, whether it is missing, a note on it, and why it is refused.

    Of files with tokens only names and headers are read.
    """
    missing = False
    refusal = ""
    if config.model == "own":
        note = "data of the script"
    elif config.dataset in NO_NETWORK:
        note = NO_NETWORK[config.dataset]
    elif config.dataset in ("auto", "shakespeare", "cifar10"):
        note = _download_note(config)
    else:
        path = absolute(config.dataset)
        missing = not exists(str(path))
        note = "there"
        if missing:
            note = "not there, or closed to this user"
        elif not path.is_file():
            try:
                note = inspect_folder(path, config).describe()
            except DataError as error:
                refusal = str(error)
                note = "cannot be used"
    return {"name": config.dataset, "missing": missing, "note": note, "refusal": refusal}


def _download_note(config: Config) -> str:
    """Return whether the dataset that the first run downloads is in the cache."""
    if config.model == "resnet":
        name = "CIFAR-10"
        size = "170 MB"
        substitute = "generated images"
        cached = cifar10.folder_of(config) / "meta.json"
    else:
        name = "Shakespeare"
        size = "1.1 MB"
        substitute = "Python's standard library"
        cached = cache_dir(config) / "shakespeare.txt"

    # os.path.exists returns False below a folder that is closed to this user; Path.exists raises.
    if os.path.exists(cached):
        return f"{name} is cached"
    note = f"{name} is not cached: the first run downloads {size}"
    if config.dataset == "auto":
        note += f", or offline takes {substitute}"
    return note


def out_dir_state(config: Config) -> dict[str, Any]:
    """Return whether runs can be written, and the free space. Creates nothing."""
    path = Path(config.out_dir).expanduser().absolute()
    # A run creates the missing folders, so the nearest existing one decides.
    existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    return {
        "path": config.out_dir,
        "writable": existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        "free_gib": round(shutil.disk_usage(existing).free / GIB, 1),
    }


def ray_state(config: Config) -> dict[str, Any]:
    """Return the address of the Ray cluster that a run would join, and whether its port answers.

    Both are None where a run starts a local cluster, or where Ray searches for one itself.
    """
    address = config.ray_address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local", "auto"):
        return {"address": address or None, "answers": None}
    return {"address": address, "answers": _port_answers(address)}


def _port_answers(address: str) -> bool:
    # Without a scheme, urlsplit takes the host for a path unless two slashes precede it.
    if "://" not in address:
        address = f"//{address}"
    try:
        parts = urlsplit(address)
        target = (parts.hostname or "", parts.port or RAY_PORT)
        socket.create_connection(target, timeout=RAY_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


# Problems and remedies.


def version_problems(installed: dict[str, str | None]) -> Iterator[Problem]:
    """Compare the installed versions with the ranges in the metadata of the nanoray package."""
    try:
        requirements = [Requirement(text) for text in metadata.requires("nanoray") or []]
        pythons = SpecifierSet(metadata.metadata("nanoray")["Requires-Python"])
    except metadata.PackageNotFoundError:  # nanoray is on the path but not installed
        requirements = []
        pythons = SpecifierSet()
    # A marker is that of an extra, such as `bench`, which wants less of the same package.
    ranges = {one.name: one.specifier for one in requirements if one.marker is None}

    for name in ("torch", "ray"):
        allowed = ranges.get(name, SpecifierSet())
        version = installed[name]
        install = f"pip install '{name}{_lowest_first(allowed)}'"
        if version is None:
            yield Problem(f"{name} is not installed", install, fatal=True)
        elif not allowed.contains(version, prereleases=True):
            what = (
                f"{name} {version} is outside {_lowest_first(allowed)}, the versions that nanoray "
                "is tested with"
            )
            yield Problem(what, install, fatal=False)

    if not pythons.contains(str(installed["python"]), prereleases=True):
        yield Problem(
            f"Python {installed['python']} is outside {_lowest_first(pythons)}",
            "make the environment with another",
            fatal=True,
        )


def _lowest_first(allowed: SpecifierSet) -> str:
    """Return a range as people write it: >=2.50,<3."""
    return ",".join(sorted(map(str, allowed), reverse=True))


def gpu_problems(
    gpus: list[Device], slots: Slots | None, cuda: dict[str, str | None]
) -> Iterator[Problem]:
    """Yield what prevents the use of the GPUs of this machine."""
    # With --device cpu a broken CUDA installation does not prevent training.
    gpus_needed = slots is not None and slots.kind != "cpu"
    build = cuda["torch_build"]
    driver = cuda["driver"]

    if gpus and not build:
        yield Problem(
            "this torch has no CUDA, but there are GPUs",
            "install its CUDA build, or --device cpu",
            fatal=gpus_needed,
        )
    # A driver supports every minor version of its CUDA major version.
    elif build and driver and int(driver.split(".")[0]) < int(build.split(".")[0]):
        yield Problem(
            f"torch wants CUDA {build}, the driver ends at {driver}",
            "update the driver",
            fatal=gpus_needed,
        )

    cards_with_slices = {device.parent_uuid for device in gpus if device.kind == "mig"}
    for gpu in gpus:
        if gpu.mig_mode and gpu.uuid not in cards_with_slices:
            what = f"GPU {gpu.index} is in MIG mode but has no slices"
            yield Problem(what, mig.mig_commands(gpu), fatal=False)


def host_problems(report: dict[str, Any]) -> Iterator[Problem]:
    """Yield problems of shared memory, data, disk, environment and cluster."""
    # NCCL's ranks on one host exchange data through /dev/shm; gloo does not use it.
    shm = report["memory"]["shm_gib"]
    backend = report.get("backend", {}).get("choice")
    if backend == "nccl" and shm is not None and shm < 1:
        yield Problem(
            f"/dev/shm has {shm} GiB, NCCL wants 1",
            "docker run --shm-size=8g, or a larger emptyDir",
            fatal=False,
        )

    dataset = report["dataset"]
    if dataset["missing"]:
        what = f"dataset = {dataset['name']} is {dataset['note']}"
        yield Problem(what, "correct the path", fatal=True)
    elif dataset["refusal"]:
        # The message ends with its remedy.
        what, _, remedy = dataset["refusal"].rpartition("; ")
        yield Problem(what, remedy, fatal=True)

    out_dir = report["out_dir"]
    if not out_dir["writable"]:
        what = f"out_dir = {out_dir['path']} cannot be written"
        yield Problem(what, "give another --out_dir", fatal=True)
    elif out_dir["free_gib"] < 1:
        what = f"out_dir = {out_dir['path']} has {out_dir['free_gib']} GiB free, less than 1"
        yield Problem(what, "free some", fatal=False)

    if any(letter.isspace() for letter in report["environment"]):
        yield Problem(
            f"the path of this environment has a space: {report['environment']}; Ray passes it "
            "unquoted to a shell, so `ray start --head --block` ends at once and `ray job submit` "
            "hangs; --compile on a CPU is refused",
            "make the environment in another folder; a Ray that nanoray starts itself works: "
            "--ray_address local",
            fatal=False,
        )

    ray = report["ray"]
    if ray["answers"] is False:
        what = f"no Ray answers at {ray['address']}"
        yield Problem(what, "start it, or use --ray_address local", fatal=True)


# The command.


def render(report: dict[str, Any]) -> str:
    """Format the report as aligned lines; the last one says whether training works."""
    rows = [*_machine_rows(report), *_choice_rows(report)]
    for problem in report["problems"]:
        rows.append(("problem", f"{problem['what']}; {problem['remedy']}"))

    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {value}" for label, value in rows]
    lines.append(_verdict(len(report["problems"]), report["can_train"]))
    return "\n".join(lines)


def _machine_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the label and the value of each line about this machine."""
    installed = report["versions"]
    cpu = report["cpu"]
    memory = report["memory"]
    cuda = report["cuda"]

    build = f"CUDA {cuda['torch_build']}" if cuda["torch_build"] else "CPU"
    yield (
        "nanoray",
        f"{installed['nanoray']} · python {installed['python']} · torch {installed['torch']} "
        f"({build} build) · ray {installed['ray']}",
    )
    features = " ".join(cpu["features"]) or "plain"
    yield "cpu", f"{cpu['name']} · {cpu['usable_cores']:g} usable cores · {features}"
    yield "memory", f"{memory['available_gib']} GiB available · /dev/shm {memory['shm_gib']} GiB"
    if cuda["driver"] or cuda["nccl"]:
        yield "cuda", f"driver up to CUDA {cuda['driver']} · NCCL {cuda['nccl']}"

    for gpu in report["gpus"]:
        # A slice follows its card, so its line is indented.
        label = f"  slice {gpu['index']}"
        if gpu["kind"] == "cuda":
            label = f"gpu {gpu['index']}"
        value = f"{gpu['name']} · {gpu['memory_bytes'] / GIB:.1f} GiB · {gpu['uuid']}"
        if gpu["mig_mode"]:
            value += " · MIG mode"
        yield label, value
    if not report["gpus"]:
        yield "gpus", "none"


def _choice_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the label and the value of each line about what would run."""
    for key in ("placement", "precision", "backend"):
        if key in report:  # survey adds no choice that was refused
            yield key, f"{report[key]['choice']} ({report[key]['reason']})"

    dataset = report["dataset"]
    yield "dataset", f"{dataset['name']} ({dataset['note']})"

    out_dir = report["out_dir"]
    yield "out_dir", f"{out_dir['path']} · {out_dir['free_gib']} GiB free"

    for line in lines_of(tuple(setting.values()) for setting in report["settings"]):
        yield "setting", line

    ray = report["ray"]
    suffixes = {None: "", True: " (answers)", False: " (does not answer)"}
    yield "ray", f"{ray['address'] or 'a new local one'}{suffixes[ray['answers']]}"


def _verdict(problem_count: int, can_train: bool) -> str:
    if problem_count == 0:
        return "ok: it can train"
    verdict = f"{problem_count} problem"
    if problem_count > 1:
        verdict += "s"
    if can_train:
        verdict += ", but it can train"
    return verdict


# Flags of a run that change what the check finds
OF_THE_RUN = (
    ("--workers N", "ranks that shall fit [every GPU or slice, else 2 on CPU]"),
    ("--device NAME", "cuda, mig, cpu or auto"),
    ("--backend NAME", "of the process group: nccl, gloo or auto"),
    ("--precision NAME", "whether the devices compute in it"),
    (", ".join(f"--{axis} N" for axis in IN_REPLICA), "how many ranks share a model"),
    ("--dataset NAME|PATH", "whether it is there, or can be downloaded"),
    ("--out_dir DIR", "whether runs can be written there"),
    ("--ray_address HOST:PORT", "the cluster to ask"),
)


def main(argv: list[str] | None = None) -> int:
    """Print the report for the given training flags (default: none) and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0].endswith(".py"):
        from nanoray.tools.check_script import main as check_script  # it imports torch

        return check_script(arguments)
    return exit_code_of(lambda: _run(arguments))


def _run(argv: list[str]) -> int:
    about = Page(
        "Is this machine ready, and what would run where?",
        (
            ("{prog}", "this machine, and the default recipe"),
            ("{prog} --preset gpt2-124m --workers 8 --tp 2", "another one, on eight ranks"),
            ("{prog} train.py", "does this script train as with plain torch? (train.py --help)"),
        ),
        (
            ("of the check", (("--json", "print JSON"),)),
            ("of a run, for which it checks", OF_THE_RUN),
        ),
        more="The other flags of a run count, too: --help all prints them.",
    )
    own = Parser(name_program("check"), add_help=False, allow_abbrev=False)
    own.add_argument("--json", action="store_true", help="print JSON")
    args, flags = own.parse_known_args(argv)
    loaded = parse_args(flags, name_program("check"), about)

    # Flags of a run that would be ignored here are an error, as everywhere.
    for flag in ("dry_run", "quiet"):
        if getattr(loaded, flag):
            raise ConfigError(
                f"{flag} cannot take effect: the check never starts anything; drop --{flag}"
            )

    report = survey(loaded)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(render(report))
    return 0 if report["can_train"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
