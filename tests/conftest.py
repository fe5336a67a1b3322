"""Fixtures shared by all tests. Ray's and nanoray's own state stay out of the user's home."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch

from nanoray.bench.harness import processes
from tests.harness import commands, leaks
from tests.harness.cluster import commands_end_here
from tests.harness.fixtures import kubectl, own_cache, shakespeare, text
from tests.harness.forked_python import forked_python
from tests.harness.ranks import TINY, end_ranks
from tests.harness.ray_workers import forked_workers

__all__ = ["kubectl", "own_cache", "shakespeare", "text"]  # fixtures

# The threads of a command that wait for each other would spin, and take the cores from the tests
# beside it.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# The server of the ranks imports matplotlib in the first test that needs one, and its list of fonts
# must not lie in that test's cache.
os.environ.setdefault("MPLCONFIGDIR", os.path.expanduser("~/.cache/matplotlib"))


def _temporary_folder() -> None:
    """Give the session a TMPDIR of its own, which goes with it.

    Packages and agents leave folders behind: wandb when it is imported, torchrun for its ranks'
    logs. The workers of pytest-xdist use their controller's, which ends last. Its path
    is short: sockets lie below it, and a socket's path has at most 107 characters.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.mkdtemp(prefix="nrt-")
        # After the folder of multiprocessing below it (-100), and in no process that was forked
        Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    # Where tests look for what a run has left
    leaks.SHARED = (*leaks.SHARED, tempfile.gettempdir())


_temporary_folder()
# A script's shell ignores Ctrl-C in what it starts with `&`, and nohup a closed terminal; so would
# all commands of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The ranks of a benchmark, too, need not import torch again
processes.start_process = commands.start_process


def pytest_configure(config: pytest.Config) -> None:
    """Let the workers of pytest-xdist share one server that forks processes."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (config.getoption("numprocesses", 0) or 0) > 1:
        # As in a test: caches stay out of the user's home.
        folder = Path(tempfile.gettempdir(), "cache-of-forked")
        commands.start_for_workers({"XDG_CACHE_HOME": str(folder)})


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without the collector of garbage: what is imported now stays to the end.

    A full collection looks through all modules, a quarter of a second. They took a fourth of the time
    until the first test, and a tenth of the tests' in this process. Those that tests start have
    Python's own thresholds.
    """
    gc.disable()
    _import_a_share(session)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


def _import_a_share(session: pytest.Session) -> None:
    """Before all workers of a whole run import all files, each imports its share of them.

    In a fresh checkout pytest compiles each file at its first import. Workers that go through them in
    the same order would each compile them all.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        files = sorted(Path(__file__).parent.glob("*/test_*.py"))
        for path in files[int(worker[2:]) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            # What is wrong with a file, or skips it, shows when it is collected
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(f"tests.{path.parent.name}.{path.stem}")


@pytest.fixture(autouse=True)
def _no_command_outlives_its_test() -> Iterator[None]:
    """A run that a failed test has left would take the CPUs of all tests after it."""
    with commands_end_here():
        yield


@pytest.fixture(scope="module", autouse=True)
def _collect_no_garbage_of_earlier_files() -> None:
    """A function of nanoray that frees memory would look through all that they have imported."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_their_file() -> Iterator[None]:
    yield
    end_ranks()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The workers share the cores, and tensors of a few kilobytes gain nothing from threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was(_one_thread: None) -> Iterator[None]:
    """What a test leaves set in torch would change the last bits of what the tests after it compute."""
    before = _settings_of_torch()
    yield
    after = _settings_of_torch()
    torch.set_num_threads(1)
    assert after == before


def _settings_of_torch() -> dict[str, object]:
    """Return the settings of this process on which the results of torch's functions depend."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(scope="session")
def forked() -> Iterator[dict[str, str]]:
    """Variables with which torchrun forks its ranks, and a script that calls PYTHON forks that."""
    with (
        tempfile.TemporaryDirectory(prefix="nr-python-", dir="/tmp") as folder,
        forked_python(Path(folder)) as env,
    ):
        yield env


@pytest.fixture(scope="session")
def forked_ray() -> Iterator[dict[str, str]]:
    """Variables with which a Ray that a command starts for itself forks its workers."""
    with forked_workers() as env:
        yield env


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The tiny recipe as a YAML file on the test text."""
    folder = tmp_path_factory.mktemp("recipe")
    values = TINY | {
        "dataset": str(text),
        "data_dir": str(folder / "cache"),
        "max_steps": 30,
        "tensorboard": True,
    }
    values["placement_timeout_s"] = 60  # a slow machine may still be ending the run before
    path = folder / "words.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items() if key != "name"))
    return path
