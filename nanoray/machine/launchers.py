"""The program that started this process as one rank of many, recognised by its variables.

    torchrun, or RANK and WORLD_SIZE of a StatefulSet    ─┐
    mpirun: Open MPI, MVAPICH, Intel MPI, MPICH, Cray     ├─► place_of(environment) ─► Place, or None
    srun: a step of SLURM with more than one task        ─┘

Each launcher is a row of a table with the names of its variables. Launchers nest: srun starts torchrun
on each node, and mpirun starts its daemons with srun. The innermost one counts, in the order torchrun,
mpirun, srun, and RANK and WORLD_SIZE without a launcher.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoray.errors import ConfigError
from nanoray.machine.interfaces import LOOPBACK

# Ports that a job's number is mapped to: below the range from which systems pick ports themselves
_PORTS = range(20000, 30000)
# SLURM numbers the steps of batch scripts, interactive shells and the like from here on
_SPECIAL_STEPS = 2**32 - 256
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# An environment variable that KubeRay's operator sets in every pod
KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"


@dataclass(frozen=True)
class Launcher:
    """The names of the variables with which one launcher numbers its ranks.

    Where several names stand, the first one that is set counts.
    """

    name: str
    command: str  # what users type
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()  # they identify the job on all of its nodes


TORCHRUN = Launcher(
    "torchrun",
    "torchrun",
    rank="RANK",
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    job=("TORCHELASTIC_RUN_ID",),
)
# RANK and WORLD_SIZE without torchrun: a StatefulSet, a Kubeflow job, DeepSpeed, a user's own script
VARIABLES = replace(TORCHRUN, name="variables", command="", job=())
SRUN = Launcher(
    "SLURM",
    "srun",
    rank="SLURM_PROCID",
    world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=("SLURM_LOCALID",),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
# Each has a test in tests/unit/test_launchers.py.
MPIRUNS = (
    Launcher(
        "Open MPI",
        "mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE",),
    ),
    Launcher(
        "MVAPICH",
        "mpirun",
        rank="MV2_COMM_WORLD_RANK",
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        "Intel MPI or MPICH",
        "mpirun",
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    ),
)


@dataclass(frozen=True)
class Place:
    """This process among the ranks that a launcher started, and where they meet."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    run_id: str  # equal on all ranks of the job
    size_variable: str

    @property
    def supervised(self) -> bool:
        """Whether the launcher lives as long as its ranks: its death leaves them without a use."""
        return self.launcher is not VARIABLES

    def describe(self) -> str:
        """Return the line that a run prints about its launcher."""
        by = self.launcher.name
        if self.launcher is VARIABLES:
            by = "the environment"
        where = "this process trains alone, without Ray"
        if self.world_size > 1:
            where = f"they meet at {self.master_addr}:{self.master_port}"
        return (
            f"ranks  {self.world_size} by {by} ({self.launcher.rank}, {self.size_variable}); "
            f"{where}"
        )


def place_of(env: Mapping[str, str]) -> Place | None:
    """Return this process's place among a launcher's ranks; None if it is alone.

    Raises ConfigError for variables that are incomplete, or with which each would train alone.
    """
    outer = _outer_launcher(env)
    if "TORCHELASTIC_RUN_ID" in env or "TORCHELASTIC_USE_AGENT_STORE" in env:
        if outer:
            _refuse_separate_torchruns(env, outer)
        if "RANK" in env:
            return _place_of_torch(env, TORCHRUN)
    if outer:
        return _with_address(env, outer)
    if "RANK" in env or "WORLD_SIZE" in env:
        return _place_of_torch(env, VARIABLES)
    return None


def describe_start(env: Mapping[str, str]) -> dict[str, Any]:
    """Return what started this process: the launcher, and its ranks in all and on this host.

    Plain data for run.json, from which a report makes a command that starts the run again. The
    launcher is "" for a process that was started by itself.
    """
    # Another launcher's variables may be left over in the driver's shell, which never reads them.
    with suppress(ConfigError):
        place = place_of(env)
        if place:
            by = place.launcher.command or "variables"
            return {"by": by, "ranks": place.world_size, "on_host": place.local_world_size}
    by = ""
    if env.get(KUBERAY) == "1":
        by = "kuberay"
    elif "job_submission_id" in env.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""):
        by = "ray job"
    return {"by": by, "ranks": 1, "on_host": 1}


