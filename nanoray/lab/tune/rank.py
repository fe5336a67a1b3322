"""A search as one rank of a run: look at the model and the ranks, search, write what was found."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.forecast.job import Job
from nanoray.config import micro_batches, resolve_batch
from nanoray.faults.inject import Injector
from nanoray.lab.tune.knobs import ALWAYS, BATCH, TunedRun, configured, memory_bytes
from nanoray.lab.tune.request import KNOB_NAMES, MASKS, NORMS, SearchRequest
from nanoray.lab.tune.result import closing_lines, write_results
from nanoray.lab.tune.search import Search
from nanoray.lab.tune.trials import STOPPED, Trials
from nanoray.lab.tune.tuned_model import TunedModel
from nanoray.machine.host import available_cpus
from nanoray.models.build import shape_of
from nanoray.models.gpt import ModelShape
from nanoray.parallel.ddp import default_bucket_mb
from nanoray.parallel.mesh import Mesh, join
from nanoray.parallel.rendezvous import Order, Rendezvous
from nanoray.parallel.running_statistics import has_statistics
from nanoray.train.agree import agree_on_precision, resolve_precision, resolved
from nanoray.train.hardware import describe_place
from nanoray.train.loop_arm import FOLDER, memory_of_rank
from nanoray.train.out_of_memory import come_in_batches
from nanoray.train.rank import meet_group, prepare_process
from nanoray.train.tasks import Task


def search_on_rank(
    asked: SearchRequest,
    spec: RunSpec,
    rendezvous: Rendezvous,
    observers: Sequence[Any],
    wanted: Callable[[], Order],
    store: Any,
) -> dict[str, Any]:
    """Search as one rank, and return the outcome. (all ranks)"""
    # micro_batch_size auto asks for the micro batch alone
    may, leave = asked.may, asked.leave
    is_auto = spec.config.micro_batch_search
    if is_auto:
        may = (MASKS,)
        leave = tuple(name for name in KNOB_NAMES if name != "micro_batch")
        spec = with_config(spec, {"micro_batch_search": False})

    prepare_process(spec, rendezvous)
    mesh = meet_group(Injector(spec.folder / "faults.jsonl"), join, spec, rendezvous, store)

    def say(line: str) -> None:
        for observer in observers if mesh.rank == 0 else ():
            observer.on_note(line)

    subject = TunedModel(asked.main, asked.given, rendezvous)
    here = here_of(spec, mesh, rendezvous, subject)
    memory = memory_of_rank(mesh)
    if is_auto:
        micro = safe_micro_batch(here, memory)
        spec = with_config(spec, {"micro_batch_size": micro})
        here = replace(here, config=here.config.model_copy(update={"micro_batch_size": micro}))

    place = describe_place(mesh)
    say(f"tune   {here.layout} of {place}")
    own = replace(spec, config=here.config)
    trials = Trials(own, mesh, subject, here, asked.budget_s, wanted, say)
    trials.read()
    search = Search(trials, here, may, memory, leave)
    try:
        search.run()
    finally:
        if mesh.rank == 0:
            shutil.rmtree(spec.folder / FOLDER, ignore_errors=True)

    lines = closing_lines(search)
    if mesh.rank == 0:
        write_results(spec.folder, spec.config, asked.label, search, place, lines)
    mesh.barrier()
    return {
        "exit_reason": "stopped" if search.ended == STOPPED else "finished",
        "world_size": mesh.world_size,
        "backend": mesh.backend,
        "device": str(mesh.device),
        "lines": lines,
    }


def with_config(spec: RunSpec, values: dict[str, Any]) -> RunSpec:
    """Return a spec whose configuration has these values."""
    return replace(spec, config=spec.config.model_copy(update=values))


def here_of(spec: RunSpec, mesh: Mesh, rendezvous: Rendezvous, subject: TunedModel) -> TunedRun:
    """Look at the model and the ranks of a run. (all ranks)"""
    precision, _ = agree_on_precision(mesh, resolve_precision(spec.config, mesh))

    def read_facts(task: Task) -> tuple[dict[str, Any], bool, bool]:
        data = task.data(torch.device("cpu"))
        return task.settings(), has_statistics(task.model()), come_in_batches(data)

    settings, has_norms, in_batches = subject.open(spec, read_facts)
    config = resolved(spec.config, mesh, precision, settings)

    # A script's model may draw random numbers.
    matters = set(ALWAYS)
    if config.dropout or config.model == "own":
        matters.add(MASKS)
    if has_norms:
        matters.add(NORMS)

    job = None
    shape = shape_of(config, spec.dataset.vocab_size)
    if isinstance(shape, ModelShape) and not config.pure:
        sequences = resolve_batch(config, mesh.layout.dp).global_size
        bucket_mb = config.bucket_mb or default_bucket_mb(mesh.device)
        job = Job(shape, config, sequences, precision, bucket_mb)
    return TunedRun(
        config,
        mesh.world_size,
        mesh.device.type,
        rendezvous.threads,
        max(1, int(available_cpus() / max(1, rendezvous.local_world_size))),
        in_batches,
        frozenset(matters),
        job,
    )


def safe_micro_batch(here: TunedRun, memory: int) -> int:
    """Return the micro batch with which `micro_batch_size auto` begins.

    It is the largest one that needs at most half of a rank's memory, by formula: the search tries
    larger ones, too, but the present setting must fit. Without a formula it is the smallest one.
    """
    batch = resolve_batch(here.config, here.layout.dp)
    sizes = micro_batches(here.config, batch.micro * batch.accum)
    for micro in reversed(sizes):
        values = zip(BATCH, (batch.global_size, micro, 0), strict=True)
        config = configured(here, tuple(values))
        if here.job and memory_bytes(here, config) <= memory / 2:
            return micro
    return sizes[0]
