"""Check that this machine is ready to train, and show what would run where. Starts nothing.

`nanoray check SCRIPT.py` is another check, of a script: check_script.py. `nanoray check mig` shows
the MIG slices of a GPU: mig.py.

Exit codes: 0, training works, perhaps with problems that are not fatal; 1, it does not; 2, the flags
are wrong.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from nanoray import __version__
from nanoray.cli import exit_code_of, name_program, parse_args
from nanoray.cli import mig as mig_command
from nanoray.config import Config
from nanoray.config.choose import precision_of
from nanoray.config.layout import Layout
from nanoray.errors import ConfigError, NanorayError
from nanoray.machine import host, mig
from nanoray.machine.device import Device
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.slots import Slots, local_slots
from nanoray.machine.text import aligned
from nanoray.parallel.rendezvous import RankDevice, choose_backend

GIB = 2**30
RAY_PORT = 6379  # of a Ray head whose address names none
RAY_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class Problem:
    """A problem and its remedy; `fatal` when training cannot start."""

    what: str
    remedy: str
    fatal: bool


class Survey(NamedTuple):
    """What was found: lines with their labels, and problems."""

    rows: list[tuple[str, str]]
    problems: list[Problem]

    @property
    def can_train(self) -> bool:
        """Whether a run would start here."""
        return not any(problem.fatal for problem in self.problems)


def survey(config: Config, nvml: Any = None) -> Survey:
    """Inspect this machine and decide what a run of this configuration would be here."""
    gpus = discover_gpus(nvml)
    cpus = host.available_cpus()
    build, nccl = torch_builds()
    driver = driver_cuda(nvml) if gpus else None
    rows = [*_machine_rows(cpus, gpus, build, driver, nccl)]
    problems: list[Problem] = []

    # The choices of a launch, by the functions that a launch calls. A refused choice becomes a
    # problem, and the report keeps the choices before it.
    slots = None
    try:
        workers = None if config.workers == "auto" else config.workers
        slots = local_slots(config.device, workers, gpus, cpus)
        precision, reason = precision_of(config, slots.kind, slots.devices, host.cpu_features())
        rows.append(("placement", f"{_placement(config, slots)} ({slots.reason})"))
        rows.append(("precision", f"{precision} ({reason})"))

        # After the placement, because the backend depends on which ranks share a GPU.
        backend = choose_backend(_rank_devices(slots), config.backend, nccl)
        rows.append(("backend", f"{backend.backend} ({backend.reason})"))
    except NanorayError as error:
        what, _, remedy = str(error).partition("; ")
        problems.append(Problem(what, remedy, fatal=True))

    problems += gpu_problems(gpus, slots, build, driver)
    row, found = ray_state(config)
    rows.append(row)
    problems += found
    return Survey(rows, problems)


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


# This machine.


def torch_builds() -> tuple[str | None, tuple[int, int, int] | None]:
    """Return the CUDA version that torch was built for, and the NCCL in force; None without them."""
    import torch

    if torch.version.cuda is None:
        return None, None
    return torch.version.cuda, torch.cuda.nccl.version()


def driver_cuda(nvml: Any = None) -> str | None:
    """Return the newest CUDA version that the driver supports, None without a driver."""
    with contextlib.suppress(Exception):  # NVMLError cannot be named before pynvml is imported
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()
        number = nvml.nvmlSystemGetCudaDriverVersion()
        nvml.nvmlShutdown()
        return f"{number // 1000}.{number % 1000 // 10}"  # CUDA encodes 12.8 as 12080
    return None


# The cluster.


def ray_state(config: Config) -> tuple[tuple[str, str], list[Problem]]:
    """Return the line and the problems of the Ray cluster that a run would join."""
    address = config.ray_address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return ("ray", "a new local one"), []
    # Ray searches for the cluster of `auto` itself.
    if address == "auto" or _port_answers(address):
        return ("ray", address), []
    what = f"no Ray answers at {address}"
    return ("ray", address), [Problem(what, "start it, or use --ray_address local", fatal=True)]


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


def gpu_problems(
    gpus: list[Device], slots: Slots | None, build: str | None, driver: str | None
) -> Iterator[Problem]:
    """Yield what prevents the use of the GPUs of this machine."""
    # With --device cpu a broken CUDA installation does not prevent training.
    gpus_needed = slots is not None and slots.kind != "cpu"
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


def _machine_rows(
    cpus: float,
    gpus: list[Device],
    build: str | None,
    driver: str | None,
    nccl: tuple[int, ...] | None,
) -> Iterator[tuple[str, str]]:
    """Yield the label and the value of each line about this machine."""
    versions = {"nanoray": __version__} | {
        name: metadata.version(name) for name in ("torch", "ray")
    }
    text = " · ".join(f"{name} {version}" for name, version in versions.items())
    yield "versions", f"{text} ({f'CUDA {build}' if build else 'CPU'} build)"
    yield "cpu", f"{host.cpu_name()} · {cpus:g} usable cores"
    available_gib = host.available_memory_bytes() / GIB
    yield "memory", f"{available_gib:.1f} GiB available"
    if nccl:
        number = ".".join(map(str, nccl))
        yield "cuda", f"driver up to CUDA {driver} · NCCL {number}"
    for gpu in gpus:
        # A slice follows its card, so its line is indented.
        label = f"gpu {gpu.index}" if gpu.kind == "cuda" else f"  slice {gpu.index}"
        mode = " · MIG mode" if gpu.mig_mode else ""
        yield label, f"{gpu.name} · {gpu.memory_bytes / GIB:.1f} GiB · {gpu.uuid}{mode}"
    if not gpus:
        yield "gpus", "none"


# The command.


def render(report: Survey) -> str:
    """Format the report as aligned lines; the last one says whether training works."""
    rows = [*report.rows]
    rows += [("problem", f"{problem.what}; {problem.remedy}") for problem in report.problems]
    verdict = "ok: it can train"
    if report.problems:
        verdict = f"{len(report.problems)} problem(s)"
        verdict += ", but it can train" if report.can_train else ""
    return "\n".join([*aligned(rows), verdict])


ABOUT = """usage: {prog} [SCRIPT.py] [flags]

Is this machine ready, and what would run where? The flags are those of a run.

  {prog}
      this machine, and the default recipe
  {prog} --preset gpt2-124m --workers 8 --tp 2
      another one, on eight ranks
  {prog} train.py
      does this script train as with plain torch? (train.py --help)
  {prog} mig plan|show
      the MIG slices that a card supports, and those of this machine
"""


def main(argv: list[str] | None = None) -> int:
    """Print the report for the given training flags (default: none) and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["mig"]:
        return mig_command.main(arguments[1:])
    if arguments and arguments[0].endswith(".py"):
        from nanoray.lab.check_script import main as check_script  # it imports torch

        return check_script(arguments)
    return exit_code_of(lambda: _run(arguments))


def _run(argv: list[str]) -> int:
    loaded = parse_args(argv, name_program("check"), ABOUT)

    # Flags of a run that would be ignored here are an error, as everywhere.
    for flag in ("dry_run", "quiet", "verbose"):
        if getattr(loaded, flag):
            raise ConfigError(
                f"{flag} cannot take effect: the check never starts anything; drop --{flag}"
            )

    report = survey(loaded.config)
    print(render(report))
    return 0 if report.can_train else 1


if __name__ == "__main__":
    raise SystemExit(main())
