"""The agreements of the ranks of a group, before they exchange a gradient."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanoray import __version__
from nanoray.checkpoint.files import load, open_checkpoint, void_unfinished
from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Batch, Config
from nanoray.config.choose import choose_attention, choose_precision
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import CheckpointError, ConfigError, DataError, RankDiffers, RendezvousError
from nanoray.machine.device import Device
from nanoray.machine.host import cpu_features
from nanoray.models.fp8 import EMULATED, in_hardware
from nanoray.parallel.mesh import Mesh
from nanoray.train.guard.state_hashes import append
from nanoray.train.hardware import cpu_kernels, hardware
from nanoray.train.tasks import Task

log = logging.getLogger("nanoray.rank")


def require_run_folder(folder: Path, rank: int) -> None:
    """Raise ConfigError when this node does not see the run's folder."""
    if not (folder / "run.json").exists():
        raise ConfigError(
            f"rank {rank} on {platform.node()} does not see the run's folder {folder}; give an "
            "--out_dir on storage that all nodes share"
        )


def require_shared_folder(
    folder: Path, dataset: DatasetInfo, prepare: Callable[[], DatasetInfo], rank: int
) -> None:
    """Raise when this node does not see the run's folder, or has another dataset than the driver.

    `prepare` makes the dataset anew where its files are missing.
    """
    require_run_folder(folder, rank)
    where = f"rank {rank} on {platform.node()}"
    if dataset.path.exists():
        return
    if prepare().tokens_sha256 != dataset.tokens_sha256:
        raise DataError(
            f"{where} prepared different tokens of {dataset.name} than the driver did; give a "
            "--data_dir on storage that all nodes share"
        )


def facts(spec: RunSpec) -> dict[str, str]:
    """Return the facts that must be equal on all ranks before they exchange a gradient.

    They are measured in this process, and not copied from the driver's record. Each rank has compared
    its token files with the record of the data set before (data/verify.py).
    """
    config = json.dumps(spec.config.model_dump(), sort_keys=True)
    return {
        "configuration (sha256)": hashlib.sha256(config.encode()).hexdigest()[:16],
        "nanoray": __version__,
        "code of nanoray (sha256)": code_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dataset (sha256)": spec.dataset.tokens_sha256[:16],
        "attempt": str(spec.attempt),
        "run folder": spec.folder.name,
    }


def tensors_in_order(model: nn.Module) -> list[str]:
    """Return a line with name, shape and type of each parameter and buffer of a script's model."""
    lines = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kind = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"{name} {tuple(tensor.shape)} {kind}")
    return lines


def require_same_tensors(mesh: Mesh, tensors: Sequence[str], reference: int) -> None:
    """Raise where a rank has other `tensors_in_order` than the rank `reference`. (all ranks)

    Ranks exchange gradients and shards by the place of a parameter. A set has another order in each
    process, so modules that are made in its order have other places on each rank.
    """
    digest = hashlib.sha256("\n".join(tensors).encode()).hexdigest()
    digests = mesh.all_gather(digest)
    others = [rank for rank, each in enumerate(digests) if each != digests[reference]]
    if not others:
        return

    # (all ranks) The first rank that differs, and its first difference.
    its = mesh.broadcast([*tensors], src=others[0])
    right = mesh.broadcast([*tensors], src=reference)
    pairs = [*zip_longest(its, right, fillvalue="none")]
    place = next(i for i, (one, other) in enumerate(pairs) if one != other)
    kind = RankDiffers if mesh.rank in others else RendezvousError
    raise kind(
        f"rank {others[0]} has {pairs[place][0]} as parameter or buffer {place} of the model, and "
        f"rank {reference} has {pairs[place][1]}; make its modules in the same order on all ranks, "
        "such as that of sorted(names) in place of a set"
    )


