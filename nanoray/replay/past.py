"""What a run has left of its steps: records, states' hashes, checkpoints. And how two runs' differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoray.atomic import read_json_lines
from nanoray.checkpoint.files import MANIFEST, load, steps_in
from nanoray.config import read_yaml
from nanoray.errors import ConfigError
from nanoray.run import RunSpec
from nanoray.train.guard.certificate import NAME, Certificate, read
from nanoray.train.guard.replicas import bits_of

GIVEN = {
    "train/tokens": "tokens so far",
    "train/samples": "images so far",
    "train/lr": "learning rate",
}
COMPUTED = {"train/loss": "loss", "train/grad_norm": "gradient norm"}
LAST_BITS = 1e-6  # relative
# Relative, where equal bits are not promised
LIMITS = {"loss": 1e-4, "own loss": 1e-4, "gradient norm": 1e-2}


class Difference(NamedTuple):
    """A value that two runs have of the same step, and not the same."""

    step: int
    what: str
    ours: Any
    theirs: Any
    rank: int | None = None  # the only rank that it is about
    tensor: str = ""  # in which that rank disagrees with the other ranks of its run


@dataclass
class Past:
    """A run's files, as far as they tell of its steps."""

    folder: Path
    spec: RunSpec
    certificate: Certificate
    records: dict[int, dict[str, Any]]
    checkpoints: dict[int, Path]

    @property
    def last(self) -> int:
        """The newest step that has left something."""
        return max(
            self.records.keys() | self.certificate.states.keys() | self.checkpoints.keys(),
            default=0,
        )

    @property
    def starts(self) -> set[int]:
        """The steps after which its steps can be done again: of its checkpoints, and where it began
        itself.
        """
        return {*self.checkpoints, *([self.begun] if not self.begun or self.origin else [])}

    @property
    def begun(self) -> int:
        """The step after which it began."""
        return int(self.certificate.groups[0]["group"])

    @property
    def origin(self) -> Path | None:
        """The checkpoint of another run that it began from; None where that is gone, or an older
        nanoray noted none.
        """
        path = Path(self.certificate.groups[0].get("resume") or self.spec.resume)
        return path if (path / MANIFEST).is_file() else None

    def values(self, step: int) -> dict[str, Any]:
        """Return what is known of a step, by name: the causes before the consequences."""
        record, state = self.records.get(step, {}), self.certificate.states.get(step, {})
        causes, consequences = (
            {n: record[key] for key, n in of.items() if key in record} for of in (GIVEN, COMPUTED)
        )
        own = {
            f"own loss of rank {rank}": loss for rank, loss in enumerate(state.get("losses", ()))
        }
        return causes | own | consequences

    def tensors(self, step: int) -> dict[str, str]:
        """Return the hash of each tensor after a step, by name, in the model's order; {} if there
        is none.
        """
        tensors: dict[str, str] = self.certificate.states.get(step, {}).get("tensors", {})
        return tensors

    def group_of(self, step: int) -> dict[str, Any]:
        """Return what is known of the ranks that did a step."""
        return next(group for group in reversed(self.certificate.groups) if group["group"] < step)


def read_past(folder: Path) -> Past:
    """Read a run's folder. Raises ConfigError when it is none, or has no hashes."""
    if not (folder / "run.json").is_file():
        raise ConfigError(
            f"{folder} is no run: it has no run.json; give the folder of a run, such as "
            "runs/2026-..."
        )
    certificate = read(folder)
    if not certificate.groups:
        raise ConfigError(
            f"{folder} has no {NAME}, in which a run notes its groups of ranks and hashes: an "
            "older nanoray wrote it; "
            "go on from one of its checkpoints (--resume), and replay the steps after it"
        )
    records = {
        record["step"]: record
        for record in read_json_lines(folder / "metrics.jsonl")
        if "step" in record
    }
    checkpoints = {step: path for path, step in steps_in(folder / "checkpoints", []).items()}
    return Past(
        folder.resolve(),
        RunSpec.from_dict(read_yaml(folder / "run.json")),
        certificate,
        records,
        checkpoints,
    )


