"""What a process may find around it: no working folder, a full disk, a script that is spawned."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanoray.base.atomic import write_json
from nanoray.base.environment import working_folder
from nanoray.checkpoint.run import RunSpec, write_attempt
from nanoray.cli import exit_code_of
from nanoray.config import make_config
from nanoray.data.dataset import own_data
from nanoray.errors import ConfigError
from nanoray.own.engine import fit_here
from nanoray.own.settings import loaded_of
from nanoray.start.folder import open_run
from nanoray.train.report import _from_here


@pytest.fixture
def removed_folder(tmp_path: Path) -> Iterator[None]:
    """The working folder of this process was removed."""
    before = os.getcwd()
    folder = tmp_path / "removed"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    yield
    os.chdir(before)


def raising(error: OSError) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


@pytest.mark.usefixtures("removed_folder")
def test_a_run_in_a_removed_folder_ends_as_elsewhere() -> None:
    """After the last checkpoint the report asked for the working folder: a traceback, exit code 1."""
    assert working_folder() == ""
    assert _from_here("/a/b") == "/a/b"


def test_an_error_of_a_file_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(raising(OSError(errno.EACCES, os.strerror(errno.EACCES), "/x"))) == 1
    assert capsys.readouterr().err == (
        "error: /x: Permission denied; check the path and its disk\n"
    )


def test_what_is_no_error_of_a_path_stays_as_it_is() -> None:
    with pytest.raises(FileNotFoundError):
        exit_code_of(raising(FileNotFoundError(errno.ENOENT, "no such file")))


@contextmanager
def small_files(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_whole_is_named(tmp_path: Path) -> None:
    """`ulimit -f`: the error of a write names no file, and a command ended in a traceback."""
    path = tmp_path / "run.json"
    with small_files(64), pytest.raises(OSError, match="File too large") as error:
        write_json(path, "x" * 1000)
    assert error.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_at_the_start_is_not_taken_for_a_missing_file(tmp_path: Path) -> None:
    spec = RunSpec(make_config({"micro_batch_size": 1}), own_data(), tmp_path, 1.0)
    with small_files(1), pytest.raises(OSError, match="File too large"):
        write_attempt(spec)
    # The file of an earlier attempt is overwritten in place.
    (tmp_path / "attempt").write_text("9 9.0\n")
    write_attempt(spec)
    assert (tmp_path / "attempt").read_text() == "0 1.0\n"


def test_an_out_dir_that_is_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="cannot make a run folder in out_dir = "):
        open_run(make_config({"out_dir": str(loop), "micro_batch_size": 1}), own_data(), 1.0)


# A script that trains where it stands, without the line that Python asks for.
UNGUARDED = """
import multiprocessing, sys
import nanoray

def work(x):
    return CODE

CODE = None
if __name__ == "__mp_main__":
    CODE = nanoray.launch(work, {"out_dir": sys.argv[1]})
else:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1])[0])
"""
REFUSED = (
    "a process that multiprocessing has spawned imports this script, and came upon a run there; "
)


def test_a_script_that_is_imported_by_a_process_it_spawned_starts_no_run(tmp_path: Path) -> None:
    """A Pool, or a DataLoader's workers: each would train the model anew, in a folder of its own."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "2\n"
    assert done.stderr.startswith(f"error: {REFUSED}put what trains below `if __name__ == ")
    assert not (tmp_path / "runs").exists()


def test_nor_does_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_inheriting", True, raising=False)  # as while it imports
    with pytest.raises(ConfigError, match=REFUSED):
        fit_here(loaded_of({}), 1, lambda run: None)
