"""The connection of this process to Ray: the one that it has already, to a cluster, or to a local Ray
that is started and removed.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from nanoray.errors import PlacementError
from nanoray.launch.ray_compat import (
    has_tokens,
    in_own_process_groups,
    quiet_about_deaths,
    reread_authentication,
    without_dashboard,
)
from nanoray.machine.environment import environment, restored
from nanoray.machine.host import available_cpus
from nanoray.machine.output import say
from nanoray.machine.slots import Slots

_TOKEN_FILE = Path(os.path.expanduser("~/.ray/auth_token"))
OBJECT_STORE_BYTES = 80 * 2**20  # no tensors pass through it
# Variables that `ray.init` or `_start` sets in this process
_SET_BY_RAY = (
    "RAY_USAGE_STATS_ENABLED",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_MODE",
    "RAY_worker_niceness",
)
CLEANUP_TIMEOUT_S = 5.0
# Ray first sends its last metrics, which may take 10 s on a busy head, and for ever without one.
SHUTDOWN_S = 30.0


@contextmanager
def connected(
    address: str, slots: Slots | None, last: bool = False, dashboard: bool = True
) -> Iterator[None]:
    """Connect to a cluster; or, given local `slots`, start a Ray here and remove it afterwards.

    A Ray that the calling program is connected to is used, and stays connected. `last`: the caller
    ends this process with os._exit soon afterwards, so a shared cluster sees the connection close.
    `dashboard`: of a local Ray, which starts sooner without. Raises PlacementError.
    """
    if ray.is_initialized():
        say(f"ray    the one that this program is connected to, at {address}")
        yield
        return

    with ExitStack() as stack:
        stack.enter_context(quiet_about_deaths())
        # A program that goes on afterwards finds its environment as it was: with the token of a
        # Ray that is gone it could connect to no other, nor launch again.
        stack.callback(reread_authentication)  # of the environment that is restored first
        stack.enter_context(restored(*_SET_BY_RAY))
        if slots is not None:
            where = f"local, {slots.reason}"
            context = _start(stack, slots, dashboard)
        else:
            where = f"cluster at {address}"
            if not last:
                stack.callback(bounded, ray.shutdown, SHUTDOWN_S)
            context = _connect(address)
        if context.dashboard_url:
            where += f" · dashboard http://{context.dashboard_url}"
        say(f"ray    {where}")
        yield


# A local Ray.


def _start(stack: ExitStack, slots: Slots, dashboard: bool) -> Any:
    """Start a local Ray, which `stack` removes with all that it leaves. Raises PlacementError."""
    # Its folder is in /tmp if possible: paths of sockets must be short.
    parent = "/tmp" if os.access("/tmp", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="nanoray-", dir=parent)
    stack.callback(_remove, folder)

    # A local Ray reports no usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ranks run as any program would; those of Ray's own choice give way to every other process.
    os.environ.setdefault("RAY_worker_niceness", "0")
    _set_token()

    # The devices stay restricted until the end: another launch of this process may use others.
    if slots.devices:
        visible = ",".join(device.uuid for device in slots.devices)
        stack.enter_context(environment({"CUDA_VISIBLE_DEVICES": visible}))
    stack.callback(bounded, ray.shutdown, SHUTDOWN_S)
    try:
        with ExitStack() as start:
            # Ray's dashboard leaves temporary files behind, so its temporary folder is Ray's own.
            start.enter_context(environment({"TMPDIR": folder}))
            start.enter_context(in_own_process_groups())
            if not dashboard:
                start.enter_context(without_dashboard())
            return _init(
                "local",
                num_cpus=max(1, int(available_cpus())),
                num_gpus=len(slots.devices),
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=folder,
            )
    except Exception as error:  # Ray raises no more specific one here
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1][:300] if lines else type(error).__name__
        raise PlacementError(
            f"a local Ray did not start: {reason}; train without Ray (`nanoray train`), "
            "or start a Ray with `ray start --head` and give its --ray_address"
        ) from None


def _set_token() -> None:
    """Give a local Ray a token of this run: without one it runs code of anyone who can reach it.

    Ray would write a token into the user's home.
    """
    if not (os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} or _TOKEN_FILE.exists()):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        reread_authentication()
    if not has_tokens():
        say(
            f"warning  Ray {ray.__version__} cannot ask for a token, so this local Ray runs "
            "the code of anyone who reaches its ports; use Ray 2.52 or newer"
        )


def _remove(folder: str) -> None:
    """Remove the folder of a local Ray, whose dashboard may still be writing a last file."""
    deadline = time.monotonic() + CLEANUP_TIMEOUT_S
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def _init(address: str, **options: Any) -> Any:
    """Call ray.init so that Ray prints nothing: ranks log to their own files."""
    return ray.init(
        address=address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=True,
        **options,
    )


# A cluster.


def _connect(address: str) -> Any:
    """Connect to a cluster. Raises PlacementError."""
    try:
        dial(address)
        return _init(address)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise PlacementError(
            f"cannot connect to Ray at {address}: {' '.join(str(error).split())[:300]}; check "
            "`ray status`, RAY_ADDRESS and, if the cluster asks for a token, RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN (its head's ~/.ray/auth_token), or use --ray_address local"
        ) from None


# Calls to a cluster that may have no head.


def bounded(cleanup: Callable[[], object], seconds: float = CLEANUP_TIMEOUT_S) -> None:
    """Call `cleanup` in a thread, and wait for it at most some seconds.

    A call to a cluster without a head never returns.
    """

    def clean_up() -> None:
        # A new head refuses what belongs to a run of the old one: then there is nothing to clean.
        with suppress(RayError):
            cleanup()

    thread = threading.Thread(target=clean_up, name="nanoray-cleanup", daemon=True)
    thread.start()
    thread.join(seconds)


def dial(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=5).close()
