"""Compare values by their types and bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoray.machine.tensor_memory import bytes_of


def same(a: Any, b: Any) -> bool:
    """Return whether two values have the same types and the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        # As bytes, because a NaN differs from itself.
        return alike and bool(torch.equal(bytes_of(a), bytes_of(b)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (float, np.generic)):
        return repr(a) == repr(b)
    return a is b or bool(a == b)
