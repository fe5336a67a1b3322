"""`nanoray run`: unmodified programs as ranks on Ray, compared with torchrun, and their faults."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from nanoray.checkpoint.run_folder import is_locked
from nanoray.launch.program.__main__ import main
from tests.cluster.test_cluster_faults import FAST_HEALTH
from tests.harness.cluster import Cluster, finish, processes_of_session, ray_head, ray_node
from tests.harness.commands import Command, wait_for
from tests.harness.commands import run as run_command
from tests.harness.packages import needs

SCRIPT = Path(__file__).resolve().parents[1] / "harness" / "plain_ddp.py"
COLLECTIVES = SCRIPT.with_name("plain_collectives.py")
SCRIPTS = SCRIPT.parent / "scripts"
# How the lines begin that the scripts print on rank 0
PRINTED = ("epoch", "end __main__", "loss", "finds")
RUN = ["nanoray", "run", "--workers", "2", "--device", "cpu"]


def run(
    folder: Path, *words: str, flags: tuple[str, ...] = (), cluster: Cluster | None = None
) -> tuple[int, str]:
    """Run a command on a cluster, or on a Ray of its own, which takes some seconds longer."""
    where = ["--cpus_per_worker", "0.5"] if cluster else ["--ray_address", "local"]
    command = [*RUN, *where, "--out_dir", str(folder / "runs"), *flags, *words]
    return finish(Command(*command, env=os.environ | (cluster.env if cluster else {}), cwd=folder))


def lines_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(PRINTED)]


def failures(folder: Path) -> list[dict[str, object]]:
    (path,) = (folder / "runs").glob("*/faults.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def kind_of_script(words: str, lines: int, *packages: str, everyday: bool = False) -> object:
    """Give a command line in the folder of scripts, and how many lines it prints."""
    marks = [needs(*packages)] if packages else []
    if not everyday:
        marks.append(pytest.mark.full)
    return pytest.param(words, lines, marks=marks, id=words.split()[-1 if "-m " in words else 0])


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        kind_of_script("../plain_ddp.py --epochs 3", 4),
        kind_of_script("finds.py --flag=a\\ word", 13, everyday=True),
        kind_of_script("loaders.py", 2),
        kind_of_script("fsdp2.py", 4),
        kind_of_script("children.py", 1),
        kind_of_script("vision_style.py --lr 0.2", 3),
        kind_of_script("nanogpt/train.py --steps=3", 3),
        kind_of_script("-m relative.train", 2),
        kind_of_script("with_absl.py --steps=3", 3, "absl"),
        kind_of_script("with_hydra.py steps=3", 3, "hydra"),
        kind_of_script("with_accelerate.py", 2, "accelerate"),
        kind_of_script("../hf_trainer.py", 1, "transformers", "accelerate"),
        kind_of_script("with_lightning.py", 8, "lightning"),
    ],
)
def test_a_script_prints_what_it_prints_under_torchrun(
    cluster: Cluster, tmp_path: Path, words: str, lines: int
) -> None:
    """From a folder whose name has a space, which is also the working directory."""
    folder = tmp_path / "a folder"
    shutil.copytree(SCRIPTS.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    folder /= "scripts"
    program = shlex.split(words)
    if "/" in program[0]:  # it reads files of its working directory
        folder = (folder / program[0]).parent.resolve()
        program[0] = Path(program[0]).name
    printed = lines_under_both(cluster, tmp_path / "runs", folder, program)
    assert len(printed) == lines


def lines_under_both(
    cluster: Cluster, out: Path, folder: Path, program: list[str], **env: str
) -> list[str]:
    """Run a program under torchrun and under `nanoray run`; return the lines that both print."""
    plain = under_torchrun(folder, program, **env)
    flags = ["--out_dir", str(out), "--cpus_per_worker", "0.5"]
    flags += ["--env", "FIRST=1", "--env", "SECOND=2"]
    code, output = finish(Command(*RUN, *flags, *program, env=cluster.env, cwd=folder))
    assert (code, plain.returncode) == (0, 0), output + plain.stderr
    assert lines_of(output) == lines_of(plain.stdout)
    assert len([*out.glob("*/logs/rank*.log")]) == 2
    return lines_of(output)


def under_torchrun(
    folder: Path, program: list[str], **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program under torchrun; again where torch 2.13 aborts it.

    That happens to about one plain DDP program in fifty as it ends, on a busy machine:
    `std::terminate` is called in a process whose interpreter ends.
    """
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    env = os.environ | env | {"FIRST": "1", "SECOND": "2", "PWD": str(folder)}  # PWD: as a shell
    for _ in range(3):
        plain = run_command(*command, cwd=folder, env=env, timeout=240)
        if "terminate called without an active exception" not in plain.stderr:
            break
    return plain


