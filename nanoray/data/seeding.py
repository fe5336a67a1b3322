"""Seed the generators of a process for each sample that a script's dataset returns.

Random augmentation draws from torch's, numpy's or Python's global generator. Seeded from (seed, number
of the sample) it is a pure function, at any number of ranks and worker processes, and after a resume.
The generators are restored afterwards.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def seed_host_generators(seed: int) -> None:
    """Seed the generators of Python and numpy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_generators_for(seed: int, *numbers: int) -> None:
    """Seed torch's, numpy's and Python's global generators from these numbers alone."""
    text = repr((seed, *numbers)).encode()
    derived = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    torch.default_generator.manual_seed(derived)
    seed_host_generators(derived)


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore the three generators afterwards: the model and the script draw from them, too.

    With a GPU as `device`, also its generator.
    """
    gpu = device if device is not None and device.type == "cuda" else None
    of_gpu = torch.cuda.get_rng_state(gpu) if gpu else None
    of_torch = torch.get_rng_state()
    of_numpy = np.random.get_state()
    of_python = random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        if gpu and of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu, gpu)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return this rank's random generators as bytes."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `rng_state` returned, for the generators that this device has."""
    torch.set_rng_state(state["cpu"].clone())  # a view into a checkpoint's buffer may be unaligned
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].clone(), device)