def torchrun_variables(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    group_rank: int,
    group_world_size: int,
    run_id: str,
    restarts: int,
    max_restarts: int,
    error_file: Path,
) -> dict[str, str]:
    """Return the variables that torchrun gives a rank, but for where the ranks meet.

    A group is a node. error_file: where a program of torch's `@record` reports its error.
    """
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": group_rank,
        "GROUP_WORLD_SIZE": group_world_size,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    return {key: str(value) for key, value in variables.items()}


def describe_variables(env: Mapping[str, str], place: Place) -> str:
    """Return the variables that make this process a rank, with their values, for messages."""
    names = (place.launcher.rank, place.size_variable)
    return " and ".join(f"{name} = {env[name]}" for name in names)


def refuse_many_starts(env: Mapping[str, str], command: str) -> None:
    """Raise ConfigError if a launcher starts a command several times that is to be started once."""
    outer = _outer_launcher(env)
    complete = all(name in env for name in _TORCH)
    if not outer and not complete:  # what is left over of torch's variables is not read
        return
    place = place_of(env)
    if place and place.world_size > 1:
        by = place.launcher.command or "torchrun"
        raise ConfigError(
            f"{describe_variables(env, place)} make this process one of {place.world_size} ranks, "
            f"and each of them would start a run of its own; start {command} once, without {by}, "
            f"or start `nanoray train` with {by}; or unset {place.launcher.rank}"
        )


# ---- torch's own variables -----------------------------------------------------------------------


