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


def caller_address(config: Config) -> str:
    """Return the address of the Ray that this process is connected to; empty if there is none.

    Raises ConfigError where ranks could not be watched, and where ray_address names another Ray.
    """
    if ray.util.client.ray.is_connected():
        raise ConfigError(
            "this process is connected through Ray Client (ray://), which cannot watch ranks; call "
            "ray.shutdown() first and give ray_address HOST:PORT of the head's GCS (6379) from a "
            "machine of the cluster, or `ray job submit` the script"
        )
    if not ray.is_initialized():
        return ""

    address = ray.get_runtime_context().gcs_address
    asked = config.ray_address
    if asked != "auto" and _resolved(asked) != _resolved(address):
        raise ConfigError(
            f"ray_address = {asked}, but this process is connected to the Ray at {address} already, "
            "and a process has one connection; drop ray_address to use that Ray, or call "
            "ray.shutdown() first"
        )
    return address


def _resolved(address: str) -> str:
    """Return HOST:PORT with the host's IP address, where it has one."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        return f"{socket.gethostbyname(host)}:{port}"
    return address


def ray_address(config: Config) -> str:
    """Return `local`, or the address of the cluster to connect to: --ray_address, else RAY_ADDRESS.

    Raises ConfigError for a Ray Client address.
    """
    address = config.ray_address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise ConfigError(
            f"ray_address = {address} is Ray Client's, which cannot watch ranks; give HOST:PORT of "
            "the head's GCS (6379) from a machine of the cluster, or `ray job submit` from "
            "elsewhere"
        )
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
