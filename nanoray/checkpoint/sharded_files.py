"""The parts of a checkpoint: of a sharded state every rank writes its own, of a whole one rank 0
writes the only one. Any number of ranks can load them.

    rank 0   model-00000 optimizer-00000 ─► .part-00000.json ─┐   rank 0: state.json,
    rank 1   model-00001 optimizer-00001 ─► .part-00001.json ─┼─► manifest.json, rename
    rank 2   model-00002 optimizer-00002 ─► .part-00002.json ─┘

The ranks' threads communicate through files only: a note, with the sums and the pieces of a part,
is written when the part is on disk. No collective runs beside training, and a rank that dies while
it writes leaves the older checkpoints as they were.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.checkpoint.tensorfile import damage_of, layout, read_file, tensors_in, write_file
from nanoray.errors import CheckpointError
from nanoray.machine.fault_points import reached
from nanoray.parallel.pieces import Piece, fill, overlaps

_POLL_S = 0.02
_FILE = re.compile(r"(model|optimizer)-(\d{5})\.safetensors")
Sums = dict[str, dict[str, Any]]


def write(temp: Path, rank: int, state: StateDict) -> None:
    """Write `rank`'s part of a state into a checkpoint's hidden folder, then a note.

    Raises OSError; the note, if it can be written, then has the reason, which ends the wait of rank
    0.
    """
    files = {
        f"model-{rank:05d}.safetensors": state.model,
        f"optimizer-{rank:05d}.safetensors": state.optimizer,
    }
    sums: Sums = {}
    try:
        for name, tensors in files.items():
            sums[name] = write_file(temp / name, layout(tensors))
        reached("part")
    except OSError as error:
        with suppress(OSError):
            _write_note(temp, rank, {"error": f"rank {rank}: {reason(error)}"})
        raise
    pieces = {name: piece.to_json() for name, piece in (state.pieces or {}).items()}
    _write_note(temp, rank, {"pieces": pieces, "files": sums})


def _write_note(temp: Path, rank: int, note: dict[str, Any]) -> None:
    # By a rename, so that rank 0 reads no half of it.
    unfinished = temp / f".part-{rank:05d}.tmp"
    unfinished.write_text(json.dumps(note), encoding="utf-8")
    os.rename(unfinished, temp / f".part-{rank:05d}.json")


def collect(
    temp: Path, writers: int, alive: Callable[[], None]
) -> tuple[Sums, list[dict[str, Any]]]:
    """Wait for all writers; return the sums of their files, and the pieces of each. (rank 0 only)

    `alive` is called meanwhile, and raises when a part will not be written. Raises CheckpointError
    when a writer failed.
    """
    sums: Sums = {}
    pieces = []
    for rank in range(writers):
        path = temp / f".part-{rank:05d}.json"
        # A file, not a collective: the ranks compute the next steps meanwhile.
        while not path.exists():
            alive()
            time.sleep(_POLL_S)
        note = json.loads(path.read_text(encoding="utf-8"))
        # Notes are not part of the checkpoint.
        path.unlink()
        if "error" in note:
            raise CheckpointError(f"cannot write a part of checkpoint {temp.name}: {note['error']}")
        sums |= note["files"]
        pieces.append(note["pieces"])
    return sums, pieces


def reason(error: OSError) -> str:
    """Describe a failed write, with a remedy."""
    remedy = "check the disk and permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free space, raise the limit or lower keep_checkpoints"
    return f"{error.strerror} ({Path(str(error.filename)).name}); {remedy}"


def names_in(files: Iterable[str]) -> list[str]:
    """Return the names of part files among `files`, in their order.

    Raises ValueError unless ranks 0, 1, ... have two files each.
    """
    names = []
    counts: Counter[int] = Counter()
    for name in files:
        match = _FILE.fullmatch(name)
        if match:
            names.append(name)
            counts[int(match[2])] += 1
    two_each = Counter(dict.fromkeys(range(len(names) // 2), 2))
    if not names or counts != two_each:
        raise ValueError("a part is missing")
    return names


def load(
    path: Path,
    sums: Sums,
    content: Mapping[str, Any],
    wanted: Mapping[str, Piece] | None,
    weights: Mapping[str, Piece] | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights and the optimizer state, as the pieces `weights` and `wanted`.

    None: whole tensors. Files that contain none of the pieces are not read. Raises Damage.
    """
    with damage_of("state.json"):
        saved = [  # the pieces in each rank's files
            {name: Piece.from_json(name, piece) for name, piece in pieces.items()}
            for pieces in content["pieces"]
        ]
        whole = {name: piece.all for pieces in saved for name, piece in pieces.items()}
        model = _load_model(path, sums, saved, whole, weights, content["aliases"])
        optimizer = _load_optimizer(path, sums, saved, whole, wanted)
        return model, optimizer


