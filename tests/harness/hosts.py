"""Two and more machines on this one: each has an address, a file system and processes of its own,
and a link that a test can cut.

A host is a pod (pods.py) that shares no volume with the others. What makes real machines differ
from pods is there as well: the hosts file of Debian and Ubuntu, in which a machine's own name is
127.0.1.1, and the bridge of Docker, which has the same address on every machine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.harness.commands import wait_for
from tests.harness.pods import Machine, RunningPod, inside, ip


class Hosts(Machine):
    """Hosts on one network; a context manager that ends them."""

    def __init__(self, folder: Path, shared: bool = True) -> None:
        """`shared`: /data is one folder, as with NFS; otherwise each host has its own."""
        super().__init__(folder)
        self._shared = shared

    def host(self, name: str, command: str = "sleep infinity", **env: str) -> RunningPod:
        """Start a host whose first process is `command`."""
        host = self.start(name, command, env, 2**28, volume=self.data(name))
        wait_for(lambda: _is_up(host), 60, said=lambda: host.log)
        return host

    def data(self, name: str) -> Path:
        """Return a host's /data, as this machine sees it."""
        if self._shared:
            return self.volume
        own = self.volume / name
        own.mkdir(exist_ok=True)
        return own

    def _prepare(self, name: str, netns: str) -> None:
        """Add the bridge of Docker, with the address that it has on every machine."""
        ip("-n", netns, "link", "add", "docker0", "type", "bridge")
        ip("-n", netns, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        ip("-n", netns, "link", "set", "docker0", "up")

    def _hosts_of(self, pod: str) -> str:
        """Return a hosts file as the installers of Debian and Ubuntu write it."""
        others = [f"{address} {name}\n" for name, address in self._names.items() if name != pod]
        return f"127.0.0.1 localhost\n127.0.1.1 {pod}\n{''.join(others)}"


def _is_up(host: RunningPod) -> bool:
    """Return whether the first process has built its root and entered it."""
    with contextlib.suppress(IndexError, OSError):
        return Path(f"/proc/{host.init}/root/opt/bin/environment").exists()
    return False


def run_on(
    host: RunningPod, command: str, timeout_s: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run a command on a host, as by ssh; return its exit code and output.

    Raises subprocess.TimeoutExpired; the command is then ended with the host.
    """
    return subprocess.run(
        inside(host, command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def start_on(host: RunningPod, command: str, log: Path) -> subprocess.Popen[Any]:
    """Start a command on a host; its output goes to `log`. It ends with the host."""
    with log.open("wb") as stream:
        return subprocess.Popen(inside(host, command), stdout=stream, stderr=subprocess.STDOUT)


def commands_on(host: RunningPod) -> list[str]:
    """Return the command lines of a host's processes."""
    own = os.readlink(f"/proc/{host.init}/ns/pid")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "ns" / "pid") == own:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found.append(" ".join(word.decode(errors="replace") for word in words))
    return found