def _place_of_torch(env: Mapping[str, str], launcher: Launcher) -> Place:
    present = [key for key in _TORCH if key in env]
    missing = [key for key in _TORCH if key not in env]
    if missing:
        raise ConfigError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}; set all "
            "four (torchrun does), or none for one process"
        )
    rank, world_size = _rank_of(env, "RANK", "WORLD_SIZE")
    # DeepSpeed sets LOCAL_SIZE.
    local_world_size = max(1, _first_number(env, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), 1))
    return Place(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=whole_number(env, "LOCAL_RANK", 0),
        local_world_size=local_world_size,
        node_rank=whole_number(env, "GROUP_RANK", rank // local_world_size),
        master_addr=_master_addr(env),
        master_port=_master_port(env),
        run_id=env.get("TORCHELASTIC_RUN_ID", "env"),
        size_variable="WORLD_SIZE",
    )


def _refuse_separate_torchruns(env: Mapping[str, str], outer: Place) -> None:
    """Raise ConfigError if each process of an outer launcher started a torchrun of its own."""
    if env.get("GROUP_WORLD_SIZE") != "1":
        return
    command = outer.launcher.command
    raise ConfigError(
        f"{describe_variables(env, outer)} ({command}), but torchrun has one node "
        "(GROUP_WORLD_SIZE = 1): each would train alone; give torchrun --nnodes "
        f"{outer.world_size} and --rdzv-endpoint, or start `python` with {command} and without "
        f"torchrun; for separate runs unset {outer.launcher.rank}"
    )


# ---- srun and mpirun -----------------------------------------------------------------------------


def _outer_launcher(env: Mapping[str, str]) -> Place | None:
    """Return the place that mpirun or srun gave this process; None where it is their only one."""
    by_srun = _numbered(env, SRUN) if _is_step_of_ranks(env) else None
    for launcher in MPIRUNS:
        # With --mpi=pmi2 srun sets the variables of both, and its own ones say more.
        numbers = [env.get(launcher.rank), env.get(launcher.world_size[0])]
        if by_srun and numbers == [str(by_srun.rank), str(by_srun.world_size)]:
            continue
        by_mpi = _numbered(env, launcher)
        if by_mpi:
            return by_mpi
    return by_srun


def _is_step_of_ranks(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process, and not a batch script or an interactive shell.

    They have SLURM_PROCID, too, and the number of tasks of the whole job.
    """
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _SPECIAL_STEPS


def _numbered(env: Mapping[str, str], launcher: Launcher) -> Place | None:
    """Return a launcher's numbers for this process, still without an address; None without ranks."""
    if launcher.rank not in env:
        return None
    sizes = [name for name in launcher.world_size if name in env]
    if not sizes:
        raise ConfigError(
            f"{launcher.rank} = {env[launcher.rank]}, but {launcher.world_size[0]} is not set; "
            f"start the ranks with {launcher.command}, or unset {launcher.rank} for one process"
        )
    rank, world_size = _rank_of(env, launcher.rank, sizes[0])
    if world_size == 1:
        return None

    # Without its number on the host each rank would take the first GPU.
    local_names = (*launcher.local_rank, "LOCAL_RANK")
    if not any(name in env for name in local_names):
        raise ConfigError(
            f"{launcher.rank} = {rank} ({launcher.name}), but none of {', '.join(local_names)} says "
            "which rank of its host this is, and so which GPU it has; set LOCAL_RANK and "
            "LOCAL_WORLD_SIZE for each rank"
        )
    local_sizes = (*launcher.local_world_size, "LOCAL_WORLD_SIZE")
    local_world_size = max(1, _first_number(env, local_sizes, 1))
    node_rank = rank // local_world_size
    if launcher is SRUN:
        node_rank = whole_number(env, "SLURM_NODEID", 0)
        local_world_size = _tasks_on_node(env, node_rank)
    return Place(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=_first_number(env, local_names, 0),
        local_world_size=local_world_size,
        node_rank=node_rank,
        master_addr="",
        master_port=0,
        run_id="",
        size_variable=sizes[0],
    )


def _with_address(env: Mapping[str, str], place: Place) -> Place:
    """Add where the ranks of srun or mpirun meet.

    MASTER_ADDR and MASTER_PORT win. Otherwise the address is that of the one host, or of SLURM's
    first; the port follows from the job's number. Raises ConfigError where neither says it.
    """
    launcher = place.launcher
    addr = ""
    if "MASTER_ADDR" in env:
        addr = _master_addr(env)
    elif _is_one_host(env, place):
        addr = LOOPBACK
    elif launcher is SRUN:
        addr = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")

    # What all ranks know of their job, and no rank of another one does
    job = ".".join(env[name] for name in launcher.job if name in env)
    run_id = f"{launcher.command}-{job}" if job else launcher.command
    if not addr or not (job or "MASTER_PORT" in env):
        how = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (others: -genv NAME VALUE)"
        if launcher is SRUN:
            how = "export MASTER_ADDR=HOST MASTER_PORT=29500 before srun"
        raise ConfigError(
            f"{describe_variables(env, place)} ({launcher.name}) are ranks, and MASTER_ADDR or "
            f"MASTER_PORT is not set; {how}, with the host of rank 0 and a port of the job's own"
        )
    port = _PORTS[zlib.crc32(run_id.encode()) % len(_PORTS)]
    if "MASTER_PORT" in env:
        port = _master_port(env)
    return replace(place, master_addr=addr, master_port=port, run_id=run_id)


def _is_one_host(env: Mapping[str, str], place: Place) -> bool:
    if place.launcher is SRUN:
        for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
            if name in env:
                return _number(env, name) == 1
    return place.local_world_size == place.world_size


def _tasks_on_node(env: Mapping[str, str], node: int) -> int:
    """Return how many tasks of this step its node has, from SLURM's `2(x3),1`: 2, 2, 2 and 1."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts.extend([int(tasks)] * int(nodes or 1))
    if node < len(counts):
        return max(1, counts[node])
    return 1


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: `gpu[003-007,9],login` begins with gpu003."""
    host = ""
    depth = 0
    for character in nodes:
        if character == "," and depth == 0:
            break
        depth += {"[": 1, "]": -1}.get(character, 0)
        host += character
    # Of each pair of brackets, the first number of the first range
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", host)


# ---- values --------------------------------------------------------------------------------------


def _rank_of(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Return rank and number of ranks. Raises ConfigError if the first is outside the second."""
    rank = _number(env, rank_name)
    world_size = _number(env, size_name)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{rank_name} = {rank} is outside 0..{size_name}-1 = {world_size - 1}; ranks count "
            "from 0"
        )
    return rank, world_size


def whole_number(env: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable as a number, or the default if it is not set. Raises ConfigError."""
    if name not in env:
        return default
    return _number(env, name)


def _first_number(env: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    """Return the first of some variables that is set, as a number. Raises ConfigError."""
    for name in names:
        if name in env:
            return _number(env, name)
    return default


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError as error:
        raise ConfigError(
            f"{name} = {env[name]!r} must be a whole number: {error}; set it, or unset it"
        ) from None


def _master_addr(env: Mapping[str, str]) -> str:
    addr = env["MASTER_ADDR"].strip()
    if not addr:
        raise ConfigError("MASTER_ADDR is empty; set it to the host name or address of rank 0")
    return addr


def _master_port(env: Mapping[str, str]) -> int:
    port = _number(env, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise ConfigError(
            f"MASTER_PORT = {port} is no port; set it to a free one of rank 0's host, 1 to 65535"
        )
    return port
