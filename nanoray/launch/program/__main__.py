"""`nanoray run [flags] train.py ...`: run any program as ranks on Ray, with what torchrun would give it."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from nanoray.cli import exit_code_of
from nanoray.config import Config
from nanoray.config.variables import values_of
from nanoray.errors import PlacementError
from nanoray.launch.program.flags import ProgramCommand, require_script
from nanoray.launch.program.folder import ProgramFolder
from nanoray.launch.program.forked import MODULES, ForkServer, program_variables
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus
from nanoray.machine.launchers import KUBERAY
from nanoray.machine.slots import cpu_share


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: run(words))


def run(argv: list[str]) -> int:
    """Run a program as a command line says, and return its exit code. Raises NanorayError."""
    command = ProgramCommand.parse(argv)
    config, words = command.config, command.words
    if command.kind == "script":
        require_script(words[0])
    variables = values_of(config.env, os.environ, started=False)
    with ExitStack() as stack:
        server = None
        if command.kind != "command" and not command.dry_run and KUBERAY not in os.environ:
            # It imports torch while this process imports Ray. In a pod of KubeRay the driver is alone as
            # a rule.
            server = ForkServer(MODULES, program_variables(expected_threads(config), variables))
            stack.callback(server.close)
        from nanoray.launch.caller import in_copy_of_job
        from nanoray.launch.placement import START_TIMEOUT_S
        from nanoray.launch.program.driver import RankProgram
        from nanoray.launch.program.on_ray import launch

        folder = None
        # Of a Ray job each node has a copy of the folder, in which the same relative path holds.
        if not in_copy_of_job():
            folder = ProgramFolder.of(command.kind, words, config.out_dir)
        if command.kind == "script" and (folder or Path(words[0]).is_absolute()):
            words = [str(Path(words[0]).resolve()), *words[1:]]
        program = RankProgram(
            command.kind,
            words,
            Path(),
            variables,
            config.max_failures,
            command.hang_timeout_s,
            command.grace_s,
            command.tee,
            folder,
            trace_every=command.trace_every,
            start_timeout_s=max(START_TIMEOUT_S, config.placement_timeout_s),
        )
        return launch(config, program, command.dry_run, server)


def expected_threads(config: Config) -> int:
    """Return the threads that a rank will have if all are placed on this machine alone."""
    if config.cpus_per_worker or (config.device != "cpu" and discover_gpus()):
        return max(1, int(config.cpus_per_worker or 1))
    workers = 2 if config.workers == "auto" else config.workers
    with suppress(PlacementError):  # a cluster may have room for more ranks than this machine
        return max(1, int(cpu_share([available_cpus()], workers)))
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
