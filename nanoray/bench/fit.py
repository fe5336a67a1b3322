"""Fit a link to measured all-reduces: seconds a message (alpha), and seconds a byte (beta)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanoray.cli.forecast.links import Link, coefficients
from nanoray.errors import ConfigError


@dataclass(frozen=True)
class Fit:
    """Alpha and beta of one algorithm as measured, and the errors of the fit."""

    algorithm: str
    ranks: int
    alpha_s: float
    beta_s_per_byte: float
    residuals: tuple[float, ...]  # fitted / measured - 1, one per measured point
    smallest_bytes: int
    largest_bytes: int

    @property
    def link(self) -> Link:
        """The link with these coefficients; a beta of 0 becomes a very fast one."""
        bandwidth = 1e-9 / max(self.beta_s_per_byte, 1e-15)
        return Link(alpha_us=1e6 * self.alpha_s, bandwidth_gb_per_s=bandwidth)

    def seconds(self, ranks: int, nbytes: int) -> float:
        """Predict an all-reduce over `ranks` equal links."""
        messages, moved = coefficients(self.algorithm, ranks, nbytes)
        return self.alpha_s * messages + self.beta_s_per_byte * moved

    def outside(self, nbytes: int) -> str | None:
        """Return a warning when a prediction for that size is an extrapolation, else None."""
        if self.smallest_bytes <= nbytes <= self.largest_bytes:
            return None
        return (
            f"{nbytes} bytes are outside the measured {self.smallest_bytes} .. {self.largest_bytes}"
        )


def fit(points: Sequence[tuple[int, float]], algorithm: str, ranks: int) -> Fit:
    """Fit alpha and beta, neither below 0, to (bytes, seconds).

    Least squares on the relative errors: absolute errors of the largest size would drown the
    latency, which only the small sizes show.
    """
    # Two coefficients need two sizes; a single rank sends no messages.
    sizes = {nbytes for nbytes, _ in points}
    if len(sizes) < 2 or ranks < 2:
        raise ConfigError(
            f"{len(sizes)} size(s) at {ranks} rank(s) fix no line; measure 2 sizes or more at 2 "
            "ranks"
        )
    # Each row divided by its measured time: the solution makes each product as near to 1 as it can.
    seconds = np.array([measured for _, measured in points])
    rows = [coefficients(algorithm, ranks, nbytes) for nbytes, _ in points]
    design = np.array(rows) / seconds[:, None]  # (points, 2)
    solution = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)[0]

    # Noise can make one coefficient negative; then the other one alone explains the times.
    for negative in np.flatnonzero(solution < 0):
        other = design[:, 1 - negative]
        solution[negative] = 0.0
        solution[1 - negative] = other.sum() / (other @ other)

    residuals = design @ solution - 1
    return Fit(
        algorithm=algorithm,
        ranks=ranks,
        alpha_s=float(solution[0]),
        beta_s_per_byte=float(solution[1]),
        residuals=tuple(residuals.tolist()),
        smallest_bytes=min(sizes),
        largest_bytes=max(sizes),
    )
