"""Write token files as other tools do: llm.c, numpy, nanoGPT. None of it is nanoray's own code."""

from __future__ import annotations

import pickle
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


def write_npy(path: Path, ids: Any, dtype: str = "uint16") -> None:
    np.save(path, np.asarray(ids, dtype))


def write_bare(path: Path, ids: Any, dtype: str = "uint16") -> None:
    np.asarray(ids, dtype).tofile(path)


def write_meta_pickle(folder: Path, chars: str, protocol: int | None = None) -> None:
    """Write meta.pkl as nanoGPT's data/shakespeare_char/prepare.py does."""
    stoi = {char: number for number, char in enumerate(chars)}
    itos = dict(enumerate(chars))
    meta = {"vocab_size": len(chars), "itos": itos, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta, protocol=protocol))


def write_nanogpt_chars(folder: Path, text: str) -> None:
    """Write a folder as nanoGPT's data/shakespeare_char/prepare.py does, from any text."""
    folder.mkdir(exist_ok=True)
    chars = "".join(sorted(set(text)))
    write_meta_pickle(folder, chars)
    ids = [chars.index(char) for char in text]
    cut = int(len(ids) * 0.9)
    write_bare(folder / "train.bin", ids[:cut])
    write_bare(folder / "val.bin", ids[cut:])
