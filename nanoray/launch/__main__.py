"""`python -m nanoray.launch`: train on Ray, one actor per GPU, MIG slice or CPU share."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import closing, suppress
from functools import partial

from ray.util.placement_group import remove_placement_group

from nanoray.checkpoint.refused_run import discard_refused, discarding_refused
from nanoray.checkpoint.run_folder import summary_on_failure, write_summary
from nanoray.checkpoint.upload.process import Upload
from nanoray.cli import Loaded, name_program, run_command
from nanoray.cli.help import LAUNCH
from nanoray.cli.opening import Opening
from nanoray.config.variables import values_of
from nanoray.errors import CheckpointError, ConfigError, WorkerFailed
from nanoray.faults.inject import DRIVER, Injector, parse_plan
from nanoray.launch.auto import with_micro_batch
from nanoray.launch.caller import lasting_out_dir, ray_address
from nanoray.launch.connection import bounded, connected
from nanoray.launch.placement import Placement, slots_here
from nanoray.launch.recovery.driver import Driver
from nanoray.launch.recovery.pickled_script import PickledScript
from nanoray.launch.recovery.silence import UnfrozenClock
from nanoray.launch.signals import catch_signals
from nanoray.machine.environment import environment
from nanoray.machine.launchers import refuse_many_starts
from nanoray.machine.output import say
from nanoray.machine.slots import Slots
from nanoray.observe.track.tracking import require_tracker
from nanoray.observe.watch.console import choose_console
from nanoray.train.program import Trains
from nanoray.train.report import closing_lines, words_of_python


def main(argv: list[str] | None = None) -> int:
    """Run `python -m nanoray.launch`, and end this process with its exit code.

    On a shared cluster `ray.shutdown` is not called: the connection closes with the process, and
    Ray removes what belongs to the run. `ray.shutdown` sends metrics, for seconds on a busy head
    and for ever to one that is gone; an ObjectRef that is freed meanwhile makes Ray end the process
    with code 1.
    """
    command = partial(launch, last=True)
    try:
        code = run_command(command, argv, name_program("launch"), LAUNCH)
    except SystemExit as ended:  # --help, or a stop before any rank had trained
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:  # before there was anything to save
        code = 130
    except BaseException:  # a defect
        traceback.print_exc()
        code = 1
    with suppress(OSError):  # the reader of the output may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def launch(
    loaded: Loaded, started: float, program: Trains | None = None, last: bool = False
) -> int:
    """Train the loaded configuration on Ray and return the exit code. Raises NanorayError.

    `program` is a script that trains a model of its own. `last`: the caller ends this process with
    os._exit.
    """
    # Everything that needs no device comes first: a conflict fails within a second.
    opening = Opening(loaded, started, program)
    if opening.forecast():
        return 0

    refuse_many_starts(os.environ, "`python -m nanoray.launch`")

    # Where the run goes, and on how many ranks: on this machine that is known now.
    opening.set({"out_dir": lasting_out_dir(loaded.config)}, "a Ray job's folder does not last")
    config = opening.config
    variables = values_of(config.env, os.environ, started=False)
    address = ray_address(config)
    slots = None
    if address == "local":
        # The ranks are on this machine; on a cluster rank 0 finds out, before step 1.
        require_tracker(config.track)
        slots = slots_here(config)
        opening.set({"workers": slots.workers}, slots.found)
    if loaded.dry_run:
        with environment(variables):
            _dry_run(opening, address, slots, program)
        return 0
    if config.micro_batch_search and program is None:
        opening.loaded = with_micro_batch(opening.loaded)
    config = opening.config
    workers = config.workers
    if workers != "auto":
        # An impossible batch fails before Ray starts.
        opening.require_batch(workers)
    parse_plan(config.faults)
    script = PickledScript.pack(program) if program else None
    opening.read()

    # Storage that refuses, or that lacks what is to be resumed, is found out before a device is taken.
    with Upload(config.upload, config.upload_timeout) as upload:
        with environment(variables):
            upload.check()
            opening.fetch()

        # Take devices, train, and give everything back, whatever happens.
        # Ray takes the handlers of signals as it starts, so ours come afterwards.
        with connected(address, slots, last), catch_signals() as stop:
            place = Placement.make(opening.config, stop.check)
            try:
                with environment(variables):
                    spec = opening.open(place.workers)
                    upload.follow(spec.folder)
                config = spec.config
                console = choose_console(config.max_steps, loaded.quiet)
                with (
                    discarding_refused(spec),
                    summary_on_failure(spec),
                    closing(console),
                ):
                    Injector(spec.folder / "faults.jsonl").plan(config.faults, DRIVER, 0, started)
                    # Time in which this process is frozen is no silence of head or ranks.
                    with UnfrozenClock() as clock:
                        driver = Driver(
                            spec,
                            place,
                            stop,
                            clock=clock,
                            script=script,
                            cluster_clock=clock,
                            variables=variables,
                        )
                        driver.console = console
                        outcome = driver.run()
            finally:
                bounded(lambda: remove_placement_group(place.group))

        # Ray is gone: report what the run came to.
        summary = write_summary(spec, outcome, len(driver.faults.causes))
        if not outcome.get("ok"):
            message = outcome["message"]
            refused = outcome["exit_code"] in (ConfigError.exit_code, CheckpointError.exit_code)
            if refused and discard_refused(spec):
                message = message.removesuffix(f" Checkpoints and logs: {spec.folder}")
            error = WorkerFailed(message)
            error.exit_code = outcome["exit_code"]
            raise error
        start = f"{words_of_python()} -m nanoray.launch"
        say("\n".join(closing_lines(spec, summary, start, loaded.quiet)))
        return outcome["exit_code"]


def _dry_run(opening: Opening, address: str, slots: Slots | None, program: Trains | None) -> None:
    workers = opening.config.workers
    if workers == "auto":
        raise ConfigError(f"a dry run does not contact the cluster at {address}; give --workers N")
    own = program.dry_run if program else None
    if slots:
        where = f"{workers} × {slots.kind} on this machine ({slots.reason})"
        opening.dry_run(workers, where, own, slots.kind, slots.devices)
    else:
        opening.dry_run(workers, f"{workers} actors on {address}", own, None, [])


if __name__ == "__main__":
    raise SystemExit(main())
