"""The recipe: a RunSpec and a Rendezvous become data, model, optimizer and engine. No Ray here.

`python -m nanoray.train` runs it in this process; torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
environment, make it one of many. The Ray actors of nanoray.launch call the same `train`.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanoray import __version__
from nanoray.algorithms import Reducer
from nanoray.callbacks import Callback, Console, JsonlWriter, TensorBoardWriter, short
from nanoray.checkpoint import load, newest_valid
from nanoray.comm import CommRecorder
from nanoray.config import Batch, Config, Loaded, batch_for, resolve_batch
from nanoray.data import TokenData, prepare
from nanoray.devices import (
    Device,
    available_cpus,
    choose_precision,
    cpu_features,
    discover_gpus,
    keep_freed_memory,
    peak_flops,
)
from nanoray.engine import Regroup, RuntimeEngine
from nanoray.errors import CheckpointError, ConfigError, DataError, NanorayError, RendezvousError
from nanoray.faults import is_collective_error
from nanoray.mesh import (
    GO_ON,
    STOP,
    Mesh,
    RankDevice,
    Rendezvous,
    choose_backend,
    connect_store,
    join,
    runtime_nccl_version,
)
from nanoray.model import GPT, ModelShape, count_parameters, generate
from nanoray.optim import make_optimizer
from nanoray.parallel.ddp import apply_ddp, average_by
from nanoray.recovery import adopt, furthest
from nanoray.report import closing_lines, dry_run_lines, plan, run_command
from nanoray.run import RunSpec, lock_run, open_run, summary_on_failure, write_attempt, write_summary
from nanoray.tokenizer import tokenizer_from_json
from nanoray.trace import CommLog, CommTrace

log = logging.getLogger("nanoray")


Rejoin = Callable[[str], tuple[RunSpec, Rendezvous]]  # takes the error; returns once the lost rank has been replaced


def train(
    spec: RunSpec,
    rendezvous: Rendezvous,
    watchers: Sequence[Callback] = (),
    wish: Callable[[], int] = lambda: GO_ON,
    store: Any = None,
    rejoin: Rejoin | None = None,
) -> dict[str, Any]:
    """Train `spec` as one rank and return the outcome as plain data. (all ranks)

    `watchers` see notes and records on rank 0. `wish` is asked once per step: STOP on any rank stops all ranks after
    the same step, with a checkpoint, and REGROUP makes them meet again. `rejoin` is called for that, and when a
    collective fails because a peer is gone; with what it returns this rank goes on where it was. Raises NanorayError
    for what nanoray refuses.
    """
    require_shared_folder(spec, rendezvous)
    log_to(spec.log(rendezvous.seat))
    os.environ.update(rendezvous.env)
    torch.set_num_threads(rendezvous.threads)
    if rendezvous.device == "cpu":
        keep_freed_memory()
    mesh = meet(spec, rendezvous, store)
    if mesh.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what stays float32
    device = this_device(mesh)
    source, why = None, ""
    if rendezvous.live:  # (all ranks) the others went through this once, and know
        source, precision, _ = furthest(mesh, None)
    else:
        precision, why = agree_on_precision(mesh, resolve_precision(spec.config, mesh))
        resume, resume_step, notes = mesh.broadcast(find_checkpoint(spec) if mesh.rank == 0 else ("", 0, ()))
        spec = replace(spec, resume=resume, notes=(*spec.notes, *notes))
    spec = replace(spec, config=spec.config.model_copy(update={"precision": precision}))
    cfg = spec.config
    batch = batch_for(cfg, mesh.seats, mesh.world_size) or resolve_batch(cfg, mesh.world_size)

    torch.manual_seed(cfg.seed)  # the same initial weights on every rank
    gpt = GPT(ModelShape.of(cfg, spec.dataset.vocab_size), cfg.dropout).to(mesh.device)
    if cfg.compile:
        for block in gpt.blocks:
            block.compile()  # per block: DDP's hooks stay between the blocks, and with them the overlap
    optimizer = make_optimizer(gpt, cfg)
    data = TokenData(spec.dataset, cfg.block_size, cfg.seed, mesh.device)
    engine = RuntimeEngine(spec, batch, mesh, gpt, optimizer, data, wish)
    peak = peak_flops(device, precision) if device else None
    engine.peak_flops = peak * mesh.world_size if peak else None
    reducer = wrap(engine, source)
    if source is not None:
        resume_step = engine.reported_step
    observe(engine, watchers, resume_step)
    trace(engine, reducer, resume_step)
    for line in describe(spec, batch, mesh, device, why) if source is None else ():
        engine.note(line)
    try:
        outcome = fit(engine, watchers, rejoin)
        if reducer:
            reducer.close()
        if engine.mesh.rank == 0 and outcome["exit_reason"] == "finished":
            try:
                outcome["sample"] = sample_text(gpt, spec)
            except NanorayError as error:  # the training is done and saved; a sample is an extra
                engine.note(f"warning  no sample of text: {error}")
    finally:
        for close in (engine.saver.close, *(callback.close for callback in engine.callbacks)):
            try:
                close()
            except OSError as error:  # what an observer could not write, on a full disk, say
                log.warning("not all was written: %s", error)
    return outcome


def fit(engine: RuntimeEngine, watchers: Sequence[Callback], rejoin: Rejoin | None) -> dict[str, Any]:
    """Run the loop, again and again while lost ranks are replaced, and return its outcome. (all ranks)"""
    while True:
        try:
            outcome = engine.fit()
            engine.mesh.barrier()  # (all ranks) nobody leaves while another rank still needs it
            return outcome
        except Regroup:
            assert rejoin is not None
            why = "the driver asks to meet again"
        except torch.OutOfMemoryError as error:  # of a GPU: another try would end alike
            raise ConfigError(
                f"out of GPU memory ({str(error).splitlines()[0]}); halve --micro_batch_size: accumulation doubles "
                "and the result stays the same"
            ) from error
        except Exception as error:
            if rejoin is None or not (engine.live and is_collective_error(error)):
                raise
            why = f"{type(error).__name__}: {error}"
        # Outside of the except block: the error's frames would keep the broken wrapper alive.
        survive(engine, rejoin, why)
        observe(engine, watchers, engine.reported_step)


def meet(spec: RunSpec, rendezvous: Rendezvous, store: Any) -> Mesh:
    """Join the other ranks of this attempt. (all ranks)"""
    log.info("attempt %d, pid %d, nice %d, %s", spec.attempt, os.getpid(), os.nice(0), rendezvous)
    return join(rendezvous, facts(spec), spec.config.timeout_s, spec.config.init_timeout_s, store)


def wrap(engine: RuntimeEngine, source: int | None) -> Reducer | None:
    """Give the engine the DDP wrapper of its groups; with a `source`, the state of that rank's memory. (all ranks)"""
    cfg, mesh, reducer = engine.cfg, engine.mesh, None
    if cfg.allreduce != "backend":
        own_group = dist.new_group(timeout=timedelta(seconds=cfg.timeout_s))
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=own_group)  # NCCL brings a group up in its first one
        reducer = Reducer(cfg.allreduce, own_group, mesh.device)
    hook = average_by(reducer.start, mesh.world_size) if reducer else None
    engine.model = apply_ddp(engine.gpt, mesh, cfg.bucket_mb, hook, sync=source is None)
    if source is not None:
        adopt(engine, source)
    return reducer