def differences(ours: Past, theirs: Past, steps: range) -> Iterator[Difference]:
    """Yield what two runs have of the same steps and not the same, step by step, the causes first."""
    for step in steps:
        values, others = ours.values(step), theirs.values(step)
        for name in [name for name in values if name in others and values[name] != others[name]]:
            rank = int(name.rpartition(" ")[2]) if name.startswith("own loss") else None
            yield Difference(step, name, values[name], others[name], rank)
        for run, other in ((ours, theirs), (theirs, ours)):
            for rank, tensor in run.certificate.states.get(step, {}).get("differ", {}).items():
                if rank not in other.certificate.states.get(step, {}).get("differ", {}):
                    yield Difference(step, "replicas", run.folder.name, "", int(rank), tensor)
        hashes, known = ours.tensors(step), theirs.tensors(step)
        for name in [name for name in hashes if name in known and hashes[name] != known[name]]:
            yield Difference(step, f"hash of {name}", hashes[name], known[name])


def text(d: Difference) -> str:
    """Write a difference as one line."""
    if d.tensor:
        return f"{d.tensor} of rank {d.rank} is not that of the other ranks of {d.ours}"
    return f"{d.what}: {d.ours!r} and {d.theirs!r}"


def matters(d: Difference, unsure: bool, exact_loss: bool) -> bool:
    """Whether a difference is one where none may be. The mean loss of three ranks and more is a sum
    of the backend.
    """
    kind = "own loss" if d.what.startswith("own loss") else d.what
    if not isinstance(d.ours, float) or not isinstance(d.theirs, float):
        return not (unsure and d.what.startswith("hash"))
    limit = (
        LIMITS.get(kind, 0.0) if unsure else LAST_BITS if kind == "loss" and not exact_loss else 0.0
    )
    return abs(d.ours - d.theirs) > limit * abs(d.theirs)


def compared(ours: Past, theirs: Past, step: int) -> tuple[int, int]:
    """Return how many values and how many tensors' hashes both runs have of a step."""
    values = ours.values(step).keys() & theirs.values(step).keys()
    return len(values), len(ours.tensors(step).keys() & theirs.tensors(step).keys())


def tensors_apart(ours: Path, theirs: Path) -> tuple[list[str], int]:
    """Compare two checkpoints bit by bit: a line for each tensor that differs, the furthest apart
    first, and how many tensors both have. Raises CheckpointError when one of them is damaged.
    """
    a, b = (load(path) for path in (ours, theirs))
    both = [(name, of_a[name], of_b[name]) for of_a, of_b in ((a.model, b.model), (a.optimizer, b.optimizer))
            for name in of_a if name in of_b and of_a[name].shape == of_b[name].shape]  # fmt: skip
    apart = [
        (_distance(x, y), _apart(name, x, y))
        for name, x, y in both
        if not torch.equal(bits_of(x), bits_of(y))
    ]
    return [line for _, line in sorted(apart, key=lambda found: -found[0])], len(both)


def _distance(x: Tensor, y: Tensor) -> float:
    """Return how far two tensors are apart, relative to their size; values that are not finite come
    first.
    """
    far = torch.nan_to_num((x.double() - y.double()).norm(), nan=torch.inf, posinf=torch.inf).item()
    return float(far / (min(x.double().norm().item(), y.double().norm().item()) + 1e-30))


def _apart(name: str, x: Tensor, y: Tensor) -> str:
    """Write in which elements two tensors of one shape differ, and in which bit if it is a single
    one.
    """
    (places,) = (flips := bits_of(x) ^ bits_of(y)).nonzero(as_tuple=True)
    first = int(places[0])
    text = f"{name}: {len(places)} of {x.numel()} elements, first {first}: "
    text += f"{x.reshape(-1)[first].item()!r} and {y.reshape(-1)[first].item()!r}"
    bits = [bit for bit in range(8 * x.element_size()) if int(flips[first]) >> bit & 1]
    return text + (f", bit {bits[0]} flipped" if len(places) == len(bits) == 1 else "")
