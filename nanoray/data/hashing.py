"""The hash from which orders of samples and generated data follow. numpy only: the driver imports it."""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step: 2**64 / the golden ratio, made odd


def mix(z: np.ndarray) -> np.ndarray:
    """Return SplitMix64's hash of each uint64 (Steele et al. 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