def observe(engine: RuntimeEngine, watchers: Sequence[Callback], resume_step: int) -> None:
    """Let rank 0, and no other, write metrics and tell the watchers; who is rank 0 may change when a rank is lost."""
    cfg, spec = engine.cfg, engine.spec
    if engine.mesh.rank == 0 and not engine.callbacks:
        writer = JsonlWriter(spec.folder / "metrics.jsonl", resume_step)
        engine.callbacks = [*watchers, writer]
        if cfg.tensorboard:
            engine.callbacks.append(TensorBoardWriter(spec.folder / "tb", cfg.to_json(), resume_step))
        engine.catch_up(writer.last_step)
    elif engine.mesh.rank == 0:
        engine.catch_up(engine._emitted_step)
    while engine.mesh.rank and engine.callbacks:
        engine.callbacks.pop().close()


def trace(engine: RuntimeEngine, reducer: Reducer | None, resume_step: int) -> None:
    """Give the engine what measures its collectives, where the configuration asks for it. (all ranks)"""
    cfg, mesh, spec = engine.cfg, engine.mesh, engine.spec
    if cfg.trace_every and mesh.world_size > 1:
        recorder = CommRecorder(mesh, cfg.trace_every, reducer.start if reducer else None)
        twin = apply_ddp(engine.gpt, mesh, cfg.bucket_mb, recorder.hook, twin=True)
        log_of_all = CommLog(spec.folder / "comm", resume_step, spec.attempt) if mesh.rank == 0 else None
        engine.trace = CommTrace(mesh, recorder, twin, log_of_all)


