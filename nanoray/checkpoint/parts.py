"""The parts of a sharded checkpoint: every rank writes what it owns, and any number of ranks can
load it.

    rank 0   model-00000 optimizer-00000 ─► .part-00000.json ─┐
    rank 1   model-00001 optimizer-00001 ─► .part-00001.json ─┼─► rank 0: state.json, manifest.json, rename
    rank 2   model-00002 optimizer-00002 ─► .part-00002.json ─┘

The ranks' threads talk through files only: a note appears when a part is on disk, and has its sums
and its pieces. No collective runs beside training, and a rank that dies while it writes leaves the
older checkpoints as they were.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoray.checkpoint.tensorfile import damage_of, layout, read_file, tensors_in, write_file
from nanoray.errors import CheckpointError
from nanoray.mesh.pieces import Piece, fill, overlaps
from nanoray.points import reached
from nanoray.state import StateDict

_POLL_S = 0.02
_FILE = re.compile(r"(model|optimizer)-(\d{5})\.safetensors")
Sums = dict[str, dict[str, Any]]


def write(temp: Path, rank: int, state: StateDict) -> None:
    """Write what `rank` owns of a sharded state into a checkpoint's hidden folder, then a note that
    it is there.

    Raises OSError; then the note, if it can be written, has the reason, which ends the wait of rank
    0.
    """
    note: dict[str, Any] = {
        "pieces": {name: piece.to_json() for name, piece in (state.pieces or {}).items()}
    }
    try:
        files = {
            f"model-{rank:05d}.safetensors": state.model,
            f"optimizer-{rank:05d}.safetensors": state.optimizer,
        }
        note["files"] = {
            name: write_file(temp / name, layout(tensors)) for name, tensors in files.items()
        }
        reached("part")
    except OSError as error:
        with suppress(OSError):
            _leave(temp, rank, {"error": f"rank {rank}: {reason(error)}"})
        raise
    _leave(temp, rank, note)


def _leave(temp: Path, rank: int, note: dict[str, Any]) -> None:
    aside = temp / f".part-{rank:05d}.tmp"
    aside.write_text(json.dumps(note), encoding="utf-8")
    os.rename(aside, temp / f".part-{rank:05d}.json")


def collect(
    temp: Path, writers: int, alive: Callable[[], None]
) -> tuple[Sums, list[dict[str, Any]]]:
    """Wait for the notes of all writers; return the sums of their files and the pieces of each.
    (rank 0 only)

    `alive` is called meanwhile, and raises when a writer will not come. Raises CheckpointError when
    one failed.
    """
    sums: Sums = {}
    pieces = []
    for rank in range(writers):
        path = temp / f".part-{rank:05d}.json"
        while not path.exists():
            alive()
            time.sleep(_POLL_S)
        note = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        if "error" in note:
            raise CheckpointError(f"cannot write a part of checkpoint {temp.name}: {note['error']}")
        sums |= note["files"]
        pieces.append(note["pieces"])
    return sums, pieces


def reason(error: OSError) -> str:
    """Describe a failed write, with a remedy."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = (
        "free space, raise the limit or lower keep_checkpoints"
        if full
        else "check the disk and permissions"
    )
    return f"{error.strerror} ({Path(str(error.filename)).name}); {remedy}"


def names_in(files: Iterable[str]) -> list[str]:
    """Return the names of part files among `files`, in their order. Raises ValueError unless each
    part is complete.
    """
    names = [name for name in files if _FILE.fullmatch(name)]
    ranks = [int(name.split("-")[1][:5]) for name in names]
    if sorted(ranks) != sorted([*range(len(names) // 2)] * 2) or not names:
        raise ValueError("a part is missing")
    return names


def load(
    path: Path,
    sums: Sums,
    content: Mapping[str, Any],
    wanted: Mapping[str, Piece] | None,
    weights: Mapping[str, Piece] | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights and the optimizer state: of the pieces `weights` and `wanted` (None:
    whole).

    A file is read if it has something of that. Raises Damage.
    """
    with damage_of("state.json"):
        held = [
            {n: Piece.from_json(n, piece) for n, piece in of.items()} for of in content["pieces"]
        ]
        whole = {name: piece.all for of in held for name, piece in of.items()}
        pieces: Mapping[str, Piece] = whole if weights is None else weights
        near = _near(held, pieces) | {0}  # the first one also has what no rank owns
        found = [
            (held[rank], tensors_in(*_read(path, sums, f"model-{rank:05d}.safetensors")))
            for rank in sorted(near)
        ]
        model = _assemble(found, {name: (name, piece) for name, piece in pieces.items()})
        if pieces is whole:
            model = {name: tensor.view(whole[name].shape) for name, tensor in model.items()}
            model |= {name: model[origin] for name, origin in content["aliases"].items()}
        model |= {
            name: tensor for _, of in found for name, tensor in of.items() if name not in whole
        }

        pieces = whole if wanted is None else wanted
        near = _near(held, pieces)
        found = [
            (held[r], tensors_in(*_read(path, sums, f"optimizer-{r:05d}.safetensors")))
            for r in sorted(near)
        ]
        names = {name: name.partition(".")[2] for _, tensors in found for name in tensors}
        # Such as `step`
        scalars = {n: t for _, tensors in found for n, t in tensors.items() if not t.dim()}
        parted = {
            n: (param, pieces[param])
            for n, param in names.items()
            if n not in scalars and param in pieces
        }
        optimizer = _assemble(found, parted)
        if wanted is None:
            optimizer = {n: tensor.view(whole[names[n]].shape) for n, tensor in optimizer.items()}
        return model, optimizer | {n: t for n, t in scalars.items() if names[n] in pieces}


def _near(held: Sequence[Mapping[str, Piece]], wanted: Mapping[str, Piece]) -> set[int]:
    """Return the ranks that hold something of the wanted pieces."""
    return {
        rank
        for rank, of in enumerate(held)
        if any(n in wanted and overlaps(of[n], wanted[n]) for n in of)
    }


def _read(path: Path, sums: Sums, name: str) -> tuple[Tensor, str]:
    return read_file(path / name, sums[name]), name


def _assemble(
    found: Iterable[tuple[Mapping[str, Piece], Mapping[str, Tensor]]],
    wanted: Mapping[str, tuple[str, Piece]],
) -> dict[str, Tensor]:
    """Return each wanted tensor, (numel,), by name: put together from the pieces of its parameter
    that were found.
    """
    saved: dict[str, list[tuple[Piece, Tensor]]] = {name: [] for name in wanted}
    for pieces, tensors in found:
        for name, tensor in tensors.items():
            if name in wanted and wanted[name][0] in pieces:
                saved[name].append((pieces[wanted[name][0]], tensor.reshape(-1)))
    return {name: fill(piece, saved[name]) for name, (_, piece) in wanted.items()}