def test_the_commands_of_the_example_differ_in_their_first_words(
    cluster: Cluster, tmp_path: Path, forked: dict[str, str]
) -> None:
    folder = SCRIPT.parents[2] / "examples" / "from_torchrun"
    commands = re.findall(r"^(torchrun|nanoray run) (.+)$", (folder / "train.py").read_text(), re.M)
    assert commands == [
        ("torchrun", "--nproc_per_node 2 train.py"),
        ("nanoray run", "--workers 2 train.py"),
    ]
    printed = lines_under_both(cluster, tmp_path / "runs", folder, ["train.py"], **forked)
    losses = [float(line.split()[-1]) for line in printed]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("kill", "died: killed by SIGKILL"),
        pytest.param("segv", "a segmentation fault", marks=pytest.mark.full),
        pytest.param("raise", "failed: ValueError: a bad value", marks=pytest.mark.full),
        pytest.param("exit", "exited with code 3", marks=pytest.mark.full),
        pytest.param("sleep", "rank 1 in misbehave (plain_ddp.py", marks=pytest.mark.full),
        pytest.param("sleep, traced", "rank 1 is behind: it has begun ", marks=pytest.mark.full),
    ],
)
def test_the_rank_that_failed_first_is_named_and_all_start_again(
    cluster: Cluster, tmp_path: Path, fault: str, how: str
) -> None:
    fault, _, traced = fault.partition(", ")
    flags = ("--hang_timeout", "15") if fault == "sleep" else ()  # a busy machine is slow
    flags += ("--trace",) if traced else ()
    code, output = run(tmp_path, str(SCRIPT), "--fault", fault, flags=flags, cluster=cluster)
    assert code == 0, output
    (failure,) = failures(tmp_path)
    assert how in str(failure["title"])
    assert failure["rank"] == (-1 if fault == "sleep" and not traced else 1)
    assert "restart  1 of 3: all ranks" in output
    assert lines_of(output)[-1].startswith("end __main__")


@pytest.mark.parametrize(
    ("words", "code", "how"),
    [
        ((str(SCRIPT), "--fault", "import"), 1, "failed: ModuleNotFoundError"),
        pytest.param((str(SCRIPT), "--wrong"), 2, "exited with code 2", marks=pytest.mark.full),
        pytest.param(("-m", "no_such_module"), 1, "failed: ", marks=pytest.mark.full),
    ],
)
def test_what_no_restart_can_cure_is_not_tried_again(
    cluster: Cluster, tmp_path: Path, words: tuple[str, ...], code: int, how: str
) -> None:
    ended, output = run(tmp_path, *words, cluster=cluster)
    assert ended == code, output
    assert how in str(failures(tmp_path)[-1]["title"])
    assert "restart  " not in output


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--nproc_per_node", "2"), "did you mean --workers (all ranks"),
        (("--max-restarts=2",), "did you mean --max_failures?"),
        (("--hang-timeout", "5"), "did you mean --hang_timeout?"),
        (("--rdzv_backend", "c10d"), "`nanoray run --help` prints those that exist"),
    ],
)
def test_a_flag_of_torchrun_is_refused_with_ours(
    flags: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, str(SCRIPT), "--epochs", "1"]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.full
def test_a_module_and_a_command_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nprint('module', __name__, os.environ['RANK'])\n")
    code, output = run(tmp_path, "-m", "mine")
    assert (code, "module __main__ 0" in output) == (0, True), output
    show = "echo rank $RANK of $WORLD_SIZE"
    code, output = run(tmp_path, "--", "sh", "-c", show, flags=("--tee", "all"))
    assert code == 0, output
    assert "[0] rank 0 of 2" in output
    assert "[1] rank 1 of 2" in output


