"""Values of Python and torch as JSON and named tensors, and back to the same types.

    {"k": 3, "betas": (0.9, 0.99), "GG": [tensor, tensor]}
      ├─ JSON     {"k": 3, "betas": {"": "tuple", "items": [0.9, 0.99]}, "GG": [{"": "tensor", ...}]}
      └─ tensors  {"GG/0": tensor, "GG/1": tensor}

A type that JSON lacks becomes a dict with the key "", which names the type. Nothing is pickled.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoray.machine.tensor_memory import bytes_of

# The kinds of dict that are restored as what they were
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),  # MultiStepLR keeps its milestones in one
}

_KEYS = (bool, int, float, str)

# By name, because a name from a checkpoint or another rank could be that of anything in torch
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

# numpy's numbers, which many optimizers and modules keep; they compare equal to Python's, and print
# and compute differently.
_NUMPY = (np.bool_, np.integer, np.float16, np.float32, np.float64)


class Unsupported(TypeError):
    """A value that cannot be written: its place, and its type."""

    def __init__(self, where: str, value: Any) -> None:
        self.where = where
        self.kind = type(value).__name__
        if isinstance(value, Tensor) and value.layout != torch.strided:
            self.kind = "sparse tensor"
        super().__init__(f"{where} is a {self.kind}")


def take_apart(value: Any, where: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return a value as JSON, and put its tensors into `tensors`, live, under their places in it.

    Without `tensors` they are written into the JSON, which is for small ones. Values are numbers,
    booleans, texts, None, dtypes, tensors, and lists, tuples and dicts of them. Types are compared
    exactly: a subclass would come back as its parent. Raises Unsupported for other types.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        # JSON has no word for infinities and NaN.
        if not math.isfinite(value):
            return {"": "float", "text": repr(value)}
        return value
    if isinstance(value, _NUMPY):
        return {"": "numpy", "dtype": value.dtype.name, "value": take_apart(value.item(), where)}
    if isinstance(value, torch.dtype):
        return {"": "dtype", "name": _name_of(value)}
    if type(value) is Tensor and value.layout == torch.strided:
        if tensors is None:
            return _inline(value)
        tensors[where] = value.detach()
        return {"": "tensor", "name": where, "device": value.device.type}
    if type(value) in (list, tuple):
        items = [take_apart(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"": "tuple", "items": items}
        return items

    kind = type(value).__name__
    if kind not in _DICTS or not isinstance(value, dict):
        raise Unsupported(where, value)
    if kind == "dict" and all(type(key) is str and key for key in value):
        return {key: take_apart(item, f"{where}/{key}", tensors) for key, item in value.items()}
    # Keys that JSON would turn into text, or that would be taken for the name of a type.
    pairs = []
    for key, item in value.items():
        if key is not None and type(key) not in _KEYS:
            raise Unsupported(f"a key of {where}", key)
        taken = take_apart(item, f"{where}/{key}", tensors)
        pairs.append([take_apart(key, f"a key of {where}"), taken])
    return {"": kind, "items": pairs}


def put_together(
    data: Any, tensors: Mapping[str, Tensor] | None = None, device: torch.device | None = None
) -> Any:
    """Return the value that `take_apart` was given.

    Named tensors are those of `tensors`, uncopied. With `device` they are copies: there, but on the
    CPU those that were on a CPU. Raises LookupError for a tensor that is missing, or
    for a type that is not known.
    """
    if isinstance(data, list):
        return [put_together(item, tensors, device) for item in data]
    if not isinstance(data, dict):
        return data
    kind = data.get("")
    if kind is None:
        return {key: put_together(item, tensors, device) for key, item in data.items()}
    if kind == "float":
        return float(data["text"])
    if kind == "numpy":
        return np.dtype(data["dtype"]).type(put_together(data["value"]))
    if kind == "dtype":
        return _DTYPES[data["name"]]
    if kind == "tuple":
        return tuple(put_together(item, tensors, device) for item in data["items"])
    if kind == "tensor" and "name" in data:
        tensor = (tensors or {})[data["name"]]
        if device is None:
            return tensor
        target = torch.device("cpu") if data["device"] == "cpu" else device
        return tensor.to(target, copy=True)
    if kind == "tensor":
        return _outline(data)
    pairs = []
    for key, item in data["items"]:
        pairs.append((put_together(key), put_together(item, tensors, device)))
    return _DICTS[kind](pairs)


def tensors_within(data: Any) -> Iterator[str]:
    """Yield the names of the tensors that `take_apart` has put beside the JSON `data`."""
    if isinstance(data, list):
        for item in data:
            yield from tensors_within(item)
    elif isinstance(data, dict):
        if data.get("") == "tensor":
            if "name" in data:
                yield data["name"]
        else:
            yield from tensors_within([*data.values()])


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _inline(tensor: Tensor) -> dict[str, Any]:
    # As bytes, because numpy lacks bfloat16.
    data = bytes_of(tensor).cpu().numpy().tobytes()
    return {
        "": "tensor",
        "dtype": _name_of(tensor.dtype),
        "shape": list(tensor.shape),
        "data": base64.b64encode(data).decode(),
    }


def _outline(data: Mapping[str, Any]) -> Tensor:
    dtype = _DTYPES[data["dtype"]]
    flat = torch.empty(0, dtype=dtype)
    raw = bytearray(base64.b64decode(data["data"]))
    if raw:  # frombuffer refuses an empty buffer
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    return flat.reshape(data["shape"]).clone()
