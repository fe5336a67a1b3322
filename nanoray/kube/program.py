"""A program of the user's on the cluster: its folder in a ConfigMap, and the command that runs it.

folder ─► archive ─► ConfigMap ─► a folder of the volume, which all pods see ─► nanoray run ... train.py
"""

from __future__ import annotations

import argparse
import base64
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.kube.kustomize import Object
from nanoray.launch.program.flags import ProgramCommand, build_parser
from nanoray.launch.program.folder import ProgramFolder, size_text

CODE = "/data/code"  # on the volume
ARCHIVE = "program.tar.gz"  # in the ConfigMap
MOST_PACKED = 2**20  # a ConfigMap's limit, which its API server checks
# Flags that the pods or the entrypoint decide
_OF_THE_PODS = ("workers", "device", "out_dir", "ray_address", "name", "placement_timeout_s")


@dataclass(frozen=True)
class PodProgram:
    """A program with its folder, packed."""

    config: Config
    kind: str  # as in ProgramCommand
    words: list[str]  # in its folder in the pods
    flags: list[str]  # of `nanoray run` there, but for those that the pods decide
    dry_run: bool
    shipped: str  # what travels, for people
    archive: bytes  # empty: the program is in the image or on the volume

    @classmethod
    def of(cls, argv: list[str], keys: Mapping[str, Any]) -> PodProgram:
        """Read a command line of `nanoray run`, and pack the program's folder. Raises ConfigError.

        keys: of the configuration, besides its flags.
        """
        command = ProgramCommand.parse(argv, keys)
        words = command.words
        flags = _flags_in_pods(argv)
        is_script = command.kind == "script"
        if is_script and not Path(words[0]).is_file():
            if not words[0].startswith("/"):
                raise ConfigError(
                    f"{words[0]} is no file; for a command write -- -- {words[0]}, and for a script of "
                    "the image or the volume its whole path"
                )
            return cls(command.config, "script", words, flags, command.dry_run, "", b"")

        folder = ProgramFolder.of(command.kind, words, command.config.out_dir)
        if folder is None:
            return cls(command.config, command.kind, words, flags, command.dry_run, "", b"")
        remedy = "bring the folder in the image (--image) and give the script's path there"
        archive = folder.pack(MOST_PACKED, "a ConfigMap", remedy)
        shipped = f"{folder.describe()}, packed {size_text(len(archive))}"
        return cls(
            command.config, command.kind, folder.words, flags, command.dry_run, shipped, archive
        )

    def config_map(self, name: str) -> Object:
        """Return the ConfigMap with the program's folder."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "binaryData": {ARCHIVE: base64.b64encode(self.archive).decode()},
        }

    def entrypoint(self, mounted: str, run_folder: str, flags: list[str]) -> str:
        """Return the job's command: unpack the folder on the volume, and run the program in it.

        mounted: the folder of the ConfigMap. flags: those of `nanoray run` that the pods decide.
        """
        start = ""
        if self.archive:
            code = f"{CODE}/{Path(run_folder).name}"
            start = f"mkdir -p {code} && tar -xzf {mounted}/{ARCHIVE} -C {code} && cd {code} && "
        elif self.kind == "script":
            start = f"cd {shlex.quote(str(Path(self.words[0]).parent))} && "
        kind = {"script": [], "module": ["-m"], "command": ["--"]}[self.kind]
        words = shlex.join([*flags, "--out_dir", run_folder, *self.flags, *kind, *self.words])
        return f"{start}exec python -m nanoray run {words}"


def _flags_in_pods(argv: list[str]) -> list[str]:
    """Return the flags of a command line of `nanoray run` that its job passes on."""
    program = build_parser().parse_args(argv).program
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for key in _OF_THE_PODS:
        parser.add_argument(f"--{key}")
    parser.add_argument("--dry_run", action="store_true")
    parser.add_argument("-m", action="store_true")
    _, flags = parser.parse_known_args(argv[: len(argv) - len(program)])
    return flags
