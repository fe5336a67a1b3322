"""A small dataset of generated images, runs of a ResNet on it, and norms on a pool's ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.cifar10 import generate, store_images
from nanoray.data.dataset import DatasetInfo
from nanoray.models.batch_norm import adopt_norms
from nanoray.parallel.axis import data_axis
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.running_statistics import RunningStatistics

TRAIN, VAL = 100, 40  # images: an epoch is no multiple of a batch
TINY = {
    "model": "resnet",
    "resnet_depth": 8,
    "global_batch_size": 24,
    "max_steps": 8,  # an epoch ends in the 5th step
    "warmup_steps": 2,
    "optimizer": "sgd",
    "momentum": 0.9,
    "lr": 0.05,
    "weight_decay": 5e-4,
    "grad_clip": 0.0,
    "log_every": 1,
    "eval_every": 4,
    "eval_samples": 40,
    "checkpoint_every": 0,
    "tensorboard": False,
    "timeout_s": 20,
    "init_timeout_s": 20,
}


def small_dataset(folder: Path, train: int = TRAIN, val: int = VAL) -> DatasetInfo:
    """Write a dataset of so many generated images."""
    return store_images("small", "small", folder, generate(0, train), generate(train, val))


def image_spec(images: DatasetInfo, out_dir: Path, **overrides: Any) -> RunSpec:
    """Open a run of the tiny recipe on a small dataset."""
    config = make_config(
        TINY
        | {"name": "images", "dataset": "cifar10-generated", "out_dir": str(out_dir)}
        | overrides
    )
    return open_run(config, images, time.time())


def norm_layer(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Run one BatchNorm on this rank's part of a batch, forward and backward; emit all results."""
    torch.manual_seed(1)
    x, dy = (torch.randn(order["batch"], 5, 3, 4) * 3 + 2 for _ in range(2))  # the whole batch
    norm, axis = torch.nn.BatchNorm2d(5), data_axis(mesh)
    adopt_norms(norm)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, 5))
        norm.bias.copy_(torch.linspace(-1.0, 1.0, 5))
    statistics = RunningStatistics(torch.nn.Sequential(norm), axis, order["synchronised"])
    share_of = order["batch"] // mesh.world_size
    part = slice(mesh.rank * share_of, (mesh.rank + 1) * share_of)
    own = x[part].clone().requires_grad_()
    y = norm(own)
    y.backward(dy[part])
    assert norm.running_var is not None
    before = norm.running_var.clone()
    statistics.add_up()
    statistics.commit()
    assert norm.weight.grad is not None
    assert norm.bias.grad is not None
    assert own.grad is not None
    everyone = mesh.gather(
        {
            "y": y.detach(),
            "dx": own.grad,
            "dw": norm.weight.grad,
            "db": norm.bias.grad,
            "mean": norm.running_mean,
            "var": norm.running_var,
            "early": not torch.equal(before, torch.ones(5)),
        }
    )
    if everyone is not None:
        plain = {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in _joined(everyone)
        }
        emit(
            plain
            | {"equal_stats": all(torch.equal(r["var"], everyone[0]["var"]) for r in everyone)}
        )


def _joined(everyone: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    together = [(key, torch.cat([rank[key] for rank in everyone])) for key in ("y", "dx")]
    together += [(key, sum(rank[key] for rank in everyone)) for key in ("dw", "db")]
    return [*together, *((key, everyone[0][key]) for key in ("mean", "var", "early"))]
