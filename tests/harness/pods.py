"""Pods without Kubernetes: each has an address, root filesystem, /dev/shm and process tree.

Each pod is a process in new network, mount and process namespaces, joined to the others by a
bridge. Its root holds the machine's own programs, the repository at /opt/nanoray as in the image,
and the shared volume at /data. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from nanoray.train.hardware import KERNEL_VARIABLES
from tests.harness.cluster import goes_first

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]

# $1 folder of the pod, $2 bytes of /dev/shm, $3 command. Builds the root, enters it, becomes the command's parent.
_INIT = """
set -e
root="$1/root"
mount --make-rprivate /
mount -t tmpfs -o size=64m,mode=755 tmpfs "$root"
for path in /*; do
  case "$path" in /data | /etc | /opt | /tmp | /proc | /lost+found) continue ;; esac
  if [ -L "$path" ]; then cp -a "$path" "$root$path"
  elif [ -d "$path" ]; then mkdir -p "$root$path" && mount --rbind "$path" "$root$path"
  fi
done
cp -a /etc "$root/etc"
mkdir -p "$root/proc" "$root/tmp" "$root/data" "$root/opt/nanoray" "$root/opt/venv" "$root/opt/bin" "$root/etc/nanoray"
echo "nameserver 127.0.0.1" > "$root/etc/resolv.conf" # refused at once: names come from the hosts file
sed -i 's/^hosts:.*/hosts: files/' "$root/etc/nsswitch.conf"
mount -t proc proc "$root/proc"
mount --bind "$1/tmp" "$root/tmp"
mount --bind "$1/bin" "$root/opt/bin"
mount --bind "$VOLUME" "$root/data"
mount --bind "$REPOSITORY" "$root/opt/nanoray"
mount --bind "$VENV" "$root/opt/venv"
mount --bind "$CONFIG" "$root/etc/nanoray"
mount -t tmpfs -o "size=$2" tmpfs "$root/dev/shm"
mount --bind "$1/hosts" "$root/etc/hosts"
start='. /opt/bin/environment; cd /opt/nanoray; exec /bin/bash -c "$1"'
exec chroot "$root" /usr/bin/env -i /bin/bash -c "$start" pod "$3"
"""


def missing() -> str:
    """Return why pods cannot be started here; empty when they can."""
    if sys.platform != "linux" or os.geteuid():
        return "pods as namespaces need root on Linux"
    for tool in ("ip", "unshare", "chroot", "mount", "nsenter"):
        if not shutil.which(tool):
            return f"pods as namespaces need {tool}"
    probe = subprocess.run(
        ["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True, text=True
    )
    return f"namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else ""


class RunningPod:
    """One pod: its address, its log, and the ways in which it can end."""

    def __init__(
        self, name: str, address: str, process: subprocess.Popen[Any], folder: Path, netns: str
    ) -> None:
        self.name, self.address, self.folder, self.netns = name, address, folder, netns
        self._process = process

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def init(self) -> int:
        """The pid, on this machine, of the pod's first process."""
        children = (
            Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        )
        return int(children[0])

    def frozen(self) -> list[int]:
        """Return the pids, on this machine, of the pod's processes that SIGSTOP froze."""
        found = []
        with contextlib.suppress(OSError, IndexError):
            own = os.readlink(f"/proc/{self.init}/ns/pid")
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    if state == "T" and os.readlink(folder / "ns" / "pid") == own:
                        found.append(int(folder.name))
        return found

    def kill(self) -> None:
        """End the pod as a lost machine would: every process at once."""
        with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
            os.kill(self.init, signal.SIGKILL)  # the namespace's init: the kernel kills the rest
        self._process.kill()
        self._process.wait(10)

    def terminate(self, grace_s: float, pre_stop: str = "") -> float:
        """End it as the kubelet does; return the seconds that it took.

        First its preStop hook, a command inside the pod, then SIGTERM to the first process and to
        no other, and SIGKILL when the grace period, which began with the hook, is over.
        """
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
            if pre_stop:
                self._run(pre_stop, grace_s)
            os.kill(self.init, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, began + grace_s - time.monotonic()))
        took = time.monotonic() - began
        self.kill()
        return took

    def _run(self, command: str, timeout_s: float) -> None:
        """Run a command in the pod, as the kubelet runs hooks."""
        with (
            contextlib.suppress(subprocess.TimeoutExpired),
            (self.folder / "log").open("ab") as log,
        ):
            subprocess.run(
                inside(self, command),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )


class Bridge:
    """The network of one machine's pods: a bridge, and a pair of veth devices for each."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._devices: dict[str, str] = {}  # pod -> its device at the bridge

    def open(self, gateway: str) -> None:
        """Make the bridge, which has the gateway's address."""
        ip("link", "add", self._name, "type", "bridge")
        ip("addr", "add", f"{gateway}/24", "dev", self._name)
        ip("link", "set", self._name, "up")

    def connect(self, pod: str, netns: str) -> None:
        """Give a network namespace a device `eth0` on this network, which goes with it."""
        self._count += 1
        self._devices[pod] = outside = f"{self._name}v{self._count}"
        inside = ("peer", "name", "eth0", "netns", netns)
        ip("link", "add", outside, "type", "veth", *inside)
        ip("link", "set", outside, "up")
        self.heal(pod)

    def cut(self, pod: str) -> None:
        """Lose each frame of this pod, in both directions."""
        ip("link", "set", self._devices[pod], "nomaster")

    def heal(self, pod: str) -> None:
        """End a cut."""
        ip("link", "set", self._devices[pod], "master", self._name)

    def close(self) -> None:
        """Take the bridge away."""
        ip("link", "del", self._name)


