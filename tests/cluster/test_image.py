"""docker/Dockerfile without a Docker engine: its instructions, run in clean Debian roots, and the
result used.

Opt-in, because it installs Debian and torch (minutes, 6 GB): NANORAY_TEST_IMAGE=1 pytest
tests/cluster/test_image.py Needs root, debootstrap and package indexes. NANORAY_TEST_TORCH_INDEX
names a folder or URL with torch's CPU wheel, in place of PyTorch's own index.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASSED_ON = re.compile(
    r"(?i)^(https?_proxy|no_proxy|pip_.*|ssl_cert_file)$"
)  # how this machine reaches package indexes


@dataclass
class Stage:
    """One FROM of the Dockerfile and what its instructions have set so far."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    workdir: str = "/"
    user: str = "0:0"
    command: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)

    def run(self, words: list[str], timeout_s: float = 1500) -> str:
        """Run a command in the root filesystem, as its user, and return what it said."""
        scope = {key: value for key, value in os.environ.items() if PASSED_ON.match(key)}
        scope |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        scope |= {"HOME": "/root" if self.user == "0:0" else "/home/ray"} | self.env
        assignments = [f"{key}={value}" for key, value in scope.items()]
        binds = "".join(
            f"mkdir -p {shlex.quote(f'{self.root}{path}')}; mount --bind {path} "
            f"{shlex.quote(f'{self.root}{path}')}; "
            for path in ("/dev", *self.mounts)
        )
        certificates = "/etc/ssl/certs"
        if Path(certificates).is_dir() and (self.root / "etc/ssl/certs").is_dir():
            binds += f"mount --bind {certificates} {shlex.quote(f'{self.root}{certificates}')}; "
        script = f"set -e; {binds} mount -t proc proc {shlex.quote(str(self.root))}/proc; "
        script += (
            f"mount -t tmpfs -o mode=1777,size=1g tmpfs {shlex.quote(str(self.root))}/dev/shm; "
        )
        script += f'exec chroot --userspec={self.user} {shlex.quote(str(self.root))} env -i -C {self.workdir} "$@"'
        unshared = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child=SIGKILL",
            "bash",
            "-c",
            script,
            "run",
        ]
        done = subprocess.run(
            [*unshared, *assignments, *words], capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{words}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, rest) of a Dockerfile, without comments and line ends."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def build(base: Path, folder: Path, arguments: dict[str, str], mounts: list[str]) -> Stage:
    """Execute docker/Dockerfile on copies of `base`; return the last stage."""
    stages: dict[str, Stage] = {}
    given: dict[str, str] = {}
    stage = Stage(folder)

    def filled(text: str) -> str:
        known = given | stage.env
        return re.sub(r"\$\{(\w+)\}", lambda m: known.get(m[1], ""), text)

    for word, rest in instructions((ROOT / "docker" / "Dockerfile").read_text()):
        if word == "ARG":
            name, _, default = rest.partition("=")
            given[name] = arguments.get(name, default)
            if stages:
                stage.env[name] = given[name]
        elif word == "FROM":
            name = rest.partition(" AS ")[2] or "last"
            stage = stages[name] = Stage(folder / name, mounts=mounts)
            shutil.copytree(base, stage.root, symlinks=True, ignore=_virtual)
            for part in ("proc", "sys", "dev"):
                (stage.root / part).mkdir(exist_ok=True)
            (stage.root / "etc/resolv.conf").write_text(Path("/etc/resolv.conf").read_text())
        elif word == "SHELL":
            stage.shell = [*re.findall(r'"([^"]*)"', rest)]
        elif word == "RUN":
            stage.run([*stage.shell, rest])
        elif word == "ENV":
            stage.env |= dict(item.split("=", 1) for item in shlex.split(filled(rest)))
        elif word == "COPY":
            _copy(stages, stage, filled(rest).split())
        elif word == "WORKDIR":
            stage.workdir = rest
        elif word == "USER":
            stage.user = rest
        elif word == "CMD":
            stage.command = re.findall(r'"([^"]*)"', rest)
        else:
            assert word in ("LABEL", "HEALTHCHECK"), f"{word} is not executed here"
    return stage


def _virtual(folder: str, names: list[str]) -> set[str]:
    """What is no file of the image: debootstrap leaves /proc mounted, and it holds one of 128 TiB."""
    return {
        name
        for name in names
        if os.path.ismount(os.path.join(folder, name)) or folder.endswith("/dev")
    }


def _copy(stages: dict[str, Stage], stage: Stage, words: list[str]) -> None:
    source = ROOT
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *names, target = words
    for name in names:
        path = source / name.lstrip("/")
        place = stage.root / target.lstrip("/")
        if target.endswith("/") or len(names) > 1:
            place = place / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(
                path, place, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(path, place)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    if not os.environ.get("NANORAY_TEST_IMAGE"):
        pytest.skip("opt-in: NANORAY_TEST_IMAGE=1 builds the image in chroots, which takes minutes")
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("building the image in chroots needs root and debootstrap")
    folder = tmp_path_factory.mktemp("image")
    base = folder / "base"
    mirror = os.environ.get("NANORAY_TEST_DEBIAN_MIRROR", "http://deb.debian.org/debian")
    command = ["debootstrap", "--variant=minbase", "bookworm", str(base), mirror]
    # Its mounts end with it
    own = ["unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL"]
    done = subprocess.run([*own, *command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    index = os.environ.get("NANORAY_TEST_TORCH_INDEX", "")
    local = [index] if index.startswith("/") else []
    return build(base, folder, {"DEVICE": "cpu"} | ({"TORCH_INDEX": index} if index else {}), local)


@pytest.mark.timeout(2400)
def test_the_image_trains_as_uid_1000(image: Stage) -> None:
    """On the stdlib text, two ranks on Ray, from the image's own workdir, with nothing of this
    machine in it.
    """
    assert image.run(["id", "-u"]).strip() == "1000"
    assert image.command[:2] == ["ray", "start"]
    assert image.run(["ray", "--version"]).strip().endswith("2.60.0")
    flags = [
        "--preset",
        "tiny",
        "--dataset",
        "stdlib",
        "--max_steps",
        "20",
        "--out_dir",
        "/data/runs",
        "--workers",
        "2",
    ]
    output = image.run(["python", "examples/train_shakespeare.py", *flags, "--device", "cpu"], 300)
    assert "finished 20 steps" in output
    assert str(ROOT) not in output


@pytest.mark.timeout(2400)
def test_the_image_holds_what_was_pinned_and_no_compiler(image: Stage) -> None:
    found = dict(
        line.split("==")
        for line in image.run(["python", "-m", "pip", "freeze"]).split()
        if "==" in line
    )
    text = (ROOT / "docker" / "requirements-cpu.txt").read_text()
    pins = dict(re.findall(r"^([a-z0-9._-]+)==([^ \n]+)", text, re.M))
    assert {name.lower().replace("_", "-"): v for name, v in found.items()}.items() >= {
        (name, version) for name, version in pins.items() if name not in ("setuptools", "pip")
    }
    for tool in ("gcc", "git", "curl"):
        assert not list(image.root.glob(f"usr/bin/{tool}"))
