"""A step that runs out of memory is done again, with a smaller micro batch.

    rank 1   backward: out of memory ─► leaves its group ──┐
    rank 0   backward: loses a peer  ─► leaves its group ──┴─► meet, agree on a limit ─► the same step

Until its update a step has changed nothing. So the ranks do what they do when one of them is lost
(elastic.py): they leave their groups, which frees those that wait in a collective, and meet again,
each with the state that it has. There they agree on the most sequences of a micro batch. The global
batch stays, and so do its samples: each rank accumulates more. Where no smaller micro batch helps,
they save what the steps before have done, and end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanoray.config import Batch, Config, resolve_batch
from nanoray.data.fallible import FallibleSamples
from nanoray.data.tokens import MicroBatches
from nanoray.faults.cause import is_out_of_host_memory
from nanoray.faults.inject import append_event
from nanoray.faults.progress import LEFT
from nanoray.machine.atomic import read_json_lines
from nanoray.machine.host import available_memory_bytes
from nanoray.parallel.mesh import Mesh

EVENT = "out_of_memory"  # in a run's faults.jsonl
GIB = 1 << 30
HALVE = "halve --micro_batch_size: accumulation doubles and the global batch stays"
LESS = (
    "to need less memory, in the order of what it costs: --activation_checkpointing selective or block, "
    "--dp_mode zero1, zero2 or fsdp on several ranks, --cp or --tp with more of them, a smaller model"
)


class Shortage(NamedTuple):
    """What a rank says of its memory when the ranks meet, and what they agree on."""

    limit: int = 0  # the most sequences of a micro batch; 0: as many as the configuration says
    why: str = ""  # where memory ran out just now, for people; "" on a rank that had enough
    ends: str = ""  # in place of `why`, where no smaller micro batch helps: the run ends


ENOUGH: Shortage = Shortage()


def shortage_of(
    error: BaseException,
    config: Config,
    mesh: Mesh,
    place: tuple[int, str],
    batches: MicroBatches,
) -> Shortage:
    """Return what this rank wants after it has run out of memory in a step without an update yet.

    `place` is the step and its phase.
    """
    step, phase = place
    # A group that has been built warms up, and its ranks are at no place of a step yet.
    warms_up = phase in ("init", *LEFT)
    where = "while it warmed up" if warms_up else f"in {phase} of step {step}"
    why = f"ran out of memory {where} ({describe(error, mesh.device)})"
    micro = batches.batch.micro
    problem = ""
    if mesh.device.type == "cuda" and is_out_of_host_memory(error):
        problem = (
            "; a smaller micro batch frees memory of the GPU and not of the host: start fewer ranks "
            "or worker processes there, or give it more memory"
        )
    elif config.on_oom == "stop":
        problem = f"; {HALVE}"
    elif micro == 1:
        problem = f", with 1 sequence at a time; {LESS}"
    elif come_in_batches(batches.data):
        problem = (
            f", and the train data come in batches of {micro}; give smaller ones, or a dataset with "
            "len() and []"
        )
    if problem:
        return Shortage(micro, ends=f"rank {mesh.rank} {why}{problem}")
    return Shortage(micro // 2, why)


def come_in_batches(data: object) -> bool:
    """Return whether a script's data are batches already, which only the script could cut."""
    return isinstance(data, FallibleSamples) and data.in_batches


def update_is_done_in_part(error: BaseException, mesh: Mesh, step: int) -> str:
    """Return the message of a rank that has run out of memory within an update of its weights."""
    return (
        f"rank {mesh.rank} ran out of memory in the update of step {step} "
        f"({describe(error, mesh.device)}). Some weights have changed, so the step cannot be done "
        f"again here, and the update does not depend on the micro batch; {LESS}. "
        "Then resume"
    )


def describe(error: BaseException, device: torch.device) -> str:
    """Return an error of memory in one line, with the memory that was there."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0].rstrip(".")[:200]
    return f"{text}; {memory_left(error, device)}"


def memory_left(error: BaseException, device: torch.device) -> str:
    """Return how much memory there was, of the device or of the host, as the error is about it."""
    if device.type == "cuda" and not is_out_of_host_memory(error):
        free, total = torch.cuda.mem_get_info(device)
        return f"{(total - free) / GIB:.2f} of {total / GIB:.2f} GiB of the GPU are in use"
    return f"{available_memory_bytes() / GIB:.2f} GiB of the host are free"


def agree(mesh: Mesh, own: Shortage) -> Shortage:
    """Return the smallest limit of all ranks, and who ran out of memory. (all ranks)"""
    values: list[Any] = mesh.all_gather(tuple(own))
    everyone = [Shortage(*each) for each in values]
    limits = [each.limit for each in everyone if each.limit]
    short = [f"rank {rank} {each.why}" for rank, each in enumerate(everyone) if each.why]
    why = short[0] if short else ""
    if len(short) > 1:
        why += f", and {len(short) - 1} more"
    limit = min(limits, default=0)
    ends = [each.ends for each in everyone if each.ends]
    if ends:
        return Shortage(limit, ends=ends[0])
    return Shortage(limit, why)


def announcement(why: str, before: Batch, batch: Batch) -> str:
    """Return the line on a step, or an evaluation, that is done again with a smaller micro batch."""
    return (
        f"memory  {why}: micro batch {before.micro} -> {batch.micro}, accumulation {before.accum} "
        f"-> {batch.accum}; the step or its evaluation is done again, and no step is lost. Masks of "
        "dropout, statistics of batch norms and the balance of experts depend on the micro batch's size"
    )


# The record: a restart, and a later command of the run, begin with what has fitted.


def asked_of(config: Config, mesh: Mesh) -> int:
    """Return the micro batch of the configuration, with all ranks of the run."""
    return resolve_batch(config, mesh.slots // config.replica_ranks).micro


def record(folder: Path, step: int, asked: int, shortage: Shortage) -> None:
    """Append a shortage to a run's faults.jsonl. `step` is the one that is done again."""
    values = {"step": step, "asked": asked, "limit": shortage.limit, "why": shortage.why}
    append_event(folder / "faults.jsonl", EVENT, values)


def agreed_record(folder: Path, config: Config, mesh: Mesh) -> Shortage:
    """Return what has fitted before in this run, as rank 0 finds it recorded. (all ranks)"""
    limit = 0
    if mesh.rank == 0 and config.on_oom == "shrink":
        limit = recorded(folder, asked_of(config, mesh))
    return Shortage(mesh.broadcast(limit))


def resumed_with(limit: int, asked: int) -> str:
    """Return the line of a command that begins with a smaller micro batch than it was asked for."""
    return (
        f"memory  a micro batch has at most {limit} instead of {asked}, with which memory ran out; "
        "--on_oom stop, or another --micro_batch_size, tries anew"
    )


def recorded(folder: Path, asked: int) -> int:
    """Return the limit of a run that had asked for the same micro batch; 0: there is none."""
    limit = 0
    for event in read_json_lines(folder / "faults.jsonl"):
        if event["event"] == EVENT and event["asked"] == asked:
            limit = event["limit"]
    return limit
