"""Read from pods and their events why they do not run, in one line each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nanoray.kube.cluster import Api, shorten
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


def read_warnings(
    api: Api, namespace: str, owners: list[str], pods: list[Object], explained: list[Trouble]
) -> list[Trouble]:
    """Return what the events say of pods that are Pending although their status has no reason.

    A claim that a driver does not prepare, a volume that does not mount: the kubelet reports it in
    events alone. Those of the pods' `owners` say why a pod was not created: a quota, the namespace's
    Pod Security Standard. Raises KubeError.
    """
    known = {trouble.pod for trouble in explained}
    silent = list(owners)
    for pod in pods:
        name = pod["metadata"]["name"]
        if pod.get("status", {}).get("phase") == "Pending" and name not in known:
            silent.append(name)
    if not silent:
        return []

    # The newest event counts: a warning before it is over.
    newest: dict[str, Object] = {}
    for event in api.get("Event", namespace)["items"]:
        name = event["involvedObject"].get("name", "")
        if name not in newest or _time_of(event) >= _time_of(newest[name]):
            newest[name] = event
    found = []
    for name in silent:
        event = newest.get(name, {})
        if event.get("type") == "Warning":
            text = f"{event.get('reason', '?')}: {shorten(event.get('message', ''))}"
            found.append(Trouble(name, text, fatal=False))
    return found


def _time_of(event: Object) -> str:
    """Return when an event was last seen, in a form that sorts."""
    series = event.get("series") or {}
    times = [
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    ]
    # Some have fractions of a second.
    return max(str(time or "")[:19] for time in times)


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