def test_ctrl_c_gives_time_to_save_and_leaves_nothing(
    tmp_path: Path, forked_ray: dict[str, str]
) -> None:
    (tmp_path / "saves.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    open('saved' + os.environ['RANK'], 'w').close()\n"
        "    print('rank', os.environ['RANK'], 'has saved')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('pid' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "time.sleep(1000)\n"
    )
    flags = ("--ray_address", "local", "--out_dir", str(tmp_path / "runs"))
    with Command(*RUN, *flags, "saves.py", env=os.environ | forked_ray, cwd=tmp_path) as command:
        pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]
        wait_for(lambda: all(p.exists() and p.read_text() for p in pids), process=command)
        (folder,) = (tmp_path / "runs").iterdir()
        assert is_locked(folder), "its report says that it is running"
        command.send_signal(signal.SIGINT)
        code, output = finish(command)
        assert code == 130
    assert "rank 0 has saved" in output
    assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1))
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_trace_sees_every_collective_of_a_script_that_knows_nothing_of_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Those of DDP's reducer, which are called from C++, of FSDP, of groups, and between two ranks."""
    flags = ("--trace", "--trace_every", "1")
    code, output = run(tmp_path, str(COLLECTIVES), flags=flags, cluster=cluster)
    assert code == 0, output
    assert "end 0 6" in output  # the sums are what they were
    assert "trace    3 steps: " in output
    (folder,) = (tmp_path / "runs").iterdir()
    steps = [json.loads(line) for line in (folder / "comm" / "steps.jsonl").open()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]

    # The third step: each with its bytes, its group's ranks, and when it was issued.
    seen = {
        (c["op"], c["group"], c["phase"], c["bytes"], c["ranks"]) for c in steps[2]["collectives"]
    }
    assert seen == {
        ("all_reduce", "default", "backward", 256, 2),  # DDP: 64 weights in float32
        ("reduce_scatter", "default", "backward", 512, 2),  # FSDP: 128 weights
        ("all_gather", "default", "forward", 512, 2),
        ("all_reduce", "default", "forward", 12, 2),
        ("broadcast", "undefined/2", "forward", 12, 2),
        ("send", "default", "forward", 12, 2),
        ("recv", "default", "forward", 12, 2),
    }
    gradients = [c for c in steps[2]["collectives"] if c["what"] == "gradients"]
    assert [(c["bytes"], c["bucket"], c["last"]) for c in gradients] == [(256, 0, True)]
    assert gradients[0]["busbw_gbps"] == pytest.approx(256 / gradients[0]["time_us"] / 1e3)
    # It began to wait for its own asynchronous sum after it had computed.
    (own,) = [c for c in steps[2]["collectives"] if (c["op"], c["bytes"]) == ("all_reduce", 12)]
    assert all(wait > start for wait, start in zip(own["wait_ms"], own["start_ms"], strict=True))
    figures = steps[2]["figures"]
    assert figures["busy_ms"] == pytest.approx(figures["exposed_ms"] + figures["hidden_ms"])
    # What comes after the last step is none: it is written, and counted in no mean.
    assert [phase[0] for phase in steps[3]["phases"][0]] == ["closing"]

    # The tools of other runs read it.
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert records[-1]["step"] == 3
    assert any("comm/busy_ms" in record for record in records)
    assert any(len(record["ranks"].get("mem/rss_gib", [])) == 2 for record in records)
    for tool in ("report", "report timeline", "faults"):
        done = run_command("nanoray", *tool.split(), str(folder))
        assert done.returncode == 0, done.stderr
    page = (folder / "report.html").read_text()
    assert "exposed communication" in page
    assert "memory of the largest rank" in page


@pytest.mark.full
def test_a_lost_node_is_named_and_all_start_again_when_there_is_room(tmp_path: Path) -> None:
    """Two nodes with room for one rank each; one is killed, and another one joins."""
    (tmp_path / "waits.py").write_text(
        "import os, time\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open('began' + os.environ['RANK'] + count, 'w').close()\n"
        "time.sleep(1000 if count == '0' else 0)\n"
    )
    flags = ("--placement", "spread", "--cpus_per_worker", "1", "--out_dir", str(tmp_path / "runs"))
    with ray_head("--num-cpus=1", **FAST_HEALTH) as head:
        with ray_node(head) as node:
            driver = Command(*RUN, *flags, "waits.py", env=head.env, cwd=tmp_path)
            began = [tmp_path / f"began{rank}0" for rank in (0, 1)]
            wait_for(lambda: all(path.exists() for path in began), process=driver)
            for pid in processes_of_session(node.pid):  # raylet, agents and the rank
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for(lambda: "restart  1 of 3" in driver.output, process=driver)
        with ray_node(head):
            code, output = finish(driver)
    assert code == 0, output
    (failure,) = failures(tmp_path)
    assert failure["rank"] in (0, 1), output
    assert "its node, or Ray's process on it, was lost" in str(failure["title"]), output


@pytest.mark.full
def test_two_runs_at_once_do_not_meet(cluster: Cluster, tmp_path: Path) -> None:
    flags = ("--cpus_per_worker", "0.5", "--out_dir", str(tmp_path / "runs"))
    runs = [Command(*RUN, *flags, str(SCRIPT), env=cluster.env, cwd=tmp_path) for _ in "ab"]
    ends = [finish(command) for command in runs]
    assert [code for code, _ in ends] == [0, 0], ends
    assert lines_of(ends[0][1]) == lines_of(ends[1][1])
    assert len([*(tmp_path / "runs").iterdir()]) == 2


@pytest.mark.full
def test_the_example_of_diloco_learns(tmp_path: Path) -> None:
    script = SCRIPT.parents[2] / "examples" / "diloco.py"
    code, output = run(tmp_path, str(script), "--rounds", "6")
    assert code == 0, output
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("round")]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