@cache
def code_hash() -> str:
    """Return a hash of nanoray's sources, as this process finds them.

    Without those of the rooms that no training imports.
    """
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in ("bench", "kube", "lab"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def resolve_precision(config: Config, mesh: Mesh) -> tuple[str, str]:
    """Return the precision that suits this rank, and the reason for it."""
    bf16_gpu = None
    if mesh.device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(mesh.device)
        bf16_gpu = major >= 8  # Ampere and later
    precision, why = choose_precision(config, mesh.device.type, cpu_features(), bf16_gpu)
    if precision == "fp8" and not in_hardware(mesh.device):
        why = f"{why}; {EMULATED}"
    return precision, why


def resolved(config: Config, mesh: Mesh, precision: str, settings: dict[str, Any]) -> Config:
    """Return the configuration with the values that this rank's device and the task decide."""
    update = {"precision": precision, **settings}
    if config.model == "gpt":
        update["attention"] = choose_attention(config, mesh.device.type, precision, cpu_features())
    return config.model_copy(update=update)


def agree_on_precision(mesh: Mesh, own: tuple[str, str]) -> tuple[str, str]:
    """Return one precision that all ranks support, and its reason. (all ranks)"""
    proposals = mesh.gather(own)
    choice = own
    if proposals is not None:  # rank 0 decides
        precisions = [precision for precision, _ in proposals]
        if len(set(precisions)) > 1:
            # fp16 is what a GPU without bf16 proposes, and newer GPUs have it, too.
            lowest = "fp32" if "fp32" in precisions else "fp16"
            choice = (lowest, f"ranks differ: {', '.join(precisions)}")
    return mesh.broadcast(choice)


def note_group(spec: RunSpec, mesh: Mesh, step: int, limit: int) -> None:
    """Append the line of a group that continues after `step` to hashes.jsonl (state_hashes.py).

    limit: the most sequences of a micro batch; 0: as configured.
    """
    line = {
        "group": step,
        "attempt": spec.attempt,
        "resume": spec.resume,  # run.json contains that of the newest command
        "ranks": mesh.world_size,
        "slots": mesh.slots,
        "backend": mesh.backend,
        "device": mesh.device.type,
        "threads": torch.get_num_threads(),
        "hardware": hardware(mesh),
        "kernels": cpu_kernels(),
        "torch": str(torch.__version__),
        "code": code_hash(),
        "config": spec.config.model_dump(),
        "limit": limit,
    }
    append(spec.folder, line)


def describe_run(
    spec: RunSpec, batch: Batch, mesh: Mesh, device: Device | None, why_precision: str, task: Task
) -> list[str]:
    """Return the lines printed before training; each derived value has its reason."""
    *notes, data, model = task.describe(batch)
    where = f"CPU, {torch.get_num_threads()} thread(s) per rank"
    if mesh.device.type == "cuda":
        where = device.name if device else torch.cuda.get_device_name(mesh.device)
    return [
        f"nanoray {__version__} · run {spec.folder.name} · {mesh.world_size} rank(s) = "
        f"{mesh.layout} · backend {mesh.backend} "
        f"({mesh.backend_reason}) · {where}",
        data,
        f"{model}, {spec.config.precision} ({why_precision})",
        *notes,
        *spec.notes,
    ]


def find_checkpoint(spec: RunSpec) -> tuple[str, int, tuple[str, ...]]:
    """Return the checkpoint to start from, its step, and notes on damaged ones. (rank 0 only)

    The path is "" and the step 0 where there is none.

    The run's own newest checkpoint takes precedence over the one that the run started from. Raises
    CheckpointError when all are damaged, because starting from scratch would hide the loss.
    """
    if not spec.resume and not spec.attempt:
        return "", 0, ()
    # A checkpoint of an attempt that was killed may be half written.
    void_unfinished(spec.checkpoints)
    newest, damaged = newest_valid(spec.checkpoints)
    notes = tuple(f"resume  {note}" for note in damaged)
    if newest is not None:
        return str(newest.path), newest.state.meta["step"], notes
    if spec.resume and Path(spec.resume) != spec.folder:
        return spec.resume, load(Path(spec.resume)).meta["step"], notes
    if damaged:
        raise CheckpointError(
            f"every checkpoint of {spec.folder} is damaged: {'; '.join(damaged)}; start again with "
            "--resume none"
        )
    return "", 0, notes


def decided_otherwise(
    checkpoint: str, config: Config, decided: Config, why_precision: str
) -> list[str]:
    """Return a note for each key that is auto, and was decided otherwise when the run trained.

    (rank 0 only) The driver has compared the other keys (cli/open_folder.py).
    """
    if not checkpoint:
        return []
    _, content = open_checkpoint(Path(checkpoint))
    trained = content["meta"].get("config") or {}
    notes = []
    for key, why in (("precision", why_precision), ("attention", "the fastest on this device")):
        there, here = trained.get(key), getattr(decided, key)
        if getattr(config, key) == "auto" and there not in (None, "auto", here):
            notes.append(f"resume  {key} is {there} there and {here} here ({why})")
    return notes


class RankLog(logging.FileHandler):
    """A rank's log file. The stacks of a crash in native code go there, too."""

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        faulthandler.enable(file=stream, all_threads=True)
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; a folder that cannot be written must not end the run."""
        with suppress(OSError):
            super().emit(record)


def log_to(path: Path) -> None:
    """Write this rank's log, and the stacks of a crash, to its file in the run folder."""
    handler = RankLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    # An earlier run of this process, as in tests and notebooks, has left its handler. A program may
    # have put others there.
    for old in log.handlers[:]:
        if isinstance(old, RankLog):
            log.removeHandler(old)
            old.close()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
