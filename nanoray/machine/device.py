"""A compute device, which is a GPU, a MIG slice or a share of the CPUs, and its load."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """A device that a rank can be bound to."""

    kind: str  # "cuda" | "mig" | "cpu"
    index: int  # NVML's index of a GPU; for a slice, its index on its GPU
    uuid: str  # for CUDA_VISIBLE_DEVICES; "" for a CPU
    name: str
    memory_bytes: int
    parent_uuid: str  # the physical GPU; equals uuid for a whole one
    profile: str = ""  # "1g.18gb"
    compute_fraction: float = 1.0  # of the GPU's peak FLOP/s; 0 when the profile is unknown
    bandwidth_fraction: float = 1.0
    mig_mode: bool = False  # a whole GPU that only its slices can use
    bf16: bool = False  # compute capability >= 8

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Device:
        return cls(**values)
