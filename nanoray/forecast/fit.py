"""Fit a link to measured all-reduces: seconds a message (alpha), and seconds a byte (beta)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanoray.errors import ConfigError
from nanoray.forecast.links import Link, coefficients


@dataclass(frozen=True)
class Fit:
    """Alpha and beta of one algorithm as measured, and how far to trust them."""

    algorithm: str
    ranks: int
    alpha_s: float
    beta_s_per_byte: float
    residuals: tuple[float, ...]  # fitted / measured - 1, one per measured point
    smallest_bytes: int
    largest_bytes: int

    @property
    def median_error(self) -> float:
        return statistics.median(map(abs, self.residuals))

    @property
    def link(self) -> Link:
        """The link that would behave so; a beta of 0 becomes a very fast one."""
        return Link(
            alpha_us=1e6 * self.alpha_s, bandwidth_gb_per_s=1e-9 / max(self.beta_s_per_byte, 1e-15)
        )

    def seconds(self, ranks: int, nbytes: int) -> float:
        """Predict an all-reduce over `ranks` equal links."""
        messages, moved = coefficients(self.algorithm, ranks, nbytes)
        return self.alpha_s * messages + self.beta_s_per_byte * moved

    def outside(self, nbytes: int) -> str:
        """Return a warning when a prediction for that size is an extrapolation, else ""."""
        if self.smallest_bytes <= nbytes <= self.largest_bytes:
            return ""
        return (
            f"{nbytes} bytes are outside the measured {self.smallest_bytes} .. {self.largest_bytes}"
        )


def fit(points: Sequence[tuple[int, float]], algorithm: str, ranks: int) -> Fit:
    """Fit alpha and beta to (bytes, seconds) by least squares on the relative errors, neither below
    0.

    Relative, because absolute errors of the largest size would drown the latency that the small
    ones show.
    """
    sizes = {nbytes for nbytes, _ in points}
    if len(sizes) < 2 or ranks < 2:
        raise ConfigError(
            f"{len(sizes)} size(s) at {ranks} rank(s) fix no line; measure 2 sizes or more at 2 "
            "ranks"
        )
    seconds = np.array([s for _, s in points])
    design = (
        np.array([coefficients(algorithm, ranks, nbytes) for nbytes, _ in points])
        / seconds[:, None]
    )
    solution = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)[0]
    # Noise; then the other one alone explains the times
    for negative in np.flatnonzero(solution < 0):
        other = design[:, 1 - negative]
        solution[negative], solution[1 - negative] = 0.0, other.sum() / (other @ other)
    residuals = tuple((design @ solution - 1).tolist())
    return Fit(
        algorithm, ranks, float(solution[0]), float(solution[1]), residuals, min(sizes), max(sizes)
    )
