"""The recipe: a RunSpec and a Rendezvous become data, model, optimizer and engine. No Ray here.

`python -m nanoray.train` runs it in this process; torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
environment, make it one rank of many. The Ray actors of nanoray.launch call the same `train`.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanoray import __version__
from nanoray.checkpoint.files import load, void_unfinished
from nanoray.checkpoint.find import newest_valid
from nanoray.checkpoint.writer import CheckpointWriter
from nanoray.config import Batch, Config, batch_for, resolve_batch
from nanoray.data.prepare import prepare
from nanoray.data.tokenizer import tokenizer_from_json
from nanoray.data.tokens import MicroBatches, TokenData
from nanoray.data.verify import sampled_hash, verify
from nanoray.errors import CheckpointError, ConfigError, DataError, NanorayError
from nanoray.faults.plan import Injector
from nanoray.faults.progress import ProgressFile
from nanoray.mesh.devices import Device, choose_precision, cpu_features, discover_gpus, keep_freed_memory, peak_flops
from nanoray.mesh.mesh import Mesh, join
from nanoray.mesh.rendezvous import Order, Rendezvous
from nanoray.models.costs import count_parameters, flops_per_token
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.sampling import generate
from nanoray.parallel.plan import Loss, Plan
from nanoray.points import reached
from nanoray.run import RunSpec
from nanoray.state import TrainState, share
from nanoray.trace.log import CommLog, CommTrace
from nanoray.trace.recorder import CommRecorder
from nanoray.train.elastic import Group, Rejoin, furthest, train_in_groups
from nanoray.train.engine import RuntimeEngine, Workload, read_checkpoint
from nanoray.train.guards import Guards
from nanoray.train.observers import Callback, Observers, short
from nanoray.train.optim import make_optimizer
from nanoray.train.precision import LossScaler, autocast

log = logging.getLogger("nanoray")
Meet = Callable[..., Mesh]  # takes what nanoray.mesh.mesh.join takes


def train(
    spec: RunSpec,
    rendezvous: Rendezvous,
    watchers: Sequence[Callback] = (),
    wanted: Callable[[], Order] = lambda: Order.GO_ON,
    store: Any = None,
    rejoin: Rejoin | None = None,
    meet: Meet = join,
) -> dict[str, Any]:
    """Train `spec` as one rank and return the outcome as plain data. (all ranks)

    `watchers` receive notes and records on rank 0. `wanted` is called once per step: STOP on any rank stops all ranks
    after the same step, with a checkpoint; REGROUP makes them form new groups. `rejoin` is called for REGROUP and when
    a peer is lost, and returns the spec and rendezvous to continue with. `meet` forms the process groups. Raises
    NanorayError when the run cannot start or continue.
    """
    require_shared_folder(spec, rendezvous)
    verify(spec.dataset.path, spec.dataset.tokens_sha256)
    log_to(spec.log(rendezvous.slot))
    os.environ.update(rendezvous.env)
    torch.set_num_threads(rendezvous.threads)
    if rendezvous.device == "cpu":
        keep_freed_memory()

    injector = Injector(spec.folder / "faults.jsonl")

    def meet_others(spec: RunSpec, rendezvous: Rendezvous, store: Any = None) -> Mesh:
        injector.plan(spec.config.faults, rendezvous.slot, spec.attempt, spec.started)
        reached("meet")
        log.info("attempt %d, pid %d, nice %d, %s", spec.attempt, os.getpid(), os.nice(0), rendezvous)
        mesh = meet(rendezvous, facts(spec), spec.config.timeout_s, spec.config.init_timeout_s, store)
        reached("met")
        return mesh

    mesh = meet_others(spec, rendezvous, store)
    if mesh.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what stays float32
    source, why, resume_step = None, "", 0
    if rendezvous.live:  # (all ranks) the survivors know the precision
        source, precision, _ = furthest(mesh, None, "")
    else:
        precision, why = agree_on_precision(mesh, resolve_precision(spec.config, mesh))
        resume, resume_step, notes = mesh.broadcast(find_checkpoint(spec) if mesh.rank == 0 else ("", 0, ()))
        spec = replace(spec, resume=resume, notes=(*spec.notes, *notes))
    spec = replace(spec, config=spec.config.model_copy(update={"precision": precision}))
    group = Group(spec, mesh, source)
    recipe = Recipe(group, watchers, wanted, injector)

    def wait_for_orders(lost: str) -> tuple[RunSpec, Rendezvous]:
        assert rejoin
        recipe.progress.set(recipe.state.step + 1, "regroup")
        return rejoin(lost)

    if source is None:
        recipe.observers.open(mesh.rank, resume_step)
        for line in describe(spec, recipe.batch_for(mesh), mesh, recipe.device, why):
            recipe.observers.note(line)
    try:
        outcome = train_in_groups(group, recipe.state, recipe.build, meet_others, rejoin and wait_for_orders)
        if recipe.observers.callbacks and outcome["exit_reason"] == "finished":  # rank 0 only
            try:
                outcome["sample"] = sample_text(recipe.model, spec)
            except NanorayError as error:  # training is done and saved; a sample is optional
                recipe.observers.note(f"warning  no sample of text: {error}")
    finally:
        recipe.writer.close()
        recipe.observers.close()
    return outcome


class Recipe:
    """What this process keeps between groups of ranks, and how it builds an engine for a group."""

    def __init__(
        self, group: Group, watchers: Sequence[Callback], wanted: Callable[[], Order], injector: Injector
    ) -> None:
        """Make model, optimizer and data; nothing communicates."""
        spec, mesh = group.spec, group.mesh
        cfg = self._cfg = spec.config
        self._wanted, self.device = wanted, this_device(mesh)
        torch.manual_seed(cfg.seed)  # the same initial weights on every rank
        self.model = GPT(ModelShape.of(cfg, spec.dataset.vocab_size), cfg.dropout).to(mesh.device)
        if cfg.compile:
            for block in self.model.blocks:
                block.compile()  # per block, so that DDP's hooks between blocks still overlap communication
        self._injector, injector.model = injector, self.model
        self.scaler = LossScaler(mesh.device, enabled=cfg.precision == "fp16")
        self.guards = Guards(cfg, self.batch_for(mesh), mesh.device, self.scaler if self.scaler.enabled else None)
        self.state = TrainState(self.model, make_optimizer(self.model, cfg), self.scaler, self.guards)
        self.data = TokenData(spec.dataset, cfg.block_size, cfg.seed, mesh.device)
        self.observers = Observers(spec, watchers)
        self.writer = CheckpointWriter(spec, self.observers.note)
        self.progress = ProgressFile(spec.progress(mesh.slot))

    def batch_for(self, mesh: Mesh) -> Batch:
        """Return how the group's ranks share the global batch, whose size is fixed."""
        return batch_for(self._cfg, mesh.slots, mesh.world_size) or resolve_batch(self._cfg, mesh.world_size)

    def build(self, group: Group) -> RuntimeEngine:
        """Build the engine of a group; afterwards `state` holds the state of the run. (all ranks)"""
        spec, mesh, state, observers = group.spec, group.mesh, self.state, self.observers
        batch, loss = self.batch_for(mesh), partial(mean_loss, mesh.device.type, self._cfg.precision)
        par = Plan(self.model, mesh, self._cfg, batch.accum, loss, self.scaler.scale)
        if group.source is not None:
            share(state, mesh, group.source)
            observers.open(mesh.rank, state.reported_step)
            observers.catch_up(state.session.newest, state.reported_step)
            self.writer.go_on(spec, mesh.rank)
            observers.note(f"rejoin  from step {state.step} in the memory of rank {group.source}; no step is repeated")
        elif spec.resume:
            shape = self.model.shape.to_dict()
            state.load(read_checkpoint(spec.resume, spec, mesh, shape, observers.note))
        else:
            share(state, mesh, 0)  # CPUs of different models may initialise weights differently
        self.progress.base, state.whole = state.step, True
        reached("shared")
        trace = comm_trace(spec, mesh, par, state.reported_step)
        listeners: list[Callable[[int, str], None]] = [self.progress.set]
        listeners += [trace.on_phase] if trace else []
        listeners += [self._injector] if spec.config.faults else []
        return RuntimeEngine(
            spec=spec,
            mesh=mesh,
            state=state,
            par=par,
            batches=MicroBatches(self.data, batch, mesh.rank),
            guards=self.guards,
            scaler=self.scaler,
            observers=observers,
            writer=self.writer,
            workload=self._workload(spec, mesh, loss),
            wanted=self._wanted,
            listeners=listeners,
            trace=trace,
            regrouped=group.source is not None,
        )

    def _workload(self, spec: RunSpec, mesh: Mesh, loss: Loss) -> Workload:
        peak = peak_flops(self.device, self._cfg.precision) if self.device else None
        shape = self.model.shape
        return Workload(
            loss=loss,
            tokens_per_sample=self._cfg.block_size,
            flops_per_token=flops_per_token(shape),
            peak_flops=peak * mesh.world_size if peak else None,
            meta={"model_shape": shape.to_dict(), "dataset": spec.dataset.to_dict()},
        )


