"""The connection of this process to Ray: to a cluster, or to a local Ray that is started and removed."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from nanoray.base.environment import environment, restored
from nanoray.base.output import say
from nanoray.cli import set_handlers_again
from nanoray.errors import PlacementError
from nanoray.host.host import available_cpus
from nanoray.host.slots import Slots
from nanoray.launch.node_errors import NodeErrors
from nanoray.launch.ray_compat import (
    errors_of_nodes,
    has_tokens,
    keeping_sigterm,
    prepared_processes,
    refuses_token,
    reread_authentication,
    token_of_this_user,
)
from nanoray.launch.signals import Stop

# A container's user may have neither HOME nor an entry in passwd: then "~" stays, and nothing is there.
_TOKEN_FILE = Path(os.path.expanduser("~/.ray/auth_token"))
START_TRIES = 5  # of a local Ray, each of 30 s
START_NICE = -10  # of its processes until it is up
OBJECT_STORE_BYTES = 80 * 2**20  # no tensors pass through it
# 100 are enough for two ranks; with 64 the raylet ends, and Ray this process without an error.
MIN_OPEN_FILES = 100
_WITHOUT_LOCAL_RAY = (
    "train without Ray (`python -m nanoray.train`), or start a Ray with `ray start --head` and give "
    "its --ray_address"
)
# Variables that `ray.init` or `_local_options` sets in this process
_SET_BY_RAY = ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE")
CLEANUP_TIMEOUT_S = 5.0
# For a shared cluster: Ray first sends its last metrics, which may take 10 s.
SHUTDOWN_S = 30.0
HANDLERS_S = 0.02  # how long Ray's shutdown may leave SIGTERM without a handler


@contextmanager
def connected(
    address: str, slots: Slots | None, stop: Stop | None = None, last: bool = False
) -> Iterator[None]:
    """Connect to a cluster; or, given local `slots`, start a Ray here and remove it afterwards.

    A stop that is requested meanwhile raises StopRequested. `last`: the caller ends this process
    with os._exit soon afterwards, so a shared cluster sees the connection close. Raises
    PlacementError.
    """
    options: dict[str, Any] = {
        "log_to_driver": False,  # ranks log to their own files; only the driver prints
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    temp: str | None = None
    with ExitStack() as devices:
        # A program that goes on afterwards finds its environment as it was: with the token of a
        # Ray that is gone it could connect to no other, nor launch again.
        if slots is not None:
            devices.callback(reread_authentication)  # of the environment that is restored first
        devices.enter_context(restored(*_SET_BY_RAY))
        # The devices stay restricted until the end: another launch of this process may use others.
        if slots is not None:
            require_limits()
            temp = _make_temp_folder()
            options |= _local_options(slots, temp)
            if slots.devices:
                visible = ",".join(device.uuid for device in slots.devices)
                devices.enter_context(environment({"CUDA_VISIBLE_DEVICES": visible}))
        is_up = False
        try:
            with keeping_sigterm() if stop else nullcontext():
                context = _connect(address, options, temp, stop or Stop())
            is_up = True
            where = f"local, {slots.reason}" if slots else f"cluster at {address}"
            if context.dashboard_url:
                where += f" · dashboard http://{context.dashboard_url}"
            say(f"ray    {where}")
            if temp and not has_tokens():
                say(
                    f"warning  Ray {ray.__version__} cannot ask for a token, so this local Ray runs "
                    "the code of anyone who reaches its ports; use Ray 2.52 or newer"
                )
            if stop:
                set_handlers_again()  # Ray's core has put its own in the place of ours
            with errors_of_nodes(NodeErrors().show):
                yield
        finally:
            if temp or not last:
                _disconnect(temp, is_up)


@contextmanager
def using(address: str) -> Iterator[None]:
    """Use the Ray that the calling program is connected to, and leave it connected."""
    say(f"ray    the one that this program is connected to, at {address}")
    yield


def _make_temp_folder() -> str:
    """Create the folder of a local Ray, in /tmp if possible: paths of sockets must be short."""
    parent = "/tmp" if os.access("/tmp", os.W_OK) else None
    return tempfile.mkdtemp(prefix="nanoray-", dir=parent)


def require_limits() -> None:
    """Raise PlacementError where this process may not have the files of a local Ray."""
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= largest < OBJECT_STORE_BYTES:
        raise PlacementError(
            f"a file may have {largest:,} bytes (ulimit -f), and the object store of a local Ray has "
            f"{OBJECT_STORE_BYTES:,}; raise the limit, or {_WITHOUT_LOCAL_RAY}"
        )
    # Ray raises the soft limit to the hard one.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < MIN_OPEN_FILES:
        raise PlacementError(
            f"a process may have {most} open files (ulimit -n), and a local Ray needs "
            f"{MIN_OPEN_FILES}; raise the limit, or {_WITHOUT_LOCAL_RAY}"
        )


def _local_options(slots: Slots, temp: str) -> dict[str, Any]:
    """Return what `ray.init` needs to start a local Ray, after setting its environment."""
    # A local Ray reports no usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    # A cluster without a token runs code of anyone who can reach it. Ray would write a token into
    # the user's home; this one is for this run only.
    has_token = os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} or _TOKEN_FILE.exists()
    if not has_token:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        reread_authentication()
    return {
        "num_cpus": max(1, int(available_cpus())),
        "num_gpus": len(slots.devices),
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": temp,
    }


def _connect(address: str, options: dict[str, Any], temp: str | None, stop: Stop) -> Any:
    """Connect to a Ray, or start one in the folder `temp`. Raises PlacementError, StopRequested."""
    try:
        if temp is None:
            dial(address)
            _require_token(address)
        # Ray's dashboard leaves temporary files behind, so its temporary folder is `temp`.
        variables = {"TMPDIR": temp} if temp else {}
        with environment(variables), _prepared_processes(), stop.at_once():
            return _init(address, options, temp)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        if temp:
            raise _not_started(error) from None
        raise PlacementError(
            f"cannot connect to Ray at {address}: {' '.join(str(error).split())[:300]}; check "
            "`ray status`, RAY_ADDRESS and RAY_AUTH_MODE, or use --ray_address local"
        ) from None


def _require_token(address: str) -> None:
    """Raise PlacementError if the cluster asks for a token, and this command sends no right one.

    A local `ray.init()` leaves a token in ~/.ray/auth_token, and each later `ray start` of that user
    asks for it.
    """
    if not has_tokens() or not refuses_token(address):
        return
    where = f"the Ray cluster at {address} asks for a token, and"
    get_it = (
        "copy ~/.ray/auth_token from the cluster's head, or set RAY_AUTH_TOKEN, and set "
        "RAY_AUTH_MODE=token"
    )
    token = token_of_this_user()
    if not token:
        raise PlacementError(f"{where} this user has none; {get_it}")
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise PlacementError(
            f"{where} RAY_AUTH_MODE = {os.environ.get('RAY_AUTH_MODE', '')!r} sends none; set "
            "RAY_AUTH_MODE=token, and the token of this user is sent"
        )
    if refuses_token(address, token):
        raise PlacementError(f"{where} that of this user is another one; {get_it}")


def _init(address: str, options: dict[str, Any], temp: str | None) -> Any:
    """Call ray.init; again if a local Ray, in `temp`, exceeds the 30 s that Ray gives it to start.

    Ray has no setting for these 30 s, and a machine whose cores are taken needs more. What a try
    has read from the disk is in memory at the next one. Raises PlacementError after START_TRIES.
    """
    for number in range(1, START_TRIES + 1):
        try:
            context = ray.init(address=address, **options)
            if temp:
                _set_priority(temp, os.getpriority(os.PRIO_PROCESS, 0))
            return context
        except Exception as error:  # Ray raises no more specific one here
            if not temp or type(error) is not Exception:
                raise
            if "timed out during startup" not in str(error):
                raise _not_started(error) from None
        _end_local_ray(temp, is_up=False)
        if number < START_TRIES:
            say(
                f"ray    a local Ray was not up within 30 s: this machine is busy ({_load()}); "
                f"trying again, {number + 1} of {START_TRIES}"
            )
    raise PlacementError(
        f"a local Ray timed out during startup, {START_TRIES} times after 30 s: this machine is "
        f"busy ({_load()}); wait until it is less so, {_WITHOUT_LOCAL_RAY}"
    )


def _not_started(error: Exception) -> PlacementError:
    """Return the error of a local Ray that did not start, with the last line of what Ray says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-1][:300] if lines else type(error).__name__
    remedy = _WITHOUT_LOCAL_RAY
    # Ray's dashboard needs docstrings, and warns as it is imported.
    inherited = [name for name in ("PYTHONOPTIMIZE", "PYTHONWARNINGS") if os.environ.get(name)]
    if inherited:
        remedy = f"unset {' and '.join(inherited)}, which Ray's processes inherit, or {remedy}"
    return PlacementError(f"a local Ray did not start: {reason}; {remedy}")


