"""Read from pods why they do not run, in one line each. What only events say, kubectl shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nanoray.kube.kustomize import Object

_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_NOT_CREATED = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


@dataclass
class Trouble:
    """A reason why a pod does not run, in one line; `fatal` when waiting will not help."""

    pod: str
    text: str
    fatal: bool


def troubles(pods: list[Object]) -> list[Trouble]:
    """Return the reasons why these pods do not run, as far as their own status has them."""
    found: list[Trouble] = []
    for pod in pods:
        name = pod["metadata"]["name"]
        status = pod.get("status", {})
        found += _scheduling_troubles(name, status)

        # An init container that fails keeps the others from starting.
        containers = list(status.get("initContainerStatuses", ()))
        containers += status.get("containerStatuses", ())
        for container in containers:
            trouble = _container_trouble(name, container)
            if trouble:
                found.append(trouble)
    return found


def _scheduling_troubles(pod: str, status: Object) -> Iterator[Trouble]:
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = condition.get("message", condition.get("reason", ""))
            # Not fatal: a node may be added, and another pod may end.
            yield Trouble(pod, f"cannot be scheduled: {message}", fatal=False)


def _container_trouble(pod: str, container: Object) -> Trouble | None:
    state = container.get("state", {})
    waiting = state.get("waiting", {})
    reason = waiting.get("reason")
    message = waiting.get("message", "")

    if reason in _NO_IMAGE:
        image = container.get("image", "?")
        remedy = "build and import it with kuberay/scripts/image.sh, or give --image"
        return Trouble(pod, f"image {image} not found: {message}; {remedy}", fatal=True)
    if reason in _NOT_CREATED:
        return Trouble(pod, f"{reason}: {message}", fatal=True)

    # A container that crashed is either terminated now, or waits for its next start and keeps the
    # exit code in its last state.
    exit_state = state.get("terminated") or {}
    if reason == "CrashLoopBackOff" or exit_state.get("exitCode"):
        last_state = container.get("lastState") or {}
        exit_state = exit_state or last_state.get("terminated") or {}
        exit_reason = exit_state.get("reason", "Error")
        text = f"ended with {exit_state.get('exitCode')} ({exit_reason})"
        if exit_reason == "OOMKilled":
            text += "; raise --memory_gib"
        return Trouble(pod, text, fatal=False)
    return None
