"""Read the records, state hashes and checkpoints of a run, and compare those of two runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoray.checkpoint.files import MANIFEST, load, steps_in
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config.load import read_mapping
from nanoray.errors import ConfigError
from nanoray.machine.atomic import read_json_lines
from nanoray.train.guard.replicas import bits_of
from nanoray.train.guard.state_hashes import NAME, StateHashes, read

GIVEN = {
    "train/tokens": "tokens so far",
    "train/samples": "images so far",
    "train/lr": "learning rate",
}
COMPUTED = {"train/loss": "loss", "train/grad_norm": "gradient norm"}


class Difference(NamedTuple):
    """A value of one step that differs between two runs."""

    step: int
    what: str
    ours: Any
    theirs: Any
    rank: int | None = None  # the only rank that it is about
    tensor: str = ""  # in which that rank disagrees with the other ranks of its run


@dataclass
class RecordedRun:
    """The files of a run that describe its steps."""

    folder: Path
    spec: RunSpec
    state_hashes: StateHashes
    records: dict[int, dict[str, Any]]
    checkpoints: dict[int, Path]

    @property
    def last(self) -> int:
        """The newest step with a record, a hash or a checkpoint."""
        return max(
            self.records.keys() | self.state_hashes.states.keys() | self.checkpoints.keys(),
            default=0,
        )

    @property
    def starts(self) -> set[int]:
        """The steps from which a re-enactment can start: its checkpoints, and where it began."""
        starts = set(self.checkpoints)
        # Step 0 needs no checkpoint; a later beginning needs the one that it began from.
        if not self.begun or self.origin:
            starts.add(self.begun)
        return starts

    @property
    def begun(self) -> int:
        """The step after which it began."""
        return int(self.state_hashes.groups[0]["group"])

    @property
    def origin(self) -> Path | None:
        """The checkpoint of another run that it began from; None where that is gone."""
        path = Path(self.state_hashes.groups[0]["resume"])
        return path if (path / MANIFEST).is_file() else None

    def values(self, step: int) -> dict[str, Any]:
        """Return the values of a step by name: causes before consequences."""
        record = self.records.get(step, {})
        state = self.state_hashes.states.get(step, {})
        values = {name: record[key] for key, name in GIVEN.items() if key in record}
        for rank, loss in enumerate(state.get("losses", ())):
            values[f"own loss of rank {rank}"] = loss
        values |= {name: record[key] for key, name in COMPUTED.items() if key in record}
        return values

    def tensors(self, step: int) -> dict[str, str]:
        """Return the hash of each tensor after a step, in the model's order; {} without hashes."""
        tensors: dict[str, str] = self.state_hashes.states.get(step, {}).get("tensors", {})
        return tensors

    def group_of(self, step: int) -> dict[str, Any]:
        """Return the record of the ranks that did a step."""
        return next(group for group in reversed(self.state_hashes.groups) if group["group"] < step)


def read_recorded(folder: Path) -> RecordedRun:
    """Read a run's folder. Raises ConfigError when it has no hashes."""
    state_hashes = read(folder)
    if not state_hashes.groups:
        raise ConfigError(
            f"{folder} has no {NAME}, in which a run notes its groups of ranks and hashes; give a "
            "run whose folder is complete"
        )
    records = {
        record["step"]: record
        for record in read_json_lines(folder / "metrics.jsonl")
        if "step" in record
    }
    checkpoints = {step: path for path, step in steps_in(folder / "checkpoints", []).items()}
    return RecordedRun(
        folder.resolve(),
        RunSpec.from_dict(read_mapping(folder / "run.json")),
        state_hashes,
        records,
        checkpoints,
    )


def differences(ours: RecordedRun, theirs: RecordedRun, steps: range) -> Iterator[Difference]:
    """Yield the differences of two runs, step by step, causes first."""
    for step in steps:
        # Values that both runs have recorded.
        others = theirs.values(step)
        for name, value in ours.values(step).items():
            # As text: a loss that is not a number equals itself.
            if name in others and repr(value) != repr(others[name]):
                rank = int(name.rpartition(" ")[2]) if name.startswith("own loss") else None
                yield Difference(step, name, value, others[name], rank)

        # Ranks whose replica differs within one of the runs only.
        for run, other in ((ours, theirs), (theirs, ours)):
            strays = run.state_hashes.states.get(step, {}).get("differ", {})
            known = other.state_hashes.states.get(step, {}).get("differ", {})
            for rank, tensor in strays.items():
                if rank not in known:
                    yield Difference(step, "replicas", run.folder.name, "", int(rank), tensor)

        # Tensors after the update.
        hashes = theirs.tensors(step)
        for name, digest in ours.tensors(step).items():
            if name in hashes and digest != hashes[name]:
                yield Difference(step, f"hash of {name}", digest, hashes[name])


def format_difference(d: Difference) -> str:
    """Write a difference as one line."""
    if d.tensor:
        return f"{d.tensor} of rank {d.rank} is not that of the other ranks of {d.ours}"
    return f"{d.what}: {d.ours!r} and {d.theirs!r}"


def compared(ours: RecordedRun, theirs: RecordedRun, step: int) -> tuple[int, int]:
    """Return the number of values and of tensor hashes that both runs have of a step."""
    values = ours.values(step).keys() & theirs.values(step).keys()
    hashes = ours.tensors(step).keys() & theirs.tensors(step).keys()
    return len(values), len(hashes)


def tensors_apart(ours: Path, theirs: Path) -> tuple[list[str], int]:
    """Compare two checkpoints bit by bit.

    Returns a line for each tensor that differs, the furthest apart first, and the number of tensors
    that both have. Raises CheckpointError when one of them is damaged.
    """
    # Loading verifies the checksums, so damage is reported and not taken for a difference.
    a = load(ours)
    b = load(theirs)
    count = 0
    apart = []
    for own, other in ((a.model, b.model), (a.optimizer, b.optimizer)):
        for name, x in own.items():
            y = other.get(name)
            if y is None or x.shape != y.shape:
                continue
            count += 1
            # Bits, not values: NaN differs from itself, and -0.0 equals 0.0.
            if not torch.equal(bits_of(x), bits_of(y)):
                apart.append((_distance(x, y), _apart(name, x, y)))
    apart.sort(key=lambda pair: -pair[0])
    return [line for _, line in apart], count


def _distance(x: Tensor, y: Tensor) -> float:
    """Return the relative distance of two tensors; infinite for values that are not finite."""
    # In double precision, so that the difference of close numbers does not vanish.
    far = torch.nan_to_num((x.double() - y.double()).norm(), nan=torch.inf, posinf=torch.inf).item()
    return float(far / (min(x.double().norm().item(), y.double().norm().item()) + 1e-30))


def _apart(name: str, x: Tensor, y: Tensor) -> str:
    """Write the elements in which two tensors of one shape differ, and the bit if it is only one."""
    # A single flipped bit points at memory or transport, and not at arithmetic.
    flips = bits_of(x) ^ bits_of(y)
    (places,) = flips.nonzero(as_tuple=True)
    first = int(places[0])
    text = f"{name}: {len(places)} of {x.numel()} elements, first {first}: "
    text += f"{x.reshape(-1)[first].item()!r} and {y.reshape(-1)[first].item()!r}"
    bits = [bit for bit in range(8 * x.element_size()) if int(flips[first]) >> bit & 1]
    if len(places) == len(bits) == 1:
        text += f", bit {bits[0]} flipped"
    return text
