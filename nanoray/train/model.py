"""The model of a run as the loop needs it: its number format, its compiled layers; and torch's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nanoray.config import Config
from nanoray.models.fp8 import use_fp8
from nanoray.models.precision import float32_products, weight_type
from nanoray.parallel.compile import compile_layers
from nanoray.train.tasks import Task


def new_model(task: Task, config: Config, device: torch.device) -> nn.Module:
    """Return a model with initial weights."""
    model = task.model().to(device)
    # Weights of 16 bits, or fp8 products of weights that stay float32.
    if config.pure:
        model.to(weight_type(config.precision))
    elif config.precision == "fp8":
        use_fp8(model, config.fp8_scaling)
    if config.compile:
        compile_layers(model, config)
    return model


def use_products(device: torch.device, precision: str) -> None:
    """Set how exact float32 matrix products and convolutions are on a GPU."""
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision(float32_products(precision))
    # Convolutions have a setting of their own.
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


@contextmanager
def settings_put_back() -> Iterator[None]:
    """Put back at the end what a rank sets in torch: a program that trained may compute more itself."""
    threads = torch.get_num_threads()
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