class Machine:
    """A network with pods on it, and their shared volume; a context manager that cleans up."""

    def __init__(self, volume: Path) -> None:
        self.volume = volume
        self._id = f"nr{random.randrange(16**4):04x}"
        self._net = f"10.{random.randrange(64, 128)}.{random.randrange(256)}"
        self._count = 1
        self._names: dict[str, str] = {}  # host name -> address
        self.pods: dict[str, RunningPod] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="nr-pods-", dir="/tmp"))
        self.config = self._folder / "config"  # every pod sees it as /etc/nanoray
        self.config.mkdir()
        self.net = Bridge(self._id)

    def __enter__(self) -> Self:
        self.net.open(f"{self._net}.1")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in list(self.pods):
            self.remove(name)
        self.net.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(
        self,
        name: str,
        command: str,
        env: dict[str, str],
        shm_bytes: int,
        aliases: tuple[str, ...] = (),
        volume: Path | None = None,
    ) -> RunningPod:
        """Start a pod; it can be found under `name` and `aliases` from now on.

        Its /data is `volume`, by default the machine's.
        """
        self._count += 1
        address, netns = f"{self._net}.{self._count}", f"{self._id}-{self._count}"
        self._names |= dict.fromkeys((name, *aliases), address)
        ip("netns", "add", netns)
        self.net.connect(name, netns)
        ip("-n", netns, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", netns, "link", "set", "eth0", "up")
        ip("-n", netns, "link", "set", "lo", "up")
        ip("-n", netns, "route", "add", "default", "via", f"{self._net}.1")
        self._prepare(name, netns)
        folder = self._folder / f"{name}-{self._count}"
        for part in ("root", "tmp", "bin"):
            (folder / part).mkdir(parents=True)
        ray = folder / "bin" / "ray"
        ray.write_text('#!/bin/sh\nexec /opt/venv/bin/python -m ray.scripts.scripts "$@"\n')
        ray.chmod(0o755)
        known = {
            "PATH": "/opt/bin:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "PYTHONPATH": "/opt/nanoray",
        }
        known |= {
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "HOSTNAME": name,
        }
        # Pods compute as the processes beside them, with which tests compare them to the bit.
        known |= {key: os.environ[key] for key in KERNEL_VARIABLES if key in os.environ}
        exports = [f"export {key}={shlex.quote(value)}\n" for key, value in (known | env).items()]
        (folder / "bin" / "environment").write_text("".join(exports))
        (folder / "hosts").touch()
        with (folder / "log").open("ab") as log:
            where = volume or self.volume
            process = self._spawn(netns, name, folder, shm_bytes, command, log, where)
        self.pods[name] = RunningPod(name, address, process, folder, netns)
        self._write_hosts()
        return self.pods[name]

    def _prepare(self, name: str, netns: str) -> None:
        """Change the pod's network before its first process starts."""

    def _spawn(
        self,
        netns: str,
        name: str,
        folder: Path,
        shm_bytes: int,
        command: str,
        log: IO[bytes],
        volume: Path,
    ) -> subprocess.Popen[Any]:
        inside = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork"]
        inside.append("--kill-child=SIGKILL")
        script = f"hostname {name}\n{_INIT}"
        words = [
            "ip",
            "netns",
            "exec",
            netns,
            *inside,
            "bash",
            "-c",
            script,
            "pod",
            str(folder),
            str(shm_bytes),
            command,
        ]
        places = {
            "VOLUME": str(volume),
            "REPOSITORY": str(ROOT),
            "VENV": sys.prefix,
            "CONFIG": str(self.config),
            "PATH": os.environ["PATH"],
        }
        return subprocess.Popen(
            words,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=places,
            start_new_session=True,
            preexec_fn=goes_first,
        )

    def _write_hosts(self) -> None:
        for pod in self.pods.values():
            (pod.folder / "hosts").write_text(self._hosts_of(pod.name))

    def _hosts_of(self, pod: str) -> str:
        """Return the hosts file of one pod."""
        lines = [f"{address} {name}\n" for name, address in self._names.items()]
        return "127.0.0.1 localhost\n" + "".join(lines)

    def delete(self, name: str, grace_s: float, pre_stop: str = "") -> float:
        """Delete a pod as Kubernetes does: first from the network, then its processes.

        Connections that stand live on until its processes end. Returns the seconds that it took.
        """
        pod = self.pods[name]
        self._names = {
            alias: address for alias, address in self._names.items() if address != pod.address
        }
        self._write_hosts()
        return pod.terminate(grace_s, pre_stop)

    def remove(self, name: str) -> None:
        """End what is left of a pod, and take its network away."""
        pod = self.pods.pop(name)
        pod.kill()
        self._names = {
            alias: address for alias, address in self._names.items() if address != pod.address
        }
        subprocess.run(["ip", "netns", "del", pod.netns], check=False, capture_output=True)


def inside(pod: RunningPod, command: str) -> list[str]:
    """Return the words that run a shell's command in the pod's namespaces and file system."""
    enter = ["nsenter", "--target", str(pod.init), "--all", "--root", "--wd"]
    whole = f". /opt/bin/environment; cd /opt/nanoray; {command}"
    return [*enter, "/usr/bin/env", "-i", "/bin/bash", "-c", whole]


def ip(*words: str) -> None:
    """Run `ip`, and say what it said when it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
