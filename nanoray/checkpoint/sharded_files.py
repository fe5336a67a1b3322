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
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoray.checkpoint.manifest import Sums
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.checkpoint.tensorfile import damage_of, layout, read_file, tensors_in, write_file
from nanoray.errors import CheckpointError
from nanoray.machine.atomic import replace_text
from nanoray.machine.fault_points import reached
from nanoray.parallel.pieces import Piece, fill, overlaps

_POLL_S = 0.02
MODEL = "model"
OPTIMIZER = "optimizer"


def file_of(kind: str, rank: int) -> str:
    """Return the name of a rank's file of weights, or of optimizer state."""
    return f"{kind}-{rank:05d}.safetensors"


def write(temp: Path, rank: int, state: StateDict) -> None:
    """Write `rank`'s part of a state into a checkpoint's hidden folder, then a note.

    Raises OSError; the note, if it can be written, then has the reason, which ends the wait of rank
    0.
    """
    files = {
        file_of(MODEL, rank): state.model,
        file_of(OPTIMIZER, rank): state.optimizer,
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
    replace_text(temp / f".part-{rank:05d}.json", json.dumps(note))


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
        model = _load(path, sums, saved, MODEL, weights)
        # Tied weights are saved once.
        for name, origin in content["aliases"].items():
            if weights is None or origin in model:
                model[name] = model[origin]
        return model, _load(path, sums, saved, OPTIMIZER, wanted)


def _load(
    path: Path,
    sums: Sums,
    saved: Sequence[Mapping[str, Piece]],
    kind: str,
    wanted: Mapping[str, Piece] | None,
) -> dict[str, Tensor]:
    """Return the tensors of the files of one kind, cut as `wanted`; None: whole."""
    whole = {name: piece.all for pieces in saved for name, piece in pieces.items()}
    pieces = whole if wanted is None else wanted
    ranks = _ranks_with(saved, pieces)
    if kind == MODEL or not whole:
        ranks.add(0)  # it also saves what no rank has cut: all of a whole state

    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[Piece, Tensor]]] = {}  # of the tensors that ranks had cut
    if kind == MODEL:
        parts = {name: [] for name in pieces if name in whole}  # none of them may be missing
    for rank in sorted(ranks):
        file = file_of(kind, rank)
        # Each file is read once, however many pieces of it are wanted.
        for name, tensor in tensors_in(read_file(path / file, sums[file]), file).items():
            parameter = _parameter_of(name, kind)
            own = saved[rank].get(parameter)
            if own is not None and parameter not in pieces:
                continue
            if own is not None and (kind == MODEL or tensor.dim()):
                parts.setdefault(name, []).append((own, tensor.reshape(-1)))
            elif own is not None or wanted is None:
                # A scalar of an optimizer, such as `step`, is equal in all parts of its parameter.
                tensors[name] = tensor
            elif parameter in wanted:
                # A scalar of a larger parameter is not cut.
                is_cut = tensor.dim() or not wanted[parameter].shape
                tensors[name] = wanted[parameter].take(tensor) if is_cut else tensor
            elif kind == MODEL:  # a buffer
                tensors[name] = tensor

    for name, of_name in parts.items():
        piece = pieces[_parameter_of(name, kind)]
        tensor = fill(piece, of_name)
        tensors[name] = tensor.view(piece.shape) if wanted is None else tensor
    return tensors


def _parameter_of(name: str, kind: str) -> str:
    """Return the parameter of a tensor: the optimizer's are named KIND.PARAMETER."""
    return name if kind == MODEL else name.partition(".")[2]


def _ranks_with(saved: Sequence[Mapping[str, Piece]], wanted: Mapping[str, Piece]) -> set[int]:
    """Return the ranks whose files contain a part of the wanted pieces."""
    ranks = set()
    for rank, pieces in enumerate(saved):
        for name, piece in pieces.items():
            if name in wanted and overlaps(piece, wanted[name]):
                ranks.add(rank)
                break
    return ranks
