"""Which Ray a run uses, and where its folder goes, as the calling program's surroundings say.

A Ray that the program is connected to already is used, and stays as it was. A process has one
connection to Ray. A script that has called `ray.init`, a notebook, a Ray task and
an actor have theirs, with objects and actors that a second `ray.init` or a `ray.shutdown` would
take away.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import ray

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.machine.output import say


def ray_address(config: Config) -> str:
    """Return the Ray that a run uses: `local`, or the address of a cluster.

    That is the one that this process is connected to, else that of --ray_address, else of
    RAY_ADDRESS. Raises ConfigError for Ray Client, and where ray_address names another Ray than the
    one that this process is connected to.
    """
    asked = config.ray_address
    wanted = asked if asked != "auto" else os.environ.get("RAY_ADDRESS") or "local"
    is_connected = ray.is_initialized()
    asks_client = wanted.startswith("ray://") and not is_connected
    if asks_client or ray.util.client.ray.is_connected():
        raise ConfigError(
            "Ray Client (ray://) cannot watch ranks; give ray_address HOST:PORT of the head's GCS "
            "(6379) from a machine of the cluster, after ray.shutdown() where this process is "
            "connected through it, or `ray job submit` the script"
        )
    if not is_connected:
        return wanted

    present = ray.get_runtime_context().gcs_address
    if asked != "auto" and _resolved(asked) != _resolved(present):
        raise ConfigError(
            f"ray_address = {asked}, but this process is connected to the Ray at {present} already, "
            "and a process has one connection; drop ray_address to use that Ray, or call "
            "ray.shutdown() first"
        )
    return present


def _resolved(address: str) -> str:
    """Return HOST:PORT with the host's IP address, where it has one."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        return f"{socket.gethostbyname(host)}:{port}"
    return address


def in_copy_of_job() -> bool:
    """Return whether this process is in a Ray job's working directory, of which each node has a copy."""
    return "runtime_resources" in Path.cwd().parts


def lasting_out_dir(config: Config) -> str:
    """Return out_dir, moved out of a Ray job's working directory: Ray deletes that copy later."""
    if not in_copy_of_job() or Path(config.out_dir).is_absolute():
        return config.out_dir
    lasting = Path.home() / "nanoray" / config.out_dir
    say(
        f"out    {lasting}: the job's working directory is a copy that Ray deletes (--out_dir "
        "chooses)"
    )
    return str(lasting)