def _load_model(
    path: Path,
    sums: Sums,
    saved: Sequence[Mapping[str, Piece]],
    whole: Mapping[str, Piece],
    weights: Mapping[str, Piece] | None,
    aliases: Mapping[str, str],
) -> dict[str, Tensor]:
    pieces = whole if weights is None else weights
    ranks = _ranks_with(saved, pieces) | {0}  # rank 0 also saves tensors that no rank owns
    # Read each file once, however many pieces of it are wanted.
    files = _read_files(path, sums, saved, "model", ranks)
    in_pieces = {name: (name, piece) for name, piece in pieces.items() if name in whole}
    model = _assemble(files, in_pieces)
    if weights is None:
        model = {name: tensor.view(whole[name].shape) for name, tensor in model.items()}

    # Other tensors are saved as a whole: those of a whole state, buffers, and frozen weights where
    # their ranks had not cut them.
    for _, tensors in files:
        for name, tensor in tensors.items():
            if name in whole:
                continue
            model[name] = tensor
            if weights is not None and name in weights:
                model[name] = weights[name].take(tensor)

    # Tied weights are saved once.
    for name, origin in aliases.items():
        if weights is None or origin in model:
            model[name] = model[origin]
    return model


def _load_optimizer(
    path: Path,
    sums: Sums,
    saved: Sequence[Mapping[str, Piece]],
    whole: Mapping[str, Piece],
    wanted: Mapping[str, Piece] | None,
) -> dict[str, Tensor]:
    pieces = whole if wanted is None else wanted
    ranks = _ranks_with(saved, pieces) if whole else {0}  # a whole state is rank 0's
    files = _read_files(path, sums, saved, "optimizer", ranks)

    # A name is "KIND.PARAMETER".
    complete: dict[str, Tensor] = {}
    parameter_of: dict[str, str] = {}  # of the tensors that are saved in pieces
    for _, tensors in files:
        for name, tensor in tensors.items():
            _, _, parameter = name.partition(".")
            if wanted is not None and parameter not in wanted:
                continue
            if parameter not in whole:
                complete[name] = tensor if wanted is None else _cut(tensor, wanted[parameter])
            elif tensor.dim():
                parameter_of[name] = parameter
            else:  # a scalar, such as `step`, is equal in every part of its parameter
                complete[name] = tensor

    optimizer = _assemble(
        files, {name: (parameter, pieces[parameter]) for name, parameter in parameter_of.items()}
    )
    if wanted is None:
        for name, parameter in parameter_of.items():
            optimizer[name] = optimizer[name].view(whole[parameter].shape)
    return optimizer | complete


def _cut(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of an optimizer's tensor; a scalar of a larger parameter is not cut."""
    return piece.take(tensor) if tensor.dim() or not piece.shape else tensor


def _ranks_with(saved: Sequence[Mapping[str, Piece]], wanted: Mapping[str, Piece]) -> set[int]:
    """Return the ranks whose files contain a part of the wanted pieces."""
    ranks = set()
    for rank, pieces in enumerate(saved):
        for name, piece in pieces.items():
            if name in wanted and overlaps(piece, wanted[name]):
                ranks.add(rank)
                break
    return ranks


def _read_files(
    path: Path, sums: Sums, saved: Sequence[Mapping[str, Piece]], kind: str, ranks: Iterable[int]
) -> list[tuple[Mapping[str, Piece], dict[str, Tensor]]]:
    """Read the files of these ranks; return the pieces and the tensors of each."""
    files = []
    for rank in sorted(ranks):
        name = f"{kind}-{rank:05d}.safetensors"
        files.append((saved[rank], tensors_in(read_file(path / name, sums[name]), name)))
    return files


def _assemble(
    files: Iterable[tuple[Mapping[str, Piece], Mapping[str, Tensor]]],
    wanted: Mapping[str, tuple[str, Piece]],
) -> dict[str, Tensor]:
    """Return each wanted tensor, (numel,), by name, from the saved pieces of its parameter.

    `wanted`: the parameter of a name, and the piece of it to return.
    """
    saved: dict[str, list[tuple[Piece, Tensor]]] = {name: [] for name in wanted}
    for pieces, tensors in files:
        for name, tensor in tensors.items():
            if name not in wanted:
                continue
            parameter, _ = wanted[name]
            if parameter in pieces:
                saved[name].append((pieces[parameter], tensor.reshape(-1)))
    return {name: fill(piece, saved[name]) for name, (_, piece) in wanted.items()}
