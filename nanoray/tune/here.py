"""The facts about a run and its ranks that decide what a search may try."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoray.base.text import short
from nanoray.checkpoint.run import RunSpec
from nanoray.config import resolve_batch
from nanoray.forecast.job import Job
from nanoray.host.host import available_cpus
from nanoray.host.peaks import peak_flops
from nanoray.mesh.layout import Layout
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.rendezvous import Rendezvous
from nanoray.models.build import shape_of
from nanoray.models.costs import flops_per_token
from nanoray.models.gpt import ModelShape
from nanoray.parallel.ddp import default_bucket_mb
from nanoray.parallel.statistics import has_statistics
from nanoray.train.agree import agree_on_precision, resolve_precision, resolved
from nanoray.train.hardware import hardware, this_device
from nanoray.train.micro_batch import loss_is_of_batch
from nanoray.train.out_of_memory import come_in_batches
from nanoray.train.tasks import Task
from nanoray.tune.space import TunedRun
from nanoray.tune.trials import TuneSubject


@dataclass(frozen=True)
class Beginning:
    """What a search begins with."""

    here: TunedRun
    line: str  # for people
    flops: float | None  # of a step, by formula
    peak_flops: float | None  # of all ranks, a second


def here_of(spec: RunSpec, mesh: Mesh, rendezvous: Rendezvous, subject: TuneSubject) -> Beginning:
    """Look at the model and the ranks of a run. (all ranks)"""
    precision, _ = agree_on_precision(mesh, resolve_precision(spec.config, mesh))
    facts = subject.open(spec, _facts_of)
    config = resolved(spec.config, mesh, precision, facts.settings)
    batch_loss = next(filter(None, mesh.all_gather(facts.batch_loss)), "")
    layout = Layout.of(config, mesh.world_size)
    batch = resolve_batch(config, layout.dp)
    cores = max(1, int(available_cpus() / max(1, rendezvous.local_world_size)))
    bucket_mb = config.bucket_mb or default_bucket_mb(mesh.device)
    job = None
    flops = None
    if config.model == "gpt" and not config.pure:
        shape = shape_of(config, spec.dataset.vocab_size)
        assert isinstance(shape, ModelShape)
        job = Job(shape, config, batch.global_size, precision, bucket_mb)
        flops = flops_per_token(shape) * batch.global_size * config.block_size
    device = this_device(mesh)
    peak = peak_flops(device, precision) if device else None
    here = TunedRun(
        config,
        mesh.world_size,
        mesh.device.type,
        rendezvous.threads,
        cores,
        facts.has_norms,
        config.model == "own",
        facts.in_batches,
        facts.gradient_bytes,
        bucket_mb,
        job,
        batch_loss,
    )
    line = (
        f"tune   {mesh.world_size} rank(s) = {layout} of {hardware(mesh)}, {precision}; "
        f"micro batch {batch.micro} x {batch.accum}, {short(batch.global_size)} samples a step"
    )
    return Beginning(here, line, flops, peak * mesh.world_size if peak else None)


@dataclass(frozen=True)
class _Facts:
    settings: dict[str, object]
    has_norms: bool
    in_batches: bool
    gradient_bytes: int
    batch_loss: str


def _facts_of(task: Task) -> _Facts:
    """Return what a task says of its model and data."""
    settings = task.settings()
    model = task.model()
    data = task.data(torch.device("cpu"))
    in_batches = come_in_batches(data)
    has_norms = has_statistics(model)
    gradient_bytes = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    batch_loss = ""
    if task.script and not in_batches and not has_norms:
        cpu = torch.device("cpu")
        if loss_is_of_batch(task, model, data, cpu, "fp32"):
            batch_loss = "the loss of two samples is not the mean of their own"
    return _Facts(settings, has_norms, in_batches, gradient_bytes, batch_loss)