def mean_loss(device_type: str, precision: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return a model's mean loss over inputs and targets (B, T), computed in the run's precision."""
    with autocast(device_type, precision):
        return model(x, y)


def comm_trace(spec: RunSpec, mesh: Mesh, par: Plan, resume_step: int) -> CommTrace | None:
    """Return the tracer of the run's collectives, or None where tracing is off. (all ranks)"""
    cfg = spec.config
    if not cfg.trace_every or mesh.world_size == 1:
        return None
    recorder = CommRecorder(mesh, cfg.trace_every, par.reduce)
    twin = par.add_twin(recorder.hook)
    log_of_all = CommLog(spec.folder / "comm", resume_step, spec.attempt) if mesh.rank == 0 else None
    return CommTrace(mesh, recorder, twin, log_of_all)


def require_shared_folder(spec: RunSpec, rendezvous: Rendezvous) -> None:
    """Raise when this node does not see the run's folder, or has a different dataset than the driver."""
    if not (spec.folder / "run.json").exists():
        raise ConfigError(
            f"rank {rendezvous.rank} on {platform.node()} does not see the run's folder {spec.folder}; "
            "give an --out_dir on storage that all nodes share"
        )
    if not spec.dataset.path.exists() and prepare(spec.config).tokens_sha256 != spec.dataset.tokens_sha256:
        raise DataError(
            f"rank {rendezvous.rank} on {platform.node()} prepared different tokens of {spec.config.dataset} than "
            "the driver did; give a --data_dir on storage that all nodes share"
        )


def facts(spec: RunSpec) -> dict[str, str]:
    """Return what all ranks must agree on before they exchange a gradient: what each of them really has."""
    config = json.dumps(spec.config.model_dump(), sort_keys=True)
    return {
        "configuration (sha256)": hashlib.sha256(config.encode()).hexdigest()[:16],
        "nanoray": __version__,
        "code of nanoray (sha256)": code_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dataset (sha256)": spec.dataset.tokens_sha256[:16],
        "tokens on its disk (sampled sha256)": sampled_hash(spec.dataset.path),
        "attempt": str(spec.attempt),
        "run folder": spec.folder.name,
    }


@cache
def code_hash() -> str:
    """Return a hash of the sources that decide what a step computes, as this process finds them."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for room in ("mesh", "data", "models", "parallel", "checkpoint", "trace", "train"):
        for path in sorted((root / room).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    digest.update((root / "state.py").read_bytes())
    return digest.hexdigest()[:16]


def this_device(mesh: Mesh) -> Device | None:
    """Return NVML's record of this rank's GPU or slice; None on CPU, or when NVML has none."""
    if mesh.device.type != "cuda":
        return None
    usable = [gpu for gpu in discover_gpus() if not gpu.mig_mode]  # a card in MIG mode only holds slices
    properties = torch.cuda.get_device_properties(mesh.device)
    own = [gpu for gpu in usable if str(properties.uuid) in gpu.uuid]
    alike = [gpu for gpu in usable if abs(gpu.memory_bytes / properties.total_memory - 1) < 0.1]
    same_kind = {(gpu.name, gpu.profile) for gpu in alike}
    return own[0] if own else alike[0] if len(same_kind) == 1 else None


def resolve_precision(config: Config, mesh: Mesh) -> tuple[str, str]:
    """Return the precision that suits this rank, and the reason for it."""
    cuda = mesh.device.type == "cuda"
    bf16_gpu = torch.cuda.get_device_capability(mesh.device)[0] >= 8 if cuda else None
    return choose_precision(config.precision, mesh.device.type, config.n_embd, cpu_features(), bf16_gpu)


def agree_on_precision(mesh: Mesh, own: tuple[str, str]) -> tuple[str, str]:
    """Return one precision that all ranks support, and its reason. (all ranks)"""
    proposals = mesh.gather(own)
    choice = own
    if proposals is not None and len({precision for precision, _ in proposals}) > 1:
        lowest = "fp32" if any(precision == "fp32" for precision, _ in proposals) else "fp16"
        choice = (lowest, f"ranks differ: {', '.join(precision for precision, _ in proposals)}")
    return mesh.broadcast(choice)


def describe(spec: RunSpec, batch: Batch, mesh: Mesh, device: Device | None, why_precision: str) -> list[str]:
    """Return the lines printed before training; each derived value has its reason."""
    cfg, shape = spec.config, ModelShape.of(spec.config, spec.dataset.vocab_size)
    where = f"CPU, {torch.get_num_threads()} thread(s) per rank"
    if mesh.device.type == "cuda":
        where = device.name if device else torch.cuda.get_device_name(mesh.device)
    return [
        f"nanoray {__version__} · run {spec.folder.name} · {mesh.world_size} rank(s) = dp {batch.dp} · "
        f"backend {mesh.backend} ({mesh.backend_reason}) · {where}",
        f"data   {spec.dataset.note} · {short(spec.dataset.train_tokens)} train + {short(spec.dataset.val_tokens)} val "
        f"tokens, vocabulary {spec.dataset.vocab_size}",
        f"batch  {batch.micro} seq × {batch.accum} accum × {batch.dp} dp × {cfg.block_size} tok = "
        f"{batch.global_size * cfg.block_size} tok/step      model {count_parameters(shape) / 1e6:.2f} M parameters, "
        f"{cfg.precision} ({why_precision})",
        *spec.notes,
    ]


def sample_text(gpt: GPT, spec: RunSpec) -> str | None:
    """Return text that the model generates after a newline, the same for the same weights. (rank 0 only)"""
    if not spec.config.sample_tokens:
        return None
    tokenizer = tokenizer_from_json(spec.dataset.tokenizer)
    device = next(gpt.parameters()).device
    prompt = torch.tensor([tokenizer.encode("\n").tolist()], device=device)  # (1, T)
    if device.type == "cpu":
        torch.set_num_threads(1)  # one token is too little work for several threads
    source = torch.Generator(device=device).manual_seed(spec.config.seed)
    tokens = generate(gpt, prompt, spec.config.sample_tokens, temperature=0.8, top_k=200, generator=source)
    return tokenizer.decode(tokens[0].tolist()).strip("\n")


def find_checkpoint(spec: RunSpec) -> tuple[str, int, tuple[str, ...]]:
    """Return the checkpoint to start from ("" for none), its step, and notes on damaged ones. (rank 0 only)

    The run's own newest checkpoint takes precedence over the one that the run started from. Raises CheckpointError when
    all are damaged, because starting from scratch would hide the loss.
    """
    if not spec.resume and not spec.attempt:
        return "", 0, ()
    void_unfinished(spec.checkpoints)
    newest, damaged = newest_valid(spec.checkpoints)
    if newest is None and spec.resume and Path(spec.resume) != spec.folder:
        return spec.resume, load(Path(spec.resume)).meta["step"], ()
    if newest is None and damaged:
        raise CheckpointError(
            f"every checkpoint of {spec.folder} is damaged: {'; '.join(damaged)}; start again with --resume none"
        )
    notes = tuple(f"resume  {note}" for note in damaged)
    return (str(newest.path), newest.state.meta["step"], notes) if newest else ("", 0, notes)


def log_to(path: Path) -> None:
    """Write this rank's log, and the stacks of a crash, to its file in the run folder."""
    stream = path.open("a", encoding="utf-8")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for old in log.handlers[:]:
        log.removeHandler(old)
        old.close()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    faulthandler.enable(file=stream, all_threads=True)
