"""Samples that may fail to be read in the middle of a run: those of a script."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nanoray.config import Batch


class DataFailure(NamedTuple):
    """An error of a script's data in the middle of a run."""

    sample: int  # the first one of the micro batch that could not be read; -1: of validation
    error: Exception


class FallibleSamples(ABC):
    """A script's data set as the loop sees it (tokens.Samples): any read may raise.

    Once `keeps_errors` is set, a read that fails returns the newest batch again, and `failure` has
    the error until all ranks have seen it.
    """

    keeps_errors = False
    failure: DataFailure | None = None

    @abstractmethod
    def train_batch(self, first_sample: int, count: int) -> tuple[Any, Any]: ...

    @abstractmethod
    def val_windows(self, limit: int) -> np.ndarray: ...

    @abstractmethod
    def val_batch(self, starts: np.ndarray) -> tuple[Any, Any]: ...

    @property
    @abstractmethod
    def windows_at_once(self) -> int:
        """The most validation windows that one call of `val_batch` reads."""

    @property
    @abstractmethod
    def in_batches(self) -> bool:
        """Whether the training data come in batches of a size of their own."""

    @abstractmethod
    def divide(self, batch: Batch, rank: int) -> None:
        """Note how the data ranks share a step from now on, and which one of them this is."""

    @property
    @abstractmethod
    def fingerprint(self) -> int:
        """A hash of what the ranks compare before the first step."""

    @abstractmethod
    def compare(self, fingerprints: Sequence[int]) -> None:
        """Raise DataError where the data of the ranks do not go together."""

    @abstractmethod
    def close(self) -> None:
        """End the worker processes."""
