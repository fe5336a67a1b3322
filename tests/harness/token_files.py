"""Write token files as other tools do: llm.c, numpy, nanoGPT. None of it is nanoray's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

MAGIC = {"uint16": (20240520, 1), "uint32": (20240801, 7)}


def write_llmc(path: Path, ids: Any, dtype: str = "uint16", **others: int) -> None:
    """Write what llm.c's write_datafile writes; `magic`, `version` and `count` can be wrong ones."""
    magic, version = MAGIC[dtype]
    header = np.zeros(256, np.int32)
    header[0] = others.get("magic", magic)
    header[1] = others.get("version", version)
    header[2] = others.get("count", len(ids))
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype).tobytes())


def write_bare(path: Path, ids: Any, dtype: str = "uint16") -> None:
    np.asarray(ids, dtype).tofile(path)
