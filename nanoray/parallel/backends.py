"""Backends of process groups: gloo, NCCL, and any that a module registers with torch.

What a backend does when a peer is lost decides how the others recover:

    gloo          the connection closes, and collectives fail at once
    all others    as NCCL: collectives wait on, until the group is aborted; then they end like any
                  other, with wrong results and no error
"""

from __future__ import annotations

import importlib

from nanoray.errors import ConfigError

GLOO = "gloo"
NCCL = "nccl"


def reports_lost_peers(backend: str) -> bool:
    """Return whether collectives of this backend fail by themselves when a peer ends."""
    return backend == GLOO


def load_backend(backend: str, device: str) -> str:
    """Return torch's name of a backend, after importing the module that registers it, if any.

    `backend` is a value of --backend, `device` a device type. Raises ConfigError.
    """
    module, _, name = backend.rpartition(":")
    if not module:
        return backend

    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"backend = {backend}: {module} cannot be imported here ({error}); install it on every "
            "node, or add its folder to PYTHONPATH"
        ) from error

    from torch.distributed import Backend

    devices = Backend.backend_capability.get(name.lower())
    if devices is None:
        raise ConfigError(
            f"backend = {backend}: {module} registers no {name} with "
            "torch.distributed.Backend.register_backend"
        )
    if device not in devices:
        raise ConfigError(
            f"backend = {backend} communicates tensors on {', '.join(devices)}, and this rank's are "
            f"on {device}; use backend auto"
        )
    return name


def settings_for_aborts(timeout_s: float) -> dict[str, str]:
    """Return the variables with which NCCL's groups can be aborted, and made again, in one process.

    torch reads them when it makes a group. Sources: ProcessGroupNCCL.cpp of torch 2.13, and torchft,
    which sets the first three.
    """
    return {
        # Else the watchdog's thread ends the process when a collective fails.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        # A blocking initialisation waits for ever for a rank that was lost before it came, and no
        # abort reaches it.
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, round(timeout_s))),
        # The watchdog notes the error of a lost peer, then waits for the flight recorder: four times
        # this, a minute by default, and the monitor eight minutes. A group that is destroyed waits
        # for both threads.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "50",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
