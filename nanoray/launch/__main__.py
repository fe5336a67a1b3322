"""`python -m nanoray.launch`: train on Ray, one actor per GPU, MIG slice or CPU share."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray.util.placement_group import remove_placement_group

from nanoray.checkpoint.refused import discard_refused, discarding_refused
from nanoray.checkpoint.resume import open_run
from nanoray.cli import Loaded, name_program, require_script, run_command
from nanoray.cli.help import LAUNCH
from nanoray.config import Config, resolve_batch
from nanoray.config.variables import values_of
from nanoray.data.prepare import prepare
from nanoray.devices.gpus import discover_gpus
from nanoray.devices.host import available_cpus
from nanoray.devices.slots import Slots, local_slots
from nanoray.environment import environment
from nanoray.errors import CheckpointError, ConfigError, WorkerFailed
from nanoray.faults.plan import DRIVER, Injector, parse_plan
from nanoray.forecast.dry_run import dry_run_lines, plan
from nanoray.forecast.scale import forecast_lines
from nanoray.launch.caller import caller_address
from nanoray.launch.driver import Driver
from nanoray.launch.job_report import JobReport
from nanoray.launch.placement import Placement, bounded, connected, using
from nanoray.launch.script import Script
from nanoray.launch.signals import catch_signals
from nanoray.launch.silence import OwnTime
from nanoray.mesh.interfaces import require_interfaces
from nanoray.mesh.launchers import refuse_many_starts
from nanoray.mesh.layout import Layout
from nanoray.output import say
from nanoray.run import require_short_names, summary_on_failure, write_summary
from nanoray.train.report import closing_lines
from nanoray.train.track.tracking import require_tracker
from nanoray.train.watch.console import choose_console
from nanoray.upload.fetch import fetch_fitting, fetch_named
from nanoray.upload.process import Upload


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
    loaded: Loaded, started: float, main: Callable[[Any], Any] | None = None, last: bool = False
) -> int:
    """Train the loaded configuration on Ray and return the exit code. Raises NanorayError.

    `main` is a script's function that each rank calls with its Run (nanoray.train.own.run). `last`:
    the caller ends this process with os._exit.
    """
    # Everything that needs no device comes first: a conflict fails within a second.
    require_script(loaded.config, main)
    if loaded.scale:
        print("\n".join(forecast_lines(loaded, loaded.scale)))
        return 0

    refuse_many_starts(os.environ, "`nanoray launch`")

    # Where the run goes, and on how many ranks: on this machine that is known now.
    config = lasting_out_dir(loaded.config)
    require_short_names(config)
    variables = values_of(config.env, os.environ, started=False)
    attached = caller_address(config)
    address = attached or ray_address(config)
    slots = None
    if address == "local":
        # The ranks are on this machine; on a cluster rank 0 finds out, before step 1.
        require_tracker(config.track)
        workers = None if config.workers == "auto" else config.workers
        slots = local_slots(config.device, workers, discover_gpus(), available_cpus())
        config = config.model_copy(update={"workers": slots.workers})
        if slots.workers > 1:
            require_interfaces({**os.environ, **variables})
    if loaded.dry_run:
        with environment(variables):
            return _dry_run(loaded, config, address, slots, main)
    if config.workers != "auto" and config.scaling == "none":
        # An impossible batch fails before Ray starts.
        resolve_batch(config, Layout.of(config, config.workers).dp)
    parse_plan(config.faults)
    script = Script.pack(main, loaded.given) if main else None
    dataset = prepare(config)

    # Storage that refuses, or that lacks what is to be resumed, is found out before a device is taken.
    with Upload(config.upload, config.upload_timeout, variables) as upload:
        upload.begin()
        with environment(variables):
            fetched = fetch_named(config)
        loaded = replace(loaded, config=fetched.config)

        # Take devices, train, and give everything back, whatever happens.
        session = using(attached) if attached else None
        with catch_signals() as stop, session or connected(address, slots, stop, last):
            place = Placement.make(loaded.config, stop.check)
            try:
                config, notes = plan(loaded, place.workers, dataset)
                with environment(variables):
                    fitting = fetch_fitting(config, dataset)
                config = fitting.config
                spec = open_run(config, dataset, started)
                notes += [*fetched.notes, *fitting.notes]
                spec = replace(spec, notes=(*notes, *spec.notes))
                upload.follow(spec)
                console = choose_console(config.max_steps, loaded.quiet)
                with (
                    discarding_refused(spec, upload.forget),
                    summary_on_failure(spec),
                    JobReport(spec) as report,
                    closing(console),
                ):
                    Injector(spec.folder / "faults.jsonl").plan(config.faults, DRIVER, 0, started)
                    # Time in which this process is frozen is no silence of head or ranks.
                    with OwnTime() as clock:
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
                        driver.recoverer.each_second = upload.say_news
                        report.count_steps = lambda: console.max_steps
                        outcome = driver.run()
                    report.state = outcome["exit_reason"]
            finally:
                bounded(lambda: remove_placement_group(place.group))

        # Ray is gone: report what the run came to.
        summary = write_summary(spec, outcome, len(driver.faults.causes))
        if not outcome.get("ok"):
            message = outcome["message"]
            refused = outcome["exit_code"] in (ConfigError.exit_code, CheckpointError.exit_code)
            if refused and discard_refused(spec, upload.forget):
                message = message.removesuffix(f" Checkpoints and logs: {spec.folder}")
            error = WorkerFailed(message)
            error.exit_code = outcome["exit_code"]
            raise error
        say("\n".join(closing_lines(spec, summary, loaded.quiet)))
        upload.stopped = outcome["exit_code"] >= 128
        return outcome["exit_code"]


def ray_address(config: Config) -> str:
    """Return `local`, or the address of the cluster to connect to: --ray_address, else RAY_ADDRESS.

    Raises ConfigError for a Ray Client address.
    """
    address = config.ray_address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise ConfigError(
            f"ray_address = {address} is Ray Client's, which cannot watch ranks; give HOST:PORT of "
            "the head's GCS (6379) from a machine of the cluster, or `ray job submit` from "
            "elsewhere"
        )
    return address


def lasting_out_dir(config: Config) -> Config:
    """Move a relative out_dir out of a Ray job's working directory: Ray deletes that copy later."""
    if "runtime_resources" not in Path.cwd().parts or Path(config.out_dir).is_absolute():
        return config
    home = os.path.expanduser("~")
    if home == "~":
        raise ConfigError(
            f"out_dir = {config.out_dir} would be in the job's working directory, a copy that Ray "
            "deletes, and this user has no home folder; give --out_dir an absolute path"
        )
    lasting = Path(home) / "nanoray" / config.out_dir
    say(
        f"out    {lasting}: the job's working directory is a copy that Ray deletes (--out_dir "
        "chooses)"
    )
    return config.model_copy(update={"out_dir": str(lasting)})


def _dry_run(
    loaded: Loaded,
    config: Config,
    address: str,
    slots: Slots | None,
    main: Callable[[Any], Any] | None,
) -> int:
    if slots is None and config.workers == "auto":
        raise ConfigError(f"a dry run does not contact the cluster at {address}; give --workers N")
    if slots:
        ranks = slots.workers
        where = f"{ranks} × {slots.kind} on this machine ({slots.reason})"
    else:
        ranks = int(config.workers)
        where = f"{ranks} actors on {address}"
    dataset = prepare(config)
    config, notes = plan(replace(loaded, config=config), ranks, dataset)
    if main:
        from nanoray.train.own.program import Program  # imports torch

        Program(main, loaded.given).dry_run(config, ranks, where)
        return 0
    batch = resolve_batch(config, Layout.of(config, ranks).dp)
    print("\n".join(dry_run_lines(config, notes, batch, dataset, where)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
