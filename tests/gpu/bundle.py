"""The packages that a GPU machine without a package index may lack: `make bench-gpu-bundle`.

    python3 -m tests.gpu.bundle [--python 3.12] [--text input.txt]

It needs Python with pip, and a package index. build/gpu-day then has wheels of numpy, pydantic,
PyYAML, nvidia-ml-py and pytest with all that they need, and tiny Shakespeare.
build/gpu-day.tar has that and this tree: unpack it on the GPU machine, and run `make bench-gpu`
there. day.py takes from it only what cannot be imported there.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu-day"
ARCHIVE = ROOT / "build" / "gpu-day.tar"
PACKAGES = ("numpy", "pydantic", "pyyaml", "nvidia-ml-py", "pytest")
NEEDED = ("numpy", "pydantic", "yaml", "pynvml")  # the modules without which no part runs
# pip matches them exactly, and each package was built for another one
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
ENDINGS = (".dist-info", ".libs", ".data", ".pth")  # of what a wheel has beside its modules
MOST_MIB = 64
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def wheels_for(bundle: Path, python: str, machine: str) -> Path:
    """Return the folder of the wheels for one version of Python on one kind of processor."""
    return bundle / f"wheels-{python}-{machine}"


# Where pip works.


def download(python: str, machine: str) -> Path:
    """Fill the folder of wheels, and return it. Raises subprocess.CalledProcessError."""
    wheels = wheels_for(FOLDER, python, machine)
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for system in PLATFORMS:
        command += ["--platform", f"{system}_{machine}"]
    command += ["-c", str(ROOT / "constraints.txt"), "-d", str(wheels), *PACKAGES]
    subprocess.run(command, check=True)
    return wheels


def copy_text(given: str) -> str | None:
    """Put tiny Shakespeare into the folder; return why it is not there, or None."""
    from nanoray.data.download import FetchFailed, fetch

    try:
        (FOLDER / "shakespeare.txt").write_bytes(fetch(given or URL, answer_s=30.0))
    except FetchFailed as error:
        return f"no text: {error}; give --text FILE, or the baby GPT trains on another text"
    return None


def archive() -> float:
    """Write the tree and the folder into one file; return its MiB."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    with tarfile.open(ARCHIVE, "w") as tar:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                tar.add(ROOT / name, f"nanoray/{name}")
        tar.add(FOLDER, "nanoray/build/gpu-day")
    return ARCHIVE.stat().st_size / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder and the archive; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = "version of the GPU machine's Python [%(default)s]"
    parser.add_argument("--python", default="3.12", help=which)
    parser.add_argument("--machine", default="x86_64", help="its processor [%(default)s]")
    parser.add_argument("--text", default="", help="file or URL of tiny Shakespeare [downloaded]")
    args = parser.parse_args(argv)
    try:
        wheels = download(args.python, args.machine)
    except subprocess.CalledProcessError as error:
        print(
            f"gpu_bundle: pip ended with exit code {error.returncode}; see above", file=sys.stderr
        )
        return 1
    why = copy_text(args.text)
    if why:
        print(f"gpu_bundle: {why}", file=sys.stderr)
    mib = archive()
    print("\n".join(sorted(path.name for path in wheels.iterdir())))
    print(f"{ARCHIVE}: {mib:.0f} MiB for Python {args.python}; unpack it, then make bench-gpu")
    if mib > MOST_MIB:
        print(f"gpu_bundle: that is more than {MOST_MIB} MiB", file=sys.stderr)
    return 0


# On the GPU machine, where nothing but torch may be installed.


def is_there(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def unpack(bundle: Path, lib: Path) -> list[str]:
    """Unpack each wheel of which some module cannot be imported; return the names of those.

    An installed package is never replaced. `lib` is put behind all other folders of this process.
    """
    found: list[str] = []
    for wheel in sorted(wheels_for(bundle, _own_python(), platform.machine()).glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            tops = {name.partition("/")[0] for name in file.namelist()}
            modules = sorted(top.partition(".")[0] for top in tops if not top.endswith(ENDINGS))
            missing = [name for name in modules if not is_there(name)]
            if missing:
                file.extractall(lib)
                found += [name for name in missing if name[0] != "_"]
    sys.path.append(str(lib))
    return found


def how_to_get(missing: Sequence[str]) -> str:
    """Return the line for someone whose Python lacks these modules."""
    flags = f"--python {_own_python()} --machine {platform.machine()}"
    return (
        f"{sys.executable} lacks {', '.join(missing)}: run `make bench-gpu-bundle "
        f'ARGS="{flags}"` where pip works, copy its folder build/gpu-day to {FOLDER}, and run '
        "this again"
    )


def _own_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


if __name__ == "__main__":
    raise SystemExit(main())
