"""Follow a RayJob to its end: print its status, why its pods do not run, and its driver's log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from nanoray.kube.cluster import Api, KubeError, shorten
from nanoray.kube.fetch import end_of_run
from nanoray.kube.kustomize import Object
from nanoray.kube.pods import read_warnings, troubles
from nanoray.kube.ray_jobs import TERMINAL, attempts, read_log

STARTED = ("RUNNING", "SUCCEEDED", "FAILED", "STOPPED")  # values of jobStatus
_NO_JOB = ("", "")
_QUEUED = ("Suspending", "Suspended")  # values of jobDeploymentStatus, for example by Kueue


@dataclass
class Follower:
    """Follow one RayJob: poll it every `poll_s` seconds and pass new lines to `print_line`."""

    api: Api
    namespace: str
    name: str
    print_line: Callable[[str], None] = print
    poll_s: float = 2.0
    start_timeout_s: float = 900.0  # not counted while the job waits in a queue
    # Give up following (not the job) when the API server is away for longer
    silence_s: float = 300.0
    _printed_once: set[str] = field(default_factory=set)
    _attempt: int = 0  # counts Ray jobs, from 1
    _job: tuple[str, str] = _NO_JOB  # RayCluster and Ray job of this attempt
    _attempt_began: float = 0.0  # monotonic seconds at which it was first seen
    _printed_log: str = ""  # of this attempt
    _log_is_missing: bool = False  # and the reason has been printed

    def run(self) -> Object:
        """Return the RayJob's status once it is terminal.

        Raises KubeError when the job cannot start or was deleted, or when the API server is away
        for longer than `silence_s`.
        """
        began = time.monotonic()
        admitted = began
        last_state = ""
        started = False
        while True:
            rayjob = self._read_job()
            status: Object = rayjob.get("status", {})
            deployment = status.get("jobDeploymentStatus")

            # Other names, or none: the operator has deleted the cluster of this attempt, with its log
            # and with the status of its end.
            job = (status.get("rayClusterName", ""), status.get("jobId", ""))
            if self._job not in (_NO_JOB, job):
                self._print_end(rayjob)

            # The log first, so that the lines before a job's end are printed before its end is. The
            # names are known before anything runs under them.
            if status.get("jobId") and status.get("jobStatus"):
                if job != self._job:
                    self._begin_attempt(status)
                for line in self._new_log(status):
                    self.print_line(line)

            state = _format_state(status)
            if state != last_state:
                line = f"job    {state} after {time.monotonic() - began:.0f} s"
                if state.startswith("Retrying"):
                    line += f": {shorten(status.get('message', ''))}"
                self.print_line(line)
                last_state = state
            if deployment in TERMINAL:
                return status

            # The time for a start begins anew when the job leaves the queue.
            if deployment in _QUEUED:
                admitted = time.monotonic()
            # Between two attempts jobStatus is empty again, but the job has started once.
            started = started or status.get("jobStatus") in STARTED
            self._check_pods(status, started, time.monotonic() - admitted)
            time.sleep(self.poll_s)

    def _read_job(self) -> Object:
        """Return the RayJob; wait while the API server is away. Raises KubeError."""
        away_since = None
        while True:
            try:
                job: Object = self.api.get("RayJob", self.namespace, self.name)
                return job
            except KubeError as error:
                if getattr(error, "status", 0) == 404:
                    message = f"RayJob {self.name} was deleted while it was followed"
                    raise KubeError(message) from None
                if not _is_temporary(error):
                    raise
                self._print_once(f"api    {error}; trying again")
                if away_since is None:
                    away_since = time.monotonic()
                if time.monotonic() - away_since > self.silence_s:
                    raise
                time.sleep(self.poll_s)

    def _print_once(self, line: str) -> None:
        if line not in self._printed_once:
            self._printed_once.add(line)
            self.print_line(line)

    def _check_pods(self, status: Object, started: bool, waited_s: float) -> None:
        """Print why pods do not run. Raises KubeError when the job will not start.

        Once the job has started, nothing is raised: the driver replaces a rank whose pod fails.
        """
        cluster = status.get("rayClusterName")
        pods: list[Object] = []
        if cluster:
            selector = f"ray.io/cluster={cluster}"
            try:
                pods = self.api.get("Pod", self.namespace, selector=selector)["items"]
            except KubeError as error:
                if not _is_temporary(error):
                    raise
                self._print_once(f"api    {error}; trying again")
                return

        # The events are a service: an account may lack the right to read them. Until the job runs,
        # some of its pods may be missing: its events say why.
        found = troubles(pods)
        with suppress(KubeError):
            owners = [cluster, self.name] if cluster and not (pods and started) else []
            found += read_warnings(self.api, self.namespace, owners, pods, found)
        for trouble in found:
            self._print_once(f"pod    {trouble.pod} {trouble.text}")
        if started:
            return

        fatal = [trouble for trouble in found if trouble.fatal]
        if fatal or waited_s > self.start_timeout_s:
            reason = "no pod says why; see kubectl describe"
            candidates = fatal or found
            if candidates:
                reason = f"{candidates[0].pod} {candidates[0].text}"
            raise KubeError(
                f"the job cannot start: {reason}. Its objects are still there: nanoray kube stop "
                f"{self.name} --delete"
            )

    def _begin_attempt(self, status: Object) -> None:
        """Print the Ray job that runs from now on, and read its log from the beginning."""
        # A follower that starts late takes the operator's count.
        self._attempt = max(self._attempt + 1, attempts(status))
        self._printed_log = ""
        cluster = status.get("rayClusterName", "")
        job = status["jobId"]
        self._job = (cluster, job)
        self._attempt_began = time.monotonic()
        self.print_line(f"try    {self._attempt}: Ray job {job} on RayCluster {cluster}")

    def _print_end(self, job: Object) -> None:
        """Print why the present attempt has ended, as the volume has it; from now on there is none."""
        try:
            reason = end_of_run(
                self.api, self.namespace, job, time.monotonic() - self._attempt_began
            )
        except KubeError as error:
            reason = f"not known: {error}"
        self.print_line(f"end    of try {self._attempt}: {reason}")
        self._job = _NO_JOB

    def _new_log(self, status: Object) -> Iterator[str]:
        """Yield the new lines of the driver's log; a failed request yields none."""
        has_ended = status.get("jobDeploymentStatus") in TERMINAL
        try:
            log = read_log(self.api, self.namespace, status)
        except KubeError as error:
            # Before the job runs, Ray may not answer yet. That is not printed, and not counted.
            if has_ended:
                self.print_line(f"log    out of reach: {error}")
            elif status.get("jobStatus") == "RUNNING" and not self._log_is_missing:
                self.print_line(f"log    out of reach, trying again: {error}")
                self._log_is_missing = True
            return
        self._log_is_missing = False

        # While the job runs, the last line may be incomplete, so it waits for its newline.
        if not has_ended:
            log = log[: log.rfind("\n") + 1]

        # A log that does not continue the printed one is another job's: the head was replaced, and
        # the operator submitted the job again.
        if log and not log.startswith(self._printed_log):
            self._begin_attempt(status)
        new_text = log[len(self._printed_log) :]
        self._printed_log += new_text
        yield from new_text.splitlines()


def _format_state(status: Object) -> str:
    """Join both statuses of a RayJob: Running/RUNNING. Before the operator sets them: accepted."""
    parts = [status.get("jobDeploymentStatus"), status.get("jobStatus")]
    return "/".join(part for part in parts if part) or "accepted"


def _is_temporary(error: KubeError) -> bool:
    """Return whether the API server is away (no answer, or a 5xx), so that a retry may succeed."""
    status = getattr(error, "status", 0)
    return status == 0 or status >= 500
