"""The recipe: a RunSpec and a Rendezvous become data, model, optimizer and engine. No Ray here.

`python -m nanoray.train` runs it in this process; torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
environment, make it one of many. The Ray actors of nanoray.launch call the same `train`.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanoray import __version__
from nanoray.callbacks import Callback, Console, JsonlWriter, TensorBoardWriter, short
from nanoray.checkpoint import newest_valid
from nanoray.config import Batch, Config, Loaded, parse_args, resolve_batch
from nanoray.data import TokenData, prepare
from nanoray.devices import (
    Device,
    available_cpus,
    choose_precision,
    cpu_features,
    discover_gpus,
    peak_flops,
)
from nanoray.engine import RuntimeEngine
from nanoray.errors import ConfigError, DataError, NanorayError
from nanoray.mesh import Mesh, RankDevice, Rendezvous, choose_backend, connect_store, join, runtime_nccl_version
from nanoray.model import GPT, ModelShape, count_parameters, generate
from nanoray.optim import make_optimizer
from nanoray.parallel.ddp import apply_ddp
from nanoray.report import closing_lines, dry_run_lines, plan
from nanoray.run import RunSpec, open_run, write_summary
from nanoray.tokenizer import tokenizer_from_json

log = logging.getLogger("nanoray")


def train(
    spec: RunSpec,
    rendezvous: Rendezvous,
    watchers: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    store: Any = None,
) -> dict[str, Any]:
    """Train `spec` as one rank and return the outcome as plain data. (all ranks)

    `watchers` see notes and records on rank 0. `should_stop` is asked once per step: True on any rank stops all ranks
    after the same step, with a checkpoint. Raises NanorayError for what nanoray refuses.
    """
    require_shared_folder(spec, rendezvous)
    log_to(spec.log(rendezvous.rank))
    os.environ.update(rendezvous.env)
    torch.set_num_threads(rendezvous.threads)
    torch.set_float32_matmul_precision("high")  # TF32 for what stays float32 on GPUs
    log.info("attempt %d, pid %d, nice %d, %s", spec.attempt, os.getpid(), os.nice(0), rendezvous)
    mesh = join(rendezvous, facts(spec), spec.config.timeout_s, spec.config.init_timeout_s, store)
    device = this_device(mesh)
    precision, why = resolve_precision(spec.config, device)
    resume, notes = mesh.broadcast(find_checkpoint(spec) if mesh.rank == 0 else ("", ()))  # (all ranks)
    config = spec.config.model_copy(update={"precision": precision})
    spec = replace(spec, config=config, resume=resume, notes=(*spec.notes, *notes))
    cfg, batch = spec.config, resolve_batch(spec.config, mesh.world_size)

    torch.manual_seed(cfg.seed)  # the same initial weights on every rank
    gpt = GPT(ModelShape.of(cfg, spec.dataset.vocab_size), cfg.dropout).to(mesh.device)
    if cfg.compile:
        for block in gpt.blocks:
            block.compile()  # per block: DDP's hooks stay between the blocks, and with them the overlap
    model = apply_ddp(gpt, mesh, cfg.bucket_mb)
    optimizer = make_optimizer(gpt, cfg)
    data = TokenData(spec.dataset, cfg.block_size, cfg.seed, mesh.device)
    torch.manual_seed(cfg.seed + 1_000_003 * (mesh.rank + 1))  # dropout: another mask on every rank

    callbacks: list[Callback] = []
    if mesh.rank == 0:
        resume_step = int(Path(resume).name.removeprefix("step_")) if resume else 0
        callbacks = [*watchers, JsonlWriter(spec.folder / "metrics.jsonl", resume_step)]
        if cfg.tensorboard:
            callbacks.append(TensorBoardWriter(spec.folder / "tb", cfg.to_json(), resume_step))
    engine = RuntimeEngine(spec, batch, mesh, model, optimizer, data, callbacks, should_stop)
    peak = peak_flops(device, precision) if device else None
    engine.peak_flops = peak * mesh.world_size if peak else None
    for line in describe(spec, batch, mesh, device, why):
        engine.note(line)
    try:
        outcome = engine.fit()
        if mesh.rank == 0:
            outcome["sample"] = sample_text(gpt, spec) if outcome["exit_reason"] == "finished" else None
        mesh.barrier()  # nobody leaves while another rank still needs it
    finally:
        for callback in callbacks:
            callback.close()
    return outcome


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
    """Return what NVML says of the GPU or slice this rank computes on; None on CPU."""
    if mesh.device.type != "cuda":
        return None
    gpus = discover_gpus()
    index = mesh.device.index or 0
    return gpus[index] if index < len(gpus) else None


def resolve_precision(config: Config, device: Device | None) -> tuple[str, str]:
    """Return the precision to train in and the reason for it."""
    kind = device.kind if device else "cpu"
    bf16_gpu = torch.cuda.get_device_capability()[0] >= 8 if device else None
    return choose_precision(config.precision, kind, config.n_embd, cpu_features(), bf16_gpu)


def describe(spec: RunSpec, batch: Batch, mesh: Mesh, device: Device | None, why_precision: str) -> list[str]:
    """Return the lines that say what is about to run, each derived value with its reason."""
    cfg, shape = spec.config, ModelShape.of(spec.config, spec.dataset.vocab_size)
    where = device.name if device else f"CPU, {torch.get_num_threads()} thread(s) per rank"
    return [
        f"nanoray {__version__} · run {spec.folder} · {mesh.world_size} rank(s) = dp {batch.dp} · "
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


def find_checkpoint(spec: RunSpec) -> tuple[str, tuple[str, ...]]:
    """Return the step folder to resume from ("" for none), and notes on damaged ones passed over. (rank 0 only)"""
    given = Path(spec.resume)
    if not spec.resume or (given / "state.json").exists():
        return spec.resume, ()
    newest, notes = newest_valid(given / "checkpoints")
    return str(newest.path) if newest else "", tuple(f"resume  {note}" for note in notes)


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
    started = time.time()
    try:
        loaded = parse_args(
            sys.argv[1:] if argv is None else argv,
            "python -m nanoray.train",
            "Train in this process; under torchrun, as one rank of many. No Ray.",
        )
        return _run(loaded, started)
    except NanorayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


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
    resolve_batch(config, rendezvous.world_size) if config.scaling == "none" else None
    store = None
    if rendezvous.world_size > 1:
        store = connect_store(rendezvous, config.init_timeout_s)
    if rendezvous.rank == 0:
        dataset = prepare(config)
        config, notes = plan(loaded, rendezvous.world_size, dataset.vocab_size)
        spec = open_run(config, dataset, started)
        spec = replace(spec, notes=(*notes, *spec.notes))
        if store:
            store.set(f"nanoray/{rendezvous.secret}/spec", json.dumps(spec.to_dict()))
    else:
        spec = RunSpec.from_dict(json.loads(store.get(f"nanoray/{rendezvous.secret}/spec")))  # type: ignore[union-attr]
    stop = StopSignals()
    watchers = [Console(spec.config.max_steps)] if rendezvous.rank == 0 else []
    outcome = train(spec, rendezvous, watchers, stop.requested, store)
    outcome["exit_code"] = stop.exit_code
    if rendezvous.rank == 0:
        summary = write_summary(spec, outcome, restarts=0)
        print("\n".join(closing_lines(spec, summary)), flush=True)
    if rendezvous.world_size > 1:
        # The results are on disk. Tearing down gloo's threads can hang; the kernel does it reliably.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stop.exit_code)
    return stop.exit_code


def _local_rendezvous(config: Config) -> Rendezvous:
    """Read the rendezvous from the environment and give it a device, a backend and threads."""
    rendezvous = Rendezvous.from_env(os.environ)
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device in ("cuda", "mig") and not gpus:
        raise ConfigError(f"device = {config.device}, but torch sees no GPU here; use device cpu, or `nanoray check`")
    ranks_here = max(1, rendezvous.local_world_size)
    if gpus and rendezvous.world_size > 1:
        index = rendezvous.local_rank % gpus
        shared = ranks_here > gpus
        kind = "mig" if config.device == "mig" else "cuda"
        me = RankDevice(kind, str(rendezvous.node_rank), str(index))
        choice = choose_backend([me, me] if shared else [me], config.backend, runtime_nccl_version())
        device = f"cuda:{index}"
    elif gpus:
        device, choice = "cuda:0", None
    else:
        device = "cpu"
        choice = choose_backend([RankDevice("cpu", "", "")], config.backend, None)
    if rendezvous.world_size == 1:
        choice = None
    return replace(
        rendezvous,
        device=device,
        threads=max(1, int(config.cpus_per_worker or available_cpus() / ranks_here)),
        backend=choice.backend if choice else "none",
        backend_reason=choice.reason if choice else "one rank: no process group",
        env=tuple(choice.env.items()) if choice else (),
    )


class StopSignals:
    """Turn SIGINT and SIGTERM into a request to stop after this step; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self._signal = 0
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: Any) -> None:
        if self._signal == signal.SIGINT == signum:
            os._exit(130)
        self._signal = self._signal or signum
        os.write(2, b"\nstopping after this step, with a checkpoint (once more: stop now)\n")

    def requested(self) -> bool:
        """Whether a signal came."""
        return bool(self._signal)

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal, as shells count."""
        return 128 + self._signal if self._signal else 0


if __name__ == "__main__":
    raise SystemExit(main())