def survive(engine: RuntimeEngine, rejoin: Rejoin, lost: str) -> None:
    """Leave the broken groups, wait until the lost rank is replaced, and take up the run again. (all survivors)

    When that fails because another rank is lost meanwhile, wait for that one's replacement.
    """
    while True:
        log.warning("leaving the group after step %d: %s", engine.step, lost)
        engine.detach()
        gc.collect()  # the wrapper goes, with its hooks on our parameters and its hold on the group
        engine.mesh.leave()
        spec, rendezvous = rejoin(lost)  # as the driver wrote it: all ranks compare the same configuration
        try:
            mesh = meet(spec, rendezvous, None)
            engine.attach(replace(spec, config=engine.cfg, resume=engine.spec.resume), mesh)
            source, _, step = furthest(mesh, engine)
            wrap(engine, source)
            trace(engine, None, engine.reported_step)
            break
        except Exception as error:
            if not (isinstance(error, RendezvousError) or is_collective_error(error)):
                raise
            lost = f"{type(error).__name__}: {error}"
    engine.note(f"rejoin  from step {step} in the memory of rank {source}; no step is repeated")


def require_shared_folder(spec: RunSpec, rendezvous: Rendezvous) -> None:
    """Raise when this node does not see the run's folder, or has another dataset than the driver prepared."""
    if not (spec.folder / "run.json").exists():
        raise ConfigError(
            f"rank {rendezvous.rank} on {platform.node()} does not see the run's folder {spec.folder}; "
            "give an --out_dir on storage that all nodes share"
        )
    if not spec.dataset.path.exists() and prepare(spec.config).tokens_sha256 != spec.dataset.tokens_sha256:
        raise DataError(
            f"rank {rendezvous.rank} on {platform.node()} prepared other tokens of {spec.config.dataset} than "
            "the driver did; give a --data_dir on storage that all nodes share"
        )


def facts(spec: RunSpec) -> dict[str, str]:
    """Return what all ranks must agree on before they exchange a gradient."""
    config = json.dumps(spec.config.model_dump(), sort_keys=True)
    return {
        "configuration (sha256)": hashlib.sha256(config.encode()).hexdigest()[:16],
        "nanoray": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dataset (sha256)": spec.dataset.tokens_sha256[:16],
        "attempt": str(spec.attempt),
        "run folder": spec.folder.name,
    }


def this_device(mesh: Mesh) -> Device | None:
    """Return what NVML says of the GPU or slice this rank computes on; None on CPU, or when NVML does not know."""
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
    """Return one precision for all ranks; where unlike nodes propose several, one that all can do. (all ranks)"""
    proposals = mesh.gather(own)
    choice = own
    if proposals is not None and len({precision for precision, _ in proposals}) > 1:
        lowest = "fp32" if any(precision == "fp32" for precision, _ in proposals) else "fp16"
        choice = (lowest, f"ranks differ: {', '.join(precision for precision, _ in proposals)}")
    return mesh.broadcast(choice)