def _load() -> str:
    """Return how many processes want a CPU of this machine, over the last minute."""
    return f"load {os.getloadavg()[0]:.1f} on {available_cpus():g} CPUs"


def _set_priority(temp: str, nice: int) -> None:
    """Give the processes of a local Ray a priority; those that it starts later inherit it."""
    for group in _groups_of(temp):
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PGRP, group, nice)


def _disconnect(temp: str | None, is_up: bool) -> None:
    """Disconnect from Ray; remove a local one, whose folder is `temp`, and which `is_up` or not.

    If Python code frees an ObjectRef while Ray shuts down, Ray ends this process at once with code
    1. So this waits longer than Ray takes, except for a head that does not answer: a shutdown never
    returns then.
    """
    if temp is None:
        _shut_down(SHUTDOWN_S)
        return
    shutdown = _end_local_ray(temp, is_up)
    if shutdown.is_alive():  # it waited for one of the processes
        shutdown.join(SHUTDOWN_S)
    shutil.rmtree(temp, ignore_errors=True)


def _shut_down(seconds: float) -> threading.Thread:
    """Shut Ray down in a thread, wait for it at most some seconds, and return the thread.

    Ray takes the handler of SIGTERM away, unseen by Python: the signal would end this process while
    it removes what it has started. So the handler is set again, all the time.
    """
    until = time.monotonic() + seconds
    shutdown = bounded(ray.shutdown, 0.0)
    while shutdown.is_alive() and time.monotonic() < until:
        shutdown.join(HANDLERS_S)
        set_handlers_again()
    set_handlers_again()
    return shutdown


