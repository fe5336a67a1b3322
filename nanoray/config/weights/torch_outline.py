"""Print the outline of each file of torch.save as a line of JSON: its tensors' shapes, no numbers.

outlines.py runs this file by its path, in a process of its own: the driver imports no torch, and a
file that was made to use up memory or time ends this process alone. `weights_only` refuses every
name that is not torch's own; on the device meta no number is read.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import zipfile
from contextlib import suppress
from typing import Any

_MEMORY = 8 << 30  # bytes for torch and the outline; the file itself is mapped
_LONGEST = 64 << 20  # characters of an outline
_PLAIN = (bool, int, float, str, type(None))


def main(paths: list[str]) -> None:
    """Print {"tensors": ..., "model_args": ...} for each file, or {"refused": reason}."""
    limit = _MEMORY + max(os.path.getsize(path) for path in paths)
    with suppress(ValueError, OSError):  # a lower limit is in force already
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for path in paths:
        try:
            text = json.dumps(_outline_of(path))
            if len(text) > _LONGEST:
                raise ValueError(f"its names and shapes take {len(text)} characters")
        except Exception as error:  # torch raises RuntimeError, UnpicklingError and others
            text = json.dumps({"refused": _reason_of(error)})
        print(text)


def _outline_of(path: str) -> dict[str, Any]:
    import torch

    # Only a zip file can be mapped
    mapped = zipfile.is_zipfile(path)
    content = torch.load(path, map_location="meta", weights_only=True, mmap=mapped)
    if not isinstance(content, dict):
        return {"tensors": None}

    # nanoGPT keeps the model beside other entries. Otherwise the file is the model's state_dict.
    model = content
    if isinstance(content.get("model"), dict):
        model = content["model"]
    tensors = {}
    for name, value in model.items():
        if isinstance(value, torch.Tensor):
            tensors[str(name)] = list(value.shape)
    return {"tensors": tensors, "model_args": _plain_values(content.get("model_args"))}


def _plain_values(model_args: Any) -> dict[str, Any] | None:
    """Return nanoGPT's arguments; of a value that is no number or text, only its type."""
    if not isinstance(model_args, dict):
        return None
    values = {}
    for name, value in model_args.items():
        values[str(name)] = value if isinstance(value, _PLAIN) else str(type(value))
    return values


def _reason_of(error: Exception) -> str:
    """Return why torch.load refuses a file, in one line. Its own message is advice for programs."""
    name = re.search(r"(?:GLOBAL|[Gg]lobal) ([\w.]+\.\w+)", str(error))
    if name:
        return f"it refers to {name[1]}, which is code"
    return " ".join(str(error).split())[:200] or type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
