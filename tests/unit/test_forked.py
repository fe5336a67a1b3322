"""Programs that are forked from a server: their surroundings, their ends, and what they leave."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from nanoray.launch.program import forked
from nanoray.launch.program.fork_server import NICER, hold_groups
from nanoray.launch.program.forked import (
    ForkedProgram,
    ForkServer,
    Shared,
    import_settings,
    program_variables,
)
from tests.harness.cluster import alive
from tests.harness.commands import wait_for

PATIENCE_S = 60


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    (tmp_path / "early.py").write_text("import tempfile\ntempfile.gettempdir()\n")
    variables = program_variables(1, {"GIVEN": "to all", "PYTHONPATH": str(tmp_path)})
    server = ForkServer(["numpy.random", "early"], variables)
    yield server
    server.close()


def run(shared: Shared, folder: Path, text: str, name: str = "script") -> ForkedProgram:
    script = folder / f"{name}.py"
    script.write_text(text)
    order = {
        "kind": "script",
        "words": [str(script), "--flag"],
        "folder": str(folder),
        "trace": [],
        "variables": program_variables(1, {"GIVEN": "to one", "TMPDIR": str(folder)}),
    }
    return ForkedProgram(shared.connect(), order, folder / f"{name}.log")


def test_a_program_finds_what_a_new_process_would(server: ForkServer, tmp_path: Path) -> None:
    show = (
        "import os, sys\n"
        "import numpy, random\n"
        "print(sys.argv[1:], __name__, os.getcwd(), os.environ['GIVEN'], repr(sys.stdin.read()))\n"
        "print(os.getpid() == os.getsid(0) == os.getpgid(0), 'nanoray' in sys.modules)\n"
        "print(numpy.random.random(), random.random())\n"
        "import tempfile; print(tempfile.gettempdir())\n"
        "sys.exit(3)\n"
    )
    programs = [run(server.shared, tmp_path, show, name) for name in "abc"]
    assert [program.end.result(PATIENCE_S)[0] for program in programs] == [3, 3, 3]
    outputs = [(tmp_path / f"{name}.log").read_text().splitlines() for name in "abc"]
    for output in outputs:
        assert output[0] == f"['--flag'] __main__ {tmp_path} to one ''"
        assert output[1] == "True False"
        assert output[3] == str(tmp_path)
    # Random numbers without a seed are none that another process has.
    numbers = [number for output in outputs for number in output[2].split()]
    assert len(set(numbers)) == 6


def test_a_signal_and_an_error_are_the_programs_own(server: ForkServer, tmp_path: Path) -> None:
    # Before it has begun, and afterwards
    early = run(server.shared, tmp_path, "import time; time.sleep(1000)\n")
    early.send_signal(signal.SIGTERM)
    assert early.end.result(PATIENCE_S)[0] == -signal.SIGTERM
    late = run(server.shared, tmp_path, "import time; time.sleep(1000)\n")
    assert late.begun.result(PATIENCE_S)
    late.send_signal(signal.SIGKILL)
    assert late.end.result(PATIENCE_S)[0] == -signal.SIGKILL
    wrong = run(server.shared, tmp_path, "def f():\n    1 / 0\nf()\n", "wrong")
    assert wrong.end.result(PATIENCE_S)[0] == 1
    error = (tmp_path / "wrong.log").read_text()
    assert error.startswith("Traceback (most recent call last):\n  File ")
    assert "fork_server.py" not in error
    assert error.endswith("ZeroDivisionError: division by zero\n")


DISTRIBUTED = """
class Group: pass
class group: WORLD = None
def init_process_group(): group.WORLD = Group()
"""
ENDS_GROUP = """
import torch.distributed as dist, weakref
dist.init_process_group()
made, dist.group.WORLD = weakref.ref(dist.group.WORLD), None
print("lives" if made() else "gone")
"""


@pytest.mark.parametrize("imported", [True, False])
def test_a_group_outlives_a_model_where_more_was_imported_in_advance(
    tmp_path: Path, imported: bool
) -> None:
    """The end of both may hang: see hold_groups. A torch of a few lines has what it takes."""
    (tmp_path / "torch").mkdir()
    for name, text in (("__init__", ""), ("_dynamo", ""), ("distributed", DISTRIBUTED)):
        (tmp_path / "torch" / f"{name}.py").write_text(text)
    modules = ["torch.distributed", *(["torch._dynamo"] if imported else [])]
    server = ForkServer(modules, program_variables(1, {"PYTHONPATH": str(tmp_path)}))
    assert run(server.shared, tmp_path, ENDS_GROUP).end.result(PATIENCE_S)[0] == 0
    server.close()
    assert (tmp_path / "script.log").read_text() == ("lives\n" if imported else "gone\n")


def test_the_group_of_torch_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", dist.init_process_group)
    lives = []
    for hold in (lambda: None, hold_groups):
        hold()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        made = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        lives.append(made() is not None)
    assert lives == [False, True]


@pytest.mark.parametrize("name", ["runs", "ended"])
def test_all_that_a_program_has_started_ends_with_its_rank(
    server: ForkServer, tmp_path: Path, name: str
) -> None:
    start = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(1000 if sys.argv[0].endswith('runs.py') else 0)\n"
    )
    program = run(server.shared, tmp_path, start, name)
    log = tmp_path / f"{name}.log"
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    child = int(log.read_text())
    if name == "ended":
        assert program.end.result(PATIENCE_S)[0] == 0
    assert alive(child)
    program.close()  # its actor's end closes the connection, too
    wait_for(lambda: not alive(child))
    assert not alive(program.pid)


SERVER = """
import sys
from nanoray.launch.program import fork_server
fork_server.LATER_AFTER_S, fork_server.LATER_MODULES = 0.3, ("later",)
sys.argv = ["", *sys.argv[1:]]
fork_server.main()
"""
LATER = """
import os, pathlib, threading, time
niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
pathlib.Path(__file__).with_name("began").write_text(str(niceness))
time.sleep(1)
done = True
"""
SAYS_LATER = """
import os, sys
print(hasattr(sys.modules.get("later"), "done"), os.getpriority(os.PRIO_PROCESS, 0), sys.argv[0])
"""


def test_what_a_restart_needs_is_imported_beside_the_first_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later.py").write_text(LATER)
    (tmp_path / "server.py").write_text(SERVER)
    monkeypatch.setattr(forked, "FORK_SERVER", tmp_path / "server.py")
    path = os.pathsep.join([str(tmp_path), str(Path(forked.__file__).parents[3])])
    server = ForkServer(["json"], program_variables(1, {"PYTHONPATH": path}))
    first = run(server.shared, tmp_path, SAYS_LATER, "first")
    assert first.end.result(PATIENCE_S)[0] == 0
    wait_for((tmp_path / "began").exists)
    second = run(server.shared, tmp_path, SAYS_LATER, "second")  # waits for the import
    assert second.end.result(PATIENCE_S)[0] == 0
    server.close()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert (tmp_path / "first.log").read_text() == f"False {own} {tmp_path}/first.py\n"
    assert (tmp_path / "began").read_text() == str(own + NICER)
    assert (tmp_path / "second.log").read_text() == f"True {own} {tmp_path}/second.py\n"


def test_a_server_leaves_nothing(tmp_path: Path) -> None:
    """Also where the process that has started it is killed."""
    pid = os.fork()
    if not pid:
        server = ForkServer(["numpy.random"], program_variables(1, {}))
        (tmp_path / "address").write_text(f"{server._process.pid} {server.shared.address}\n")
        signal.pause()
    path = tmp_path / "address"
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
    server_pid, address = path.read_text().split()
    assert Path(address).parent.stat().st_mode & 0o777 == 0o700
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not alive(int(server_pid)))
    assert not Path(address).parent.exists()


def test_a_server_is_shared_only_where_imports_would_be_the_same() -> None:
    here = import_settings(program_variables(1, {}))
    assert import_settings(program_variables(1, {"CUDA_VISIBLE_DEVICES": "3", "RANK": "1"})) == here
    assert import_settings(program_variables(2, {})) != here  # threads of OpenMP
    assert import_settings(program_variables(1, {"PYTHONPATH": "/other"})) != here
