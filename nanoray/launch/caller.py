"""The Ray that the calling program is connected to already: a run uses it, and leaves it as it was.

A process has one connection to Ray. A script that has called `ray.init`, a notebook, a Ray task and
an actor have theirs, with objects and actors that a second `ray.init` or a `ray.shutdown` would
take away.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import ray

from nanoray.config import Config
from nanoray.errors import ConfigError


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
