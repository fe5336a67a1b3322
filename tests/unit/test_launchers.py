"""Which launcher started a process: one table of environments, and what is read from each."""

from __future__ import annotations

import pytest

from nanoray.errors import ConfigError
from nanoray.machine.launchers import place_of, refuse_many_starts
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
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "1234"}
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
        (SRUN | ADDRESS, "SLURM", (3, 4, 1, 2, 1), "a:1234"),
        (OPEN_MPI | ADDRESS, "Open MPI", (1, 2, 1, 2, 0), "a:1234"),
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
    assert f"{r.master_addr}:{r.master_port}" == addr
    said = place.describe()
    assert said.startswith(f"ranks  {r.world_size} by ")
    meets = f"{r.master_addr}:{r.master_port}"
    assert said.endswith(meets if r.world_size > 1 else "this process trains alone, without Ray")
    assert place.supervised == (launcher != "variables")


@pytest.mark.parametrize(
    ("env", "remedy"),
    [(SRUN, "MASTER_ADDR=$(scontrol show hostnames"), (OPEN_MPI, "mpirun -x MASTER_ADDR=HOST")],
)
def test_ranks_that_do_not_know_where_to_meet_are_refused(env: dict[str, str], remedy: str) -> None:
    with pytest.raises(
        ConfigError, match="are ranks, and MASTER_ADDR or MASTER_PORT is not set"
    ) as e:
        place_of(env)
    assert remedy in str(e.value)
    with pytest.raises(ConfigError, match="each of them would start a run of its own"):
        refuse_many_starts(env, "`nanoray run`")
