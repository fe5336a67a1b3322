"""Machines, limits and variables in which a run may find itself, each with what becomes of it.

`tests/ranks/test_environments.py` trains in each of them, and docs/environments.md shows the table.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TRAINS = "trains, with the same losses"
_NEW_MOUNTS, _NEW_HOST, _NEW_USER, _NEW_NET = 0x20000, 0x4000000, 0x10000000, 0x40000000
_READ_ONLY, _BIND, _PRIVATE = 0x1, 0x1000, 0x44000  # flags of mount(2); the last with all below it


class Surroundings(NamedTuple):
    """What a command finds around it."""

    name: str  # for the page
    # Called with the run's out_dir in the process that becomes the command
    before: Callable[[Path], None] | None = None
    variables: dict[str, str | None] = {}  # noqa: RUF012 (None: not set)
    flags: tuple[str, ...] = ()
    ranks: int = 1
    refused: str = ""  # what the one line of its error contains; "": it trains
    python: str = ""  # a shell's command of a process of its own, where a fork would not do
    everyday: bool = False
    root: bool = False  # it needs the rights to make namespaces
    note: str = ""


def _call(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _unshare(flags: int) -> None:
    _call(ctypes.CDLL(None, use_errno=True).unshare(flags))


def _mount(path: str, options: str, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode()))


def _own_mounts() -> None:
    _unshare(_NEW_MOUNTS)
    _call(ctypes.CDLL(None, use_errno=True).mount(b"none", b"/", None, _PRIVATE, None))


def unnamed_user(_: Path) -> None:
    """A user id that /etc/passwd lacks, as OpenShift gives one; files stay those of root."""
    _unshare(_NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text("12345 0 1")
    Path("/proc/self/gid_map").write_text("12345 0 1")


def small_shm(_: Path) -> None:
    """As a container has it without --shm-size."""
    _own_mounts()
    _mount("/dev/shm", "size=64m")


def no_shm(_: Path) -> None:
    _own_mounts()
    _mount("/dev/shm", "size=4k", _READ_ONLY)


def hidden(*folders: str) -> Callable[[Path], None]:
    def hide(_: Path) -> None:
        _own_mounts()
        for folder in folders:
            _mount(folder, "size=4k")

    return hide


def only_ipv6(_: Path) -> None:
    _unshare(_NEW_NET)
    subprocess.run("ip link set lo up; ip addr del 127.0.0.1/8 dev lo", shell=True, check=True)


def only_loopback(_: Path) -> None:
    _unshare(_NEW_NET)
    subprocess.run("ip link set lo up", shell=True, check=True)


def host_without_address(_: Path) -> None:
    _unshare(_NEW_HOST)
    socket.sethostname("no-such-host")


def limit(kind: int, value: int) -> Callable[[Path], None]:
    return lambda _: resource.setrlimit(kind, (value, value))


def small_disk(options: str, flags: int = 0) -> Callable[[Path], None]:
    def mount(out: Path) -> None:
        out.mkdir()
        _own_mounts()
        _mount(str(out), options, flags)

    return mount


def removed_folder(out: Path) -> None:
    folder = out.with_name("removed")
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


def read_only_folder(_: Path) -> None:
    os.chdir("/proc")


def link(out: Path) -> None:
    real = out.with_name("real")
    real.mkdir()
    out.symlink_to(real)


def dangling_link(out: Path) -> None:
    out.symlink_to(out.with_name("to be made"))


def loop(out: Path) -> None:
    out.symlink_to(out)


def umask(bits: int) -> Callable[[Path], None]:
    return lambda _: (os.umask(bits), None)[1]


def deaf(_: Path) -> None:
    """Signals that nohup, cron or a shell's `trap ''` leave ignored."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


def blocked(_: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))


