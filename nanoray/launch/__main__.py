"""`python -m nanoray.launch`: train on Ray, one actor per GPU, MIG slice or CPU share."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from ray.util.placement_group import remove_placement_group

from nanoray.checkpoint.resume import open_run
from nanoray.cli import Loaded, run_command
from nanoray.config import Config, resolve_batch
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError, WorkerFailed
from nanoray.faults.plan import DRIVER, Injector, parse_plan
from nanoray.launch.driver import Driver
from nanoray.launch.placement import Placement, bounded, connected, stuck
from nanoray.launch.signals import catch_signals
from nanoray.mesh.devices import Slots, available_cpus, discover_gpus, local_slots
from nanoray.run import summary_on_failure, write_summary
from nanoray.train.report import closing_lines, dry_run_lines, plan


def main(argv: list[str] | None = None) -> int:
    """Run `python -m nanoray.launch` and return its exit code."""
    what = "Train on Ray: one actor per GPU, MIG slice or CPU share."
    code = run_command(launch, argv, "python -m nanoray.launch", what)
    if stuck():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def launch(loaded: Loaded, started: float) -> int:
    """Train the loaded configuration on Ray and return the exit code. Raises NanorayError."""
    config = lasting_out_dir(loaded.config)
    address = ray_address(config)
    slots = None
    if address == "local":
        workers = None if config.workers == "auto" else config.workers
        slots = local_slots(config.device, workers, discover_gpus(), available_cpus())
        config = config.model_copy(update={"workers": slots.workers})
    if loaded.dry_run:
        return _dry_run(loaded, config, address, slots)
    if config.workers != "auto" and config.scaling == "none":
        resolve_batch(config, config.workers)  # an impossible batch fails before Ray starts
    parse_plan(config.faults)
    dataset = prepare(config)
    with catch_signals() as stop, connected(address, slots, stop):
        place = Placement.make(config, stop.check)
        try:
            config, notes = plan(replace(loaded, config=config), place.workers, dataset.vocab_size)
            spec = open_run(config, dataset, started)
            spec = replace(spec, notes=(*notes, *spec.notes))
            with summary_on_failure(spec):
                Injector(spec.folder / "faults.jsonl").plan(config.faults, DRIVER, 0, started)
                driver = Driver(spec, place, stop)
                outcome = driver.run()
        finally:
            bounded(lambda: remove_placement_group(place.group))
    summary = write_summary(spec, outcome, len(driver.faults.causes))
    if not outcome.get("ok"):
        error = WorkerFailed(outcome["message"])
        error.exit_code = outcome["exit_code"]
        raise error
    print("\n".join(closing_lines(spec, summary)), flush=True)
    return outcome["exit_code"]


def ray_address(config: Config) -> str:
    """Return `local`, or the address of the cluster to connect to: --ray_address, else RAY_ADDRESS.

    Raises ConfigError for a Ray Client address.
    """
    address = config.ray_address if config.ray_address != "auto" else os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise ConfigError(
            f"ray_address = {address} is Ray Client's, which cannot watch ranks; give HOST:PORT of the head's GCS "
            "(6379) from a machine of the cluster, or `ray job submit` from elsewhere"
        )
    return address


def lasting_out_dir(config: Config) -> Config:
    """Move a relative out_dir out of a Ray job's working directory, which is a copy that Ray deletes later."""
    if "runtime_resources" not in Path.cwd().parts or Path(config.out_dir).is_absolute():
        return config
    lasting = Path.home() / "nanoray" / config.out_dir
    print(f"out    {lasting}: the job's working directory is a copy that Ray deletes (--out_dir chooses)", flush=True)
    return config.model_copy(update={"out_dir": str(lasting)})


def _dry_run(loaded: Loaded, config: Config, address: str, slots: Slots | None) -> int:
    if slots is None and config.workers == "auto":
        raise ConfigError(f"a dry run does not contact the cluster at {address}; give --workers N")
    dp = slots.workers if slots else int(config.workers)
    dataset = prepare(config)
    config, notes = plan(replace(loaded, config=config), dp, dataset.vocab_size)
    where = f"{dp} × {slots.kind} on this machine ({slots.reason})" if slots else f"{dp} actors on {address}"
    print("\n".join(dry_run_lines(config, notes, resolve_batch(config, dp), dataset, where)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
