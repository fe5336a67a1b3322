"""What nanoray needs of Ray that is private, or newer than the oldest Ray that it runs on.

This is the one file with such names (tests/unit/test_versions.py), so a new Ray is tried here first.
nanoray/machine/compat.py is the same for torch. `api` is the module `ray`, or what takes its place in tests.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ray

TOKENS_SINCE = (2, 52)  # the first Ray that can ask for a token


def ray_version() -> tuple[int, int]:
    """Return major and minor number of Ray."""
    major, minor = ray.__version__.split(".")[:2]
    return int(major), int(minor)


def has_tokens() -> bool:
    """Return whether this Ray can ask for a token."""
    return ray_version() >= TOKENS_SINCE


def reread_authentication() -> None:
    """Let Ray read its token and whether to send one from the environment, as in a new process.

    It keeps what it has read first: each later Ray of this process would refuse that token.
    """
    if has_tokens():
        raylet: Any = ray._raylet
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")


def memory_threshold() -> float:
    """Return the share of this node's memory above which Ray ends processes there."""
    return float(os.environ.get("RAY_memory_usage_threshold", "0.95"))  # noqa: SIM112 - Ray's name


def draining_nodes(api: Any) -> dict[str, Any]:
    """Return the nodes that Ray is draining, by their id. A frozen head blocks this call."""
    return dict(api._private.state.state.get_draining_nodes())


def available_per_node(api: Any) -> dict[str, dict[str, float]]:
    """Return the resources that are free now on each node, by the node's id."""
    available: dict[str, dict[str, float]] = api._private.state.available_resources_per_node()
    return available


def request_session_name(api: Any, timeout_s: float) -> None:
    """Request a value that each head has.

    Raises an error that contains "WrongClusterID" where the head is not the one of the start.
    """
    client = api._private.worker.global_worker.gcs_client
    client.internal_kv_get(b"session_name", b"session", timeout_s)


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module or a class of Ray, as long as this lasts."""
    originals = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def in_own_process_groups() -> AbstractContextManager[None]:
    """Start the processes of a local Ray, as long as this lasts, in process groups of their own.

    A terminal that closes, `timeout` and batch systems send a signal to the whole process group of
    a command. In it Ray's head would end at once, and the ranks with it, before they have saved.
    """
    services: Any = ray._private.services
    popen = services.ConsolePopen

    def start(command: list[str], preexec_fn: Callable[[], None], **options: Any) -> Any:
        def prepare() -> None:
            os.setpgid(0, 0)
            preexec_fn()

        return popen(command, preexec_fn=prepare, **options)

    return _replaced(services, ConsolePopen=start)


def without_dashboard() -> AbstractContextManager[None]:
    """Start a local Ray, as long as this lasts, without two processes that only people look at.

    The log monitor sends what workers print to the driver, which asks for nothing of it. The API
    server answers the dashboard, `ray.util.state` and `ray job`; `ray.init` waits for it, also with
    include_dashboard=False. Each of them takes a second of a core.
    """
    # The agent of the node stays complete: workers wait for a part of it in some versions of Ray.
    node: Any = ray._private.node.Node

    def skip(self: Any, **_: Any) -> None:
        pass

    return _replaced(node, start_log_monitor=skip, start_api_server=skip)


def quiet_about_deaths() -> AbstractContextManager[None]:
    """Keep Ray's own sentence about a process that died from the console: the driver names the cause.

    Ray's logs have it, and other warnings of Ray are printed. `log_to_driver` does not concern it.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    original = getattr(worker, "print_to_stdstream", None)
    if original is None:  # another Ray: it speaks, as it did
        return nullcontext()

    def print_others(data: Any, *args: Any, **options: Any) -> None:
        if not any("A worker died or was killed" in line for line in data["lines"]):
            original(data, *args, **options)

    return _replaced(worker, print_to_stdstream=print_others)


def is_pending(api: Any, actor: Any) -> bool:
    """Return whether Ray has registered this actor and not yet started a process for it.

    That includes a process that has not returned from the actor's constructor.
    """
    record = api._private.state.actors(id_of(actor))
    return bool(record.get("State") == "PENDING_CREATION")


def id_of(actor: Any) -> str:
    """Return the id of an actor, by which Ray's errors name it."""
    return str(actor._actor_id.hex())
