"""Which launcher started a process: one table of environments, and what is read from each."""

from __future__ import annotations

import pytest

from nanoray.machine.launchers import first_host, place_of
from nanoray.parallel.rendezvous import Rendezvous

TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
TORCHRUN = TORCH | {"TORCHELASTIC_RUN_ID": "r"}
# As `srun -N 2 --ntasks-per-node 2` sets them in the fourth task
SRUN = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-17@1",
}
ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "1234"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
# The steps of a batch script and of `salloc`'s shell: they have the numbers of the whole job
BATCH = {key: SRUN[key] for key in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_LOCALID")}
BATCH |= {"SLURM_PROCID": "0"}
# mpirun inside a job starts its daemons, one per node, with srun
DAEMONS = SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
FAR = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("env", "launcher", "numbers", "addr"),
    [
        # rank, ranks, rank on the node, ranks of the node, node
        (TORCHRUN, "torchrun", (3, 4, 1, 2, 1), "10.0.0.1:29500"),
        (TORCH, "variables", (3, 4, 1, 2, 1), "10.0.0.1:29500"),
        (SRUN, "SLURM", (3, 4, 1, 2, 1), "gpu003:"),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, "SLURM", (3, 4, 1, 2, 1), "127.0.0.1:"),
        (OPEN_MPI, "Open MPI", (1, 2, 1, 2, 0), "127.0.0.1:"),
        (MVAPICH | ADDRESS, "MVAPICH", (1, 2, 1, 2, 0), "a:1234"),
        (DAEMONS | OPEN_MPI | FAR | ADDRESS, "Open MPI", (5, 8, 1, 2, 2), "a:1234"),
    ],
)
def test_each_launcher_is_recognised(
    env: dict[str, str], launcher: str, numbers: tuple[int, ...], addr: str
) -> None:
    place = place_of(env)
    assert place
    r = Rendezvous.from_env(env)
    assert place.launcher.name == launcher
    assert (
        r.rank,
        r.world_size,
        r.local_rank,
        r.local_world_size,
        r.node_rank,
    ) == numbers
    assert f"{r.master_addr}:{r.master_port}".startswith(addr)
    assert 0 < r.master_port < 2**15, "not a port that the system may have given to another program"
    said = place.describe()
    assert said.startswith(f"ranks  {r.world_size} by ")
    meets = f"{r.master_addr}:{r.master_port}"
    assert said.endswith(meets if r.world_size > 1 else "this process trains alone, without Ray")
    assert place.supervised == (launcher != "variables")


def test_the_ranks_of_a_job_meet_at_one_port_and_two_jobs_at_two() -> None:
    def port(change: dict[str, str]) -> tuple[int, str]:
        r = Rendezvous.from_env(SRUN | change)
        return r.master_port, r.public

    assert port({}) == port({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    other_step = port({"SLURM_STEP_ID": "1"})
    other_job = port({"SLURM_JOB_ID": "72"})
    assert len({port({}), other_step, other_job}) == 3


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[003-007,9],login", "gpu003"),
        ("gpu[9,12-13]", "gpu9"),
        ("rack[1-2]-node[05-06].example", "rack1-node05.example"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