def describe(spec: RunSpec, batch: Batch, mesh: Mesh, device: Device | None, why_precision: str) -> list[str]:
    """Return the lines that say what is about to run, each derived value with its reason."""
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
        torch.set_num_threads(1)  # one token is too little work to share: threads would only wait for each other
    source = torch.Generator(device=device).manual_seed(spec.config.seed)
    tokens = generate(gpt, prompt, spec.config.sample_tokens, temperature=0.8, top_k=200, generator=source)
    return tokenizer.decode(tokens[0].tolist()).strip("\n")


def find_checkpoint(spec: RunSpec) -> tuple[str, int, tuple[str, ...]]:
    """Return the checkpoint to start from ("" for none), its step, and notes on damaged ones. (rank 0 only)

    The run's own newest comes first: a restart must not fall back to where the run came from. Raises CheckpointError
    when there are only damaged ones, for starting afresh would hide that they are lost.
    """
    if not spec.resume and not spec.attempt:
        return "", 0, ()
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
    """Send this rank's log, and the stacks of a crash, to its file in the run folder."""
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


# From here on: the command line.


def main(argv: list[str] | None = None) -> int:
    """Run `python -m nanoray.train`: one rank, or this process' share of a torchrun. Return the exit code."""
    what = "Train in this process; under torchrun, as one rank of many. No Ray."
    return run_command(_run, argv, "python -m nanoray.train", what)


def _run(loaded: Loaded, started: float) -> int:
    rendezvous = _local_rendezvous(loaded.config)
    config = loaded.config
    if config.workers not in ("auto", rendezvous.world_size):
        raise ConfigError(
            f"workers = {config.workers}, but this is {rendezvous.world_size} process(es); start "
            f"`torchrun --nproc-per-node {config.workers} -m nanoray.train ...`, or `python -m nanoray.launch`"
        )
    if loaded.dry_run:
        dataset = prepare(config)
        config, notes = plan(loaded, rendezvous.world_size, dataset.vocab_size)
        batch = resolve_batch(config, rendezvous.world_size)
        where = f"this process on {rendezvous.device}, {rendezvous.threads} threads"
        print("\n".join(dry_run_lines(config, notes, batch, dataset, where)))
        return 0
    if config.scaling == "none":
        resolve_batch(config, rendezvous.world_size)  # what cannot be fails before the ranks meet
    store = None
    if rendezvous.world_size > 1 or rendezvous.agent_store:
        store = connect_store(rendezvous, config.init_timeout_s)
    rendezvous = _with_backend(rendezvous, config, store)
    spec = _shared_spec(loaded, rendezvous, store, started)
    stop = StopSignals()
    watchers = [Console(spec.config.max_steps)] if rendezvous.rank == 0 else []
    with summary_on_failure(spec) if rendezvous.rank == 0 else nullcontext():
        outcome = train(spec, rendezvous, watchers, stop.wish, store)
    # A rank that stops because another one was asked to ends alike, so that what starts ranks again starts all of them.
    code = (stop.exit_code or 128 + signal.SIGTERM) if outcome["exit_reason"] == "stopped" else 0
    if rendezvous.rank == 0:
        summary = write_summary(spec, outcome | {"exit_code": code}, restarts=spec.attempt)
        print("\n".join(closing_lines(spec, summary)), flush=True)
    if rendezvous.world_size > 1:
        # The results are on disk. Tearing down gloo's threads can hang; the kernel does it reliably.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _shared_spec(loaded: Loaded, rendezvous: Rendezvous, store: Any, started: float) -> RunSpec:
    """Open the run on rank 0, or find the one that torchrun starts anew; hand its record, or a refusal, to the rest."""
    key, run_key = f"nanoray/{rendezvous.secret}/spec", f"nanoray/{rendezvous.run_id}/run"
    if rendezvous.rank > 0:
        values = json.loads(store.get(key))
        if "refused" in values:
            raise RendezvousError(f"rank 0 refused the run: {values['refused']}")
        return RunSpec.from_dict(values)
    try:
        if rendezvous.restarts and store and store.check([run_key]):  # torchrun's store outlives its ranks
            spec = replace(RunSpec.from_dict(json.loads(store.get(run_key))), attempt=rendezvous.restarts, notes=())
            spec = replace(spec, lock=lock_run(spec.folder)[0])
            write_attempt(spec)
            store.set(key, json.dumps(spec.to_dict()))
            return spec
        dataset = prepare(loaded.config)
        config, notes = plan(loaded, rendezvous.world_size, dataset.vocab_size)
        spec = open_run(config, dataset, started)
    except NanorayError as error:
        if store:
            store.set(key, json.dumps({"refused": str(error)}))
        raise
    spec = replace(spec, notes=(*notes, *spec.notes))
    if store:
        store.multi_set([key, run_key], [json.dumps(spec.to_dict())] * 2)
    return spec