def _end_local_ray(temp: str, is_up: bool) -> threading.Thread:
    """Shut a local Ray down, end what a shutdown leaves of it, and return the shutdown's thread.

    In an interrupted start a process may be so new that it has no file in `temp` yet: it would make
    the folder anew. It is in the group of the process that has started it, which a shutdown may end
    first. Once Ray is up, what a rank has started may be in such a group.
    """
    groups = set() if is_up else _groups_of(temp)
    shutdown = _shut_down(CLEANUP_TIMEOUT_S)
    for pid in _processes_of(temp, groups):
        with suppress(OSError):  # it has ended
            os.kill(pid, signal.SIGKILL)
    return shutdown


def _groups_of(temp: str) -> set[int]:
    """Return the process groups of a local Ray, but for the one of this process."""
    groups = set()
    for pid in _processes_of(temp):
        with suppress(OSError):  # it has ended
            groups.add(os.getpgid(pid))
    return groups - {os.getpgrp()}


def _processes_of(temp: str, groups: Collection[int] = ()) -> Iterator[int]:
    """Yield the other processes that have open files in `temp`: those of a local Ray.

    After an interrupted start their parents are gone, and Ray overwrites their command lines and
    environments. groups: also those of this session in these process groups.
    """
    own_pid = os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):  # it has ended, or belongs to another user
            files = [os.readlink(link) for link in (folder / "fd").iterdir()]
            in_temp = any(file.startswith(f"{temp}/") for file in files)
            in_group = os.getpgid(pid) in groups and os.getsid(pid) == os.getsid(0)
            if pid != own_pid and (in_temp or in_group):
                yield pid


def _prepared_processes() -> AbstractContextManager[None]:
    """Start Ray's processes in process groups of their own, and with priority where root may.

    A terminal that closes, `timeout` and batch systems send a signal to the whole process group of
    a command. In it Ray's head would end at once, and the ranks with it, before they have saved.
    """
    return prepared_processes(_prepare_process)


def _prepare_process() -> None:
    os.setpgid(0, 0)
    # Ray gives up after 30 s, so that its start comes before the work of others on a busy machine.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, START_NICE)


def bounded(cleanup: Callable[[], object], seconds: float = CLEANUP_TIMEOUT_S) -> threading.Thread:
    """Call `cleanup` in a thread, wait for it at most some seconds, and return the thread.

    A call to a cluster without a head never returns.
    """

    def clean_up() -> None:
        # A new head refuses what belongs to a run of the old one: then there is nothing to clean.
        with suppress(RayError):
            cleanup()

    thread = threading.Thread(target=clean_up, name="nanoray-cleanup", daemon=True)
    thread.start()
    thread.join(seconds)
    return thread


def dial(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=5).close()


def addresses_of(address: str) -> set[str]:
    """Return the network addresses that the name in HOST:PORT has now; none if it is unknown."""
    host = address.rpartition(":")[0].strip("[]")
    with suppress(OSError):
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    return set()