def stream(*descriptors: int) -> Callable[[Path], None]:
    def break_pipe(_: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        for descriptor in descriptors:
            os.dup2(writer, descriptor)

    return break_pipe


_NAMES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_PROXIES: dict[str, str | None] = dict.fromkeys(_NAMES, "http://127.0.0.1:1")
_ASCII: dict[str, str | None] = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_PLAIN = '"$PYTHON" $RUN'
Row = Surroundings
TABLE = [
    # Users and their folders
    Row("a user id without an entry in passwd", unnamed_user, ranks=2, root=True, everyday=True),
    Row(
        "the same, and no `HOME`",
        unnamed_user,
        {"HOME": None, "USER": None, "LOGNAME": None},
        root=True,
    ),
    Row("`HOME` unset", variables={"HOME": None}),
    Row("`HOME` that is missing", variables={"HOME": "/nonexistent/home"}),
    Row(
        "`HOME` and `XDG_CACHE_HOME` read-only", None, {"HOME": "/proc", "XDG_CACHE_HOME": "/proc"}
    ),
    Row("`TMPDIR` that is missing", variables={"TMPDIR": "/nonexistent/tmp"}),
    Row("`TMPDIR` read-only", variables={"TMPDIR": "/proc"}),
    Row("umask 777, as root", umask(0o777), root=True),
    Row("a working folder that is read-only", read_only_folder),
    Row(
        "a working folder that is removed once torch is imported",
        removed_folder,
        everyday=True,
        note="in a folder that is already gone, torch itself does not start",
    ),
    Row(
        "the same, and a relative `--out_dir`",
        removed_folder,
        flags=("--out_dir", "runs"),
        refused="the folder in which this command runs was removed",
    ),
    Row("`--out_dir` is a link", link),
    Row("`--out_dir` is a link to nothing", dangling_link, note="the folder is made"),
    Row("`--out_dir` is a loop of links", loop, refused="give a writable --out_dir"),
    # Limits of the machine
    Row("/dev/shm of 64 MiB", small_shm, ranks=2, root=True),
    Row("/dev/shm full and read-only", no_shm, ranks=2, root=True),
    Row(
        "no /proc",
        hidden("/proc"),
        ranks=2,
        root=True,
        note="torch prints that it cannot count CPUs",
    ),
    Row("no /sys and no /etc", hidden("/sys", "/etc"), ranks=2, root=True),
    Row("`ulimit -n 256`", limit(resource.RLIMIT_NOFILE, 256), ranks=2),
    Row("`ulimit -n 64`", limit(resource.RLIMIT_NOFILE, 64), ranks=2),
    Row(
        "`ulimit -n 24`",
        limit(resource.RLIMIT_NOFILE, 24),
        ranks=2,
        refused="Too many open files",
    ),
    Row("`ulimit -l 0`, no core files", limit(resource.RLIMIT_MEMLOCK, 0)),
    Row("`ulimit -s 1024`", limit(resource.RLIMIT_STACK, 1 << 20)),
    Row("`ulimit -f` below run.json", limit(resource.RLIMIT_FSIZE, 2048), refused="ulimit -f"),
    Row(
        "`ulimit -f` below a checkpoint",
        limit(resource.RLIMIT_FSIZE, 50_000),
        refused="cannot write checkpoint",
    ),
    Row("a disk with 4 KiB", small_disk("size=4k"), root=True, refused="No space left on device"),
    Row("a disk with 64 KiB", small_disk("size=64k"), root=True, refused="cannot write checkpoint"),
    Row(
        "a read-only disk",
        small_disk("size=64k", _READ_ONLY),
        root=True,
        refused="Read-only file system; give a writable --out_dir",
    ),
    # Networks
    Row(
        "IPv6 alone, `MASTER_ADDR=::1`",
        only_ipv6,
        {"MASTER_ADDR": "::1"},
        ranks=2,
        root=True,
        everyday=True,
    ),
    Row(
        "the same, `MASTER_ADDR=127.0.0.1`",
        only_ipv6,
        ranks=2,
        root=True,
        refused="MASTER_ADDR = 127.0.0.1 is 127.0.0.1, which this host does not have",
    ),
    Row("no network but the loopback", only_loopback, ranks=2, root=True),
    Row("a host name without an address", host_without_address, ranks=2, root=True),
    Row("proxies that are dead, `NO_PROXY` unset", None, _PROXIES | {"NO_PROXY": None}, ranks=2),
    # Streams and signals
    Row("stdout and stderr whose reader has gone", stream(1, 2)),
    Row("SIGHUP, INT, PIPE, TERM and CHLD ignored", deaf),
    Row("all signals blocked", blocked),
    Row("stdin closed", python=f"{_PLAIN} <&-"),
    Row("stdin, stdout and stderr closed", python=f"{_PLAIN} <&- >&- 2>&-"),
    Row("stdout and stderr on a full disk", python=f"{_PLAIN} > /dev/full 2>&1"),
    # Variables
    Row("`TZ` of no zone", variables={"TZ": ":nowhere/x"}),
    Row("`LC_ALL` of no locale", variables={"LC_ALL": "xx_YY.UTF-8"}),
    Row("`LC_ALL=C`, `PYTHONUTF8=0`", variables=_ASCII, python=_PLAIN),
    Row("`OMP_NUM_THREADS=`", variables={"OMP_NUM_THREADS": ""}, python=_PLAIN),
    Row("`OMP_NUM_THREADS=abc`", variables={"OMP_NUM_THREADS": "abc"}, python=_PLAIN),
    Row("`OMP_NUM_THREADS=0`", variables={"OMP_NUM_THREADS": "0"}, python=_PLAIN),
    Row("`CUDA_VISIBLE_DEVICES=` on a CPU", variables={"CUDA_VISIBLE_DEVICES": ""}),
    Row("`CUDA_VISIBLE_DEVICES=abc` on a CPU", variables={"CUDA_VISIBLE_DEVICES": "abc"}),
    Row("`TORCH_DISTRIBUTED_DEBUG=DETAIL`", None, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, ranks=2),
    Row("`COLUMNS=0`, `TERM=`", variables={"COLUMNS": "0", "TERM": ""}),
    Row(
        "`GLOO_SOCKET_IFNAME` of no interface",
        variables={"GLOO_SOCKET_IFNAME": "nope"},
        ranks=2,
        refused="GLOO_SOCKET_IFNAME = 'nope' names no interface",
    ),
    # Python
    Row("`python -O`", python='"$PYTHON" -O $RUN'),
    Row("`python -OO`", python='"$PYTHON" -OO $RUN'),
    Row("`python -I`", python='"$PYTHON" -I $RUN'),
    Row("`python -P`", python='"$PYTHON" -P $RUN'),
    Row("`python -W error`", python='"$PYTHON" -W error $RUN'),
]


def table() -> str:
    """Return the table of docs/environments.md."""
    lines = ["| what a run finds | ranks | outcome |", "| --- | ---: | --- |"]
    for row in TABLE:
        outcome = f"refused: `{row.refused}`" if row.refused else TRAINS
        if row.note:
            outcome = f"{outcome}; {row.note}"
        lines.append(f"| {row.name} | {row.ranks} | {outcome} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Print the table."""
    print(table())
    return 0


if __name__ == "__main__":
    main([])