def _local_rendezvous(config: Config) -> Rendezvous:
    """Read the rendezvous from the environment and give it a device and threads."""
    rendezvous = Rendezvous.from_env(os.environ)
    slices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.startswith("MIG-")]
    if len(slices) > 1:  # CUDA would show every process the first one only
        os.environ["CUDA_VISIBLE_DEVICES"] = slices[rendezvous.local_rank % len(slices)]
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device in ("cuda", "mig") and not gpus:
        raise ConfigError(f"device = {config.device}, but torch sees no GPU here; use device cpu, or `nanoray check`")
    if gpus and config.device in ("cuda", "mig") and (config.device == "mig") != bool(slices):
        raise ConfigError(
            f"device = {config.device}, but CUDA_VISIBLE_DEVICES names {'MIG slices' if slices else 'no MIG slice'}; "
            f"use --device {'mig' if slices else 'cuda'}, or set CUDA_VISIBLE_DEVICES"
        )
    threads = config.cpus_per_worker or available_cpus() / max(1, rendezvous.local_world_size)
    device = f"cuda:{rendezvous.local_rank % gpus}" if gpus else "cpu"
    return replace(rendezvous, device=device, threads=max(1, int(threads)))


def _with_backend(rendezvous: Rendezvous, config: Config, store: Any) -> Rendezvous:
    """Choose the backend from the cards that all ranks name in the store, so that all choose alike. (all ranks)"""
    if rendezvous.world_size == 1:
        return rendezvous
    me = RankDevice("cpu", "", "")
    if rendezvous.device != "cpu":
        mig = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
        card = "" if mig else str(torch.cuda.get_device_properties(rendezvous.device).uuid)
        me = RankDevice("mig" if mig else "cuda", platform.node(), card)
    prefix = f"nanoray/{rendezvous.secret}/card"
    store.set(f"{prefix}/{rendezvous.rank}", json.dumps(me))
    cards = [RankDevice(*json.loads(store.get(f"{prefix}/{rank}"))) for rank in range(rendezvous.world_size)]
    choice = choose_backend(cards, config.backend, None if me.kind == "cpu" else runtime_nccl_version())
    env = tuple(choice.env.items())
    return replace(rendezvous, backend=choice.backend, backend_reason=choice.reason, env=env)


class StopSignals:
    """Turn SIGINT and SIGTERM into a request to stop after this step; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self._signal = 0
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: Any) -> None:
        if self._signal and signum == signal.SIGINT:
            os._exit(130)
        self._signal = self._signal or signum
        os.write(2, b"\nstopping after this step, with a checkpoint (once more: stop now)\n")

    def wish(self) -> int:
        """STOP once a signal came."""
        return STOP if self._signal else GO_ON

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal, as shells count."""
        return 128 + self._signal if self._signal else 0


if __name__ == "__main__":
    raise SystemExit(main())
